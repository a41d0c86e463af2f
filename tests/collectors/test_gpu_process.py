"""Claims about the gpu collector in a process of its own, with a C library in place of the driver's.

Here are the faults that only a real library has: hanging calls, crashes, missing symbols, a file that is replaced.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from agent import log
from agent.api import Duration, NotPresent
from agent.context import NodeContext
from agent.quarantine import AVOID_FIRST_S
from agent.remote import Remote, usage
from agent.sim.harness import MemoryState, Result
from agent.snapshot import Batch
from agent.worker import Assignment
from collectors.gpu import Gpu, Options
from tests.agent.kit import until
from tests.collectors.gpunode import GpuNode, by_gpu, labels_of, select, untouched_binding, value
from tests.fakenvml import library

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENT_S, HASTY_S = 10.0, 1.0
HANG_MS = 60_000
ALL = dict.fromkeys("0123", 1)
ALL_BUT_2 = ALL | {"2": 0}
PER_GPU_PER_CYCLE = 10


class Clock:
    """Real time, moved forward on request."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class Lane:
    """The collector's process as the agent runs it, on a node with four GPUs."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = GpuNode(root, gpus=4)
        self.node.load_module()
        self.calls = root / "calls"
        self.library = library.build(root / "lib")
        self.memory = MemoryState()
        self.clock = Clock()
        monkeypatch.setenv("FAKENVML_STATE", str(self.node.state_file))
        monkeypatch.setenv("FAKENVML_CALLS", str(self.calls))
        self._remotes: list[Remote] = []

    def start(self, timeout_s: float = PATIENT_S, **options: Any) -> Remote:
        context: dict[str, Any] = {
            **vars(self.node.probe().context),
            "clock": self.clock,
            "timeout_s": timeout_s,
        }
        for key in ("avoid", "inventory", "state", "_made"):
            del context[key]
        chosen = Options(**{"nvml_library": str(self.library), **options})
        assignment = Assignment(Gpu, chosen, context, partial(log.setup, "error", "text"))
        remote = Remote(assignment, NodeContext(**context, state=self.memory))
        self._remotes.append(remote)
        return remote

    def forget_calls(self) -> None:
        self.calls.write_text("", encoding="utf-8")

    def called(self) -> Counter[tuple[str, str]]:
        """Return how often each function was called, and on which GPU (`-` for none)."""
        lines = self.calls.read_text(encoding="utf-8").splitlines()
        return Counter((line.split()[0], line.split()[1]) for line in lines)

    def close(self) -> None:
        for remote in self._remotes:
            remote.close()
        usage.pop(Gpu.name, None)


def collect(remote: Remote) -> Result:
    batch = Batch()
    remote.collect(batch)
    snapshot = batch.finish("gpu", 0.0)
    values = {s.prefix.rstrip(): number for s, number in zip(snapshot.series, snapshot.values, strict=True)}
    return Result(values, batch.failures, batch.events, batch.devices)


def reasons(result: Result) -> dict[str, str]:
    return {labels_of(series)["gpu"]: labels_of(series)["reason"] for series in select(result, "gpu_error")}


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    with untouched_binding():
        made = Lane(tmp_path, monkeypatch)
        yield made
        made.close()


def test_a_c_library_and_the_stand_in_give_the_same_series(lane: Lane) -> None:
    result = collect(lane.start())
    lane.node.install()
    expected = lane.node.probe({"expected_count": "auto"}).collect()
    assert result.values == expected.values
    assert (result.failures, result.devices) == ([], expected.devices)


def test_a_gpu_that_hangs_costs_only_itself_and_is_read_again_later(lane: Lane) -> None:
    remote = lane.start(HASTY_S)
    assert by_gpu(collect(remote), "gpu_up") == ALL
    lane.node.change({"gpu.2.hang_ms.*": HANG_MS})
    result = collect(remote)
    assert by_gpu(result, "gpu_up") == ALL_BUT_2
    assert reasons(result) == {"2": "timeout"}
    assert set(by_gpu(result, "gpu_utilization_ratio")) == {"0", "1", "3"}
    assert [event.kind for event in result.events] == ["gpu_lost"]
    lane.forget_calls()
    result = collect(remote)
    assert reasons(result) == {"2": "timeout"}
    assert result.events == []
    assert {gpu for _, gpu in lane.called()} == {"-", "0", "1", "3"}
    lane.node.change({"gpu.2.hang_ms.*": None})
    lane.clock.ahead_s += AVOID_FIRST_S
    events: list[str] = []

    def is_back() -> bool:
        result = collect(remote)
        events.extend(event.kind for event in result.events)
        return by_gpu(result, "gpu_up") == ALL

    until(is_back, "GPU 2 is read again")
    assert events == ["gpu_recovered"]


def test_a_gpu_that_hangs_from_the_start_costs_only_itself(lane: Lane) -> None:
    lane.node.change({"gpu.2.hang_ms.*": HANG_MS})
    result = collect(lane.start(HASTY_S / 2))  # five times as long for a first contact
    assert by_gpu(result, "gpu_up") == ALL_BUT_2
    assert reasons(result) == {"2": "timeout"}
    assert value(result, "gpu_up", gpu="2", uuid=lane.node.uuid(2)) == 0


def test_a_hang_while_another_gpu_was_lost_does_not_swallow_its_event(lane: Lane) -> None:
    remote = lane.start(HASTY_S)
    collect(remote)
    lane.node.change({"gpu.1.return.*": 15, "gpu.2.hang_ms.*": HANG_MS})
    result = collect(remote)
    assert reasons(result) == {"1": "gpu_lost", "2": "timeout"}
    assert sorted((event.kind, event.device) for event in result.events) == [("gpu_lost", "1"), ("gpu_lost", "2")]


def test_nvml_that_hangs_leaves_the_counts_and_the_names(lane: Lane) -> None:
    lane.node.change({"init.hang_ms": HANG_MS})
    result = collect(lane.start(HASTY_S / 5))  # ten times as long for NVML's start
    assert value(result, "gpu_nvml_up") == 0
    assert {labels_of(s)["source"]: v for s, v in select(result, "gpu_count").items()} == {"proc": 4, "dev": 4}
    assert {labels_of(series)["uuid"] for series in select(result, "gpu_error", reason="timeout")} == {
        lane.node.uuid(gpu) for gpu in range(4)
    }


def test_a_gpu_that_crashes_the_library_costs_only_itself(lane: Lane) -> None:
    remote = lane.start()
    collect(remote)
    lane.node.change({"gpu.2.crash.nvmlDeviceGetClockInfo": 1})
    result = collect(remote)
    assert by_gpu(result, "gpu_up") == ALL_BUT_2
    assert reasons(result) == {"2": "unknown"}


def test_dropped_answers_are_counted_on_by_the_process_that_follows(lane: Lane) -> None:
    remote = lane.start(HASTY_S)
    lane.node.change({"gpu.1.garbage.nvmlDeviceGetUtilizationRates": 1})
    assert value(collect(remote), "gpu_invalid_samples_total", gpu="1", metric="gpu_utilization_ratio") == 1
    lane.node.change({"gpu.2.hang_ms.*": HANG_MS})
    counted = value(collect(remote), "gpu_invalid_samples_total", gpu="1", metric="gpu_utilization_ratio")
    assert counted is not None
    assert counted >= 2


def test_a_library_that_is_replaced_is_used_at_once_and_without_a_gap(lane: Lane) -> None:
    remote = lane.start()
    collect(remote)
    library.build(lane.library.parent, version="580.65.06")
    result = collect(remote)
    assert value(result, "gpu_driver_info", driver_version="580.65.06") == 1
    assert by_gpu(result, "gpu_up") == ALL
    assert result.events == []
    assert collect(remote).values.keys() == result.values.keys()


def test_packages_that_were_upgraded_before_the_reboot_cost_no_value(lane: Lane) -> None:
    """The new library would refuse to work with the module that is loaded, and the old one's file is gone."""
    link = lane.library.with_name("link")
    for version in ("570.133.20", "580.65.06"):
        lane.library.rename(lane.library.with_name(f"libnvidia-ml.so.{version}"))
        library.build(lane.library.parent, version=version)
    link.symlink_to("libnvidia-ml.so.570.133.20")
    remote = lane.start(nvml_library=str(link))
    collect(remote)
    usage[Gpu.name].restarts = 0
    link.unlink()
    link.symlink_to("libnvidia-ml.so.580.65.06")
    assert by_gpu(collect(remote), "gpu_up") == ALL
    assert usage[Gpu.name].restarts == 0
    lane.node.load_module("580.65.06")
    assert by_gpu(collect(remote), "gpu_up") == ALL
    assert usage[Gpu.name].restarts == 1


