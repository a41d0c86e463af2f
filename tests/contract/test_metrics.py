"""Every metric: named as Prometheus wants it, documented, and really emitted by some simulated node."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.registry import installed
from agent.reports import declared_metrics, metrics_text
from agent.sim.host import SimHost, SimMount
from agent.sim.infiniband import port_directory, write_nd96asr_v4
from tests.agent.kit import until
from tests.agent.running import Agent, Place
from tests.conftest import need
from tests.contract.peers import prometheus

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
    "hpcwatch": ("hpcwatch_",),
    "host": ("host_",),
    "infiniband": ("infiniband_", "node_infiniband_"),
    "textfile": ("hpcwatch_textfile_",),
}
# Metrics that no healthy simulated node shows at its first collection, each with what brings it out.
NEEDS_MORE = {
    "host_cpu_core_seconds_total": "collectors.host.per_cpu",
    "host_processes_unkillable": "a second count of processes",
    "hpcwatch_state_writable": "an agent that runs on; `once` keeps nothing",
    # What only a synchronized clock has; tests/collectors/test_host.py shows them.
    "host_clock_max_error_seconds": "a synchronized clock",
    "host_clock_offset_seconds": "a synchronized clock",
}


# promtool would have no metric's name say "counter"; what these are about is a counter.
SETTLED_NAMES = {"infiniband_counter_saturated", "infiniband_hw_counter_total"}


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


@pytest.fixture
def node(tmp_path: Path) -> Place:
    """An ND96asr_v4 with one odd port, a host, and a text file."""
    place = Place(tmp_path)
    shutil.rmtree(tmp_path / "sys")
    shutil.rmtree(tmp_path / "proc")
    write_nd96asr_v4(tmp_path / "sys")
    _add_rarities(port_directory(tmp_path / "sys", "mlx5_an0"))
    SimHost(tmp_path, mounts={"/": SimMount()}).write()
    texts = tmp_path / "textfile"
    texts.mkdir()
    (texts / "scratch.prom").write_text("# HELP scratch_ok Scratch answers.\n# TYPE scratch_ok gauge\nscratch_ok 1\n")
    place.quiet.write_text(f"collectors: {{textfile: {{directory: {texts}}}}}\n")
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
    done = node.call(node.command("once", "--set", "collectors.host.per_cpu=true", "--set", "agent.sku=ND96asr_v4"))
    assert done.returncode == 0, done.stderr
    emitted = set(re.findall(r"^# TYPE (\S+)", done.stdout, re.MULTILINE)) - {"scratch_ok"}
    names = {metric["name"] for metric in declared()}
    assert emitted - names == set()
    assert names - emitted - NEEDS_MORE.keys() == set()


def test_promtool_finds_nothing_wrong_with_the_page_of_a_whole_node(node: Place) -> None:
    promtool = need("promtool", "prometheus")
    page = node.call(node.command("once", "--set", "agent.sku=ND96asr_v4")).stdout
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    complaints = {line.split()[0] for line in done.stderr.splitlines()}
    assert complaints - SETTLED_NAMES == set(), done.stderr


def test_a_real_prometheus_scrapes_the_agent(node: Place, tmp_path: Path) -> None:
    program = need("prometheus", "prometheus")
    agent = Agent(node, "--set", "agent.sku=ND96asr_v4")
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
    finally:
        agent.end()
