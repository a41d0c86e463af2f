"""Collectors under policy: the wall-clock grid, deadlines, eviction, retry, and logging on change.

A `Job` is one collector with its state. A `LaneRunner` is a thread that runs jobs when they are due. The supervisor
(`Scheduler.check`, called from the main thread) evicts a job that overran its deadline: the thread that hangs keeps
that job alone, and a new thread takes over the other jobs of its lane. When the stuck call returns, its thread goes on
as that job's own. So a hang costs one thread and one collector, whatever the lane was.
"""

from __future__ import annotations

import enum
import logging
import threading
from typing import TYPE_CHECKING

from agent.api import Lane, NotPresent
from agent.snapshot import Batch, EvictedError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agent.api import Clock, Collector, Event
    from agent.snapshot import Store

RESCAN_S = 60.0
LONGEST_WAIT_S = 3600.0
OVERDUE_S = 60.0
STOP_PATIENCE_S = 1.0
TOGETHER_S = 0.05  # jobs due this close to each other run in one wake-up


class JobState(enum.Enum):
    """What became of a collector's last run."""

    STARTING = "starting"
    OK = "ok"
    ABSENT = "absent"  # the hardware is not here
    FAILED = "failed"  # raised
    HUNG = "hung"  # overran its deadline and has not returned


class Job:
    """One collector: when it is due, how long it may take, what became of it.

    `make` builds the collector; it is called again after a failure to open. `required` says that the configuration
    wants it whether the hardware shows or not.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Collector],
        *,
        lane: Lane,
        interval_s: float,
        timeout_s: float,
        required: bool = False,
    ) -> None:
        self.name = name
        self.make = make
        self.lane = lane
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self.required = required
        self.log = logging.getLogger(name)
        self.state = JobState.STARTING
        self.reason = ""
        self.found = ""
        self.was_present = False
        self.last_success_at: float | None = None
        self.duration_s: float | None = None
        self.points = 0
        self.runs = 0
        self.errors = 0
        self.evictions = 0
        self.due_s = 0.0  # monotonic
        self.started_s: float | None = None  # monotonic; None while not running
        self.batch = Batch()
        self.runner: LaneRunner | None = None
        self._collector: Collector | None = None
        self._opened_s = 0.0
        self._open = False
        self._failing: dict[str, str] = {}

    @property
    def enabled(self) -> bool:
        """True when it runs, or ran before, or is required: hardware that went missing does not switch it off."""
        return self.required or self.was_present or self.state in (JobState.OK, JobState.FAILED, JobState.HUNG)

    @property
    def up(self) -> bool:
        """True when the last run produced a snapshot. A failed device does not make its collector down."""
        return self.state is JobState.OK

    def run(self, store: Store, clock: Clock, emit: Callable[[Sequence[Event]], None]) -> None:
        """Open if need be, collect once, publish. Never raises."""
        batch = self.batch = Batch()
        taken_at = clock.wall()
        self.started_s = clock.monotonic()
        try:
            state, reason = self._attempt(batch, clock)
        finally:
            duration_s = clock.monotonic() - self.started_s
            self.started_s = None
        if state is JobState.OK:
            snapshot = batch.finish(self.name, taken_at)
            if not store.put(snapshot, batch):
                state, reason = JobState.STARTING, "returned after its deadline"
            else:
                self.points = len(snapshot.series)
                self.duration_s, self.last_success_at = duration_s, taken_at
                self.was_present = True
        elif batch.evicted:
            state, reason = JobState.STARTING, "returned after its deadline"
        if state is not JobState.OK:
            store.drop(self.name)
            self.points = 0
        self.runs += 1
        self._settle(state, reason, batch)
        if batch.events and not batch.evicted:
            emit(batch.events)

    def evict(self, store: Store, after_s: float) -> None:
        """Give up on the run in progress: its series vanish, and whatever it still brings is refused."""
        device = f" on {self.batch.device}" if self.batch.device else ""
        store.evict(self.batch, self.name)
        self.state, self.reason = JobState.HUNG, f"no answer within {after_s:g} s{device}"
        self.points = 0
        self.errors += 1
        self.evictions += 1
        self.log.error("collector %s: %s; its series are gone until the call returns", self.name, self.reason)

    def close(self) -> None:
        """Release the collector, if it is not in the middle of something."""
        if self._collector is not None and self.started_s is None:
            self._release()

    def _attempt(self, batch: Batch, clock: Clock) -> tuple[JobState, str]:
        try:
            self._ensure_open(clock.monotonic())
            self._collector.collect(batch)  # type: ignore[union-attr] # made by _ensure_open
        except NotPresent as absence:
            self._release()
            return JobState.ABSENT, str(absence)
        except EvictedError:
            return JobState.STARTING, ""
        except BaseException as error:  # noqa: BLE001 - a plug-in may even call sys.exit; it costs itself, not the lane
            self._open = False
            self.log.debug("collector %s failed", self.name, exc_info=error)
            return JobState.FAILED, describe(error)
        return JobState.OK, ""

    def _ensure_open(self, now_s: float) -> None:
        if self._collector is None:
            self._collector = self.make()
        if not self._open or now_s - self._opened_s >= RESCAN_S - TOGETHER_S:
            self._open = False
            self._collector.open()
            self._open, self._opened_s = True, now_s
            self.found = self._collector.found()

    def _release(self) -> None:
        collector, self._collector, self._open = self._collector, None, False
        try:
            if collector is not None:
                collector.close()
        except Exception as error:  # noqa: BLE001 - closing is a courtesy; the collector is gone either way
            self.log.warning("collector %s: close failed: %s", self.name, describe(error))

    def _settle(self, state: JobState, reason: str, batch: Batch) -> None:
        """Count every failure, log only what changed."""
        failing = dict(batch.failures)
        self.errors += len(batch.failures) + (state is JobState.FAILED)
        for what, text in failing.items():
            if self._failing.get(what) != text:
                self.log.warning("%s: %s: %s", self.name, what, text)
        for what in self._failing.keys() - failing.keys():
            self.log.info("%s: %s: no longer failing", self.name, what)
        self._failing = failing
        if (state, reason) != (self.state, self.reason):
            self._log_state(state, reason)
        self.state, self.reason = state, reason

    def _log_state(self, state: JobState, reason: str) -> None:
        if state is JobState.FAILED:
            self.log.error("collector %s failed: %s; tried again in %g s", self.name, reason, self.interval_s)
        elif state is JobState.ABSENT:
            level = logging.WARNING if self.enabled else logging.INFO
            self.log.log(level, "collector %s: not present: %s; looked for again every minute", self.name, reason)
        elif state is JobState.OK:
            found = f": {self.found}" if self.found else ""
            self.log.info("collector %s: running every %g s%s", self.name, self.interval_s, found)


class LaneRunner:
    """A thread that runs its jobs one after the other whenever they are due."""

    def __init__(self, scheduler: Scheduler, jobs: Iterable[Job], name: str) -> None:
        self.jobs = list(jobs)
        self.name = name
        self.wake = threading.Event()
        self._scheduler = scheduler
        for job in self.jobs:
            job.runner = self
        self._thread = threading.Thread(target=self._loop, name=f"lane-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, at most so long."""
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        scheduler, clock = self._scheduler, self._scheduler.clock
        while self.jobs and not scheduler.stopping:
            until_s = clock.monotonic() + TOGETHER_S
            due = [job for job in self.jobs if job.due_s <= until_s]
            for job in due:
                if job.runner is self and not scheduler.stopping:
                    job.run(scheduler.store, clock, scheduler.emit)
                    job.due_s = scheduler.next_due_s(job)
            if due:
                scheduler.after_tick()
            if self.jobs:
                wait_s = min(job.due_s for job in self.jobs) - clock.monotonic()
                self.wake.wait(min(max(0.0, wait_s), LONGEST_WAIT_S))
                self.wake.clear()
        for job in self.jobs:
            job.close()