def test_a_library_that_is_gone_for_a_moment_is_used_on(lane: Lane) -> None:
    remote = lane.start()
    collect(remote)
    lane.library.unlink()
    assert by_gpu(collect(remote), "gpu_up") == ALL


def test_a_library_that_did_not_fit_is_given_up_when_it_is_replaced(lane: Lane) -> None:
    lane.node.change({"init.return": 18})
    remote = lane.start()
    assert value(collect(remote), "gpu_nvml_return_code") == 18
    lane.node.change({"init.return": None})
    library.build(lane.library.parent, version="580.65.06")
    assert value(collect(remote), "gpu_driver_info", driver_version="580.65.06") == 1


def test_a_library_that_comes_late_is_loaded_without_a_restart(lane: Lane) -> None:
    content = lane.library.read_bytes()
    lane.library.write_bytes(b"half a library")
    remote = lane.start()
    assert value(collect(remote), "gpu_nvml_return_code") == 12
    lane.library.write_bytes(content)
    lane.clock.ahead_s += 5
    remote.close()
    assert value(collect(remote), "gpu_nvml_up") == 1


def test_an_older_driver_without_newer_functions_gives_what_it_has(lane: Lane) -> None:
    newer = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetFieldValues", "nvmlDeviceGetTemperatureV"]
    newer += ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetSupportedClocksEventReasons"]
    library.build(lane.library.parent, without=newer)
    result = collect(lane.start())
    assert result.failures == []
    assert by_gpu(result, "gpu_up") == ALL
    for name in ("gpu_memory_used_bytes", "gpu_power_watts", "gpu_energy_joules_total", "gpu_row_remap_failure"):
        assert set(by_gpu(result, name)) == set(ALL), name
    assert value(result, "gpu_clock_event_active", gpu="0", reason="sw_power_cap") == 1
    assert select(result, "gpu_memory_reserved_bytes") == {}


