"""What the system shows of NVIDIA GPUs without the driver's library: PCI functions, /proc/driver/nvidia, device nodes.

Sources: the kernel's Documentation/ABI/testing/sysfs-bus-pci; the "proc" and "device node" parts of the README that
comes with the driver. "Not there" is an ordinary answer here; any other OSError goes to the caller.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from agent.hw.sysfs import entries, read_text

VENDOR = "0x10de"
CLASSES = ("0x0300", "0x0302")  # VGA-compatible and 3D controller; the rest is the programming interface

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)
_NODE = re.compile(r"nvidia(\d+)")
_VERSION = re.compile(r"(?<![\w.])\d{2,}\.\d+(?:\.\d+)*(?![\w.])")
_ABSENT = (FileNotFoundError, NotADirectoryError)


class DriverGpu(NamedTuple):
    """One GPU as the kernel module tells of it; None where it does not (the UUID, until the GPU was used once)."""

    address: str
    uuid: str | None = None
    minor: int | None = None
    model: str | None = None


def address(text: str) -> str | None:
    """Return a PCI address as the kernel writes it, `0001:00:00.0`; None when the text is none.

    Taken are NVML's form (`00000001:00:00.0`), and those without a function or a domain: then that is 0.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups(default="0")
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function}"


def order(at: str) -> tuple[int, str]:
    """Return what to sort addresses by, so that domains of more digits come last."""
    return len(at), at


class PciBus:
    """NVIDIA's GPUs among the PCI functions. A function is read when it turns up and not again: what it is stays.

    A virtual function (with a link `physfn` to the one it belongs to) is a share of a GPU for a guest, not a GPU here.
    """

    def __init__(self, sys: str | os.PathLike[str]) -> None:
        self._directory = os.path.join(sys, "bus/pci/devices")
        self._known: dict[tuple[str, int], bool] = {}

    def gpus(self) -> list[str] | None:
        """Return the addresses of the GPUs, sorted; None when there is no PCI in sysfs. Raises OSError."""
        if not os.path.isdir(self._directory):
            return None
        known = self._known
        found = entries(self._directory).items()
        self._known = {item: known[item] if item in known else self._is_gpu(item[0]) for item in found}
        return sorted((name for (name, _), is_gpu in self._known.items() if is_gpu), key=order)

    def _is_gpu(self, name: str) -> bool:
        try:
            if read_text(f"{self._directory}/{name}/vendor").lower() != VENDOR:
                return False
            if not read_text(f"{self._directory}/{name}/class").lower().startswith(CLASSES):
                return False
        except _ABSENT:
            return False
        return not os.path.lexists(f"{self._directory}/{name}/physfn")


def driver_addresses(proc: str | os.PathLike[str]) -> list[str]:
    """Return the PCI addresses of the GPUs that the kernel module drives, sorted. Raises OSError.

    Lists names only, which never waits for a GPU.
    """
    found = (address(name) for name in entries(os.path.join(proc, "driver/nvidia/gpus")))
    return sorted((name for name in found if name is not None), key=order)


def driver_gpu(proc: str | os.PathLike[str], at: str) -> DriverGpu:
    """Return what the kernel module tells of the GPU at this address. Raises OSError. May wait for a sick GPU."""
    directory = os.path.join(proc, "driver/nvidia/gpus")
    name = at
    if not os.path.lexists(f"{directory}/{at}"):  # the module's own spelling is nearly always ours: no need to list
        name = next((name for name in entries(directory) if address(name) == at), at)
    try:
        content = read_text(f"{directory}/{name}/information")
    except _ABSENT:
        return DriverGpu(at)
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in content.splitlines())}
    uuid = fields.get("GPU UUID", "")
    minor = fields.get("Device Minor", "")
    known = uuid != "" and "?" not in uuid
    return DriverGpu(
        at,
        uuid=uuid if known else None,
        minor=int(minor) if minor.isdecimal() else None,
        model=fields.get("Model") or None,
    )


def driver_gpus(proc: str | os.PathLike[str]) -> list[DriverGpu]:
    """Return all GPUs of the kernel module, in order of their addresses. Raises OSError. May wait for a sick GPU."""
    return [driver_gpu(proc, at) for at in driver_addresses(proc)]


def device_minors(dev: str | os.PathLike[str]) -> list[int]:
    """Return the numbers of the device nodes /dev/nvidia<N>, sorted. Raises OSError."""
    found = (_NODE.fullmatch(name) for name in entries(str(dev)))
    return sorted(int(match[1]) for match in found if match is not None)


def kernel_module_version(proc: str | os.PathLike[str]) -> str | None:
    """Return the version of the kernel module; None when none is loaded. Raises OSError."""
    try:
        content = read_text(os.path.join(proc, "driver/nvidia/version"))
    except _ABSENT:
        return None
    for line in content.splitlines():
        if line.startswith("NVRM version:"):
            match = _VERSION.search(line)
            return match[0] if match else None
    return None
