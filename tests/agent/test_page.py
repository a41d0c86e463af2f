"""The status page: what an operator can rely on at a glance, and what nobody can smuggle into it."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Kind, Metric, Series, Severity
from agent.page import HEADERS, render
from agent.page.quantities import bit_rate, clock, memory, memory_of, number, percent, rate_of, span
from agent.snapshot import Snapshot
from tests.agent.screen import GIB, NOW, Node, Screen, collector, event, facts, show

if TYPE_CHECKING:
    from agent.api import Value

DASH = "\N{EN DASH}"
NO_NVML = "NVML cannot be used (is the driver loaded?)"
FINE = "Nothing wrong in these values"
HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=y>&amp;\x00\n\u202e"


def starting(name: str) -> dict[str, Any]:
    return collector(name, "starting", enabled=False, age="", series=0)


def grades(screen: Screen) -> set[str]:
    """Return the grades of all marks on the page."""
    marks = (value for _, name, value in screen.attributes if name == "class" and value.startswith("mark "))
    return {value.removeprefix("mark ") for value in marks}


def healthy_node() -> Node:
    node = Node()
    for index in range(8):
        node.gpu(str(index))
        node.port(f"mlx5_ib{index}")
    node.port("mlx5_an0", role="frontend")
    node.add("gpu_nvml_up", 1)
    node.add("gpu_expected_count", 8)
    node.add("gpu_driver_info", 1, driver_version="570.133.20")
    for status in ("expected", "present", "up"):
        node.add("infiniband_fabric_ports", 8, status=status)
    node.add("host_uname_info", 1, release="5.15.0-1110-azure")
    node.add("host_uptime_seconds", 12 * 86400)
    node.add("host_load1", 34.21)
    node.add("host_cpus_online", 96)
    node.add("host_memory_total_bytes", 886 * GIB)
    node.add("host_memory_available_bytes", 600 * GIB)
    return node


def test_a_healthy_node_says_so_and_shows_every_device() -> None:
    screen = show(healthy_node())
    assert screen.verdict == FINE
    assert screen.lines == []
    assert screen.tables["GPUs"].heads == [str(index) for index in range(8)]
    ports = [f"mlx5_ib{index} net-mlx5_ib{index}" for index in range(8)]
    assert screen.tables["InfiniBand"].heads == [*ports, "mlx5_an0 net-mlx5_an0"]
    assert screen.tables["GPUs"].caption == "8 \N{MULTIPLICATION SIGN} NVIDIA A100-SXM4-40GB"
    assert screen.tables["InfiniBand"].caption == "8 of 8 fabric ports up"


def text_of(screen: Screen) -> str:
    return " ".join(text for _, text in screen.texts)


def test_the_head_tells_what_node_this_is_and_from_when() -> None:
    told = text_of(show(healthy_node(), size="Standard_ND96asr_v4"))
    for fact in (
        "nd96-0007",
        "Size Standard_ND96asr_v4",
        "Kernel 5.15.0-1110-azure",
        "Driver 570.133.20",
        "Up 12 d",
        "Load 34.2 on 96 CPUs",
        "Memory 286 / 886 GiB",
        "Agent hpcwatch 0.1.0",
        "Newest values 07:59:57 UTC, 3 s ago",
    ):
        assert fact in told


def test_the_title_tells_the_verdict_and_the_node() -> None:
    node = healthy_node()
    node.gpu("8", up=0)
    assert [text for element, text in show(node).texts if element == "title"] == ["1 thing wrong - nd96-0007"]


def test_only_what_is_there_is_shown() -> None:
    node = Node()
    node.add("host_load1", 0.5)
    screen = show(node)
    assert list(screen.tables) == ["Collectors"]
    told = text_of(screen)
    for absent in ("Size", "Kernel", "Driver", "Up ", "Memory", "GPU", "InfiniBand"):
        assert absent not in told


def test_before_the_first_values_nothing_is_claimed() -> None:
    screen = show({}, collectors=[starting("host")])
    assert screen.verdict == "Collection has not finished"
    assert "Newest values none yet" in text_of(screen)


def test_while_a_collector_is_starting_the_node_is_not_said_to_be_fine() -> None:
    node = Node()
    node.add("host_load1", 1)
    screen = show(node, collectors=[starting("gpu"), collector("host"), starting("infiniband")])
    assert screen.verdict == "Collection has not finished"
    assert screen.lines == ["Waiting for the first values of gpu, infiniband"]
    assert grades(screen) == {"ok"}  # of the one that runs


def test_what_is_wrong_is_told_before_collection_has_finished() -> None:
    node = Node()
    node.gpu("0", up=0)
    screen = show(node, collectors=[collector("gpu"), starting("host")])
    assert screen.verdict == "1 thing wrong"
    assert screen.lines == ["GPU 0 down", "Waiting for the first values of host"]


def test_where_no_collector_has_anything_to_do_nothing_is_claimed() -> None:
    idle = [collector("gpu", "absent", enabled=False), collector("host", "off", enabled=False)]
    assert show({}, collectors=idle).verdict == "Nothing collected"


def test_that_nothing_is_wrong_is_said_in_a_neutral_tone() -> None:
    screen = show(healthy_node())
    assert ("section", "class", "verdict ") in screen.attributes
    assert "checks arrive with a later version" in text_of(screen)


def test_a_gpu_is_shown_with_its_values_and_bars() -> None:
    node = Node()
    labels = node.gpu("0")
    node.add("gpu_temperature_celsius", 65, **labels, sensor="memory")
    screen = show(node)
    assert screen.tables["GPUs"].row("0") == {
        "GPU": "0",
        "State": "up",
        "Utilisation": "97 %",
        "Memory": "30.5 / 40.0 GiB",
        "Temperature": "52 \N{DEGREE SIGN}C memory 65",
        "Power": "300 / 400 W",
        "Health": "nothing found",
    }
    assert screen.bars == ["97", "76", "75"]


def test_a_value_that_is_absent_is_a_dash_and_draws_no_bar() -> None:
    node = Node()
    node.add("gpu_up", 1, gpu="0", uuid="GPU-0")
    node.add("infiniband_port_up", 1, device="mlx5_ib0", port="1")
    screen = show(node)
    row = screen.tables["GPUs"].row("0")
    assert [row[title] for title in ("Utilisation", "Memory", "Temperature", "Power", "Health")] == [DASH] * 5
    row = screen.tables["InfiniBand"].row("mlx5_ib0")
    assert [row[t] for t in ("Role", "Rate", "Receiving", "Sending", "Link downs", "Errors")] == [DASH] * 6
    assert screen.bars == []


def test_a_total_that_is_absent_leaves_the_part() -> None:
    node = Node()
    labels = {"gpu": "0", "uuid": "GPU-0"}
    node.add("gpu_memory_used_bytes", 3 * GIB, **labels)
    node.add("gpu_power_watts", 58, **labels, scope="gpu")
    row = show(node).tables["GPUs"].row("0")
    assert (row["State"], row["Memory"], row["Power"]) == (DASH, "3 GiB", "58 W")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
def test_what_is_no_finite_number_is_absent(value: Value) -> None:
    node = Node()
    node.add("gpu_temperature_celsius", value, gpu="0", uuid="GPU-0", sensor="gpu")
    node.add("gpu_utilization_ratio", 0.5, gpu="0", uuid="GPU-0")
    row = show(node).tables["GPUs"].row("0")
    assert (row["Temperature"], row["Utilisation"]) == (DASH, "50 %")


@pytest.mark.parametrize(
    ("used", "total", "width"), [(50, 40, "100"), (-1, 40, "0"), (1, 0, "0"), (-1, -1, "0"), (10, 40, "25")]
)
def test_a_bar_stays_within_its_frame(used: float, total: float, width: str) -> None:
    node = Node()
    node.add("gpu_memory_used_bytes", used, gpu="0", uuid="GPU-0")
    node.add("gpu_memory_total_bytes", total, gpu="0", uuid="GPU-0")
    assert show(node).bars == [width]


def test_a_gpu_that_is_down_tells_why_and_the_others_stay_complete() -> None:
    node = Node()
    node.gpu("0")
    node.add("gpu_error", 1, **node.gpu("1", up=0), reason="gpu_lost")
    screen = show(node)
    assert screen.lines == ["GPU 1 down: gpu lost"]
    row = screen.tables["GPUs"].row("1")
    assert (row["State"], row["Utilisation"], row["Memory"]) == ("down gpu lost", DASH, DASH)
    assert screen.tables["GPUs"].row("0")["Utilisation"] == "97 %"
    assert screen.tables["GPUs"].caption.endswith("A100-SXM4-40GB, 1 down")


def test_gpus_of_several_models_are_named_each() -> None:
    node = Node()
    node.gpu("0")
    node.add("gpu_info", 1, gpu="1", uuid="GPU-1", name="NVIDIA A10")
    screen = show(node)
    assert screen.tables["GPUs"].heads == ["0 NVIDIA A100-SXM4-40GB", "1 NVIDIA A10"]
    assert screen.tables["GPUs"].caption == "2 GPUs"


def test_devices_are_in_order_of_their_numbers() -> None:
    node = Node()
    for index in ("10", "2", "1"):
        node.gpu(index)
        node.port(f"mlx5_{index}")
    screen = show(node)
    assert screen.tables["GPUs"].heads == ["1", "2", "10"]
    assert [head.split()[0] for head in screen.tables["InfiniBand"].heads] == ["mlx5_1", "mlx5_2", "mlx5_10"]


def test_a_gpu_never_seen_alive_is_named_by_its_uuid() -> None:
    node = Node()
    node.gpu("", up=0, uuid="GPU-01234567-89ab-cdef")
    assert show(node).lines == ["GPU GPU-01234567 down"]


@pytest.mark.parametrize(
    ("name", "labels", "value", "words"),
    [
        ("gpu_row_remap_failure", {}, 1, "row remapping failed"),
        ("gpu_row_remap_pending", {}, 1, "row remap needs a reset"),
        ("gpu_recovery_action", {"action": "node_reboot"}, 1, "driver asks for node reboot"),
        ("gpu_ecc_errors_all_total", {"type": "uncorrected", "lifetime": "volatile"}, 2, "ECC: 2 uncorrected"),
        ("gpu_clock_event_active", {"reason": "hw_thermal"}, 1, "slowed by heat"),
        ("gpu_clock_event_active", {"reason": "sw_thermal"}, 1, "slowed by heat"),
        ("gpu_clock_event_active", {"reason": "hw_slowdown"}, 1, "slowed by hardware"),
        ("gpu_clock_event_active", {"reason": "hw_power_brake"}, 1, "power brake"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_in_its_row_and_in_the_verdict(
    name: str, labels: dict[str, str], value: Value, words: str
) -> None:
    node = Node()
    node.add(name, value, **node.gpu("4"), **labels)
    screen = show(node)
    assert screen.lines == [f"GPU 4 {words}"]
    assert screen.tables["GPUs"].row("4")["Health"] == words


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("gpu_recovery_action", {"action": "none"}, 1),
        ("gpu_recovery_action", {"action": "gpu_reset"}, 0),
        ("gpu_ecc_errors_all_total", {"type": "uncorrected", "lifetime": "aggregate"}, 2),
        ("gpu_ecc_errors_all_total", {"type": "corrected", "lifetime": "volatile"}, 2),
        ("gpu_clock_event_active", {"reason": "sw_power_cap"}, 1),
        ("gpu_clock_event_active", {"reason": "hw_thermal"}, 0),
        ("gpu_nvlink_links", {}, 12),
    ],
)
def test_what_belongs_to_normal_work_is_not_wrong(name: str, labels: dict[str, str], value: Value) -> None:
    node = Node()
    node.add(name, value, **node.gpu("4"), **labels)
    node.add("gpu_nvlink_active_links", 0 if "nvlink" in name else 12, gpu="4", uuid="GPU-4")
    assert show(node).verdict == FINE


def test_some_links_of_several_missing_is_wrong() -> None:
    node = Node()
    node.gpu("0", nvlink_links=12, nvlink_active_links=11)
    assert show(node).lines == ["GPU 0 NVLink 11 of 12"]


def test_remarks_that_are_not_wrong_stand_in_the_row() -> None:
    node = Node()
    labels = node.gpu("0", pcie_link_width=8, pcie_link_max_width=16)
    node.add("gpu_ecc_errors_all_total", 7, **labels, type="corrected", lifetime="volatile")
    screen = show(node)
    assert screen.tables["GPUs"].row("0")["Health"] == "ECC: 7 corrected PCIe x8 of x16"
    assert screen.lines == []


def test_heat_seen_by_hardware_and_software_is_one_thing() -> None:
    node = Node()
    labels = node.gpu("4")
    for reason in ("hw_thermal", "sw_thermal"):
        node.add("gpu_clock_event_active", 1, **labels, reason=reason)
    screen = show(node)
    assert (screen.verdict, screen.lines) == ("1 thing wrong", ["GPU 4 slowed by heat"])


SEVERE = [
    ("critical", 3599, "59 min ago", "bad"),
    ("critical", 3660, "61 min ago", "warning"),
    ("critical", 40 * 86400, "40 d ago", "warning"),
    ("error", 3599, "59 min ago", "bad"),
]
PASSED = [("error", 3601), ("warning", 720), ("info", 720), ("of another world", 720), ("", 720)]


@pytest.mark.parametrize(("severity", "age_s", "ago", "grade"), SEVERE)
def test_severe_xids_of_the_last_hour_and_critical_ones_since_boot_are_wrong(
    severity: str, age_s: float, ago: str, grade: str
) -> None:
    node = Node()
    node.gpu("3")
    node.xid("3", "48", severity, age_s)
    screen = show(node)
    assert screen.lines == [f"GPU 3 XID 48, {ago}"]
    assert ("section", "class", f"verdict {grade}") in screen.attributes
    assert screen.tables["GPUs"].row("3")["Health"] == f"XID 48, {ago}"


@pytest.mark.parametrize(("severity", "age_s"), PASSED)
def test_other_xids_stand_in_the_row_only_plain_and_small(severity: str, age_s: float) -> None:
    node = Node()
    node.gpu("3")
    node.xid("3", "79", severity, age_s)
    screen = show(node)
    assert (screen.verdict, screen.lines) == (FINE, [])
    assert screen.tables["GPUs"].row("3")["Health"].startswith("XID 79, ")
    assert [element for element, text in screen.texts if text.startswith("XID 79, ")] == ["small"]
    assert grades(screen) == {"ok"}


@pytest.mark.parametrize("severities", [("critical", "warning"), ("warning", "critical"), ("unheard of", "critical")])
def test_of_a_code_with_several_severities_the_worst_that_came_counts(severities: tuple[str, str]) -> None:
    node = Node()
    node.gpu("0")
    for severity in severities:
        node.xid("0", "145", severity, 60, total=3)
    screen = show(node)
    assert screen.lines == ["GPU 0 XID 145, 60 s ago"]
    assert screen.tables["GPUs"].row("0")["Health"] == "XID 145, 60 s ago"


def test_a_severity_that_a_code_never_came_with_does_not_count() -> None:
    node = Node()
    node.gpu("0")
    node.xid("0", "145", "warning", 60)
    node.xid("0", "145", "critical", 60, total=0)
    screen = show(node)
    assert (screen.lines, grades(screen)) == ([], {"ok"})


def test_a_critical_xid_of_unknown_time_is_wrong() -> None:
    node = Node()
    node.add("gpu_xid_errors_total", 1, **node.gpu("0"), xid="62", severity="critical")
    screen = show(node)
    assert screen.lines == ["GPU 0 XID 62"]
    assert ("section", "class", "verdict warning") in screen.attributes


@pytest.mark.parametrize(("severity", "age_s", "ago", "grade"), SEVERE)
def test_severe_sxids_are_wrong_as_xids_are(severity: str, age_s: float, ago: str, grade: str) -> None:
    node = Node()
    node.add("host_load1", 1)
    node.sxid("2", "20034", severity, age_s)
    screen = show(node)
    assert screen.lines == [f"NVSwitch 2 SXID 20034, {ago}"]
    assert ("section", "class", f"verdict {grade}") in screen.attributes


@pytest.mark.parametrize(("severity", "age_s"), PASSED)
def test_other_sxids_are_not_wrong(severity: str, age_s: float) -> None:
    node = Node()
    node.sxid("2", "20034", severity, age_s)
    assert show(node).verdict == FINE


def test_the_same_sxid_of_several_switches_is_told_of_each() -> None:
    node = Node()
    for switch in ("10", "9", ""):
        node.sxid(switch, "20034", "critical", 60)
    node.sxid("9", "20034", "warning", 60)
    assert show(node).lines == ["NVSwitch unknown, 9, 10 SXID 20034, 60 s ago"]


@pytest.mark.parametrize("age_s", [60, 7200])
@pytest.mark.parametrize("severity", ["critical", "error", "warning", "info", "of another world"])
def test_an_xid_is_marked_in_its_row_as_it_is_in_the_verdict(severity: str, age_s: float) -> None:
    node = Node()
    node.gpu("3")
    node.xid("3", "48", severity, age_s)
    screen = show(node)
    before, _, after = screen.source.partition("<h2>GPUs</h2>")
    marked = [set(re.findall('class="mark (bad|warning)"', part)) for part in (before, after)]
    assert marked[0] == marked[1]
    assert bool(marked[0]) == bool(screen.lines)


def test_an_xid_that_never_came_is_not_shown() -> None:
    node = Node()
    node.gpu("3")
    node.xid("3", "79", "critical", 60, total=0)
    screen = show(node)
    assert (screen.lines, screen.tables["GPUs"].row("3")["Health"]) == ([], "nothing found")


def test_the_latest_xid_comes_first() -> None:
    node = Node()
    node.gpu("3")
    node.xid("3", "13", "warning", 5000)
    node.xid("3", "31", "warning", 300)
    assert show(node).tables["GPUs"].row("3")["Health"] == "XID 31, 5 min ago XID 13, 83 min ago"


def test_of_very_many_xids_the_worst_are_shown() -> None:
    node = Node()
    node.gpu("3")
    for code in range(100, 120):
        node.xid("3", str(code), "info", 10)
    node.xid("3", "31", "warning", 30)
    node.xid("3", "94", "error", 60)
    shown = show(node).tables["GPUs"].row("3")["Health"]
    assert shown.startswith("XID 94, 60 s ago XID 31, 30 s ago XID 100, 10 s ago ")
    assert shown.count("XID") == 8


def test_an_xid_of_a_gpu_that_nobody_knows_is_told_without_making_a_gpu_of_it() -> None:
    node = Node()
    node.add("gpu_xid_errors_total", 1, gpu="", uuid="", xid="79", severity="critical")
    node.add("gpu_xid_last_timestamp_seconds", NOW - 60, gpu="", uuid="", xid="79")
    screen = show(node)
    assert screen.lines == ["GPU unknown XID 79, 60 s ago"]
    assert "GPUs" not in screen.tables


@pytest.mark.parametrize(
    ("nvml_up", "known", "on_pci", "lines"),
    [
        (1, 8, 8, []),
        (1, 7, 8, ["GPUs 1 of 8 missing"]),
        (0, 0, 8, [f"8 GPUs on PCI, none can be read: {NO_NVML}"]),
        (0, 0, 6, [f"6 GPUs on PCI, none can be read: {NO_NVML}", "GPUs 2 of 8 missing"]),
        (0, 0, 0, [f"8 GPUs expected, none can be read: {NO_NVML}", "GPUs 8 of 8 missing"]),
    ],
)
def test_gpus_that_are_expected_and_missing_are_wrong(nvml_up: int, known: int, on_pci: int, lines: list[str]) -> None:
    node = Node()
    for index in range(known):
        node.gpu(str(index))
    node.add("gpu_nvml_up", nvml_up)
    node.add("gpu_expected_count", 8)
    node.add("gpu_count", on_pci, source="pci")
    assert show(node).lines == lines


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"pci": 8}, f"8 GPUs on PCI, none can be read: {NO_NVML}"),
        ({"pci": 1, "expected": 1}, f"1 GPU on PCI, it cannot be read: {NO_NVML}"),
        ({"expected": 1, "dev": 1}, f"1 GPU expected, it cannot be read: {NO_NVML}"),
        ({"expected": 4, "dev": 4}, f"4 GPUs expected, none can be read: {NO_NVML}"),
        ({"pci": 8, "proc": 0}, f"8 GPUs on PCI, none can be read: {NO_NVML}"),
        ({"pci": 8, "proc": 8}, "8 GPUs on PCI, none can be read: NVML cannot be used"),
        ({}, f"{NO_NVML}: no GPU can be read"),
    ],
)
def test_without_nvml_it_is_told_how_many_gpus_that_concerns(values: dict[str, float], line: str) -> None:
    node = Node()
    node.add("gpu_nvml_up", 0)
    for name, value in values.items():
        if name == "expected":
            node.add("gpu_expected_count", value)
        else:
            node.add("gpu_count", value, source=name)
    screen = show(node)
    assert screen.lines == [line]
    assert ("section", "class", "verdict bad") in screen.attributes


def test_of_what_there_is_but_one_it_is_told_so() -> None:
    node = Node()
    node.add("gpu_nvml_up", 1)
    node.add("gpu_expected_count", 1)
    node.add("host_load1", 0.5)
    node.add("host_cpus_online", 1)
    node.add("infiniband_fabric_ports", 1, status="expected")
    node.add("infiniband_fabric_ports", 0, status="present")
    screen = show(node)
    assert screen.lines == ["1 GPU missing", "1 fabric port missing"]
    assert "0.5 on 1 CPU" in [text for _, text in screen.texts]


@pytest.mark.parametrize(
    ("up", "expected", "caption"),
    [
        (0, None, "0 fabric ports up"),
        (1, None, "1 fabric port up"),
        (2, None, "2 fabric ports up"),
        (0, 1, "0 of 1 fabric port up"),
        (1, 8, "1 of 8 fabric ports up"),
    ],
)
def test_fabric_ports_are_counted_as_people_do(up: int, expected: int | None, caption: str) -> None:
    node = Node()
    node.port("mlx5_ib0", up=up)
    node.add("infiniband_fabric_ports", up, status="up")
    if expected is not None:
        node.add("infiniband_fabric_ports", expected, status="expected")
    assert show(node).tables["InfiniBand"].caption == caption


def test_one_fabric_port_that_is_not_up_is_told_where_none_shows_as_down() -> None:
    node = Node()
    for status, count in (("present", 1), ("up", 0)):
        node.add("infiniband_fabric_ports", count, status=status)
    assert show(node).lines == ["1 fabric port not up"]


def test_a_gpu_that_is_down_is_not_missing_too() -> None:
    node = Node()
    node.gpu("0", up=0)
    node.add("gpu_expected_count", 1)
    node.add("gpu_nvml_up", 1)
    assert show(node).lines == ["GPU 0 down"]


def test_a_port_is_shown_with_its_state_rate_and_totals() -> None:
    node = Node()
    node.port("mlx5_ib0")
    assert show(node).tables["InfiniBand"].row("mlx5_ib0") == {
        "Port": "mlx5_ib0 net-mlx5_ib0",
        "Role": "fabric",
        "State": "up",
        "Rate": "200 Gb/s",
        "Receiving": DASH,
        "Sending": DASH,
        "Link downs": "3",
        "Errors": "0",
    }


def test_a_second_port_of_an_adapter_is_named_with_its_number() -> None:
    node = Node()
    node.port("mlx5_0")
    node.port("mlx5_0", port="2", up=0, state="down")
    screen = show(node)
    assert [head.split()[0] for head in screen.tables["InfiniBand"].heads] == ["mlx5_0", "mlx5_0/2"]
    assert screen.lines == ["port mlx5_0/2 is down"]


@pytest.mark.parametrize(
    ("state", "up", "shown"), [("down", 0, "down polling"), ("init", 0, "down init, polling"), ("active", 1, "up")]
)
def test_the_state_of_a_port_is_told_as_far_as_it_is_down(state: str, up: int, shown: str) -> None:
    node = Node()
    node.port("mlx5_ib0", up=up, state=state)
    assert show(node).tables["InfiniBand"].row("mlx5_ib0")["State"] == shown


def test_fabric_ports_that_are_down_or_missing_are_wrong_each_told_once() -> None:
    node = Node()
    node.port("mlx5_ib0")
    node.port("mlx5_ib1", up=0, state="down")
    for status, count in (("expected", 8), ("present", 7), ("up", 6)):
        node.add("infiniband_fabric_ports", count, status=status)
    screen = show(node)
    assert screen.lines == ["port mlx5_ib1 is down", "fabric ports 1 of 8 missing"]
    assert screen.tables["InfiniBand"].caption == "6 of 8 fabric ports up"


def test_fabric_ports_that_are_not_up_are_told_where_none_shows_as_down() -> None:
    node = Node()
    for status, count in (("expected", 8), ("present", 8), ("up", 6)):
        node.add("infiniband_fabric_ports", count, status=status)
    assert show(node).lines == ["fabric ports 2 of 8 not up"]


@pytest.mark.parametrize("role", ["frontend", "roce", "unknown"])
def test_ports_that_are_no_fabric_are_shown_down_but_are_not_wrong(role: str) -> None:
    node = Node()
    node.port("mlx5_an0", role=role, up=0, state="down")
    screen = show(node)
    assert screen.lines == []
    assert screen.tables["InfiniBand"].row("mlx5_an0")["State"] == "down polling"
    assert ("span", "class", "mark warning") in screen.attributes
    assert ("span", "class", "mark bad") not in screen.attributes


def test_a_port_that_trained_too_slow_is_wrong() -> None:
    node = Node()
    node.add("infiniband_link_rate_expected_bytes_per_second", 25e9, **node.port("mlx5_ib2", rate=12.5e9))
    screen = show(node)
    assert screen.lines == ["port mlx5_ib2 runs at 100 of 200 Gb/s"]
    assert screen.tables["InfiniBand"].row("mlx5_ib2")["Rate"] == "100 of 200 Gb/s"


def test_an_adapter_that_hangs_and_a_port_that_cannot_be_read_are_wrong() -> None:
    node = Node()
    node.add("infiniband_collect_stalled", 1, device="mlx5_ib0")
    node.add("infiniband_port_observable", 0, device="mlx5_ib0", port="1")
    node.add("infiniband_device_info", 1, device="mlx5_ib1", port="1", role="fabric")
    node.add("infiniband_port_observable", 0, device="mlx5_ib1", port="1")
    node.port("mlx5_ib2")
    node.add("infiniband_collect_stalled", 0, device="mlx5_ib2")
    screen = show(node)
    assert screen.lines == ["adapter mlx5_ib0 does not answer", "port mlx5_ib1 cannot be read"]
    assert screen.tables["InfiniBand"].row("mlx5_ib0")["State"] == "hangs"
    assert screen.tables["InfiniBand"].row("mlx5_ib1")["State"] == "unreadable"
    assert len(screen.tables["InfiniBand"].rows) == 3


def test_errors_are_added_up_and_named() -> None:
    node = Node()
    labels = node.port("mlx5_ib0")
    node.add("node_infiniband_port_errors_received_total", 2, **labels)
    node.add("node_infiniband_link_error_recovery_total", 10, **labels)
    assert show(node).tables["InfiniBand"].row("mlx5_ib0")["Errors"] == "12 2 receive, 10 recovery"


def test_a_counter_at_its_maximum_is_a_lower_bound() -> None:
    node = Node()
    labels = {"device": "mlx5_ib0", "port": "1"}
    node.add("node_infiniband_link_downed_total", 255, **labels)
    node.add("node_infiniband_symbol_error_total", 65535, **labels)
    for counter in ("link_downed", "symbol_error"):
        node.add("infiniband_counter_saturated", 1, **labels, counter=counter)
    row = show(node).tables["InfiniBand"].row("mlx5_ib0")
    assert (row["Link downs"], row["Errors"]) == ("\u2265 255", "\u2265 65,535 65,535 symbol")


def test_a_port_whose_counters_are_refused_says_so() -> None:
    node = Node()
    node.add("infiniband_port_up", 1, device="mlx5_0", port="1")
    node.add("infiniband_port_restricted", 1, device="mlx5_0", port="1")
    assert show(node).tables["InfiniBand"].row("mlx5_0")["Errors"] == "counters not readable here"


def ports_at(taken_at: float, received: float, **given: Any) -> Snapshot:
    node = Node(taken_at)
    node.port("mlx5_ib0", received=received, **given)
    return node.snapshots()["infiniband"]


def moved(before: Snapshot | None, latest: Snapshot) -> dict[str, str]:
    """Return the port's row, as of the first view of these two snapshots."""
    return show({"infiniband": latest}, ports_before=before).tables["InfiniBand"].row("mlx5_ib0")


