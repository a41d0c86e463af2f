"""What a value can be: a driver sometimes answers with all bits set, or with what another field had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectors.gpu import metrics

if TYPE_CHECKING:
    from agent.api import Metric, Value
    from collectors.gpu.readings import Key

_MEMORY_LIMIT_BYTES = 1 << 50
_POWER_LIMIT_W = 20_000.0  # of a module with several GPUs, too
_POWER_SLACK = 2  # times its highest limit is more than a GPU can draw
_COUNTER_LIMIT = 1 << 63
_FLAG = (0, 1)
# Low and high, both allowed. All ones of the answer's own width is always outside.
_BOUNDS: dict[Metric, tuple[Value, Value]] = {
    metrics.UTILIZATION: (0, 1),
    metrics.MEMORY_UTILIZATION: (0, 1),
    metrics.MEMORY_TOTAL: (1, _MEMORY_LIMIT_BYTES),
    metrics.TEMPERATURE: (-20, 150),
    metrics.POWER: (0, _POWER_LIMIT_W),
    metrics.POWER_AVERAGE: (0, _POWER_LIMIT_W),
    metrics.POWER_LIMIT: (0, _POWER_LIMIT_W),
    metrics.ENERGY: (0, 1e15),
    metrics.CLOCK: (0, 10e9),
    metrics.CLOCK_MAX: (0, 10e9),
    metrics.THROTTLE: (0, 1e10),
    metrics.ECC_MODE: _FLAG,
    metrics.ECC_ERRORS: (0, _COUNTER_LIMIT),
    metrics.REMAPPED_ROWS: (0, 1 << 31),
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


class Plausibility:
    """The bounds of one GPU's values; its memory and its highest power limit are learned from what was believed."""

    def __init__(self) -> None:
        self._memory_bytes: Value = _MEMORY_LIMIT_BYTES
        self._power_w: Value = _POWER_LIMIT_W

    def admits(self, key: Key, value: Value) -> bool:
        """Say whether the value can be true."""
        metric, labels = key
        if metric in _PARTS_OF_MEMORY:
            return 0 <= value <= self._memory_bytes
        if key in _OF_ONE_GPU:
            return 0 <= value <= self._power_w
        bounds = _BOUNDS.get(metric)
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            return False
        if metric is metrics.MEMORY_TOTAL:
            self._memory_bytes = value
        elif metric is metrics.POWER_LIMIT and labels == ("max",):
            self._power_w = value * _POWER_SLACK
        return True
