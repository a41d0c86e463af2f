"""How much each InfiniBand port moves now: the difference of the collector's two latest snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.api import Value
    from agent.page.readings import Readings

    Key = tuple[str, str, str]  # device, port, direction (rx, tx)
    Rates = Mapping[Key, float]

PORTS_SOURCE = "infiniband"
DIRECTIONS = {
    "node_infiniband_port_data_received_bytes_total": "rx",
    "node_infiniband_port_data_transmitted_bytes_total": "tx",
}
SHORTEST_S = 0.1  # over less, the time that reading the counters takes is no longer small
LONGEST_S = 300.0  # an average over more says nothing about now


def rates(before: Readings, latest: Readings, passed_s: float) -> Rates:
    """Return bytes per second by port and direction, from what was read `passed_s` seconds apart.

    Absent are a counter that fell or was not there before, and everything when the two lie too close or too far apart.
    """
    if not SHORTEST_S <= passed_s <= LONGEST_S:
        return {}
    former = _counters(before)
    return {
        key: (value - former[key]) / passed_s
        for key, value in _counters(latest).items()
        if key in former and 0 <= former[key] <= value
    }


def _counters(readings: Readings) -> Mapping[Key, Value]:
    return {
        (labels.get("device", ""), labels.get("port", ""), direction): value
        for name, direction in DIRECTIONS.items()
        for labels, value in readings.of(name)
    }