def test_a_library_without_the_first_function_cannot_be_used(lane: Lane) -> None:
    library.build(lane.library.parent, without=("nvmlInitWithFlags",))
    result = collect(lane.start())
    assert value(result, "gpu_nvml_return_code") == 13
    assert value(result, "gpu_nvml_up") == 0


def test_a_node_without_gpus_has_nothing_to_collect(lane: Lane, tmp_path: Path) -> None:
    lane.node.change({"init.return": 9})
    (lane.node.proc / "driver").rename(tmp_path / "driver")
    lane.node.dev.rename(tmp_path / "no-dev")
    with pytest.raises(NotPresent):
        collect(lane.start())


def test_a_cycle_makes_few_calls_and_none_that_block(lane: Lane) -> None:
    remote = lane.start()
    collect(remote)
    assert "nvmlDeviceGetPcieThroughput" not in {name for name, _ in lane.called()}
    lane.forget_calls()
    collect(remote)
    calls = lane.called()
    assert {gpu for _, gpu in calls} == {"-", *ALL}
    assert [name for name, gpu in calls.elements() if gpu == "-"] == ["nvmlDeviceGetCount_v2"]
    for gpu in ALL:
        assert sum(count for (_, of), count in calls.items() if of == gpu) <= PER_GPU_PER_CYCLE
    assert max(calls[name, "0"] for name, gpu in calls if name != "nvmlDeviceGetClockInfo") == 1


def test_what_a_gpu_does_not_support_is_not_asked_again(lane: Lane) -> None:
    kept = ("gpu.2.uuid", "gpu.2.pci", "gpu.2.temperature")
    lane.node.change({key: None for key in lane.node.driver if key.startswith("gpu.2.") and key not in kept})
    remote = lane.start(slow_interval=Duration(0))
    collect(remote)
    lane.forget_calls()
    collect(remote)
    asked = {name for name, gpu in lane.called() if gpu == "2"}
    looked_up = {"nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetIndex"}
    assert asked == {"nvmlDeviceGetTemperature", *looked_up}


def test_a_gpu_excluded_by_index_is_never_called(lane: Lane) -> None:
    remote = lane.start(device_exclude=("2",), slow_interval=Duration(0))
    for _ in range(2):
        assert by_gpu(collect(remote), "gpu_up") == {"0": 1, "1": 1, "3": 1}
    assert {gpu for _, gpu in lane.called()} == {"-", "0", "1", "3"}
