"""One collector under policy: opened, run, published or evicted; failures counted always and logged on change."""

from __future__ import annotations

import enum
import logging
import re
import threading
from typing import TYPE_CHECKING

from agent.api import DEVICE_SHARE, Lane, NotPresent
from agent.snapshot import Batch, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.api import Clock, Collector, Event
    from agent.snapshot import Snapshot, Store

RESCAN_S = 60.0  # for hardware that is not here
LEFT_BEHIND_LIMIT = 32  # threads of one collector that hang in devices; further hangs are the collector's own
HANGS_IN_A_ROW = 3  # runs that may hang in devices before one ends; a collector that keeps its promise needs one
TOLD_AT_ONCE = 20  # failures logged for one run, and recoveries
DEVICE_SLACK_S = 2.0  # what replacing a process takes that hung on a device
RESCAN_EARLY_S = 0.05  # a tick may come this much before its time, and must not put the rescan off to the next one

# Runs that hang in a device, while later ones go on without it. By collector, because a reload makes a new job but the
# threads that hang are still there.
_left_behind: dict[str, set[Batch]] = {}

_NUMBER = re.compile(r"\d+")  # texts that differ in numbers only tell the same failure, which is logged once


class JobState(enum.Enum):
    """What became of a collector's last run."""

    STARTING = "starting"
    OK = "ok"
    ABSENT = "absent"  # the hardware is not here
    FAILED = "failed"  # raised
    HUNG = "hung"  # overran its deadline, and no run since then has ended


