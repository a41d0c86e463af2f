"""Claims about the values of the gpu collector: right or absent, for a GPU that answers and for one that does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from agent.api import Series
from agent.hw.nvml.session import Session
from collectors.gpu.board import Board
from tests.collectors.gpunode import GpuNode, by_gpu, labels_of, names_of, select, untouched_binding, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agent.api import Value
    from agent.sim.harness import Result

LOST, RESET_REQUIRED, UNKNOWN, NO_PERMISSION, TIMEOUT, NOT_SUPPORTED = 15, 16, 999, 4, 10, 3
ALL_LINKS = 4294967295
MIB = 1 << 20
MINUTE_S = 60.0
LOOK_UPS = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetUUID")
DOWN = {"gpu_up", "gpu_error"}
ECC = {"type": "uncorrected", "lifetime": "volatile"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GpuNode]:
    with untouched_binding():
        made = GpuNode(tmp_path, gpus=2)
        made.install()
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Count the calls of a function of the binding: the list grows by one with each."""

    def watch(function: str) -> list[int]:
        calls: list[int] = []
        called = getattr(pynvml, function)

        def counting(*arguments: Any) -> Any:
            calls.append(1)
            return called(*arguments)

        monkeypatch.setattr(pynvml, function, counting)
        return calls

    return watch


def refuse_all(node: GpuNode, code: int | None) -> None:
    """Have every call to GPU 0 fail but those that find it."""
    node.change({f"gpu.0.return.{name}": None if code is None else 0 for name in LOOK_UPS} | {"gpu.0.return.*": code})


def reasons(result: Result) -> dict[str, str]:
    return {labels_of(series)["gpu"]: labels_of(series)["reason"] for series in select(result, "gpu_error")}


def invalid(result: Result, gpu: str = "0") -> dict[str, Value]:
    """Return how many answers of the GPU were dropped, by metric, of those that were any."""
    counts = select(result, "gpu_invalid_samples_total", gpu=gpu)
    return {labels_of(series)["metric"]: count for series, count in counts.items() if count}


def remapped(result: Result) -> dict[str, Value | None]:
    return {
        "correctable": value(result, "gpu_remapped_rows_total", gpu="0", cause="correctable"),
        "uncorrectable": value(result, "gpu_remapped_rows_total", gpu="0", cause="uncorrectable"),
        "pending": value(result, "gpu_row_remap_pending", gpu="0"),
        "failure": value(result, "gpu_row_remap_failure", gpu="0"),
    }


def clock_events(result: Result) -> dict[str, Value]:
    return {labels_of(s)["reason"]: v for s, v in select(result, "gpu_clock_event_active", gpu="0").items()}


def steady(node: GpuNode, *, cycles: int = 1) -> Any:
    """Return a probe after its first cycles."""
    probe = node.probe()
    for _ in range(cycles):
        node.tick(probe)
    return probe


# Whether it answers


@pytest.mark.parametrize("missing", ["temperature", "utilization", "memory"])
@pytest.mark.parametrize("code", [UNKNOWN, TIMEOUT, NO_PERMISSION])
def test_what_a_gpu_never_had_is_no_sign_of_life_once_it_is_dead(node: GpuNode, missing: str, code: int) -> None:
    node.change({f"gpu.0.{missing}": None})
    probe = node.probe()
    assert by_gpu(probe.collect(), "gpu_up") == {"0": 1, "1": 1}
    refuse_all(node, code)
    result = node.tick(probe)
    assert by_gpu(result, "gpu_up") == {"0": 0, "1": 1}
    assert names_of(result, "0") == DOWN
    assert [(event.kind, event.device) for event in result.events] == [("gpu_lost", "0")]


