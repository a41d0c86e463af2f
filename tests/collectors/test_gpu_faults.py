"""Claims about the gpu collector when something is wrong: one GPU costs itself, one call costs its own values."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from agent.api import NotPresent, Outdated, Severity, VmSize
from collectors.gpu import metrics
from tests.collectors.gpunode import NO_LIBRARY, GpuNode, by_gpu, labels_of, names_of, select, untouched_binding, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agent.sim.harness import Probe, Result

LOST, RESET_REQUIRED, UNKNOWN, NO_PERMISSION, TIMEOUT, NOT_FOUND = 15, 16, 999, 4, 10, 6
BY_INDEX, BY_ADDRESS = "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByPciBusId_v2"
ALL_BUT_2 = {"0": 1, "1": 1, "2": 0, "3": 1}
VERSION_FILE = "driver/nvidia/version"
METRICS_OF_A_GPU = sum("uuid" in metric.labels for metric in metrics.METRICS) - 1  # gpu_error is for others


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GpuNode]:
    with untouched_binding():
        made = GpuNode(tmp_path, gpus=4)
        made.install()
        yield made


def reasons(result: Result) -> dict[str, str]:
    return {labels_of(s)["gpu"]: labels_of(s)["reason"] for s, v in select(result, "gpu_error").items() if v == 1}


def refuse(node: GpuNode, gpu: int, code: int | None) -> None:
    """Have NVML refuse the handle of a GPU, however it is looked up; None: no more."""
    node.change({f"gpu.{gpu}.return.{name}": code for name in (BY_INDEX, BY_ADDRESS)})


def avoiding(node: GpuNode, gpu: int, deed: str = "hang") -> dict[str, str]:
    """Return what a process is told of a GPU that one before it ended on."""
    return {f"GPU {node.address(gpu)}": deed}


def kinds(result: Result) -> list[tuple[str, str]]:
    return [(event.kind, event.device) for event in result.events]


def assert_only_gpu_2_is_down(node: GpuNode, result: Result, reason: str) -> None:
    assert by_gpu(result, "gpu_up") == ALL_BUT_2
    assert reasons(result) == {"2": reason}
    assert value(result, "gpu_up", gpu="2", uuid=node.uuid(2)) == 0
    assert names_of(result, "2") == {"gpu_up", "gpu_error"}
    for gpu in ("0", "1", "3"):
        assert len(names_of(result, gpu)) == METRICS_OF_A_GPU


# One GPU


@pytest.mark.parametrize(
    ("code", "reason"),
    [(LOST, "gpu_lost"), (RESET_REQUIRED, "reset_required"), (UNKNOWN, "unknown"), (TIMEOUT, "timeout")],
)
def test_a_gpu_whose_calls_fail_costs_only_itself_and_comes_back(node: GpuNode, code: int, reason: str) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.return.*": code})
    result = node.tick(probe)
    assert_only_gpu_2_is_down(node, result, reason)
    assert kinds(result) == [("gpu_lost", "2")]
    assert [what for what, _ in result.failures] == ["GPU 2"]
    assert kinds(node.tick(probe)) == []
    node.change({"gpu.2.return.*": None})
    result = node.tick(probe)
    assert kinds(result) == [("gpu_recovered", "2")]
    assert set(by_gpu(result, "gpu_up").values()) == {1}
    assert reasons(result) == {}
    assert len(names_of(result, "2")) == METRICS_OF_A_GPU


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetClockInfo", "nvmlDeviceGetFieldValues"]
)
def test_one_call_that_says_lost_is_enough(node: GpuNode, function: str) -> None:
    node.change({f"gpu.2.return.{function}": LOST})
    assert_only_gpu_2_is_down(node, node.probe().collect(), "gpu_lost")


def test_a_field_that_says_lost_is_enough(node: GpuNode) -> None:
    node.change({"gpu.2.field.83": f"ret:{LOST}"})
    assert_only_gpu_2_is_down(node, node.probe().collect(), "gpu_lost")


def test_the_events_of_a_loss_say_which_gpu_and_why(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.return.*": LOST})
    (lost,) = node.tick(probe).events
    assert (lost.severity, lost.component) == (Severity.CRITICAL, "gpu")
    assert lost.labels == {"gpu": "2", "uuid": node.uuid(2), "cause": "gpu_lost"}
    node.change({"gpu.2.return.*": None})
    (recovered,) = node.tick(probe).events
    assert (recovered.severity, recovered.component) == (Severity.INFO, "gpu")
    assert recovered.labels == {"gpu": "2", "uuid": node.uuid(2)}


@pytest.mark.parametrize(
    ("code", "reason"),
    [(LOST, "gpu_lost"), (UNKNOWN, "unknown"), (NO_PERMISSION, "no_permission"), (RESET_REQUIRED, "reset_required")],
)
def test_a_gpu_whose_handle_is_refused_from_the_start_has_its_uuid_from_the_kernel_module(
    node: GpuNode, code: int, reason: str
) -> None:
    node.load_module()
    refuse(node, 2, code)
    result = node.probe().collect()
    assert_only_gpu_2_is_down(node, result, reason)
    assert kinds(result) == [("gpu_lost", "2")]
    assert result.devices[2].address == node.address(2)


def test_a_gpu_that_nobody_can_name_is_shown_by_its_index(node: GpuNode) -> None:
    node.change({f"gpu.2.return.{BY_INDEX}": LOST})
    probe = node.probe()
    result = probe.collect()
    assert value(result, "gpu_up", gpu="2", uuid="") == 0
    node.change({f"gpu.2.return.{BY_INDEX}": None})
    result = node.tick(probe, 15)
    assert select(result, "gpu_up", uuid="") == {}
    assert value(result, "gpu_up", gpu="2", uuid=node.uuid(2)) == 1
    assert kinds(result) == [("gpu_recovered", "2")]


def test_a_handle_that_is_refused_later_is_noticed_and_so_is_its_return(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    refuse(node, 2, UNKNOWN)
    assert_only_gpu_2_is_down(node, node.tick(probe, 60), "unknown")
    refuse(node, 2, None)
    assert set(by_gpu(node.tick(probe, 15), "gpu_up").values()) == {1}


def test_a_uuid_that_is_no_text_costs_one_gpu(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.2.garbage.nvmlDeviceGetUUID": 1})
    assert_only_gpu_2_is_down(node, node.probe().collect(), "unknown")


def test_temperature_alone_or_utilisation_alone_is_a_sign_of_life(node: GpuNode) -> None:
    node.change(
        {"gpu.1.return.nvmlDeviceGetTemperature": UNKNOWN, "gpu.2.return.nvmlDeviceGetUtilizationRates": UNKNOWN}
    )
    result = node.probe().collect()
    assert set(by_gpu(result, "gpu_up").values()) == {1}
    assert sorted(what for what, _ in result.failures) == ["GPU 1 temperature", "GPU 2 utilization"]


def test_a_refusal_is_an_answer_too(node: GpuNode) -> None:
    node.change({"gpu.1.temperature": None, "gpu.1.utilization": None})
    node.change({f"gpu.2.return.nvmlDeviceGet{name}": NO_PERMISSION for name in ("Temperature", "UtilizationRates")})
    assert set(by_gpu(node.probe().collect(), "gpu_up").values()) == {1}


def test_a_call_that_fails_is_retried_and_costs_its_own_values(node: GpuNode) -> None:
    node.change({"gpu.2.return.nvmlDeviceGetMemoryInfo_v2": UNKNOWN, "gpu.2.field.83": "ret:27"})
    probe = node.probe()
    result = probe.collect()
    assert len(names_of(result, "2")) == METRICS_OF_A_GPU - 5
    assert value(result, "gpu_up", gpu="2") == 1
    assert sorted(what for what, _ in result.failures) == ["GPU 2 energy", "GPU 2 memory"]
    node.change({"gpu.2.return.nvmlDeviceGetMemoryInfo_v2": None, "gpu.2.field.83": "ull:1000"})
    result = node.tick(probe)
    assert len(names_of(result, "2")) == METRICS_OF_A_GPU
    assert result.failures == []


def test_a_link_that_cannot_be_read_makes_the_number_of_active_ones_unknown(node: GpuNode) -> None:
    node.change({"gpu.2.return.nvmlDeviceGetNvLinkState": UNKNOWN})
    result = node.probe().collect()
    assert set(by_gpu(result, "gpu_nvlink_active_links")) == {"0", "1", "3"}
    assert [what for what, _ in result.failures] == ["GPU 2 NVLink 0"]


def test_identity_that_cannot_be_read_again_stays_as_it_was(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.return.nvmlDeviceGetSerial": UNKNOWN})
    result = node.tick(probe, 60)
    assert value(result, "gpu_info", gpu="2", serial="1560821000002") == 1
    assert [what for what, _ in result.failures] == ["GPU 2 serial"]


# Who is who


def test_an_empty_uuid_or_that_of_another_gpu_costs_one_gpu(node: GpuNode) -> None:
    node.load_module()
    for uuid in ("", " ", node.uuid(1)):
        node.memory.content = {}
        node.change({"gpu.2.uuid": uuid})
        result = node.probe().collect()
        assert_only_gpu_2_is_down(node, result, "unknown")
        assert [device.address for device in result.devices] == [node.address(gpu) for gpu in range(4)]
    node.memory.content = {}
    information = [node.proc / f"driver/nvidia/gpus/{node.address(gpu)}/information" for gpu in (1, 2)]
    information[1].write_text(information[0].read_text())
    result = node.probe().collect()
    assert value(result, "gpu_up", gpu="2", uuid="") == 0
    assert [device.address for device in result.devices] == [node.address(gpu) for gpu in range(4)]


def test_gpus_that_nothing_tells_apart_are_shown_by_their_indices(node: GpuNode) -> None:
    node.change({f"gpu.{gpu}.uuid": "" for gpu in range(4)})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 0)
    assert {labels_of(s)["uuid"] for s in select(result, "gpu_up")} == {""}
    node.memory.content = {}
    node.change({f"gpu.{gpu}.uuid": "GPU-same" for gpu in range(4)})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 0, "2": 0, "3": 0}


def test_a_gpu_that_answers_with_the_uuid_of_another_takes_nothing_from_it(node: GpuNode) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    node.change({"gpu.1.uuid": node.uuid(3)})
    result = node.tick(probe, 60)
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 0, "2": 1, "3": 1}
    assert [device.address for device in result.devices] == [node.address(gpu) for gpu in range(4)]


def test_a_gpu_without_a_name_takes_none_of_another_that_is_missing(node: GpuNode) -> None:
    node.load_module()
    forget_uuid(node, 1)
    refuse(node, 1, LOST)
    node.change({"gpu.2.absent": 1})
    result = node.probe().collect()
    assert value(result, "gpu_up", gpu="1", uuid="") == 0
    assert value(result, "gpu_up", gpu="", uuid=node.uuid(2)) == 0
    addresses = {(device.name, device.uuid): device.address for device in result.devices}
    assert addresses["1", ""] == node.address(1)
    assert addresses["", node.uuid(2)] == node.address(2)


def test_gpus_without_uuid_that_nvml_does_not_list_are_counted_and_not_shown(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.3.absent": 1, "gpu.count": 3})
    for gpu in (1, 2):
        forget_uuid(node, gpu)
        node.change({f"gpu.{gpu}.absent": 1})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "": 0}
    assert [what for what, _ in result.failures] == [f"GPU {node.uuid(3)}"]
    assert value(result, "gpu_expected_count") == 4


def test_where_nvml_has_another_order_than_pci_a_refused_gpu_gets_no_label_of_another(node: GpuNode) -> None:
    node.load_module()
    node.change({f"gpu.{gpu}.pci": node.address(3 - gpu) for gpu in range(4)})
    for gpu in range(4):
        node.change({f"gpu.{gpu}.uuid": node.uuid(3 - gpu)})
    refuse(node, 1, UNKNOWN)
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "": 0, "2": 1, "3": 1}
    assert value(result, "gpu_up", gpu="", uuid=node.uuid(2)) == 0
    node.memory.content = {}
    forget_uuid(node, 2)
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "2": 1, "3": 1}
    assert [what for what, _ in result.failures] == [f"GPU {node.address(2)}"]


def test_a_gpu_that_tells_no_index_has_the_one_that_its_address_leaves(node: GpuNode) -> None:
    node.load_module()
    for fault in ("garbage", "return"):
        node.memory.content = {}
        node.change(
            {"gpu.2.garbage.nvmlDeviceGetIndex": None, f"gpu.2.{fault}.nvmlDeviceGetIndex": 1 + (fault == "return")}
        )
        assert by_gpu(node.probe().collect(), "gpu_up") == dict.fromkeys("0123", 1)


@pytest.mark.parametrize("code", [2, 6, 13])
def test_a_gpu_with_a_handle_and_no_uuid_is_listed_whatever_the_code(node: GpuNode, code: int) -> None:
    node.load_module()
    node.change({"gpu.2.return.nvmlDeviceGetUUID": code})
    assert_only_gpu_2_is_down(node, node.probe().collect(), "unknown")


def test_an_index_that_nvml_refuses_is_not_shown_beside_the_gpu_that_it_may_be(node: GpuNode) -> None:
    node.load_module()
    node.change({f"gpu.2.return.{BY_ADDRESS}": NOT_FOUND, f"gpu.2.return.{BY_INDEX}": LOST})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 1, "3": 1, "": 0}
    assert value(result, "gpu_up", gpu="", uuid=node.uuid(2)) == 0
    assert "GPU 2" in [what for what, _ in result.failures]


def test_a_gpu_that_is_refused_at_its_new_address_is_one_when_it_answers_again(node: GpuNode) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    gpus = node.proc / "driver/nvidia/gpus"
    (gpus / node.address(1)).rename(gpus / "0009:00:00.0")
    (gpus / "0009:00:00.0/information").unlink()
    node.change({"gpu.1.pci": "0009:00:00.0"})
    refuse(node, 1, UNKNOWN)
    assert value(node.tick(probe, 60), "gpu_up", uuid=node.uuid(1)) == 0
    refuse(node, 1, None)
    result = node.tick(probe, 15)
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    assert result.failures == []


def test_a_gpu_to_be_left_alone_is_so_though_nobody_tells_its_address(node: GpuNode) -> None:
    node.change({f"gpu.{gpu}.return.nvmlDeviceGetPciInfo_v3": 3 for gpu in range(4)})
    node.probe().collect()
    fatal_if_touched(node, 2)
    assert_only_gpu_2_is_down(node, node.probe(avoid={f"GPU {node.uuid(2)}": "hang"}).collect(), "timeout")


def test_contact_with_a_gpu_to_be_left_alone_would_be_noticed(node: GpuNode) -> None:
    fatal_if_touched(node, 2)
    with pytest.raises(Outdated):
        node.probe().collect()


def forget_uuid(node: GpuNode, gpu: int) -> None:
    """Have the kernel module not know the UUID of a GPU, as before its first use."""
    information = node.proc / f"driver/nvidia/gpus/{node.address(gpu)}/information"
    information.write_text(f"GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t {gpu}\n")


def test_a_gpu_that_nvml_lists_at_no_address_that_the_system_shows_is_found(node: GpuNode) -> None:
    node.load_module()
    for gpu in (1, 3):
        shutil.rmtree(node.proc / f"driver/nvidia/gpus/{node.address(gpu)}")
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    assert [device.address for device in result.devices] == [node.address(gpu) for gpu in range(4)]
    refuse(node, 2, UNKNOWN)
    node.memory.content = {}
    assert_only_gpu_2_is_down(node, node.probe().collect(), "unknown")
    refuse(node, 2, None)
    node.memory.content = {}
    result = node.probe({"device_exclude": ("0",)}).collect()
    assert by_gpu(result, "gpu_up") == {"1": 1, "2": 1, "3": 1}
    assert value(result, "gpu_count", source="nvml") == 3


def test_an_nvml_that_looks_up_no_address_is_asked_by_index(node: GpuNode) -> None:
    node.load_module()
    node.change({f"gpu.{gpu}.return.{BY_ADDRESS}": 13 for gpu in range(4)})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    assert [device.uuid for device in result.devices] == [node.uuid(gpu) for gpu in range(4)]


def test_a_gpu_that_comes_back_at_another_address_is_the_same_and_has_the_new_one(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.1.absent": 1})
    node.tick(probe)
    node.change({"gpu.1.absent": None, "gpu.1.pci": "0009:00:00.0"})
    result = node.tick(probe)
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    assert value(result, "gpu_info", gpu="1", pci_bus_id="0009:00:00.0") == 1
    assert result.devices[1].address == "0009:00:00.0"
    node.change({"gpu.1.pci": "0008:00:00.0"})
    assert value(node.tick(probe, 60), "gpu_info", gpu="1", pci_bus_id="0008:00:00.0") == 1


def test_two_gpus_of_one_label_do_not_cost_each_other(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.2.absent": 1})
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.absent": None})
    result = node.tick(probe)
    up = {labels_of(s)["uuid"]: labels_of(s)["gpu"] for s, v in select(result, "gpu_up").items() if v}
    assert up == {node.uuid(0): "0", node.uuid(1): "1", node.uuid(2): "2", node.uuid(3): "2"}
    fatal_if_touched(node, 2)
    result = node.probe(avoid=avoiding(node, 2)).collect()
    assert value(result, "gpu_up", gpu="2", uuid=node.uuid(2)) == 0
    assert value(result, "gpu_up", gpu="2", uuid=node.uuid(3)) == 1


def test_a_gpu_is_called_the_same_when_it_comes_back_as_when_it_was_lost(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.3.absent": 1})
    probe = node.probe()
    assert kinds(probe.collect()) == [("gpu_lost", node.uuid(3))]
    node.change({"gpu.3.absent": None})
    (recovered,) = node.tick(probe).events
    assert (recovered.device, recovered.labels["gpu"]) == (node.uuid(3), "3")
    node.change({"gpu.3.absent": 1})
    assert kinds(node.tick(node.probe())) == [("gpu_lost", node.uuid(3))]


# Who is not


AUTO = {"expected_count": "auto"}


def count_as(patch: pytest.MonkeyPatch, number: int) -> None:
    """Have NVML count so many GPUs, whatever it lists."""
    patch.setattr(pynvml, "nvmlDeviceGetCount", lambda: number)


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_count_that_is_wrong_once_makes_no_gpu_and_is_not_expected(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch, *, is_shown: bool
) -> None:
    if is_shown:
        node.load_module()
        node.plug_in()
    probe = node.probe(AUTO)
    probe.collect()
    with monkeypatch.context() as patch:
        count_as(patch, 5)
        for result in (node.tick(probe), node.probe(AUTO).collect(), node.probe(AUTO, run_id="two").collect()):
            assert value(result, "gpu_count", source="nvml") == 5
            assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
            assert value(result, "gpu_expected_count") == 4
            assert [what for what, _ in result.failures] == ["GPU 4"]
    for result in (node.tick(probe), node.probe(AUTO).collect()):
        assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
        assert value(result, "gpu_expected_count") == 4
        assert result.failures == []


@pytest.mark.parametrize("source", ["proc", "dev"])
def test_an_index_that_nvml_alone_counts_is_no_gpu_whatever_it_answers(node: GpuNode, source: str) -> None:
    node.load_module()
    if source == "proc":
        shutil.rmtree(node.dev)
        shutil.rmtree(node.proc / f"driver/nvidia/gpus/{node.address(3)}")
    else:
        shutil.rmtree(node.proc / "driver")
        (node.dev / "nvidia3").unlink()
    node.change({f"gpu.3.return.{BY_INDEX}": LOST, f"gpu.3.return.{BY_ADDRESS}": NOT_FOUND})
    result = node.probe(AUTO).collect()
    assert by_gpu(result, "gpu_up") == dict.fromkeys("012", 1)
    assert value(result, "gpu_expected_count") == 3


def test_gpus_of_others_are_not_taken_for_one_that_nvml_alone_counts(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.load_module()
    for gpu in (2, 3):
        (node.dev / f"nvidia{gpu}").unlink()
        node.change({f"gpu.{gpu}.absent": 1})
    count_as(monkeypatch, 3)
    result = node.probe(AUTO).collect()
    assert by_gpu(result, "gpu_up") == dict.fromkeys("01", 1)
    assert value(result, "gpu_expected_count") == 2


def test_where_the_system_shows_no_gpu_one_that_nvml_says_is_lost_is_shown(node: GpuNode) -> None:
    node.dev.mkdir()
    refuse(node, 3, LOST)
    assert value(node.probe().collect(), "gpu_up", gpu="3", uuid="") == 0


@pytest.mark.parametrize("count", [4, 6])
def test_a_gpu_without_a_name_that_the_system_counts_is_one_and_is_expected(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    node.load_module()
    shutil.rmtree(node.proc / "driver")
    refuse(node, 3, LOST)
    count_as(monkeypatch, count)
    result = node.probe(AUTO).collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 1, "2": 1, "3": 0}
    assert value(result, "gpu_up", gpu="3", uuid="") == 0
    assert value(result, "gpu_expected_count") == 4


def test_a_gpu_of_which_only_its_index_was_known_is_forgotten_when_nvml_does_not_count_it(node: GpuNode) -> None:
    refuse(node, 3, LOST)
    probe = node.probe(AUTO)
    assert value(probe.collect(), "gpu_up", gpu="3", uuid="") == 0
    node.change({"gpu.3.absent": 1})
    for result in (node.tick(probe), node.probe(AUTO).collect()):
        assert by_gpu(result, "gpu_up") == dict.fromkeys("012", 1)
        assert value(result, "gpu_expected_count") == 3


@pytest.mark.parametrize(
    "uuid", ["GPU-a\x01b", "GPU-a b", "<b>GPU</b>", 'GPU-"', "GPU-'", "GPU-`", "GPU-\u00e9", "\x7f", "G" * 97]
)
@pytest.mark.parametrize("times", [1, 5])
def test_a_uuid_that_cannot_be_one_makes_no_gpu(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch, uuid: str, times: int
) -> None:
    node.load_module()
    probe = node.probe(AUTO)
    probe.collect()
    tell, true = pynvml.nvmlDeviceGetUUID, node.uuid(2)
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: uuid if tell(handle) == true else tell(handle))
        for _ in range(times):
            assert_only_gpu_2_is_down(node, node.tick(probe, 60), "unknown")
    result = node.tick(probe, 600)
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    assert value(result, "gpu_expected_count") == 4


@pytest.mark.parametrize("uuid", ["GPU-0", "GPU-aaaa", "G" * 96, "MIG-GPU-{a}/1/0_~!"])
def test_a_long_uuid_or_one_of_other_signs_is_believed(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch, uuid: str
) -> None:
    tell, true = pynvml.nvmlDeviceGetUUID, node.uuid(2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: uuid if tell(handle) == true else tell(handle))
    assert value(node.probe().collect(), "gpu_up", gpu="2", uuid=uuid) == 1


def test_a_uuid_of_the_kernel_module_that_cannot_be_one_makes_no_gpu(node: GpuNode) -> None:
    node.load_module()
    information = node.proc / f"driver/nvidia/gpus/{node.address(2)}/information"
    information.write_text(f"GPU UUID: \t <b>{'x' * 200}\nDevice Minor: \t 2\n")
    refuse(node, 2, LOST)
    assert value(node.probe().collect(), "gpu_up", gpu="2", uuid="") == 0


@pytest.mark.parametrize("by_index", [True, False])
def test_another_uuid_at_the_address_of_a_known_gpu_is_believed_when_it_is_told_again(
    node: GpuNode, *, by_index: bool
) -> None:
    if by_index:
        node.change({f"gpu.{gpu}.return.{BY_ADDRESS}": 13 for gpu in range(4)})
    probe = node.probe(AUTO)
    probe.collect()
    for garbled in ("GPU-garbled", "GPU-garbled-too"):
        node.change({"gpu.2.uuid": garbled})
        result = node.tick(probe, 60)
        assert_only_gpu_2_is_down(node, result, "unknown")
    node.change({"gpu.2.uuid": node.uuid(2)})
    result = node.tick(probe, 60)
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    node.change({"gpu.2.uuid": "GPU-garbled-too"})
    assert_only_gpu_2_is_down(node, node.tick(probe, 60), "unknown")
    result = node.tick(probe, 60)
    assert value(result, "gpu_up", uuid="GPU-garbled-too") == 1
    assert value(result, "gpu_error", uuid=node.uuid(2), reason="gpu_lost") == 1
    for answer in (node.tick(probe, 60), node.tick(probe, 60)):
        assert value(answer, "gpu_up", uuid="GPU-garbled-too") == 1


# How often


def count_look_ups(node: GpuNode, probe: Probe, patch: pytest.MonkeyPatch, ticks: int) -> int:
    """Return how often GPU 2 was looked up."""
    watch = Watch()
    looked: list[object] = []
    finds = {name: getattr(pynvml, name) for name in ("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetHandleByIndex")}

    def look(name: str, place: object) -> Any:
        looked.append(place)
        return finds[name](place)

    with patch.context() as patched:
        for name in finds:
            patched.setattr(pynvml, name, partial(look, name))
        for _ in range(ticks):
            node.clock.advance(5)
            probe.collector.collect(watch)
    return looked.count(node.address(2)) + looked.count(2)


def test_a_handle_that_stays_refused_is_looked_up_less_and_less_often(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.load_module()
    refuse(node, 2, UNKNOWN)
    probe = node.probe()
    probe.collect()
    assert [count_look_ups(node, probe, monkeypatch, ticks) for ticks in (3, 6, 12, 24)] == [1, 1, 1, 1]
    assert count_look_ups(node, probe, monkeypatch, 720) in {6, 7, 8}
    node.change({"gpu.3.absent": 1})
    assert count_look_ups(node, probe, monkeypatch, 1) == 1


def test_a_gpu_that_is_lost_to_its_handle_gets_a_new_one_less_and_less_often(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.return.nvmlDeviceGetTemperature": LOST})
    node.tick(probe)
    assert [count_look_ups(node, probe, monkeypatch, ticks) for ticks in (2, 1, 6, 12)] == [0, 1, 1, 1]
    assert count_look_ups(node, probe, monkeypatch, 13) == 0
    node.change({"gpu.2.return.nvmlDeviceGetTemperature": None})
    assert by_gpu(node.tick(probe), "gpu_up") == dict.fromkeys("0123", 1)
    node.change({"gpu.2.return.nvmlDeviceGetTemperature": LOST})
    node.tick(probe)
    assert count_look_ups(node, probe, monkeypatch, 3) == 1


@pytest.mark.parametrize("changes", [{"gpu.2.return.*": LOST}, {"gpu.2.return.*": RESET_REQUIRED}, {"gpu.2.absent": 1}])
def test_a_gpu_that_stays_lost_while_the_system_shows_it_is_looked_for_in_a_new_process(
    node: GpuNode, changes: dict[str, int]
) -> None:
    node.load_module()
    node.plug_in()
    probe = node.probe()
    probe.collect()
    node.change(changes)
    assert kinds(node.tick(probe)) == [("gpu_lost", "2")]
    for _ in range(12):
        node.tick(probe)
    with pytest.raises(Outdated, match="GPU 2 stays lost"):
        node.tick(probe)
    probe = node.probe()
    for _ in range(119):
        assert kinds(node.tick(probe)) == []
    with pytest.raises(Outdated):
        node.tick(probe)


def test_a_gpu_that_comes_back_in_between_was_not_lost_for_long(node: GpuNode) -> None:
    node.load_module()
    node.plug_in()
    probe = node.probe()
    for code in (None, LOST, None, LOST):
        node.change({"gpu.2.return.*": code})
        for _ in range(8):
            node.tick(probe)


def test_a_gpu_that_is_left_alone_has_nobody_looked_up_more_often(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.load_module()
    node.probe().collect()
    probe = node.probe(avoid=avoiding(node, 1))
    probe.collect()
    assert count_look_ups(node, probe, monkeypatch, 11) == 0


def test_a_gpu_that_is_read_already_gets_no_more_time_to_be_looked_up_again(node: GpuNode) -> None:
    node.change({f"gpu.{gpu}.persistence_mode": 0 for gpu in range(4)})
    probe = node.probe()
    probe.collect()
    watch = Watch()
    node.clock.advance(60)
    probe.collector.collect(watch)
    assert {limit_s for _, limit_s in watch.announced} == {None}


@pytest.mark.parametrize("shown_by", ["nobody", "pci", "proc"])
def test_a_gpu_that_the_system_does_not_show_any_more_needs_no_new_process(node: GpuNode, shown_by: str) -> None:
    if shown_by == "pci":
        node.plug_in()
    elif shown_by == "proc":
        node.load_module()
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.return.*": LOST})
    for _ in range(30):
        result = node.tick(probe)
    assert reasons(result) == {"2": "gpu_lost"}


def test_a_gpu_that_fails_for_another_reason_needs_no_new_process(node: GpuNode) -> None:
    node.load_module()
    node.plug_in()
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.return.*": UNKNOWN})
    for _ in range(30):
        node.tick(probe)


def test_counts_of_dropped_answers_are_saved_before_a_process_is_given_up(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.2.garbage.nvmlDeviceGetUtilizationRates": 1})
    probe = node.probe()
    probe.collect()
    for _ in range(5):
        node.tick(probe)
    node.load_module("580.65.06")
    with pytest.raises(Outdated):
        node.tick(probe)
    result = node.probe().collect()
    assert value(result, "gpu_invalid_samples_total", gpu="2", metric="gpu_utilization_ratio") == 7


def test_counts_of_dropped_answers_are_saved_once_a_minute(node: GpuNode) -> None:
    node.change({"gpu.2.garbage.nvmlDeviceGetUtilizationRates": 1})
    probe = node.probe()
    probe.collect()
    kept = []
    for _ in range(24):
        node.tick(probe)
        kept.append(node.memory.content["gpus"][2]["invalid"]["gpu_utilization_ratio"])
    assert len(set(kept)) == 3


# GPUs that vanish


def test_a_gpu_that_is_no_longer_listed_is_lost_and_the_others_keep_their_labels(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.1.absent": 1})
    result = node.tick(probe)
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 0, "2": 1, "3": 1}
    assert reasons(result) == {"1": "gpu_lost"}
    assert kinds(result) == [("gpu_lost", "1")]
    for gpu in (0, 2, 3):
        assert value(result, "gpu_temperature_celsius", gpu=str(gpu), uuid=node.uuid(gpu), sensor="gpu") == 45 + gpu
    assert value(result, "gpu_count", source="nvml") == 3
    assert value(result, "gpu_expected_count") == 4
    assert kinds(node.tick(probe, 60)) == []
    node.change({"gpu.1.absent": None})
    result = node.tick(probe)
    assert set(by_gpu(result, "gpu_up").values()) == {1}
    assert kinds(result) == [("gpu_recovered", "1")]


def test_labels_stay_in_a_new_process_and_begin_anew_in_a_new_run(node: GpuNode) -> None:
    node.probe().collect()
    node.change({"gpu.1.absent": 1})
    result = node.probe().collect()
    assert kinds(result) == [("gpu_lost", "1")]
    assert value(result, "gpu_up", gpu="3", uuid=node.uuid(3)) == 1
    assert kinds(node.probe().collect()) == []
    result = node.probe(run_id="restarted").collect()
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 1, "2": 1}
    assert value(result, "gpu_up", gpu="2", uuid=node.uuid(3)) == 1


def test_a_loss_that_one_process_told_is_not_told_by_the_next(node: GpuNode) -> None:
    node.change({"gpu.2.return.*": LOST})
    assert kinds(node.probe().collect()) == [("gpu_lost", "2")]
    assert kinds(node.probe().collect()) == []
    node.change({"gpu.2.return.*": None})
    assert kinds(node.probe().collect()) == [("gpu_recovered", "2")]


def test_a_loss_that_is_older_than_the_run_is_the_same_fact_for_each_run_of_the_boot(node: GpuNode) -> None:
    node.change({"gpu.2.return.*": LOST})
    keys = [node.probe(run_id=run).collect().events[0].key for run in ("one", "two")]
    (node.proc / "sys/kernel/random/boot_id").write_text("other\n")
    keys.append(node.probe(run_id="three").collect().events[0].key)
    assert keys[0] == keys[1] != keys[2]


def test_each_loss_and_each_recovery_has_a_key_of_its_own_whoever_tells_it(node: GpuNode) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    told = []
    for code in (LOST, None, LOST, None):
        node.change({"gpu.2.return.*": code})
        told += node.tick(probe).events
    assert [event.kind for event in told] == ["gpu_lost", "gpu_recovered"] * 2
    assert len({event.key for event in told}) == 4
    node.change({"gpu.2.return.*": LOST})
    (third,) = node.tick(probe).events
    (again,) = node.probe(run_id="restarted").collect().events
    assert again.key == third.key not in {event.key for event in told}
    node.change({"gpu.2.return.*": None})
    (recovered,) = node.probe(run_id="restarted again").collect().events
    assert recovered.kind == "gpu_recovered"
    assert recovered.key not in {event.key for event in told}
    assert node.probe(run_id="and again").collect().events == []


def test_a_gpu_that_was_lost_without_a_name_and_has_one_after_a_restart_came_back(node: GpuNode) -> None:
    node.change({"gpu.2.return.*": LOST})
    (lost,) = node.probe(run_id="one").collect().events
    node.change({"gpu.2.return.*": None})
    assert kinds(node.probe(run_id="two").collect()) == [("gpu_recovered", "2")]
    node.change({"gpu.2.return.*": LOST})
    (again,) = node.probe(run_id="three").collect().events
    assert again.key != lost.key


def test_without_a_boot_id_no_key_claims_that_two_facts_are_one(node: GpuNode) -> None:
    (node.proc / "sys/kernel/random/boot_id").unlink()
    node.change({"gpu.2.return.*": LOST})
    assert [node.probe(run_id=run).collect().events[0].key for run in ("one", "two")] == ["", ""]


def test_a_gpu_that_comes_back_is_asked_anew_what_it_supports(node: GpuNode) -> None:
    node.change({"gpu.2.ecc_mode": None})
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.return.*": RESET_REQUIRED, "gpu.2.ecc_mode": "1 1"})
    node.tick(probe, 60)
    node.change({"gpu.2.return.*": None})
    assert value(node.tick(probe, 60), "gpu_ecc_mode_enabled", gpu="2", state="current") == 1


def test_a_gpu_that_only_the_kernel_module_knows_is_shown_by_its_uuid(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.3.absent": 1})
    result = node.probe().collect()
    assert value(result, "gpu_up", gpu="", uuid=node.uuid(3)) == 0
    assert value(result, "gpu_error", gpu="", uuid=node.uuid(3), reason="gpu_lost") == 1
    assert value(result, "gpu_count", source="proc") == 4
    assert value(result, "gpu_count", source="nvml") == 3


def test_a_gpu_that_nvml_lists_later_gets_its_label_then(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.3.absent": 1})
    probe = node.probe()
    probe.collect()
    node.change({"gpu.3.absent": None})
    result = node.tick(probe)
    assert select(result, "gpu_up", gpu="") == {}
    assert value(result, "gpu_up", gpu="3", uuid=node.uuid(3)) == 1


def test_a_gpu_that_vanishes_while_another_is_refused_takes_no_other_name(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.0.absent": 1})
    refuse(node, 2, UNKNOWN)
    result = node.tick(probe)
    assert by_gpu(result, "gpu_up") == {"0": 0, "1": 1, "2": 0, "3": 1}
    assert reasons(result) == {"0": "gpu_lost", "2": "unknown"}
    assert select(result, "gpu_up", uuid="") == {}


def test_a_gpu_that_comes_back_out_of_reach_is_the_one_that_vanished(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.1.absent": 1})
    node.tick(probe)
    node.change({"gpu.1.absent": None})
    refuse(node, 1, UNKNOWN)
    result = node.tick(probe)
    assert by_gpu(result, "gpu_up") == {"0": 1, "1": 0, "2": 1, "3": 1}
    assert reasons(result) == {"1": "unknown"}
    assert select(result, "gpu_up", uuid="") == {}


def test_the_handles_of_a_session_that_ended_are_not_used_in_the_next(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = node.probe()
    probe.collect()
    with monkeypatch.context() as patch:
        end_session(node, probe, patch)
    watch = Watch()
    node.clock.advance(5)
    probe.collector.collect(watch)
    gpus = [(f"GPU {node.address(gpu)}", None) for gpu in range(4)]
    assert watch.announced == [("nvml", 20.0), *gpus, *gpus]


def test_a_gpu_whose_address_nvml_does_not_tell_has_it_from_the_kernel_module(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.2.return.nvmlDeviceGetPciInfo_v3": 3})
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    assert result.failures == []
    assert [device.address for device in result.devices] == [node.address(gpu) for gpu in range(4)]
    assert value(result, "gpu_info", gpu="2", pci_bus_id=node.address(2)) == 1


def test_a_gpu_that_vanished_while_nvml_was_gone_is_lost(node: GpuNode, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = node.probe()
    probe.collect()
    with monkeypatch.context() as patch:
        assert set(reasons(end_session(node, probe, patch)).values()) == {"unknown"}
    node.change({"gpu.1.absent": 1})
    result = node.tick(probe)
    assert reasons(result) == {"1": "gpu_lost"}
    assert kinds(result) == [("gpu_lost", "1")]


def fail_to_count(patch: pytest.MonkeyPatch, code: int) -> None:
    def fails() -> int:
        raise pynvml.NVMLError(code)

    patch.setattr(pynvml, "nvmlDeviceGetCount", fails)


def end_session(node: GpuNode, probe: Probe, patch: pytest.MonkeyPatch) -> Result:
    """Have NVML fail to count its GPUs until the session is given up."""
    fail_to_count(patch, UNKNOWN)
    for _ in range(3):
        assert value(node.tick(probe), "gpu_nvml_up") == 1
    return node.tick(probe)


# What a process before hung on


def fatal_if_touched(node: GpuNode, gpu: int) -> None:
    """Have any contact with the GPU end the session, which a test would notice."""
    node.change({f"gpu.{gpu}.return.{name}": 18 for name in ("*", BY_INDEX, BY_ADDRESS)})


@pytest.mark.parametrize(("deed", "reason"), [("hang", "timeout"), ("crash", "unknown")])
def test_a_gpu_that_a_process_ended_on_is_left_alone_by_the_next(node: GpuNode, deed: str, reason: str) -> None:
    node.probe().collect()
    fatal_if_touched(node, 2)
    probe = node.probe(avoid=avoiding(node, 2, deed))
    result = probe.collect()
    assert_only_gpu_2_is_down(node, result, reason)
    assert kinds(result) == [("gpu_lost", "2")]
    assert_only_gpu_2_is_down(node, node.tick(probe, 60), reason)
    node.change({key: None for key in node.driver if key.startswith("gpu.2.return")})
    assert kinds(node.probe().collect()) == [("gpu_recovered", "2")]


@pytest.mark.parametrize("loaded", [True, False])
def test_a_gpu_that_the_very_first_process_ended_on_is_left_alone(node: GpuNode, *, loaded: bool) -> None:
    if loaded:
        node.load_module()
    fatal_if_touched(node, 2)
    result = node.probe(avoid=avoiding(node, 2) if loaded else {"GPU 2": "hang"}).collect()
    assert by_gpu(result, "gpu_up") == ALL_BUT_2
    assert reasons(result) == {"2": "timeout"}
    assert value(result, "gpu_up", gpu="2", uuid=node.uuid(2) if loaded else "") == 0


def test_a_gpu_is_left_alone_also_when_the_numbers_have_changed(node: GpuNode) -> None:
    node.probe().collect()
    node.change({"gpu.0.absent": 1})
    fatal_if_touched(node, 2)
    result = node.probe(avoid=avoiding(node, 2)).collect()
    assert by_gpu(result, "gpu_up") == {"0": 0, "1": 1, "2": 0, "3": 1}
    assert reasons(result) == {"0": "gpu_lost", "2": "timeout"}


def test_another_gpu_at_the_address_of_one_that_is_looked_for_is_not_taken_for_it(node: GpuNode) -> None:
    node.probe().collect()
    node.change({"gpu.0.absent": 1, "gpu.1.uuid": "GPU-another"})
    probe = node.probe(avoid=avoiding(node, 2))
    assert reasons(probe.collect()) == {"0": "gpu_lost", "1": "unknown", "2": "timeout"}
    result = node.tick(probe, 15)
    assert reasons(result) == {"0": "gpu_lost", "1": "gpu_lost", "2": "timeout"}
    assert value(result, "gpu_up", uuid="GPU-another") == 1
    assert value(result, "gpu_up", uuid=node.uuid(1)) == 0
    assert [device.address for device in result.devices if device.uuid == node.uuid(1)] == [""]


class Watch:
    """An output that notes which device was in hand, and for how long at most."""

    def __init__(self) -> None:
        self.announced: list[tuple[str, float | None]] = []

    def working_on(self, device: str, limit_s: float | None = None) -> None:
        if device != VERSION_FILE:
            self.announced.append((device, limit_s))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_what_is_in_hand_is_announced_with_more_time_for_what_has_to_start(node: GpuNode) -> None:
    probe = node.probe()
    watch = Watch()
    probe.collector.collect(watch)
    by_index = [(f"GPU {gpu}", 10.0) for gpu in range(4)]
    gpus = [f"GPU {node.address(gpu)}" for gpu in range(4)]
    assert watch.announced == [("nvml", 20.0), *by_index, *((gpu, 10.0) for gpu in gpus)]
    watch.announced.clear()
    node.clock.advance(5)
    probe.collector.collect(watch)
    assert watch.announced == [("nvml", None), *((gpu, None) for gpu in gpus)]


def test_only_gpus_that_are_not_known_to_stay_initialised_get_more_time_in_a_new_process(node: GpuNode) -> None:
    node.change({"gpu.1.persistence_mode": 0, "gpu.2.persistence_mode": None})
    node.probe().collect()
    watch = Watch()
    node.probe().collector.collect(watch)
    limits = {f"GPU {node.address(gpu)}": 10.0 if gpu in {1, 2} else None for gpu in range(4)}
    assert watch.announced == [("nvml", 20.0), *limits.items(), *limits.items()]


def test_each_gpu_is_announced_by_its_address_also_when_the_numbers_have_closed_up(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.1.absent": 1})
    node.tick(probe)
    watch = Watch()
    node.clock.advance(60)
    probe.collector.collect(watch)
    gpus = [f"GPU {node.address(gpu)}" for gpu in range(4)]
    assert [name for name, _ in watch.announced] == ["nvml", *gpus, gpus[0], gpus[2], gpus[3]]


class Ending(Watch):
    """An output whose process ends when it comes to this device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def working_on(self, device: str, limit_s: float | None = None) -> None:
        if device == self._device:
            raise KeyboardInterrupt
        super().working_on(device, limit_s)


