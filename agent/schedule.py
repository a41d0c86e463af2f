"""When and in which thread collectors run: the wall-clock grid, lanes, deadlines and eviction.

A `LaneRunner` is a thread that runs its jobs when they are due. The supervisor (`Scheduler.check`, called from the main
thread) evicts a job that overran its deadline: the thread that hangs keeps that job alone, and a new thread takes over
the other jobs of its lane. When the stuck call returns, its thread goes on as that job's own. So a hang costs one
thread and one collector, whatever the lane was.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from agent.api import Lane
from agent.job import RESCAN_S, Job, JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agent.api import Clock, Event
    from agent.snapshot import Store

log = logging.getLogger("agent")

LONGEST_WAIT_S = 3600.0
OVERDUE_S = 60.0
START_AGAIN_S = 1.0
STOP_PATIENCE_S = 1.0
TOGETHER_S = 0.05  # jobs due this close to each other run in one wake-up
SLEW = 0.001  # of an interval: how far wall and monotonic time may drift apart in it (adjtime allows half of that)


class LaneRunner:
    """A thread that runs its jobs one after the other whenever they are due. It ends when it has none left."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.jobs: list[Job] = []  # replaced, never changed, and under the scheduler's lock only
        self.name = name
        self.ended = False
        self.wake = threading.Event()
        self._scheduler = scheduler
        self._thread = threading.Thread(target=self._loop, name=f"lane-{name}", daemon=True)

    @property
    def started(self) -> bool:
        """True once the thread runs or has run."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when the node gives no more threads; then try again later."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, at most so long."""
        if self.started:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        scheduler, clock = self._scheduler, self._scheduler.clock
        while not scheduler.stopping:
            until_s = clock.monotonic() + TOGETHER_S
            due = [job for job in self.jobs if job.due_s <= until_s]
            for job in due:
                if not scheduler.stopping and job.run(self, scheduler.store, clock, scheduler.emit):
                    job.due_s = scheduler.next_due_s(job)
            if due:
                scheduler.after_tick()
            if not scheduler.release_retired(self):
                return
            self._pause()
        for job in self.jobs:
            job.close()

    def _pause(self) -> None:
        due_s = min((job.due_s for job in self.jobs), default=0.0)
        self.wake.wait(min(max(0.0, due_s - self._scheduler.clock.monotonic()), LONGEST_WAIT_S))
        self.wake.clear()