@pytest.mark.parametrize("code", [2, 3, 7, 13, 19, 23, 25, 27, 29, NO_PERMISSION])
def test_a_gpu_that_refuses_everything_does_not_answer(node: GpuNode, code: int) -> None:
    probe = steady(node)
    refuse_all(node, code)
    result = node.tick(probe)
    assert by_gpu(result, "gpu_up") == {"0": 0, "1": 1}
    assert reasons(result) == {"0": "no_permission" if code == NO_PERMISSION else "unknown"}
    assert names_of(result, "0") == DOWN
    refuse_all(node, None)
    result = node.tick(probe, MINUTE_S)
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 1}
    assert names_of(result, "0") == names_of(result, "1")


def test_the_reason_is_what_the_first_call_answered_that_the_gpu_has(node: GpuNode) -> None:
    node.change({"gpu.0.temperature": None})
    node.change({"gpu.0.return.nvmlDeviceGetUtilizationRates": TIMEOUT})
    node.change({f"gpu.0.return.nvmlDeviceGetMemoryInfo{version}": NO_PERMISSION for version in ("", "_v2")})
    assert reasons(node.probe().collect()) == {"0": "timeout"}


def test_memory_alone_is_a_sign_of_life(node: GpuNode) -> None:
    node.change({f"gpu.0.return.nvmlDeviceGet{name}": UNKNOWN for name in ("Temperature", "UtilizationRates")})
    node.change({"gpu.1.temperature": None, "gpu.1.utilization": None})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 1}
    assert sorted(what.rpartition(" ")[2] for what, _ in result.failures) == ["temperature", "utilization"]


# Two tiers


def test_the_slow_tier_and_what_was_refused_are_due_half_a_cycle_early(node: GpuNode) -> None:
    node.change({"gpu.0.clock_mhz.video": None})
    probe = steady(node)
    node.change({"gpu.0.field.4": "ull:7", "gpu.0.clock_mhz.video": 1000})
    result = node.tick(probe, MINUTE_S - 3)
    assert value(result, "gpu_ecc_errors_all_total", gpu="0", **ECC) == 0
    assert value(result, "gpu_clock_hertz", gpu="0", domain="video") is None
    result = node.tick(probe, 1)
    assert value(result, "gpu_ecc_errors_all_total", gpu="0", **ECC) == 7
    assert value(result, "gpu_clock_hertz", gpu="0", domain="video") == 1_000_000_000


@pytest.mark.parametrize("code", [LOST, RESET_REQUIRED, UNKNOWN, NO_PERMISSION])
def test_a_gpu_that_answers_again_shows_nothing_from_before(node: GpuNode, code: int) -> None:
    node.change({"gpu.0.field.4": "ull:7", "gpu.0.mig_mode": None, "gpu.0.serial": None})
    probe = steady(node)
    refuse_all(node, code)
    node.tick(probe)
    refuse_all(node, None)
    node.change({"gpu.0.field.4": "ull:0", "gpu.0.serial": "new", "gpu.0.clock_max_mhz.sm": None})
    result = next(result for _ in range(13) if by_gpu(result := node.tick(probe), "gpu_up")["0"])
    assert value(result, "gpu_ecc_errors_all_total", gpu="0", **ECC) == 0
    assert value(result, "gpu_info", gpu="0", serial="new") == 1
    assert set(by_gpu(result, "gpu_clock_max_hertz", domain="sm")) == {"1"}


def test_a_recovery_action_has_the_errors_behind_it_read_at_once(node: GpuNode) -> None:
    node.change({"gpu.0.field.82": None, "gpu.0.ecc_mode": None})
    probe = steady(node, cycles=2)
    node.change({"gpu.0.field.4": "ull:1", "gpu.1.field.4": "ull:1", "gpu.0.field.230": "ui:4"})
    node.change({"gpu.0.field.82": "ui:50", "gpu.0.ecc_mode": "1 1"})
    result = node.tick(probe)
    assert by_gpu(result, "gpu_ecc_errors_all_total", **ECC) == {"0": 1, "1": 0}
    assert set(by_gpu(result, "gpu_ecc_mode_enabled", state="current")) == {"0", "1"}
    node.change({"gpu.0.field.4": "ull:2"})
    result = node.tick(probe)
    assert set(by_gpu(result, "gpu_temperature_celsius", sensor="memory")) == {"0", "1"}
    assert by_gpu(result, "gpu_ecc_errors_all_total", **ECC) == {"0": 1, "1": 0}
    node.change({"gpu.0.field.230": "ui:0"})
    assert by_gpu(node.tick(probe), "gpu_ecc_errors_all_total", **ECC) == {"0": 2, "1": 0}


