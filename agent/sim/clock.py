"""A clock that moves only when told."""

from __future__ import annotations


class FakeClock:
    """Wall and monotonic time under the test's control, both in seconds."""

    def __init__(self, wall: float = 1_800_000_000.0, monotonic: float = 1_000.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self._wall

    def monotonic(self) -> float:
        """Seconds that never jump."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self._wall += seconds
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator or NTP would."""
        self._wall += seconds
