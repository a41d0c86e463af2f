"""What a GPU is called: the labels of gpu_info, each with its question and what the answer becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.hw.nvml import calls
from collectors.gpu import metrics
from collectors.gpu.plausibility import ALL_ONES, ImplausibleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.hw.nvml.calls import Call

_MINORS_LIMIT = 1 << 20  # of the kernel's device numbers
_CAPABILITY_LIMIT = 1000
_BRANDS = {  # nvmlBrandType_t
    1: "quadro",
    2: "tesla",
    3: "nvs",
    4: "grid",
    5: "geforce",
    6: "titan",
    7: "nvidia_vapps",
    8: "nvidia_vpc",
    9: "nvidia_vcs",
    10: "nvidia_vws",
    11: "nvidia_cloud_gaming",
    12: "quadro_rtx",
    13: "nvidia_rtx",
    14: "nvidia",
    15: "geforce_rtx",
    16: "titan_rtx",
}
_ARCHITECTURES = {  # nvmlDeviceArchitecture_t; all ones is "unknown"
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}


def _minor(number: int) -> str:
    if not 0 <= number < _MINORS_LIMIT:
        raise ImplausibleError(metrics.INFO)
    return str(number)


def _brand(number: int) -> str:
    if number in ALL_ONES:
        raise ImplausibleError(metrics.INFO)
    return _BRANDS.get(number, "")


def _capability(version: tuple[int, int]) -> str:
    if not all(0 <= part < _CAPABILITY_LIMIT for part in version):
        raise ImplausibleError(metrics.INFO)
    return f"{version[0]}.{version[1]}"


# The labels of gpu_info after `gpu` and `uuid`, but for the address, in the order that the metric declares.
IDENTITY: dict[str, tuple[Call[Any], Callable[[Any], str]]] = {
    "name": (calls.NAME, str),
    "serial": (calls.SERIAL, str),
    "minor": (calls.MINOR, _minor),
    "vbios_version": (calls.VBIOS_VERSION, str),
    "brand": (calls.BRAND, _brand),
    "architecture": (calls.ARCHITECTURE, lambda number: _ARCHITECTURES.get(number, "")),
    "compute_capability": (calls.COMPUTE_CAPABILITY, _capability),
}