def test_the_gpus_that_were_met_are_kept_before_the_next_one_is_touched(node: GpuNode) -> None:
    with pytest.raises(KeyboardInterrupt):
        node.probe().collector.collect(Ending("GPU 2"))
    assert [entry["uuid"] for entry in node.memory.content["gpus"]] == [node.uuid(0), node.uuid(1)]


def test_nvml_itself_is_left_alone_after_a_hang_and_its_gpus_are_shown(node: GpuNode) -> None:
    node.load_module()
    node.probe().collect()
    node.change({"init.return": 9, "driver.version": None})
    probe = node.probe(avoid={"nvml": "hang"})
    result = probe.collect()
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 0)
    assert set(reasons(result).values()) == {"timeout"}
    assert value(result, "gpu_nvml_up") == 0
    assert select(result, "gpu_nvml_return_code") == {}
    counts = {labels_of(s)["source"]: v for s, v in select(result, "gpu_count").items()}
    assert counts == {"proc": 4, "dev": 4}
    assert kinds(result) == []
    assert probe.collector.found() == "0 of 4 GPUs, no NVML"


def test_what_the_kernel_module_hangs_on_is_not_read_again(node: GpuNode) -> None:
    node.load_module()
    node.change({"init.return": 9})
    probe = node.probe(avoid={"driver/nvidia/gpus": "hang"})
    result = probe.collect()
    assert select(result, "gpu_up") == {}
    assert value(result, "gpu_count", source="proc") == 4