def test_garbage_is_no_change_of_the_recovery_action(node: GpuNode, asked: Callable[[str], list[int]]) -> None:
    probe = steady(node)
    slow_reads = asked("nvmlDeviceGetEccMode")
    for answer in ("ui:4294967295", "ui:0", "ret:999", "ui:0"):
        node.change({"gpu.0.field.230": answer})
        node.tick(probe)
    assert slow_reads == []


def test_a_call_of_the_slow_tier_that_failed_is_told_once_for_each_time_it_was_made(
    node: GpuNode, asked: Callable[[str], list[int]]
) -> None:
    node.change({"gpu.0.return.nvmlDeviceGetEccMode": UNKNOWN, "gpu.1.ecc_mode": None})
    calls = asked("nvmlDeviceGetEccMode")
    probe = node.probe()
    told = [what for _ in range(24) for what, _ in node.tick(probe).failures]
    assert len(told) == 2
    assert all(what.endswith("ECC mode") for what in told)
    assert len(calls) == 2 + 2  # of GPU 0, and of GPU 1, which is asked again after a minute


# What a GPU does not have


def test_what_was_refused_is_asked_again_after_1_5_and_15_minutes_and_then_every_hour(
    node: GpuNode, asked: Callable[[str], list[int]]
) -> None:
    node.change({"gpu.0.clock_mhz.video": None, "gpu.1.clock_mhz.video": None})
    node.change({f"gpu.{gpu}.{key}": None for gpu in (0, 1) for key in ("mig_mode", "ecc_mode")})
    fast, slow = asked("nvmlDeviceGetClockInfo"), asked("nvmlDeviceGetEccMode")
    probe = node.probe()
    fast_at, slow_at = [], []
    for minute in range(3 * 60):
        before = len(fast), len(slow)
        node.tick(probe, MINUTE_S)
        if len(fast) - before[0] == 8:
            fast_at.append(minute)
        if len(slow) > before[1]:
            slow_at.append(minute)
    assert fast_at == slow_at == [0, 1, 6, 21, 81, 141]


def test_one_refusal_costs_a_minute(node: GpuNode) -> None:
    probe = steady(node)
    for _ in range(3):  # each time: what answered in between is not held against it
        for change in ("ret:3", "ull:5"):
            node.change({f"gpu.0.field.138.{ALL_LINKS}": change})
            node.tick(probe)
        missing = 1
        while value(node.tick(probe), "gpu_nvlink_bytes_total", gpu="0", direction="tx", kind="data") is None:
            missing += 1
        assert missing == 11


def test_a_clock_that_was_refused_once_is_not_held_against_it_either(node: GpuNode) -> None:
    probe = steady(node)
    for _ in range(3):
        for change in (None, 1000):
            node.change({"gpu.0.clock_mhz.sm": change})
            node.tick(probe)
        missing = 1
        while value(node.tick(probe), "gpu_clock_hertz", gpu="0", domain="sm") is None:
            missing += 1
        assert missing == 11


def test_what_is_refused_after_a_reset_as_before_is_asked_again_after_a_minute(node: GpuNode) -> None:
    node.change({"gpu.0.clock_mhz.video": None, "gpu.0.mig_mode": "1 1"})
    probe = node.probe()
    for _ in range(8):
        node.tick(probe, MINUTE_S)
    node.change({"gpu.0.mig_mode": "0 0"})
    node.tick(probe, MINUTE_S)
    node.change({"gpu.0.clock_mhz.video": 1000})
    assert value(node.tick(probe), "gpu_clock_hertz", gpu="0", domain="video") is None
    assert value(node.tick(probe, MINUTE_S), "gpu_clock_hertz", gpu="0", domain="video") == 1_000_000_000


