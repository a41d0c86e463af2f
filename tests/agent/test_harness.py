"""The test kit for authors of collectors: it shows what a scraper would see, and what the agent would refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.api import Collector, Event, Kind, Metric, NotPresent, Out, Severity, VmSize
from agent.sim.clock import FakeClock
from agent.sim.harness import MemoryState, Probe

LEVEL = Metric("level", Kind.GAUGE, "Level.", ("tank",))


@dataclass(frozen=True)
class TankOptions:
    names: tuple[str, ...] = ("a",)


class Tank(Collector):
    """Reads one file for each tank."""

    name = "tank"
    metrics = (LEVEL,)
    Options = TankOptions
    opened = 0

    def open(self) -> None:
        if not self.ctx.sys.is_dir():
            raise NotPresent(f"no {self.ctx.sys}")
        self.opened += 1
        self.handles = {name: self.ctx.series(LEVEL, name) for name in self.options.names}

    def collect(self, out: Out) -> None:
        for name, series in self.handles.items():
            try:
                out.add(series, float((self.ctx.sys / name).read_text()))
            except OSError as error:
                out.failed(name, error)
        out.event(Event("read", Severity.INFO, "tank", "Read."))


def test_probe_gives_values_failures_and_events(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1.5")
    result = Probe(Tank, TankOptions(("a", "b")), sysfs=tmp_path).collect()
    assert result.values == {'level{tank="a"}': 1.5}
    assert result.failures == [("b", f"{tmp_path / 'b'}: No such file or directory")]
    assert [event.kind for event in result.events] == ["read"]


def test_probe_opens_once_and_again_when_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    probe = Probe(Tank, sysfs=tmp_path)
    probe.collect()
    probe.collect()
    assert probe.collector.opened == 1  # type: ignore[attr-defined] # Tank's own
    probe.open()
    assert probe.collector.opened == 2  # type: ignore[attr-defined] # Tank's own


def test_probe_reads_nothing_of_this_machine_unless_told() -> None:
    ctx = Probe(Tank).context
    assert not any(path.exists() for path in (ctx.sys, ctx.proc, ctx.dev))
    with pytest.raises(NotPresent):
        Probe(Tank).collect()


def test_probe_treats_values_as_the_agent_does(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("nan")
    result = Probe(Tank, sysfs=tmp_path).collect()
    assert result.values == {}
    assert result.failures == [('level{tank="a"}', "not a finite number: nan")]


def test_series_added_twice_is_a_mistake_of_the_collector(tmp_path: Path) -> None:
    class Twice(Tank):
        def collect(self, out: Out) -> None:
            super().collect(out)
            super().collect(out)

    (tmp_path / "a").write_text("1")
    with pytest.raises(AssertionError, match="added twice"):
        Probe(Twice, sysfs=tmp_path).collect()


def test_probe_hands_over_what_it_was_given(tmp_path: Path) -> None:
    clock, state, size = FakeClock(), MemoryState({"a": 1}), VmSize("big")
    probe = Probe(
        Tank,
        procfs=tmp_path / "proc",
        devfs=tmp_path / "dev",
        clock=clock,
        state=state,
        vm_size=size,
        interval_s=3.0,
        timeout_s=2.0,
    )
    ctx = probe.context
    assert (ctx.proc, ctx.dev) == (tmp_path / "proc", tmp_path / "dev")
    assert ctx.clock is clock
    assert ctx.state is state
    assert (ctx.vm_size, ctx.interval_s, ctx.timeout_s, ctx.avoid) == (size, 3.0, 2.0, {})


def test_memory_survives_a_restart_as_json_does() -> None:
    state = MemoryState()
    state.save({"pair": (1, 2), "by_port": {1: "a"}})
    assert state.load() == {"pair": [1, 2], "by_port": {"1": "a"}}
    with pytest.raises(TypeError):
        state.save({"set": {1}})


def test_memory_changes_by_saving_only() -> None:
    state = MemoryState()
    content = {"list": [1]}
    state.save(content)
    content["list"].append(2)
    state.load()["list"].append(3)
    assert state.load() == {"list": [1]}


def test_fake_clock_moves_only_when_told() -> None:
    clock = FakeClock(wall=100.0, monotonic=5.0)
    assert (clock.wall(), clock.monotonic()) == (100.0, 5.0)
    clock.advance(2.5)
    assert (clock.wall(), clock.monotonic()) == (102.5, 7.5)


def test_jump_of_the_wall_clock_leaves_the_monotonic_one() -> None:
    clock = FakeClock(wall=100.0, monotonic=5.0)
    clock.jump(-60)
    assert (clock.wall(), clock.monotonic()) == (40.0, 5.0)
    assert math.isfinite(FakeClock().wall())
