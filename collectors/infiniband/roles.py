"""What a port is for. Names alone prove nothing: without a rename rule `mlx5_0` may be either kind.

Azure's accelerated networking puts an Ethernet function beside the fabric's adapters (`mlx5_an0`, `mana_0`). It is read
and shown, but its link must never count as a fabric port.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agent.hw.sysfs import entries, link_name, read_text

if TYPE_CHECKING:
    from pathlib import Path

FABRIC = "fabric"
FRONTEND = "frontend"
ROCE = "roce"
UNKNOWN = "unknown"
NO_FABRIC = frozenset({FRONTEND, ROCE})

ETHERNET = "Ethernet"  # what link_layer says of RoCE

_FRONTEND_NAME = re.compile(r"(mlx5_an|mana_)\d+")
_FRONTEND_DRIVERS = frozenset({"mana", "mana_ib"})


def named_as_frontend(device: str) -> bool:
    """Say whether Azure's images give this name to accelerated networking."""
    return _FRONTEND_NAME.fullmatch(device) is not None


def role_of(device: str, link_layer: str, *, driver: str, serves_host: bool, declared_fabric: bool) -> str:
    """Return the role of a port.

    `link_layer` is empty when it could not be read. `serves_host`: a network interface of the device carries the host's
    own traffic. `declared_fabric`: the configuration says that this device's Ethernet is the fabric.
    """
    if link_layer == "InfiniBand":
        return FABRIC
    if link_layer != ETHERNET:
        return UNKNOWN
    if declared_fabric:
        return FABRIC
    if named_as_frontend(device) or driver in _FRONTEND_DRIVERS or serves_host:
        return FRONTEND
    return ROCE


def serves_host(net: str, netdev: str, default_routes: frozenset[str]) -> bool:
    """Say whether a network interface below `net` carries the default route or is the fast path of a hv_netvsc one."""
    if netdev in default_routes:
        return True
    master = f"{net}/{netdev}/master"
    return link_name(f"{master}/device/driver") == "hv_netvsc" or link_name(master) in default_routes


def default_routes(proc: Path) -> frozenset[str]:
    """Return the interfaces with an IPv4 default route; empty when the table cannot be read."""
    try:
        lines = read_text(f"{proc}/net/route").splitlines()[1:]
    except OSError:
        return frozenset()
    fields = [line.split() for line in lines]
    return frozenset(field[0] for field in fields if len(field) > 7 and field[1] == field[7] == "00000000")  # noqa: PLR2004


def netdevs_of_port(net: str, port: int, *, only_port: bool) -> tuple[str, ...]:
    """Return the network interfaces of a port, from a device's `net` directory; of a device with one port, all."""
    try:
        names = sorted(entries(net))
    except OSError:
        return ()  # it describes the port, no more
    if only_port:
        return tuple(names)
    return tuple(name for name in names if _port_of(f"{net}/{name}") == port)


def _port_of(netdev: str) -> int:
    # The kernel numbers an adapter's ports from 0 here (Documentation/ABI/testing/sysfs-class-net).
    try:
        return int(read_text(f"{netdev}/dev_port")) + 1
    except (OSError, ValueError):
        return 1
