from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.api import NotPresent
from agent.hw.clocksync import ClockState
from agent.sim.clock import FakeClock
from agent.sim.harness import Probe, Result
from agent.sim.host import SimDisk, SimHost, SimInterface
from collectors.host import Host, Options

if TYPE_CHECKING:
    from pathlib import Path

HZ = 100


@pytest.fixture
def node(tmp_path: Path) -> SimHost:
    return SimHost(tmp_path, cpus=4)


def probe(node: SimHost, *, clock: FakeClock | None = None, **options: Any) -> Probe:
    node.write()
    return Probe(node.answering(Host), Options(**options), sysfs=node.sys, procfs=node.proc, clock=clock)


def names(result: Result) -> set[str]:
    return {series.partition("{")[0] for series in result.values}


def put(node: SimHost, name: str, content: str) -> None:
    (node.proc / name).write_text(content)


def test_healthy_node_fails_nowhere_and_shows_every_metric(node: SimHost) -> None:
    node.processes[7] = node.processes[1]
    clock = FakeClock()
    run = probe(node, clock=clock, per_cpu=True)
    run.collect()
    clock.advance(60)
    result = run.collect()
    assert result.failures == []
    assert {metric.name for metric in Host.metrics} - names(result) == set()


def test_every_emitted_series_is_declared_with_its_labels(node: SimHost) -> None:
    declared = {metric.name for metric in Host.metrics}
    assert names(probe(node, per_cpu=True).collect()) <= declared
    assert len(declared) == len(Host.metrics)


def test_no_procfs_is_not_present_and_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(NotPresent, match=str(tmp_path)):
        Probe(Host, procfs=tmp_path).open()


def test_cpu_time_is_in_seconds_and_counts_guests_once(node: SimHost) -> None:
    run = probe(node)
    put(node, "stat", "cpu  1000 200 300 400 50 6 7 8 900 100\ncpu0 1 1 1 1\ncpu3 1 1 1 1\nctxt 5\n")
    values = run.collect().values
    assert values['host_cpu_seconds_total{mode="user"}'] == 10.0
    assert values['host_cpu_seconds_total{mode="steal"}'] == 0.08
    assert values['host_cpu_guest_seconds_total{mode="user"}'] == 9.0
    modes = [value for series, value in values.items() if series.startswith("host_cpu_seconds_total")]
    assert sum(modes) == pytest.approx((1000 + 200 + 300 + 400 + 50 + 6 + 7 + 8) / HZ)
    assert values["host_cpus_online"] == 2


def test_old_kernel_without_steal_lacks_those_modes_only(node: SimHost) -> None:
    run = probe(node)
    put(node, "stat", "cpu  1 2 3 4 5\nctxt 5\n")
    result = run.collect()
    assert 'host_cpu_seconds_total{mode="iowait"}' in result.values
    assert 'host_cpu_seconds_total{mode="steal"}' not in result.values
    assert result.failures == []


def test_idle_and_iowait_never_step_back_a_little(node: SimHost) -> None:
    run = probe(node)
    put(node, "stat", "cpu  100 0 0 1000 500 0 0 0\n")
    run.collect()
    put(node, "stat", "cpu  90 0 0 999 499 0 0 0\n")
    values = run.collect().values
    assert values['host_cpu_seconds_total{mode="idle"}'] == 10.0
    assert values['host_cpu_seconds_total{mode="iowait"}'] == 5.0
    assert values['host_cpu_seconds_total{mode="user"}'] == 0.9


def test_idle_that_starts_anew_is_shown_as_it_is(node: SimHost) -> None:
    run = probe(node)
    put(node, "stat", "cpu  100 0 0 100000 500 0 0 0\n")
    run.collect()
    put(node, "stat", "cpu  1 0 0 2 0 0 0 0\n")
    assert run.collect().values['host_cpu_seconds_total{mode="idle"}'] == 0.02


def test_single_cpus_are_shown_on_request_only(node: SimHost) -> None:
    assert "host_cpu_core_seconds_total" not in names(probe(node).collect())
    values = probe(node, per_cpu=True).collect().values
    assert values['host_cpu_core_seconds_total{cpu="3",mode="user"}'] == 7000.0
    assert sum(series.startswith("host_cpu_core_seconds_total") for series in values) == 4 * 8


def test_bad_cpu_costs_only_its_own_series(node: SimHost) -> None:
    run = probe(node, per_cpu=True)
    put(node, "stat", "cpu  1 2 3 4\ncpu0 1 2 3 4\ncpu1 garbage\nctxt 77\n")
    result = run.collect()
    assert 'host_cpu_core_seconds_total{cpu="0",mode="user"}' in result.values
    assert result.values["host_context_switches_total"] == 77
    assert [what for what, _ in result.failures] == ["stat cpu1"]