def test_mig_switched_on_or_off_has_everything_asked_anew(node: GpuNode) -> None:
    node.change({"gpu.0.mig_mode": "1 1", "gpu.0.utilization": None, "gpu.0.ecc_mode": None})
    probe = node.probe()
    for _ in range(8):  # by then the next time would be in a quarter of an hour
        node.tick(probe, MINUTE_S)
    node.change({"gpu.0.mig_mode": "0 0", "gpu.0.utilization": "50 10", "gpu.0.ecc_mode": "1 1"})
    result = node.tick(probe, MINUTE_S)
    assert value(result, "gpu_ecc_mode_enabled", gpu="0", state="current") == 1
    assert value(node.tick(probe), "gpu_utilization_ratio", gpu="0") == 0.5


def test_a_pending_mig_mode_changes_nothing(node: GpuNode, asked: Callable[[str], list[int]]) -> None:
    node.change({"gpu.0.clock_mhz.video": None, "gpu.1.clock_mhz.video": None})
    probe = node.probe()
    for _ in range(8):
        node.tick(probe, MINUTE_S)
    node.change({"gpu.0.mig_mode": "0 1"})
    calls = asked("nvmlDeviceGetClockInfo")
    node.tick(probe, MINUTE_S)
    node.tick(probe)
    assert len(calls) == 2 * 2 * 3


def board_of(gpu: int) -> Board:
    nvml = Session(None)
    nvml.open()
    return Board(nvml.gpu(gpu), "", lambda metric, *_: Series(metric, ()), lambda _: None, slow_interval_s=60)


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"field.143": "ret:3", "field.83": None, "field.4": "ret:2", "field.91": None}, []),
        ({"return.nvmlDeviceGetFieldValues": 13}, ["average power", "memory temperature"]),
        ({"remapped_rows": None, "pcie_replays": None, "ecc_total.corrected.volatile": None}, []),
        ({"field.143": "ret:3", "remapped_rows": None}, ["remapped rows"]),
        ({"field.186": None, "power_mw": None}, ["power"]),
        ({f"nvlink.{link}.state": None for link in range(12)}, []),
        ({f"nvlink.{link}.state": None for link in range(12)} | {"field.91": None}, ["NVLinks"]),
        ({"return.nvmlDeviceGetMemoryInfo_v2": 13, "return.nvmlDeviceGetCurrentClocksEventReasons": 13}, []),
        ({"memory": None, "event_reasons": None}, ["clock event reasons", "memory"]),
        ({"serial": None, "mig_mode": None, "persistence_mode": None}, ["MIG mode", "persistence mode", "serial"]),
        ({"ecc_mode": None, "clock_mhz.video": None}, ["ECC mode", "video clock"]),
    ],
)
def test_lacking_is_what_no_call_tells(node: GpuNode, changes: dict[str, Any], lacking: list[str]) -> None:
    node.change({f"gpu.0.field.186.{scope}": "ui:1000" for scope in (1, 2)})
    node.change({f"gpu.0.{key}": answer for key, answer in changes.items()})
    board = board_of(0)
    board.read(0.0, slack_s=0.0)
    ours = [name for name in board.lacking() if not name.startswith(("throttle", "NVLink bytes", "power of", "recov"))]
    assert ours == lacking


@pytest.mark.parametrize("code", [0, NOT_SUPPORTED])
def test_links_are_as_many_as_the_driver_tells_of_else_as_many_as_answer(node: GpuNode, code: int) -> None:
    node.change({"gpu.0.return.nvmlDeviceGetFieldValues": code})
    node.change({"gpu.0.nvlink.3.state": 0, "gpu.1.field.91": "ui:4"})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_nvlink_links") == {"0": 12, "1": 4}
    assert by_gpu(result, "gpu_nvlink_active_links") == {"0": 11, "1": 4}


