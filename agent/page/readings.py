"""The values of all snapshots, to be looked up by metric name and labels. What is not there is None."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from agent.api import Value
    from agent.snapshot import Snapshot

    Labels = Mapping[str, str]
    Point = tuple[str, Labels, Value]

# What the page shows; the values of a node are many more.
PREFIXES = (
    "gpu_",
    "infiniband_",
    "node_infiniband_",
    "nvswitch_",
    "host_uname",
    "host_uptime",
    "host_load",
    "host_memory",
    "host_cpus",
)
_DIGITS = re.compile(r"(\d+)")


class Readings:
    """Points by metric name. Of two that are equal the last one holds."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._points: dict[str, list[tuple[Labels, Value]]] = defaultdict(list)
        for name, labels, value in points:
            self._points[name].append((labels, value))

    def names(self) -> Iterable[str]:
        """Return the names of the metrics that are there."""
        return self._points

    def of(self, name: str) -> Iterator[tuple[Labels, Value]]:
        """Return the labels and value of every series of a metric."""
        yield from self._points.get(name, ())

    def value(self, name: str, **labels: str) -> Value | None:
        """Return the value of the series that has these labels among its own."""
        found = None
        for given, value in self._points.get(name, ()):
            if all(given.get(label) == wanted for label, wanted in labels.items()):
                found = value
        return found

    def is_on(self, name: str, **labels: str) -> bool:
        """Say whether a flag is there and set."""
        return bool(self.value(name, **labels))

    def info(self, name: str, label: str) -> str:
        """Return a label of a metric whose labels are what it tells; empty when it is not there."""
        return next((labels.get(label, "") for labels, value in self.of(name) if value), "")

    def active(self, name: str, label: str) -> list[str]:
        """Return the label's values of those series of a state set that are set."""
        return [labels.get(label, "") for labels, value in self.of(name) if value]

    def by(self, identify: Callable[[str, Labels], str | None]) -> dict[str, Readings]:
        """Split by device: `identify` gives a device's key for name and labels, None for what is no device's."""
        points: dict[str, list[Point]] = {}
        for name, series in self._points.items():
            for labels, value in series:
                key = identify(name, labels)
                if key is not None:
                    points.setdefault(key, []).append((name, labels, value))
        return {key: Readings(several) for key, several in points.items()}


def read(snapshots: Mapping[str, Snapshot], owners: Mapping[str, str]) -> Readings:
    """Look through all snapshots. `owners` gives the source of each declared metric: from others it is not taken."""
    return Readings(_points(snapshots, owners))


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts mlx5_ib10 after mlx5_ib9: of two numbers the longer one is the greater."""
    return [(len(part) if part.isdigit() else 0, part) for part in _DIGITS.split(name)]


def _points(snapshots: Mapping[str, Snapshot], owners: Mapping[str, str]) -> Iterator[Point]:
    for source, snapshot in snapshots.items():
        for series, value in zip(snapshot.series, snapshot.values, strict=False):
            name = series.metric.name
            if name.startswith(PREFIXES) and owners.get(name, source) == source and _is_finite(value):
                yield name + series.suffix, dict(series.labels), value


def _is_finite(value: Value) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every unit of measure
        return False
