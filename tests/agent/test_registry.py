"""Which collectors are installed, what makes one unusable, and what makes the installation itself unsound."""

from __future__ import annotations

import itertools
import logging
import sys
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.api import API_VERSION, Kind, Metric
from agent.registry import (
    GROUP,
    Plugin,
    PluginError,
    RegistryError,
    conflicting_metric,
    installed,
    refuse_strangers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Load = Callable[..., type]

HEAD = "from agent.api import Collector, Duration, Kind, Lane, Metric\n"
numbers = itertools.count()


def distribution(directory: Path, name: str, *, record: str = "", entries: str = "", metadata: str = "") -> None:
    """Lay out what an installer leaves of a distribution."""
    folder = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "RECORD").write_text(record)
    (folder / "entry_points.txt").write_text(entries)


def found_in(directory: Path) -> list[Distribution]:
    return [*distributions(path=[str(directory)])]


def entry(name: str, value: str = "some.module:Some") -> str:
    return f"[{GROUP}]\n{name} = {value}\n[console_scripts]\nother = a:b\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Write a module and load `Mine` from it as the plug-in `mine` of the distribution `acme-mine`."""

    def write_and_load(source: str, value: str = "{module}:Mine") -> type:
        module = f"plugin_of_test_registry_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(HEAD + source)
        return Plugin("mine", "acme-mine", EntryPoint("mine", value.format(module=module), GROUP)).load()

    monkeypatch.syspath_prepend(tmp_path)
    return write_and_load


def test_collectors_of_all_distributions_are_in_one_table(tmp_path: Path) -> None:
    distribution(tmp_path, "hpcwatch", entries=entry("host"))
    distribution(tmp_path, "acme-fans", entries=entry("fans", "acme.fans:Fans"))
    distribution(tmp_path, "unrelated", entries="[console_scripts]\nhost = a:b\n")
    plugins = installed(found_in(tmp_path))
    assert {name: (p.distribution, p.builtin) for name, p in plugins.items()} == {
        "fans": ("acme-fans", False),
        "host": ("hpcwatch", True),
    }
    assert list(plugins) == ["fans", "host"]
    assert plugins["fans"].entry.value == "acme.fans:Fans"


def test_looking_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_imported_plugin.py").write_text("raise SystemExit('imported')")
    distribution(tmp_path, "acme", entries=entry("mine", "never_imported_plugin:Mine"))
    monkeypatch.syspath_prepend(tmp_path)
    assert list(installed(found_in(tmp_path))) == ["mine"]
    assert "never_imported_plugin" not in sys.modules


def test_two_collectors_of_one_name_are_refused_naming_both(tmp_path: Path) -> None:
    distribution(tmp_path, "acme-fans", entries=entry("fans"))
    distribution(tmp_path, "other-fans", entries=entry("fans"))
    with pytest.raises(RegistryError) as caught:
        installed(found_in(tmp_path))
    assert all(word in str(caught.value) for word in ("'fans'", "acme-fans", "other-fans", "uninstall"))


def test_distribution_seen_twice_on_the_path_counts_once(tmp_path: Path) -> None:
    distribution(tmp_path / "first", "acme-fans", entries=entry("fans", "first:Fans"))
    distribution(tmp_path / "second", "acme-fans", entries=entry("fans", "second:Fans"))
    plugins = installed([*found_in(tmp_path / "first"), *found_in(tmp_path / "second")])
    assert plugins["fans"].entry.value == "first:Fans"


@pytest.mark.parametrize("damage", ["[hpcwatch.collectors]\nno equals sign\n", "stray = before:section\n"])
def test_damaged_distribution_does_not_take_the_others_with_it(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    distribution(tmp_path, "acme-damaged", entries=damage)
    distribution(tmp_path, "acme-fans", entries=entry("fans"))
    assert list(installed(found_in(tmp_path))) == ["fans"]
    assert all("acme-damaged" in record.getMessage() for record in caplog.records)
    refuse_strangers([], found_in(tmp_path))


def test_distribution_without_readable_metadata_does_not_stop_the_agent(tmp_path: Path) -> None:
    distribution(tmp_path, "nameless", entries=entry("fans"), metadata="Metadata-Version: 2.1\n")
    distribution(tmp_path, "latin", entries=entry("pumps"))
    (tmp_path / "latin-1.0.dist-info" / "METADATA").write_bytes(b"Name: \xff\n")
    (tmp_path / "latin-1.0.dist-info" / "RECORD").write_bytes(b"\xff")
    assert set(installed(found_in(tmp_path))) <= {"fans", "pumps"}
    refuse_strangers([], found_in(tmp_path))


def test_sound_plug_in_loads(load: Load) -> None:
    cls = load(
        "M = Metric('mine_up', Kind.GAUGE, 'Up.')\nclass Mine(Collector):\n    name = 'mine'\n    metrics = (M,)\n"
    )
    assert cls.__name__ == "Mine"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_at_all\n", "import failed: ModuleNotFoundError: No module named 'no_such_module"),
        ("raise SystemExit(3)\n", "import failed: SystemExit: 3"),
        ("raise KeyboardInterrupt\n", "import failed: KeyboardInterrupt"),
        ("def broken(:\n", "import failed: SyntaxError"),
        ("x = 1\n", "import failed: AttributeError"),
        ("Mine = 1\n", "1 is not a subclass of agent.api.Collector"),
        ("class Mine: pass\n", "is not a subclass of agent.api.Collector"),
        ("Mine = Collector(None, None)\n", "is not a subclass of agent.api.Collector"),
        (f"class Mine(Collector):\n    api = {API_VERSION + 1}\n", f"needs plug-in API {API_VERSION + 1}, this agent"),
        ("class Mine(Collector):\n    api = '1'\n", "needs plug-in API '1'"),
        ("class Mine(Collector):\n    name = 'yours'\n    metrics = ()\n", "the class calls itself 'yours'"),
        ("class Mine(Collector):\n    metrics = ()\n", "the class calls itself None"),
        ("class Mine(Collector):\n    name = 'mine'\n", "metrics must be a sequence"),
        ("class Mine(Collector):\n    name = 'mine'\n    metrics = None\n", "metrics must be a sequence"),
        ("class Mine(Collector):\n    name = 'mine'\n    metrics = ('a',)\n", "metrics must be a sequence"),
        ("class Mine(Collector):\n    name = 'mine'\n    metrics = iter(())\n", "metrics must be a sequence"),
        ("class Mine(Collector):\n    name = 'mine'\n    metrics = ()\n    lane = 'thread'\n", "lane must be"),
        ("class Mine(Collector):\n    name = 'mine'\n    metrics = ()\n    interval = '5s'\n", "interval and timeout"),
        ("class Mine(Collector):\n    name = 'mine'\n    metrics = ()\n    timeout = None\n", "interval and timeout"),
        ("class Mine(Collector):\n    name = 'mine'\n    metrics = ()\n    class Options: pass\n", "Options must be"),
    ],
)
def test_plug_in_that_cannot_be_used_says_why_and_whose_it_is(load: Load, source: str, reason: str) -> None:
    with pytest.raises(PluginError) as caught:
        load(source)
    text = str(caught.value)
    assert reason in text
    assert text.startswith("collector mine of acme-mine (plugin_of_test_registry_")