def test_no_link_is_asked_that_the_driver_does_not_tell_of(node: GpuNode, asked: Callable[[str], list[int]]) -> None:
    node.change({"gpu.1.field.91": "ui:0"})
    calls = asked("nvmlDeviceGetNvLinkState")
    assert by_gpu(node.probe().collect(), "gpu_nvlink_links") == {"0": 12}
    assert len(calls) == 12


@pytest.mark.parametrize("answer", [None, "ui:300", "ui:4294967295", "ret:999"])
def test_a_number_of_links_that_is_not_told_or_cannot_be_true_is_found_by_asking(
    node: GpuNode, answer: str | None
) -> None:
    node.change({"gpu.0.field.91": answer})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_nvlink_links") == {"0": 12, "1": 12}
    assert invalid(result) == ({"gpu_nvlink_links": 1} if answer and answer.startswith("ui") else {})


def test_a_number_of_links_that_is_not_told_any_more_is_not_relied_on(node: GpuNode) -> None:
    node.change({"gpu.0.field.91": "ui:4"})
    probe = steady(node)
    node.change({"gpu.0.field.91": "ret:999"})
    assert by_gpu(node.tick(probe, MINUTE_S), "gpu_nvlink_links") == {"0": 12, "1": 12}


def test_the_end_of_the_links_is_remembered(node: GpuNode, asked: Callable[[str], list[int]]) -> None:
    node.change({f"gpu.{gpu}.field.91": None for gpu in (0, 1)})
    calls = asked("nvmlDeviceGetNvLinkState")
    probe = node.probe()
    by_minute = []
    for _ in range(7):
        node.tick(probe, MINUTE_S)
        by_minute.append(len(calls))
        calls.clear()
    assert by_minute == [26, 26, 24, 24, 24, 24, 26]


@pytest.mark.parametrize("told", [None, "ui:12"])
def test_a_link_that_cannot_be_read_is_not_the_end_of_them(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch, told: str | None
) -> None:
    works = pynvml.nvmlDeviceGetNvLinkState

    def fails(handle: Any, link: int) -> Any:
        if link == 5:
            raise pynvml.NVMLError(UNKNOWN)
        return works(handle, link)

    node.change({"gpu.0.field.91": told, "gpu.1.field.91": "ui:4"})
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", fails)
    result = node.probe().collect()
    assert by_gpu(result, "gpu_nvlink_links") == by_gpu(result, "gpu_nvlink_active_links") == {"1": 4}
    assert [what.rpartition(" ")[2] for what, _ in result.failures] == ["5"]


@pytest.mark.parametrize("link", [0, 5, 11])
def test_a_link_that_is_refused_does_not_make_the_gpu_one_with_fewer(node: GpuNode, link: int) -> None:
    probe = steady(node)
    node.change({f"gpu.0.nvlink.{link}.state": None})
    result = node.tick(probe, MINUTE_S)
    assert set(by_gpu(result, "gpu_nvlink_links")) == set(by_gpu(result, "gpu_nvlink_active_links")) == {"1"}
    node.change({f"gpu.0.nvlink.{link}.state": 1})
    assert by_gpu(node.tick(probe, MINUTE_S), "gpu_nvlink_active_links") == {"0": 12, "1": 12}


@pytest.mark.parametrize(
    ("field", "name"), [(142, "correctable"), (143, "uncorrectable"), (144, "pending"), (145, "failure")]
)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, UNKNOWN])
def test_a_field_of_the_remapped_rows_that_is_refused_alone_is_replaced_alone(
    node: GpuNode, field: int, name: str, code: int
) -> None:
    node.change({f"gpu.0.field.{142 + number}": f"ui:{told}" for number, told in enumerate((5, 6, 0, 0))})
    node.change({f"gpu.0.field.{field}": f"ret:{code}", "gpu.0.remapped_rows": "8 9 1 1"})
    instead = {"correctable": 8, "uncorrectable": 9, "pending": 1, "failure": 1}[name]
    expected: dict[str, Value | None] = {"correctable": 5, "uncorrectable": 6, "pending": 0, "failure": 0}
    expected[name] = instead if code == NOT_SUPPORTED else None
    result = node.probe().collect()
    assert remapped(result) == expected
    assert len(result.failures) == (code == UNKNOWN)


