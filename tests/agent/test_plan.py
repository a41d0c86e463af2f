"""Which collectors shall run: what configuration asks for, less what cannot be used."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from agent.api import Collector, Duration, Kind, Lane, Metric, NoOptions
from agent.config import Sources, load
from agent.config.tree import ConfigError
from agent.plan import Plan, plan
from agent.registry import GROUP, Plugin

OWN = (Metric("hpcwatch_up", Kind.GAUGE, "Own."), Metric("node_size", Kind.GAUGE, "Own."))


@dataclass(frozen=True)
class Keys:
    depth: int = field(default=1, metadata={"help": "How deep.", "minimum": 1})


class Builtin(Collector):
    name = "builtin"
    metrics = (Metric("builtin_up", Kind.GAUGE, "Up."),)
    Options = Keys
    interval = Duration(15)
    timeout = Duration(7)


class Foreign(Collector):
    name = "foreign"
    metrics = (Metric("foreign_up", Kind.GAUGE, "Up."),)
    lane = Lane.THREAD


class Reserved(Collector):
    name = "reserved"
    metrics = (Metric("hpcwatch_plugin_up", Kind.GAUGE, "Up."),)


class Contradicting(Collector):
    name = "contradicting"
    metrics = (Metric("builtin_up", Kind.GAUGE, "Something else."),)


class ContradictingUs(Collector):
    name = "contradicting_us"
    metrics = (Metric("node_size", Kind.GAUGE, "Something else."),)


@dataclass(frozen=True)
class Impossible:
    what: set[str] = field(default_factory=set)


class Unconfigurable(Collector):
    name = "unconfigurable"
    metrics = ()
    Options = Impossible


class Early(Collector):
    """Of a foreign distribution, but before the built-in one in the alphabet."""

    name = "a_early"
    metrics = (Metric("builtin_up", Kind.GAUGE, "Something else."),)


def plugin(cls: type[Collector], distribution: str = "acme") -> Plugin:
    name = getattr(cls, "name", "")
    return Plugin(name, distribution, EntryPoint(name, f"{__name__}:{cls.__name__}", GROUP))


def planned(*sets: str, plugins: tuple[Plugin, ...] = (), only: tuple[str, ...] = ()) -> Plan:
    table = {one.name: one for one in (plugin(Builtin, "hpcwatch"), plugin(Foreign), *plugins)}
    sources = Sources(sets=sets, directory="/nonexistent", default_file="/nonexistent", environ={})
    settings = load(sources, collector_names=list(table), output_names=[])
    return plan(settings, dict(sorted(table.items())), OWN, only)


def test_without_configuration_what_comes_with_the_agent_runs_and_foreign_ones_do_not() -> None:
    made = planned()
    assert list(made.specs) == ["builtin"]
    assert list(made.off) == ["foreign"]


@pytest.mark.parametrize(
    "setting", ["collectors.foreign={}", "collectors.foreign.interval=5s", "collectors.foreign.enabled=auto"]
)
def test_foreign_collector_runs_when_it_is_mentioned(setting: str) -> None:
    made = planned(setting)
    assert list(made.specs) == ["builtin", "foreign"]
    assert not made.specs["foreign"].required
    assert made.off == {}


def test_foreign_collector_that_is_mentioned_to_be_off_is_off() -> None:
    assert planned("collectors.foreign={enabled: false, interval: 5s}").off.keys() == {"foreign"}


@pytest.mark.parametrize(
    ("enabled", "runs", "required"), [("auto", True, False), ("true", True, True), ("false", False, False)]
)
def test_enabled_decides(enabled: str, runs: bool, required: bool) -> None:  # noqa: FBT001 - parameters
    made = planned(f"collectors.builtin.enabled={enabled}")
    assert ("builtin" in made.specs, "builtin" in made.off) == (runs, not runs)
    assert not runs or made.specs["builtin"].required is required


def test_pace_is_the_configurations_then_the_collectors_then_the_agents() -> None:
    made = planned("agent.interval=20s", "collectors.foreign={}")
    paces = {name: (spec.interval_s, spec.timeout_s) for name, spec in made.specs.items()}
    assert paces == {"builtin": (15.0, 7.0), "foreign": (20.0, 5.0)}
    spec = planned("collectors.builtin={interval: 1s, timeout: 30s}").specs["builtin"]
    assert (spec.interval_s, spec.timeout_s) == (1.0, 30.0)


def test_spec_tells_the_lane_and_the_options() -> None:
    made = planned("collectors.foreign={}", "collectors.builtin.depth=3")
    assert (made.specs["builtin"].options, made.specs["foreign"].options) == (Keys(3), NoOptions())
    assert (made.specs["builtin"].lane, made.specs["foreign"].lane) == (Lane.SHARED, Lane.THREAD)


def test_same_configuration_makes_equal_specs_so_that_a_reload_leaves_them_running() -> None:
    assert planned("collectors.builtin.depth=3").specs == planned("collectors.builtin.depth=3").specs
    assert planned("collectors.builtin.depth=3").specs != planned("collectors.builtin.depth=4").specs


def test_only_limits_the_plan_and_overrules_what_is_off() -> None:
    made = planned("collectors.foreign.enabled=false", only=("foreign",))
    assert (list(made.specs), list(made.off)) == (["foreign"], ["builtin"])


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Reserved, "metric names that begin with hpcwatch_ are reserved"),
        (Contradicting, "metric builtin_up is declared differently by collector builtin"),
        (ContradictingUs, "metric node_size is declared differently by collector hpcwatch itself"),
        (Early, "metric builtin_up is declared differently by collector builtin"),
    ],
)
def test_foreign_collector_that_cannot_be_used_is_listed_with_the_reason_and_costs_nothing_else(
    cls: type[Collector], reason: str
) -> None:
    made = planned(f"collectors.{cls.name}={{}}", plugins=(plugin(cls),))
    broken = made.specs[cls.name]
    assert reason in broken.broken
    assert (broken.required, broken.lane, broken.options) == (True, Lane.SHARED, NoOptions())
    assert made.specs["builtin"].broken == ""


def test_options_that_no_configuration_can_fill_are_the_plug_ins_mistake() -> None:
    spec = planned("collectors.unconfigurable.what=1", plugins=(plugin(Unconfigurable),)).specs["unconfigurable"]
    assert "collector unconfigurable of acme: Options: " in spec.broken


def test_metric_of_a_broken_collector_is_free_for_others() -> None:
    second = replace(plugin(Reserved), name="second")  # broken: the class calls itself otherwise
    made = planned("collectors.second={}", "collectors.foreign={}", plugins=(second,))
    assert (made.specs["second"].broken != "", made.specs["foreign"].broken) == (True, "")


def test_own_names_are_reserved_for_what_comes_with_the_agent() -> None:
    made = planned(plugins=(plugin(Reserved, "hpcwatch"),))
    assert made.specs["reserved"].broken == ""


def test_import_that_fails_makes_a_broken_spec_with_default_pace() -> None:
    missing = Plugin("missing", "acme", EntryPoint("missing", "no_such_module_at_all:X", GROUP))
    spec = planned("collectors.missing={interval: 30s, anything: 1}", plugins=(missing,)).specs["missing"]
    assert "import failed: ModuleNotFoundError" in spec.broken
    assert (spec.interval_s, spec.required) == (30.0, True)


@pytest.mark.parametrize("enabled", ["", "collectors.lazy.enabled=false"])
def test_collector_that_is_off_is_not_imported(enabled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_plugin_of_test_plan.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    lazy = Plugin("lazy", "acme", EntryPoint("lazy", "lazy_plugin_of_test_plan:Lazy", GROUP))
    made = planned(*filter(None, [enabled]), plugins=(lazy,))
    assert "lazy" in made.off
    assert "lazy_plugin_of_test_plan" not in sys.modules


@pytest.mark.parametrize(("setting", "key"), [("depth=0", "depth"), ("depth=deep", "depth"), ("dept=1", "dept")])
def test_wrong_option_is_the_users_mistake_and_named(setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"collectors\.builtin\.{key}"):
        planned(f"collectors.builtin.{setting}")


def test_options_of_a_collector_that_is_off_are_not_looked_at() -> None:
    assert "builtin" in planned("collectors.builtin={enabled: false, depth: deep}").off