def test_traffic_is_the_rate_between_the_two_latest_snapshots_at_the_first_view_already() -> None:
    latest = ports_at(NOW, 1e12 + 15 * 12.5e9)
    screen = show({"infiniband": latest}, ports_before=ports_at(NOW - 15, 1e12))
    row = screen.tables["InfiniBand"].row("mlx5_ib0")
    assert (row["Receiving"], row["Sending"]) == ("100 Gb/s", "0 b/s")
    assert screen.bars == ["50", "0"]


def test_what_was_looked_at_before_does_not_change_the_traffic() -> None:
    first, second, third = ports_at(NOW - 10, 0), ports_at(NOW - 5, 0), ports_at(NOW, 5 * 25e9)
    assert moved(None, first)["Receiving"] == DASH
    assert moved(second, third)["Receiving"] == "200 Gb/s"
    assert moved(second, third)["Receiving"] == "200 Gb/s"


@pytest.mark.parametrize(
    ("passed_s", "shown"),
    [(-5, False), (0, False), (0.0625, False), (0.125, True), (299, True), (300, True), (300.5, False)],
)
def test_traffic_is_told_of_snapshots_a_tenth_of_a_second_to_five_minutes_apart(passed_s: float, shown: bool) -> None:  # noqa: FBT001 - a table
    row = moved(ports_at(NOW - passed_s, 1e12), ports_at(NOW, 1e12 + 12.5e9 * passed_s if passed_s > 0 else 2e12))
    assert (row["Receiving"], row["Sending"]) == (("100 Gb/s", "0 b/s") if shown else (DASH, DASH))