def test_what_could_replace_a_field_is_not_asked_beside_it(node: GpuNode, asked: Callable[[str], list[int]]) -> None:
    functions = ("RemappedRows", "PowerUsage", "TotalEnergyConsumption", "PcieReplayCounter", "TotalEccErrors")
    calls = [asked(f"nvmlDeviceGet{function}") for function in functions]
    node.change({"gpu.0.field.143": "ret:3"})
    node.probe().collect()
    assert [len(made) for made in calls] == [1, 0, 0, 0, 0]


def test_what_replaces_a_field_goes_when_the_field_comes_back(node: GpuNode) -> None:
    node.change({"gpu.0.field.143": "ret:3", "gpu.0.remapped_rows": "8 9 1 1"})
    probe = steady(node)
    node.change({"gpu.0.field.143": "ui:2"})
    assert remapped(node.tick(probe))["uncorrectable"] == 9
    assert remapped(node.tick(probe, MINUTE_S))["uncorrectable"] == 2


# Answers that cannot be true


def test_memory_clocks_of_gddr7_are_believed(node: GpuNode) -> None:
    node.change({"gpu.0.clock_mhz.mem": 14001, "gpu.0.clock_max_mhz.mem": 14001})
    result = node.probe().collect()
    assert value(result, "gpu_clock_hertz", gpu="0", domain="memory") == 14_001_000_000
    assert value(result, "gpu_clock_max_hertz", gpu="0", domain="memory") == 14_001_000_000
    assert invalid(result) == {}


@pytest.mark.parametrize(
    ("changes", "metric", "lost"),
    [
        ({"clock_mhz.sm": 100_001}, "gpu_clock_hertz", 1),
        ({"utilization": "106 45"}, "gpu_utilization_ratio", 1),
        ({"utilization": "97 106"}, "gpu_memory_utilization_ratio", 1),
        ({"memory": "4294967295 0 1 1"}, "gpu_memory_total_bytes", 1),
        ({"memory": f"{40960 * MIB} 0 4294967295 1"}, "gpu_memory_free_bytes", 1),
        ({"memory": f"{40960 * MIB} 0 1 4294967295"}, "gpu_memory_used_bytes", 1),
        ({"memory": f"{40960 * MIB} 4294967295 1 1"}, "gpu_memory_reserved_bytes", 1),
        ({"field.4": "ui:4294967295"}, "gpu_ecc_errors_all_total", 1),
        ({"field.4": "ull:4294967295"}, "gpu_ecc_errors_all_total", 1),
        ({"field.74": "ui:4294967295"}, "gpu_throttle_seconds_total", 1),
        ({"field.83": "ui:4294967295"}, "gpu_energy_joules_total", 1),
        ({f"field.138.{ALL_LINKS}": "ui:4294967295"}, "gpu_nvlink_bytes_total", 1),
        ({"field.142": "ui:808334905"}, "gpu_remapped_rows_total", 1),
        ({"field.143": "ui:4097"}, "gpu_remapped_rows_total", 1),
        ({"event_reasons": hex(2**32 - 1)}, "gpu_clock_event_active", 9),
        ({"event_reasons_supported": hex(2**32 - 1)}, "gpu_clock_event_active", 0),
        ({"event_reasons_supported": hex(2**64 - 1)}, "gpu_clock_event_active", 0),
    ],
)
def test_an_answer_that_cannot_be_true_is_dropped(
    node: GpuNode, changes: dict[str, object], metric: str, lost: int
) -> None:
    healthy = node.probe().collect()
    node.change({f"gpu.0.{key}": str(answer) for key, answer in changes.items()})
    result = node.probe(run_id="another").collect()
    assert invalid(result) == {metric: 1}
    missing = set(healthy.values) - set(result.values)
    assert len(missing) == lost
    assert missing <= set(select(healthy, metric, gpu="0"))
    assert by_gpu(result, "gpu_up")["0"] == 1


