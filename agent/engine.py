"""The node's collectors, snapshots, derivations and events, without sockets or signals: what `run` and `once` share."""

from __future__ import annotations

import logging
import os
import socket
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import sizes
from agent.advice import advise
from agent.api import Lane
from agent.context import NodeContext, SystemClock
from agent.derive import Derivation, View
from agent.derive.selfmetrics import SelfMetrics
from agent.events import Ring
from agent.exposition import Exposition
from agent.hw.process import OwnProcess
from agent.hw.procfs import boot_id
from agent.job import DEVICE_SLACK_S, Job
from agent.plan import Plan, Spec, plan
from agent.registry import PluginError
from agent.remote import Remote, Usage, usage
from agent.schedule import Scheduler
from agent.snapshot import Batch, Store, describe
from agent.state import StateDir
from agent.worker import Assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from agent.api import Clock, Collector, Event
    from agent.config.settings import Settings
    from agent.events import Recorded
    from agent.registry import Plugin

HIDDEN_WITHOUT_NODE_NAMES = ("node_infiniband_",)
FLUSH_PATIENCE_S = 1.0

log = logging.getLogger("agent")


class Engine:
    """Builds everything from settings and keeps it running. `start`, then `check` from one supervising thread.

    `look_once` runs every collector a single time and keeps no state. `only` limits the collectors by name.
    `node` is what the node is called, if not by its host name.
    `child_setup` is what a collector's own process does first; it is pickled.
    """

    def __init__(
        self,
        settings: Settings,
        plugins: Mapping[str, Plugin],
        *,
        child_setup: Callable[[], None],
        clock: Clock | None = None,
        look_once: bool = False,
        only: Collection[str] = (),
        node: str = "",
    ) -> None:
        self.node = node or socket.gethostname()
        self.settings = settings
        self.clock = SystemClock() if clock is None else clock
        self.reload_ok = True
        self.reload_at = self.clock.wall()
        self._plugins = plugins
        self._only = only
        self._look_once = look_once
        self._run_id = os.urandom(8).hex()
        self._child_setup = child_setup
        self._state = StateDir(Path(settings.agent.state_dir), read_only=look_once)
        self.store = Store()
        self.ring = Ring(self._state.file("events"), self.clock, settings.agent.labels)
        hidden = () if settings.prometheus.names.node_infiniband else HIDDEN_WITHOUT_NODE_NAMES
        self.exposition = Exposition(self.store, hidden, self._declared_by)
        self.scheduler = Scheduler(self.store, self.clock, self.emit, self.after_tick, once=look_once)
        self._presence = self._state.file("presence")
        self._boot_id = _boot_id(Path(settings.agent.procfs))
        self._present = self._present_before()
        self._new_events: list[Recorded] = []
        self._derive_lock = threading.Lock()
        self._ticked = threading.Event()
        self._first_round_done = False
        context = self._context("hpcwatch", self._facts("hpcwatch", 0.0, 0.0))
        self._derivations: list[Derivation] = [SelfMetrics(context, OwnProcess(), lambda: self)]
        self._derive_failures: dict[str, str] = {}
        self._plan = self._make_plan(settings)
        self._advise()

    @property
    def disabled(self) -> Mapping[str, str]:
        """The collectors that are installed but off, each with the reason."""
        return self._plan.off

    @property
    def state_writable(self) -> bool | None:
        """False when what should survive a restart cannot be kept; None when nothing is to be kept."""
        return None if self._look_once else not self._state.problem

    @property
    def workers(self) -> Mapping[str, Usage]:
        """What those collectors use that run in processes of their own."""
        return {
            name: usage[name]
            for name, (spec, _) in self.collectors.items()
            if spec.lane is Lane.PROCESS and name in usage
        }

    @property
    def events_total(self) -> int:
        """Events recorded since the start."""
        return self.ring.total

    @property
    def refused_series(self) -> int:
        """Series left off the page because they contradict others."""
        return self.exposition.refused

    @property
    def collectors(self) -> Mapping[str, tuple[Spec, Job]]:
        """Every collector that is on, with its job."""
        jobs = dict(self.scheduler.jobs)  # a reload in another thread changes it
        return {name: (spec, jobs[name]) for name, spec in self._plan.specs.items() if name in jobs}

    @property
    def first_round_done(self) -> bool:
        """True once every collector has run, or was given up, and the page tells. A reload does not undo it."""
        return self._first_round_done

    @property
    def progressing(self) -> bool:
        """False when a lane that is not known to hang has missed its turn for long: then a restart is the cure."""
        return self.scheduler.progressing

    def wait_for_first_round(self) -> None:
        """Block until every collector ran or was given up; watches the deadlines meanwhile."""
        while not self.first_round_done:
            again_s = self.scheduler.check()
            self._ticked.wait(max(0.0, again_s - self.clock.monotonic()))
            self._ticked.clear()

    def start(self) -> None:
        """Start all lanes. Returns at once."""
        self.scheduler.start(self.make_jobs())
        self.after_tick()

    def make_jobs(self) -> list[Job]:
        """Make the jobs of the plan. `start` does it; a benchmark runs them itself."""
        return [self._job(spec) for spec in self._plan.specs.values()]

    def check(self) -> float:
        """Watch deadlines; return the monotonic time in seconds at which to look again."""
        return self.scheduler.check()

    def stop(self) -> None:
        """Let all lanes end; waits a moment for those that can."""
        self.scheduler.stop()
        self._state.flush(FLUSH_PATIENCE_S)

    def emit(self, events: Iterable[Event]) -> None:
        """Record events. Any thread may call."""
        recorded = self.ring.record(events)
        with self._derive_lock:
            self._new_events += recorded

    def reload(self, settings: Settings) -> None:
        """Go over to new settings: collectors whose settings did not change run on untouched. Raises ConfigError."""
        fresh = self._make_plan(settings)
        same_node = _roots(settings) == _roots(self.settings)
        old = self._plan.specs
        kept = {name for name, spec in fresh.specs.items() if same_node and old.get(name) == spec}
        self.settings = settings
        self._advise()
        for name in list(self.scheduler.jobs):
            if name not in kept:
                self.scheduler.remove(name)
        self._plan = fresh
        self.scheduler.start([self._job(spec) for name, spec in fresh.specs.items() if name not in kept])
        self.after_tick()

    def note_reload(self, *, ok: bool) -> None:
        """Remember how the last reading of the configuration went."""
        self.reload_ok = ok
        if ok:
            self.reload_at = self.clock.wall()
        self.after_tick()

    def _declared_by(self) -> Mapping[str, str]:
        named = [(derivation.name, derivation.metrics) for derivation in self._derivations]
        named += [(name, spec.collector.metrics) for name, spec in self._plan.specs.items()]
        return {metric.name: name for name, metrics in named for metric in metrics}

    def _advise(self) -> None:
        for line in advise(self.settings):
            log.warning("%s", line)

    def _make_plan(self, settings: Settings) -> Plan:
        own = [metric for derivation in self._derivations for metric in derivation.metrics]
        return plan(settings, self._plugins, own, self._only)

    def _facts(self, name: str, interval_s: float, timeout_s: float) -> dict[str, Any]:
        """Return what of a context can be sent to another process."""
        agent = self.settings.agent
        return {
            "log": logging.getLogger(name),
            "sys": Path(agent.sysfs),
            "proc": Path(agent.procfs),
            "dev": Path(agent.devfs),
            "kmsg": Path(agent.kmsg),
            "clock": self.clock,
            "vm_size": None if agent.sku == "auto" else sizes.load(agent.sku),
            "interval_s": interval_s,
            "timeout_s": timeout_s,
            "run_id": self._run_id,
        }

    def _context(self, name: str, facts: Mapping[str, Any]) -> NodeContext:
        return NodeContext(**facts, state=self._state.file(f"collector-{name}"), inventory=self.store.inventory)

    def _job(self, spec: Spec) -> Job:
        remote = spec.lane is Lane.PROCESS
        job = Job(
            spec.name,
            partial(self._make_remote if remote else self._make_local, spec),
            lane=spec.lane,
            interval_s=spec.interval_s,
            timeout_s=spec.timeout_s + DEVICE_SLACK_S if remote else spec.timeout_s,
            required=spec.required,
            isolates_devices=spec.collector.isolates_devices and not remote,
            times_devices=remote,
        )
        job.was_present = spec.name in self._present
        return job

    def _make_local(self, spec: Spec) -> Collector:
        if spec.broken:
            raise PluginError(spec.broken)
        facts = self._facts(spec.name, spec.interval_s, spec.timeout_s)
        return spec.collector(spec.options, self._context(spec.name, facts))

    def _make_remote(self, spec: Spec) -> Collector:
        facts = self._facts(spec.name, spec.interval_s, spec.timeout_s)
        assignment = Assignment(spec.collector, spec.options, facts, self._child_setup)
        return Remote(assignment, self._context(spec.name, facts))

    def _present_before(self) -> set[str]:
        kept = self._presence.load()
        names = kept.get("collectors")
        if not self._boot_id or kept.get("boot_id") != self._boot_id or not isinstance(names, list):
            return set()
        return {name for name in names if isinstance(name, str)}

    def after_tick(self) -> None:
        """Run the derivations and remember which hardware was seen on this boot."""
        with self._derive_lock:
            jobs = list(self.scheduler.jobs.values())
            first_round_done = all(job.runs or job.evictions for job in jobs)
            present = self._present | {job.name for job in jobs if job.was_present}
            if present != self._present:
                self._present = present
                self._presence.save({"boot_id": self._boot_id, "collectors": sorted(present)})
            events, self._new_events = self._new_events, []
            _, snapshots = self.store.latest()
            view = View(self.clock.wall(), snapshots, jobs, events)
            for derivation in self._derivations:
                self._derive(derivation, view)
            self._first_round_done = self._first_round_done or first_round_done
        self._state.retry()
        self._ticked.set()

    def _derive(self, derivation: Derivation, view: View) -> None:
        batch = Batch()
        try:
            derivation.derive(view, batch)
        except Exception as error:  # noqa: BLE001 - one derivation costs itself
            self._tell(derivation.name, describe(error))
            self.store.drop(derivation.name)
            return
        self._tell(derivation.name, "")
        self.store.put(batch.finish(derivation.name, view.now))
        self._new_events += self.ring.record(batch.events)

    def _tell(self, name: str, problem: str) -> None:
        if problem != self._derive_failures.get(name, ""):
            self._derive_failures[name] = problem
            if problem:
                log.error("derivation %s failed: %s; its series are gone until it works", name, problem)
            else:
                log.info("derivation %s works again", name)


def _boot_id(proc: Path) -> str:
    """Return this boot's id; empty where it cannot be read: then nothing counts as seen before."""
    try:
        return boot_id(proc)
    except (OSError, ValueError):
        return ""


def _roots(settings: Settings) -> tuple[str, ...]:
    """Return what every collector gets from `agent` besides its interval: where to look, and what to expect."""
    agent = settings.agent
    return agent.sysfs, agent.procfs, agent.devfs, agent.kmsg, agent.sku
