"""The agent's own series: which exist when, and that Prometheus' linter likes them."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent import __version__
from agent.api import Collector, Lane, NotPresent, Out
from agent.derive import View
from agent.derive.selfmetrics import DESCRIPTORS_EVERY_S, SelfMetrics
from agent.exposition import Exposition
from agent.hw.process import OwnProcess
from agent.job import Job
from agent.remote import Usage
from agent.sim.clock import FakeClock
from agent.sim.harness import Probe
from agent.snapshot import Batch, Store
from tests.conftest import need

if TYPE_CHECKING:
    from agent.api import Value


class Plain(Collector):
    name = "plain"
    metrics = ()

    def collect(self, out: Out) -> None:
        pass


class Absent(Plain):
    def open(self) -> None:
        raise NotPresent("no such thing")


class Failing(Plain):
    def collect(self, out: Out) -> None:
        out.failed("one device", "gone")
        raise ValueError("bad")


@dataclass
class Used:
    """What a process uses, made up."""

    started_at: float = 1_799_999_999.1234
    resident: int | None = 30 * 1024 * 1024
    descriptors: int | None = 17
    listings: int = 0

    def resident_bytes(self) -> int | None:
        return self.resident

    def cpu_seconds(self) -> float:
        return 1.23456

    def open_descriptors(self) -> int | None:
        self.listings += 1
        return self.descriptors


@dataclass
class Condition:
    reload_ok: bool = True
    reload_at: float = 1_800_000_000.5
    disabled: dict[str, str] = field(default_factory=dict)
    workers: dict[str, Usage] = field(default_factory=dict)
    state_writable: bool = True
    events_total: int = 0
    refused_series: int = 0


def job_of(cls: type[Collector], clock: FakeClock, *, runs: int = 1, required: bool = False) -> Job:
    """Run a collector as a lane would, in this thread."""
    make = partial(cls, None, Probe(cls).context)
    job = Job(cls.__name__.lower(), make, lane=Lane.SHARED, interval_s=10.0, timeout_s=5.0, required=required)
    for _ in range(runs):
        job.run(None, Store(), clock, lambda events: None)
    return job


class Bench:
    """Self metrics with everything they look at."""

    def __init__(self) -> None:
        self.clock, self.process, self.condition = FakeClock(), Used(), Condition()
        context = Probe(Plain, clock=self.clock).context
        self.metrics = SelfMetrics(context, self.process, lambda: self.condition)

    def batch(self, *jobs: Job) -> Batch:
        batch = Batch()
        self.metrics.derive(View(self.clock.wall(), {}, jobs, ()), batch)
        return batch

    def values(self, *jobs: Job) -> dict[str, Value]:
        snapshot = self.batch(*jobs).finish("hpcwatch", 0.0)
        pairs = zip(snapshot.series, snapshot.values, strict=True)
        return {series.prefix.strip().removeprefix("hpcwatch_"): value for series, value in pairs}


def test_build_tells_the_version() -> None:
    labels = f'version="{__version__}",python="{platform.python_version()}"'
    assert Bench().values()[f"build_info{{{labels}}}"] == 1


def test_collector_that_ran_is_enabled_and_up_with_its_figures() -> None:
    bench = Bench()
    values = bench.values(job_of(Plain, bench.clock, runs=2))
    assert {name: value for name, value in values.items() if "collector=" in name} == {
        'collector_enabled{collector="plain"}': 1,
        'collector_up{collector="plain"}': 1,
        'collector_errors_total{collector="plain"}': 0,
        'collector_timeouts_total{collector="plain"}': 0,
        'collector_series{collector="plain"}': 0,
        'collector_last_success_timestamp_seconds{collector="plain"}': 1_800_000_000.0,
        'collector_duration_seconds{collector="plain"}': 0.0,
    }


def test_collector_whose_hardware_is_absent_is_not_enabled_and_has_no_up() -> None:
    bench = Bench()
    values = bench.values(job_of(Absent, bench.clock))
    assert {name: value for name, value in values.items() if "collector=" in name} == {
        'collector_enabled{collector="absent"}': 0
    }


def test_collector_that_is_required_and_absent_is_enabled_and_down() -> None:
    bench = Bench()
    values = bench.values(job_of(Absent, bench.clock, required=True))
    assert values['collector_enabled{collector="absent"}'] == 1
    assert values['collector_up{collector="absent"}'] == 0


def test_collector_that_failed_is_down_with_every_failure_counted_and_no_success_made_up() -> None:
    bench = Bench()
    values = bench.values(job_of(Failing, bench.clock, runs=2))
    assert values['collector_up{collector="failing"}'] == 0
    assert values['collector_errors_total{collector="failing"}'] == 4
    assert 'collector_last_success_timestamp_seconds{collector="failing"}' not in values
    assert 'collector_duration_seconds{collector="failing"}' not in values


def test_collector_that_is_off_is_not_enabled() -> None:
    bench = Bench()
    bench.condition.disabled = {"gpu": "collectors.gpu.enabled is false"}
    values = bench.values()
    assert {name: value for name, value in values.items() if "collector=" in name} == {
        'collector_enabled{collector="gpu"}': 0
    }


def test_condition_of_the_agent_is_told() -> None:
    bench = Bench()
    bench.condition = Condition(
        reload_ok=False, reload_at=5.0001, state_writable=False, events_total=7, refused_series=3
    )
    values = bench.values()
    assert values["config_last_reload_successful"] == 0
    assert values["config_last_reload_success_timestamp_seconds"] == 5.0
    assert values["state_writable"] == 0
    assert values["events_recorded_total"] == 7
    assert values["exposition_refused_series"] == 3
    bench.condition = Condition()
    assert (bench.values()["config_last_reload_successful"], bench.values()["state_writable"]) == (1, 1)


def test_cost_of_the_agent_is_told() -> None:
    values = Bench().values()
    assert values["process_cpu_seconds_total"] == 1.235
    assert values["process_resident_memory_bytes"] == 31457280
    assert values["process_threads"] == threading.active_count()
    assert values["process_open_fds"] == 17
    assert values["process_start_time_seconds"] == 1_799_999_999.123


def test_cost_that_cannot_be_read_is_absent() -> None:
    bench = Bench()
    bench.process.resident = bench.process.descriptors = None
    assert not {"process_resident_memory_bytes", "process_open_fds"} & bench.values().keys()
    batch = bench.batch()
    batch.finish("hpcwatch", 0.0)
    assert batch.failures == []


def test_descriptors_are_counted_once_a_minute() -> None:
    bench = Bench()
    bench.values()
    bench.process.descriptors = 18
    bench.clock.advance(DESCRIPTORS_EVERY_S - 1)
    assert bench.values()["process_open_fds"] == 17
    bench.clock.advance(1)
    assert bench.values()["process_open_fds"] == 18
    assert bench.process.listings == 2


def test_handles_are_the_same_each_time_so_that_the_page_keeps_its_layout() -> None:
    bench = Bench()
    job = job_of(Plain, bench.clock)
    first, second = bench.batch(job).series, bench.batch(job).series
    assert all(one is other for one, other in zip(first, second, strict=True))


def used() -> Usage:
    usage = Usage()
    usage.note(1.5, 14 << 20)
    usage.end()
    usage.restarts += 1
    usage.note(0.25, 15 << 20)
    return usage


def test_worker_is_told_with_its_predecessors_and_its_memory_only_while_there_is_one() -> None:
    bench = Bench()
    bench.condition.workers = {"gpu": used()}
    values = bench.values()
    assert values['worker_cpu_seconds_total{collector="gpu"}'] == 1.75
    assert values['worker_resident_memory_bytes{collector="gpu"}'] == 15 << 20
    assert values['worker_restarts_total{collector="gpu"}'] == 1
    assert values['worker_stuck{collector="gpu"}'] == 0
    bench.condition.workers["gpu"].end()
    assert 'worker_resident_memory_bytes{collector="gpu"}' not in bench.values()


def test_every_declared_metric_appears_and_every_one_that_appears_is_declared() -> None:
    bench = Bench()
    bench.condition.disabled = {"gpu": "collectors.gpu.enabled is false"}
    bench.condition.workers = {"plain": used()}
    emitted = {series.metric for series in bench.batch(job_of(Plain, bench.clock)).series}
    assert emitted == set(SelfMetrics.metrics)


def test_linter_of_prometheus_finds_nothing_wrong_with_the_agents_own_page() -> None:
    promtool = need("promtool", "prometheus")
    bench = Bench()
    bench.condition.disabled = {"gpu": "collectors.gpu.enabled is false"}
    bench.condition.workers = {"plain": used()}
    batch = bench.batch(job_of(Plain, bench.clock), job_of(Failing, bench.clock))
    store = Store()
    store.put(batch.finish("hpcwatch", 0.0))
    page = Exposition(store).page()
    assert page.count(b"# TYPE") == len(SelfMetrics.metrics)
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_own_process_measures_itself() -> None:
    process = OwnProcess()
    resident = process.resident_bytes()
    assert resident is not None
    told = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert told is not None
    assert resident == pytest.approx(int(told[1]) * 1024, rel=0.1)
    before = process.open_descriptors()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    after = process.open_descriptors()
    os.close(descriptor)
    assert before is not None
    assert after == before + 1
    assert before == sum(path.exists() for path in [*Path("/proc/self/fd").iterdir()])
    assert process.cpu_seconds() > 0


def test_own_process_without_proc_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "open", missing)
    monkeypatch.setattr(os, "stat", missing)
    process = OwnProcess()
    assert (process.resident_bytes(), process.open_descriptors()) == (None, None)
