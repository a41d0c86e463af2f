"""Exact gates on cost: what a cycle does, counted; the same on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent.sim import nvml
from agent.sim.infiniband import write_nd96asr_v4
from tests.perf import gpunode, servers, wholenode
from tests.perf.bench import ALL_TIERS, FAST_INTERVAL_S, InProcess
from tests.perf.counting import CountedCalls
from tests.perf.gpunode import CYCLES_PER_MINUTE, Call, GpuCycles, GpuNode

DEVICES = 9
FAST_FILES = 13  # state, phys_state, and of counters/ what moves at any time
ALL_FILES = 53  # of these devices: counters/, hw_counters/, state, phys_state, rate


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_nd96asr_v4(tmp_path / "sys")
    return tmp_path


def counted(engine: InProcess) -> CountedCalls:
    with CountedCalls() as calls:
        engine.cycle()
    return calls


def test_a_steady_cycle_of_all_tiers_reads_each_file_once_and_looks_up_nothing(tree: Path) -> None:
    engine = InProcess(tree / "sys", tree, *ALL_TIERS)
    calls = counted(engine).as_dict()
    assert calls == {"pread": DEVICES * ALL_FILES + 1, "open": 0, "stat": 0, "listdir": 0, "scandir": 0}


def test_a_steady_cycle_of_the_fast_tier_reads_a_quarter(tree: Path) -> None:
    engine = InProcess(tree / "sys", tree)
    engine.clock.advance(FAST_INTERVAL_S)
    calls = counted(engine).as_dict()
    assert calls == {"pread": DEVICES * FAST_FILES + 1, "open": 0, "stat": 0, "listdir": 0, "scandir": 0}


def test_scrapes_read_nothing_and_render_once_per_change(tree: Path) -> None:
    engine = InProcess(tree / "sys", tree)
    exposition = engine.engine.exposition
    before = exposition.renders
    with CountedCalls() as calls:
        pages = {exposition.page() for _ in range(100)}
    assert calls.as_dict() == dict.fromkeys(calls.as_dict(), 0)
    assert (len(pages), exposition.renders) == (1, before)


def test_more_scrapers_cost_no_more_reads(tree: Path) -> None:
    def reads_in_a_minute(scrapers: int) -> int:
        engine = InProcess(tree / "sys", tree)
        with CountedCalls() as calls:
            for _ in range(4):
                engine.clock.advance(FAST_INTERVAL_S)
                engine.cycle()
                for _ in range(scrapers):
                    engine.engine.exposition.page()
        return calls.reads

    assert reads_in_a_minute(scrapers=50) == reads_in_a_minute(scrapers=0)


# ---- Calls into the driver's library, of a node with 8 GPUs of 12 NVLinks each ----

GPUS, LINKS = 8, 12
COUNT = "nvmlDeviceGetCount_v2"
FAST = {  # of each GPU, at every cycle
    "nvmlDeviceGetTemperature": 1,
    "nvmlDeviceGetUtilizationRates": 1,
    "nvmlDeviceGetMemoryInfo_v2": 1,
    "nvmlDeviceGetClockInfo": 4,
    "nvmlDeviceGetFieldValues": 1,
    "nvmlDeviceGetCurrentClocksEventReasons": 1,
}
SLOW = {  # of each GPU, once a minute
    "nvmlDeviceGetHandleByPciBusId_v2": 1,
    "nvmlDeviceGetIndex": 1,
    "nvmlDeviceGetUUID": 1,
    "nvmlDeviceGetName": 1,
    "nvmlDeviceGetSerial": 1,
    "nvmlDeviceGetMinorNumber": 1,
    "nvmlDeviceGetVbiosVersion": 1,
    "nvmlDeviceGetBrand": 1,
    "nvmlDeviceGetArchitecture": 1,
    "nvmlDeviceGetCudaComputeCapability": 1,
    "nvmlDeviceGetPowerManagementLimitConstraints": 1,
    "nvmlDeviceGetEnforcedPowerLimit": 1,
    "nvmlDeviceGetPowerManagementLimit": 1,
    "nvmlDeviceGetPowerManagementDefaultLimit": 1,
    "nvmlDeviceGetMaxClockInfo": 4,
    "nvmlDeviceGetEccMode": 1,
    "nvmlDeviceGetMigMode": 1,
    "nvmlDeviceGetFieldValues": 1,
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 1,
    "nvmlDeviceGetMaxPcieLinkGeneration": 1,
    "nvmlDeviceGetMaxPcieLinkWidth": 1,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetPerformanceState": 1,
    "nvmlDeviceGetSupportedClocksEventReasons": 1,
    "nvmlDeviceGetNvLinkState": LINKS,
}
START = Counter(
    ("nvmlInitWithFlags", "nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion")
)
HANG_MS = 60_000
SCRAPES = 200


@pytest.fixture
def node(tmp_path: Path) -> GpuNode:
    made = GpuNode(tmp_path)
    assert made.gpus == GPUS
    return made


@pytest.fixture
def gpu(node: GpuNode) -> Iterator[GpuCycles]:
    with gpunode.cycles(node) as driven:
        yield driven


def of_node(calls: Sequence[Call]) -> Counter[str]:
    return Counter(call.function for call in calls if call.gpu is None)


def of_gpus(calls: Sequence[Call]) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    for call in calls:
        if call.gpu is not None:
            found.setdefault(call.gpu, Counter())[call.function] += 1
    return found


def each(*parts: dict[str, int]) -> dict[int, Counter[str]]:
    of_one: Counter[str] = Counter()
    for part in parts:
        of_one.update(part)
    return dict.fromkeys(range(GPUS), of_one)


def test_a_first_cycle_looks_up_each_gpu_once_and_asks_everything_once(gpu: GpuCycles) -> None:
    calls = gpu.cycle()
    assert of_node(calls) == START + Counter([COUNT])
    assert of_gpus(calls) == each(FAST, SLOW)


def test_a_steady_fast_cycle_makes_73_calls_for_8_gpus(gpu: GpuCycles) -> None:
    gpu.cycle()
    calls = gpu.cycle()
    assert of_node(calls) == {COUNT: 1}
    assert of_gpus(calls) == each(FAST)
    assert len(calls) == 73


def test_a_minute_makes_1196_calls_for_8_gpus_one_slow_cycle_of_393_among_them(gpu: GpuCycles) -> None:
    gpu.cycle()
    minute = [gpu.cycle() for _ in range(CYCLES_PER_MINUTE)]
    assert [len(calls) for calls in minute] == [73] * (CYCLES_PER_MINUTE - 1) + [393]
    assert of_node(minute[-1]) == {COUNT: 1}
    assert of_gpus(minute[-1]) == each(FAST, SLOW)


def test_no_cycle_asks_for_the_pcie_throughput_which_takes_20_ms_a_call(gpu: GpuCycles) -> None:
    asked = {call.function for _ in range(CYCLES_PER_MINUTE + 1) for call in gpu.cycle()}
    assert asked == {*START, COUNT, *FAST, *SLOW}
    assert "nvmlDeviceGetPcieThroughput" not in asked


def test_what_is_not_supported_is_asked_once_and_not_again_within_a_minute(node: GpuNode) -> None:
    kept = ("uuid", "pci", "temperature", "field.74")  # so that the GPU, and its batch of fields, do answer
    sick = 3
    taken = [key for key in nvml.read(node.sim.nvml_state).values if key.startswith(f"gpu.{sick}.")]
    node.change({key: None for key in taken if key.removeprefix(f"gpu.{sick}.") not in kept})
    with gpunode.cycles(node) as gpu:
        first = of_gpus(gpu.cycle())
        minute = [of_gpus(gpu.cycle()) for _ in range(CYCLES_PER_MINUTE)]
    alike = {"nvmlDeviceGetClockInfo": 4, "nvmlDeviceGetMaxClockInfo": 4, "nvmlDeviceGetTotalEccErrors": 4}
    several = {**alike, "nvmlDeviceGetFieldValues": 2}  # the two tiers
    assert first[sick] == {function: several.get(function, 1) for function in first[sick]}
    assert len(first[sick]) > len(each(FAST, SLOW)[sick])  # what stands in for the fields was asked as well
    fast = Counter({"nvmlDeviceGetTemperature": 1, "nvmlDeviceGetFieldValues": 1})
    assert [calls[sick] for calls in minute[:-1]] == [fast] * (CYCLES_PER_MINUTE - 1)
    assert minute[-1][sick] == first[sick], "it may have learned it by then"
    del minute[-1][sick]
    assert minute[-1] == {number: calls for number, calls in each(FAST, SLOW).items() if number != sick}


def test_a_hung_gpu_gets_no_call_from_the_process_that_replaced_the_one_it_hung(node: GpuNode) -> None:
    sick = 5
    with gpunode.cycles(node, "collectors.gpu.timeout=1s") as gpu:
        before = gpu.cycle()[0].thread
        node.change({f"gpu.{sick}.hang_ms.*": str(HANG_MS)})
        replaced = gpu.cycle()
        after = [gpu.cycle(), gpu.cycle(), gpu.cycle()]
    assert [call.gpu for call in replaced if call.thread == before][-1] == sick
    assert {call.gpu for call in replaced if call.thread != before} == {None, *range(GPUS)} - {sick}
    assert len({call.thread for call in replaced}) == 2
    for calls in after:
        assert set(of_gpus(calls)) == set(range(GPUS)) - {sick}
        assert len(calls) == 73 - 9


def test_scrapes_cause_no_call_and_the_agent_itself_makes_none(node: GpuNode) -> None:
    settings = (*node.settings, "collectors.gpu.interval=1d")
    with servers.whole_agent(settings, wholenode.EVERYTHING, node.environment(logged=True)) as agent:
        (worker,) = agent.children()
        first = len(node.calls())
        for _ in range(SCRAPES):
            agent.scrape()
        calls = node.calls()
    assert {call.thread for call in calls} == {worker.pid}  # the number of a process is that of its first thread
    assert len(calls) - first <= 73  # the one cycle that is due at midnight
