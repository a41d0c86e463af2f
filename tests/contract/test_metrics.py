"""Every metric: named as Prometheus wants it, documented, and really emitted by some simulated node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.registry import installed
from agent.reports import declared_metrics, metrics_text
from agent.sim.infiniband import port_directory
from agent.sim.node import SimNode
from tests.agent.kit import until
from tests.agent.running import Agent, Place
from tests.conftest import need
from tests.contract.peers import prometheus
from tests.fakenvml.library import build
from tests.golden import goldens

ROOT = Path(__file__).resolve().parents[2]
BASE_UNITS = {
    "",
    "bytes",
    "bytes_per_second",
    "seconds",
    "ratio",
    "celsius",
    "watts",
    "joules",
    "hertz",
    "bits",
    "pages",
}
FOREIGN_UNITS = re.compile(
    r"_(ms|milliseconds|us|microseconds|minutes|hours|kb|mb|gb|kib|mib|gib|percent|gbps|mhz)(_|$)"
)
PREFIXES = {
    "gpu": ("gpu_",),
    "hpcwatch": ("hpcwatch_",),
    "host": ("host_",),
    "infiniband": ("infiniband_", "node_infiniband_"),
    "kernel": ("kernel_", "gpu_xid_", "nvswitch_"),
    "textfile": ("hpcwatch_textfile_",),
}
# Metrics that neither a first collection nor a golden shows, each with what brings it out.
NEEDS_MORE = {
    "host_processes_unkillable": "a second count of processes",
    "hpcwatch_state_writable": "an agent that runs on; `once` keeps nothing",
    # What only a synchronized clock has; tests/collectors/test_host.py shows them.
    "host_clock_max_error_seconds": "a synchronized clock",
    "host_clock_offset_seconds": "a synchronized clock",
}

SETTLED_NAMES = {
    # promtool would have no metric's name say "counter"; what these are about is a counter.
    "infiniband_counter_saturated",
    "infiniband_hw_counter_total",
    # Nor end in "_count" but a histogram's or a summary's; these count GPUs.
    "gpu_count",
    "gpu_expected_count",
}


def declared() -> list[dict[str, Any]]:
    return declared_metrics(installed())


def test_names_and_help_follow_the_rules_of_prometheus() -> None:
    for metric in declared():
        name, unit = metric["name"], metric["unit"]
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        assert name.startswith(PREFIXES[metric["collector"]]), name
        assert (metric["type"] == "counter") == name.endswith("_total"), name
        assert not FOREIGN_UNITS.search(name), name
        assert unit in BASE_UNITS, (name, unit)
        assert not unit or re.search(rf"_{unit}(_total|$)", name), (name, unit)
        assert metric["help"].endswith("."), name
        assert not {"host", "hostname", "instance", "job"} & set(metric["labels"]), name


def test_a_name_belongs_to_one_collector() -> None:
    names = [metric["name"] for metric in declared()]
    assert sorted(set(names)) == sorted(names)


def test_the_metric_reference_is_what_the_command_prints() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_text(declared(), "markdown"), (
        "write it anew: hpcwatch metrics --format markdown > docs/metrics.md"
    )


class GpuPlace(Place):
    """A place whose processes find NVIDIA's library, and behind it the GPUs of a simulated node."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "FAKENVML_STATE": str(self.folder / "nvml.state")}


@pytest.fixture
def node(tmp_path: Path) -> Place:
    """An ND96asr_v4 on which XIDs struck, with a switch that failed, one odd port, and a text file."""
    place = GpuPlace(tmp_path)
    shutil.rmtree(tmp_path / "sys")
    shutil.rmtree(tmp_path / "proc")
    simulated = SimNode(tmp_path, "ND96asr_v4", "xid")
    simulated.at(35)
    simulated.log("nvidia-nvswitch3: SXid (PCI:000a:00:00.0): 20034, Fatal, Link 28 LTSSM Fault Up")
    _add_rarities(port_directory(tmp_path / "sys", "mlx5_an0"))
    texts = tmp_path / "textfile"
    texts.mkdir()
    (texts / "scratch.prom").write_text("# HELP scratch_ok Scratch answers.\n# TYPE scratch_ok gauge\nscratch_ok 1\n")
    agent = {"devfs": simulated.dev, "kmsg": simulated.kmsg, "sku": "ND96asr_v4"}
    collectors = {"textfile": {"directory": texts}, "gpu": {"nvml_library": build(tmp_path / "driver")}}
    place.quiet.write_text(json.dumps({"agent": agent, "collectors": collectors}, default=str))
    place.config.write_text("")
    return place