def test_bad_line_of_cpu_time_does_not_cost_the_other_counters(node: SimHost) -> None:
    run = probe(node)
    put(node, "stat", "cpu  1 2 x 4\nctxt 77\n")
    result = run.collect()
    assert "host_cpu_seconds_total" not in names(result)
    assert result.values["host_context_switches_total"] == 77
    assert [what for what, _ in result.failures] == ["stat cpu"]


def test_memory_is_in_bytes(node: SimHost) -> None:
    run = probe(node)
    put(node, "meminfo", "MemTotal:       24684084 kB\nHugePages_Total:      10\nHugepagesize:       2048 kB\n")
    values = run.collect().values
    assert values["host_memory_total_bytes"] == 24684084 * 1024
    assert values["host_memory_hugepages_total_bytes"] == 10 * 2048 * 1024
    assert "host_memory_free_bytes" not in values
    assert "host_memory_hugepages_free_bytes" not in values


def test_bad_memory_line_costs_only_itself(node: SimHost) -> None:
    run = probe(node)
    put(node, "meminfo", "MemTotal:       -5 kB\nMemFree:       1 kB\n")
    result = run.collect()
    assert "host_memory_total_bytes" not in result.values
    assert result.values["host_memory_free_bytes"] == 1024
    assert [what for what, _ in result.failures] == ["meminfo MemTotal:"]


def test_load_threads_and_descriptors(node: SimHost) -> None:
    run = probe(node)
    put(node, "loadavg", "0.08 0.05 12.00 1/90 6244\n")
    put(node, "sys/fs/file-nr", "521\t0\t9223372036854775807\n")
    values = run.collect().values
    assert values["host_load1"] == 0.08
    assert values["host_load15"] == 12.0
    assert values["host_threads"] == 90
    assert values["host_file_descriptors_allocated"] == 521
    assert values["host_file_descriptors_maximum"] == 9223372036854775807


def test_boot_and_kernel_are_named_without_the_node(node: SimHost) -> None:
    result = probe(node).collect()
    assert result.values[f'host_boot_info{{boot_id="{node.boot_id}"}}'] == 1
    (uname,) = (series for series in result.values if series.startswith("host_uname_info"))
    assert 'sysname="Linux",release="6.8.0-1021-azure",version="#25-Ubuntu SMP",machine="' in uname
    assert "nodename" not in uname


SOURCES = {
    "stat": "host_cpu_seconds_total",
    "loadavg": "host_load1",
    "uptime": "host_uptime_seconds",
    "meminfo": "host_memory_total_bytes",
    "vmstat": "host_oom_kills_total",
    "diskstats": "host_disk_read_bytes_total",
    "net/dev": "host_network_bytes_total",
    "self/mountinfo": "host_filesystem_size_bytes",
    "sys/fs/file-nr": "host_file_descriptors_allocated",
    "sys/kernel/random/boot_id": "host_boot_info",
}


@pytest.mark.parametrize(
    ("source", "opened_before"),
    # Without stat at the start this is no node, which is another test.
    [(source, before) for source in SOURCES for before in (True, False) if before or source != "stat"],
)
def test_missing_file_costs_only_its_own_series(node: SimHost, source: str, *, opened_before: bool) -> None:
    everything = names(probe(node).collect())
    run = probe(node)
    if opened_before:
        run.open()
    (node.proc / source).unlink()
    result = run.collect()
    assert SOURCES[source] not in names(result)
    assert {what.partition(" ")[0] for what, _ in result.failures} == {source}
    others = set(SOURCES.values()) - {SOURCES[source]}
    assert others <= names(result) <= everything


@pytest.mark.parametrize("content", ["", "\0\0\0\0", "garbage\nof two lines\n", "-1 -1 -1 -1/-1 -1\n"])
@pytest.mark.parametrize("source", sorted(set(SOURCES) - {"sys/kernel/random/boot_id"}))
def test_garbage_costs_only_its_own_series(node: SimHost, source: str, content: str) -> None:
    run = probe(node)
    run.open()
    put(node, source, content)
    result = run.collect()
    assert SOURCES[source] not in names(result)
    assert {what.partition(" ")[0] for what, _ in result.failures} == {source}
    assert set(SOURCES.values()) - {SOURCES[source]} <= names(result)


def test_file_that_comes_back_is_read_after_the_next_rescan(node: SimHost) -> None:
    node.omit = {"net/dev"}
    run = probe(node)
    assert "host_network_bytes_total" not in names(run.collect())
    node.omit = set()
    node.write()
    run.open()
    result = run.collect()
    assert "host_network_bytes_total" in names(result)
    assert result.failures == []