def test_a_version_file_that_a_process_hung_on_is_not_read_again_and_costs_the_version(node: GpuNode) -> None:
    node.load_module()
    with pytest.raises(KeyboardInterrupt):
        node.probe().collector.collect(Ending(VERSION_FILE))
    probe = node.probe(avoid={VERSION_FILE: "hang"})
    for _ in range(2):
        result = node.tick(probe)
        assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
        assert value(result, "gpu_driver_info", kernel_module_version="") == 1
        assert [what for what, _ in result.failures] == ["kernel module version"]


# Answers that cannot be true


@pytest.mark.parametrize(
    ("changes", "metric", "lost"),
    [
        ({"utilization": "4294967295 45"}, "gpu_utilization_ratio", 1),
        ({"utilization": "808334905 45"}, "gpu_utilization_ratio", 1),
        ({"utilization": "97 106"}, "gpu_memory_utilization_ratio", 1),
        ({"temperature": 151}, "gpu_temperature_celsius", 0),
        ({"temperature": 4294967295}, "gpu_temperature_celsius", 0),
        ({"field.82": "si:-21"}, "gpu_temperature_celsius", 0),
        ({"field.186": "ui:800001"}, "gpu_power_watts", 1),
        ({"field.186": "ui:4294967295"}, "gpu_power_watts", 1),
        ({"field.186.1": "ui:4294967295"}, "gpu_power_watts", 0),
        ({"field.185": "ui:800001"}, "gpu_power_average_watts", 1),
        ({"memory": f"{2**64 - 1} 0 1 1"}, "gpu_memory_total_bytes", 1),
        ({"memory": f"{2**30} 0 0 {2**30 + 1}"}, "gpu_memory_used_bytes", 1),
        ({"memory": f"{2**30} 0 {2**30 + 1} 0"}, "gpu_memory_free_bytes", 1),
        ({"memory": f"{2**30} {2**30 + 1} 0 0"}, "gpu_memory_reserved_bytes", 1),
        ({"memory": "0 0 0 0"}, "gpu_memory_total_bytes", 1),
        ({"clock_mhz.sm": 4294967295}, "gpu_clock_hertz", 0),
        ({"field.83": f"ull:{2**64 - 1}"}, "gpu_energy_joules_total", 1),
        ({"field.74": f"ull:{2**64 - 1}"}, "gpu_throttle_seconds_total", 0),
        ({"field.94": "ui:4294967295"}, "gpu_pcie_replays_total", 1),
        ({"field.138.4294967295": f"ull:{2**64 - 1}"}, "gpu_nvlink_bytes_total", 0),
        ({"field.142": "ui:4294967295"}, "gpu_remapped_rows_total", 0),
        ({"field.144": "ui:2"}, "gpu_row_remap_pending", 1),
        ({"field.145": "ui:4294967295"}, "gpu_row_remap_failure", 1),
        ({"field.230": "ui:4294967295"}, "gpu_recovery_action", 1),
        ({"field.3": f"ull:{2**64 - 1}"}, "gpu_ecc_errors_all_total", 0),
        ({"event_reasons": hex(2**64 - 1)}, "gpu_clock_event_active", 1),
        ({"pcie": "4 4294967295 4 16"}, "gpu_pcie_link_width", 1),
        ({"ecc_mode": "1 7"}, "gpu_ecc_mode_enabled", 0),
        ({"persistence_mode": 4294967295}, "gpu_persistence_mode_enabled", 1),
        ({"performance_state": 16}, "gpu_performance_state", 1),
        ({"nvlink.0.state": 4294967295}, "gpu_nvlink_active_links", 2),
        ({"power_limit_mw.enforced": 4294967295}, "gpu_power_limit_watts", 0),
    ],
)
def test_an_answer_that_cannot_be_true_is_dropped_and_counted(
    node: GpuNode, changes: dict[str, object], metric: str, lost: int
) -> None:
    node.change({f"gpu.2.{key}": str(answer) for key, answer in changes.items()})
    result = node.probe().collect()
    assert value(result, "gpu_invalid_samples_total", gpu="2", metric=metric) == 1
    counted = {labels_of(s)["metric"]: v for s, v in select(result, "gpu_invalid_samples_total", gpu="2").items()}
    assert {name for name, count in counted.items() if count} == {metric}
    assert len(names_of(result, "2")) == METRICS_OF_A_GPU - lost
    assert by_gpu(result, "gpu_up")["2"] == 1
    assert not any(select(result, "gpu_invalid_samples_total", gpu="1").values())


