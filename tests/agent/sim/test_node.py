"""A simulated node looks like hardware to the collectors, and the same each time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from agent.api import NotPresent
from agent.sim import nvml
from agent.sim.clock import FakeClock
from agent.sim.harness import Probe
from agent.sim.host import SimInterface
from agent.sim.machines import MACHINES, UnknownSizeError
from agent.sim.node import SimNode, UnknownScenarioError
from agent.sim.scenarios import SCENARIOS
from collectors.gpu import Gpu
from collectors.host import Host
from collectors.infiniband import InfiniBand

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ND = "ND96asr_v4"
QUARTER = "NC36ds_xl_RTXPRO6000BSE_v6"
WITH_GPUS = [name for name, machine in MACHINES.items() if machine.gpu is not None]
WHOLE_GPUS = [name for name in WITH_GPUS if name != QUARTER]
WITH_FABRIC = [ND, "ND96isr_H200_v5", "ND128isr_GB300_v6", "HB176rs_v4"]
RECORD = re.compile(r"(\d+),(\d+),(\d+),-;[ -~]+")
LINE = re.compile(r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\] .+")
TRAFFIC = "counters/port_xmit_data"


def files(root: Path) -> dict[str, bytes]:
    """Return every file below, by its path; links are not followed."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def number(node: SimNode, file: str, device: str = "mlx5_ib0") -> int:
    return int((node.sys / "class/infiniband" / device / "ports/1" / file).read_text())


def state(node: SimNode, key: str, gpu: int = 0) -> list[float]:
    """Return the numbers of one key of a GPU's NVML state."""
    return [float(word) for word in facts(node)[f"gpu.{gpu}.{key}"].rpartition(":")[2].split()]


def facts(node: SimNode) -> dict[str, str]:
    lines = node.nvml_state.read_text().splitlines()
    return {key: value for key, _, value in (line.partition(" = ") for line in lines)}


def bytes_per_s(node: SimNode, seconds: float = 5.0) -> float:
    before = number(node, TRAFFIC)
    node.advance(seconds)
    return (number(node, TRAFFIC) - before) * 4 / seconds


def collect(node: SimNode) -> Iterator[tuple[str, Any]]:
    for collector in (InfiniBand, node.host.answering(Host)):
        probe = Probe(collector, sysfs=node.sys, procfs=node.proc, vm_size=node.vm_size, clock=FakeClock())
        try:
            yield collector.name, probe.collect()
        except NotPresent:
            yield collector.name, None
        finally:
            probe.collector.close()


# The same each time


@pytest.mark.parametrize("sku", MACHINES)
def test_two_runs_give_the_same_files_however_time_is_cut(tmp_path: Path, sku: str) -> None:
    one, other = SimNode(tmp_path / "one", sku, "day"), SimNode(tmp_path / "other", sku, "day")
    one.at(70)
    for _ in range(40):
        other.advance(1.75)
    assert other.now_s < one.now_s  # each call goes to the last whole step
    other.at(70)
    assert files(tmp_path / "one") == files(tmp_path / "other")


def test_another_seed_is_another_node_of_the_same_size(tmp_path: Path) -> None:
    nodes = [SimNode(tmp_path / str(seed), ND, seed=seed) for seed in (0, 1)]
    assert {gpu.uuid for gpu in nodes[0].gpus}.isdisjoint(gpu.uuid for gpu in nodes[1].gpus)
    assert files(tmp_path / "0").keys() == files(tmp_path / "1").keys()


def test_devices_of_one_node_are_told_apart(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND)
    for names in (
        [gpu.uuid for gpu in node.gpus],
        [gpu.serial for gpu in node.gpus],
        [gpu.address for gpu in node.gpus],
        [(node.sys / f"class/infiniband/{port.device}/node_guid").read_text() for port in node.ports],
    ):
        assert len(set(names)) == 8


def test_time_does_not_go_back(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND)
    node.at(20)
    before = files(tmp_path)
    node.at(10)
    assert node.now_s == 20
    assert files(tmp_path) == before


def test_case_and_prefix_of_the_size_do_not_matter(tmp_path: Path) -> None:
    assert SimNode(tmp_path, "standard_nd96ASR_v4").vm_size.name == ND


@pytest.mark.parametrize("sku", ["ND96amsr_A100_v4", "Standard_E4s_v5", ""])
def test_an_unknown_size_is_refused_with_the_known_ones(tmp_path: Path, sku: str) -> None:
    with pytest.raises(UnknownSizeError, match=rf"{sku!r}.*{ND}.*{QUARTER}"):
        SimNode(tmp_path, sku)


