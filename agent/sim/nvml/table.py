"""Which function of the NVML library tells which words of which key, and where in memory it puts them.

Names and layouts are those of nvml.h, in the versions that the binding (nvidia-ml-py) asks for.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

UINT = ctypes.c_uint32
ULONG_LONG = ctypes.c_uint64


@dataclass(frozen=True)
class Output:
    """One number a function tells: the sum of some words of a key, put `offset` bytes behind one of its pointers."""

    key: str
    """Below `gpu.N.`; `{}` stands for what an argument of the function names."""
    words: tuple[int, ...] = (0,)
    ctype: Any = UINT
    pointer: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Query:
    """A function with a handle, then the numbers that choose (one for each of `choices`), then pointers to outputs."""

    outputs: tuple[Output, ...]
    choices: tuple[tuple[str, ...], ...] = ()
    version: int = 0
    """What the first word of the struct behind the pointer must be; 0: it has no such word."""


def _one(key: str, word: int = 0, ctype: Any = UINT) -> Query:
    return Query((Output(key, (word,), ctype),))


def _each(*places: tuple[str, int]) -> Query:
    """Key and word of each pointer's number."""
    return Query(tuple(Output(key, (word,), pointer=pointer) for pointer, (key, word) in enumerate(places)))


def _struct(ctype: Any, *fields: tuple[str, tuple[int, ...]], start: int = 0, version: int = 0) -> Query:
    """Key and words of each number of a struct whose numbers are of one type, from `start` bytes on."""
    size = ctypes.sizeof(ctype)
    outputs = (Output(key, words, ctype, offset=start + size * place) for place, (key, words) in enumerate(fields))
    return Query(tuple(outputs), version=version)


_CLOCKS = ("graphics", "sm", "mem", "video")

TEXTS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetSerial": "serial",
    "nvmlDeviceGetVbiosVersion": "vbios",
    "nvmlDeviceGetInforomImageVersion": "inforom",
    "nvmlDeviceGetBoardPartNumber": "part_number",
}
SYSTEM_TEXTS = {
    "nvmlSystemGetDriverVersion": "driver.version",
    "nvmlSystemGetNVMLVersion": "driver.nvml_version",
}
SYSTEM_NUMBERS = {
    "nvmlSystemGetCudaDriverVersion": "driver.cuda_version",
    "nvmlSystemGetCudaDriverVersion_v2": "driver.cuda_version",
}
QUERIES = {
    "nvmlDeviceGetBrand": _one("brand"),
    "nvmlDeviceGetArchitecture": _one("architecture"),
    "nvmlDeviceGetMinorNumber": _one("minor"),
    "nvmlDeviceGetNumaNodeId": _one("numa_node"),
    "nvmlDeviceGetCudaComputeCapability": _each(("cuda_capability", 0), ("cuda_capability", 1)),
    "nvmlDeviceGetPersistenceMode": _one("persistence_mode"),
    "nvmlDeviceGetComputeMode": _one("compute_mode"),
    "nvmlDeviceGetPerformanceState": _one("performance_state"),
    "nvmlDeviceGetVirtualizationMode": _one("virtualization_mode"),
    "nvmlDeviceGetMigMode": _each(("mig_mode", 0), ("mig_mode", 1)),
    "nvmlDeviceGetUtilizationRates": _struct(UINT, ("utilization", (0,)), ("utilization", (1,))),
    # The first version of the struct counts what the driver reserves as used.
    "nvmlDeviceGetMemoryInfo": _struct(ULONG_LONG, ("memory", (0,)), ("memory", (2,)), ("memory", (3, 1))),
    "nvmlDeviceGetMemoryInfo_v2": _struct(
        ULONG_LONG, *(("memory", (word,)) for word in range(4)), start=8, version=0x02000028
    ),
    "nvmlDeviceGetTemperature": Query((Output("{}"),), choices=(("temperature",),)),
    "nvmlDeviceGetPowerUsage": _one("power_mw"),
    "nvmlDeviceGetEnforcedPowerLimit": _one("power_limit_mw.enforced"),
    "nvmlDeviceGetPowerManagementLimit": _one("power_limit_mw.requested"),
    "nvmlDeviceGetPowerManagementDefaultLimit": _one("power_limit_mw.default"),
    "nvmlDeviceGetPowerManagementLimitConstraints": _each(("power_limit_mw.min", 0), ("power_limit_mw.max", 0)),
    "nvmlDeviceGetTotalEnergyConsumption": _one("energy_mj", ctype=ULONG_LONG),
    "nvmlDeviceGetClockInfo": Query((Output("clock_mhz.{}"),), choices=(_CLOCKS,)),
    "nvmlDeviceGetMaxClockInfo": Query((Output("clock_max_mhz.{}"),), choices=(_CLOCKS,)),
    "nvmlDeviceGetCurrentClocksEventReasons": _one("event_reasons", ctype=ULONG_LONG),
    "nvmlDeviceGetCurrentClocksThrottleReasons": _one("event_reasons", ctype=ULONG_LONG),
    "nvmlDeviceGetSupportedClocksEventReasons": _one("event_reasons_supported", ctype=ULONG_LONG),
    "nvmlDeviceGetSupportedClocksThrottleReasons": _one("event_reasons_supported", ctype=ULONG_LONG),
    "nvmlDeviceGetEccMode": _each(("ecc_mode", 0), ("ecc_mode", 1)),
    "nvmlDeviceGetTotalEccErrors": Query(
        (Output("ecc_total.{}.{}", ctype=ULONG_LONG),),
        choices=(("corrected", "uncorrected"), ("volatile", "aggregate")),
    ),
    "nvmlDeviceGetRemappedRows": _each(*(("remapped_rows", word) for word in range(4))),
    "nvmlDeviceGetCurrPcieLinkGeneration": _one("pcie", 0),
    "nvmlDeviceGetCurrPcieLinkWidth": _one("pcie", 1),
    "nvmlDeviceGetMaxPcieLinkGeneration": _one("pcie", 2),
    "nvmlDeviceGetMaxPcieLinkWidth": _one("pcie", 3),
    "nvmlDeviceGetPcieReplayCounter": _one("pcie_replays"),
}
