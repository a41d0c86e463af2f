"""What is read of a GPU, and what becomes of the answers: one line per question.

A fast reading is repeated at every run, a slow one every `slow_interval`. Fields come in one call for all of them;
the readings that stand in for fields are used only on a GPU that does not have those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.hw.nvml import calls
from collectors.gpu import metrics
from collectors.gpu.plausibility import ALL_ONES, ImplausibleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.api import Metric, Value
    from agent.hw.nvml.calls import Call

    Key = tuple[Metric, tuple[str, ...]]  # the labels without `gpu` and `uuid`
    Points = Sequence[tuple[Key, Value]]

ALL_LINKS = 0xFFFFFFFF  # scope of the NVLink fields
LINKS_LIMIT = 256  # for a driver that never says that there are no more
ACTIONS = (  # nvmlDeviceGpuRecoveryAction_t
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
_POLICIES = ("power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability")
_ACTIONS_LIMIT = 64  # no enumeration of a driver is as long
_PERFORMANCE_STATE_UNKNOWN = 32  # NVML_PSTATE_UNKNOWN
_PERCENT, _PERCENT_LIMIT = 100, 105  # what a driver's rounding may make of 100


@dataclass(frozen=True, eq=False)  # made once, below, so identity is equality
class Field:
    """One field of the batch: NVML's id and scope, and the points that its value makes."""

    name: str
    id: int
    points: Callable[[Value], Points]
    scope: int = 0


@dataclass(frozen=True, eq=False)
class Reading:
    """One question, put by the first of these calls that the GPU supports, and the points that the answer makes.

    One that stands in for fields makes the points of each of them in this order; it is asked only when the GPU lacks
    one of the fields, and only the points of those it lacks are used.
    """

    name: str
    calls: tuple[Call[Any], ...]
    points: Callable[[Any], Points]
    instead_of: tuple[Field, ...] = ()


def _key(metric: Metric, *labels: str) -> Key:
    return metric, labels


def _plain(metric: Metric, *labels: str) -> Callable[[Value], Points]:
    return _times(1, metric, *labels)


def _times(factor: int, metric: Metric, *labels: str) -> Callable[[Value], Points]:
    key = _key(metric, *labels)

    def points(value: Value) -> Points:
        if value in ALL_ONES:
            raise ImplausibleError(metric)
        return ((key, value * factor),)

    return points


def _divided(divisor: int, metric: Metric, *labels: str) -> Callable[[Value], Points]:
    key = _key(metric, *labels)

    def points(value: Value) -> Points:
        if value in ALL_ONES:
            raise ImplausibleError(metric)
        return ((key, value / divisor),)

    return points


def _sensor(points: Callable[[Value], Points]) -> Callable[[Value], Points]:
    """Take 0 for a sensor that does not exist: then there are no points."""
    return lambda value: points(value) if value else ()


def _recovery(value: Value) -> Points:
    if not 0 <= value < _ACTIONS_LIMIT:
        raise ImplausibleError(metrics.RECOVERY_ACTION)
    points = [((metrics.RECOVERY_ACTION, (action,)), int(value == n)) for n, action in enumerate(ACTIONS)]
    if value >= len(ACTIONS):
        points.append(((metrics.RECOVERY_ACTION, (f"action_{value:g}",)), 1))
    return points


def _links(value: Value) -> Points:
    """Only see whether the number can be true: how many links there are is shown with how many of them are active."""
    if not 0 <= value <= LINKS_LIMIT:
        raise ImplausibleError(metrics.NVLINK_LINKS)
    return ()


def _utilization(answer: tuple[int, int]) -> Points:
    gpu, memory = answer
    return ((metrics.UTILIZATION, ()), _share(gpu)), ((metrics.MEMORY_UTILIZATION, ()), _share(memory))


def _share(percent: int) -> float:
    return 1.0 if _PERCENT < percent <= _PERCENT_LIMIT else percent / _PERCENT


def _memory(answer: tuple[int, int | None, int, int]) -> Points:
    total, reserved, free, used = answer
    points = [((metrics.MEMORY_TOTAL, ()), total), ((metrics.MEMORY_USED, ()), used), ((metrics.MEMORY_FREE, ()), free)]
    return points if reserved is None else [*points, ((metrics.MEMORY_RESERVED, ()), reserved)]


def _power_range(answer: tuple[int, int]) -> Points:
    return [
        ((metrics.POWER_LIMIT, (kind,)), limit / 1000)
        for kind, limit in zip(("min", "max"), answer, strict=True)
        if limit
    ]


def _modes(answer: tuple[int, int]) -> Points:
    return [((metrics.ECC_MODE, (state,)), mode) for state, mode in zip(("current", "pending"), answer, strict=True)]


def _remapped(answer: tuple[int, int, int, int]) -> Points:
    correctable, uncorrectable, pending, failure = answer
    return (
        ((metrics.REMAPPED_ROWS, ("correctable",)), correctable),
        ((metrics.REMAPPED_ROWS, ("uncorrectable",)), uncorrectable),
        ((metrics.REMAP_PENDING, ()), pending),
        ((metrics.REMAP_FAILURE, ()), failure),
    )


def _performance_state(answer: int) -> Points:
    return () if answer == _PERFORMANCE_STATE_UNKNOWN else (((metrics.PERFORMANCE_STATE, ()), answer),)