def test_a_counter_that_fell_costs_its_own_rate_only() -> None:
    row = moved(ports_at(NOW - 15, 1e12), ports_at(NOW, 1e11))
    assert (row["Receiving"], row["Sending"]) == (DASH, "0 b/s")


def test_without_a_snapshot_before_or_a_port_in_it_there_is_no_traffic() -> None:
    node = Node(NOW - 15)
    node.port("mlx5_ib1")
    node.port("mlx5_ib0", port="2")
    for before in (None, node.snapshots()["infiniband"]):
        row = moved(before, ports_at(NOW, 2e12))
        assert (row["Receiving"], row["Sending"]) == (DASH, DASH)


def test_a_port_that_went_down_has_no_traffic_and_no_bar() -> None:
    before, latest = ports_at(NOW - 15, 1e12), ports_at(NOW, 1e12 + 15e9, up=0, state="down")
    screen = show({"infiniband": latest}, ports_before=before)
    row = screen.tables["InfiniBand"].row("mlx5_ib0")
    assert (row["State"], row["Receiving"], row["Sending"]) == ("down polling", DASH, DASH)
    assert screen.bars == []


def test_a_port_of_which_the_state_is_unknown_keeps_its_traffic() -> None:
    snapshots = []
    for seconds in (0, 10):
        node = Node(NOW + seconds)
        name = "node_infiniband_port_data_received_bytes_total"
        node.add(name, 12.5e9 * seconds, device="mlx5_ib0", port="1")
        snapshots.append(node.snapshots()["infiniband"])
    row = moved(*snapshots)
    assert (row["State"], row["Receiving"]) == (DASH, "100 Gb/s")


