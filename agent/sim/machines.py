"""The VM sizes that can be simulated. What a size promises is in `agent.sizes`; here is what the hardware is like.

Powers, clocks and firmware are those of public outputs of such machines, and the PCI addresses those that Azure gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent import sizes
from agent.sim.infiniband import (
    ACCELERATED_NETWORKING,
    ACCELERATED_NETWORKING_100,
    CONNECTX6,
    CONNECTX7,
    CONNECTX8,
)

if TYPE_CHECKING:
    from agent.api import VmSize
    from agent.sim.infiniband import Model

AMPERE, HOPPER, BLACKWELL = 7, 9, 10  # nvmlDeviceArchitecture_t
_DOMAINS_8 = ("0001", "0002", "0003", "0008", "0009", "000a", "000b", "000c")


@dataclass(frozen=True)
class GpuModel:
    """A kind of GPU. Powers in watts, clocks in MHz, temperatures in degrees Celsius, both under no and full load."""

    name: str
    architecture: int
    capability: str  # major and minor
    pci_device: int  # device and vendor in one word, as NVML gives them
    pci_subsystem: int
    part_number: str
    vbios: str
    inforom: str
    power_idle: float = 0.0
    power_busy: float = 0.0
    power_limit: float = 0.0
    power_limit_min: float = 0.0
    temperature_idle: float = 32.0
    temperature_busy: float = 64.0
    clock_idle: int = 345
    clock_max: int = 1980
    clock_memory: int = 2619
    clock_video_max: int = 1545
    reserved_mib: int = 500
    nvlinks: int = 0
    nvlink_bytes_per_s: float = 25e9  # of one link in one direction
    pcie: tuple[int, int] = (5, 16)  # generation and width
    module_power: bool = False  # tells what the CPU beside it and its memory draw, too
    fraction: bool = False  # a virtual function: most of what a sensor says is kept from the guest


A100 = GpuModel(
    name="NVIDIA A100-SXM4-40GB",
    architecture=AMPERE,
    capability="8 0",
    pci_device=0x20B010DE,
    pci_subsystem=0x134F10DE,
    part_number="692-2G506-0200-002",
    vbios="92.00.45.00.03",
    inforom="G506.0200.00.04",
    power_idle=58,
    power_busy=385,
    power_limit=400,
    power_limit_min=100,
    clock_idle=210,
    clock_max=1410,
    clock_memory=1215,
    clock_video_max=1290,
    reserved_mib=424,
    nvlinks=12,
    pcie=(4, 16),
)
H200 = GpuModel(
    name="NVIDIA H200",
    architecture=HOPPER,
    capability="9 0",
    pci_device=0x233510DE,
    pci_subsystem=0x18BE10DE,
    part_number="692-2G520-0280-000",
    vbios="96.00.BC.00.01",
    inforom="G520.0280.00.03",
    power_idle=76,
    power_busy=684,
    power_limit=700,
    power_limit_min=200,
    temperature_idle=29,
    temperature_busy=67,
    clock_memory=3201,
    reserved_mib=615,
    nvlinks=18,
)
H100_NVL = GpuModel(
    name="NVIDIA H100 NVL",
    architecture=HOPPER,
    capability="9 0",
    pci_device=0x232110DE,
    pci_subsystem=0x183910DE,
    part_number="900-21010-0020-000",
    vbios="96.00.99.00.03",
    inforom="1010.0200.00.02",
    power_idle=62,
    power_busy=372,
    power_limit=400,
    power_limit_min=200,
    temperature_idle=34,
    temperature_busy=69,
    clock_max=1785,
    reserved_mib=478,
    nvlinks=12,
)
GB300 = GpuModel(
    name="NVIDIA GB300",
    architecture=BLACKWELL,
    capability="10 3",
    pci_device=0x31C210DE,
    pci_subsystem=0x21F110DE,
    part_number="900-2G548-0021-000",
    vbios="97.10.4C.00.02",
    inforom="G548.0201.00.06",
    power_idle=178,
    power_busy=1290,
    power_limit=1400,
    power_limit_min=200,
    temperature_idle=31,
    temperature_busy=58,
    clock_idle=120,
    clock_max=2032,
    clock_memory=3996,
    clock_video_max=2032,
    reserved_mib=890,
    nvlinks=18,
    nvlink_bytes_per_s=50e9,
    pcie=(6, 16),
    module_power=True,
)
RTX_PRO_6000_QUARTER = GpuModel(
    name="NVIDIA RTX Pro 6000 Blackwell DC-4-24Q",
    architecture=BLACKWELL,
    capability="12 0",
    pci_device=0x2BB510DE,
    pci_subsystem=0x204E10DE,
    part_number="",
    vbios="00.00.00.00.00",
    inforom="",
    reserved_mib=1420,
    fraction=True,
)


@dataclass(frozen=True)
class Machine:
    """What a VM of one size is made of, beside what its size promises."""

    cpus: int
    memory_gib: int
    gpu: GpuModel | None = None
    gpu_addresses: tuple[str, ...] = ()
    hca: Model = CONNECTX7
    frontend: Model | None = ACCELERATED_NETWORKING_100
    driver: str = "570.133.20"
    cuda: int = 12080  # the version as a number, as NVML gives it
    architecture: str = "x86_64"


MACHINES = {
    "ND96asr_v4": Machine(
        cpus=96,
        memory_gib=886,
        gpu=A100,
        gpu_addresses=tuple(f"{domain:04x}:00:00.0" for domain in (1, 2, 3, 4, 0xB, 0xC, 0xD, 0xE)),
        hca=CONNECTX6,
        frontend=ACCELERATED_NETWORKING,
    ),
    "ND96isr_H200_v5": Machine(
        cpus=96, memory_gib=1850, gpu=H200, gpu_addresses=tuple(f"{domain}:00:00.0" for domain in _DOMAINS_8)
    ),
    "ND128isr_GB300_v6": Machine(
        cpus=128,
        memory_gib=882,
        gpu=GB300,
        gpu_addresses=("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0"),
        hca=CONNECTX8,
        frontend=None,
        driver="580.105.08",
        cuda=13000,
        architecture="aarch64",
    ),
    "HB176rs_v4": Machine(cpus=176, memory_gib=755),
    "NC80adis_H100_v5": Machine(cpus=80, memory_gib=630, gpu=H100_NVL, gpu_addresses=("0001:00:00.0", "0002:00:00.0")),
    "NC36ds_xl_RTXPRO6000BSE_v6": Machine(
        cpus=36,
        memory_gib=132,
        gpu=RTX_PRO_6000_QUARTER,
        gpu_addresses=("0002:00:00.0",),
        frontend=None,
        driver="580.105.08",
        cuda=13000,
    ),
}


class UnknownSizeError(ValueError):
    """A VM size that cannot be simulated. Names those that can."""


def machine(name: str) -> tuple[VmSize, Machine]:
    """Return what a size promises and what it is made of. Case and `Standard_` do not matter.

    Raises UnknownSizeError.
    """
    promise = sizes.load(name)
    if promise is None or promise.name not in MACHINES:
        raise UnknownSizeError(f"no simulation of VM size {name!r}; there are {', '.join(MACHINES)}")
    return promise, MACHINES[promise.name]