def test_an_unknown_scenario_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownScenarioError, match=r"'flap'.*day.*link_flap"):
        SimNode(tmp_path, ND, "flap")


@pytest.mark.parametrize(
    ("sku", "scenario", "lacking"),
    [("HB176rs_v4", "gpu_lost", "GPUs"), ("NC80adis_H100_v5", "link_flap", "InfiniBand ports")],
)
def test_a_scenario_that_the_hardware_is_not_there_for_is_refused(
    tmp_path: Path, sku: str, scenario: str, lacking: str
) -> None:
    with pytest.raises(UnknownScenarioError, match=f"{scenario}.*{lacking}.*{sku}"):
        SimNode(tmp_path, sku, scenario)


# As the kernel shows it


@pytest.mark.parametrize("sku", MACHINES)
@pytest.mark.parametrize("at_s", [0, 60])
def test_the_collectors_find_every_size_whole(tmp_path: Path, sku: str, at_s: float) -> None:
    node = SimNode(tmp_path, sku)
    node.at(at_s)
    results = dict(collect(node))
    assert results["host"].failures == []
    if results["infiniband"] is None:
        assert sku == QUARTER  # the only one that has not even accelerated networking's adapter
        return
    values = results["infiniband"].values
    ports = {
        status: values[f'infiniband_fabric_ports{{status="{status}"}}'] for status in ("expected", "present", "up")
    }
    assert results["infiniband"].failures == []
    assert ports == dict.fromkeys(ports, node.vm_size.fabric_ports)
    rates = [
        value for series, value in values.items() if series.startswith("node_infiniband_rate_bytes") and "_ib" in series
    ]
    assert rates == [(node.vm_size.fabric_rate_bps or 0) / 8] * len(node.ports)


@pytest.mark.usefixtures("binding")
@pytest.mark.parametrize("sku", MACHINES)
def test_the_gpu_collector_finds_every_size_whole(tmp_path: Path, sku: str) -> None:
    node = SimNode(tmp_path, sku)
    node.at(60)
    nvml.install(node.nvml_state)
    probe = Probe(Gpu, sysfs=node.sys, procfs=node.proc, devfs=node.dev, vm_size=node.vm_size, clock=FakeClock())
    if not node.gpus:
        with pytest.raises(NotPresent):
            probe.open()
        return
    result = probe.collect()
    probe.collector.close()
    counts = {series: value for series, value in result.values.items() if series.startswith("gpu_count{")}
    assert result.failures == []
    assert list(counts.values()) == [node.vm_size.gpu_count] * 4  # by NVML, /proc, /dev and PCI alike
    up = [value for series, value in result.values.items() if series.startswith("gpu_up{")]
    invalid = [value for series, value in result.values.items() if series.startswith("gpu_invalid_samples_total{")]
    assert (up, set(invalid)) == ([1] * len(node.gpus), {0})
    assert [device.address for device in result.devices] == [gpu.address for gpu in node.gpus]


@pytest.mark.parametrize("sku", WITH_GPUS)
def test_gpus_are_on_the_bus_under_their_driver(tmp_path: Path, sku: str) -> None:
    node = SimNode(tmp_path, sku)
    functions = {
        path.name: {name: (path / name).read_text() for name in ("vendor", "class")}
        | {"driver": (path / "driver").readlink().name}
        for path in (node.sys / "bus/pci/devices").iterdir()
        if (path / "vendor").read_text() == "0x10de\n"
    }
    gpu = {"vendor": "0x10de\n", "class": "0x030200\n", "driver": "nvidia"}
    assert functions == dict.fromkeys([gpu.address for gpu in node.gpus], gpu)
    assert len(functions) == node.vm_size.gpu_count
    assert {path.name for path in node.dev.iterdir()} == {
        "nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(len(node.gpus)))
    }  # fmt: skip


