"""A node with simulated GPUs for tests: the driver's state file, /proc, /dev and sysfs, and probes on them."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import pynvml

from agent.hw.nvml import library
from agent.sim import nvml
from agent.sim.clock import FakeClock
from agent.sim.harness import MemoryState, Probe
from collectors.gpu import Gpu, Options
from tests.fakenvml.library import state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from agent.api import Value, VmSize
    from agent.sim.harness import Result

    Change = Mapping[str, str | int | None]

NO_LIBRARY = "/nonexistent/libnvidia-ml.so.1"
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:42:15 UTC 2024\n"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
INTERVAL_S = 5.0


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class GpuNode:
    """The trees of one node. NVML answers from `state_file` in this process once `install` was called."""

    def __init__(self, root: Path, gpus: int = 8) -> None:
        self.sys, self.proc, self.dev = root / "sys", root / "proc", root / "dev"
        self.state_file = root / "nvml.state"
        self.library = root / library.SONAME  # for the look whether there is one; the stand-in is what is used
        self.library.touch()
        self.clock = FakeClock()
        self.memory = MemoryState()
        self.driver: dict[str, Any] = dict(state(gpus))
        self.gpus = gpus
        self.change({})
        write(self.proc / "sys/kernel/random/boot_id", "7d9b6f6e-0000-4000-8000-000000000001\n")

    def install(self) -> None:
        nvml.install(self.state_file)

    def change(self, changes: Change) -> None:
        """Change what the driver answers; None takes a key out."""
        self.driver = {key: value for key, value in (self.driver | dict(changes)).items() if value is not None}
        nvml.write(self.state_file, self.driver)

    def uuid(self, gpu: int) -> str:
        return str(state(gpu + 1)[f"gpu.{gpu}.uuid"])

    def address(self, gpu: int) -> str:
        return str(state(gpu + 1)[f"gpu.{gpu}.pci"]).lower()

    def load_module(self, version: str = "570.133.20") -> None:
        """Write what the kernel module shows, device nodes included."""
        write(self.proc / "driver/nvidia/version", VERSION.format(version))
        for gpu in range(self.gpus):
            information = f"Model: \t\t NVIDIA A100\nGPU UUID: \t {self.uuid(gpu)}\nDevice Minor: \t {gpu}\n"
            write(self.proc / f"driver/nvidia/gpus/{self.address(gpu)}/information", information)
            write(self.dev / f"nvidia{gpu}", "")

    def plug_in(self) -> None:
        """Write the PCI functions."""
        for gpu in range(self.gpus):
            write(self.sys / f"bus/pci/devices/{self.address(gpu)}/vendor", "0x10de\n")
            write(self.sys / f"bus/pci/devices/{self.address(gpu)}/class", "0x030200\n")

    def probe(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        avoid: Mapping[str, str] | None = None,
        run_id: str = "run",
        vm_size: VmSize | None = None,
    ) -> Probe:
        """Return a new process's collector; what the one before kept is there."""
        return Probe(
            Gpu,
            Options(**{"nvml_library": str(self.library), "expected_count": self.gpus, **(options or {})}),
            sysfs=self.sys,
            procfs=self.proc,
            devfs=self.dev,
            clock=self.clock,
            state=self.memory,
            interval_s=INTERVAL_S,
            timeout_s=2.0,
            avoid=avoid,
            run_id=run_id,
            vm_size=vm_size,
        )

    def tick(self, probe: Probe, seconds: float = INTERVAL_S) -> Result:
        self.clock.advance(seconds)
        return probe.collect()


def labels_of(series: str) -> dict[str, str]:
    return dict(_LABEL.findall(series))


def select(result: Result, name: str, /, **labels: str) -> dict[str, Value]:
    """Return the series of this name that have these labels."""
    return {
        series: value
        for series, value in result.values.items()
        if series.partition("{")[0] == name and labels.items() <= labels_of(series).items()
    }


def value(result: Result, name: str, /, **labels: str) -> Value | None:
    """Return the one value of this name and these labels; None when there is none."""
    found = select(result, name, **labels)
    assert len(found) <= 1, found
    return next(iter(found.values()), None)


def by_gpu(result: Result, name: str, /, **labels: str) -> dict[str, Value]:
    """Return the values of this name by the label `gpu`."""
    return {labels_of(series)["gpu"]: number for series, number in select(result, name, **labels).items()}


def names_of(result: Result, gpu: str) -> set[str]:
    """Return the names of all series of one GPU."""
    return {series.partition("{")[0] for series in result.values if labels_of(series).get("gpu") == gpu}


@contextlib.contextmanager
def untouched_binding() -> Iterator[None]:
    """Begin with a binding that loaded nothing, and leave it as it was found."""
    kept = pynvml.nvmlLib, pynvml._nvmlLib_refcount, dict(pynvml._nvmlGetFunctionPointer_cache)
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield
    finally:
        pynvml.nvmlLib, pynvml._nvmlLib_refcount, functions = kept
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlGetFunctionPointer_cache.update(functions)
