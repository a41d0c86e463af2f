"""Collectors that somebody else ships as wheels: one that works, one that is broken, and one that nobody asked for."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.registry import installed

PATIENCE_S = 40
GOOD = """
from agent.api import Collector, Kind, Metric

PRESSURE = Metric("acme_pressure_pascals", Kind.GAUGE, "Pressure.", ("pump",), unit="pascals", source="acme/*")

class Pressure(Collector):
    name, metrics, needs = "acme_pressure", (PRESSURE,), "an ACME pump"
    def open(self):
        pumps = sorted((self.ctx.sys / "acme").iterdir())
        self.pumps = [(path, self.ctx.series(PRESSURE, path.name)) for path in pumps]
    def collect(self, out):
        for path, series in self.pumps:
            out.add(series, int(path.read_text()))
"""
BROKEN = 'raise RuntimeError("wants another machine")\n'
UNASKED = 'import pathlib\npathlib.Path(__file__).with_name("acme_unasked.imported").touch()\nUnasked = None\n'


def build_wheel(directory: Path, module: str, source: str, target: str) -> Path:
    """Make a wheel as PyPA's binary distribution format has it: one module, one entry point."""
    info = f"{module}-1.0.dist-info"
    name = module.replace("_", "-")
    files = {
        f"{module}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: hpcwatch\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[hpcwatch.collectors]\n{module} = {target}\n",
    }
    record = [f"{name},sha256={digest(text)},{len(text.encode())}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    path = directory / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@dataclass(frozen=True)
class Site:
    """A machine with an agent, three foreign wheels, and a configuration that mentions two of them."""

    root: Path

    @property
    def packages(self) -> Path:
        return self.root / "site"

    def prepare(self) -> None:
        for name, pascals in (("p0", "101325\n"), ("p1", "99000\n")):
            (self.root / "sys" / "acme").mkdir(parents=True, exist_ok=True)
            (self.root / "sys" / "acme" / name).write_text(pascals)
        (self.root / "proc").mkdir()
        for module, source, target in (
            ("acme_pressure", GOOD, "acme_pressure:Pressure"),
            ("acme_broken", BROKEN, "acme_broken:Broken"),
            ("acme_unasked", UNASKED, "acme_unasked:Unasked"),
        ):
            with zipfile.ZipFile(build_wheel(self.root, module, source, target)) as wheel:
                wheel.extractall(self.packages)  # what installing a wheel of one pure module comes to
        (self.root / "hpcwatch.yaml").write_text("collectors: {acme_pressure: {}, acme_broken: {interval: 1s}}\n")

    def command(self, *verb: str, sets: Sequence[str] = ()) -> list[str]:
        builtin = [name for name, plugin in installed().items() if plugin.builtin]
        settings = [
            f"agent.state_dir={self.root}/state",
            f"agent.socket={self.root}/agent.sock",
            f"agent.devfs={self.root}/dev",
            f"agent.kmsg={self.root}/kmsg",
            "agent.interval=1s",
            "outputs.prometheus.listen=127.0.0.1:0",
            *(f"collectors.{name}.enabled=false" for name in builtin),
            *sets,
        ]
        paths = ["--config", f"{self.root}/hpcwatch.yaml", "--config-dir", "/nonexistent"]
        roots = ["--sysfs", f"{self.root}/sys", "--procfs", f"{self.root}/proc"]
        return [sys.executable, "-m", "agent", *verb, *paths, *roots, *(f"--set={one}" for one in settings)]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.packages), "NOTIFY_SOCKET": ""}

    def run(self, *verb: str, sets: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*verb, sets=sets),
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