POWER_FIELD = Field("power", 186, _sensor(_divided(1000, metrics.POWER, "gpu")), 0)
ENERGY_FIELD = Field("energy", 83, _divided(1000, metrics.ENERGY))
REPLAYS_FIELD = Field("PCIe replays", 94, _plain(metrics.PCIE_REPLAYS))
REMAPPED_FIELDS = (  # in the order of what nvmlDeviceGetRemappedRows tells
    Field("remapped rows", 142, _plain(metrics.REMAPPED_ROWS, "correctable")),
    Field("remapped rows", 143, _plain(metrics.REMAPPED_ROWS, "uncorrectable")),
    Field("remapped rows", 144, _plain(metrics.REMAP_PENDING)),
    Field("remapped rows", 145, _plain(metrics.REMAP_FAILURE)),
)
RECOVERY_FIELD = Field("recovery action", 230, _recovery)
LINKS_FIELD = Field("NVLinks", 91, _links)

FAST_FIELDS = (
    *(
        Field(f"throttle time, {policy}", 74 + number, _divided(1_000_000_000, metrics.THROTTLE, policy))
        for number, policy in enumerate(_POLICIES)
    ),
    POWER_FIELD,
    Field("power of the module", 186, _sensor(_divided(1000, metrics.POWER, "module")), 1),
    Field("power of the memory", 186, _sensor(_divided(1000, metrics.POWER, "memory")), 2),
    Field("average power", 185, _sensor(_divided(1000, metrics.POWER_AVERAGE))),
    Field("memory temperature", 82, _sensor(_plain(metrics.TEMPERATURE, "memory"))),
    ENERGY_FIELD,
    REPLAYS_FIELD,
    Field("NVLink bytes, tx data", 138, _times(1024, metrics.NVLINK_BYTES, "tx", "data"), ALL_LINKS),
    Field("NVLink bytes, rx data", 139, _times(1024, metrics.NVLINK_BYTES, "rx", "data"), ALL_LINKS),
    Field("NVLink bytes, tx raw", 140, _times(1024, metrics.NVLINK_BYTES, "tx", "raw"), ALL_LINKS),
    Field("NVLink bytes, rx raw", 141, _times(1024, metrics.NVLINK_BYTES, "rx", "raw"), ALL_LINKS),
    *REMAPPED_FIELDS,
    RECOVERY_FIELD,
)
ECC_FIELDS = {
    (error, lifetime): Field(f"ECC errors, {error} {lifetime}", 3 + number, _plain(metrics.ECC_ERRORS, error, lifetime))
    for number, (lifetime, error) in enumerate(
        (lifetime, error) for lifetime in ("volatile", "aggregate") for error in ("corrected", "uncorrected")
    )
}
SLOW_FIELDS = (*ECC_FIELDS.values(), LINKS_FIELD)

WITNESSES = (  # of whether the GPU answers at all
    Reading("temperature", (calls.TEMPERATURE, calls.TEMPERATURE_V), _plain(metrics.TEMPERATURE, "gpu")),
    Reading("utilization", (calls.UTILIZATION,), _utilization),
    Reading("memory", (calls.MEMORY_V2, calls.MEMORY_V1), _memory),
)
FAST = (
    *(
        Reading(f"{domain} clock", (call,), _times(1_000_000, metrics.CLOCK, domain))
        for domain, call in calls.CLOCKS.items()
    ),
)
FAST_STAND_INS = (
    Reading("power", (calls.POWER,), _sensor(_divided(1000, metrics.POWER, "gpu")), (POWER_FIELD,)),
    Reading("energy", (calls.ENERGY,), _divided(1000, metrics.ENERGY), (ENERGY_FIELD,)),
    Reading("PCIe replays", (calls.PCIE_REPLAYS,), _plain(metrics.PCIE_REPLAYS), (REPLAYS_FIELD,)),
    Reading("remapped rows", (calls.REMAPPED_ROWS,), _remapped, REMAPPED_FIELDS),
)
SLOW = (
    Reading("power limits", (calls.POWER_LIMIT_RANGE,), _power_range),
    *(
        Reading(f"{kind} power limit", (call,), _sensor(_divided(1000, metrics.POWER_LIMIT, kind)))
        for kind, call in (
            ("enforced", calls.POWER_LIMIT_ENFORCED),
            ("requested", calls.POWER_LIMIT_REQUESTED),
            ("default", calls.POWER_LIMIT_DEFAULT),
        )
    ),
    *(
        Reading(f"highest {domain} clock", (call,), _sensor(_times(1_000_000, metrics.CLOCK_MAX, domain)))
        for domain, call in calls.MAX_CLOCKS.items()
    ),
    Reading("ECC mode", (calls.ECC_MODE,), _modes),
    Reading("PCIe generation", (calls.PCIE_GENERATION,), _sensor(_plain(metrics.PCIE_GENERATION))),
    Reading("PCIe width", (calls.PCIE_WIDTH,), _sensor(_plain(metrics.PCIE_WIDTH))),
    Reading("highest PCIe generation", (calls.PCIE_MAX_GENERATION,), _sensor(_plain(metrics.PCIE_MAX_GENERATION))),
    Reading("highest PCIe width", (calls.PCIE_MAX_WIDTH,), _sensor(_plain(metrics.PCIE_MAX_WIDTH))),
    Reading("performance state", (calls.PERFORMANCE_STATE,), _performance_state),
)
SLOW_STAND_INS = tuple(
    Reading(f"ECC errors, {' '.join(key)}", (call,), _plain(metrics.ECC_ERRORS, *key), (ECC_FIELDS[key],))
    for key, call in calls.ECC_TOTALS.items()
)
