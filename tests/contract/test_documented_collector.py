"""The collector in CONTRIBUTING.md, and the test of it that stands there, run as printed."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.api import NotPresent
from agent.sim.harness import Probe

if TYPE_CHECKING:
    from types import ModuleType

    from agent.api import Collector

ROOT = Path(__file__).resolve().parents[2]


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def load(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)  # undone to this at the end, so that the next test loads it afresh
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def edac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Collector]:
    folder = tmp_path / "modules"
    folder.mkdir()
    collector: type[Collector] = load("edac", python_blocks("CONTRIBUTING.md")[0], folder, monkeypatch).Edac
    return collector


def add_controller(sysfs: Path, name: str, **counts: str) -> Path:
    folder = sysfs / "devices/system/edac/mc" / name
    folder.mkdir(parents=True)
    for file, text in counts.items():
        (folder / file).write_text(text)
    return folder


def test_documented_test_passes_as_printed(
    edac: type[Collector], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert edac.name == "edac"
    module = load("test_edac", python_blocks("CONTRIBUTING.md")[1], tmp_path / "modules", monkeypatch)
    claims = [function for name, function in inspect.getmembers(module) if name.startswith("test_")]
    assert len(claims) == 2
    for claim in claims:
        claim(tmp_path / claim.__name__)


def test_documented_collector_finds_controllers_only_and_misses_absent_files(
    edac: type[Collector], tmp_path: Path
) -> None:
    add_controller(tmp_path, "mc0", ce_count="3\n")
    add_controller(tmp_path, "power", ce_count="4\n", ue_count="4\n")
    result = Probe(edac, sysfs=tmp_path).collect()
    assert result.values == {'node_edac_correctable_errors_total{controller="0"}': 3}
    assert [Path(what).name for what, _ in result.failures] == ["ue_count"]


def test_documented_collector_forgets_a_controller_that_went_away_when_it_looks_again(
    edac: type[Collector], tmp_path: Path
) -> None:
    add_controller(tmp_path, "mc0", ce_count="3\n", ue_count="0\n")
    vanishing = add_controller(tmp_path, "mc1", ce_count="5\n", ue_count="0\n")
    probe = Probe(edac, sysfs=tmp_path)
    assert len(probe.collect().values) == 4
    assert probe.collector.found() == "2 memory controllers"
    vanishing.rename(tmp_path / "gone")
    assert len(probe.collect().failures) == 2
    probe.open()
    result = probe.collect()
    assert (sorted(result.values.values()), result.failures) == ([0, 3], [])


def test_documented_collector_is_parked_where_no_driver_is(edac: type[Collector], tmp_path: Path) -> None:
    with pytest.raises(NotPresent):
        Probe(edac, sysfs=tmp_path).collect()


def test_documented_collector_obeys_the_rules_it_stands_beside(tmp_path: Path) -> None:
    source = python_blocks("CONTRIBUTING.md")[0]
    ruff = [sys.executable, "-m", "ruff"]
    name = ["--cache-dir", str(tmp_path), "--stdin-filename", "collectors/edac.py", "-"]
    for command in (["check", *name], ["format", "--check", *name]):
        done = subprocess.run(
            [*ruff, *command], cwd=ROOT, input=source, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_readme_shows_the_same_collector_or_none() -> None:
    documented = python_blocks("CONTRIBUTING.md")[0]
    assert all(block == documented for block in python_blocks("README.md") if "(Collector)" in block)