@dataclass
class Agent:
    """A running agent and where it serves."""

    site: Site
    process: subprocess.Popen[str]
    port: int

    def get(self, target: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", target)
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
            return text
        finally:
            connection.close()

    def wait_for(self, line: str) -> list[str]:
        """Scrape until the page has this line; return all lines."""
        until_s = time.monotonic() + PATIENCE_S
        while line not in (lines := self.get("/metrics").splitlines()):
            assert time.monotonic() < until_s, f"no {line!r} in {lines}"
        return lines

    def collectors(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in json.loads(self.get("/api/v1/status"))["collectors"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("node"))
    site.prepare()
    return site


@pytest.fixture(scope="module")
def agent(site: Site) -> Iterator[Agent]:
    process = subprocess.Popen(
        site.command("run"), cwd=site.root, env=site.environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"serves http://127\.0\.0\.1:(\d+)/metrics", line):
                running = Agent(site, process, int(match[1]))
                running.wait_for('hpcwatch_collector_up{collector="acme_broken"} 0')
                yield running
                break
        else:
            pytest.fail(f"the agent did not serve: {lines}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        if process.stderr is not None:
            process.stderr.close()


def test_foreign_collector_is_scraped_like_any_other(agent: Agent) -> None:
    lines = agent.wait_for('acme_pressure_pascals{pump="p0"} 101325')
    assert 'acme_pressure_pascals{pump="p1"} 99000' in lines
    assert "# TYPE acme_pressure_pascals gauge" in lines
    assert 'hpcwatch_collector_up{collector="acme_pressure"} 1' in lines
    assert agent.collectors()["acme_pressure"]["state"] == "ok"


def test_broken_one_is_listed_as_failed_with_the_reason_and_hurts_nothing(agent: Agent) -> None:
    lines = agent.wait_for('hpcwatch_collector_up{collector="acme_pressure"} 1')
    assert 'hpcwatch_collector_enabled{collector="acme_broken"} 1' in lines
    assert 'hpcwatch_collector_up{collector="acme_broken"} 0' in lines
    row = agent.collectors()["acme_broken"]
    assert (row["state"], row["enabled"], row["series"]) == ("failed", True, 0)
    assert "collector acme_broken of acme-broken" in row["reason"]
    assert "import failed: RuntimeError: wants another machine" in row["reason"]
    assert agent.get("/readyz") == "ready\n"


def test_installed_one_that_nobody_asked_for_is_off_and_not_even_imported(agent: Agent) -> None:
    row = agent.collectors()["acme_unasked"]
    assert (row["state"], row["enabled"]) == ("off", False)
    assert 'hpcwatch_collector_enabled{collector="acme_unasked"} 0' in agent.get("/metrics").splitlines()
    assert not (agent.site.packages / "acme_unasked.imported").exists()


def test_collectors_command_shows_them_all(site: Site) -> None:
    done = site.run("collectors", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    states = {name: rows[name]["state"] for name in ("acme_pressure", "acme_broken", "acme_unasked")}
    assert states == {"acme_pressure": "ok", "acme_broken": "failed", "acme_unasked": "off"}
    table = site.run("collectors").stdout
    assert re.search(r"^acme_pressure +ok +an ACME pump$", table, re.MULTILINE)
    assert re.search(r"^acme_broken +failed .*RuntimeError: wants another machine$", table, re.MULTILINE)
    assert not (site.packages / "acme_unasked.imported").exists()


def test_once_prints_it_and_fails_for_the_broken_one_only_when_that_runs(site: Site) -> None:
    done = site.run("once", "--collector", "acme_pressure")
    assert done.returncode == 0
    assert 'acme_pressure_pascals{pump="p1"} 99000\n' in done.stdout
    done = site.run("once")
    assert done.returncode == 1
    assert 'acme_pressure_pascals{pump="p1"} 99000\n' in done.stdout


def test_key_that_the_foreign_collector_does_not_have_is_bad_configuration(site: Site) -> None:
    done = site.run("once", sets=["collectors.acme_pressure.depth=3"])
    assert (done.returncode, done.stdout) == (78, "")
    assert "collectors.acme_pressure.depth: unknown key" in done.stderr
    assert "Traceback" not in done.stderr
