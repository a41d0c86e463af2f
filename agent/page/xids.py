"""Errors that the GPU and NVSwitch drivers wrote into the kernel log, as their series tell: XIDs and SXIDs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.page.markup import Grade
from agent.page.quantities import HOUR_S, ago
from agent.page.readings import natural

if TYPE_CHECKING:
    from agent.api import Value
    from agent.page.readings import Readings

RECENT_S = HOUR_S
SEVERITIES = ("", "info", "warning", "error", "critical")  # best first; one that is none of these counts as the first
GRADES = {"critical": Grade.BAD, "error": Grade.BAD}  # the others are an application's faults, or news


@dataclass(frozen=True)
class Xid:
    """A code that came since boot: how bad it is at worst, and when it came last (None: not known)."""

    kind: str
    code: str
    severity: str
    last_s: Value | None

    def grade(self, now_s: float) -> Grade:
        """Say how bad it is now; the verdict tells what is bad at all, and nothing else has a mark.

        What is past is past, but a critical one stays: it takes a reset to cure.
        """
        if self.last_s is not None and now_s - self.last_s < RECENT_S:
            return GRADES.get(self.severity, Grade.NONE)
        return Grade.WARNING if self.severity == "critical" else Grade.NONE

    def shown(self, now_s: float) -> str:
        """Name it with its age."""
        name = f"{self.kind} {self.code}"
        return name if self.last_s is None else f"{name}, {ago(self.last_s, now_s)}"


def xids(gpu: Readings) -> list[Xid]:
    """Return the XIDs that came to a GPU, the most severe first, of these the latest."""
    return _codes(gpu, "XID", "xid", "gpu_xid")


def sxids(switch: Readings) -> list[Xid]:
    """Return the SXIDs that came to an NVSwitch, the most severe first, of these the latest."""
    return _codes(switch, "SXID", "sxid", "nvswitch_sxid")


def _codes(device: Readings, kind: str, label: str, prefix: str) -> list[Xid]:
    worst: dict[str, str] = {}
    for labels, total in device.of(f"{prefix}_errors_total"):
        if total > 0:  # several series per code where the line decides how severe it is
            code, severity = labels.get(label, ""), labels.get("severity", "")
            worst[code] = max(worst.get(code, ""), severity, key=_rank)
    last = {labels.get(label, ""): time for labels, time in device.of(f"{prefix}_last_timestamp_seconds")}
    found = [Xid(kind, code, worst.get(code, ""), last.get(code)) for code in {**worst, **last}]
    return sorted(found, key=lambda one: (-_rank(one.severity), -(one.last_s or 0), natural(one.code)))


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else 0
