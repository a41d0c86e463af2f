"""Functions of PCI devices below a sysfs root: their directory, and the entry of the bus that leads to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.sim import tree

if TYPE_CHECKING:
    from pathlib import Path

NVIDIA, MELLANOX = "0x10de", "0x15b3"
CONTROLLER_3D, CONTROLLER_INFINIBAND, CONTROLLER_ETHERNET = "0x030200", "0x020700", "0x020000"


def write_function(root: Path, address: str, *, vendor: str, device: str, kind: str, numa: int, driver: str) -> Path:
    """Write a function; return its directory. `kind` is its class; without `driver` none is bound to it."""
    function = root / "devices" / f"pci{address[:7]}" / address
    tree.make(function, {"vendor": vendor, "device": device, "class": kind, "numa_node": str(numa)})
    entry = root / "bus" / "pci" / "devices" / address
    entry.unlink(missing_ok=True)  # of a function that was here before
    tree.link(entry, function)
    if driver:
        bound = root / "bus" / "pci" / "drivers" / driver
        bound.mkdir(parents=True, exist_ok=True)
        tree.link(function / "driver", bound)
    return function
