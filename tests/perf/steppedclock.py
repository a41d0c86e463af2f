"""Time that a benchmark moves forward by itself, the same for a collector's own process."""

from __future__ import annotations

import time

from tests.perf.sharednumber import SharedNumber


class SteppedClock:
    """The machine's clocks, moved forward by steps: by those of any process that shares the number.

    A step counts from the step before, so the time that passes between steps does not add up.
    """

    def __init__(self, ahead: SharedNumber) -> None:
        self._ahead = ahead
        self._at_s = self.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time() + self._ahead.get()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic() + self._ahead.get()

    def step(self, seconds: float) -> None:
        """Go to so many seconds after the last step; nowhere when that has passed already."""
        self._at_s += seconds
        self._ahead.set(max(self._ahead.get(), self._at_s - time.monotonic()))