def test_entry_without_an_object_is_no_collector(load: Load) -> None:
    with pytest.raises(PluginError, match="not a subclass"):
        load("", "{module}")


def package(directory: Path, name: str) -> Path:
    (directory / name).mkdir(parents=True)
    (directory / name / "__init__.py").write_text("")
    return directory


@pytest.mark.parametrize("name", ["agent", "collectors"])
def test_package_of_our_name_elsewhere_on_the_path_is_refused(name: str, tmp_path: Path) -> None:
    package(tmp_path / "foreign", name)
    with pytest.raises(RegistryError) as caught:
        refuse_strangers([str(tmp_path), str(tmp_path / "foreign")], [])
    assert f"another package '{name}' is in {tmp_path / 'foreign'}" in str(caught.value)
    assert "virtual environment of its own" in str(caught.value)


def test_package_of_our_name_in_the_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package(tmp_path, "agent"))
    with pytest.raises(RegistryError, match="another package 'agent'"):
        refuse_strangers([""], [])


def test_our_own_packages_are_no_strangers_however_they_are_reached(tmp_path: Path) -> None:
    home = Path(__file__).resolve().parents[2]
    (tmp_path / "link").symlink_to(home)
    (tmp_path / "agent").mkdir()  # not a package: importing it would find ours
    refuse_strangers([str(home), str(tmp_path / "link"), str(tmp_path), str(tmp_path / "missing")], [])


@pytest.mark.parametrize("package_name", ["agent", "collectors"])
def test_distribution_that_brings_our_packages_is_refused(package_name: str, tmp_path: Path) -> None:
    distribution(tmp_path, "hpcwatch", record="agent/__init__.py,,\ncollectors/__init__.py,,\n")
    distribution(tmp_path, "acme-agent", record=f"acme/x.py,,\n{package_name}/core.py,sha256=x,1\n")
    with pytest.raises(RegistryError, match=f"the distribution acme-agent also provides {package_name}:"):
        refuse_strangers([], found_in(tmp_path))


def test_distribution_with_similar_names_is_not_refused(tmp_path: Path) -> None:
    distribution(tmp_path, "acme", record="acme/agent/x.py,,\nagents/x.py,,\nmy_collectors/x.py,,\nagent.py,,\n")
    distribution(tmp_path, "recordless")
    (tmp_path / "recordless-1.0.dist-info" / "RECORD").unlink()
    refuse_strangers([], found_in(tmp_path))


UP = Metric("up", Kind.GAUGE, "Up.", ("device",), unit="")


@pytest.mark.parametrize(
    "other",
    [
        Metric("up", Kind.UNTYPED, "Up.", ("device",)),
        Metric("up", Kind.GAUGE, "Down.", ("device",)),
        Metric("up", Kind.GAUGE, "Up.", ("port",)),
        Metric("up", Kind.GAUGE, "Up.", ("device",), unit="ratio"),
    ],
)
def test_metric_declared_differently_is_a_conflict_naming_the_other(other: Metric) -> None:
    conflict = conflicting_metric([Metric("a", Kind.GAUGE, "A."), other], [("first", UP)])
    assert conflict == "metric up is declared differently by collector first"


def test_metric_declared_alike_is_no_conflict() -> None:
    same = Metric("up", Kind.GAUGE, "Up.", ("device",), source="elsewhere")
    assert conflicting_metric([same, Metric("b", Kind.GAUGE, "B.")], [("first", UP)]) is None
    assert conflicting_metric([], []) is None
