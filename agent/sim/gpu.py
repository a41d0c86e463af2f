"""One simulated GPU: how load moves its sensors and counters, its faults, and what NVML would say of it.

A GPU's values follow from the load of each step and nothing else. What it shows is a mapping in the form of the state
file that `agent.sim.nvml` reads, without the `gpu.N.` before each key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.sim.machines import BLACKWELL

if TYPE_CHECKING:
    from agent.sim.machines import GpuModel

MIB = 1 << 20
ALL_LINKS = 0xFFFFFFFF  # the scope that stands for all NVLinks together
GPU_IS_LOST = 15  # nvmlReturn_t
RECOVERY_NONE, RECOVERY_DRAIN_AND_RESET = 0, 4  # field 230
REASON_IDLE, REASON_POWER_CAP = 0x1, 0x4  # nvmlClocksEventReasons
REASONS_SUPPORTED = 0x1FF

_LOAD_LAG_S = 1.5
_MEMORY_LAG_S = 2.5
_HEAT_LAG_S = 14.0  # of a heat sink
_COLLECTIVE_SHARE = 0.45  # of what its NVLinks can carry while a job computes and exchanges by turns
_PROTOCOL = 1.11  # bytes on the wire for each byte of data
_CAPPED, _CLOCK_STEP = 0.93, 15  # share of the highest clock that the power cap leaves; MHz
_POLICIES = ("power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability")  # fields 74 to 79


@dataclass(frozen=True)
class Load:
    """What a GPU is given to do: the share of time with a kernel on it, how hard those work, and memory in use."""

    busy: float = 0.0
    intensity: float = 0.0
    memory: float = 0.0


IDLE = Load()


@dataclass
class Faults:
    """What has gone wrong since the driver was loaded, and since the card was made."""

    lost: bool = False
    corrected: int = 0  # since the driver was loaded; the card's own totals go on from before
    uncorrected: int = 0
    corrected_before: int = 0
    uncorrected_before: int = 0
    remapped_correctable: int = 0
    remapped_uncorrectable: int = 0
    remap_pending: bool = False
    pcie_replays: int = 0
    recovery_action: int = RECOVERY_NONE


@dataclass
class SimGpu:
    """One GPU. `phase` (0 to 1) sets it a little apart from its neighbours."""

    number: int  # the driver's minor number
    model: GpuModel
    address: str
    numa: int
    uuid: str
    serial: str
    memory_bytes: int
    nvlinks: int
    phase: float
    faults: Faults = field(default_factory=Faults)
    busy: float = 0.0
    intensity: float = 0.0
    memory_used: float = 0.0  # bytes
    energy_j: float = 0.0
    nvlink_bytes: float = 0.0  # in one direction
    throttled_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_POLICIES, 0.0))

    def __post_init__(self) -> None:
        """Begin as a GPU does that was idle for long: at rest, with the counters of some days of work."""
        self._heat = self.phase * 0.08
        self.energy_j = self.model.power_idle * 2.4e5 * (1 + self.phase)
        self.nvlink_bytes = self.nvlinks * 3.1e13 * (1 + self.phase / 9)
        self.faults.corrected = int(self.phase * 3)
        self.faults.corrected_before = int(self.phase * 11)
        self.faults.remapped_correctable = int(self.phase * 1.3)

    @property
    def power_w(self) -> float:
        """What it draws now."""
        model = self.model
        wanted = model.power_idle + (model.power_busy - model.power_idle) * self.intensity * (0.97 + self.phase * 0.08)
        return min(wanted, model.power_limit)

    @property
    def temperature_c(self) -> float:
        """Of the chip."""
        model = self.model
        warmer = self.phase * 3  # the air has passed others before
        return model.temperature_idle + warmer + (model.temperature_busy - model.temperature_idle) * self._heat

    def advance(self, seconds: float, load: Load) -> None:
        """Let time pass under a load; everything lags behind it as hardware does."""
        if self.faults.lost:
            return
        self.busy += (load.busy - self.busy) * _share(seconds, _LOAD_LAG_S)
        self.intensity += (load.intensity - self.intensity) * _share(seconds, _LOAD_LAG_S)
        wanted = load.memory * self.memory_bytes
        filling = wanted > self.memory_used  # what ends gives all back at once
        self.memory_used += (wanted - self.memory_used) * (_share(seconds, _MEMORY_LAG_S) if filling else 1)
        self._heat += (self.intensity - self._heat) * _share(seconds, _HEAT_LAG_S)
        self.energy_j += self.power_w * seconds
        exchanged = self.intensity * _COLLECTIVE_SHARE * self.model.nvlink_bytes_per_s * self.nvlinks
        self.nvlink_bytes += exchanged * seconds
        if self._power_capped:
            self.throttled_s["power"] += seconds * 0.4

    def strike_memory(self) -> None:
        """Have an uncorrectable error in memory that was contained: a row waits to be replaced at the next reset."""
        self.faults.uncorrected += 1
        self.faults.remapped_uncorrectable += 1
        self.faults.remap_pending = True
        self.faults.recovery_action = RECOVERY_DRAIN_AND_RESET

    def reset(self) -> None:
        """Reset it, which also brings a lost one back: pending remaps take place, and what counts from then is 0."""
        faults = self.faults
        self.faults = Faults(
            corrected_before=faults.corrected_before + faults.corrected,
            uncorrected_before=faults.uncorrected_before + faults.uncorrected,
            remapped_correctable=faults.remapped_correctable,
            remapped_uncorrectable=faults.remapped_uncorrectable,
        )
        self.energy_j = self.nvlink_bytes = 0.0
        self.throttled_s = dict.fromkeys(_POLICIES, 0.0)

    def nvml(self) -> dict[str, str]:
        """Return what NVML would say."""
        shown = {**self._identity(), **self._memory(), "performance_state": "0"}
        if not self.model.fraction:
            shown |= {**self._sensors(), **self._clocks(), **self._health(), **self._buses()}
        if self.faults.lost:
            shown["return.*"] = str(GPU_IS_LOST)
        return shown

    def information(self, driver: str) -> str:
        """Return its /proc/driver/nvidia/gpus/ADDRESS/information."""
        return (
            f"Model: \t\t {self.model.name}\nIRQ:   \t\t {0 if self.model.fraction else 90 + self.number}\n"
            f"GPU UUID: \t {self.uuid}\nVideo BIOS: \t {self.model.vbios.lower()}\nBus Type: \t PCIe\n"
            f"DMA Size: \t 47 bits\nDMA Mask: \t 0x7fffffffffff\nBus Location: \t {self.address}\n"
            f"Device Minor: \t {self.number}\nGPU Firmware: \t {driver}\nGPU Excluded:\t No\n"
        )

    @property
    def _power_capped(self) -> bool:
        return self.model.power_limit > 0 and self.power_w > self.model.power_limit * 0.955

    def _identity(self) -> dict[str, str]:
        model = self.model
        shown = {
            "uuid": self.uuid,
            "name": model.name,
            "pci": self.address,
            "pci_device_id": f"{model.pci_device:#x}",
            "pci_subsystem_id": f"{model.pci_subsystem:#x}",
            "minor": str(self.number),
            "brand": "10" if model.fraction else "14",  # nvmlBrandType_t: virtual workstation, NVIDIA
            "architecture": str(model.architecture),
            "cuda_capability": model.capability,
            "vbios": model.vbios,
            "persistence_mode": "1",
            "compute_mode": "0",
            "virtualization_mode": "2" if model.fraction else "1",  # vGPU, or the whole device passed through
        }
        if not model.fraction:
            shown |= {"serial": self.serial, "inforom": model.inforom, "part_number": model.part_number}
            shown |= {"mig_mode": "0 0", "numa_node": str(self.numa)}
        return shown

    def _memory(self) -> dict[str, str]:
        reserved = self.model.reserved_mib * MIB
        used = min(int(self.memory_used) // MIB * MIB, self.memory_bytes - reserved)
        return {"memory": f"{self.memory_bytes} {reserved} {self.memory_bytes - reserved - used} {used}"}

    def _sensors(self) -> dict[str, str]:
        model = self.model
        power, limit = round(self.power_w * 1000), round(model.power_limit * 1000)
        shown = {
            "utilization": f"{round(self.busy * 100)} {round(self.intensity * 55)}",
            "temperature": str(round(self.temperature_c)),
            "field.82": f"ui:{round(self.temperature_c + 3 + self.intensity * 9)}",
            "power_mw": str(power),
            "field.185": f"ui:{power}",
            "field.186": f"ui:{power}",
            **{f"power_limit_mw.{kind}": str(limit) for kind in ("enforced", "requested", "default", "max")},
            "power_limit_mw.min": str(round(model.power_limit_min * 1000)),
            "energy_mj": str(int(self.energy_j * 1000)),
            "field.83": f"ull:{int(self.energy_j * 1000)}",
        }
        if model.module_power:
            shown["field.186.1"] = f"ui:{round(power * 1.12) + 95_000}"
            shown["field.186.2"] = f"ui:{round(power * 0.16) + 12_000}"
        return shown

    def _clocks(self) -> dict[str, str]:
        model = self.model
        busy = self.busy > 0.02  # noqa: PLR2004 - below, no kernel has run for a while
        top = round(model.clock_max * _CAPPED / _CLOCK_STEP) * _CLOCK_STEP if self._power_capped else model.clock_max
        graphics = top if busy else model.clock_idle
        video = round(model.clock_video_max * graphics / model.clock_max)
        now = {"graphics": graphics, "sm": graphics, "mem": model.clock_memory, "video": video}
        most = {
            "graphics": model.clock_max,
            "sm": model.clock_max,
            "mem": model.clock_memory,
            "video": model.clock_video_max,
        }
        reasons = REASON_POWER_CAP if self._power_capped else 0 if busy else REASON_IDLE
        return {
            **{f"clock_mhz.{domain}": str(clock) for domain, clock in now.items()},
            **{f"clock_max_mhz.{domain}": str(clock) for domain, clock in most.items()},
            "event_reasons": f"{reasons:#x}",
            "event_reasons_supported": f"{REASONS_SUPPORTED:#x}",
            **{f"field.{74 + i}": f"ull:{int(self.throttled_s[name] * 1e9)}" for i, name in enumerate(_POLICIES)},
        }

    def _health(self) -> dict[str, str]:
        faults = self.faults
        corrected = faults.corrected_before + faults.corrected
        uncorrected = faults.uncorrected_before + faults.uncorrected
        rows = (faults.remapped_correctable, faults.remapped_uncorrectable, int(faults.remap_pending), 0)
        return {
            "ecc_mode": "1 1",
            "ecc_total.corrected.volatile": str(faults.corrected),
            "ecc_total.corrected.aggregate": str(corrected),
            "ecc_total.uncorrected.volatile": str(faults.uncorrected),
            "ecc_total.uncorrected.aggregate": str(uncorrected),
            **{f"field.{3 + i}": f"ull:{n}" for i, n in enumerate((faults.corrected, faults.uncorrected))},
            **{f"field.{5 + i}": f"ull:{n}" for i, n in enumerate((corrected, uncorrected))},
            "remapped_rows": " ".join(map(str, rows)),
            **{f"field.{142 + i}": f"ui:{n}" for i, n in enumerate(rows)},
            "field.230": f"ui:{faults.recovery_action}",
        }

    def _buses(self) -> dict[str, str]:
        generation, width = self.model.pcie
        shown = {
            "pcie": f"{generation} {width} {generation} {width}",
            "pcie_replays": str(self.faults.pcie_replays),
            "field.94": f"ui:{self.faults.pcie_replays}",
        }
        if self.nvlinks:
            shown |= {f"nvlink.{link}.state": "1" for link in range(self.nvlinks)}
            shown["field.91"] = f"ui:{self.nvlinks}"
        if self.nvlinks and self.model.architecture < BLACKWELL:  # from then on each link has its own counters
            data, raw = int(self.nvlink_bytes) >> 10, int(self.nvlink_bytes * _PROTOCOL) >> 10
            shown |= {f"field.{138 + i}.{ALL_LINKS}": f"ull:{n}" for i, n in enumerate((data, data, raw, raw))}
        return shown


def _share(seconds: float, lag_s: float) -> float:
    """Return how much of the way to its end a value goes in that time."""
    return 1 - math.exp(-seconds / lag_s)
