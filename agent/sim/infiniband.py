"""Fake adapters below a sysfs root, laid out as the kernel does: class entries are links into PCI device directories.

    write_hca(root, "mlx5_ib0", counters={"link_downed": "3"})
    write_nd96asr_v4(root)                     # a whole node: mlx5_ib0 to mlx5_ib7 and mlx5_an0

Texts end in a newline, as the kernel's do. The values are those of ND96asr_v4 nodes in public reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.sim import tree
from agent.sim.pci import CONTROLLER_ETHERNET, CONTROLLER_INFINIBAND, MELLANOX, write_function

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COUNTER_FILES = (
    "VL15_dropped",
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
    "port_rcv_constraint_errors",
    "port_rcv_data",
    "port_rcv_errors",
    "port_rcv_packets",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors",
    "port_xmit_data",
    "port_xmit_discards",
    "port_xmit_packets",
    "port_xmit_wait",
    "symbol_error",
    "unicast_rcv_packets",
    "unicast_xmit_packets",
)
HW_COUNTER_FILES = (
    "duplicate_request",
    "implied_nak_seq_err",
    "lifespan",
    "local_ack_timeout_err",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "out_of_buffer",
    "out_of_sequence",
    "packet_seq_err",
    "req_cqe_error",
    "req_cqe_flush_error",
    "req_remote_access_errors",
    "req_remote_invalid_request",
    "req_rnr_retries_exceeded",
    "req_transport_retries_exceeded",
    "resp_cqe_error",
    "resp_cqe_flush_error",
    "resp_local_length_error",
    "resp_remote_access_errors",
    "rnr_nak_retry_err",
    "roce_slow_restart",
    "roce_slow_restart_cnps",
    "roce_slow_restart_trans",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "rx_atomic_requests",
    "rx_dct_connect",
    "rx_read_requests",
    "rx_write_requests",
)
TRAFFIC = {
    "port_rcv_data": "237159415345822",
    "port_xmit_data": "238334949937759",
    "port_rcv_packets": "801977655075",
    "port_xmit_packets": "803162651391",
    "unicast_rcv_packets": "801977655075",
    "unicast_xmit_packets": "803162651391",
}
_NODE_GUIDS = "0015:5dff:fe34:{:04x}"
FABRIC_PORTS = 8  # of an ND96asr_v4


@dataclass(frozen=True)
class Model:
    """What kind of adapter to write."""

    link_layer: str = "InfiniBand"
    rate: str = "200 Gb/sec (4X HDR)"
    hca_type: str = "MT4124"
    board_id: str = "MT_0000000223"
    firmware: str = "20.28.4000"
    driver: str = "mlx5_core"
    pci_device: str = "0x101c"


CONNECTX6 = Model()
ACCELERATED_NETWORKING = Model(
    link_layer="Ethernet",
    rate="40 Gb/sec (4X QDR)",
    hca_type="MT4120",
    board_id="MSF0010110035",
    firmware="16.30.1284",
    pci_device="0x1018",
)
CONNECTX7 = Model(
    rate="400 Gb/sec (4X NDR)",
    hca_type="MT4129",
    board_id="MT_0000000838",
    firmware="28.41.1000",
    pci_device="0x101e",
)
CONNECTX8 = Model(
    rate="800 Gb/sec (4X XDR)",
    hca_type="MT4131",
    board_id="MT_0000001222",
    firmware="40.45.1200",
    pci_device="0x101e",
)
ACCELERATED_NETWORKING_100 = Model(
    link_layer="Ethernet",
    rate="100 Gb/sec (4X EDR)",
    hca_type="MT4126",
    board_id="MSF0010110036",
    firmware="22.36.1020",
    pci_device="0x101e",
)


def write_hca(
    root: Path,
    name: str,
    *,
    model: Model = CONNECTX6,
    pci: str = "0101:00:00.0",
    node_guid: str = "0015:5dff:fe34:072b",
    netdev: str = "",
    numa: int = 0,
    ports: int = 1,
    counters: Mapping[str, str] | None = None,
    hw_counters: Mapping[str, str] | None = None,
) -> Path:
    """Write one adapter below the sysfs root; return its directory, `<class>/infiniband/<name>` resolved.

    `counters` and `hw_counters` hold texts by file name that differ from the usual ones.
    """
    kind = CONTROLLER_INFINIBAND if model.link_layer == "InfiniBand" else CONTROLLER_ETHERNET
    function = write_function(
        root, pci, vendor=MELLANOX, device=model.pci_device, kind=kind, numa=numa, driver=model.driver
    )
    device = function / "infiniband" / name
    device.mkdir(parents=True)
    tree.link(root / "class" / "infiniband" / name, device)
    tree.link(device / "device", function)
    about = {"fw_ver": model.firmware, "board_id": model.board_id, "hca_type": model.hca_type}
    tree.make(device, {**about, "node_guid": node_guid, "node_type": "1: CA", "hw_rev": "0"})
    for number in range(1, ports + 1):
        _write_port(device / "ports" / str(number), model, counters or {}, hw_counters or {})
    if netdev:
        write_netdev(root, function, netdev)
    return device


def write_netdev(root: Path, function: Path, name: str, *, port: int = 1, master: Path | None = None) -> Path:
    """Write a network interface of a device; `master` is the interface it is enslaved to. Returns its directory."""
    netdev = function / "net" / name
    tree.make(netdev, {"dev_port": str(port - 1)})
    tree.link(netdev / "device", function)
    tree.link(root / "class" / "net" / name, netdev)
    if master is not None:
        tree.link(netdev / "master", master)
    return netdev


def write_netvsc(root: Path, name: str = "eth0") -> Path:
    """Write the synthetic interface that accelerated networking is enslaved to. Returns its directory."""
    vmbus = root / "devices" / "LNXSYSTM:00" / "VMBUS:00" / "000d3a7b-1c2d-000d-3a7b-1c2d000d3a7b"
    driver = root / "bus" / "vmbus" / "drivers" / "hv_netvsc"
    driver.mkdir(parents=True, exist_ok=True)
    netdev = write_netdev(root, vmbus, name)
    tree.link(vmbus / "driver", driver)
    return netdev


def write_nd96asr_v4(root: Path) -> list[Path]:
    """Write the adapters of an ND96asr_v4 node as Azure's HPC image names them. Returns their directories."""
    devices = [
        write_hca(
            root,
            f"mlx5_ib{index}",
            pci=f"{0x0101 + index:04x}:00:00.0",
            node_guid=_NODE_GUIDS.format(0x072B + index),
            netdev=f"ib{index}",
            numa=index // 2,
            counters=TRAFFIC,
        )
        for index in range(FABRIC_PORTS)
    ]
    frontend = write_hca(
        root,
        "mlx5_an0",
        model=ACCELERATED_NETWORKING,
        pci="b5a7:00:02.0",
        node_guid="000d:3aff:fe7b:1c2d",
        counters=TRAFFIC,
    )
    write_netdev(root, frontend.parent.parent, "enP46503s1", master=write_netvsc(root))
    return [*devices, frontend]


def port_directory(root: Path, device: str, port: int = 1) -> Path:
    """Return a port's directory, as readers of the class directory reach it."""
    return root / "class" / "infiniband" / device / "ports" / str(port)


def _write_port(port: Path, model: Model, counters: Mapping[str, str], hw_counters: Mapping[str, str]) -> None:
    fabric = model.link_layer == "InfiniBand"
    tree.make(
        port,
        {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "rate": model.rate,
            "link_layer": model.link_layer,
            "lid": "0x169" if fabric else "0x0",
            "sm_lid": "0x1" if fabric else "0x0",
            "cap_mask": "0x2651ec48",
        },
    )
    tree.make(port / "counters", {**dict.fromkeys(COUNTER_FILES, "0"), **counters})
    tree.make(port / "hw_counters", {**dict.fromkeys(HW_COUNTER_FILES, "0"), "lifespan": "10", **hw_counters})
