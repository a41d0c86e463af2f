from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.sim.clock import FakeClock
from agent.sim.harness import Probe, Result
from agent.sim.host import SimHost, SimProcess
from collectors.host import Host

if TYPE_CHECKING:
    from pathlib import Path


class BusyClock(FakeClock):
    """A clock that a millisecond passes on whenever somebody looks."""

    def monotonic(self) -> float:
        self.advance(0.001)
        return super().monotonic()


@pytest.fixture
def node(tmp_path: Path) -> SimHost:
    return SimHost(tmp_path, cpus=1)


def probe(node: SimHost, clock: FakeClock) -> Probe:
    node.write()
    return Probe(node.answering(Host), sysfs=node.sys, procfs=node.proc, clock=clock)


def states(result: Result) -> dict[str, int | float]:
    return {
        series.partition('"')[2].partition('"')[0]: value
        for series, value in result.values.items()
        if series.startswith("host_processes{")
    }


def test_processes_are_counted_by_state(node: SimHost) -> None:
    letters = "RSSDIZTtXP"
    node.processes = {place: SimProcess("x", letter) for place, letter in enumerate(letters, 1)}
    counted = states(probe(node, FakeClock()).collect())
    assert counted == {
        "running": 1, "sleeping": 2, "uninterruptible": 1, "idle": 1, "zombie": 1, "stopped": 2, "other": 2,
    }  # fmt: skip


def test_count_stands_until_the_next_is_due(node: SimHost) -> None:
    clock = FakeClock()
    run = probe(node, clock)
    first = states(run.collect())
    node.processes[77] = SimProcess("new", "Z")
    node.write()
    clock.advance(59)
    assert states(run.collect()) == first
    clock.advance(1)
    assert states(run.collect())["zombie"] == 1


def test_unkillable_needs_two_counts(node: SimHost) -> None:
    node.processes[5] = SimProcess("cp", "D")
    clock = FakeClock()
    run = probe(node, clock)
    assert "host_processes_unkillable" not in run.collect().values
    clock.advance(60)
    assert run.collect().values["host_processes_unkillable"] == 1
    node.processes[5].letter = "S"
    node.write()
    clock.advance(60)
    assert run.collect().values["host_processes_unkillable"] == 0


def test_new_process_under_an_old_id_is_another_one(node: SimHost) -> None:
    node.processes[5] = SimProcess("cp", "D", started=100)
    clock = FakeClock()
    run = probe(node, clock)
    run.collect()
    node.processes[5].started = 900
    node.write()
    clock.advance(60)
    assert run.collect().values["host_processes_unkillable"] == 0


def test_long_count_is_spread_over_runs_except_for_the_first(node: SimHost) -> None:
    node.processes = {pid: SimProcess("x") for pid in range(1, 41)}
    clock = BusyClock()
    run = probe(node, clock)
    assert states(run.collect())["sleeping"] == 40
    node.processes = {pid: SimProcess("x", "R") for pid in range(1, 41)}
    node.write()
    clock.advance(60)
    runs = 1
    while states(run.collect())["running"] == 0:  # the old result stands until the new one is whole
        runs += 1
    assert 6 <= runs <= 8  # 40 processes, 5 ms each run, 1 ms each process
    assert states(run.collect())["running"] == 40


def test_unreadable_process_costs_only_itself(node: SimHost) -> None:
    run = probe(node, FakeClock())
    (node.proc / "900/stat").write_text("garbage")
    result = run.collect()
    assert sum(states(result).values()) == len(node.processes) - 1
    assert [what for what, _ in result.failures] == ["900/stat"]


def test_process_that_ended_meanwhile_is_no_failure(node: SimHost) -> None:
    run = probe(node, FakeClock())
    (node.proc / "900/stat").unlink()
    result = run.collect()
    assert sum(states(result).values()) == len(node.processes) - 1
    assert result.failures == []


def test_hidden_processes_make_the_counts_absent(node: SimHost) -> None:
    clock = FakeClock()
    run = probe(node, clock)
    run.collect()
    del node.processes[1]
    node.write()
    clock.advance(60)
    result = run.collect()
    assert states(result) == {}
    assert "host_load1" in result.values
    ((what, reason),) = result.failures
    assert what == "processes"
    assert "hidepid" in reason
    assert states(run.collect()) == {}  # nor does the old count come back