@pytest.mark.parametrize(
    ("changes", "metric", "expected"),
    [
        ({"utilization": "100 100"}, "gpu_utilization_ratio", 1.0),
        ({"utilization": "0 0"}, "gpu_utilization_ratio", 0.0),
        ({"field.186": "ui:800000"}, "gpu_power_watts", 800.0),
        ({"memory": f"{2**30} 0 0 {2**30}"}, "gpu_memory_used_bytes", 2**30),
        ({"temperature": 150}, "gpu_temperature_celsius", 150),
    ],
)
def test_what_is_barely_possible_is_believed(
    node: GpuNode, changes: dict[str, object], metric: str, expected: float
) -> None:
    node.change({f"gpu.2.{key}": str(answer) for key, answer in changes.items()} | {"gpu.2.field.82": None})
    result = node.probe().collect()
    assert by_gpu(result, metric)["2"] == expected
    assert not any(select(result, "gpu_invalid_samples_total").values())


def test_an_unknown_performance_state_is_absent_and_not_invalid(node: GpuNode) -> None:
    node.change({"gpu.2.performance_state": 32})
    result = node.probe().collect()
    assert set(by_gpu(result, "gpu_performance_state")) == {"0", "1", "3"}
    assert not any(select(result, "gpu_invalid_samples_total").values())


