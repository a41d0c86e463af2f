"""How much each InfiniBand port moves now: the difference of two snapshots that the page saw."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.api import Value
    from agent.snapshot import Snapshot

    Key = tuple[str, str, str]  # device, port, direction (rx, tx)
    Rates = Mapping[Key, float]

DIRECTIONS = {
    "node_infiniband_port_data_received_bytes_total": "rx",
    "node_infiniband_port_data_transmitted_bytes_total": "tx",
}
LONGEST_S = 120.0  # an average over more says nothing about now
CLOCK_STEP_S = 0.5  # what wall and monotonic time may drift apart between two snapshots


@dataclass(frozen=True)
class _Sample:
    snapshot: Snapshot
    counters: Mapping[Key, Value]
    clock_offset_s: float  # wall minus monotonic time: changes when the clock is set


class Traffic:
    """Keeps the two latest snapshots that were looked at. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: _Sample | None = None
        self._latest: _Sample | None = None

    def rates(self, snapshot: Snapshot | None, wall_s: float, monotonic_s: float) -> Rates:
        """Return bytes per second; empty until a second snapshot was seen.

        Absent are a counter that went back, and everything when the clock was set between the two.
        """
        with self._lock:
            if snapshot is None:
                self._before = self._latest = None
            elif self._latest is None or self._latest.snapshot is not snapshot:
                self._before = self._latest
                self._latest = _Sample(snapshot, _counters(snapshot), wall_s - monotonic_s)
            before, latest = self._before, self._latest
        return _difference(before, latest) if before and latest else {}


def holder(snapshots: Mapping[str, Snapshot], owners: Mapping[str, str]) -> Snapshot | None:
    """Return the snapshot with the ports' counters. `owners` gives the source of each declared metric."""
    for source, snapshot in snapshots.items():
        if any(s.metric.name in DIRECTIONS and owners.get(s.metric.name, source) == source for s in snapshot.series):
            return snapshot
    return None


def _counters(snapshot: Snapshot) -> Mapping[Key, Value]:
    found = {}
    for series, value in zip(snapshot.series, snapshot.values, strict=False):
        direction = DIRECTIONS.get(series.metric.name)
        if direction is not None:
            labels = dict(series.labels)
            found[labels.get("device", ""), labels.get("port", ""), direction] = value
    return found


def _difference(before: _Sample, latest: _Sample) -> Rates:
    passed_s = latest.snapshot.taken_at - before.snapshot.taken_at
    clock_was_set = abs(latest.clock_offset_s - before.clock_offset_s) > CLOCK_STEP_S
    if clock_was_set or not 0 < passed_s <= LONGEST_S:
        return {}
    return {
        key: (value - before.counters[key]) / passed_s
        for key, value in latest.counters.items()
        if key in before.counters and value >= before.counters[key]
    }