def test_kernel_without_pressure_is_normal(node: SimHost) -> None:
    node.omit = {"pressure/cpu", "pressure/memory", "pressure/io"}
    result = probe(node).collect()
    assert "host_pressure_waiting_seconds_total" not in names(result)
    assert result.failures == []


def test_pressure_is_in_seconds_and_cpu_never_stalls_a_whole_node(node: SimHost) -> None:
    run = probe(node)
    put(node, "pressure/io", "some avg10=0.00 avg60=0.00 avg300=0.00 total=4976796\nfull avg10=0 total=1000000\n")
    values = run.collect().values
    assert values['host_pressure_waiting_seconds_total{resource="io"}'] == pytest.approx(4.976796)
    assert values['host_pressure_stalled_seconds_total{resource="io"}'] == 1.0
    assert 'host_pressure_waiting_seconds_total{resource="cpu"}' in values
    assert 'host_pressure_stalled_seconds_total{resource="cpu"}' not in values


def test_clock_offset_is_absent_while_nothing_disciplines_the_clock(node: SimHost) -> None:
    synchronized = probe(node).collect().values
    assert synchronized["host_clock_synchronized"] == 1
    assert synchronized["host_clock_offset_seconds"] == 0.000_012
    node.clock = ClockState(synchronized=False, offset_s=0.0, max_error_s=16.0)
    values = probe(node).collect().values
    assert values["host_clock_synchronized"] == 0
    assert not {"host_clock_offset_seconds", "host_clock_max_error_seconds"} & set(values)


def test_sandbox_that_forbids_asking_the_clock_is_no_failure(node: SimHost) -> None:
    class Sandboxed(Host):
        @staticmethod
        def statvfs(path: bytes) -> Any:
            return node.statvfs(path)

        @staticmethod
        def read_clock() -> ClockState:
            raise PermissionError(errno.EPERM, "adjtimex: Operation not permitted")

    node.write()
    result = Probe(Sandboxed, sysfs=node.sys, procfs=node.proc).collect()
    assert "host_clock_synchronized" not in names(result)
    assert result.failures == []


def test_disk_values_are_in_base_units(node: SimHost) -> None:
    run = probe(node)
    put(node, "diskstats", "   8       0 sda 70292 24230 2267290 10208 6843 26885 1781752 4429 3 6340 14828 0 0 0 0\n")
    disk = {
        series.removeprefix("host_disk_").partition("{")[0]: value
        for series, value in run.collect().values.items()
        if series.startswith("host_disk_")
    }
    assert disk == {
        "reads_completed_total": 70292,
        "read_bytes_total": 2267290 * 512,
        "read_time_seconds_total": pytest.approx(10.208),
        "writes_completed_total": 6843,
        "written_bytes_total": 1781752 * 512,
        "write_time_seconds_total": pytest.approx(4.429),
        "io_in_flight": 3,
        "io_time_seconds_total": pytest.approx(6.34),
        "io_time_weighted_seconds_total": pytest.approx(14.828),
    }


def devices(result: Result, prefix: str) -> set[str]:
    return {series.partition('device="')[2].partition('"')[0] for series in result.values if series.startswith(prefix)}


def test_partitions_and_minor_devices_are_left_out(node: SimHost) -> None:
    node.disks = {name: SimDisk() for name in ("nvme0n1", "sda", "loop0", "zram0", "sr0", "nvme0c0n1", "md0")}
    run = probe(node)
    with (node.proc / "diskstats").open("a") as stats:
        stats.write("   8       1 sda1 1 1 1 1 1 1 1 1 1 1 1\n")
    assert devices(run.collect(), "host_disk_") == {"nvme0n1", "sda", "md0"}


def test_disk_with_a_slash_in_its_name_is_found(node: SimHost) -> None:
    run = probe(node)
    (node.sys / "block/cciss!c0d0").mkdir()
    put(node, "diskstats", "104 0 cciss/c0d0 1 1 1 1 1 1 1 1 1 1 1\n")
    assert devices(run.collect(), "host_disk_") == {"cciss/c0d0"}


def test_bad_disk_row_costs_only_its_disk(node: SimHost) -> None:
    run = probe(node)
    put(node, "diskstats", "8 0 sda 1 2 -3 4 5 6 7 8 9 10 11\n259 0 nvme0n1 1 1 1 1 1 1 1 1 1 1 1\n")
    result = run.collect()
    assert devices(result, "host_disk_") == {"nvme0n1"}
    assert [what for what, _ in result.failures] == ["diskstats sda"]


