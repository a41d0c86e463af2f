"""The devices of a simulated node, made and written once: GPUs on PCI, adapters with their ports, the host."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.sim import infiniband, pci
from agent.sim.fabric import SimPort
from agent.sim.gpu import SimGpu
from agent.sim.host import GIB, SimDisk, SimHost, SimInterface, SimMount, SimProcess

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from agent.api import VmSize
    from agent.sim.machines import Machine

_NODE_GUIDS = "0015:5dff:fe34:{:04x}"
_FRONTEND = "mlx5_an0"
_FRONTEND_NETDEV = "enP46503s1"
_FRONTEND_PCI = "b5a7:00:02.0"
_FRONTEND_GUID = "000d:3aff:fe7b:1c2d"
_SYNTHETIC_NETDEV = "eth0"
_MBPS = 10**6


@dataclass(frozen=True)
class Hardware:
    """What a node is made of."""

    gpus: list[SimGpu]
    ports: list[SimPort]  # of the fabric
    frontend: SimPort | None  # of accelerated networking
    host: SimHost


def write_hardware(root: Path, size: VmSize, machine: Machine, chance: random.Random, *, gpu_driver: bool) -> Hardware:
    """Write the devices' trees below `root`/sys and return what moves them. `chance` tells equal devices apart."""
    sys = root / "sys"
    gpus = _gpus(size, machine, chance)
    for gpu in gpus:
        pci.write_function(
            sys,
            gpu.address,
            vendor=pci.NVIDIA,
            device=f"{gpu.model.pci_device >> 16:#06x}",
            kind=pci.CONTROLLER_3D,
            numa=gpu.numa,
            driver="nvidia" if gpu_driver else "",
        )
    ports = [_port(sys, number, size, machine, chance) for number in range(size.fabric_ports or 0)]
    synthetic = infiniband.write_netvsc(sys, _SYNTHETIC_NETDEV)
    frontend = _frontend(sys, machine, synthetic)
    return Hardware(gpus, ports, frontend, _host(root, machine, ports, frontend))


def _gpus(size: VmSize, machine: Machine, chance: random.Random) -> list[SimGpu]:
    if machine.gpu is None:
        return []
    addresses = machine.gpu_addresses[: size.gpu_count]
    return [
        SimGpu(
            number=number,
            model=machine.gpu,
            address=address,
            numa=number * 2 // len(addresses),
            uuid=f"GPU-{uuid.UUID(int=chance.getrandbits(128), version=4)}",
            serial=f"165{chance.randrange(10**10):010}",
            memory_bytes=size.gpu_memory_bytes or 0,
            nvlinks=machine.gpu.nvlinks if size.nvlinks_per_gpu is None else size.nvlinks_per_gpu,
            phase=chance.random(),
        )
        for number, address in enumerate(addresses)
    ]


def _port(sys: Path, number: int, size: VmSize, machine: Machine, chance: random.Random) -> SimPort:
    device, netdev = f"mlx5_ib{number}", f"ib{number}"
    infiniband.write_hca(
        sys,
        device,
        model=machine.hca,
        pci=f"{0x0101 + number:04x}:00:00.0",
        node_guid=_NODE_GUIDS.format(chance.randrange(1 << 16)),
        netdev=netdev,
        numa=number * 2 // (size.fabric_ports or 1),
    )
    return SimPort(sys, device, netdev=netdev, rate_bps=size.fabric_rate_bps or 0, phase=chance.random())


def _frontend(sys: Path, machine: Machine, synthetic: Path) -> SimPort | None:
    model = machine.frontend
    if model is None:
        return None
    device = infiniband.write_hca(sys, _FRONTEND, model=model, pci=_FRONTEND_PCI, node_guid=_FRONTEND_GUID)
    infiniband.write_netdev(sys, device.parent.parent, _FRONTEND_NETDEV, master=synthetic)
    rate_bps = int(model.rate.partition(" ")[0]) * 10**9
    return SimPort(sys, _FRONTEND, netdev=_FRONTEND_NETDEV, rate_bps=rate_bps, phase=0.0)


def _host(root: Path, machine: Machine, ports: list[SimPort], frontend: SimPort | None) -> SimHost:
    interfaces = {_SYNTHETIC_NETDEV: SimInterface()}
    for port in [*ports, *([frontend] if frontend else [])]:
        quiet = port is not frontend  # RDMA passes the interface by
        rates = (2_000, 1_500) if quiet else (1_000_000, 500_000)
        interfaces[port.netdev] = SimInterface(*rates, speed_mbps=port.rate_bps // _MBPS)
    memory = machine.memory_gib * GIB
    return SimHost(
        root,
        cpus=machine.cpus,
        memory_bytes=memory,
        memory_available_bytes=int(memory * 0.97),
        disks={"sda": SimDisk(), "nvme0n1": SimDisk(8 << 20, 32 << 20)},
        interfaces=interfaces,
        mounts={"/": SimMount(), "/mnt/nvme": SimMount("/dev/nvme0n1", "xfs", 3840 * GIB, 3000 * GIB)},
        processes={pid: SimProcess(name) for pid, name in ((1, "systemd"), (2, "kthreadd"), (1820, "slurmd"))},
    )