class Job:
    """One collector: when it is due, how long it may take, what became of it.

    `make` builds the collector; it is called again after the hardware was absent. `required` says that the
    configuration wants it whether the hardware shows or not. `isolates_devices` is the collector's own promise.
    `times_devices` says that each device it names has the timeout, or its own limit, to itself.
    `lane_thread` is whoever may call `run` now.
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
        isolates_devices: bool = False,
        times_devices: bool = False,
    ) -> None:
        self.name = name
        self.make = make
        self.lane = lane
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self.required = required
        self.isolates_devices = isolates_devices
        self.times_devices = times_devices
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
        self.lane_thread: object = None
        self.retired = False
        self._left_behind = _left_behind.setdefault(name, set())
        self._hangs_in_a_row = 0
        self._lock = threading.Lock()  # a run begins, ends, is evicted or changes threads: one at a time
        self._collector: Collector | None = None
        self._opened_s = 0.0
        self._open = False
        self._found_due = False  # opened, but no run ended since
        self._failing: dict[str, str] = {}

    @property
    def enabled(self) -> bool:
        """True when it runs, or ran before, or is required: hardware that went missing does not switch it off."""
        return self.required or self.was_present or self.state in (JobState.OK, JobState.FAILED, JobState.HUNG)

    @property
    def up(self) -> bool:
        """True when the last run produced a snapshot. A failed device does not make its collector down."""
        return self.state is JobState.OK

    def check_at_s(self, now_s: float) -> float:
        """Return the monotonic time at which its deadline must be looked at."""
        shortest_s = self._device_limit_s if self.isolates_devices else self.timeout_s
        if self.started_s is None:
            return max(self.due_s, now_s) + shortest_s
        deadline_s, of_device = self._deadline()
        soon_s = now_s + shortest_s  # it may come back at any time, and get stuck again; or in a device from now on
        return soon_s if self._is_given_up(of_device=of_device) else min(deadline_s, soon_s)

    def run(self, lane_thread: object, store: Store, clock: Clock, emit: Callable[[Sequence[Event]], None]) -> bool:
        """Open if need be, collect once, publish. Never raises. False when this thread may not run it (any more)."""
        batch = Batch(clock.monotonic)
        started_s, taken_at = clock.monotonic(), clock.wall()
        with self._lock:
            if self.retired or self.lane_thread is not lane_thread:
                return False
            self.batch, self.started_s = batch, started_s
        state, reason, snapshot = self._attempt(batch, taken_at, started_s)
        duration_s = clock.monotonic() - started_s
        with self._lock:
            if batch in self._left_behind:
                self._left_behind.remove(batch)
                return False
            self.started_s = None  # from here on it cannot be evicted
            self._hangs_in_a_row = 0
            if snapshot is not None:
                store.put(snapshot, batch)
            elif not batch.evicted:
                store.drop(self.name)
        if not batch.evicted:
            self.points = 0 if snapshot is None else len(snapshot.series)
            if snapshot is not None:
                self.duration_s, self.last_success_at = duration_s, taken_at
            self._emit(batch, emit)
            self._settle(state, reason, batch)
        self.runs += 1  # last: who sees the count sees the outcome
        return True

    def evict(self, store: Store, now_s: float) -> bool:
        """Give up on a run past its deadline: whatever it still brings is refused. False when there is none.

        Where one device is to blame, the job is free for another thread (`lane_thread` is None) and its series stay.
        Otherwise they vanish, and it waits for the stuck one.
        """
        with self._lock:
            deadline_s, of_device = self._deadline()
            if self.started_s is None or self._is_given_up(of_device=of_device) or now_s < deadline_s:
                return False
            self.errors += 1
            if of_device:
                store.refuse(self.batch)
                self._left_behind.add(self.batch)
                self._hangs_in_a_row += 1
                self.started_s, self.due_s, self.lane_thread = None, now_s, None
                return True
            store.evict(self.batch, self.name)
            device = f" on {self.batch.in_hand}" if self.batch.in_hand else ""
            before = (self.state, self.reason)
            self.state, self.reason = JobState.HUNG, f"no answer within {self.timeout_s:g} s{device}"
            self.points = 0
            self.evictions += 1
        if before != (self.state, self.reason):
            self.log.error("collector %s: %s; its series are gone until the call returns", self.name, self.reason)
        return True

    def retire(self, store: Store) -> None:
        """Take it out of service: its series vanish, a run in progress is refused, and it never runs again."""
        with self._lock:
            self.retired = True
            store.evict(self.batch, self.name)

    def hand_over(self, lane_thread: object) -> bool:
        """Let another thread run it from now on. False while the present one is running it."""
        with self._lock:
            if self.started_s is not None:
                return False
            self.lane_thread = lane_thread
            return True

    @property
    def _device_limit_s(self) -> float:
        return self.timeout_s * DEVICE_SHARE

    def _deadline(self) -> tuple[float, bool]:
        """Return the monotonic time at which the run in progress has had its time, and whether a device is to blame."""
        started_s = self.started_s or 0.0
        if self.times_devices:
            since_s = max(started_s, self.batch.in_hand_since_s)
            return since_s + max(self.timeout_s, self.batch.in_hand_limit_s + DEVICE_SLACK_S), False
        deadline_s = started_s + self.timeout_s
        spared = len(self._left_behind) < LEFT_BEHIND_LIMIT and self._hangs_in_a_row < HANGS_IN_A_ROW
        if self.isolates_devices and spared and self.batch.in_hand:  # looked at once: it changes meanwhile
            since_s = self.batch.in_hand_since_s
            if since_s < deadline_s:
                return since_s + self._device_limit_s, True
        return deadline_s, False

    def _is_given_up(self, *, of_device: bool) -> bool:
        """Say whether nothing is left to do about the run in progress but to wait.

        One that was refused by a reload has a successor waiting, which one device must not keep from beginning.
        """
        return self.batch.evicted and not (self.retired and of_device)

    def _may_conclude(self, batch: Batch) -> bool:
        """Say whether the collector is still this run's to deal with; if so, no device is to blame from here on."""
        with self._lock:
            batch.in_hand = ""
            return batch not in self._left_behind

    def close(self) -> None:
        """Release the collector. For the thread that runs it only."""
        collector, self._collector, self._open = self._collector, None, False
        try:
            if collector is not None:
                collector.close()
        except BaseException as error:  # noqa: BLE001 - closing is a courtesy; the collector is gone either way
            self.log.warning("collector %s: close failed: %s", self.name, _told(error))

    def _attempt(self, batch: Batch, taken_at: float, now_s: float) -> tuple[JobState, str, Snapshot | None]:
        try:
            collector = self._ensure_open(now_s)
            collector.collect(batch)
            if self._may_conclude(batch) and self._found_due:
                self.found = str(collector.found())  # only now: one in a child process did not know it before
                self._found_due = False
            self.was_present = self.was_present or bool(collector.seen())
            return JobState.OK, "", batch.finish(self.name, taken_at)
        except NotPresent as absence:
            if self._may_conclude(batch):
                self.close()
            return JobState.ABSENT, _told(absence), None
        except BaseException as error:  # a plug-in may even call sys.exit; it costs itself, not the lane
            if self._may_conclude(batch):
                self._open = False
                self.log.debug("collector %s failed", self.name, exc_info=error)
            return JobState.FAILED, _told(error), None

    def _ensure_open(self, now_s: float) -> Collector:
        if self._collector is None:
            self._collector = self.make()
        if not self._open or now_s - self._opened_s >= self._collector.rescan_s - RESCAN_EARLY_S:
            self._open = False
            self._collector.open()
            self._open, self._opened_s, self._found_due = True, now_s, True
        return self._collector

    def _emit(self, batch: Batch, emit: Callable[[Sequence[Event]], None]) -> None:
        for event in batch.events:
            try:
                emit([event])
            except Exception as error:  # noqa: BLE001 - a malformed event costs itself
                batch.failures.append(("event", f"cannot be recorded: {_told(error)}"))

    def _settle(self, state: JobState, reason: str, batch: Batch) -> None:
        """Count every failure, log only what changed."""
        failing = dict(batch.failures)
        self.errors += len(batch.failures) + (state is JobState.FAILED)
        new = [what for what, text in failing.items() if _differ(self._failing.get(what, ""), text)]
        for what in new[:TOLD_AT_ONCE]:
            self.log.warning("%s: %s", what, failing[what])
        gone = sorted(self._failing.keys() - failing.keys()) if state is JobState.OK else []  # else it came not so far
        for what in gone[:TOLD_AT_ONCE]:
            self.log.info("%s: no longer failing", what)
        more = max(0, len(new) - TOLD_AT_ONCE) + max(0, len(gone) - TOLD_AT_ONCE)
        if more:
            self.log.warning("and %d more such changes in this run", more)
        self._failing = failing if state is JobState.OK else self._failing | failing
        if state is not self.state or _differ(self.reason, reason):
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


def _differ(one: str, other: str) -> bool:
    """Say whether two texts tell different failures: numbers alone make none."""
    return _NUMBER.sub("#", one) != _NUMBER.sub("#", other)


def _told(error: BaseException) -> str:
    """Say what came back, whatever a foreign exception's own text does."""
    try:
        return str(error) if isinstance(error, NotPresent) else describe(error)
    except Exception:  # noqa: BLE001 - as above
        return type(error).__name__