def test_ports_that_are_gone_have_no_traffic() -> None:
    assert "InfiniBand" not in show({}, ports_before=ports_at(NOW, 1e12)).tables


def test_collectors_that_fail_or_hang_are_wrong_and_idle_ones_come_last() -> None:
    rows = [
        collector("azure", "absent", enabled=False, needs="an Azure VM", age="", series=0),
        collector("gpu", "failed", reason="no library", errors=7),
        collector("host", found="96 CPUs"),
        collector("logs", "hung", reason=""),
        collector("textfile", "off", enabled=False, age="", series=0),
    ]
    node = Node()
    node.add("host_load1", 1)
    screen = show(node, collectors=rows)
    assert screen.lines == ["collector gpu failed: no library", "collector logs hung"]
    table = screen.tables["Collectors"]
    assert table.heads == ["gpu", "host", "logs", "azure", "textfile"]
    assert table.caption == "3 of 5 in use"
    assert [*table.row("gpu").values()] == ["gpu", "failed", "3 s", "10", "7", "no library"]
    assert [*table.row("host").values()] == ["host", "ok", "3 s", "10", "0", "96 CPUs"]
    assert [*table.row("azure").values()] == ["azure", "absent", DASH, DASH, "0", "needs an Azure VM"]


def test_what_ok_means_is_told_under_the_heading_of_the_collectors() -> None:
    told = text_of(show(healthy_node()))
    assert "Collectors ok: it ran. Its devices may still be in trouble, see above. " in told


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("no device", "collector infiniband expected and absent: no device"),
        ("", "collector infiniband expected and absent"),
    ],
)
def test_a_collector_whose_hardware_went_is_wrong_and_stays_among_those_in_use(reason: str, line: str) -> None:
    rows = [
        collector("azure", "absent", enabled=False),
        collector("host"),
        collector("infiniband", "absent", reason=reason, needs="an adapter", age="900 s", series=0),
    ]
    node = Node()
    node.add("host_load1", 1)
    screen = show(node, collectors=rows)
    assert screen.lines == [line]
    assert ("section", "class", "verdict bad") in screen.attributes
    table = screen.tables["Collectors"]
    assert (table.caption, table.heads) == ("2 of 3 in use", ["host", "infiniband", "azure"])
    found = reason or "needs an adapter"
    assert [*table.row("infiniband").values()] == ["infiniband", "absent", "900 s", "0", "0", found]
    assert screen.attributes.count(("tr", "class", "muted")) == 1
    assert screen.attributes.count(("span", "class", "mark bad")) == 3  # of the headline, the line and the row


