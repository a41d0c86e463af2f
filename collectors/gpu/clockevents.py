"""Why the clocks of one GPU are down: each reason that the GPU can have, 1 while it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.hw.nvml import calls
from collectors.gpu import metrics
from collectors.gpu.plausibility import ALL_ONES, ImplausibleError
from collectors.gpu.readings import Reading

if TYPE_CHECKING:
    from collectors.gpu.readings import Key, Points

REASONS = (  # nvmlClocksEventReason*, from bit 0
    "gpu_idle",
    "applications_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display_clock",
)

_KNOWN = (1 << len(REASONS)) - 1
_MASK_LIMIT = 1 << 63


class ClockEvents:
    """The reasons of one GPU: those it says it can have (all known ones where it does not say), and any that held.

    `supported` is to be read now and then, `active` at every run.
    """

    def __init__(self) -> None:
        self.active = Reading(
            "clock event reasons", (calls.EVENT_REASONS, calls.THROTTLE_REASONS), self._points_of_active
        )
        self.supported = Reading(
            "supported clock event reasons",
            (calls.EVENT_REASONS_SUPPORTED, calls.THROTTLE_REASONS_SUPPORTED),
            self._note_supported,
        )
        self._supported = _KNOWN
        self._seen = 0  # a driver's mask may lack what it then reports
        self._keys: list[tuple[int, Key]] = []  # by bit, of the reasons in `_shown`
        self._shown = 0

    def _note_supported(self, mask: int) -> Points:
        self._supported = _checked(mask)
        return ()

    def _points_of_active(self, mask: int) -> Points:
        self._seen |= _checked(mask)
        shown = self._supported | self._seen
        if shown != self._shown:
            bits = [bit for bit in range(shown.bit_length()) if shown >> bit & 1]
            self._keys = [(bit, (metrics.CLOCK_EVENT, (reason_of(bit),))) for bit in bits]
            self._shown = shown
        return [(key, mask >> bit & 1) for bit, key in self._keys]


def reason_of(bit: int) -> str:
    """Return the name of one bit of the reasons."""
    return REASONS[bit] if bit < len(REASONS) else f"bit_{bit}"


def _checked(mask: int) -> int:
    if not 0 <= mask < _MASK_LIMIT or mask in ALL_ONES:
        raise ImplausibleError(metrics.CLOCK_EVENT)
    return mask
