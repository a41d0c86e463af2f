"""The infiniband collector on healthy trees: names, values, roles, expectation."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest

from agent.api import Duration, NotPresent, VmSize
from agent.sim.clock import FakeClock
from agent.sim.harness import MemoryState, Probe
from agent.sim.infiniband import (
    ACCELERATED_NETWORKING,
    Model,
    port_directory,
    write_hca,
    write_nd96asr_v4,
    write_netdev,
)
from collectors.infiniband import InfiniBand, Options
from tests.conftest import need

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ETHERNET = Model(link_layer="Ethernet", rate="100 Gb/sec (4X EDR)")
MANA = Model(link_layer="Ethernet", driver="mana")
EXTENDED = (
    *("port_xmit_data_64", "port_rcv_data_64", "port_xmit_packets_64", "port_rcv_packets_64"),
    *("port_unicast_xmit_packets", "port_unicast_rcv_packets"),
    *("port_multicast_xmit_packets", "port_multicast_rcv_packets"),
)
ND96 = VmSize("ND96asr_v4", fabric_ports=8, fabric_rate_bps=200_000_000_000)


def port(name: str, device: str = "mlx5_ib0", number: int = 1, **labels: str) -> str:
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f'{name}{{device="{device}",port="{number}"{more}}}'


def fabric(status: str) -> str:
    return f'infiniband_fabric_ports{{status="{status}"}}'


def set_file(root: Path, file: str, text: str, device: str = "mlx5_ib0") -> None:
    (port_directory(root, device) / file).write_text(f"{text}\n", encoding="utf-8")


def roles_of(values: dict[str, float]) -> dict[str, str]:
    found = {}
    for series in values:
        match = re.match(r'infiniband_device_info\{device="([^"]*)",port="1",role="([^"]*)"', series)
        if match:
            found[match[1]] = match[2]
    return found


def write_boot(proc: Path, boot_id: str = "7d9b6f6e-0000-4000-8000-000000000001") -> None:
    directory = proc / "sys" / "kernel" / "random"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "boot_id").write_text(f"{boot_id}\n", encoding="utf-8")


@pytest.fixture
def node_exporter(tmp_path: Path) -> Iterator[str]:
    """Start node_exporter on the tree in tmp_path; give the address of its page."""
    program = need("prometheus-node-exporter", "prometheus-node-exporter")
    arguments = ["--collector.disable-defaults", "--collector.infiniband", f"--path.sysfs={tmp_path}"]
    arguments += ["--web.disable-exporter-metrics", "--web.listen-address=127.0.0.1:0"]
    with subprocess.Popen([program, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            log = ""
            for line in process.stderr:
                log += line
                if match := re.search(r'address="?(127\.0\.0\.1:\d+)', line):
                    yield f"http://{match[1]}/metrics"
                    break
            else:
                pytest.fail(f"node_exporter told no address:\n{log}")
        finally:
            process.terminate()


def scrape(url: str) -> dict[str, float]:
    deadline = time.monotonic() + 10
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
            break
        except ConnectionError:
            assert time.monotonic() < deadline
    lines = [line for line in text.splitlines() if line.startswith("node_infiniband_")]
    return {_sorted_labels(line.rsplit(" ", 1)[0]): float(line.rsplit(" ", 1)[1]) for line in lines}


def _sorted_labels(series: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    return f"{name}{{{','.join(sorted(labels.split(',')))}}}"


def test_every_series_of_node_exporter_is_here_with_the_same_value(tmp_path: Path, node_exporter: str) -> None:
    write_nd96asr_v4(tmp_path)
    port1 = tmp_path / "class" / "infiniband" / "mlx5_ib1" / "ports" / "1"
    for number, file in enumerate(sorted((port1 / "counters").iterdir()), start=1):
        file.write_text(f"{number}\n", encoding="utf-8")
    (port1 / "counters" / "port_rcv_discards").write_text("77\n", encoding="utf-8")
    (port1 / "counters" / "link_downed").write_text("255\n", encoding="utf-8")
    (port1 / "rate").write_text("2.5 Gb/sec (1X SDR)\n", encoding="utf-8")
    (port1 / "state").write_text("1: DOWN\n", encoding="utf-8")
    (port1 / "phys_state").write_text("2: Polling\n", encoding="utf-8")
    (port1 / "counters_ext").mkdir()
    for number, name in enumerate(EXTENDED, start=100):
        (port1 / "counters_ext" / name).write_text(f"{number}\n", encoding="utf-8")
    theirs = scrape(node_exporter)
    ours = {
        _sorted_labels(series): value for series, value in Probe(InfiniBand, sysfs=tmp_path).collect().values.items()
    }
    assert len(theirs) > 200
    assert {series: ours.get(series) for series in theirs} == theirs


def test_hardware_counters_have_the_names_of_newer_node_exporters(tmp_path: Path) -> None:
    names = {
        "duplicate_request": "node_infiniband_duplicate_requests_packets_total",
        "implied_nak_seq_err": "node_infiniband_implied_nak_seq_errors_total",
        "local_ack_timeout_err": "node_infiniband_local_ack_timeout_errors_total",
        "np_cnp_sent": "node_infiniband_np_cnp_packets_sent_total",
        "np_ecn_marked_roce_packets": "node_infiniband_np_ecn_marked_roce_packets_received_total",
        "out_of_buffer": "node_infiniband_out_of_buffer_drops_total",
        "out_of_sequence": "node_infiniband_out_of_sequence_packets_received_total",
        "packet_seq_err": "node_infiniband_packet_sequence_errors_total",
        "req_cqe_error": "node_infiniband_req_cqes_errors_total",
        "req_cqe_flush_error": "node_infiniband_req_cqes_flush_errors_total",
        "req_remote_access_errors": "node_infiniband_req_remote_access_errors_total",
        "req_remote_invalid_request": "node_infiniband_req_remote_invalid_request_errors_total",
        "resp_cqe_error": "node_infiniband_resp_cqes_errors_total",
        "resp_cqe_flush_error": "node_infiniband_resp_cqes_flush_errors_total",
        "resp_local_length_error": "node_infiniband_resp_local_length_errors_total",
        "resp_remote_access_errors": "node_infiniband_resp_remote_access_errors_total",
        "rnr_nak_retry_err": "node_infiniband_rnr_nak_retry_packets_received_total",
        "roce_adp_retrans": "node_infiniband_roce_adp_retransmits_total",
        "roce_adp_retrans_to": "node_infiniband_roce_adp_retransmits_timeout_total",
        "roce_slow_restart": "node_infiniband_roce_slow_restart_used_total",
        "roce_slow_restart_cnps": "node_infiniband_roce_slow_restart_cnps_total",
        "roce_slow_restart_trans": "node_infiniband_roce_slow_restart_total",
        "rp_cnp_handled": "node_infiniband_rp_cnp_packets_handled_total",
        "rp_cnp_ignored": "node_infiniband_rp_cnp_ignored_packets_received_total",
        "rx_atomic_requests": "node_infiniband_rx_atomic_requests_total",
        "rx_dct_connect": "node_infiniband_rx_dct_connect_requests_total",
        "rx_icrc_encapsulated": "node_infiniband_rx_icrc_encapsulated_errors_total",
        "rx_read_requests": "node_infiniband_rx_read_requests_total",
        "rx_write_requests": "node_infiniband_rx_write_requests_total",
        "req_transport_retries_exceeded": "infiniband_req_transport_retries_exceeded_total",
        "req_rnr_retries_exceeded": "infiniband_req_rnr_retries_exceeded_total",
    }
    numbers = {file: str(number) for number, file in enumerate(names, start=1)}
    write_hca(tmp_path, "mlx5_ib0", hw_counters=numbers)
    values = Probe(InfiniBand, sysfs=tmp_path).collect().values
    assert {file: values.get(port(name)) for file, name in names.items()} == {f: int(n) for f, n in numbers.items()}


def test_lifespan_of_ten_milliseconds_is_not_zero(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0", hw_counters={"lifespan": "10"})
    assert Probe(InfiniBand, sysfs=tmp_path).collect().values[port("node_infiniband_lifespan_seconds")] == 0.01


def test_data_words_become_exact_bytes(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0", counters={"port_xmit_data": "4611686018427387905"})
    value = (
        Probe(InfiniBand, sysfs=tmp_path).collect().values[port("node_infiniband_port_data_transmitted_bytes_total")]
    )
    assert value == 18446744073709551620
    assert isinstance(value, int)


def test_unknown_hardware_counters_are_shown_if_known_to_be_few(tmp_path: Path) -> None:
    names = {"cc_rx_ce_pkts": "5", "requester_timeout": "6", "DC8051,weird": "7", "RxFlowStall": "8"}
    write_hca(tmp_path, "mana_0", model=MANA, hw_counters={**names, **{f"rdma_{i:03}": "9" for i in range(100)}})
    values = Probe(InfiniBand, sysfs=tmp_path).collect().values
    shown = [series for series in values if series.startswith("infiniband_hw_counter_total")]
    assert len(shown) == 64
    assert values[port("infiniband_hw_counter_total", "mana_0", counter="cc_rx_ce_pkts")] == 5
    assert not [series for series in values if "DC8051" in series or "RxFlowStall" in series]


def test_hardware_counters_can_be_switched_off(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    values = Probe(InfiniBand, Options(hw_counters=False), sysfs=tmp_path).collect().values
    assert port("node_infiniband_out_of_buffer_drops_total") not in values
    assert port("node_infiniband_link_downed_total") in values


@pytest.mark.parametrize(
    ("state", "physical", "up", "active"),
    [
        ("4: ACTIVE", "5: LinkUp", 1, "active"),
        ("5: ACTIVE_DEFER", "5: LinkUp", 1, "active_defer"),
        ("4: ACTIVE", "6: LinkErrorRecovery", 0, "active"),
        ("3: ARMED", "5: LinkUp", 0, "armed"),
        ("2: INIT", "5: LinkUp", 0, "init"),
        ("1: DOWN", "2: Polling", 0, "down"),
        ("0: NOP", "3: Disabled", 0, "nop"),
    ],
)
def test_state_of_a_port(tmp_path: Path, state: str, physical: str, up: int, active: str) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    set_file(tmp_path, "state", state)
    set_file(tmp_path, "phys_state", physical)
    values = Probe(InfiniBand, sysfs=tmp_path).collect().values
    states = ("nop", "down", "init", "armed", "active", "active_defer")
    shown = {name: values[port("infiniband_port_state", state=name)] for name in states}
    assert shown == {name: int(name == active) for name in states}
    assert values[port("infiniband_port_up")] == up
    assert values[port("infiniband_port_observable")] == 1
    assert values[port("node_infiniband_state_id")] == int(state[0])
    assert values[port("node_infiniband_physical_state_id")] == int(physical[0])


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("200 Gb/sec (4X HDR)", 25_000_000_000),
        ("2.5 Gb/sec (1X)", 312_500_000),
        ("10 Gb/sec (4X SDR)", 1_250_000_000),
        ("800 Gb/sec (4X XDR)", 100_000_000_000),
        ("56 Gb/sec", 7_000_000_000),
    ],
)
def test_rate_is_in_bytes_per_second(tmp_path: Path, rate: str, expected: int) -> None:
    write_hca(tmp_path, "mlx5_ib0", model=Model(rate=rate))
    assert Probe(InfiniBand, sysfs=tmp_path).collect().values[port("node_infiniband_rate_bytes_per_second")] == expected


@pytest.mark.parametrize(
    ("file", "name", "limit"),
    [
        ("link_downed", "link_downed_total", 255),
        ("symbol_error", "symbol_error_total", 65535),
        ("local_link_integrity_errors", "local_link_integrity_errors_total", 15),
        ("port_xmit_wait", "port_transmit_wait_total", 4294967295),
    ],
)
def test_narrow_counter_at_its_maximum_is_shown_and_called_saturated(
    tmp_path: Path, file: str, name: str, limit: int
) -> None:
    write_hca(tmp_path, "mlx5_ib0", counters={file: str(limit)})
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0", counters={file: str(limit - 1)})
    values = Probe(InfiniBand, sysfs=tmp_path).collect().values
    assert values[port(f"node_infiniband_{name}")] == limit
    assert values[port("infiniband_counter_saturated", counter=file)] == 1
    assert sum(series.startswith("infiniband_counter_saturated") for series in values) == 1


def test_two_ports_of_one_device_have_their_own_series_and_netdevs(tmp_path: Path) -> None:
    device = write_hca(tmp_path, "mlx4_0", ports=2)
    for number in (1, 2):
        write_netdev(tmp_path, device.parent.parent, f"ib{number - 1}", port=number)
    (device / "ports" / "2" / "state").write_text("1: DOWN\n", encoding="utf-8")
    values = Probe(InfiniBand, sysfs=tmp_path).collect().values
    assert values[port("infiniband_port_up", "mlx4_0", 1)] == 1
    assert values[port("infiniband_port_up", "mlx4_0", 2)] == 0
    assert (values[fabric("present")], values[fabric("up")]) == (2, 1)
    assert [s for s in values if 'port="2",role="fabric"' in s and 'netdev="ib1"' in s]


def test_nd96asr_v4_has_eight_fabric_ports_and_a_frontend_that_is_read_too(tmp_path: Path) -> None:
    write_nd96asr_v4(tmp_path)
    probe = Probe(InfiniBand, sysfs=tmp_path, vm_size=ND96)
    result = probe.collect()
    assert result.failures == []
    assert roles_of(result.values) == {**{f"mlx5_ib{i}": "fabric" for i in range(8)}, "mlx5_an0": "frontend"}
    assert [result.values[fabric(status)] for status in ("expected", "present", "up")] == [8, 8, 8]
    assert result.values[port("node_infiniband_rate_bytes_per_second", "mlx5_an0")] == 5_000_000_000
    assert result.values[port("infiniband_link_rate_expected_bytes_per_second")] == 25_000_000_000
    assert port("infiniband_link_rate_expected_bytes_per_second", "mlx5_an0") not in result.values
    assert probe.collector.found() == "8 fabric ports of 8 expected on 9 devices"


def test_device_info_tells_where_the_port_is(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib3", pci="0104:00:00.0", node_guid="0015:5dff:fe34:072e", netdev="ib3", numa=1)
    info = (
        'infiniband_device_info{device="mlx5_ib3",port="1",role="fabric",link_layer="InfiniBand",'
        'node_guid="0015:5dff:fe34:072e",pci="0104:00:00.0",numa="1",netdev="ib3",driver="mlx5_core"}'
    )
    assert Probe(InfiniBand, sysfs=tmp_path).collect().values[info] == 1


def test_numa_node_minus_one_is_unknown(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0", numa=-1)
    assert [s for s in Probe(InfiniBand, sysfs=tmp_path).collect().values if 'numa=""' in s]


def test_roles_are_told_by_link_layer_first(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_0", pci="0101:00:00.0")
    write_hca(tmp_path, "mlx5_an1", pci="0102:00:00.0")  # an InfiniBand port, whatever its name says
    write_hca(tmp_path, "mlx5_an0", pci="0103:00:00.0", model=ACCELERATED_NETWORKING)
    write_hca(tmp_path, "mana_0", pci="0104:00:00.0", model=MANA)
    write_hca(tmp_path, "mlx5_bond_0", pci="0105:00:00.0", model=ETHERNET)
    write_hca(tmp_path, "mlx5_7", pci="0106:00:00.0", model=Model(link_layer="Unspecified"))
    assert roles_of(Probe(InfiniBand, sysfs=tmp_path).collect().values) == {
        "mlx5_0": "fabric",
        "mlx5_an1": "fabric",
        "mlx5_an0": "frontend",
        "mana_0": "frontend",
        "mlx5_bond_0": "roce",
        "mlx5_7": "unknown",
    }


def test_ethernet_function_behind_the_hosts_network_is_frontend(tmp_path: Path) -> None:
    sysfs, procfs = tmp_path / "sys", tmp_path / "proc"
    write_nd96asr_v4(sysfs)
    (sysfs / "class" / "infiniband" / "mlx5_an0").rename(sysfs / "class" / "infiniband" / "mlx5_8")
    write_hca(sysfs, "mlx5_9", pci="0200:00:00.0", model=ETHERNET, netdev="eth7")
    write_hca(sysfs, "mlx5_10", pci="0201:00:00.0", model=ETHERNET, netdev="eth8")
    (procfs / "net").mkdir(parents=True)
    (procfs / "net" / "route").write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth7\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eth8\t0000000A\t00000000\t0001\t0\t0\t100\t0000FFFF\t0\t0\t0\n",
        encoding="utf-8",
    )
    found = roles_of(Probe(InfiniBand, sysfs=sysfs, procfs=procfs).collect().values)
    assert (found["mlx5_8"], found["mlx5_9"], found["mlx5_10"]) == ("frontend", "frontend", "roce")


def test_declared_ethernet_fabric_counts_as_fabric(tmp_path: Path) -> None:
    write_hca(tmp_path, "rocep0", model=ETHERNET)
    write_hca(tmp_path, "rocep1", pci="0102:00:00.0", model=ETHERNET)
    values = Probe(InfiniBand, Options(fabric_ethernet=("rocep[0]",)), sysfs=tmp_path).collect().values
    assert roles_of(values) == {"rocep0": "fabric", "rocep1": "roce"}
    assert values[fabric("present")] == 1


def test_slow_values_stay_between_slow_reads_and_fast_ones_move(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tmp_path, clock=clock, interval_s=15)
    slow = port("node_infiniband_symbol_error_total")
    fast = port("node_infiniband_link_downed_total")
    probe.collect()
    set_file(tmp_path, "counters/symbol_error", "3")
    set_file(tmp_path, "counters/link_downed", "1")
    seen = []
    for _ in range(4):
        clock.advance(15)
        values = probe.collect().values
        seen.append((values[fast], values[slow]))
    assert seen == [(1, 0), (1, 0), (1, 0), (1, 3)]


def test_slow_read_is_not_missed_by_a_tick_that_comes_early(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tmp_path, clock=clock, interval_s=15)
    probe.collect()
    set_file(tmp_path, "counters/symbol_error", "3")
    clock.advance(59.9)
    assert probe.collect().values[port("node_infiniband_symbol_error_total")] == 3


def test_rate_is_read_again_when_the_state_changes(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tmp_path, clock=clock, interval_s=15)
    rate = port("node_infiniband_rate_bytes_per_second")
    assert probe.collect().values[rate] == 25_000_000_000
    set_file(tmp_path, "rate", "10 Gb/sec (4X SDR)")
    clock.advance(15)
    assert probe.collect().values[rate] == 25_000_000_000
    set_file(tmp_path, "state", "1: DOWN")
    clock.advance(15)
    assert probe.collect().values[rate] == 1_250_000_000


def test_excluded_device_is_never_touched(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    write_hca(tmp_path, "mlx4_0", pci="0103:00:00.0")
    options = Options(device_include=("mlx5_*",), device_exclude=("*1",))
    assert list(roles_of(Probe(InfiniBand, options, sysfs=tmp_path).collect().values)) == ["mlx5_ib0"]


def test_excluded_fabric_devices_are_not_expected(tmp_path: Path) -> None:
    write_nd96asr_v4(tmp_path)
    options = Options(device_exclude=("mlx5_ib[67]", "mlx5_an*"))
    values = Probe(InfiniBand, options, sysfs=tmp_path, vm_size=ND96).collect().values
    assert [values[fabric(status)] for status in ("expected", "present")] == [6, 6]


@pytest.mark.parametrize("directory", ["", "class/infiniband"])
def test_node_without_adapters_is_not_present(tmp_path: Path, directory: str) -> None:
    (tmp_path / directory).mkdir(parents=True, exist_ok=True)
    for size in (None, VmSize("HX", fabric_ports=None), VmSize("ND96is_H100_v5", fabric_ports=0)):
        with pytest.raises(NotPresent, match="class/infiniband"):
            Probe(InfiniBand, sysfs=tmp_path, vm_size=size).open()


def test_node_whose_adapters_are_all_excluded_is_not_present_and_says_why(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    with pytest.raises(NotPresent, match="1 kept out by the configuration"):
        Probe(InfiniBand, Options(device_exclude=("*",)), sysfs=tmp_path).open()


def test_ports_that_the_vm_size_promises_are_missing_not_silent(tmp_path: Path) -> None:
    values = Probe(InfiniBand, sysfs=tmp_path, vm_size=ND96).collect().values
    assert values == {fabric("expected"): 8, fabric("present"): 0, fabric("up"): 0}


def test_ports_seen_before_on_this_boot_are_missing_not_silent(tmp_path: Path) -> None:
    sysfs, procfs, state = tmp_path / "sys", tmp_path / "proc", MemoryState()
    write_boot(procfs)
    write_hca(sysfs, "mlx5_ib0")
    Probe(InfiniBand, sysfs=sysfs, procfs=procfs, state=state).collect()
    (sysfs / "class" / "infiniband" / "mlx5_ib0").unlink()
    values = Probe(InfiniBand, sysfs=sysfs, procfs=procfs, state=state).collect().values
    assert values == {fabric("expected"): 1, fabric("present"): 0, fabric("up"): 0}


def test_ports_of_another_boot_are_not_expected(tmp_path: Path) -> None:
    sysfs, procfs, state = tmp_path / "sys", tmp_path / "proc", MemoryState()
    write_boot(procfs)
    write_hca(sysfs, "mlx5_ib0")
    Probe(InfiniBand, sysfs=sysfs, procfs=procfs, state=state).collect()
    (sysfs / "class" / "infiniband" / "mlx5_ib0").unlink()
    write_boot(procfs, "7d9b6f6e-0000-4000-8000-000000000002")
    with pytest.raises(NotPresent):
        Probe(InfiniBand, sysfs=sysfs, procfs=procfs, state=state).open()


def test_device_that_is_excluded_later_is_not_missed(tmp_path: Path) -> None:
    sysfs, procfs, state = tmp_path / "sys", tmp_path / "proc", MemoryState()
    write_boot(procfs)
    write_nd96asr_v4(sysfs)
    Probe(InfiniBand, sysfs=sysfs, procfs=procfs, state=state).collect()
    options = Options(device_exclude=("mlx5_ib3", "mlx5_ib4"))
    for size in (None, ND96):
        probe = Probe(InfiniBand, options, sysfs=sysfs, procfs=procfs, state=state, vm_size=size)
        values = probe.collect().values
        assert [values[fabric(status)] for status in ("expected", "present")] == [6, 6]


def test_device_under_another_name_is_not_expected_twice(tmp_path: Path) -> None:
    sysfs, procfs, state = tmp_path / "sys", tmp_path / "proc", MemoryState()
    write_boot(procfs)
    write_hca(sysfs, "mlx5_0")
    probe = Probe(InfiniBand, sysfs=sysfs, procfs=procfs, state=state)
    probe.collect()
    entry = sysfs / "class" / "infiniband" / "mlx5_0"
    entry.rename(entry.with_name("mlx5_ib0"))
    probe.open()
    assert probe.collect().values[fabric("expected")] == 1
    assert state.content["fabric_ports"] == {"mlx5_ib0": 1}


def test_ports_that_went_and_came_back_are_told_once_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    write_hca(tmp_path, "mlx5_ib0")
    probe = Probe(InfiniBand, sysfs=tmp_path, vm_size=VmSize("x", fabric_ports=2))
    for _ in range(2):
        probe.collect()
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    probe.open()
    for _ in range(2):
        probe.collect()
    assert caplog.messages == [
        "1 of 2 expected fabric ports are not there",
        "all 2 expected fabric ports are there again",
    ]


@pytest.mark.parametrize("content", [{"boot_id": None}, {"fabric_ports": "many", "boot_id": "x"}, {"other": []}])
def test_useless_memory_is_ignored(tmp_path: Path, content: dict[str, object]) -> None:
    write_boot(tmp_path / "proc", "x")
    with pytest.raises(NotPresent):
        Probe(InfiniBand, sysfs=tmp_path / "sys", procfs=tmp_path / "proc", state=MemoryState(content)).open()


@pytest.mark.parametrize("count", [True, 0, -1, 257, 10**30, 1.0, float("inf"), "2", None, [1], {"1": 1}])
def test_a_count_that_cannot_be_one_is_ignored_and_the_others_are_not(tmp_path: Path, count: object) -> None:
    write_boot(tmp_path / "proc", "x")
    state = MemoryState({"boot_id": "x", "fabric_ports": {"mlx5_ib0": count, "mlx5_ib1": 256}})
    probe = Probe(InfiniBand, sysfs=tmp_path / "sys", procfs=tmp_path / "proc", state=state)
    assert probe.collect().values[fabric("expected")] == 256


def test_a_device_whose_name_is_no_text_is_ignored(tmp_path: Path) -> None:
    class Raw(MemoryState):
        def load(self) -> dict[str, object]:
            return self.content  # keys stay what they are

    write_boot(tmp_path / "proc", "x")
    state = Raw({"boot_id": "x", "fabric_ports": {1: 1, None: 1, "mlx5_ib1": 2}})
    probe = Probe(InfiniBand, sysfs=tmp_path / "sys", procfs=tmp_path / "proc", state=state)
    assert probe.collect().values[fabric("expected")] == 2


def test_without_a_boot_id_nothing_is_expected_from_before(tmp_path: Path) -> None:
    state = MemoryState()
    write_hca(tmp_path, "mlx5_ib0")
    Probe(InfiniBand, sysfs=tmp_path, state=state).collect()
    (tmp_path / "class" / "infiniband" / "mlx5_ib0").unlink()
    with pytest.raises(NotPresent):
        Probe(InfiniBand, sysfs=tmp_path, state=state).open()


def test_every_metric_that_is_shown_is_declared(tmp_path: Path) -> None:
    write_nd96asr_v4(tmp_path)
    declared = {metric.name for metric in InfiniBand.metrics}
    shown = {series.partition("{")[0] for series in Probe(InfiniBand, sysfs=tmp_path, vm_size=ND96).collect().values}
    assert shown <= declared
    assert len(declared) == len(InfiniBand.metrics)


def test_every_option_is_explained() -> None:
    fields = Options.__dataclass_fields__
    assert all(field.metadata["help"] for field in fields.values())
    assert Options().slow_interval == Duration(60)


def test_ports_that_are_merely_expected_are_not_seen(tmp_path: Path) -> None:
    (tmp_path / "class/infiniband").mkdir(parents=True)
    size = VmSize("ND96asr_v4", fabric_ports=8)
    probe = Probe(InfiniBand, sysfs=tmp_path, vm_size=size)
    probe.collect()
    assert not probe.collector.seen()
    write_hca(tmp_path, "mlx5_ib0")
    probe.open()
    probe.collect()
    assert probe.collector.seen()
