"""Whether the clock is synchronized, from the kernel (adjtimex(2)), whichever daemon does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.api import Kind, Metric
from collectors.host.part import Part

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.api import Context, Out
    from agent.hw.clocksync import ClockState

SYNCHRONIZED = Metric(
    "host_clock_synchronized",
    Kind.GAUGE,
    "1 when the clock's error is known to be below 16 seconds, 0 when nothing disciplines the clock.",
    source="adjtimex(2) maxerror",
)
OFFSET = Metric(
    "host_clock_offset_seconds",
    Kind.GAUGE,
    "Correction that the kernel has still to make, negative when the clock is ahead; absent when not synchronized.",
    unit="seconds",
    source="adjtimex(2) offset",
)
MAX_ERROR = Metric(
    "host_clock_max_error_seconds",
    Kind.GAUGE,
    "Bound of the clock's error, growing until the next correction; absent when not synchronized.",
    unit="seconds",
    source="adjtimex(2) maxerror",
)
METRICS = (SYNCHRONIZED, OFFSET, MAX_ERROR)


class TimeSync(Part):
    """One system call. Where a sandbox forbids it, there are no series."""

    source = "adjtimex"

    def __init__(self, ctx: Context, read: Callable[[], ClockState]) -> None:
        self._read = read
        self._synchronized, self._offset, self._max_error = (ctx.series(metric) for metric in METRICS)

    def collect(self, out: Out) -> None:
        try:
            state = self._read()
        except PermissionError:
            return
        out.add(self._synchronized, int(state.synchronized))
        if state.synchronized:
            out.add(self._offset, state.offset_s)
            out.add(self._max_error, state.max_error_s)
