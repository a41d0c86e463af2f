"""Calls that may never return, one per device, so that a hang costs its device and nothing else.

A call that hangs keeps its thread: it cannot be interrupted, the kernel holds it. Two ways to go on without it:

- `run(calls)` makes all calls in a thread of the bulkhead's and waits. The call that exceeds the limit keeps that
  thread, the devices behind it go on in threads of their own.
- `run(calls, working_on)` makes them in the caller's thread, at the price of a function call, and tells `working_on`
  before each which device is next. Somebody who watches that must call `run` again from another thread when it takes
  too long (the agent does, for a collector that `isolates_devices`); the stuck caller learns of it by the exception
  that `working_on` raises.

Either way a device that stalled gets no second reader while the first is stuck, then one thread of its own, and after
repeated stalls it is left alone for a while.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

FORGIVEN_AFTER_S = 3600.0  # a device without a stall for this long counts as healthy again
BACKOFF_FIRST_S = 30.0
BACKOFF_LAST_S = 900.0

# Calls that have not returned, by bulkhead's name and device. They outlive the bulkhead: a new one of the same name
# must not send a second reader after the first.
_stuck: dict[tuple[str, str], threading.Lock] = {}


@dataclass(frozen=True)
class Stalled:
    """The outcome of a call that has not returned, or was not made because the one before has not."""

    reason: str


@dataclass
class _Stall:
    """What is held against a device: how often it stalled, and when it last did (monotonic)."""

    count: int
    at_s: float


class _Task(Generic[T]):
    """One call and its outcome. It is made once, by whichever thread comes first.

    Plain locks, because an Event costs as much as reading four files: `pending` is locked until the call returned.
    """

    __slots__ = ("_claim", "call", "device", "outcome", "pending")

    def __init__(self, device: str, call: Callable[[], T]) -> None:
        self.device = device
        self.call = call
        self.outcome: T | Exception | None = None
        self.pending = threading.Lock()
        self.pending.acquire()
        self._claim = threading.Lock()

    @property
    def done(self) -> bool:
        """True when the call returned."""
        return not self.pending.locked()

    def wait(self, timeout_s: float) -> None:
        """Wait for the call to return, at most so long."""
        if self.pending.acquire(timeout=timeout_s):
            self.pending.release()

    def cancel(self) -> bool:
        """Have the call never made; False when it was begun."""
        if not self._claim.acquire(blocking=False):
            return False
        self.outcome = RuntimeError("not read: another run went on without this one")
        self.pending.release()
        return True

    def run(self) -> None:
        """Make the call, unless that was begun already or cancelled."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self.outcome = self.call()
        except Exception as error:  # noqa: BLE001 - handed to the caller as this device's outcome
            self.outcome = error
        except BaseException as error:  # noqa: BLE001 - sys.exit in a library must not look like a hang
            self.outcome = RuntimeError(f"{type(error).__name__}: {error}")
        self.pending.release()