def aged_node(age_s: float) -> dict[str, Snapshot]:
    """Return a node of which the host is seen now, and the rest was seen then."""
    old, new = Node(NOW - age_s), Node(NOW - 1)
    old.gpu("0")
    old.port("mlx5_ib0")
    new.add("host_load1", 1)
    return {**old.snapshots(), **new.snapshots()}


def test_values_that_are_too_old_are_wrong_and_each_table_tells_its_own_age() -> None:
    rows = [collector("gpu", age="80 s"), collector("host"), collector("infiniband", age="80 s")]
    intervals_s = {"gpu": 5.0, "host": 10.0, "infiniband": 15.0}
    screen = show(aged_node(80), collectors=rows, intervals_s=intervals_s)
    assert screen.lines == ["collector gpu, infiniband brought nothing new for 80 s"]
    assert ("section", "class", "verdict warning") in screen.attributes
    assert screen.tables["GPUs"].caption.endswith("A100-SXM4-40GB values 80 s old")
    assert screen.tables["InfiniBand"].caption == "1 port values 80 s old"
    aged = [text for element, text in screen.texts if element == "span" and text == "80 s"]
    assert len(aged) == 2
    assert "Newest values 07:59:59 UTC, 1 s ago" in text_of(screen)


@pytest.mark.parametrize(
    ("age_s", "intervals_s", "old"),
    [
        (29, {"gpu": 5.0, "infiniband": 15.0}, []),
        (31, {"gpu": 5.0, "infiniband": 15.0}, ["gpu"]),
        (59, {"gpu": 15.0, "infiniband": 15.0}, []),
        (61, {"gpu": 3600.0, "infiniband": 15.0}, ["infiniband"]),
        (-600, {"gpu": 5.0, "infiniband": 15.0}, []),
        (9e9, {"host": 10.0, "gone": 5.0}, []),
    ],
)
def test_how_old_is_too_old_depends_on_how_often_a_collector_runs(
    age_s: float, intervals_s: dict[str, float], old: list[str]
) -> None:
    screen = show(aged_node(age_s), intervals_s=intervals_s)
    assert [line.split()[1] for line in screen.lines] == old
    captions = [name for name, table in screen.tables.items() if table.caption.endswith(" old")]
    assert captions == [{"gpu": "GPUs", "infiniband": "InfiniBand"}[name] for name in old]