def test_garbage_now_and_then_is_counted_each_time_and_over_processes_but_not_runs(node: GpuNode) -> None:
    node.change({"gpu.2.garbage.nvmlDeviceGetUtilizationRates": 2})
    probe = node.probe()
    dropped = [value(node.tick(probe), "gpu_invalid_samples_total", gpu="2", metric="gpu_utilization_ratio")]
    dropped += [
        value(node.tick(probe), "gpu_invalid_samples_total", gpu="2", metric="gpu_utilization_ratio") for _ in range(3)
    ]
    assert dropped == [0, 1, 1, 2]
    node.clock.advance(60)
    assert value(probe.collect(), "gpu_invalid_samples_total", gpu="2", metric="gpu_utilization_ratio") == 2
    node.change({"gpu.2.garbage.nvmlDeviceGetUtilizationRates": None})
    result = node.probe().collect()
    assert value(result, "gpu_invalid_samples_total", gpu="2", metric="gpu_utilization_ratio") == 2
    result = node.probe(run_id="restarted").collect()
    assert value(result, "gpu_invalid_samples_total", gpu="2", metric="gpu_utilization_ratio") == 0


def test_garbage_in_everything_leaves_a_gpu_that_is_up_with_nothing_untrue(node: GpuNode) -> None:
    functions = (
        *("UtilizationRates", "MemoryInfo_v2", "ClockInfo", "PowerUsage", "EnforcedPowerLimit", "MaxClockInfo"),
        *("PowerManagementLimitConstraints", "EccMode", "CurrPcieLinkWidth", "NvLinkState", "Temperature"),
    )
    node.change({f"gpu.2.garbage.nvmlDeviceGet{function}": 1 for function in functions})
    result = node.probe().collect()
    assert value(result, "gpu_up", gpu="2") == 1
    assert value(result, "gpu_power_watts", gpu="2", scope="gpu") == 317.0
    assert {"gpu_utilization_ratio", "gpu_memory_total_bytes", "gpu_nvlink_links"} & names_of(result, "2") == set()


