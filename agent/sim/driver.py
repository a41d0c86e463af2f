"""What the NVIDIA driver of a simulated node shows: /proc/driver/nvidia, /dev/nvidia*, and the state behind NVML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.sim.tree import replace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.sim.gpu import SimGpu
    from agent.sim.machines import Machine

DRIVER_NOT_LOADED = 9  # nvmlReturn_t


def module_name(machine: Machine) -> str:
    """Return what the kernel module calls itself."""
    return f"NVIDIA UNIX Open Kernel Module for {machine.architecture}  {machine.driver}  Release Build  (dvs-builder)"


def write_driver(proc: Path, dev: Path, machine: Machine, gpus: Sequence[SimGpu]) -> None:
    """Write what a loaded driver shows."""
    root = proc / "driver" / "nvidia"
    compiler = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)"
    replace(root / "version", f"NVRM version: {module_name(machine)}\n{compiler}\n")
    for gpu in gpus:
        replace(root / "gpus" / gpu.address / "information", gpu.information(machine.driver))
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{gpu.number}" for gpu in gpus)):
        replace(dev / name, "")


def nvml_state(machine: Machine, gpus: Sequence[SimGpu]) -> dict[str, str]:
    """Return the state that NVML answers from."""
    state = {
        "driver.version": machine.driver,
        "driver.nvml_version": f"{machine.cuda // 1000}.{machine.driver}",
        "driver.cuda_version": str(machine.cuda),
        "gpu.count": str(len(gpus)),
    }
    for index, gpu in enumerate(gpus):
        state |= {f"gpu.{index}.{key}": value for key, value in gpu.nvml().items()}
    return state


def nvml_state_without_driver() -> dict[str, str]:
    """Return the state of a library that finds no driver."""
    return {"init.return": str(DRIVER_NOT_LOADED), "gpu.count": "0"}