def test_the_worst_comes_first() -> None:
    node = Node()
    node.gpu("0", row_remap_pending=1)
    screen = show(node, collectors=[collector("gpu"), collector("host", "failed")])
    assert screen.lines == ["collector host failed", "GPU 0 row remap needs a reset"]
    assert screen.verdict == "2 things wrong"
    assert ("section", "class", "verdict bad") in screen.attributes


def test_what_befalls_several_devices_alike_is_one_line() -> None:
    node = Node()
    for index in range(10):
        node.gpu(str(index), up=0)
    screen = show(node)
    assert screen.lines == ["GPU 0, 1, 2, 3, 4, 5, 6, 7 and 2 more down"]
    assert screen.verdict == "10 things wrong"


def test_of_very_many_findings_and_devices_the_first_are_shown() -> None:
    node = Node()
    for index in range(100):
        node.add("gpu_error", 1, **node.gpu(str(index), up=0), reason=f"reason {index}")
        node.port(f"mlx5_{index}")
    screen = show(node)
    assert len(screen.lines) == 13
    assert screen.lines[-1] == "and 88 more"
    assert [len(screen.tables[name].rows) for name in ("GPUs", "InfiniBand")] == [64, 64]
    assert screen.tables["GPUs"].caption == "100 GPUs, the first 64 shown"
    assert screen.tables["InfiniBand"].caption == "100 ports, the first 64 shown"


