"""The agent's own series: which collectors run, how they fare, and what the agent costs."""

from __future__ import annotations

import platform
import threading
from typing import TYPE_CHECKING, ClassVar, Protocol

from agent import __version__
from agent.api import Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.api import Context, Out, Series
    from agent.derive import View
    from agent.job import Job

BY_COLLECTOR = ("collector",)

BUILD = Metric("hpcwatch_build_info", Kind.GAUGE, "Always 1; the labels tell the version.", ("version", "python"))
ENABLED = Metric(
    "hpcwatch_collector_enabled",
    Kind.GAUGE,
    "1 if the collector is on: configured, or its hardware is here, was here before, or is expected.",
    BY_COLLECTOR,
)
UP = Metric(
    "hpcwatch_collector_up",
    Kind.GAUGE,
    "1 if the collector's last run succeeded as a whole. Exists only for enabled collectors.",
    BY_COLLECTOR,
)
LAST_SUCCESS = Metric(
    "hpcwatch_collector_last_success_timestamp_seconds",
    Kind.GAUGE,
    "Start of the collector's last successful run.",
    BY_COLLECTOR,
    unit="seconds",
)
DURATION = Metric(
    "hpcwatch_collector_duration_seconds",
    Kind.GAUGE,
    "How long the collector's last successful run took.",
    BY_COLLECTOR,
    unit="seconds",
)
ERRORS = Metric(
    "hpcwatch_collector_errors_total",
    Kind.COUNTER,
    "Failures of the collector or of one of its devices or files; one that lasts counts at every run.",
    BY_COLLECTOR,
)
TIMEOUTS = Metric(
    "hpcwatch_collector_timeouts_total",
    Kind.COUNTER,
    "Runs that overran the collector's timeout and were given up.",
    BY_COLLECTOR,
)
POINTS = Metric("hpcwatch_collector_series", Kind.GAUGE, "Series of the collector's last run.", BY_COLLECTOR)
WORKER_RESTARTS = Metric(
    "hpcwatch_worker_restarts_total",
    Kind.COUNTER,
    "Times a collector's own process was replaced: it hung, crashed, or had a driver loaded that is no longer there.",
    BY_COLLECTOR,
)
WORKER_STUCK = Metric(
    "hpcwatch_worker_stuck",
    Kind.GAUGE,
    "Processes of the collector that hang in the kernel and cannot be killed; at two no more are started.",
    BY_COLLECTOR,
)
WORKER_CPU = Metric(
    "hpcwatch_worker_cpu_seconds_total",
    Kind.COUNTER,
    "Processor time of the collector's own processes, user and system; of one that was killed, as of its last run.",
    BY_COLLECTOR,
    unit="seconds",
)
WORKER_MEMORY = Metric(
    "hpcwatch_worker_resident_memory_bytes",
    Kind.GAUGE,
    "Resident memory of the collector's own process.",
    BY_COLLECTOR,
    unit="bytes",
    source="/proc/self/statm",
)
EVENTS = Metric("hpcwatch_events_recorded_total", Kind.COUNTER, "Events recorded since the agent started.")
REFUSED = Metric(
    "hpcwatch_exposition_refused_series",
    Kind.GAUGE,
    "Series left off the page because an equal or contradicting one stands there already.",
)
RELOAD_OK = Metric(
    "hpcwatch_config_last_reload_successful",
    Kind.GAUGE,
    "1 if the configuration was read without error the last time; 0 means the one before is still in force.",
)
RELOAD_AT = Metric(
    "hpcwatch_config_last_reload_success_timestamp_seconds",
    Kind.GAUGE,
    "When the configuration in force was read.",
    unit="seconds",
)
STATE_WRITABLE = Metric(
    "hpcwatch_state_writable", Kind.GAUGE, "0 if agent.state_dir cannot be written: a restart will forget."
)
CPU = Metric(
    "hpcwatch_process_cpu_seconds_total", Kind.COUNTER, "Processor time of the agent, user and system.", unit="seconds"
)
MEMORY = Metric(
    "hpcwatch_process_resident_memory_bytes",
    Kind.GAUGE,
    "Resident memory of the agent.",
    unit="bytes",
    source="/proc/self/statm",
)
THREADS = Metric("hpcwatch_process_threads", Kind.GAUGE, "Threads of the agent, stuck ones included.")
DESCRIPTORS = Metric(
    "hpcwatch_process_open_fds",
    Kind.GAUGE,
    "Open file descriptors of the agent, counted once a minute.",
    source="/proc/self/fd",
)
STARTED = Metric(
    "hpcwatch_process_start_time_seconds", Kind.GAUGE, "When the agent started, since the epoch.", unit="seconds"
)
DESCRIPTORS_EVERY_S = 60.0


class Process(Protocol):
    """What the agent's process uses (agent.hw.process)."""

    started_at: float

    def resident_bytes(self) -> int | None:
        """Resident memory."""

    def cpu_seconds(self) -> float:
        """Processor time."""

    def open_descriptors(self) -> int | None:
        """Open descriptors."""