def test_a_damaged_memory_is_left_out_and_not_believed(node: GpuNode) -> None:
    node.probe().collect()
    for part, damaged in (
        ("gpus", [{"label": 3}, "x", None, {"uuid": "GPU-x", "alive": 1, "invalid": {"a": "b"}, "told_as": [1]}]),
        ("gpus", {"a": 1}),
        ("seen", [["0"], 5, [1, 2]]),
        ("excluded", "many"),
        ("given_up_s", "never"),
        ("renewed_s", True),
        ("losses", {"GPU-x": 1, "GPU-y": [True, 0], "GPU-z": []}),
        ("losses", [1]),
    ):
        node.memory.content[part] = damaged
        result = node.probe().collect()
        assert set(by_gpu(result, "gpu_up").values()) >= {1}
        assert value(result, "gpu_count", source="nvml") == 4
        node.memory.content = {}


# NVML as a whole


@pytest.mark.parametrize(
    ("code", "reason"), [(9, "unknown"), (18, "unknown"), (999, "unknown"), (NO_PERMISSION, "no_permission")]
)
def test_gpus_are_shown_as_not_answering_while_nvml_cannot_start(node: GpuNode, code: int, reason: str) -> None:
    node.load_module()
    node.plug_in()
    node.change({"init.return": code})
    result = node.probe().collect()
    assert value(result, "gpu_nvml_up") == 0
    assert value(result, "gpu_nvml_return_code") == code
    for gpu in range(4):
        assert value(result, "gpu_up", gpu="", uuid=node.uuid(gpu)) == 0
        assert value(result, "gpu_error", uuid=node.uuid(gpu), reason=reason) == 1
    assert {labels_of(s)["source"] for s in select(result, "gpu_count")} == {"proc", "dev", "pci"}
    assert kinds(result) == []
    assert "NVML" in [what for what, _ in result.failures]
    versions = {"driver_version": "", "kernel_module_version": "570.133.20"}
    assert value(result, "gpu_driver_info", **versions) == 1