class Scheduler:
    """All jobs, their lanes, and the deadline watch. `after_tick` and `emit` are called in lane threads."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        emit: Callable[[Sequence[Event]], None],
        after_tick: Callable[[], None],
        *,
        once: bool = False,
    ) -> None:
        self.store = store
        self.clock = clock
        self.emit = emit
        self.after_tick = after_tick
        self.stopping = False
        self.jobs: dict[str, Job] = {}
        self._once = once
        self._runners: list[LaneRunner] = []

    def start(self, jobs: Sequence[Job]) -> None:
        """Run these jobs at once and from then on along the grid."""
        self.jobs.update({job.name: job for job in jobs})
        shared = [job for job in jobs if job.lane is Lane.SHARED]
        if shared:
            self._launch(shared, "shared")
        for job in jobs:
            if job.lane is not Lane.SHARED:
                self._launch([job], job.name)

    def remove(self, name: str) -> None:
        """Stop one job: its series vanish, its thread ends when it returns."""
        job = self.jobs.pop(name)
        self.store.evict(job.batch, name)
        runner = job.runner
        job.runner = None
        if runner is not None:
            runner.jobs.remove(job)
            runner.wake.set()

    @property
    def progressing(self) -> bool:
        """False when a job that is neither running nor hung is overdue for long: its lane has died."""
        now_s = self.clock.monotonic()
        jobs = list(self.jobs.values())
        patience_s = OVERDUE_S + sum(job.timeout_s for job in jobs)
        return all(job.started_s is not None or now_s - job.due_s < patience_s for job in jobs if job.runs)

    def stop(self) -> None:
        """Let every lane end after what it is doing. Waits a moment for them; stuck ones are left behind."""
        self.stopping = True
        for runner in self._runners:
            runner.wake.set()
        patience_s = self.clock.monotonic() + STOP_PATIENCE_S
        for runner in self._runners:
            runner.join(max(0.0, patience_s - self.clock.monotonic()))

    def next_due_s(self, job: Job) -> float:
        """Return the monotonic time of the job's next point on the wall-clock grid: the same on every node."""
        if self._once:
            return float("inf")
        interval_s = max(job.interval_s, RESCAN_S) if job.state is JobState.ABSENT else job.interval_s
        if job.batch.evicted:
            return self.clock.monotonic()
        wall = self.clock.wall()
        return self.clock.monotonic() + (interval_s - wall % interval_s)

    def check(self) -> float:
        """Evict what overran its deadline; return the monotonic time at which to check again."""
        now_s = self.clock.monotonic()
        again_s = now_s + RESCAN_S
        for job in list(self.jobs.values()):
            started_s = job.started_s
            if started_s is None:
                again_s = min(again_s, max(job.due_s, now_s) + job.timeout_s)
            elif job.state is not JobState.HUNG or not job.batch.evicted:
                if now_s - started_s >= job.timeout_s:
                    self._evict(job)
                else:
                    again_s = min(again_s, started_s + job.timeout_s)
        return again_s

    def _evict(self, job: Job) -> None:
        job.evict(self.store, job.timeout_s)
        runner = job.runner
        if runner is not None and len(runner.jobs) > 1:
            others = [other for other in runner.jobs if other is not job]
            runner.jobs[:] = [job]
            self._launch(others, runner.name)
        self.after_tick()

    def _launch(self, jobs: Sequence[Job], name: str) -> None:
        runner = LaneRunner(self, jobs, name)
        self._runners = [known for known in self._runners if known.jobs]
        self._runners.append(runner)
        runner.start()