def _add_rarities(port: Path) -> None:
    """Add what only old kernels, other drivers or RoCE have, and one file that holds nonsense."""
    files = {
        "counters_ext": [f"port_{way}_{what}_64" for way in ("rcv", "xmit") for what in ("data", "packets")]
        + [f"port_{cast}_{way}_packets" for cast in ("unicast", "multicast") for way in ("rcv", "xmit")],
        "counters": ["port_rcv_discards"],
        "hw_counters": ["roce_adp_retrans", "roce_adp_retrans_to", "rx_icrc_encapsulated", "rdma_rx_bytes"],
    }
    for folder, names in files.items():
        (port / folder).mkdir(exist_ok=True)
        for name in names:
            (port / folder / name).write_text("7\n")
    (port / "counters" / "VL15_dropped").write_text("nonsense\n")
    (port / "counters" / "link_downed").write_text("255\n")


def test_every_declared_metric_is_emitted_and_every_emitted_one_declared(node: Place) -> None:
    done = node.call(node.command("once", "--set", "collectors.host.per_cpu=true"))
    assert done.returncode == 0, done.stderr
    emitted = set(re.findall(r"^# TYPE (\S+)", done.stdout, re.MULTILINE)) - {"scratch_ok"} | golden_names()
    names = {metric["name"] for metric in declared()}
    assert emitted - names == set()
    assert names - emitted - NEEDS_MORE.keys() == set()
    assert NEEDS_MORE.keys() & emitted == set()


def golden_names() -> set[str]:
    """Every metric of the goldens, all VM sizes and scenarios; tests/contract/test_golden.py holds them to be true."""
    texts = [path.read_text() for kind in ("prom", "diff") for path in goldens.FOLDER.glob(f"*/*.{kind}")]
    return {name for text in texts for name in re.findall(r"^\+?# TYPE (\S+)", text, re.MULTILINE)}


def test_promtool_finds_nothing_wrong_with_the_page_of_a_whole_node(node: Place) -> None:
    promtool = need("promtool", "prometheus")
    page = node.call(node.command("once")).stdout
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    complaints = {line.split()[0] for line in done.stderr.splitlines()}
    assert complaints - SETTLED_NAMES == set(), done.stderr


def test_a_real_prometheus_scrapes_the_agent(node: Place, tmp_path: Path) -> None:
    program = need("prometheus", "prometheus")
    agent = Agent(node)
    try:
        until(lambda: agent.get("/readyz")[0] == 200, "the first collection")
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: node, static_configs: [{{targets: ['127.0.0.1:{agent.port}']}}]}}]\n"
        )
        with prometheus(program, config, tmp_path / "data") as server:
            until(lambda: server.query("up") == {"1"}, "up is 1", timeout_s=30)
            assert server.query('infiniband_fabric_ports{status="up"}') == {"8"}
            assert server.query("count(node_infiniband_port_data_received_bytes_total)") == {"9"}
            assert server.query("scratch_ok") == {"1"}
            assert server.query("sum by (name) (gpu_info) == on () gpu_expected_count") == {"8"}
            assert server.query("count(gpu_power_watts > 40 and gpu_power_watts < 400)") == {"8"}
            assert server.query('gpu_xid_errors_total{xid="94"} * on (gpu, uuid) gpu_up == 1') == {"1"}
            assert server.query('count(gpu_xid_errors_total{xid="79"} == 0)') == {"8"}
    finally:
        agent.end()