class Scheduler:
    """All jobs, their lanes, and the deadline watch. `after_tick` and `emit` are called in lane threads.

    Of two jobs with one name, as a reload makes them, the second begins when the first has returned and is closed:
    a device that hangs gets no second reader, and what one collector saves the next one finds.
    """

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
        self._lock = threading.Lock()
        self._runners: list[LaneRunner] = []
        self._shared: LaneRunner | None = None
        self._leaving: dict[str, Job] = {}  # removed, not yet closed by their thread
        self._starved = False  # no more threads
        self._waiting: dict[str, Job] = {}  # to begin when the one that is leaving has left

    def start(self, jobs: Iterable[Job]) -> None:
        """Run these jobs at once and from then on along the grid."""
        with self._lock:
            ready = []
            for job in jobs:
                self.jobs[job.name] = job
                before = self._leaving.get(job.name)
                if before is None:
                    ready.append(job)
                    continue
                self._waiting[job.name] = job
                if before.started_s is not None:
                    job.state, job.reason = JobState.HUNG, "the call made before the reload has not returned"
            self._place(ready)

    def remove(self, name: str) -> None:
        """Stop one job: its series vanish at once; its thread closes it, and ends if it has no other, when it can."""
        with self._lock:
            job = self.jobs.pop(name)
            job.retire(self.store)
            if self._waiting.pop(name, None) is not None:
                return
            self._leaving[name] = job
            if job.started_s is not None:
                self._isolate(job)  # nobody watches its deadline any more
            for runner in self._runners:
                if job in runner.jobs:
                    runner.wake.set()

    def release_retired(self, runner: LaneRunner) -> bool:
        """Close what was removed, let its successors begin. False when the runner has nothing left and must end."""
        with self._lock:
            retired = [job for job in runner.jobs if job.retired]
            runner.jobs = [job for job in runner.jobs if job not in retired]
            runner.ended = not runner.jobs
        for job in retired:
            # Closing may hang as a read may, and must not take the lane with it.
            try:
                threading.Thread(target=self._conclude, args=(job,), name=f"close-{job.name}", daemon=True).start()
            except RuntimeError:  # no more threads
                self._conclude(job)
        return not runner.ended

    def _conclude(self, job: Job) -> None:
        """Close what was removed and let its successor begin."""
        job.close()
        with self._lock:
            del self._leaving[job.name]
            successor = self._waiting.pop(job.name, None)
            if successor is not None:
                self._place([successor])

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
        with self._lock:
            runners = list(self._runners)
        for runner in runners:
            runner.wake.set()
        patience_s = self.clock.monotonic() + STOP_PATIENCE_S
        for runner in runners:
            runner.join(max(0.0, patience_s - self.clock.monotonic()))

    def next_due_s(self, job: Job) -> float:
        """Return the monotonic time of the job's next point on the wall-clock grid: the same on every node."""
        if self._once:
            return float("inf")
        if job.batch.evicted:
            return self.clock.monotonic()
        interval_s = RESCAN_S if job.state is JobState.ABSENT else job.interval_s
        # A run may have come a little early, with its neighbours or by a slewed clock. The point it was meant for,
        # still ahead then, is not the next one.
        early_s = max(TOGETHER_S, interval_s * SLEW)
        return self.clock.monotonic() + early_s + interval_s - (self.clock.wall() + early_s) % interval_s

    def check(self) -> float:
        """Evict what overran its deadline; return the monotonic time at which to check again."""
        now_s = self.clock.monotonic()
        jobs = [*self.jobs.values(), *self._leaving.values()]
        evicted = [job for job in jobs if job.evict(self.store, now_s)]
        if evicted:
            with self._lock:
                for job in evicted:
                    self._isolate(job)
                    if job.lane_thread is None:
                        self._resume(job)
            self.after_tick()
        with self._lock:
            all_started = self._start_waiting()
        again_s = now_s + (RESCAN_S if all_started else START_AGAIN_S)
        return min([again_s, *(job.check_at_s(now_s) for job in jobs)])

    def _isolate(self, busy: Job) -> None:
        """Leave a thread alone with the job it is busy with; the others of its lane go on in a new one."""
        old = self._runner_of(busy)
        if old is None:
            return
        if old is self._shared:
            self._shared = None
        others = [job for job in old.jobs if job is not busy and job.hand_over(None)]
        old.jobs = [job for job in old.jobs if job not in others]
        self._place(others)

    def _resume(self, job: Job) -> None:
        """Give a job that can go on without its stuck device to another thread; the stuck one ends when it can."""
        old = self._runner_of(job)
        if old is None:  # it was removed, and its thread came back meanwhile and closed it
            return
        old.jobs = [other for other in old.jobs if other is not job]
        old.wake.set()  # should it have come back: it must not wait for a job that is no longer its own
        self._place([job])

    def _runner_of(self, job: Job) -> LaneRunner | None:
        return next((runner for runner in self._runners if job in runner.jobs), None)

    def _place(self, jobs: Iterable[Job]) -> None:
        """Find a thread for each job: the one of the SHARED lane, or one of its own."""
        fresh = []
        for job in jobs:
            runner = self._shared if job.lane is Lane.SHARED else None
            if runner is None or runner.ended:
                runner = LaneRunner(self, "shared" if job.lane is Lane.SHARED else job.name)
                fresh.append(runner)
            if job.lane is Lane.SHARED:
                self._shared = runner
            job.hand_over(runner)
            runner.jobs = [*runner.jobs, job]
            runner.wake.set()
        for runner in fresh:
            self._launch(runner)

    def _launch(self, runner: LaneRunner) -> None:
        self._runners = [known for known in self._runners if not known.ended]
        self._runners.append(runner)
        self._start_waiting()

    def _start_waiting(self) -> bool:
        """Start what has no thread yet; False when the node gives none, which is told when it changes."""
        try:
            for runner in self._runners:
                if not runner.started:
                    runner.start()
        except RuntimeError as error:
            if not self._starved:
                log.error("collectors wait for a thread: %s; see TasksMax and the pids limit", error)  # noqa: TRY400
            self._starved = True
            return False
        self._starved = False
        return True
