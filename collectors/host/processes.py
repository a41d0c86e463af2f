"""Processes by state, counted in slices so that thousands of them never make one long interruption."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from agent.api import Kind, Metric
from agent.hw import procfs
from collectors.host.part import Part

if TYPE_CHECKING:
    from agent.api import Context, Out

SLICE_S = 0.005  # of one collection, once there is a first result
_UNINTERRUPTIBLE = "D"
# Letters of /proc/PID/stat, proc_pid_stat(5). X (dead), P (parked) and what kernels to come may add is "other".
STATES = {
    "R": "running",
    "S": "sleeping",
    _UNINTERRUPTIBLE: "uninterruptible",
    "I": "idle",
    "T": "stopped",
    "t": "stopped",
    "Z": "zombie",
}
OTHER = "other"

PROCESSES = Metric(
    "host_processes",
    Kind.GAUGE,
    "Processes by state, kernel threads included, at the last count (slow_interval).",
    ("state",),
    source="/proc/PID/stat",
)
UNKILLABLE = Metric(
    "host_processes_unkillable",
    Kind.GAUGE,
    "Processes found in uninterruptible sleep by two counts in a row: they wait for a device or file server that does "
    "not answer, and no signal ends them.",
    source="/proc/PID/stat",
)
METRICS = (PROCESSES, UNKILLABLE)


class Processes(Part):
    """Counts every `interval_s`. Between two counts the result of the last one stands."""

    source = "processes"

    def __init__(self, ctx: Context, interval_s: float) -> None:
        self._ctx = ctx
        self._interval_s = interval_s
        self._states = {state: ctx.series(PROCESSES, state) for state in (*STATES.values(), OTHER)}
        self._unkillable = ctx.series(UNKILLABLE)
        self._count: _Count | None = None  # in progress
        self._last: _Count | None = None
        self._stuck: int | None = None
        self._due_s = 0.0

    def collect(self, out: Out) -> None:
        now_s = self._ctx.clock.monotonic()
        try:
            if self._count is None and now_s >= self._due_s:
                self._due_s = now_s + self._interval_s
                self._count = _Count(procfs.list_processes(str(self._ctx.proc)))
            if self._count is not None:
                # The first time somebody may be waiting (`hpcwatch once`): then it goes on while the deadline lets it.
                allowed_s = self._ctx.timeout_s / 16 if self._last is None else SLICE_S
                if self._count.advance(self._ctx, now_s + allowed_s):
                    self._finish(self._count, out)
        except OSError:
            self._count = self._last = self._stuck = None
            raise
        self._show(out)

    def _finish(self, count: _Count, out: Out) -> None:
        if count.unreadable:
            process, error = count.unreadable[0]
            out.failed(f"{process}/stat", f"{error} (and {len(count.unreadable) - 1} other processes)")
        self._stuck = None if self._last is None else len(count.waiting & self._last.waiting)
        self._last, self._count = count, None

    def _show(self, out: Out) -> None:
        if self._last is None:
            return
        states = dict.fromkeys(self._states, 0)
        for letter, count in self._last.letters.items():
            states[STATES.get(letter, OTHER)] += count
        out.extend(list(self._states.values()), list(states.values()))
        if self._stuck is not None:
            out.add(self._unkillable, self._stuck)


class _Count:
    """One count, possibly under way. `waiting` are the processes in uninterruptible sleep: id and start."""

    def __init__(self, processes: list[str]) -> None:
        self.letters: Counter[str] = Counter()
        self.waiting: set[tuple[str, int]] = set()
        self.unreadable: list[tuple[str, Exception]] = []
        self._left = iter(processes)

    def advance(self, ctx: Context, until_s: float) -> bool:
        """Go on until that time; True when all are counted. Raises PermissionError when processes are hidden."""
        proc, monotonic = str(ctx.proc), ctx.clock.monotonic
        for process in self._left:
            try:
                state = procfs.read_process_state(proc, process)
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            except PermissionError:
                raise  # hidepid=1: so will be all the others
            except (OSError, procfs.FormatError) as error:
                self.unreadable.append((process, error))
                continue
            self.letters[state.letter] += 1
            if state.letter == _UNINTERRUPTIBLE:
                self.waiting.add((process, state.started))
            if monotonic() >= until_s:
                return False
        return True