def test_events_are_the_newest_twenty_newest_first() -> None:
    events = [event(3600 - number, device=f"mlx5_{number}") for number in range(25)]
    table = show(Node(), events=events).tables["Events"]
    assert [row[3] for row in table.rows] == [f"infiniband mlx5_{number}" for number in range(24, 4, -1)]


def test_an_event_tells_when_what_and_where() -> None:
    happened = event(
        734, "gpu_xid", Severity.CRITICAL, component="gpu", device="3",
        labels={"xid": "79", "gpu": "3", "uuid": "GPU-3f", "pci": ""},
    )  # fmt: skip
    (row,) = show(Node(), events=[happened]).tables["Events"].rows
    assert row == ["07:47:46 12 min ago", "critical", "gpu_xid", "gpu 3", "text of the log xid=79"]


def test_an_event_of_another_day_has_its_date() -> None:
    (row,) = show(Node(), events=[event(86400, device="", component="slurm")]).tables["Events"].rows
    assert (row[0], row[3]) == ("01-14 08:00:00 24 h ago", "slurm")


def test_log_text_is_for_trusted_clients_only() -> None:
    events = [event(60, labels={"port": "1"})]
    assert "text of the log" in show(Node(), events=events).source
    (row,) = show(Node(), events=events, trusted=False).tables["Events"].rows
    assert row[-1] == "port=1"


def hostile_node(text: str) -> Node:
    """Return a node on which every text from outside is this one."""
    node = Node()
    labels = node.gpu(text, up=0, uuid=text)
    node.add("gpu_error", 1, **labels, reason=text)
    node.gpu("1", uuid=f"1{text}")
    one = {"gpu": "1", "uuid": f"1{text}"}
    node.add("gpu_info", 1, gpu="2", uuid="GPU-2", name=text)
    node.add("gpu_recovery_action", 1, **one, action=text)
    node.xid(text, text, "critical", 60, uuid=text)
    node.sxid(text, text, "critical", 60)
    node.add("infiniband_device_info", 1, device=text, port=text, role=text, netdev=text)
    node.add("infiniband_port_state", 1, device=text, port=text, state=text)
    node.port(f"a{text}", up=0, port=text)
    node.add("infiniband_collect_stalled", 1, device=f"b{text}")
    node.add("host_uname_info", 1, release=text)
    node.add("gpu_driver_info", 1, driver_version=text)
    return node


def hostile_screen(text: str) -> Screen:
    rows = [
        collector(text, "failed", reason=text, age=text),
        collector(f"2{text}", "absent", enabled=False, needs=text),
        collector(f"3{text}", found=text),
        collector(f"4{text}", "absent", reason=text),
        starting(f"5{text}"),
    ]
    happened = event(60, text, component=text, device=text, message=text, labels={text: f"{text}-"})
    return show(hostile_node(text), node=text, version=text, size=text, collectors=rows, events=[happened])


def test_nothing_from_outside_becomes_markup() -> None:
    hostile = hostile_screen(HOSTILE)
    harmless = hostile_screen("harmless")
    assert hostile.elements == harmless.elements
    assert "<script" not in hostile.source
    assert len(re.findall("&lt;script&gt;alert", hostile.source)) == len(re.findall("harmless", harmless.source))
    assert {character for character in hostile.source if not character.isprintable()} == {"\n"}


def test_text_that_is_no_text_and_text_without_end_are_cut_down() -> None:
    assert len(hostile_screen("\udc80" * 100_000).source) < 60_000
    assert len(hostile_screen("&" * 100_000).source) < 90_000  # each takes five bytes


def test_the_page_of_a_large_node_is_small() -> None:
    node = healthy_node()
    events = [event(60 * number, message="x" * 120, labels={"port": "1", "cause": "admin"}) for number in range(20)]
    assert len(show(node, events=events).source) < 60_000


def test_the_page_needs_nothing_but_itself() -> None:
    screen = show(healthy_node())
    assert not {"script", "link", "img", "iframe", "object"} & {name for name, _ in screen.elements}
    assert [value for _, name, value in screen.attributes if name in ("href", "src")] == [
        "/metrics",
        "/api/v1/status",
        "/api/v1/events",
    ]
    assert not re.search(r"url\(|@import", screen.source)
    assert not [name for _, name, _ in screen.attributes if name.startswith("on") or name == "style"]


def test_the_policy_lets_this_style_in_and_nothing_else() -> None:
    policy = dict(HEADERS)["Content-Security-Policy"]
    (style,) = [text for element, text in show(Node()).texts if element == "style"]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "unsafe" not in policy


def test_a_phone_and_a_screen_reader_get_what_they_need() -> None:
    screen = show(healthy_node(), events=[event(60)])
    assert ("html", "lang", "en") in screen.attributes
    assert ("meta", "content", "width=device-width, initial-scale=1") in screen.attributes
    assert ("meta", "content", "light dark") in screen.attributes
    assert ("meta", "http-equiv", "refresh") in screen.attributes
    names = [name for name, _ in screen.elements]
    assert (names.count("main"), names.count("h1"), names.count("h2")) == (1, 1, 5)
    assert names.count("table") == names.count("caption") == 4
    hidden = [value for name, _, value in screen.attributes if _ == "aria-hidden"]
    assert len(hidden) == len(screen.bars) == 24  # a bar is for the eye, its text stands beside it


