"""Devices that a collector's processes hung on or crashed in: left alone for a while, then tried anew.

Kept by collector for as long as the agent runs: a reload makes a new `agent.remote.Remote`, the device hangs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

AVOID_FIRST_S = 30.0
AVOID_LAST_S = 900.0
FORGIVEN_AFTER_S = 3600.0  # a device that was well for this long counts as healthy again


@dataclass
class _Case:
    """One device. `process` is the one that hangs on it and cannot be killed: while it does, so would the next."""

    what: str  # hang, crash
    count: int
    until_s: float  # monotonic, as all times here
    confined: bool = True
    process: subprocess.Popen[bytes] | None = None


class Quarantine:
    """The devices of one collector. One thread at a time may change it, any may read."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}
        self._strays: list[subprocess.Popen[bytes]] = []  # that hang on no device in particular

    @property
    def avoid(self) -> dict[str, str]:
        """The devices to leave alone, with what a process did on them: `hang` or `crash`."""
        return {device: case.what for device, case in self._cases.items() if case.confined}

    def confine(self, device: str, what: str, now_s: float) -> bool:
        """Leave a device alone from now on; the longer, the more often. True when this is news."""
        before = self._cases.get(device)
        forgiven = before is None or (not before.confined and now_s - before.until_s >= FORGIVEN_AFTER_S)
        count = 1 if before is None or forgiven else before.count + 1
        until_s = now_s + min(AVOID_FIRST_S * 2 ** min(count - 1, 10), AVOID_LAST_S)
        self._cases[device] = _Case(what, count, until_s, process=None if before is None else before.process)
        return before is None or forgiven or before.what != what

    def release(self, device: str, now_s: float) -> None:
        """Let a device be read again. How often it was confined is remembered for a while."""
        case = self._cases.get(device)
        if case is not None:
            case.confined, case.until_s = False, now_s

    def due(self, now_s: float) -> str:
        """Return a device whose time has come, and whose stuck process, if any, is gone; empty when there is none."""
        for device, case in self._cases.items():
            if case.confined and now_s >= case.until_s and not _alive(case.process):
                return device
        return ""

    def abandon(self, process: subprocess.Popen[bytes], device: str) -> None:
        """Remember a process that does not die, and the device it hangs on, if that is known."""
        case = self._cases.get(device)
        if case is None:
            self._strays = [*self._strays, process]
        else:
            case.process = process

    def stuck(self) -> list[int]:
        """Return the numbers of the processes that have not died yet."""
        self._strays = [process for process in self._strays if _alive(process)]
        held = [case.process for case in list(self._cases.values())]
        return [process.pid for process in (*self._strays, *held) if process is not None and _alive(process)]


def _alive(process: subprocess.Popen[bytes] | None) -> bool:
    return process is not None and process.poll() is None
