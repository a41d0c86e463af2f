"""When a record was written, by each of the clocks that somebody asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agent.hw.sysfs import read_text

if TYPE_CHECKING:
    from agent.api import Context
    from agent.hw.kmsg import Record


UPTIME_LIMIT_S = 1e10  # three centuries; with more behind it the time of a record may be in no calendar


class Moment(NamedTuple):
    """One moment in seconds since the epoch, since boot, and by the clock that no administrator sets."""

    wall_s: float
    boot_s: float
    monotonic_s: float


class Present:
    """The clocks as one run found them. Without an uptime the monotonic clock stands in for it."""

    def __init__(self, ctx: Context) -> None:
        self._uptime_s = _uptime_s(ctx)
        monotonic_s = ctx.clock.monotonic()
        self.now = Moment(ctx.clock.wall(), monotonic_s if self._uptime_s is None else self._uptime_s, monotonic_s)

    def written(self, record: Record) -> Moment:
        """Return when a record was written; of one whose time cannot be, when it was read."""
        if self._uptime_s is None:
            return self.now
        age_s = self._uptime_s - record.time_us / 1e6
        if age_s <= 0:  # a little: written after the uptime was read; more: nonsense
            return self.now
        return Moment(*(clock_s - age_s for clock_s in self.now))


def _uptime_s(ctx: Context) -> float | None:
    """Return seconds since boot; None when they cannot be read."""
    try:
        uptime_s = float(read_text(f"{ctx.proc}/uptime").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return uptime_s if 0 <= uptime_s <= UPTIME_LIMIT_S else None
