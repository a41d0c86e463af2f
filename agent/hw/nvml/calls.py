"""What can be asked of a GPU: for each question the binding's function, its arguments, and the answer as plain data.

Numbers of enumerations and struct versions are NVML's binary interface (nvml.h) and never change. Answers are in NVML's
own units: milliwatts, millijoules, MHz, percent, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_MEMORY_V2 = 0x02000028  # nvmlMemory_v2
_SENSOR_GPU = 0  # NVML_TEMPERATURE_GPU


@dataclass(frozen=True, eq=False)  # made once, below, so identity is equality
class Call(Generic[T]):
    """One question. `convert` makes plain data of the binding's answer, and raises for what is none."""

    function: str
    convert: Callable[[Any], T]
    arguments: tuple[int, ...] = ()


def _number(function: str, *arguments: int) -> Call[int]:
    return Call(function, int, arguments)


def _text(function: str) -> Call[str]:
    return Call(function, _as_text)


def _as_text(answer: Any) -> str:
    if not isinstance(answer, str):
        raise TypeError(f"{answer!r} is no text")
    return answer


def _pair(function: str) -> Call[tuple[int, int]]:
    return Call(function, lambda answer: (int(answer[0]), int(answer[1])))


def _four(answer: Any) -> tuple[int, int, int, int]:
    first, second, third, fourth = answer
    return int(first), int(second), int(third), int(fourth)


UUID = _text("nvmlDeviceGetUUID")
INDEX = _number("nvmlDeviceGetIndex")
NAME = _text("nvmlDeviceGetName")
SERIAL = _text("nvmlDeviceGetSerial")
VBIOS_VERSION = _text("nvmlDeviceGetVbiosVersion")
PCI_BUS_ID = Call("nvmlDeviceGetPciInfo", lambda answer: _as_text(answer.busId))
MINOR = _number("nvmlDeviceGetMinorNumber")
BRAND = _number("nvmlDeviceGetBrand")
ARCHITECTURE = _number("nvmlDeviceGetArchitecture")
COMPUTE_CAPABILITY = _pair("nvmlDeviceGetCudaComputeCapability")

UTILIZATION: Call[tuple[int, int]] = Call(
    "nvmlDeviceGetUtilizationRates", lambda answer: (int(answer.gpu), int(answer.memory))
)
# Total, reserved, free, used. The first version counts what is reserved as used.
MEMORY_V2: Call[tuple[int, int | None, int, int]] = Call(
    "nvmlDeviceGetMemoryInfo",
    lambda answer: (int(answer.total), int(answer.reserved), int(answer.free), int(answer.used)),
    (_MEMORY_V2,),
)
MEMORY_V1: Call[tuple[int, int | None, int, int]] = Call(
    "nvmlDeviceGetMemoryInfo", lambda answer: (int(answer.total), None, int(answer.free), int(answer.used))
)
TEMPERATURE = _number("nvmlDeviceGetTemperature", _SENSOR_GPU)
TEMPERATURE_V = _number("nvmlDeviceGetTemperatureV", _SENSOR_GPU)
POWER = _number("nvmlDeviceGetPowerUsage")
ENERGY = _number("nvmlDeviceGetTotalEnergyConsumption")
POWER_LIMIT_ENFORCED = _number("nvmlDeviceGetEnforcedPowerLimit")
POWER_LIMIT_REQUESTED = _number("nvmlDeviceGetPowerManagementLimit")
POWER_LIMIT_DEFAULT = _number("nvmlDeviceGetPowerManagementDefaultLimit")
POWER_LIMIT_RANGE = _pair("nvmlDeviceGetPowerManagementLimitConstraints")
CLOCKS = {  # NVML_CLOCK_GRAPHICS, _SM, _MEM, _VIDEO
    domain: _number("nvmlDeviceGetClockInfo", number)
    for number, domain in enumerate(("graphics", "sm", "memory", "video"))
}
MAX_CLOCKS = {domain: _number("nvmlDeviceGetMaxClockInfo", *call.arguments) for domain, call in CLOCKS.items()}
EVENT_REASONS = _number("nvmlDeviceGetCurrentClocksEventReasons")
THROTTLE_REASONS = _number("nvmlDeviceGetCurrentClocksThrottleReasons")  # the name until R535
EVENT_REASONS_SUPPORTED = _number("nvmlDeviceGetSupportedClocksEventReasons")
THROTTLE_REASONS_SUPPORTED = _number("nvmlDeviceGetSupportedClocksThrottleReasons")
ECC_MODE = _pair("nvmlDeviceGetEccMode")
ECC_TOTALS = {
    (error, lifetime): _number("nvmlDeviceGetTotalEccErrors", error_number, lifetime_number)
    for error_number, error in enumerate(("corrected", "uncorrected"))
    for lifetime_number, lifetime in enumerate(("volatile", "aggregate"))
}
REMAPPED_ROWS = Call("nvmlDeviceGetRemappedRows", _four)  # correctable, uncorrectable, pending, failure
PCIE_GENERATION = _number("nvmlDeviceGetCurrPcieLinkGeneration")
PCIE_WIDTH = _number("nvmlDeviceGetCurrPcieLinkWidth")
PCIE_MAX_GENERATION = _number("nvmlDeviceGetMaxPcieLinkGeneration")
PCIE_MAX_WIDTH = _number("nvmlDeviceGetMaxPcieLinkWidth")
PCIE_REPLAYS = _number("nvmlDeviceGetPcieReplayCounter")
MIG_MODE = _pair("nvmlDeviceGetMigMode")  # current, pending
PERSISTENCE_MODE = _number("nvmlDeviceGetPersistenceMode")
PERFORMANCE_STATE = _number("nvmlDeviceGetPerformanceState")


@cache
def nvlink_state(link: int) -> Call[int]:
    """Return the question for the state of one link: 1 active, 0 not."""
    return _number("nvmlDeviceGetNvLinkState", link)