def test_nvml_is_tried_again_with_growing_patience(node: GpuNode) -> None:
    probe = node.probe()
    node.change({"init.return": 999})
    waits = []
    waited = 0
    for _ in range(300):
        watch = Watch()
        probe.collector.collect(watch)
        node.clock.advance(1)
        waited += 1
        if ("nvml", 20.0) in watch.announced:
            waits.append(waited)
            waited = 0
    assert waits == [1, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_nvml_comes_up_without_a_new_process_where_the_driver_was_there(node: GpuNode) -> None:
    node.load_module()
    node.change({"init.return": 999})
    probe = node.probe()
    probe.collect()
    node.change({"init.return": None})
    result = node.tick(probe)
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    assert kinds(result) == []


def test_without_a_library_the_code_says_so_and_a_node_without_gpus_has_nothing(node: GpuNode) -> None:
    with untouched_binding():
        node.plug_in()
        result = node.probe({"nvml_library": NO_LIBRARY, "expected_count": "auto"}).collect()
        assert value(result, "gpu_nvml_up") == 0
        assert value(result, "gpu_nvml_return_code") == 12
        assert value(result, "gpu_count", source="pci") == 4
        assert any(NO_LIBRARY in text for what, text in result.failures if what == "NVML")


def test_a_node_whose_only_sign_of_gpus_is_a_library_without_a_driver_has_nothing(node: GpuNode) -> None:
    node.change({"init.return": 9})
    with pytest.raises(NotPresent, match="driver is not loaded"):
        node.probe({"expected_count": "auto"}).collect()


def test_a_driver_without_gpus_on_a_node_without_gpus_is_nothing_to_collect(node: GpuNode) -> None:
    node.change({f"gpu.{gpu}.absent": 1 for gpu in range(4)})
    with pytest.raises(NotPresent, match="NVML lists none"):
        node.probe({"expected_count": "auto"}).collect()


def test_expected_gpus_without_anything_are_missing_and_not_absent(node: GpuNode) -> None:
    node.change({"init.return": 9})
    result = node.probe({"expected_count": "auto"}, vm_size=VmSize("x", gpu_count=8)).collect()
    assert value(result, "gpu_expected_count") == 8
    assert value(result, "gpu_count", source="proc") == 0


# A driver that was replaced


@pytest.mark.parametrize("code", [1, 9, 18])
def test_a_session_that_ends_needs_a_new_process_which_does_not_give_up_as_well(node: GpuNode, code: int) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    node.change({f"gpu.{gpu}.return.*": code for gpu in range(4)})
    with pytest.raises(Outdated, match=str(code)):
        node.tick(probe)
    result = node.probe().collect()
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 0)
    assert set(reasons(result).values()) == {"unknown"}


