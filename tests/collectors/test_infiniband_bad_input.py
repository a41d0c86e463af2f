"""The infiniband collector on bad input: only the bad value is missing, and the failure is counted by its errno."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from agent.sim.clock import FakeClock
from agent.sim.harness import Probe
from agent.sim.infiniband import Model, port_directory, write_hca
from collectors.infiniband import InfiniBand

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agent.api import Value

COUNTER = "counters/symbol_error"
COUNTER_SERIES = 'node_infiniband_symbol_error_total{device="mlx5_ib0",port="1"}'
FLAG_SERIES = 'infiniband_counter_saturated{device="mlx5_ib0",port="1",counter="symbol_error"}'
HW_COUNTER = "hw_counters/out_of_buffer"
HW_SERIES = 'node_infiniband_out_of_buffer_drops_total{device="mlx5_ib0",port="1"}'
RATE_SERIES = 'node_infiniband_rate_bytes_per_second{device="mlx5_ib0",port="1"}'
STATE_SERIES = 'node_infiniband_state_id{device="mlx5_ib0",port="1"}'
PHYSICAL_SERIES = 'node_infiniband_physical_state_id{device="mlx5_ib0",port="1"}'


def port_series(name: str, device: str = "mlx5_ib0", port: str = "1") -> str:
    return f'{name}{{device="{device}",port="{port}"}}'


def errors_of(label: str, port: str = "1") -> str:
    return f'infiniband_read_errors_total{{device="mlx5_ib0",port="{port}",errno="{label}"}}'


def without_times(values: dict[str, Value]) -> dict[str, Value]:
    return {series: value for series, value in values.items() if "duration_seconds" not in series}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_hca(tmp_path, "mlx5_ib0")
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    return tmp_path


@pytest.fixture
def port1(tree: Path) -> Path:
    return port_directory(tree, "mlx5_ib0")


@pytest.fixture
def break_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int | None], None]:
    """Give a function that makes reads of files with this path ending fail, as a driver would; None mends them."""
    broken: dict[str, int] = {}
    paths: dict[int, str] = {}
    true_open, true_pread = os.open, os.pread

    def noting_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = true_open(path, flags, mode, dir_fd=dir_fd)
        paths[descriptor] = str(path)
        return descriptor

    def failing_pread(descriptor: int, size: int, start: int) -> bytes:
        for ending, number in broken.items():
            if paths.get(descriptor, "").endswith(ending):
                raise OSError(number, os.strerror(number))
        return true_pread(descriptor, size, start)

    def set_broken(ending: str, number: int | None) -> None:
        broken.pop(ending, None)
        if number is not None:
            broken[ending] = number

    monkeypatch.setattr(os, "open", noting_open)
    monkeypatch.setattr(os, "pread", failing_pread)
    return set_broken


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (b"", "parse"),
        (b"\n", "parse"),
        (b"garbage\n", "parse"),
        (b"1_000\n", "parse"),
        (b"+5\n", "parse"),
        (b"0x1f\n", "parse"),
        (b"1 2\n", "parse"),
        (b"1\n2\n", "parse"),
        (b"1.5\n", "parse"),
        (b"\xff\xfe\n", "parse"),
        ("\u0661\u0662\n".encode(), "parse"),
        (b"-1\n", "range"),
        (b"18446744073709551616\n", "range"),
        (b"9" * 5000, "range"),
    ],
)
@pytest.mark.parametrize(("file", "series"), [(COUNTER, {COUNTER_SERIES}), (HW_COUNTER, {HW_SERIES})])
def test_bad_counter_costs_itself_only(
    *, tree: Path, port1: Path, file: str, series: set[str], text: bytes, label: str
) -> None:
    good = Probe(InfiniBand, sysfs=tree).collect()
    (port1 / file).write_bytes(text)
    bad = Probe(InfiniBand, sysfs=tree).collect()
    assert without_times(good.values).keys() - bad.values.keys() == series
    assert bad.values.keys() - good.values.keys() == {errors_of(label)}
    assert bad.values[errors_of(label)] == 1
    assert [what for what, _ in bad.failures] == [f"mlx5_ib0/ports/1/{file}"]


@pytest.mark.parametrize("text", ["010\n", "  10\n", "10", "10 \n"])
def test_decimal_number_is_decimal_however_it_is_padded(tree: Path, port1: Path, text: str) -> None:
    (port1 / COUNTER).write_text(text, encoding="utf-8")
    result = Probe(InfiniBand, sysfs=tree).collect()
    assert result.values[COUNTER_SERIES] == 10
    assert result.failures == []


def test_largest_number_is_still_a_number(tree: Path, port1: Path) -> None:
    (port1 / HW_COUNTER).write_text(f"{2**64 - 1}\n", encoding="utf-8")
    assert Probe(InfiniBand, sysfs=tree).collect().values[HW_SERIES] == 2**64 - 1


def test_saturation_is_told_beside_a_bad_counter_too(tree: Path, port1: Path) -> None:
    (port1 / "counters" / "link_error_recovery").write_text("x\n", encoding="utf-8")
    (port1 / COUNTER).write_text("65535\n", encoding="utf-8")
    values = Probe(InfiniBand, sysfs=tree).collect().values
    assert (values[COUNTER_SERIES], values[FLAG_SERIES]) == (65535, 1)
    assert sum(series.startswith("infiniband_counter_saturated") for series in values) == 1


@pytest.mark.parametrize("text", ["N/A (no PMA)\n", "N/A (not available)\n"])
def test_counter_that_the_driver_does_not_have_is_absent_and_no_error(tree: Path, port1: Path, text: str) -> None:
    (port1 / COUNTER).write_text(text, encoding="utf-8")
    result = Probe(InfiniBand, sysfs=tree).collect()
    assert COUNTER_SERIES not in result.values
    assert not [series for series in result.values if "read_errors" in series]
    assert result.failures == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.EACCES, errno.EOPNOTSUPP, errno.ETIMEDOUT])
@pytest.mark.parametrize(
    ("file", "series"),
    [
        (COUNTER, {COUNTER_SERIES}),
        (HW_COUNTER, {HW_SERIES}),
        ("ports/1/rate", {RATE_SERIES}),
        ("phys_state", {PHYSICAL_SERIES}),
    ],
)
def test_failing_file_costs_its_value_only(
    tree: Path,
    break_reads: Callable[[str, int | None], None],
    number: int,
    file: str,
    series: set[str],
) -> None:
    good = Probe(InfiniBand, sysfs=tree).collect()
    name = {errno.EOPNOTSUPP: "EOPNOTSUPP"}.get(number, errno.errorcode[number])
    break_reads(f"mlx5_ib0/{file}" if file.startswith("ports") else f"mlx5_ib0/ports/1/{file}", number)
    bad = Probe(InfiniBand, sysfs=tree).collect()
    assert without_times(good.values).keys() - bad.values.keys() == series
    assert bad.values[errors_of(name)] == 1
    assert len(bad.failures) == 1
    assert os.strerror(number) in bad.failures[0][1]


@pytest.mark.parametrize(
    "text", ["", "fast\n", "0 Gb/sec (4X SDR)\n", "-10 Gb/sec\n", "1e9 Gb/sec\n", "999999 Gb/sec\n"]
)
def test_rate_that_cannot_be_is_absent(tree: Path, port1: Path, text: str) -> None:
    (port1 / "rate").write_text(text, encoding="utf-8")
    values = Probe(InfiniBand, sysfs=tree).collect().values
    assert RATE_SERIES not in values
    assert values.get(errors_of("parse"), 0) + values.get(errors_of("range"), 0) == 1
    assert values[port_series("infiniband_port_up")] == 1


def test_mana_rate_that_the_driver_refuses_costs_that_value_only(
    tmp_path: Path, break_reads: Callable[[str, int | None], None]
) -> None:
    write_hca(tmp_path, "mana_0", model=Model(link_layer="Ethernet", driver="mana"))
    write_hca(tmp_path, "mlx5_ib0", pci="0102:00:00.0")
    break_reads("mana_0/ports/1/rate", errno.EINVAL)
    values = Probe(InfiniBand, sysfs=tmp_path).collect().values
    assert port_series("node_infiniband_rate_bytes_per_second", "mana_0") not in values
    assert values[port_series("node_infiniband_state_id", "mana_0")] == 4
    assert values[RATE_SERIES] == 25_000_000_000


@pytest.mark.parametrize("text", ["", "ACTIVE\n", "x: ACTIVE\n", "-1: ACTIVE\n", "4\n"])
def test_unreadable_state_is_unknown_not_down(tree: Path, port1: Path, text: str) -> None:
    (port1 / "state").write_text(text, encoding="utf-8")
    values = Probe(InfiniBand, sysfs=tree).collect().values
    assert values[port_series("infiniband_port_observable")] == 0
    assert port_series("infiniband_port_up") not in values
    assert STATE_SERIES not in values
    assert not [series for series in values if series.startswith('infiniband_port_state{device="mlx5_ib0"')]
    assert values[errors_of("parse")] == 1
    assert values[PHYSICAL_SERIES] == 5
    assert values['infiniband_fabric_ports{status="up"}'] == 1
    assert values['infiniband_fabric_ports{status="present"}'] == 2


def test_state_that_nobody_knows_is_shown_by_its_number_and_not_as_down(tree: Path, port1: Path) -> None:
    (port1 / "state").write_text("77: WHAT\n", encoding="utf-8")
    values = Probe(InfiniBand, sysfs=tree).collect().values
    assert values[port_series("infiniband_port_observable")] == 0
    assert values[STATE_SERIES] == 77
    assert port_series("infiniband_port_up") not in values
    assert not [series for series in values if series.startswith('infiniband_port_state{device="mlx5_ib0"')]


def test_missing_state_is_counted_and_costs_its_values_only(tree: Path, port1: Path) -> None:
    (port1 / "state").unlink()
    values = Probe(InfiniBand, sysfs=tree).collect().values
    assert values[port_series("infiniband_port_observable")] == 0
    assert values[errors_of("ENOENT")] == 1
    assert values[COUNTER_SERIES] == 0


@pytest.mark.parametrize("directory", ["counters", "hw_counters"])
def test_missing_directory_of_counters_costs_those_only(tree: Path, port1: Path, directory: str) -> None:
    for file in (port1 / directory).iterdir():
        file.unlink()
    (port1 / directory).rmdir()
    result = Probe(InfiniBand, sysfs=tree).collect()
    assert (COUNTER_SERIES in result.values, HW_SERIES in result.values) == (
        directory != "counters",
        directory != "hw_counters",
    )
    assert result.values[port_series("infiniband_port_up")] == 1
    assert result.values[port_series("infiniband_port_restricted")] == 0
    assert result.failures == []


def test_directory_that_cannot_be_listed_costs_its_counters_only(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_scandir = os.scandir

    def refusing_scandir(path: str) -> object:
        if str(path).endswith("mlx5_ib0/ports/1/counters"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return true_scandir(path)

    monkeypatch.setattr(os, "scandir", refusing_scandir)
    values = Probe(InfiniBand, sysfs=tree).collect().values
    assert COUNTER_SERIES not in values
    assert values[HW_SERIES] == 0
    assert values[errors_of("EACCES")] == 1


def test_directory_in_place_of_a_counter_costs_that_only(tree: Path, port1: Path) -> None:
    (port1 / COUNTER).unlink()
    (port1 / COUNTER).mkdir()
    values = Probe(InfiniBand, sysfs=tree).collect().values
    assert COUNTER_SERIES not in values
    assert values[errors_of("EISDIR")] == 1


def test_device_without_ports_keeps_its_info(tree: Path, port1: Path) -> None:
    port1.parent.rename(tree / "elsewhere")
    values = Probe(InfiniBand, sysfs=tree).collect().values
    shown = {series for series in values if 'device="mlx5_ib0"' in series}
    assert [series for series in shown if series.startswith("node_infiniband_info")]
    assert not [series for series in shown if "port=" in series]
    assert values['infiniband_fabric_ports{status="present"}'] == 1


@pytest.mark.parametrize("file", ["fw_ver", "board_id", "hca_type"])
def test_missing_description_is_an_empty_label(tree: Path, file: str) -> None:
    (tree / "class" / "infiniband" / "mlx5_ib0" / file).unlink()
    labels = {"board_id": "MT_0000000223", "fw_ver": "20.28.4000", "hca_type": "MT4124", file: ""}
    result = Probe(InfiniBand, sysfs=tree).collect()
    info = (
        f'node_infiniband_info{{device="mlx5_ib0",board_id="{labels["board_id"]}",'
        f'firmware_version="{labels["fw_ver"]}",hca_type="{labels["hca_type"]}"}}'
    )
    assert result.values[info] == 1
    assert result.failures == []


def test_missing_link_layer_makes_the_role_unknown_and_no_fabric(tree: Path, port1: Path) -> None:
    (port1 / "link_layer").unlink()
    result = Probe(InfiniBand, sysfs=tree).collect()
    assert [
        s for s in result.values if s.startswith('infiniband_device_info{device="mlx5_ib0",port="1",role="unknown"')
    ]
    assert result.values['infiniband_fabric_ports{status="present"}'] == 1
    assert result.values[COUNTER_SERIES] == 0
    assert result.failures == []


def test_link_layer_that_cannot_be_read_any_more_changes_no_role(tree: Path, port1: Path) -> None:
    probe = Probe(InfiniBand, sysfs=tree)
    probe.collect()
    (port1 / "link_layer").unlink()
    (port1 / "link_layer").mkdir()
    probe.open()
    values = probe.collect().values
    assert values['infiniband_fabric_ports{status="present"}'] == 2
    assert values[errors_of("EISDIR")] == 1


def test_unreadable_description_is_counted_without_a_port(tree: Path) -> None:
    firmware = tree / "class" / "infiniband" / "mlx5_ib0" / "fw_ver"
    firmware.unlink()
    firmware.mkdir()
    assert Probe(InfiniBand, sysfs=tree).collect().values[errors_of("EISDIR", port="")] == 1


def test_strange_port_directories_are_no_ports(tree: Path, port1: Path) -> None:
    for name in ("foo", "1a", "-1", "\u0661", "01"):
        (port1.parent / name).mkdir()
    result = Probe(InfiniBand, sysfs=tree).collect()
    ports = {series for series in result.values if series.startswith('infiniband_port_up{device="mlx5_ib0"')}
    assert ports == {port_series("infiniband_port_up")}
    assert result.failures == []


def test_stray_file_and_dangling_link_are_no_devices(tree: Path) -> None:
    (tree / "class" / "infiniband" / "README").write_text("hello\n", encoding="utf-8")
    (tree / "class" / "infiniband" / "mlx5_gone").symlink_to("../../devices/nowhere")
    result = Probe(InfiniBand, sysfs=tree).collect()
    assert not [series for series in result.values if "README" in series or "mlx5_gone" in series]
    assert result.values['infiniband_fabric_ports{status="present"}'] == 2
    assert result.failures == []


def test_device_directory_instead_of_a_link_is_a_device(tmp_path: Path) -> None:
    port = tmp_path / "class" / "infiniband" / "hfi1_0" / "ports" / "1"
    (port / "hw_counters").mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "100 Gb/sec (4X EDR)"}.items():
        (port / name).write_text(f"{text}\n", encoding="utf-8")
    (port / "link_layer").write_text("InfiniBand\n", encoding="utf-8")
    (port / "hw_counters" / "RxTIDFlowSeqErr,vl0").write_text("1\n", encoding="utf-8")
    result = Probe(InfiniBand, sysfs=tmp_path).collect()
    assert result.values['infiniband_port_up{device="hfi1_0",port="1"}'] == 1
    assert not [series for series in result.values if "RxTID" in series]
    assert result.failures == []


def test_file_that_fails_three_times_running_is_read_again_after_ten_minutes(
    tree: Path, break_reads: Callable[[str, int | None], None]
) -> None:
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tree, clock=clock, interval_s=15)
    file, series = (
        "mlx5_ib0/ports/1/counters/link_downed",
        'node_infiniband_link_downed_total{device="mlx5_ib0",port="1"}',
    )
    break_reads(file, errno.EINVAL)
    counted = []
    for _ in range(6):
        result = probe.collect()
        counted.append(result.values[errors_of("EINVAL")])
        assert len(result.failures) == 1  # it goes on failing, read or not
        clock.advance(15)
    assert counted == [1, 2, 3, 3, 3, 3]
    break_reads(file, None)
    clock.advance(600 - 4 * 15 - 1)
    assert series not in probe.collect().values
    clock.advance(1)
    result = probe.collect()
    assert result.values[series] == 0
    assert result.values[errors_of("EINVAL")] == 3
    assert result.failures == []


def test_file_that_fails_again_after_its_rest_rests_at_once(
    tree: Path, break_reads: Callable[[str, int | None], None]
) -> None:
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tree, clock=clock, interval_s=15)
    break_reads("mlx5_ib0/ports/1/counters/link_downed", errno.EIO)
    counted = []
    for wait_s in (15, 15, 600, 15, 585):
        probe.collect()
        clock.advance(wait_s)
        counted.append(probe.collect().values[errors_of("EIO")])
    assert counted == [2, 3, 4, 4, 5]


def test_state_that_is_read_again_is_no_failure_any_more(tree: Path, port1: Path) -> None:
    probe = Probe(InfiniBand, sysfs=tree)
    seen = []
    for text in ("x", "x", "4: ACTIVE", "x", "x", "1: DOWN"):
        (port1 / "state").write_text(f"{text}\n", encoding="utf-8")
        result = probe.collect()
        seen.append((result.values.get(port_series("infiniband_port_up")), len(result.failures)))
    assert seen == [(None, 1), (None, 1), (1, 0), (None, 1), (None, 1), (0, 0)]


def test_failures_that_do_not_follow_each_other_are_no_reason_to_rest(tree: Path, port1: Path) -> None:
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tree, clock=clock, interval_s=15)
    seen = []
    for text in ("x", "x", "1", "x", "x", "2"):
        (port1 / "counters" / "link_downed").write_text(f"{text}\n", encoding="utf-8")
        seen.append(probe.collect().values.get('node_infiniband_link_downed_total{device="mlx5_ib0",port="1"}'))
        clock.advance(15)
    assert seen == [None, None, 1, None, None, 2]


def test_port_whose_counters_are_all_refused_is_restricted_and_its_state_still_read(
    tree: Path, port1: Path, break_reads: Callable[[str, int | None], None]
) -> None:
    for file in (port1 / "counters").iterdir():
        break_reads(f"mlx5_ib0/ports/1/counters/{file.name}", errno.EINVAL)
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tree, clock=clock, interval_s=15)
    for _ in range(5):
        result = probe.collect()
        assert result.values[port_series("infiniband_port_restricted")] == 1
        assert result.values[port_series("infiniband_port_up")] == 1
        assert result.values[RATE_SERIES] == 25_000_000_000
        assert result.values[HW_SERIES] == 0
        assert result.values[port_series("infiniband_port_restricted", "mlx5_ib1")] == 0
        assert result.failures == [("mlx5_ib0/ports/1/counters", "EINVAL: Invalid argument (21 files)")]
        clock.advance(15)
    break_reads("mlx5_ib0/ports/1/counters/link_downed", None)
    clock.advance(600)
    assert probe.collect().values[port_series("infiniband_port_restricted")] == 0


def test_port_that_fails_to_be_read_is_not_restricted(
    tree: Path, port1: Path, break_reads: Callable[[str, int | None], None]
) -> None:
    for file in (port1 / "counters").iterdir():
        break_reads(f"mlx5_ib0/ports/1/counters/{file.name}", errno.EIO)
    assert Probe(InfiniBand, sysfs=tree).collect().values[port_series("infiniband_port_restricted")] == 0
