"""What the agent hands each collector (`agent.api.Context`): roots, time, memory, and the maker of series."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agent.api import Metric, Series
from agent.inventory import Inventory

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping, Sequence

    from agent.api import Clock, Device, State, VmSize


class SystemClock:
    """The machine's own clocks."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


@dataclass(frozen=True)
class NodeContext:
    """One collector's context. Series are remembered only while somebody holds them, so churn cannot fill memory."""

    log: logging.Logger
    sys: Path
    proc: Path
    dev: Path
    kmsg: Path
    clock: Clock
    state: State
    vm_size: VmSize | None
    interval_s: float
    timeout_s: float
    run_id: str
    avoid: Mapping[str, str] = field(default_factory=dict)
    inventory: Inventory = field(default_factory=Inventory, repr=False)
    _made: weakref.WeakValueDictionary[object, Series] = field(default_factory=weakref.WeakValueDictionary, repr=False)

    def devices(self, component: str) -> Sequence[Device]:
        """Return what the collectors told of this component's devices."""
        return self.inventory.of(component)

    def series(self, metric: Metric, *values: str) -> Series:
        """Return the handle for these label values. Raises ValueError on a wrong count."""
        if len(values) != len(metric.labels):
            raise ValueError(f"metric {metric.name} has the labels {metric.labels}, got the values {values}")
        return self._interned(metric, tuple(zip(metric.labels, values, strict=True)), "")

    def sample(self, metric: Metric, labels: Mapping[str, str], suffix: str = "") -> Series:
        """Return a handle with free labels and a suffix to the metric's name."""
        return self._interned(metric, tuple(labels.items()), suffix)

    def _interned(self, metric: Metric, labels: tuple[tuple[str, str], ...], suffix: str) -> Series:
        key = (metric, labels, suffix)
        series = self._made.get(key)
        if series is None:
            series = self._made[key] = Series(metric, labels, suffix)
        return series