@pytest.mark.parametrize(
    ("changes", "metric", "expected"),
    [
        ({"utilization": "101 45"}, "gpu_utilization_ratio", 1.0),
        ({"utilization": "97 105"}, "gpu_memory_utilization_ratio", 1.0),
        ({"field.83": "ull:4294967294"}, "gpu_energy_joules_total", 4294967.294),
        ({"clock_mhz.sm": 100_000}, "gpu_clock_hertz", 100e9),
    ],
)
def test_what_is_barely_possible_is_believed(
    node: GpuNode, changes: dict[str, object], metric: str, expected: float
) -> None:
    node.change({f"gpu.0.{key}": str(answer) for key, answer in changes.items()})
    result = node.probe().collect()
    assert expected in select(result, metric, gpu="0").values()
    assert invalid(result) == {}


def test_another_memory_size_is_believed_when_it_is_told_twice_in_a_row(node: GpuNode) -> None:
    probe = steady(node)
    shown = []
    for total in (40960, 770, 40960, 770, 770, 770):
        node.change({"gpu.0.memory": f"{total * MIB} 0 {MIB} {MIB}"})
        result = node.tick(probe)
        assert value(result, "gpu_memory_used_bytes", gpu="0") == MIB
        shown.append(value(result, "gpu_memory_total_bytes", gpu="0"))
    assert shown == [40960 * MIB, None, 40960 * MIB, None, 770 * MIB, 770 * MIB]
    assert invalid(result) == {"gpu_memory_total_bytes": 2}


def test_garbage_in_the_memory_size_does_not_make_the_next_true_values_untrue(node: GpuNode) -> None:
    probe = steady(node)
    node.change({"gpu.0.memory": "808334905 808334905 808334905 808334905"})
    node.tick(probe)
    node.change({"gpu.0.memory": f"{40960 * MIB} {634 * MIB} {MIB} {30000 * MIB}"})
    result = node.tick(probe)
    assert value(result, "gpu_memory_total_bytes", gpu="0") == 40960 * MIB
    assert value(result, "gpu_memory_used_bytes", gpu="0") == 30000 * MIB


def test_garbage_changes_no_name_of_a_gpu_and_unknown_names_are_no_garbage(node: GpuNode) -> None:
    probe = steady(node)
    before = select(probe.collect(), "gpu_info", gpu="0")
    numbers = ("MinorNumber", "Brand", "Architecture", "CudaComputeCapability")
    node.change({f"gpu.0.garbage.nvmlDeviceGet{name}": 1 for name in (*numbers, "Serial")})
    result = node.tick(probe, MINUTE_S)
    assert select(result, "gpu_info", gpu="0") == before
    assert invalid(result) == {"gpu_info": 3}  # all bits set is how NVML says that the architecture is not known
    node.change({"gpu.1.brand": 99, "gpu.1.architecture": 99, "gpu.1.minor": 1048576})
    result = node.probe(run_id="another").collect()
    assert value(result, "gpu_info", gpu="1", brand="", architecture="", minor="") == 1
    assert invalid(result, "1") == {"gpu_info": 1}


def test_garbage_in_the_mask_of_reasons_leaves_no_reasons_behind(node: GpuNode) -> None:
    probe = steady(node)
    node.change({"gpu.0.event_reasons": hex(2**32 - 1), "gpu.0.event_reasons_supported": hex(2**32 - 1)})
    assert clock_events(node.tick(probe, MINUTE_S)) == {}
    node.change({"gpu.0.event_reasons": "0x4", "gpu.0.event_reasons_supported": "0x1ff"})
    assert len(clock_events(node.tick(probe, MINUTE_S))) == 9