def test_disk_that_is_pulled_vanishes_at_once_and_a_new_one_comes_with_the_rescan(node: SimHost) -> None:
    run = probe(node)
    run.collect()
    node.disks = {"nvme0n1": node.disks["nvme0n1"], "nvme1n1": SimDisk()}
    node.write()
    assert devices(run.collect(), "host_disk_") == {"nvme0n1"}
    run.open()
    assert devices(run.collect(), "host_disk_") == {"nvme0n1", "nvme1n1"}


def test_network_traffic_by_direction(node: SimHost) -> None:
    run = probe(node)
    put(node, "net/dev", "  eth0: 10 11 12 13 14 15 16 17 20 21 22 23 24 25 26 27\n")
    values = run.collect().values
    for place, name in enumerate(("bytes", "packets", "errors", "drops")):
        assert values[f'host_network_{name}_total{{device="eth0",direction="rx"}}'] == 10 + place
        assert values[f'host_network_{name}_total{{device="eth0",direction="tx"}}'] == 20 + place


def test_link_that_is_down_is_zero_and_unknown_is_absent(node: SimHost) -> None:
    node.interfaces = {
        "eth0": SimInterface(),
        "eth1": SimInterface(up=False, speed_mbps=None, carrier_changes=9),
        "wg0": SimInterface(),
    }
    run = probe(node)
    (node.sys / "class/net/wg0/operstate").write_text("unknown\n")
    values = run.collect().values
    assert values['host_network_up{device="eth0"}'] == 1
    assert values['host_network_up{device="eth1"}'] == 0
    assert values['host_network_carrier_changes_total{device="eth1"}'] == 9
    assert 'host_network_up{device="wg0"}' not in values
    assert values['host_network_speed_bytes_per_second{device="eth0"}'] == 12_500_000_000
    assert 'host_network_speed_bytes_per_second{device="eth1"}' not in values


@pytest.mark.parametrize("speed", ["4294967295\n", "0\n", "fast\n", ""])
def test_speed_that_no_link_has_is_absent(node: SimHost, speed: str) -> None:
    run = probe(node)
    (node.sys / "class/net/eth0/speed").write_text(speed)
    result = run.collect()
    assert "host_network_speed_bytes_per_second" not in names(result)
    assert result.failures == []


def test_interface_that_sysfs_does_not_show_keeps_its_traffic(node: SimHost) -> None:
    run = probe(node)
    (node.sys / "class/net/eth0/operstate").unlink()
    result = run.collect()
    assert "host_network_bytes_total" in names(result)
    assert "host_network_up" not in names(result)
    assert result.failures == []


def test_loopback_and_container_interfaces_are_left_out_by_default(node: SimHost) -> None:
    node.interfaces = {name: SimInterface() for name in ("lo", "eth0", "veth12ab", "docker0", "azv123", "ib0", "bond0")}
    assert devices(probe(node).collect(), "host_network_") == {"eth0", "ib0", "bond0"}
    assert "lo" in devices(probe(node, device_exclude=()).collect(), "host_network_")


def test_exclude_wins_over_include_for_interfaces_and_disks(node: SimHost) -> None:
    node.interfaces = {name: SimInterface() for name in ("eth0", "eth1", "ib0")}
    result = probe(node, device_include=("eth*", "nvme*", "sda"), device_exclude=("eth1", "sd*")).collect()
    assert devices(result, "host_network_") == {"eth0"}
    assert devices(result, "host_disk_") == {"nvme0n1"}


def test_glob_must_match_the_whole_name(node: SimHost) -> None:
    node.interfaces = {name: SimInterface() for name in ("eth0", "eth01", "myeth0")}
    assert devices(probe(node, device_include=("eth0",)).collect(), "host_network_") == {"eth0"}


def test_what_was_found_is_told_after_open(node: SimHost) -> None:
    run = probe(node)
    run.open()
    assert run.collector.found() == "disks 2, network interfaces 1, file systems 2"


def test_counters_follow_the_simulated_time(node: SimHost) -> None:
    run = probe(node)
    before = run.collect().values
    node.advance(10)
    node.write()
    after = run.collect().values
    moved = 'host_network_bytes_total{device="eth0",direction="rx"}'
    assert after[moved] - before[moved] == 10 * node.interfaces["eth0"].received_bytes_per_s
    for metric in Host.metrics:
        if metric.kind.value == "counter":
            for series, value in before.items():
                if series.partition("{")[0] == metric.name:
                    assert after[series] >= value


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=st.sampled_from(sorted(SOURCES)), content=st.binary(max_size=200))
def test_no_bytes_in_any_file_stop_the_others(node: SimHost, source: str, content: bytes) -> None:
    run = probe(node)
    run.open()
    (node.proc / source).write_bytes(content)
    result = run.collect()
    assert set(SOURCES.values()) - {SOURCES[source]} <= names(result)
    assert all(value >= 0 for series, value in result.values.items() if "offset" not in series)