def test_a_look_up_that_speaks_of_the_session_ends_the_process_too(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    refuse(node, 2, 18)
    with pytest.raises(Outdated, match="18"):
        node.tick(probe, 60)


@pytest.mark.parametrize("code", [1, 9, 18])
def test_a_count_that_speaks_of_the_session_ends_the_process(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    with monkeypatch.context() as patch:
        fail_to_count(patch, code)
        with pytest.raises(Outdated, match=str(code)):
            node.tick(probe)
        result = node.tick(node.probe())
        assert value(result, "gpu_nvml_up") == 0
        assert value(result, "gpu_nvml_return_code") == code
        assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 0)
        assert kinds(result) == []


def test_a_count_that_fails_now_and_then_costs_the_count_alone(node: GpuNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    for _ in range(2):
        with monkeypatch.context() as patch:
            fail_to_count(patch, UNKNOWN)
            for _ in range(3):
                result = node.tick(probe)
                assert {labels_of(s)["source"] for s in select(result, "gpu_count")} == {"proc", "dev"}
                assert value(result, "gpu_nvml_up") == 1
                assert len(names_of(result, "2")) == METRICS_OF_A_GPU
                assert [what for what, _ in result.failures] == ["NVML"]
        assert value(node.tick(probe), "gpu_count", source="nvml") == 4


def test_a_count_that_keeps_failing_ends_the_session_which_is_shut_down_before_the_next(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    called: list[str] = []
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, partial(_note, called, name, getattr(pynvml, name)))
    with monkeypatch.context() as patch:
        result = end_session(node, probe, patch)
        assert value(result, "gpu_nvml_up") == 0
        assert value(result, "gpu_nvml_return_code") == UNKNOWN
        assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 0)
        assert kinds(result) == []
    result = node.tick(probe)
    assert by_gpu(result, "gpu_up") == dict.fromkeys("0123", 1)
    assert value(result, "gpu_nvml_return_code") == 0
    assert called == ["nvmlShutdown", "nvmlInit"]


def _note(called: list[str], name: str, function: Callable[[], None]) -> None:
    called.append(name)
    function()


def test_giving_up_is_tried_again_after_a_while(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.0.return.nvmlDeviceGetTemperature": 18})
    with pytest.raises(Outdated):
        node.tick(probe)
    probe = node.probe()
    for _ in range(119):
        node.tick(probe)
    with pytest.raises(Outdated):
        node.tick(probe)


def test_one_gpu_that_speaks_of_the_session_costs_only_itself_in_the_end(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.2.return.*": 18})
    refuse(node, 2, 18)
    with pytest.raises(Outdated):
        node.tick(probe)
    assert_only_gpu_2_is_down(node, node.probe().collect(), "unknown")


def test_another_kernel_module_needs_a_new_process_once(node: GpuNode) -> None:
    node.load_module("570.133.20")
    probe = node.probe()
    probe.collect()
    node.load_module("580.65.06")
    with pytest.raises(Outdated, match=r"580\.65\.06"):
        node.tick(probe)
    probe = node.probe()
    assert value(probe.collect(), "gpu_nvml_up") == 1
    assert value(node.tick(probe), "gpu_driver_info", kernel_module_version="580.65.06") == 1


def test_a_kernel_module_that_appears_needs_a_new_process(node: GpuNode) -> None:
    node.change({"init.return": 9})
    probe = node.probe()
    probe.collect()
    node.load_module()
    node.change({"init.return": None})
    with pytest.raises(Outdated, match="not loaded"):
        node.tick(probe)
    assert by_gpu(node.probe().collect(), "gpu_up") == dict.fromkeys("0123", 1)


def test_a_kernel_module_that_goes_is_no_reason_by_itself(node: GpuNode) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    (node.proc / "driver/nvidia/version").unlink()
    assert value(node.tick(probe), "gpu_nvml_up") == 1


def test_a_version_file_that_cannot_be_read_is_told_and_changes_nothing(node: GpuNode) -> None:
    node.load_module()
    probe = node.probe()
    probe.collect()
    (node.proc / "driver/nvidia/version").unlink()
    (node.proc / "driver/nvidia/version").mkdir()
    result = node.tick(probe)
    assert [what for what, _ in result.failures] == ["kernel module version"]
    assert value(result, "gpu_nvml_up") == 1


def test_a_source_that_cannot_be_read_is_absent_and_told(node: GpuNode) -> None:
    node.plug_in()
    vendor = node.sys / "bus/pci/devices" / node.address(0) / "vendor"
    vendor.unlink()
    vendor.mkdir()
    result = node.probe().collect()
    assert select(result, "gpu_count", source="pci") == {}
    assert [what for what, _ in result.failures] == ["PCI devices"]
    assert value(result, "gpu_count", source="nvml") == 4


def test_a_listing_that_cannot_be_read_is_absent_though_nvml_is_down(node: GpuNode) -> None:
    node.load_module()
    shutil.rmtree(node.proc / "driver/nvidia/gpus")
    shutil.rmtree(node.dev)
    for loop in (node.proc / "driver/nvidia/gpus", node.dev):
        loop.symlink_to(loop)
    node.change({"init.return": 9})
    result = node.probe().collect()
    assert select(result, "gpu_count") == {}
    assert [what for what, _ in result.failures] == ["driver/nvidia/gpus", "device nodes", "NVML"]


def test_information_that_cannot_be_read_costs_one_gpu(node: GpuNode) -> None:
    node.load_module()
    node.change({"init.return": 9})
    information = node.proc / f"driver/nvidia/gpus/{node.address(1)}/information"
    information.unlink()
    information.mkdir()
    result = node.probe().collect()
    assert {labels_of(s)["uuid"] for s in select(result, "gpu_up")} == {node.uuid(0), node.uuid(2), node.uuid(3)}
