"""What a value can be: a driver sometimes answers with all bits set, or with what another field had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectors.gpu import metrics

if TYPE_CHECKING:
    from agent.api import Metric, Value
    from collectors.gpu.readings import Key

# What a driver writes where it has nothing: all bits set, in the widths of NVML's numbers. As a true value, one in four
# billion: then it is missing once.
ALL_ONES = frozenset({(1 << 32) - 1, (1 << 64) - 1})

_MEMORY_LIMIT_BYTES = 1 << 50
_POWER_LIMIT_W = 20_000.0  # of a module with several GPUs, too
_POWER_SLACK = 2  # times its highest limit is more than a GPU can draw
_COUNTER_LIMIT = 1 << 63
_REMAPPED_LIMIT = 4096  # no GPU has as many spare rows
_FLAG = (0, 1)
# Low and high, both allowed.
_BOUNDS: dict[Metric, tuple[Value, Value]] = {
    metrics.UTILIZATION: (0, 1),
    metrics.MEMORY_UTILIZATION: (0, 1),
    metrics.MEMORY_TOTAL: (1, _MEMORY_LIMIT_BYTES),
    metrics.MEMORY_USED: (0, _MEMORY_LIMIT_BYTES),
    metrics.MEMORY_FREE: (0, _MEMORY_LIMIT_BYTES),
    metrics.MEMORY_RESERVED: (0, _MEMORY_LIMIT_BYTES),
    metrics.TEMPERATURE: (-20, 150),
    metrics.POWER: (0, _POWER_LIMIT_W),
    metrics.POWER_AVERAGE: (0, _POWER_LIMIT_W),
    metrics.POWER_LIMIT: (0, _POWER_LIMIT_W),
    metrics.ENERGY: (0, 1e15),
    metrics.CLOCK: (0, 100e9),  # memory clocks are told as data rates, 14 GHz on GDDR7
    metrics.CLOCK_MAX: (0, 100e9),
    metrics.THROTTLE: (0, 1e10),
    metrics.ECC_MODE: _FLAG,
    metrics.ECC_ERRORS: (0, _COUNTER_LIMIT),
    metrics.REMAPPED_ROWS: (0, _REMAPPED_LIMIT),
    metrics.REMAP_PENDING: _FLAG,
    metrics.REMAP_FAILURE: _FLAG,
    metrics.PCIE_GENERATION: (1, 16),
    metrics.PCIE_WIDTH: (1, 64),
    metrics.PCIE_MAX_GENERATION: (1, 16),
    metrics.PCIE_MAX_WIDTH: (1, 64),
    metrics.PCIE_REPLAYS: (0, (1 << 32) - 2),
    metrics.NVLINK_BYTES: (0, _COUNTER_LIMIT << 10),
    metrics.PERSISTENCE_MODE: _FLAG,
    metrics.PERFORMANCE_STATE: (0, 15),
}
_PARTS_OF_MEMORY = frozenset({metrics.MEMORY_USED, metrics.MEMORY_FREE, metrics.MEMORY_RESERVED})
_OF_ONE_GPU = frozenset({(metrics.POWER, ("gpu",)), (metrics.POWER, ("memory",)), (metrics.POWER_AVERAGE, ())})
_HIGHEST_POWER = (metrics.POWER_LIMIT, ("max",))
_LEARNED = _PARTS_OF_MEMORY | {metrics.MEMORY_TOTAL, metrics.POWER, metrics.POWER_AVERAGE, metrics.POWER_LIMIT}


class ImplausibleError(Exception):
    """An answer that cannot be true. `metric` is what it was for."""

    def __init__(self, metric: Metric) -> None:
        super().__init__(metric.name)
        self.metric = metric


class Plausibility:
    """The bounds of one GPU's values; its memory and its highest power limit are learned from what was believed."""

    def __init__(self) -> None:
        self._memory_bytes: Value | None = None
        self._other_memory_bytes: Value | None = None  # what was told last, and not believed
        self._power_w: Value = _POWER_LIMIT_W

    def admits(self, key: Key, value: Value) -> bool:
        """Say whether the value can be true."""
        metric = key[0]
        bounds = _BOUNDS.get(metric)
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            return False
        return metric not in _LEARNED or self._agrees(key, value)

    def _agrees(self, key: Key, value: Value) -> bool:
        """Say whether the value agrees with what is known of this GPU, and learn from it."""
        metric = key[0]
        if metric is metrics.MEMORY_TOTAL:
            return self._believes_total(value)
        if metric in _PARTS_OF_MEMORY:
            return value not in ALL_ONES and (self._memory_bytes is None or value <= self._memory_bytes)
        if key in _OF_ONE_GPU:
            return value <= self._power_w
        if key == _HIGHEST_POWER:
            self._power_w = value * _POWER_SLACK
        return True

    def _believes_total(self, value: Value) -> bool:
        """Believe a first total, the same again, and another once it was told twice in a row."""
        if value in ALL_ONES:
            return False
        if self._memory_bytes not in (None, value) and self._other_memory_bytes != value:
            self._other_memory_bytes = value
            return False
        self._memory_bytes, self._other_memory_bytes = value, None
        return True