class _Reader(Generic[T]):
    """A thread that runs lists of tasks, one list after the other, until it is closed or gets stuck."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[list[_Task[T]], threading.Lock] | None] = queue.SimpleQueue()
        self.abandoned = False
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def submit(self, tasks: list[_Task[T]]) -> threading.Lock:
        """Start the tasks; the returned lock is released when the last one ended."""
        finished = threading.Lock()
        finished.acquire()
        self._work.put((tasks, finished))
        return finished

    def close(self) -> None:
        """Let the thread end, now or whenever its present call returns."""
        self.abandoned = True
        self._work.put(None)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            tasks, finished = work
            for task in tasks:
                if self.abandoned:
                    break
                task.run()
            del work, tasks, task  # what they hold must go when its owner lets go, not at the next run
            finished.release()


class Bulkhead(Generic[T]):
    """Runs one call per device with a limit on each.

    `limit_s`: seconds one call may take before its device counts as stalled. A run takes at most three times that,
    however many devices hang. `monotonic` is the clock for forgiving and backing off.
    """

    def __init__(self, name: str, limit_s: float, monotonic: Callable[[], float]) -> None:
        self._name = name
        self._limit_s = limit_s
        self._monotonic = monotonic
        self._reader: _Reader[T] | None = None
        self._tasks: list[_Task[T]] = []  # of the run in progress, or of one whose thread hangs
        self._stalls: dict[str, _Stall] = {}

    def run(
        self, calls: Mapping[str, Callable[[], T]], working_on: Callable[[str], None] | None = None
    ) -> dict[str, T | Stalled | Exception]:
        """Make every call; return per device its value, the exception it raised, or `Stalled`."""
        careful = self._take_over()
        outcomes: dict[str, T | Stalled | Exception] = {}
        together: list[_Task[T]] = []
        own: list[_Task[T]] = []
        for device, call in calls.items():
            suspect, reason = self._suspicion(device)
            if reason:
                outcomes[device] = Stalled(reason)
            else:
                (own if suspect or careful else together).append(_Task(device, call))
        tasks = self._tasks = own + together
        waiting = [self._start_alone(task) for task in own]
        if working_on is None:
            waiting += self._run_shared(together)
        else:
            waiting += self._run_here(together, working_on)
        deadline_s = time.monotonic() + self._limit_s  # one for all: they run side by side
        for task in waiting:
            task.wait(max(0.0, deadline_s - time.monotonic()))
        for task in tasks:
            outcomes[task.device] = self._judge(task)
        tasks.clear()  # this run's, which may not be `_tasks` any more
        return {device: outcomes[device] for device in calls}

    def close(self) -> None:
        """Let idle threads end. Never waits for stuck ones, and a bulkhead of the same name knows of them."""
        self._take_over()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _run_here(self, tasks: list[_Task[T]], working_on: Callable[[str], None]) -> list[_Task[T]]:
        """Run the tasks in the caller's thread; return those that had to get threads of their own."""
        deadline_s = time.monotonic() + self._limit_s
        alone: list[_Task[T]] = []
        for task in tasks:
            if time.monotonic() > deadline_s:  # none hangs, but one after the other they would take too long
                alone.append(self._start_alone(task))
                continue
            working_on(task.device)
            task.run()
        working_on("")
        return alone

    def _take_over(self) -> bool:
        """Go on without the thread of an earlier run that has not ended; True when it hangs.

        What it has begun is held against the devices, in threads of their own too; what it has not begun it never will.
        """
        tasks, self._tasks = self._tasks, []
        hanging = [task for task in tasks if not task.cancel() and not task.done]
        for task in hanging:
            self._judge(task)
        return bool(hanging)

    def _run_shared(self, tasks: list[_Task[T]]) -> list[_Task[T]]:
        """Run the tasks in the shared thread; return those that had to get threads of their own."""
        if not tasks:
            return []
        if self._reader is None:
            self._reader = _Reader(self._name)
        if self._reader.submit(tasks).acquire(timeout=self._limit_s):
            return []
        # One hangs, or one after the other they take too long. The one in turn keeps that thread.
        self._reader.close()
        self._reader = None
        ended = sum(task.done for task in tasks)
        return [*tasks[ended : ended + 1], *(self._start_alone(task) for task in tasks[ended + 1 :])]

    def _start_alone(self, task: _Task[T]) -> _Task[T]:
        threading.Thread(target=task.run, name=f"{self._name}-{task.device}", daemon=True).start()
        return task

    def _judge(self, task: _Task[T]) -> T | Stalled | Exception:
        if not task.done:
            if _stuck.get((self._name, task.device)) is not task.pending:  # else a later run has judged it
                before = self._stalls.get(task.device)
                count = 1 if before is None else before.count + 1
                self._stalls[task.device] = _Stall(count, self._monotonic())
                _stuck[self._name, task.device] = task.pending
            return Stalled(f"no answer within {self._limit_s:g} s")
        return task.outcome  # type: ignore[return-value] # set before `pending` was released

    def _suspicion(self, device: str) -> tuple[bool, str]:
        """Say whether a device wants a thread of its own, and why it must not be read now (empty: it may)."""
        pending = _stuck.get((self._name, device))
        if pending is not None and pending.locked():
            self._stalls.setdefault(device, _Stall(1, self._monotonic()))
            return True, "the read that stalled has not returned"
        _stuck.pop((self._name, device), None)
        stall = self._stalls.get(device)
        if stall is None:
            return False, ""
        since_s = self._monotonic() - stall.at_s
        if since_s >= FORGIVEN_AFTER_S:
            del self._stalls[device]
            return True, ""
        if stall.count > 1 and since_s < (wait_s := min(BACKOFF_FIRST_S * 2 ** (stall.count - 2), BACKOFF_LAST_S)):
            return True, f"left alone for {wait_s:g} s after {stall.count} stalls"
        return True, ""