class Worker(Protocol):
    """What the processes of one collector used (agent.remote.Usage)."""

    restarts: int
    resident_bytes: int | None

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all of them."""

    def stuck(self) -> int:
        """How many hang and cannot be killed."""


class Health(Protocol):
    """What the agent knows of its own configuration, memory and page."""

    reload_ok: bool
    reload_at: float

    @property
    def disabled(self) -> Mapping[str, str]:
        """The collectors that are installed but off, each with the reason."""

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The collectors that run in processes of their own."""

    @property
    def state_writable(self) -> bool | None:
        """Whether what should survive a restart can be kept; None when nothing is to be kept."""

    @property
    def events_total(self) -> int:
        """Events recorded since the start."""

    @property
    def refused_series(self) -> int:
        """Series left off the page."""


class SelfMetrics:
    """The agent's own series as a derivation."""

    name: ClassVar[str] = "hpcwatch"
    metrics: ClassVar[Sequence[Metric]] = (
        *(BUILD, ENABLED, UP, LAST_SUCCESS, DURATION, ERRORS, TIMEOUTS, POINTS, EVENTS, REFUSED),
        *(WORKER_RESTARTS, WORKER_STUCK, WORKER_CPU, WORKER_MEMORY),
        *(RELOAD_OK, RELOAD_AT, STATE_WRITABLE, CPU, MEMORY, THREADS, DESCRIPTORS, STARTED),
    )

    def __init__(self, ctx: Context, process: Process, health: Callable[[], Health]) -> None:
        self._ctx = ctx
        self._process = process
        self._health = health
        self._build = ctx.series(BUILD, __version__, platform.python_version())
        self._plain = {metric: ctx.series(metric) for metric in self.metrics if not metric.labels}
        self._handles: dict[str, dict[Metric, Series]] = {}
        self._descriptors: int | None = None
        self._descriptors_due_s = 0.0

    def derive(self, view: View, out: Out) -> None:
        """Add the agent's series."""
        out.add(self._build, 1)
        health = self._health()
        for job in view.jobs:
            self._add_job(job, out)
        for name in health.disabled:
            out.add(self._of(name)[ENABLED], 0)
        for name, worker in health.workers.items():
            self._add_worker(self._of(name), worker, out)
        self._add_health(health, out)
        self._add_process(out)

    def _of(self, collector: str) -> dict[Metric, Series]:
        handles = self._handles.get(collector)
        if handles is None:
            per_collector = [metric for metric in self.metrics if metric.labels == BY_COLLECTOR]
            handles = {metric: self._ctx.series(metric, collector) for metric in per_collector}
            self._handles[collector] = handles
        return handles

    def _add_job(self, job: Job, out: Out) -> None:
        handles = self._of(job.name)
        enabled = job.enabled
        out.add(handles[ENABLED], int(enabled))
        if not enabled:
            return
        out.add(handles[UP], int(job.up))
        out.add(handles[ERRORS], job.errors)
        out.add(handles[TIMEOUTS], job.evictions)
        out.add(handles[POINTS], job.points)
        if job.last_success_at is not None:
            out.add(handles[LAST_SUCCESS], round(job.last_success_at, 3))
        if job.duration_s is not None:
            out.add(handles[DURATION], round(job.duration_s, 6))

    @staticmethod
    def _add_worker(handles: dict[Metric, Series], worker: Worker, out: Out) -> None:
        out.add(handles[WORKER_RESTARTS], worker.restarts)
        out.add(handles[WORKER_STUCK], worker.stuck())
        out.add(handles[WORKER_CPU], round(worker.cpu_seconds, 3))
        if worker.resident_bytes is not None:
            out.add(handles[WORKER_MEMORY], worker.resident_bytes)

    def _add_health(self, health: Health, out: Out) -> None:
        plain = self._plain
        out.add(plain[EVENTS], health.events_total)
        out.add(plain[REFUSED], health.refused_series)
        out.add(plain[RELOAD_OK], int(health.reload_ok))
        out.add(plain[RELOAD_AT], round(health.reload_at, 3))
        if health.state_writable is not None:
            out.add(plain[STATE_WRITABLE], int(health.state_writable))

    def _add_process(self, out: Out) -> None:
        plain = self._plain
        now_s = self._ctx.clock.monotonic()
        if now_s >= self._descriptors_due_s:
            self._descriptors, self._descriptors_due_s = self._process.open_descriptors(), now_s + DESCRIPTORS_EVERY_S
        out.add(plain[CPU], round(self._process.cpu_seconds(), 3))
        out.add(plain[THREADS], threading.active_count())
        out.add(plain[STARTED], round(self._process.started_at, 3))
        resident_bytes = self._process.resident_bytes()
        if resident_bytes is not None:
            out.add(plain[MEMORY], resident_bytes)
        if self._descriptors is not None:
            out.add(plain[DESCRIPTORS], self._descriptors)
