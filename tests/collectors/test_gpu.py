"""Claims about the gpu collector on GPUs that answer: what it shows, of which, under which names."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from agent.api import Device, Kind, NotPresent, VmSize
from agent.sim.harness import Probe
from collectors.gpu import Gpu, Options, metrics
from tests.collectors.gpunode import NO_LIBRARY, GpuNode, by_gpu, labels_of, names_of, select, untouched_binding, value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from agent.api import Value

MIB = 1 << 20
REASONS = (
    *("gpu_idle", "applications_clocks", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal"),
    *("hw_power_brake", "display_clock"),
)
ACTIONS = (
    *("none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset"),
    "system_reboot",
)
UNTHROTTLED = ("thermal", "sync_boost", "board_limit", "low_utilization", "reliability")
JUDGED = (
    *("utilization_ratio", "memory_utilization_ratio", "memory_total_bytes", "memory_used_bytes"),
    *("temperature_celsius", "power_watts"),
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GpuNode]:
    with untouched_binding():
        made = GpuNode(tmp_path, gpus=2)
        made.install()
        yield made


def test_a_healthy_gpu_shows_every_value_in_base_units(node: GpuNode) -> None:
    result = node.probe().collect()
    assert result.failures == []
    shown = {
        series.replace(f'gpu="1",uuid="{node.uuid(1)}"', "").replace("{,", "{").replace("{}", ""): number
        for series, number in result.values.items()
        if labels_of(series).get("gpu") == "1"
    }
    moved = 5_001_000_000 * 1024
    identity = (
        'name="NVIDIA A100-SXM4-40GB",pci_bus_id="0002:00:00.0",serial="1560821000001",minor="1",'
        'vbios_version="92.00.45.00.03",brand="nvidia",architecture="ampere",compute_capability="8.0"'
    )
    assert shown == {
        "gpu_up": 1,
        f"gpu_info{{{identity}}}": 1,
        "gpu_persistence_mode_enabled": 1,
        "gpu_performance_state": 0,
        "gpu_utilization_ratio": 0.97,
        "gpu_memory_utilization_ratio": 0.45,
        "gpu_memory_total_bytes": 40960 * MIB,
        "gpu_memory_used_bytes": 30208 * MIB,
        "gpu_memory_free_bytes": (40960 - 634 - 30208) * MIB,
        "gpu_memory_reserved_bytes": 634 * MIB,
        'gpu_temperature_celsius{sensor="gpu"}': 46,
        'gpu_temperature_celsius{sensor="memory"}': 53,
        'gpu_power_watts{scope="gpu"}': 316.0,
        "gpu_power_average_watts": 316.0,
        **{f'gpu_power_limit_watts{{kind="{kind}"}}': 400.0 for kind in ("enforced", "requested", "default", "max")},
        'gpu_power_limit_watts{kind="min"}': 100.0,
        "gpu_energy_joules_total": 86_401_000.0,
        'gpu_clock_hertz{domain="graphics"}': 1_395_000_000,
        'gpu_clock_hertz{domain="sm"}': 1_395_000_000,
        'gpu_clock_hertz{domain="memory"}': 1_215_000_000,
        'gpu_clock_hertz{domain="video"}': 1_275_000_000,
        'gpu_clock_max_hertz{domain="graphics"}': 1_410_000_000,
        'gpu_clock_max_hertz{domain="sm"}': 1_410_000_000,
        'gpu_clock_max_hertz{domain="memory"}': 1_215_000_000,
        'gpu_clock_max_hertz{domain="video"}': 1_290_000_000,
        **{f'gpu_clock_event_active{{reason="{reason}"}}': int(reason == "sw_power_cap") for reason in REASONS},
        'gpu_throttle_seconds_total{policy="power"}': 120.0,
        **{f'gpu_throttle_seconds_total{{policy="{policy}"}}': 0.0 for policy in UNTHROTTLED},
        **{f'gpu_ecc_mode_enabled{{state="{state}"}}': 1 for state in ("current", "pending")},
        **{
            f'gpu_ecc_errors_all_total{{type="{kind}",lifetime="{lifetime}"}}': 0
            for kind in ("corrected", "uncorrected")
            for lifetime in ("volatile", "aggregate")
        },
        **{f'gpu_remapped_rows_total{{cause="{cause}"}}': 0 for cause in ("correctable", "uncorrectable")},
        "gpu_row_remap_pending": 0,
        "gpu_row_remap_failure": 0,
        **{f'gpu_recovery_action{{action="{action}"}}': int(action == "none") for action in ACTIONS},
        "gpu_pcie_link_generation": 4,
        "gpu_pcie_link_width": 16,
        "gpu_pcie_link_max_generation": 4,
        "gpu_pcie_link_max_width": 16,
        "gpu_pcie_replays_total": 0,
        "gpu_nvlink_links": 12,
        "gpu_nvlink_active_links": 12,
        'gpu_nvlink_bytes_total{direction="tx",kind="data"}': moved,
        'gpu_nvlink_bytes_total{direction="rx",kind="data"}': 2 * moved,
        'gpu_nvlink_bytes_total{direction="tx",kind="raw"}': 3 * moved,
        'gpu_nvlink_bytes_total{direction="rx",kind="raw"}': 4 * moved,
        **{f'gpu_invalid_samples_total{{metric="gpu_{name}"}}': 0 for name in JUDGED},
    }


def test_integers_of_64_bits_stay_exact(node: GpuNode) -> None:
    node.change({"gpu.0.field.138.4294967295": f"ull:{2**60 + 1}", "gpu.0.field.5": f"ull:{2**60 + 1}"})
    result = node.probe().collect()
    assert value(result, "gpu_nvlink_bytes_total", gpu="0", direction="tx", kind="data") == (2**60 + 1) * 1024
    assert value(result, "gpu_ecc_errors_all_total", gpu="0", type="corrected", lifetime="aggregate") == 2**60 + 1


def test_ecc_errors_and_remaps_each_land_where_they_belong(node: GpuNode) -> None:
    node.change({f"gpu.0.field.{number}": f"ull:{number}" for number in (3, 4, 5, 6)})
    node.change({"gpu.0.field.142": "ui:7", "gpu.0.field.143": "ui:8", "gpu.0.field.144": "ui:1"})
    node.change({"gpu.0.field.230": "ui:4"})
    result = node.probe().collect()
    shown = select(result, "gpu_ecc_errors_all_total", gpu="0")
    ecc = {(labels_of(s)["type"], labels_of(s)["lifetime"]): v for s, v in shown.items()}
    assert ecc == {
        ("corrected", "volatile"): 3,
        ("uncorrected", "volatile"): 4,
        ("corrected", "aggregate"): 5,
        ("uncorrected", "aggregate"): 6,
    }
    assert value(result, "gpu_remapped_rows_total", gpu="0", cause="correctable") == 7
    assert value(result, "gpu_remapped_rows_total", gpu="0", cause="uncorrectable") == 8
    assert value(result, "gpu_row_remap_pending", gpu="0") == 1
    assert value(result, "gpu_row_remap_failure", gpu="0") == 0
    active = {labels_of(s)["action"] for s, v in select(result, "gpu_recovery_action", gpu="0").items() if v}
    assert active == {"drain_and_reset"}


def test_a_recovery_action_that_is_newer_than_the_agent_has_a_series_of_its_own(node: GpuNode) -> None:
    node.change({"gpu.0.field.230": "ui:9"})
    active = [s for s, v in select(node.probe().collect(), "gpu_recovery_action", gpu="0").items() if v]
    assert [labels_of(series)["action"] for series in active] == ["action_9"]


def test_the_node_is_told_with_versions_and_counts(node: GpuNode) -> None:
    node.load_module()
    node.plug_in()
    result = node.probe().collect()
    counts = {labels_of(s)["source"]: v for s, v in select(result, "gpu_count").items()}
    assert counts == {"nvml": 2, "proc": 2, "dev": 2, "pci": 2}
    assert value(result, "gpu_expected_count") == 2
    assert value(result, "gpu_nvml_up") == 1
    assert value(result, "gpu_nvml_return_code") == 0
    versions = {"driver_version": "570.133.20", "cuda_version": "12.8", "nvml_version": "12.570.133.20"}
    assert value(result, "gpu_driver_info", **versions, kernel_module_version="570.133.20") == 1


def counts_of(node: GpuNode, probe: Probe | None = None) -> dict[str, Value]:
    result = (probe or node.probe()).collect()
    return {labels_of(series)["source"]: number for series, number in select(result, "gpu_count").items()}


def test_a_source_that_is_not_there_counts_none_unless_nvml_shows_that_it_cannot_see(node: GpuNode) -> None:
    assert counts_of(node) == {"nvml": 2}
    (node.proc / "driver/nvidia/gpus").mkdir(parents=True)
    node.dev.mkdir()
    assert counts_of(node) == {"nvml": 2, "proc": 0, "dev": 0}
    node.change({"init.return": 9})
    node.dev.rmdir()
    assert counts_of(node) == {"proc": 0, "dev": 0}


def test_each_gpu_tells_its_names(node: GpuNode) -> None:
    assert node.probe().collect().devices == [
        Device("gpu", "0", node.uuid(0), "0001:00:00.0"),
        Device("gpu", "1", node.uuid(1), "0002:00:00.0"),
    ]


def test_found_says_how_many_and_which_driver(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    assert probe.collector.found() == "2 GPUs, driver 570.133.20"
    node.change({"gpu.1.return.*": 15})
    node.tick(probe)
    assert probe.collector.found() == "1 of 2 GPUs, driver 570.133.20"
    probe = node.probe({"expected_count": 8})
    probe.collect()
    assert probe.collector.found() == "1 of 8 GPUs, driver 570.133.20"


def test_every_metric_is_declared_by_the_rules_of_its_kind() -> None:
    assert len(metrics.METRICS) == 40
    for metric in metrics.METRICS:
        assert metric.source, metric.name
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
    assert Gpu.metrics is metrics.METRICS


# What a GPU does not have


def test_a_gpu_that_supports_next_to_nothing_is_up_and_shows_no_value_for_the_rest(node: GpuNode) -> None:
    kept = ("gpu.1.uuid", "gpu.1.pci", "gpu.1.name", "gpu.1.memory")
    node.change({key: None for key in node.driver if key.startswith("gpu.1.") and key not in kept})
    result = node.probe().collect()
    memory = {f"gpu_memory_{part}_bytes" for part in ("total", "used", "free", "reserved")}
    assert names_of(result, "1") == {"gpu_up", "gpu_info", "gpu_invalid_samples_total"} | memory
    assert value(result, "gpu_up", gpu="1") == 1
    assert value(result, "gpu_info", gpu="1", name="NVIDIA A100-SXM4-40GB", serial="", brand="") == 1
    assert result.failures == []


def test_what_is_not_supported_is_asked_again_after_a_minute_and_logged_once(
    node: GpuNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.change({"gpu.0.clock_mhz.video": None, "gpu.0.field.82": None, "gpu.0.ecc_mode": None})
    probe = node.probe()
    probe.collect()
    told = [record.getMessage() for record in caplog.records if "GPU 0 does not support" in record.getMessage()]
    assert len(told) == 1
    for name in ("video clock", "memory temperature", "ECC mode"):
        assert name in told[0]
    node.change({"gpu.0.clock_mhz.video": 1000, "gpu.0.field.82": "ui:50", "gpu.0.ecc_mode": "1 0"})
    for _ in range(11):
        result = node.tick(probe)
    assert value(result, "gpu_clock_hertz", gpu="0", domain="video") is None
    assert value(result, "gpu_temperature_celsius", gpu="0", sensor="memory") is None
    assert value(result, "gpu_ecc_mode_enabled", gpu="0", state="current") is None
    result = node.tick(probe)
    assert value(result, "gpu_clock_hertz", gpu="0", domain="video") == 1_000_000_000
    assert value(result, "gpu_temperature_celsius", gpu="0", sensor="memory") == 50
    assert value(result, "gpu_ecc_mode_enabled", gpu="0", state="pending") == 0
    assert len([1 for record in caplog.records if "GPU 0 does not support" in record.getMessage()]) == 1


def test_sensors_that_read_0_because_they_do_not_exist_are_absent_and_not_invalid(node: GpuNode) -> None:
    node.change({"gpu.0.field.82": "ui:0", "gpu.0.field.186.1": "ui:0", "gpu.0.field.186.2": "ui:0"})
    result = node.probe().collect()
    assert set(by_gpu(result, "gpu_temperature_celsius", sensor="memory")) == {"1"}
    assert select(result, "gpu_power_watts", scope="module") == {}
    assert not any(select(result, "gpu_invalid_samples_total").values())


def test_module_and_memory_power_are_scopes_of_their_own(node: GpuNode) -> None:
    node.change({"gpu.0.field.186.1": "ui:1800000", "gpu.0.field.186.2": "ui:90000"})
    result = node.probe().collect()
    power = {labels_of(s)["scope"]: v for s, v in select(result, "gpu_power_watts", gpu="0").items()}
    assert power == {"gpu": 315.0, "module": 1800.0, "memory": 90.0}


def test_memory_of_the_first_version_leaves_reserved_absent(node: GpuNode) -> None:
    node.change({"gpu.0.return.nvmlDeviceGetMemoryInfo_v2": 13})
    result = node.probe().collect()
    assert value(result, "gpu_memory_used_bytes", gpu="0") == (30208 + 634) * MIB
    assert value(result, "gpu_memory_total_bytes", gpu="0") == 40960 * MIB
    assert set(by_gpu(result, "gpu_memory_reserved_bytes")) == {"1"}


@pytest.mark.parametrize("code", [3, 13, 2])
def test_without_field_values_the_plain_calls_stand_in(node: GpuNode, code: int) -> None:
    node.change({"gpu.0.return.nvmlDeviceGetFieldValues": code, "gpu.0.ecc_total.uncorrected.volatile": 5})
    node.change({"gpu.0.remapped_rows": "1 2 1 0", "gpu.0.pcie_replays": 6})
    result = node.probe().collect()
    assert result.failures == []
    assert value(result, "gpu_power_watts", gpu="0", scope="gpu") == 315.0
    assert value(result, "gpu_energy_joules_total", gpu="0") == 86_400_000.0
    assert value(result, "gpu_pcie_replays_total", gpu="0") == 6
    assert value(result, "gpu_ecc_errors_all_total", gpu="0", type="uncorrected", lifetime="volatile") == 5
    assert value(result, "gpu_remapped_rows_total", gpu="0", cause="uncorrectable") == 2
    assert value(result, "gpu_row_remap_pending", gpu="0") == 1
    for name in ("gpu_throttle_seconds_total", "gpu_power_average_watts", "gpu_recovery_action"):
        assert set(by_gpu(result, name)) == {"1"}


def test_a_plain_call_is_not_made_for_what_a_field_tells(node: GpuNode) -> None:
    node.change({"gpu.0.power_mw": 1, "gpu.0.energy_mj": 1, "gpu.0.pcie_replays": 1, "gpu.0.remapped_rows": "9 9 1 1"})
    result = node.probe().collect()
    assert value(result, "gpu_power_watts", gpu="0", scope="gpu") == 315.0
    assert value(result, "gpu_pcie_replays_total", gpu="0") == 0
    assert value(result, "gpu_row_remap_failure", gpu="0") == 0


def test_fields_are_read_by_their_own_type(node: GpuNode) -> None:
    node.change({"gpu.0.field.82": "si:-5", "gpu.0.field.94": "us:65535", "gpu.0.field.83": "d:1500.0"})
    result = node.probe().collect()
    assert value(result, "gpu_temperature_celsius", gpu="0", sensor="memory") == -5
    assert value(result, "gpu_pcie_replays_total", gpu="0") == 65535
    assert value(result, "gpu_energy_joules_total", gpu="0") == 1.5


def test_the_older_name_of_the_event_reasons_is_asked_where_the_new_one_is_missing(node: GpuNode) -> None:
    node.change({"gpu.0.return.nvmlDeviceGetCurrentClocksEventReasons": 13})
    node.change({"gpu.0.return.nvmlDeviceGetSupportedClocksEventReasons": 13})
    assert value(node.probe().collect(), "gpu_clock_event_active", gpu="0", reason="sw_power_cap") == 1


def test_only_reasons_that_the_gpu_can_have_or_has_are_shown_and_new_ones_by_their_bit(node: GpuNode) -> None:
    node.change({"gpu.0.event_reasons_supported": hex(0x5 | 1 << 12), "gpu.0.event_reasons": hex(0x8 | 1 << 12)})
    shown = select(node.probe().collect(), "gpu_clock_event_active", gpu="0")
    assert {labels_of(s)["reason"]: v for s, v in shown.items()} == {
        "gpu_idle": 0,
        "sw_power_cap": 0,
        "hw_slowdown": 1,
        "bit_12": 1,
    }


def test_nvlinks_are_counted_until_the_driver_says_that_there_are_no_more(node: GpuNode) -> None:
    node.change({f"gpu.{gpu}.field.91": None for gpu in range(2)})
    node.change({f"gpu.0.nvlink.{link}.state": 1 for link in range(40)})
    node.change({"gpu.0.nvlink.7.state": 0} | {f"gpu.1.nvlink.{link}.state": None for link in range(12)})
    probe = node.probe()
    result = probe.collect()
    assert by_gpu(result, "gpu_nvlink_links") == {"0": 40}
    assert by_gpu(result, "gpu_nvlink_active_links") == {"0": 39}
    node.change({"gpu.0.nvlink.7.state": 1})
    assert by_gpu(node.tick(probe, 60), "gpu_nvlink_active_links") == {"0": 40}
    node.change({"gpu.1.nvlink.0.state": 1})
    assert by_gpu(node.tick(probe, 60), "gpu_nvlink_links") == {"0": 40}
    assert by_gpu(node.tick(probe, 3600), "gpu_nvlink_links") == {"0": 40, "1": 1}


# Two tiers


def test_slow_values_stay_between_two_slow_reads_and_change_with_the_second(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.0.power_limit_mw.enforced": 250_000, "gpu.0.field.3": "ull:9", "gpu.0.temperature": 60})
    for _ in range(11):
        result = node.tick(probe)
        assert value(result, "gpu_power_limit_watts", gpu="0", kind="enforced") == 400.0
        assert value(result, "gpu_temperature_celsius", gpu="0", sensor="gpu") == 60
    result = node.tick(probe)
    assert value(result, "gpu_power_limit_watts", gpu="0", kind="enforced") == 250.0
    assert value(result, "gpu_ecc_errors_all_total", gpu="0", type="corrected", lifetime="volatile") == 9


def test_identity_follows_a_firmware_update(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    node.change({"gpu.0.vbios": "92.00.99.00.01"})
    assert value(node.tick(probe, 60), "gpu_info", gpu="0", vbios_version="92.00.99.00.01") == 1


# Which GPUs


@pytest.mark.parametrize(
    "options",
    [{"device_exclude": ("0",)}, {"device_include": ("1",)}, {"device_include": ("*1",), "device_exclude": ("0",)}],
)
def test_a_gpu_excluded_by_index_is_not_touched_at_all(node: GpuNode, options: dict[str, Any]) -> None:
    node.change({f"gpu.0.return.nvmlDeviceGetHandleBy{name}_v2": 999 for name in ("Index", "PciBusId")})
    result = node.probe({"expected_count": "auto"} | options, vm_size=VmSize("x", gpu_count=2)).collect()
    assert by_gpu(result, "gpu_up") == {"1": 1}
    assert result.failures == []
    assert value(result, "gpu_count", source="nvml") == 1
    assert value(result, "gpu_expected_count") == 1


def test_a_gpu_excluded_by_index_is_not_shown_while_nvml_is_down_either(node: GpuNode) -> None:
    node.load_module()
    node.change({"init.return": 9})
    information = node.proc / f"driver/nvidia/gpus/{node.address(0)}/information"
    information.unlink()
    information.mkdir()  # to read it would be told as a failure
    result = node.probe({"device_exclude": ("0",), "expected_count": "auto"}).collect()
    assert [labels_of(series)["uuid"] for series in select(result, "gpu_up")] == [node.uuid(1)]
    assert [what for what, _ in result.failures] == ["NVML", f"GPU {node.uuid(1)}"]
    assert value(result, "gpu_count", source="proc") == 1
    assert value(result, "gpu_expected_count") == 1


def test_gpus_are_chosen_by_uuid_and_exclusion_wins(node: GpuNode) -> None:
    node.load_module()
    options = {"device_include": ("GPU-0000000*",), "device_exclude": (node.uuid(1),), "expected_count": "auto"}
    result = node.probe(options, vm_size=VmSize("x", gpu_count=2)).collect()
    assert by_gpu(result, "gpu_up") == {"0": 1}
    assert [device.name for device in result.devices] == ["0"]
    assert value(result, "gpu_expected_count") == 1
    assert value(result, "gpu_count", source="nvml") == 1
    assert value(result, "gpu_count", source="proc") == 1


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("options", [{"device_exclude": ("1",)}, {"device_include": ("0",)}])
def test_a_gpu_that_a_process_read_and_the_next_excludes_is_gone_and_not_lost(
    node: GpuNode, options: dict[str, Any], *, loaded: bool
) -> None:
    if loaded:
        node.load_module()
    node.probe().collect()
    for _ in range(2):
        result = node.probe({**options, "expected_count": "auto"}).collect()
        assert by_gpu(result, "gpu_up") == {"0": 1}
        assert value(result, "gpu_expected_count") == 1
        assert value(result, "gpu_count", source="nvml") == 1
        assert result.events == []
    result = node.probe({"device_exclude": (node.uuid(1),), "expected_count": "auto"}).collect()
    assert by_gpu(result, "gpu_up") == {"0": 1}
    assert value(result, "gpu_expected_count") == 1
    assert by_gpu(node.probe().collect(), "gpu_up") == {"0": 1, "1": 1}
    node.change({"init.return": 999})
    assert by_gpu(node.probe({"device_exclude": ("1",)}).collect(), "gpu_up") == {"0": 0}


def test_a_gpu_excluded_by_uuid_is_kept_out_whoever_tells_the_uuid(node: GpuNode) -> None:
    node.load_module()
    options = {"device_exclude": (node.uuid(1),), "expected_count": "auto"}
    node.change({"init.return": 999})
    result = node.probe(options).collect()
    assert value(result, "gpu_count", source="proc") == 1
    assert value(result, "gpu_expected_count") == 1
    information = node.proc / f"driver/nvidia/gpus/{node.address(1)}/information"
    information.unlink()
    node.change({"init.return": None})
    result = node.probe(options, run_id="later").collect()
    assert by_gpu(result, "gpu_up") == {"0": 1}
    assert result.failures == []


# A container


def test_a_container_is_not_told_of_the_gpus_of_others(node: GpuNode) -> None:
    node.load_module()
    node.plug_in()
    (node.dev / "nvidia0").unlink()
    node.change({"gpu.0.absent": 1})
    probe = node.probe({"expected_count": "auto"})
    result = probe.collect()
    assert [labels_of(s)["uuid"] for s in select(result, "gpu_up")] == [node.uuid(1)]
    assert value(result, "gpu_expected_count") == 1
    assert value(result, "gpu_count", source="proc") == 2
    assert result.events == []
    assert value(node.tick(probe, 60), "gpu_expected_count") == 1


def test_a_gpu_without_a_device_node_is_shown_where_it_is_promised(node: GpuNode) -> None:
    node.load_module()
    (node.dev / "nvidia0").unlink()
    node.change({"gpu.0.absent": 1})
    for options, size in (({"expected_count": 2}, None), ({"expected_count": "auto"}, VmSize("x", gpu_count=2))):
        node.memory.content = {}
        result = node.probe(options, vm_size=size).collect()
        assert {labels_of(s)["uuid"]: v for s, v in select(result, "gpu_up").items()} == {
            node.uuid(0): 0,
            node.uuid(1): 1,
        }


def test_a_gpu_with_a_device_node_or_without_any_is_shown(node: GpuNode) -> None:
    node.load_module()
    node.change({"gpu.0.absent": 1})
    assert len(select(node.probe({"expected_count": "auto"}).collect(), "gpu_up")) == 2
    for minor in (0, 1):
        (node.dev / f"nvidia{minor}").unlink()
    assert len(select(node.probe({"expected_count": "auto"}, run_id="two").collect(), "gpu_up")) == 2


def test_a_container_without_nvml_shows_its_own_gpus_too(node: GpuNode) -> None:
    node.load_module()
    (node.dev / "nvidia0").unlink()
    node.change({"init.return": 999})
    for expected in ("auto", 1):
        node.memory.content = {}
        result = node.probe({"expected_count": expected}).collect()
        assert [labels_of(s)["uuid"] for s in select(result, "gpu_up")] == [node.uuid(1)]
        assert value(result, "gpu_expected_count") == 1


# How many should there be


def test_expected_is_what_the_configuration_says(node: GpuNode) -> None:
    result = node.probe({"expected_count": 4}, vm_size=VmSize("x", gpu_count=8)).collect()
    assert value(result, "gpu_expected_count") == 4


@pytest.mark.parametrize(("promised", "expected"), [(8, 8), (1, 2), (0, 2), (None, 2)])
def test_expected_is_what_the_size_promises_or_more_if_more_were_seen(
    node: GpuNode, promised: int | None, expected: int
) -> None:
    result = node.probe({"expected_count": "auto"}, vm_size=VmSize("x", gpu_count=promised)).collect()
    assert value(result, "gpu_expected_count") == expected


def test_a_gpu_that_was_there_on_this_boot_is_expected_after_a_restart_and_not_on_another_boot(node: GpuNode) -> None:
    node.probe({"expected_count": "auto"}).collect()
    node.change({"gpu.1.absent": 1})
    result = node.probe({"expected_count": "auto"}, run_id="restarted").collect()
    assert value(result, "gpu_expected_count") == 2
    assert value(result, "gpu_count", source="nvml") == 1
    (node.proc / "sys/kernel/random/boot_id").write_text("other\n")
    result = node.probe({"expected_count": "auto"}, run_id="rebooted").collect()
    assert value(result, "gpu_expected_count") == 1


def test_a_gpu_on_pci_alone_is_expected_too(node: GpuNode) -> None:
    node.plug_in()
    node.change({"gpu.0.absent": 1, "gpu.1.absent": 1})
    result = node.probe({"expected_count": "auto"}).collect()
    assert value(result, "gpu_expected_count") == 2
    assert value(result, "gpu_count", source="nvml") == 0
    assert value(result, "gpu_count", source="pci") == 2


# Whether to run at all


def look(node: GpuNode, options: Mapping[str, Any] | None = None, **more: Any) -> None:
    probe = node.probe({"expected_count": "auto", "nvml_library": None} | dict(options or {}), **more)
    Gpu.look(probe.collector.options, probe.context)


def test_a_node_that_knows_of_no_gpu_is_not_given_a_process_whatever_is_installed(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node.sys / "bus/pci/devices/0000:00:08.0").mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(node.library.parent))
    with pytest.raises(NotPresent, match="no NVIDIA GPU"):
        look(node)


def test_an_installed_library_is_a_sign_only_where_there_is_no_pci(
    node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(node.library.parent))
    look(node)


@pytest.mark.parametrize("sign", ["pci", "proc", "dev", "library", "configuration", "size", "past"])
def test_any_sign_of_a_gpu_is_enough_to_look_closer(node: GpuNode, sign: str) -> None:
    options: dict[str, Any] = {}
    size = None
    (node.sys / "bus/pci/devices").mkdir(parents=True)
    if sign == "pci":
        node.plug_in()
    elif sign == "proc":
        (node.proc / "driver/nvidia/gpus/0001:00:00.0").mkdir(parents=True)
    elif sign == "dev":
        node.dev.mkdir()
        (node.dev / "nvidia0").touch()
    elif sign == "library":
        options["nvml_library"] = NO_LIBRARY  # somebody who names one wants to know
    elif sign == "configuration":
        options["expected_count"] = 1
    elif sign == "size":
        size = VmSize("x", gpu_count=8)
    else:
        node.probe().collect()
    look(node, options, vm_size=size, run_id="later")


def test_a_library_on_a_node_without_gpus_is_nothing_to_collect(node: GpuNode) -> None:
    node.change({"init.return": 9})
    probe = node.probe({"expected_count": "auto"})
    with pytest.raises(NotPresent, match="driver is not loaded"):
        probe.collector.collect(_Nowhere())


class _Nowhere:
    """An output for a run that brings nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_a_node_that_lost_all_its_gpus_says_so_and_is_not_absent(node: GpuNode) -> None:
    node.change({"gpu.0.absent": 1, "gpu.1.absent": 1})
    result = node.probe({"expected_count": "auto"}, vm_size=VmSize("x", gpu_count=2)).collect()
    assert value(result, "gpu_count", source="nvml") == 0
    assert value(result, "gpu_count", source="proc") == 0
    assert value(result, "gpu_expected_count") == 2


def test_values_by_process_are_refused_while_there_are_none() -> None:
    with pytest.raises(ValueError, match="per_process"):
        Options(per_process=True)


def test_gpus_that_are_merely_expected_are_not_seen(tmp_path: Path) -> None:
    nothing = Probe(
        Gpu, Options(nvml_library=str(tmp_path / "none"), expected_count=8), sysfs=tmp_path, procfs=tmp_path
    )
    assert value(nothing.collect(), "gpu_expected_count") == 8
    assert not nothing.collector.seen()


def test_gpus_that_are_there_are_seen(node: GpuNode) -> None:
    probe = node.probe()
    probe.collect()
    assert probe.collector.seen()