def test_the_driver_describes_each_gpu(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND)
    text = (node.proc / "driver/nvidia/gpus/000b:00:00.0/information").read_text()
    fields = {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    wanted = {"Model": "NVIDIA A100-SXM4-40GB", "GPU UUID": node.gpus[4].uuid, "Device Minor": "4"}
    assert fields.items() >= wanted.items()
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", fields["GPU UUID"])
    version = (node.proc / "driver/nvidia/version").read_text()
    assert version.startswith("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build")


def test_files_of_a_port_end_in_a_newline_and_are_written_in_place(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND)
    directory = node.sys / "class/infiniband/mlx5_ib3/ports/1"
    inodes = {path: path.stat().st_ino for path in directory.rglob("*") if path.is_file()}
    for event in (node.lose_link, node.reset_adapter):
        node.advance(5)
        event(node.ports[3])
        node.write()
        assert {path: path.stat().st_ino for path in directory.rglob("*") if path.is_file()} == inodes
        assert all(re.fullmatch(r"[^\n]+\n", path.read_text()) for path in inodes)
        assert all(re.fullmatch(r"\d+\n", path.read_text()) for path in (directory / "counters").iterdir())


def test_accelerated_networking_is_the_fast_path_of_the_synthetic_interface(tmp_path: Path) -> None:
    netdev = SimNode(tmp_path, ND).sys / "class/net/enP46503s1"
    assert (netdev / "master").resolve() == (tmp_path / "sys/class/net/eth0").resolve()
    assert (netdev / "master/device/driver").readlink().name == "hv_netvsc"
    assert (netdev / "device").resolve().name == "b5a7:00:02.0"


def test_a_carrier_that_is_lost_twice_has_changed_once() -> None:
    interface = SimInterface(carrier_changes=2)
    for up in (False, False, True, True):
        interface.change_carrier(up=up)
    assert (interface.up, interface.carrier_changes) == (True, 4)


def test_a_node_without_gpus_shows_no_trace_of_a_driver(tmp_path: Path) -> None:
    node = SimNode(tmp_path, "HB176rs_v4")
    assert not (node.proc / "driver").exists()
    assert not node.dev.exists()


# As NVML tells it


@pytest.mark.usefixtures("binding")
@pytest.mark.parametrize("sku", WITH_GPUS)
def test_nvml_tells_what_the_size_promises(tmp_path: Path, sku: str) -> None:
    node = SimNode(tmp_path, sku)
    nvml.install(node.nvml_state)
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == node.vm_size.gpu_count
    for index, gpu in enumerate(node.gpus):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        assert pynvml.nvmlDeviceGetUUID(handle) == gpu.uuid
        assert (
            pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).total == node.vm_size.gpu_memory_bytes
        )
        assert pynvml.nvmlDeviceGetPciInfo(handle).busId.lower() == f"0000{gpu.address}"
        assert (node.vm_size.gpu_model or "").split()[0] in pynvml.nvmlDeviceGetName(handle)
    pynvml.nvmlShutdown()


@pytest.mark.usefixtures("binding")
@pytest.mark.parametrize("sku", WHOLE_GPUS)
def test_a_whole_gpu_tells_everything(tmp_path: Path, sku: str) -> None:
    node = SimNode(tmp_path, sku)
    nvml.install(node.nvml_state)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for call in (
        "PowerUsage",
        "TotalEnergyConsumption",
        "CurrentClocksEventReasons",
        "EnforcedPowerLimit",
        "RemappedRows",
    ):
        getattr(pynvml, f"nvmlDeviceGet{call}")(handle)
    links = node.vm_size.nvlinks_per_gpu or node.gpus[0].nvlinks
    assert [pynvml.nvmlDeviceGetNvLinkState(handle, link) for link in range(links)] == [1] * links
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetNvLinkState(handle, links)
    wanted: list[Any] = [*range(74, 80), 82, 83, 94, 185, 186, 91, *range(142, 146), 230, *range(3, 7)]
    answers = pynvml.nvmlDeviceGetFieldValues(handle, wanted)
    assert [answer.nvmlReturn for answer in answers] == [0] * len(wanted)
    together = pynvml.nvmlDeviceGetFieldValues(handle, [(number, 0xFFFFFFFF) for number in range(138, 142)])
    refused = pynvml.NVML_ERROR_NOT_SUPPORTED if "GB300" in sku else 0
    assert [answer.nvmlReturn for answer in together] == [refused] * 4


@pytest.mark.usefixtures("binding")
def test_a_fraction_of_a_gpu_tells_no_more_than_its_host_lets_it(tmp_path: Path) -> None:
    node = SimNode(tmp_path, QUARTER)
    nvml.install(node.nvml_state)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetVirtualizationMode(handle) == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
    for call in ("PowerUsage", "TotalEnergyConsumption", "UtilizationRates", "TotalEccErrors", "RemappedRows"):
        arguments = (0, 0) if call == "TotalEccErrors" else ()
        with pytest.raises(pynvml.NVMLError_NotSupported):
            getattr(pynvml, f"nvmlDeviceGet{call}")(handle, *arguments)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetNvLinkState(handle, 0)


# Values that hardware could have


@pytest.mark.parametrize("sku", WHOLE_GPUS)
def test_an_idle_gpu_draws_little_and_a_busy_one_nearly_its_limit(tmp_path: Path, sku: str) -> None:
    node = SimNode(tmp_path, sku)
    model = node.gpus[0].model
    node.at(4)
    assert state(node, "power_mw") == [pytest.approx(model.power_idle * 1000, rel=0.05)]
    assert state(node, "utilization") == [0, 0]
    assert state(node, "clock_mhz.sm") == [model.clock_idle]
    assert 25 <= state(node, "temperature")[0] <= 42
    node.at(88)
    assert 0.8 * model.power_limit < state(node, "power_mw")[0] / 1000 <= model.power_limit
    assert state(node, "utilization")[0] >= 95
    assert 50 <= state(node, "temperature")[0] <= 75
    total, reserved, free, used = state(node, "memory")
    assert total == reserved + free + used
    assert 0.8 < used / total < 0.9


def test_a_gpu_warms_after_its_power_rises(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND)
    node.at(14)
    warm, power = state(node, "temperature")[0], state(node, "power_mw")[0]
    node.at(60)
    assert power > 0.8 * state(node, "power_mw")[0]
    assert state(node, "temperature")[0] > warm + 10


def test_energy_is_the_power_over_time(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND)
    before_mj, sum_mw = state(node, "energy_mj")[0], 0.0
    for _ in range(120):
        node.advance(0.5)
        sum_mw += state(node, "power_mw")[0] * 0.5
    assert state(node, "energy_mj")[0] - before_mj == pytest.approx(sum_mw, rel=0.001)
    assert state(node, "energy_mj") == state(node, "field.83")


@pytest.mark.parametrize("sku", WITH_FABRIC)
def test_traffic_follows_the_job_within_the_rate_of_the_link(tmp_path: Path, sku: str) -> None:
    node = SimNode(tmp_path, sku)
    assert bytes_per_s(node, 4) == 0
    node.at(40)
    limit = (node.vm_size.fabric_rate_bps or 0) / 8
    assert 0.4 * limit < bytes_per_s(node) < 0.8 * limit


def test_the_host_works_when_a_job_runs(tmp_path: Path) -> None:
    node = SimNode(tmp_path, "HB176rs_v4")

    def busy_share() -> float:
        def ticks() -> list[int]:
            return [int(word) for word in (node.proc / "stat").read_text().splitlines()[0].split()[1:9]]

        before = ticks()
        node.advance(4)
        spent = [now - then for now, then in zip(ticks(), before, strict=True)]
        return 1 - (spent[3] + spent[4]) / sum(spent)

    assert busy_share() < 0.1
    node.at(40)
    assert busy_share() > 0.85


# Logs


def test_the_kernel_log_is_one_ring_of_records(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND, "day")
    node.at(600)
    records = [RECORD.fullmatch(line) for line in node.kmsg.read_text().splitlines()]
    assert None not in records
    numbers = [[int(group) for group in record.groups()] for record in records if record]
    assert [sequence for _, sequence, _ in numbers] == list(range(len(numbers)))
    assert all(priority < 8 for priority, _, _ in numbers)  # the facility is the kernel's
    times = [time_us for _, _, time_us in numbers]
    assert times == sorted(times)
    assert times[-1] <= float((node.proc / "uptime").read_text().split()[0]) * 1e6


def test_logs_are_appended_to(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND, "day")
    node.at(33)
    before = [(path, path.stat().st_ino, path.read_bytes()) for path in (node.kmsg, node.slurmd_log)]
    node.at(60)
    for path, inode, content in before:
        assert path.stat().st_ino == inode
        assert path.read_bytes().startswith(content)


def test_slurmd_logs_the_job_with_the_time_it_had(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND, "healthy")
    node.at(151)
    lines = node.slurmd_log.read_text().splitlines()
    assert all(map(LINE.fullmatch, lines))
    assert "[2027-01-15T08:00:05.000] Launching batch JobId=4711 " in "\n".join(lines)
    assert any(
        re.match(r"\[2027-01-15T08:02:30\.000\] \[4711\.batch\] JobId=4711 .* job_rc = 0$", line) for line in lines
    )


def test_a_faster_node_keeps_its_log_at_the_time_of_the_wall(tmp_path: Path) -> None:
    node = SimNode(tmp_path, ND, "healthy", seconds_per_s=5)
    node.at(151)
    assert "[2027-01-15T08:00:01.000] Launching batch" in node.slurmd_log.read_text()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_processes_of_a_job_go_with_it(tmp_path: Path, scenario: str) -> None:
    node = SimNode(tmp_path, ND, scenario)
    before = set(node.host.processes)
    node.at(160)
    node.end_job()
    assert set(node.host.processes) == before