def test_a_reason_that_holds_is_shown_though_the_gpu_did_not_say_that_it_can_have_it(node: GpuNode) -> None:
    node.change({"gpu.0.event_reasons_supported": "0x7", "gpu.0.event_reasons": "0x48"})
    probe = node.probe()
    shown = {"gpu_idle": 0, "applications_clocks": 0, "sw_power_cap": 0, "hw_slowdown": 1, "hw_thermal": 1}
    assert clock_events(probe.collect()) == shown
    node.change({"gpu.0.event_reasons": hex(0x4 | 1 << 12)})
    over = shown | {"sw_power_cap": 1, "hw_slowdown": 0, "hw_thermal": 0}
    assert clock_events(node.tick(probe)) == over | {"bit_12": 1}
    node.change({"gpu.0.event_reasons": "0x4"})
    assert clock_events(node.tick(probe, MINUTE_S)) == over | {"bit_12": 0}


def test_all_known_reasons_are_shown_where_the_gpu_does_not_say_which_it_can_have(node: GpuNode) -> None:
    node.change({"gpu.0.event_reasons_supported": None, "gpu.0.event_reasons": hex(1 << 9)})
    shown = clock_events(node.probe().collect())
    assert len(shown) == 10
    assert {reason for reason, active in shown.items() if active} == {"bit_9"}


# The binding


@pytest.mark.parametrize("answer", [None, "hot", TypeError("no"), ZeroDivisionError()])
def test_whatever_the_binding_makes_of_a_call_costs_that_value_alone(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    def broken(*_: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    healthy = node.probe().collect()
    for function in ("nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEccMode"):
        monkeypatch.setattr(pynvml, function, broken)
    result = node.probe(run_id="another").collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 1}
    gone = {series.partition("{")[0] for series in set(healthy.values) - set(result.values)}
    of_both = {"gpu_utilization_ratio", "gpu_memory_utilization_ratio"}
    assert gone == of_both | {"gpu_temperature_celsius", "gpu_ecc_mode_enabled"}
    assert len(result.failures) == 2 * 3


# The first sample


def utilization(result: Result) -> list[Value | None]:
    return [value(result, name, gpu="0") for name in ("gpu_utilization_ratio", "gpu_memory_utilization_ratio")]


def test_the_first_utilisation_of_a_gpu_that_had_to_be_started_is_left_out(node: GpuNode) -> None:
    node.change({"gpu.0.persistence_mode": 0})
    probe = node.probe()
    result = probe.collect()
    assert utilization(result) == [None, None]
    assert value(result, "gpu_utilization_ratio", gpu="1") == 0.97
    assert len(names_of(result, "0")) == len(names_of(result, "1")) - 2
    assert invalid(result) == {}
    assert utilization(node.tick(probe)) == [0.97, 0.45]
    refuse_all(node, RESET_REQUIRED)
    node.tick(probe)
    refuse_all(node, None)
    result = next(result for _ in range(13) if by_gpu(result := node.tick(probe), "gpu_up")["0"])
    assert utilization(result) == [None, None]
    assert utilization(node.tick(probe)) == [0.97, 0.45]


@pytest.mark.parametrize(("mode", "persistent"), [(1, True), (0, False), (None, None), (4294967295, None)])
def test_a_board_tells_whether_the_gpu_is_kept_initialised(node: GpuNode, mode: int | None, persistent: object) -> None:
    node.change({"gpu.0.persistence_mode": mode})
    board = board_of(0)
    assert board.persistent is None
    board.read(0.0, slack_s=0.0)
    assert board.persistent is persistent


def test_the_first_utilisation_is_shown_where_the_persistence_mode_is_not_known(node: GpuNode) -> None:
    node.change({"gpu.0.persistence_mode": None})
    assert utilization(node.probe().collect()) == [0.97, 0.45]