def colours(style: str) -> list[dict[str, str]]:
    return [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{[^}]*", style)]


def luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_and_bars_have_contrast_in_light_and_dark() -> None:
    schemes = colours(show(Node()).source)
    assert len(schemes) == 2
    for scheme in schemes:
        for ground in ("ground", "sheet"):
            texts = ("text", "quiet", "ok", "warning", "bad")
            assert [name for name in texts if contrast(scheme[name], scheme[ground]) < 4.5] == []
        assert contrast(scheme["bar"], scheme["track"]) >= 3


def test_a_series_under_a_declared_name_counts_only_from_its_collector() -> None:
    node = Node()
    node.add("gpu_up", 0, by="textfile", gpu="0", uuid="GPU-0")
    node.port("mlx5_ib0")
    owners = {"gpu_up": "gpu", "infiniband_port_up": "infiniband"}
    screen = show(node, owners=owners)
    assert screen.verdict == FINE
    assert list(screen.tables) == ["InfiniBand", "Collectors"]


def test_traffic_comes_from_the_ports_collector_only() -> None:
    names = [f"node_infiniband_port_data_{way}_bytes_total" for way in ("received", "transmitted")]
    first: dict[str, Snapshot] = {}
    second: dict[str, Snapshot] = {}
    for seconds, snapshots in ((0, first), (10, second)):
        node = Node(NOW + seconds)
        node.port("mlx5_ib0", received=12.5e9 * seconds)
        node.add(names[0], 1e12 * seconds, by="textfile", device="mlx5_ib0", port="1")
        snapshots.update(node.snapshots())
    for owner, shown in (("infiniband", "100 Gb/s"), ("another", DASH)):
        screen = show(second, ports_before=first["infiniband"], owners=dict.fromkeys(names, owner))
        assert screen.tables["InfiniBand"].row("mlx5_ib0")["Receiving"] == shown


def test_the_values_are_as_old_as_the_newest_that_a_collector_brought() -> None:
    node = Node(NOW - 90)
    node.add("host_load1", 1)
    newer = Node(NOW - 30)
    newer.gpu("0")
    own = Node(NOW)
    own.add("hpcwatch_build_info", 1)
    rows = [collector("gpu"), collector("host")]
    told = text_of(show({**node.snapshots(), **newer.snapshots(), **own.snapshots()}, collectors=rows))
    assert "Newest values 07:59:30 UTC, 30 s ago" in told


NAMES = sorted({series.metric.name for snapshot in healthy_node().snapshots().values() for series in snapshot.series})
NAMES += [
    "gpu_error", "gpu_xid_errors_total", "gpu_xid_last_timestamp_seconds", "gpu_clock_event_active", "gpu_count",
    "gpu_recovery_action", "gpu_ecc_errors_all_total", "gpu_nvlink_links", "gpu_nvlink_active_links",
    "gpu_pcie_link_width", "gpu_pcie_link_max_width", "infiniband_collect_stalled", "infiniband_counter_saturated",
    "nvswitch_sxid_errors_total", "nvswitch_sxid_last_timestamp_seconds",
    "infiniband_port_restricted", "infiniband_link_rate_expected_bytes_per_second",
]  # fmt: skip
LABELS = (
    "gpu", "uuid", "device", "port", "state", "status", "reason", "sensor", "scope", "kind", "xid", "severity", "type",
    "lifetime", "action", "name", "role", "source", "switch", "sxid",
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from([0, 1, -1, 10**400, float("nan"), float("inf"), -1e300, 1e300, 5e-324, 2**64]),
    st.integers(-(2**70), 2**70),
    st.floats(),
)
WORDS = st.sampled_from(
    [
        "",
        "0",
        "1",
        "10",
        "gpu",
        "enforced",
        "uncorrected",
        "volatile",
        "critical",
        "79",
        "up",
        "fabric",
        "\u00b2",
        HOSTILE,
    ]
)
POINTS = st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(LABELS), WORDS, max_size=5), VALUES)


@given(st.lists(POINTS, max_size=40), st.floats(allow_nan=False, allow_infinity=False))
def test_whatever_the_snapshots_hold_there_is_a_page(
    points: list[tuple[str, dict[str, str], Value]], taken_at: float
) -> None:
    series = [
        Series(Metric(name, Kind.COUNTER if name.endswith("_total") else Kind.GAUGE, "x"), tuple(labels.items()))
        for name, labels, _ in points
    ]
    latest = Snapshot("infiniband", taken_at, series, [value for _, _, value in points])
    for values in ([1] * len(series), latest.values[::-1]):
        before = Snapshot("infiniband", taken_at - 10, series, values)
        assert "nan" not in text_of(show({"infiniband": latest}, ports_before=before, events=[event(0)]))


@pytest.mark.parametrize("wall_s", [-1e300, 0, 1e300])
def test_a_clock_beyond_all_calendars_costs_the_times_only(wall_s: float) -> None:
    screen = show(healthy_node(), wall_s=wall_s, events=[event(0)])
    assert screen.tables["GPUs"].row("0")["Utilisation"] == "97 %"


def test_the_page_is_text_that_can_be_sent() -> None:
    body = render(facts(Node(), node="node\udc80"))
    assert "node?" in body.decode("utf-8")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(None), DASH),
        (number(1234567), "1,234,567"),
        (number(1e300, " W"), "1e+300 W"),
        (percent(None), DASH),
        (percent(0.0), "0 %"),
        (percent(0.974), "97 %"),
        (memory(None), DASH),
        (memory(0), "0 B"),
        (memory(1023), "1,023 B"),
        (memory(1536), "1.5 KiB"),
        (memory(39.5 * GIB), "39.5 GiB"),
        (memory_of(None, 4 * GIB), DASH),
        (memory_of(0.4 * GIB, 40 * GIB), "0.4 / 40.0 GiB"),
        (memory_of(512 * 2**20, 1.5 * 2**40), "0.0 / 1.5 TiB"),
        (bit_rate(None), DASH),
        (bit_rate(0), "0 b/s"),
        (bit_rate(25e9), "200 Gb/s"),
        (bit_rate(1.25e8), "1 Gb/s"),
        (bit_rate(9.2e9), "73.6 Gb/s"),
        (rate_of(12.5e9, 25e9), "100 of 200 Gb/s"),
        (rate_of(1e7, 25e9), "80 Mb/s of 200 Gb/s"),
        (span(-5), "0 s"),
        (span(119), "119 s"),
        (span(120), "2 min"),
        (span(2 * 3600), "2 h"),
        (span(3 * 86400), "3 d"),
        (clock(NOW, NOW), "08:00:00"),
        (clock(NOW - 400 * 86400, NOW), "2025-12-11 08:00"),
    ],
)
def test_quantities_are_written_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected
