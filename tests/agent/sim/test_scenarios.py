"""Each scenario's facts, at their time, as the collectors and the logs' readers meet them."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from agent.sim import nvml
from agent.sim.clock import FakeClock
from agent.sim.harness import Probe
from agent.sim.machines import MACHINES
from agent.sim.node import SimNode, UnknownScenarioError
from agent.sim.scenarios import SCENARIOS
from collectors.gpu import Gpu
from collectors.infiniband import InfiniBand
from collectors.kernel import Kernel
from tests.agent.kit import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ND = "ND96asr_v4"


class Fabric:
    """The InfiniBand collector on a node, its clock moved with the node's."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.clock = FakeClock()
        self.probe = Probe(
            InfiniBand, sysfs=node.sys, procfs=node.proc, clock=self.clock, vm_size=node.vm_size, timeout_s=4.0
        )

    def at(self, t_s: float) -> dict[str, Any]:
        self.clock.advance(t_s - self.node.now_s)
        self.node.at(t_s)
        return dict(self.probe.collect().values)

    def close(self) -> None:
        self.probe.collector.close()


@pytest.fixture
def story(tmp_path: Path) -> Callable[..., SimNode]:
    return lambda scenario, sku=ND: SimNode(tmp_path, sku, scenario)


def up(values: dict[str, Any]) -> int:
    count: int = values['infiniband_fabric_ports{status="up"}']
    return count


def port(values: dict[str, Any], name: str, device: str) -> Any:
    return values[f'{name}{{device="{device}",port="1"}}']


def records(node: SimNode) -> list[str]:
    return [line.partition(";")[2] for line in node.kmsg.read_text().splitlines()]


def xids(node: SimNode) -> list[str]:
    return [text.split(", ")[0] for text in records(node) if "Xid" in text]


def state(node: SimNode, key: str) -> str:
    lines = dict(line.split(" = ") for line in node.nvml_state.read_text().splitlines())
    return lines[key]


def job_ends(node: SimNode) -> list[str]:
    return [line[line.index("]") + 2 :] for line in node.slurmd_log.read_text().splitlines() if " job_rc = " in line]


# All of them


@pytest.mark.parametrize("sku", MACHINES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_actions_come_in_the_order_of_their_time(tmp_path: Path, sku: str, scenario: str) -> None:
    try:
        node = SimNode(tmp_path, sku, scenario)
    except UnknownScenarioError:
        return  # the hardware is not there
    actions = list(islice(SCENARIOS[scenario].actions(node), 100))
    assert actions
    assert all(one.at_s <= other.at_s for one, other in pairwise(actions))


@pytest.mark.parametrize("sku", MACHINES)
def test_the_day_goes_on_for_hours_on_every_size(tmp_path: Path, sku: str) -> None:
    node = SimNode(tmp_path, sku, "day")
    node.at(3600)
    ends = job_ends(node)
    assert 15 < len(ends) < 25
    assert ends[0].startswith("[4711.batch] JobId=4711 ")
    succeeded = sum(line.endswith("job_rc = 0") for line in ends)
    assert succeeded > len(ends) / 2
    if node.gpus:
        assert succeeded < len(ends) - 1  # an incident that a job fails of comes again


# The day


def test_in_the_day_a_job_starts_a_link_flaps_an_xid_strikes_and_the_job_ends(story: Callable[..., SimNode]) -> None:
    node = story("day")
    fabric = Fabric(node)
    assert up(fabric.at(4)) == 8
    assert "Launching batch" not in node.slurmd_log.read_text()
    node.at(5)
    assert "Launching batch JobId=4711" in node.slurmd_log.read_text()
    assert up(fabric.at(14.5)) == 8
    assert up(fabric.at(15)) == 7
    values = fabric.at(24)
    assert up(values) == 8
    assert port(values, "node_infiniband_link_downed_total", "mlx5_ib3") == 1
    node.at(31.5)
    assert xids(node) == []
    node.at(32)
    assert "NVRM: Xid (PCI:000c:00:00): 94" in xids(node)
    assert state(node, "gpu.5.remapped_rows") == "0 1 1 0"
    assert job_ends(node) == []
    node.at(50)
    assert [line.endswith("job_rc = 256") for line in job_ends(node)] == [True]
    node.at(58)
    assert (state(node, "gpu.5.remapped_rows"), state(node, "gpu.5.field.230")) == ("0 1 0 0", "ui:0")
    fabric.close()


def test_in_the_day_of_a_fraction_the_job_fails_by_its_own_fault(story: Callable[..., SimNode]) -> None:
    node = story("day", "NC36ds_xl_RTXPRO6000BSE_v6")
    node.at(60)
    assert xids(node) == ["NVRM: Xid (PCI:0002:00:00): 31"]


def test_while_a_link_is_down_the_job_waits(story: Callable[..., SimNode]) -> None:
    """Ranks that wait for others spin: the GPUs look busy and draw little, and no port carries data."""
    node = story("day")
    node.at(14)
    before_mw = int(state(node, "gpu.0.power_mw"))
    node.at(22)
    traffic = node.sys / "class/infiniband/mlx5_ib0/ports/1/counters/port_xmit_data"
    words = traffic.read_text()
    node.at(23)
    assert traffic.read_text() == words
    assert int(state(node, "gpu.0.power_mw")) < before_mw / 2
    assert state(node, "gpu.0.utilization").startswith("100 ")


def test_a_task_that_its_gpu_killed_leaves_the_others_waiting(story: Callable[..., SimNode]) -> None:
    node = story("day")
    node.at(49)
    assert [state(node, f"gpu.{number}.utilization").split()[0] for number in range(8)] == [
        *["100"] * 5,
        "0",
        "100",
        "100",
    ]


# Links and adapters


def test_a_flap_shows_in_every_place_that_tells_of_links(story: Callable[..., SimNode]) -> None:
    node = story("link_flap")
    at_port = node.sys / "class/infiniband/mlx5_ib3/ports/1"
    interface = node.sys / "class/net/ib3"

    def shown() -> dict[str, str]:
        files = [at_port / name for name in ("state", "phys_state", "rate", "counters/link_downed")]
        names = ("operstate", "carrier", "carrier_changes", "carrier_up_count", "carrier_down_count", "speed")
        files += [interface / name for name in names]
        return {file.name: file.read_text() for file in files}

    node.at(9.5)
    before = {
        "state": "4: ACTIVE\n",
        "phys_state": "5: LinkUp\n",
        "rate": "200 Gb/sec (4X HDR)\n",
        "link_downed": "0\n",
        "operstate": "up\n",
        "carrier": "1\n",
        "carrier_changes": "2\n",
        "carrier_up_count": "1\n",
        "carrier_down_count": "1\n",
        "speed": "200000\n",
    }
    assert shown() == before
    node.at(10)
    assert shown() == {
        "state": "1: DOWN\n",
        "phys_state": "2: Polling\n",
        "rate": "10 Gb/sec (4X SDR)\n",
        "link_downed": "1\n",
        "operstate": "down\n",
        "carrier": "0\n",
        "carrier_changes": "3\n",
        "carrier_up_count": "1\n",
        "carrier_down_count": "2\n",
        "speed": "-1\n",
    }
    node.at(22)
    counts = {"link_downed": "1\n", "carrier_changes": "4\n", "carrier_up_count": "2\n", "carrier_down_count": "2\n"}
    assert shown() == {**before, **counts}
    assert [text for text in records(node) if text.startswith("mlx5_core 0104:00:00.0")] == [
        "mlx5_core 0104:00:00.0: Port module event: module 0, Cable unplugged",
        "mlx5_core 0104:00:00.0: Port module event: module 0, Cable plugged",
    ]


def test_a_hanging_adapter_costs_itself_and_returns(story: Callable[..., SimNode]) -> None:
    node = story("hca_hang")
    fabric = Fabric(node)
    stalled = {port.device: f'infiniband_collect_stalled{{device="{port.device}"}}' for port in node.ports}
    assert {fabric.at(9)[series] for series in stalled.values()} == {0}
    node.at(10)
    fabric.probe.open()  # the agent looks for new files now and then
    values = fabric.at(11)
    assert [device for device, series in stalled.items() if values[series]] == ["mlx5_ib4"]
    assert port(values, "node_infiniband_port_data_transmitted_bytes_total", "mlx5_ib3") > 0
    fabric.at(69)
    assert node.ports[4].hung
    fabric.at(130)  # past the time for which it is left alone

    def is_back() -> bool:
        values = fabric.probe.collect().values
        return not any(values[series] for series in stalled.values())

    until(is_back, "what was stuck has returned")
    assert fabric.probe.collect().failures == []
    fabric.close()


def test_an_adapter_that_was_reset_counts_from_0(story: Callable[..., SimNode]) -> None:
    node = story("counter_reset")
    fabric = Fabric(node)
    name = "node_infiniband_port_data_transmitted_bytes_total"
    before = fabric.at(19.5)
    after = fabric.at(20)
    assert port(before, name, "mlx5_ib2") > 1e14
    assert port(after, name, "mlx5_ib2") == 0
    assert port(after, name, "mlx5_ib1") > port(before, name, "mlx5_ib1")
    assert fabric.probe.collect().failures == []
    fabric.close()


def test_a_driver_that_was_loaded_anew_counts_from_0(story: Callable[..., SimNode]) -> None:
    node = story("counter_reset")
    node.at(25.5)
    assert int(state(node, "gpu.0.energy_mj")) > 10**10
    node.at(26)
    assert [state(node, f"gpu.{number}.energy_mj") for number in range(8)] == ["0"] * 8
    assert records(node)[-1].startswith("NVRM: loading NVIDIA UNIX Open Kernel Module")


# GPUs


@pytest.mark.usefixtures("binding")
def test_the_kernel_log_and_the_gpus_tell_of_the_same_one(story: Callable[..., SimNode]) -> None:
    node = story("gpu_lost")
    nvml.install(node.nvml_state)
    gpu = Probe(Gpu, sysfs=node.sys, procfs=node.proc, devfs=node.dev, vm_size=node.vm_size)
    gpu.collect()
    node.at(20)
    lost = gpu.collect()
    kernel = Probe(Kernel, procfs=node.proc, kmsg=node.kmsg, devices=lost.devices).collect()
    gpu.collector.close()
    labels = f'gpu="2",uuid="{node.gpus[2].uuid}"'
    assert lost.values[f"gpu_up{{{labels}}}"] == 0
    assert lost.values[f'gpu_error{{{labels},reason="gpu_lost"}}'] == 1
    assert kernel.values[f'gpu_xid_errors_total{{{labels},xid="79",severity="critical"}}'] == 1
    assert [event.kind for event in lost.events + kernel.events] == ["gpu_lost", "gpu_xid"]


@pytest.mark.usefixtures("binding")
def test_a_lost_gpu_is_lost_alone(story: Callable[..., SimNode]) -> None:
    node = story("gpu_lost")
    nvml.install(node.nvml_state)
    node.at(19.5)
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(8)]
    node.at(20)
    for index, handle in enumerate(handles):
        if index == 2:
            with pytest.raises(pynvml.NVMLError_GpuIsLost):
                pynvml.nvmlDeviceGetTemperature(handle, 0)
        else:
            pynvml.nvmlDeviceGetTemperature(handle, 0)
    assert xids(node) == ["NVRM: Xid (PCI:0003:00:00): 79"]
    assert records(node)[-1] == "NVRM: GPU 0003:00:00.0: GPU has fallen off the bus."
    node.at(41)
    assert [line.endswith("job_rc = 256") for line in job_ends(node)] == [True]


def test_a_fault_of_the_job_and_an_error_of_the_memory_are_told_by_their_codes(story: Callable[..., SimNode]) -> None:
    node = story("xid")
    node.at(10)
    assert xids(node) == ["NVRM: Xid (PCI:0002:00:00): 31"]
    assert state(node, "gpu.1.field.230") == "ui:0"
    node.at(30)
    assert xids(node)[1:] == [f"NVRM: Xid (PCI:000c:00:00): {code}" for code in (63, 94, 154)]
    assert (state(node, "gpu.5.field.4"), state(node, "gpu.5.field.6")) == ("ull:1", "ull:1")
    assert (state(node, "gpu.5.field.143"), state(node, "gpu.5.field.144")) == ("ui:1", "ui:1")
    assert state(node, "gpu.5.ecc_total.uncorrected.volatile") == "1"
    node.at(120)
    assert (state(node, "gpu.5.field.4"), state(node, "gpu.5.field.6")) == ("ull:0", "ull:1")
    assert (state(node, "gpu.5.field.143"), state(node, "gpu.5.field.144")) == ("ui:1", "ui:0")


@pytest.mark.usefixtures("binding")
def test_without_a_driver_the_gpus_are_on_the_bus_and_nowhere_else(story: Callable[..., SimNode]) -> None:
    node = story("no_gpu_driver")
    functions = list((node.sys / "bus/pci/devices").iterdir())
    gpus = [path for path in functions if (path / "vendor").read_text() == "0x10de\n"]
    assert len(gpus) == 8
    assert not any((path / "driver").exists() for path in gpus)
    assert not (node.proc / "driver").exists()
    assert not node.dev.exists()
    assert not any("NVRM" in text for text in records(node))
    nvml.install(node.nvml_state)
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()
