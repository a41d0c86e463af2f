"""What the collector emits: every metric, and which kernel file each counter comes from.

The `node_infiniband_` names, labels and units are those of node_exporter up to 1.12 (collector/infiniband_linux.go), so
that dashboards and alerts written for it hold. Widths are the kernel's (drivers/infiniband/core/sysfs.c): a narrow
counter stays at its maximum until somebody clears it. File names and meanings: the kernel's
Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.api import Kind, Metric

STATES = ("nop", "down", "init", "armed", "active", "active_defer")  # by the number in `state`
UP_STATES = frozenset({4, 5})
PHYSICAL_LINK_UP = 5

_PORT = ("device", "port")
_COUNTER_HELP = "{} (stays at {} once reached: see infiniband_counter_saturated)."


@dataclass(frozen=True)
class Source:
    """Where one counter comes from and how its number becomes the metric's value.

    `words`: the file counts 4-byte words. `milliseconds`: the file is in ms. `limit`: where a narrow counter stops.
    `often`: read at every interval, not only at the slow one.
    """

    metric: Metric
    limit: int | None = None
    words: bool = False
    milliseconds: bool = False
    often: bool = False


def _counter(name: str, text: str, source: str) -> Metric:
    unit = "bytes" if name.endswith("_bytes_total") else ""
    return Metric(name, Kind.COUNTER, text, _PORT, unit=unit, source=source)


def _pma(
    name: str, text: str, *, file: str, bits: int | None = None, words: bool = False, often: bool = False
) -> tuple[str, Source]:
    limit = None if bits is None else 2**bits - 1
    text = f"{text}." if limit is None else _COUNTER_HELP.format(text, limit)
    metric = _counter(f"node_infiniband_{name}", text, f"ports/<port>/counters/{file}")
    return file, Source(metric, limit, words, often=often)


COUNTERS: dict[str, Source] = dict(
    (
        _pma("port_data_transmitted_bytes_total", "Bytes sent", file="port_xmit_data", words=True, often=True),
        _pma("port_data_received_bytes_total", "Bytes received", file="port_rcv_data", words=True, often=True),
        _pma("port_packets_transmitted_total", "Packets sent", file="port_xmit_packets", often=True),
        _pma("port_packets_received_total", "Packets received", file="port_rcv_packets", often=True),
        _pma("unicast_packets_transmitted_total", "Unicast packets sent", file="unicast_xmit_packets", often=True),
        _pma("unicast_packets_received_total", "Unicast packets received", file="unicast_rcv_packets", often=True),
        _pma(
            "multicast_packets_transmitted_total", "Multicast packets sent", file="multicast_xmit_packets", often=True
        ),
        _pma(
            "multicast_packets_received_total", "Multicast packets received", file="multicast_rcv_packets", often=True
        ),
        _pma(
            "port_transmit_wait_total",
            "Ticks in which data was queued but no credit to send it came",
            file="port_xmit_wait",
            bits=32,
            often=True,
        ),
        _pma(
            "port_discards_transmitted_total",
            "Outbound packets dropped because the port was down or congested",
            file="port_xmit_discards",
            bits=16,
            often=True,
        ),
        _pma(
            "port_discards_received_total",
            "Inbound packets dropped because the port was down or congested",
            file="port_rcv_discards",
            often=True,
        ),
        _pma(
            "link_downed_total",
            "Times retraining failed and the link went down",
            file="link_downed",
            bits=8,
            often=True,
        ),
        _pma("symbol_error_total", "Symbol errors on any lane", file="symbol_error", bits=16),
        _pma(
            "link_error_recovery_total",
            "Times the link retrained without going down",
            file="link_error_recovery",
            bits=8,
        ),
        _pma("port_errors_received_total", "Packets received with an error", file="port_rcv_errors", bits=16),
        _pma(
            "port_receive_remote_physical_errors_total",
            "Packets that an earlier hop had marked as bad",
            file="port_rcv_remote_physical_errors",
            bits=16,
        ),
        _pma(
            "port_receive_switch_relay_errors_total",
            "Packets that could not be relayed; on an adapter mostly multicast looped back",
            file="port_rcv_switch_relay_errors",
            bits=16,
        ),
        _pma(
            "port_constraint_errors_transmitted_total",
            "Outbound packets that partition or raw filters refused",
            file="port_xmit_constraint_errors",
            bits=8,
        ),
        _pma(
            "port_constraint_errors_received_total",
            "Inbound packets that partition or raw filters refused",
            file="port_rcv_constraint_errors",
            bits=8,
        ),
        _pma(
            "local_link_integrity_errors_total",
            "Times local physical errors passed their threshold",
            file="local_link_integrity_errors",
            bits=4,
        ),
        _pma(
            "excessive_buffer_overrun_errors_total",
            "Receive buffer overruns in consecutive flow control periods",
            file="excessive_buffer_overrun_errors",
            bits=4,
        ),
        _pma("vl15_dropped_total", "Management packets dropped for lack of buffers", file="VL15_dropped", bits=16),
    )
)


def _extended(name: str, text: str, *, file: str, words: bool = False) -> tuple[str, Source]:
    source = f"ports/<port>/counters_ext/{file}, kernels before 4.5"
    return file, Source(_counter(f"node_infiniband_legacy_{name}", f"{text}.", source), words=words, often=True)


COUNTERS_EXT: dict[str, Source] = dict(
    (
        _extended("data_transmitted_bytes_total", "Bytes sent", file="port_xmit_data_64", words=True),
        _extended("data_received_bytes_total", "Bytes received", file="port_rcv_data_64", words=True),
        _extended("packets_transmitted_total", "Packets sent", file="port_xmit_packets_64"),
        _extended("packets_received_total", "Packets received", file="port_rcv_packets_64"),
        _extended("unicast_packets_transmitted_total", "Unicast packets sent", file="port_unicast_xmit_packets"),
        _extended("unicast_packets_received_total", "Unicast packets received", file="port_unicast_rcv_packets"),
        _extended("multicast_packets_transmitted_total", "Multicast packets sent", file="port_multicast_xmit_packets"),
        _extended("multicast_packets_received_total", "Multicast packets received", file="port_multicast_rcv_packets"),
    )
)


def _hardware(file: str, name: str, text: str, prefix: str = "node_infiniband_") -> tuple[str, Source]:
    return file, Source(_counter(f"{prefix}{name}_total", f"{text}.", f"ports/<port>/hw_counters/{file}"))


HW_COUNTERS: dict[str, Source] = dict(
    (
        (
            "lifespan",
            Source(
                Metric(
                    "node_infiniband_lifespan_seconds",
                    Kind.GAUGE,
                    "Age up to which the driver answers hw_counters from its cache.",
                    _PORT,
                    unit="seconds",
                    source="ports/<port>/hw_counters/lifespan (ms)",
                ),
                milliseconds=True,
            ),
        ),
        _hardware("duplicate_request", "duplicate_requests_packets", "Requests received that had been served before"),
        _hardware("implied_nak_seq_err", "implied_nak_seq_errors", "Acknowledgements ahead of the one expected"),
        _hardware("local_ack_timeout_err", "local_ack_timeout_errors", "Acknowledgement timers that ran out, retried"),
        _hardware("out_of_buffer", "out_of_buffer_drops", "Packets dropped because no receive request was posted"),
        _hardware("out_of_sequence", "out_of_sequence_packets_received", "Packets received out of sequence"),
        _hardware("packet_seq_err", "packet_sequence_errors", "Sequence error NAKs received, retried"),
        _hardware("rnr_nak_retry_err", "rnr_nak_retry_packets_received", "Receiver-not-ready NAKs received, retried"),
        _hardware("req_cqe_error", "req_cqes_errors", "Requests completed with an error"),
        _hardware("req_cqe_flush_error", "req_cqes_flush_errors", "Requests flushed with an error"),
        _hardware("req_remote_access_errors", "req_remote_access_errors", "Requests that the peer denied access"),
        _hardware(
            "req_remote_invalid_request", "req_remote_invalid_request_errors", "Requests that the peer found invalid"
        ),
        _hardware("resp_cqe_error", "resp_cqes_errors", "Responses completed with an error"),
        _hardware("resp_cqe_flush_error", "resp_cqes_flush_errors", "Responses flushed with an error"),
        _hardware("resp_local_length_error", "resp_local_length_errors", "Requests received with a wrong length"),
        _hardware(
            "resp_remote_access_errors", "resp_remote_access_errors", "Requests received that were denied access"
        ),
        _hardware("rx_atomic_requests", "rx_atomic_requests", "Atomic requests received"),
        _hardware("rx_dct_connect", "rx_dct_connect_requests", "Dynamic connection requests received"),
        _hardware("rx_read_requests", "rx_read_requests", "Read requests received"),
        _hardware("rx_write_requests", "rx_write_requests", "Write requests received"),
        _hardware("rx_icrc_encapsulated", "rx_icrc_encapsulated_errors", "RoCE packets with a wrong checksum"),
        _hardware("np_cnp_sent", "np_cnp_packets_sent", "Congestion notifications sent"),
        _hardware(
            "np_ecn_marked_roce_packets",
            "np_ecn_marked_roce_packets_received",
            "RoCE packets received with an ECN mark",
        ),
        _hardware("rp_cnp_handled", "rp_cnp_packets_handled", "Congestion notifications obeyed"),
        _hardware("rp_cnp_ignored", "rp_cnp_ignored_packets_received", "Congestion notifications ignored"),
        _hardware("roce_adp_retrans", "roce_adp_retransmits", "Adaptive retransmissions of RoCE traffic"),
        _hardware("roce_adp_retrans_to", "roce_adp_retransmits_timeout", "Adaptive retransmissions that timed out"),
        _hardware("roce_slow_restart", "roce_slow_restart_used", "Times a slow restart was used"),
        _hardware("roce_slow_restart_cnps", "roce_slow_restart_cnps", "Congestion notifications of slow restarts"),
        _hardware("roce_slow_restart_trans", "roce_slow_restart", "Times a connection changed to slow restart"),
        _hardware(
            "req_transport_retries_exceeded",
            "req_transport_retries_exceeded",
            "Connections broken because the peer did not acknowledge in time",
            prefix="infiniband_",
        ),
        _hardware(
            "req_rnr_retries_exceeded",
            "req_rnr_retries_exceeded",
            "Connections broken because the peer was not ready to receive",
            prefix="infiniband_",
        ),
    )
)

HW_COUNTER = Metric(
    "infiniband_hw_counter_total",
    Kind.COUNTER,
    "A driver's counter that has no name of its own here, under its file name, in the driver's unit.",
    (*_PORT, "counter"),
    source="ports/<port>/hw_counters/<counter>",
)
# Which files may become HW_COUNTER: those of mlx5, mana, irdma, bnxt_re and efa. hfi1 alone would bring hundreds.
HW_COUNTER_NAMES = (
    "cc_*",
    "rdma_*",
    "requester_*",
    "responder_*",
    "req_*",
    "resp_*",
    "retrans_*",
    "tx_*",
    "rx_*",
    "send_*",
    "recv_*",
    "*_octets",
    "ip4*",
    "ip6*",
    "iw*",
    "impaired_remote_conn_events",
    "unresponsive_remote_events",
)
HW_COUNTER_LIMIT = 64  # of one port

INFO = Metric(
    "node_infiniband_info",
    Kind.GAUGE,
    "1, with what the adapter is.",
    ("device", "board_id", "firmware_version", "hca_type"),
    source="board_id, fw_ver, hca_type",
)
STATE_ID = Metric(
    "node_infiniband_state_id",
    Kind.GAUGE,
    "Logical state of the port: 0 nop, 1 down, 2 init, 3 armed, 4 active, 5 active defer.",
    _PORT,
    source="ports/<port>/state",
)
PHYSICAL_STATE_ID = Metric(
    "node_infiniband_physical_state_id",
    Kind.GAUGE,
    "Physical state: 1 sleep, 2 polling, 3 disabled, 4 training, 5 link up, 6 error recovery, 7 phy test.",
    _PORT,
    source="ports/<port>/phys_state",
)
RATE = Metric(
    "node_infiniband_rate_bytes_per_second",
    Kind.GAUGE,
    "Signalling rate of the link as it trained.",
    _PORT,
    unit="bytes_per_second",
    source="ports/<port>/rate",
)
PORT_UP = Metric(
    "infiniband_port_up",
    Kind.GAUGE,
    "1 when the port is active and its physical link is up.",
    _PORT,
    source="ports/<port>/state, phys_state",
)
PORT_STATE = Metric(
    "infiniband_port_state",
    Kind.GAUGE,
    "1 for the logical state the port is in, 0 for the others.",
    (*_PORT, "state"),
    source="ports/<port>/state",
)
OBSERVABLE = Metric("infiniband_port_observable", Kind.GAUGE, "1 when the port's state could be read.", _PORT)
RESTRICTED = Metric(
    "infiniband_port_restricted",
    Kind.GAUGE,
    "1 when the driver refuses every file in counters/, as for some virtual functions.",
    _PORT,
)
DEVICE_INFO = Metric(
    "infiniband_device_info",
    Kind.GAUGE,
    "1, with the role of the port and where it is; what is not known is empty.",
    (*_PORT, "role", "link_layer", "node_guid", "pci", "numa", "netdev", "driver"),
    source="link_layer, node_guid, device/",
)
EXPECTED_RATE = Metric(
    "infiniband_link_rate_expected_bytes_per_second",
    Kind.GAUGE,
    "Rate that a fabric port of this VM size should have.",
    _PORT,
    unit="bytes_per_second",
    source="VM size table",
)
FABRIC_PORTS = Metric(
    "infiniband_fabric_ports",
    Kind.GAUGE,
    "Fabric ports expected (VM size, or the most seen since boot), present, and up.",
    ("status",),
)
SATURATED = Metric(
    "infiniband_counter_saturated",
    Kind.GAUGE,
    "1 for a narrow counter (by file name) that stands at its maximum and counts no more; absent for all others.",
    (*_PORT, "counter"),
)
READ_ERRORS = Metric(
    "infiniband_read_errors_total",
    Kind.COUNTER,
    "Reads that failed, by errno; `parse` is a text that is no value, `range` a number that cannot be.",
    (*_PORT, "errno"),
)
STALLED = Metric(
    "infiniband_collect_stalled",
    Kind.GAUGE,
    "1 while a read of this device does not return; its other series are absent then.",
    ("device",),
)
DURATION = Metric(
    "infiniband_collect_duration_seconds",
    Kind.GAUGE,
    "Time the last reading of this device took, by tier (fast, slow).",
    ("device", "tier"),
    unit="seconds",
)

METRICS: tuple[Metric, ...] = (
    INFO,
    STATE_ID,
    PHYSICAL_STATE_ID,
    RATE,
    *(source.metric for table in (COUNTERS, COUNTERS_EXT, HW_COUNTERS) for source in table.values()),
    HW_COUNTER,
    PORT_UP,
    PORT_STATE,
    OBSERVABLE,
    RESTRICTED,
    DEVICE_INFO,
    EXPECTED_RATE,
    FABRIC_PORTS,
    SATURATED,
    READ_ERRORS,
    STALLED,
    DURATION,
)
