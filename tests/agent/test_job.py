"""Claims about one collector under policy: failures, absence, deadlines, and what is logged (agent.job)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from agent.api import Event, Lane, NotPresent, Series, Severity
from agent.job import DEVICE_SLACK_S, Job, JobState
from agent.sim.clock import FakeClock
from agent.snapshot import EvictedError, Store
from tests.agent.kit import Scripted, context, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from agent.api import Out


class Bench:
    """One job run by hand, on a clock that stands still."""

    def __init__(self, collector: Scripted, clock: FakeClock) -> None:
        self.clock = clock
        self.store = Store()
        self.events: list[Event] = []
        self.job = Job("scripted", lambda: collector, lane=Lane.SHARED, interval_s=10.0, timeout_s=5.0)
        self.job.hand_over(self)

    def run(self, emit: Callable[[Sequence[Event]], None] | None = None) -> dict[str, int | float]:
        assert self.job.run(self, self.store, self.clock, emit or self.events.extend)
        return shown(self.store, "scripted")


def bench(tmp_path: Path, **behaviour: Callable[..., object]) -> Bench:
    clock = FakeClock()
    return Bench(Scripted(context(tmp_path, clock), **behaviour), clock)


def refuse(error: BaseException) -> Callable[..., object]:
    def behave(*_: object) -> None:
        raise error

    return behave


def test_run_is_published_whole_with_the_time_of_its_start(tmp_path: Path) -> None:
    def slow(out: Out, series: Series) -> None:
        out.add(series, 2**63 + 1)
        a.clock.advance(2)

    a = bench(tmp_path, on_collect=slow)
    started = a.clock.wall()
    assert a.run() == {"kit_value": 2**63 + 1}
    assert a.store.latest()[1]["scripted"].taken_at == started
    assert (a.job.state, a.job.up, a.job.enabled, a.job.points, a.job.duration_s) == (JobState.OK, True, True, 1, 2.0)
    assert a.job.last_success_at == started


@pytest.mark.parametrize(
    "error", [ValueError("boom"), SystemExit("boom"), KeyboardInterrupt("boom"), GeneratorExit("boom")], ids=repr
)
def test_whatever_a_collector_raises_costs_its_own_series_and_is_counted(tmp_path: Path, error: BaseException) -> None:
    a = bench(tmp_path)
    assert a.run()
    a.job._collector.on_collect = refuse(error)  # type: ignore[union-attr]
    for count in (1, 2, 3):
        assert a.run() == {}
        assert (a.job.state, a.job.reason) == (JobState.FAILED, f"{type(error).__name__}: boom")
        assert (a.job.errors, a.job.up, a.job.enabled) == (count, False, True)


def test_half_a_run_is_not_published(tmp_path: Path) -> None:
    def half(out: Out, series: Series) -> None:
        out.add(series, 1)
        raise ValueError

    assert bench(tmp_path, on_collect=half).run() == {}


def test_exception_that_cannot_even_be_shown_costs_its_collector_only(tmp_path: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    a = bench(tmp_path, on_collect=refuse(MuteError()))
    assert a.run() == {}
    assert (a.job.state, a.job.reason) == (JobState.FAILED, "MuteError")


def test_collector_that_failed_is_opened_again_before_it_collects(tmp_path: Path) -> None:
    a = bench(tmp_path, on_open=refuse(OSError(13, "Permission denied", "/dev/nvidia0")))
    assert a.run() == {}
    assert (a.job.state, a.job.reason) == (JobState.FAILED, "/dev/nvidia0: Permission denied")
    collector = a.job._collector
    assert isinstance(collector, Scripted)
    collector.on_open = lambda: None
    assert a.run() == {"kit_value": 1}
    assert a.run() == {"kit_value": 1}
    assert collector.opened == 2
    collector.on_collect = refuse(ValueError())
    a.run()
    collector.on_collect = lambda out, series: out.add(series, 2)
    assert a.run() == {"kit_value": 2}
    assert collector.opened == 3


def test_collector_is_opened_again_every_minute_to_find_what_is_new(tmp_path: Path) -> None:
    a = bench(tmp_path)
    a.run()
    collector = a.job._collector
    assert isinstance(collector, Scripted)
    for _ in range(5):
        a.clock.advance(10)
        a.run()
    assert collector.opened == 1
    a.clock.advance(9.98)  # a tick may come a little early
    a.run()
    assert collector.opened == 2
    a.clock.advance(10)
    a.run()
    assert (collector.opened, collector.closed) == (2, 0)


def test_absent_hardware_is_no_error_is_closed_and_looked_for_again(tmp_path: Path) -> None:
    a = bench(tmp_path, on_open=refuse(NotPresent("no device in /sys/class/kit")))
    first = a.job.make()
    assert isinstance(first, Scripted)
    assert a.run() == {}
    assert (a.job.state, a.job.reason) == (JobState.ABSENT, "no device in /sys/class/kit")
    assert (a.job.errors, a.job.enabled, a.job.up, first.closed) == (0, False, False, 1)
    first.on_open = lambda: None
    assert a.run() == {"kit_value": 1}
    assert a.job.enabled


def test_hardware_that_was_here_and_is_gone_stays_enabled_and_is_down(tmp_path: Path) -> None:
    a = bench(tmp_path)
    a.run()
    a.job._collector.on_collect = refuse(NotPresent("gone"))  # type: ignore[union-attr]
    assert a.run() == {}
    assert (a.job.state, a.job.enabled, a.job.up, a.job.errors) == (JobState.ABSENT, True, False, 0)


def test_required_hardware_that_is_absent_is_enabled_and_down(tmp_path: Path) -> None:
    a = bench(tmp_path, on_open=refuse(NotPresent("none")))
    a.job.required = True
    a.run()
    assert (a.job.enabled, a.job.up) == (True, False)


def test_collector_that_cannot_be_made_fails_and_is_made_again(tmp_path: Path) -> None:
    a = bench(tmp_path)
    make, a.job.make = a.job.make, refuse(ImportError("no module"))  # type: ignore[assignment]
    assert a.run() == {}
    assert a.job.state is JobState.FAILED
    a.job.make = make
    assert a.run() == {"kit_value": 1}


def test_failed_device_leaves_the_collector_up_and_is_counted_every_time(tmp_path: Path) -> None:
    def part(out: Out, series: Series) -> None:
        out.add(series, 1)
        out.failed("mlx5_3", OSError(5, "Input/output error"))

    a = bench(tmp_path, on_collect=part)
    for count in (1, 2, 3):
        assert a.run() == {"kit_value": 1}
        assert (a.job.up, a.job.errors) == (True, count)


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "scripted"]


def test_repeated_failure_of_a_device_is_logged_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wrong = ["timeout", "timeout", "timeout", "reset", ""]

    def part(out: Out, series: Series) -> None:
        text = wrong.pop(0)
        if text:
            out.failed("mlx5_3", text)

    a = bench(tmp_path, on_collect=part)
    for _ in range(5):
        a.run()
    assert [text for _, text in messages(caplog) if "mlx5_3" in text] == [
        "mlx5_3: timeout",
        "mlx5_3: reset",
        "mlx5_3: no longer failing",
    ]
    assert a.job.errors == 4


def test_failure_whose_text_differs_in_numbers_only_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = iter(range(3))
    a = bench(tmp_path, on_collect=lambda out, _: out.failed("net/dev", f"row {next(turns)} has 3 columns"))
    for _ in range(3):
        a.run()
    assert [text for _, text in messages(caplog)] == ["net/dev: row 0 has 3 columns"]


def test_run_that_failed_as_a_whole_says_nothing_of_a_device_it_did_not_come_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    script = ["part", "whole", "part", ""]

    def collect(out: Out, series: Series) -> None:
        what = script.pop(0)
        if what == "whole":
            raise OSError(5, "Input/output error")
        if what == "part":
            out.failed("mc0", "no answer")

    a = bench(tmp_path, on_collect=collect)
    for _ in range(4):
        a.run()
    assert [text for _, text in messages(caplog) if "mc0" in text] == ["mc0: no answer", "mc0: no longer failing"]


def test_repeated_failure_of_a_collector_is_logged_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    a = bench(tmp_path, on_collect=refuse(ValueError("boom")))
    for _ in range(3):
        a.run()
    a.job._collector.on_collect = lambda out, series: out.add(series, 1)  # type: ignore[union-attr]
    for _ in range(3):
        a.run()
    assert messages(caplog) == [
        ("ERROR", "collector scripted failed: ValueError: boom; tried again in 10 s"),
        ("INFO", "collector scripted: running every 10 s"),
    ]


def test_events_are_handed_on_and_a_malformed_one_costs_itself(tmp_path: Path) -> None:
    def talk(out: Out, series: Series) -> None:
        out.add(series, 1)
        for kind in ("first", "bad", "last"):
            out.event(Event(kind, Severity.INFO, "kit", kind))

    def emit(events: Sequence[Event]) -> None:
        if any(event.kind == "bad" for event in events):
            raise TypeError("labels are no mapping")
        a.events.extend(events)

    a = bench(tmp_path, on_collect=talk)
    assert a.run(emit) == {"kit_value": 1}
    assert [event.kind for event in a.events] == ["first", "last"]
    assert (a.job.up, a.job.errors) == (True, 1)


def test_events_of_a_run_that_failed_are_kept(tmp_path: Path) -> None:
    def talk(out: Out, series: Series) -> None:
        out.event(Event("gpu_xid", Severity.CRITICAL, "gpu", "seen once, never again"))
        raise ValueError

    a = bench(tmp_path, on_collect=talk)
    a.run()
    assert [event.kind for event in a.events] == ["gpu_xid"]


def test_failure_named_by_something_odd_does_not_end_the_lane(tmp_path: Path) -> None:
    a = bench(tmp_path, on_collect=lambda out, series: out.failed(["not", "hashable"], "text"))
    a.run()
    assert (a.job.state, a.job.errors) == (JobState.OK, 1)


def test_run_is_evicted_at_its_deadline_and_not_before(tmp_path: Path) -> None:
    def hang(out: Out, series: Series) -> None:
        out.working_on("mlx5_3")
        a.clock.advance(4.999)
        verdicts.append(a.job.evict(a.store, a.clock.monotonic()))
        a.clock.advance(0.001)
        verdicts.append(a.job.evict(a.store, a.clock.monotonic()))
        verdicts.append(a.job.evict(a.store, a.clock.monotonic()))

    verdicts: list[bool] = []
    a = bench(tmp_path)
    assert a.run() == {"kit_value": 1}
    a.job._collector.on_collect = hang  # type: ignore[union-attr]
    assert a.run() == {}
    assert verdicts == [False, True, False]
    assert (a.job.state, a.job.reason) == (JobState.HUNG, "no answer within 5 s on mlx5_3")
    assert (a.job.evictions, a.job.errors, a.job.up, a.job.enabled) == (1, 1, False, True)
    assert not a.job.evict(a.store, a.clock.monotonic() + 100), "what has returned cannot be evicted"


def test_deadline_moves_on_with_each_device_where_each_has_the_timeout_to_itself(tmp_path: Path) -> None:
    def read(out: Out, series: Series) -> None:
        for device in ("GPU 0", "GPU 1", "GPU 2"):
            out.working_on(device)
            a.clock.advance(4.999)
            verdicts.append(a.job.evict(a.store, a.clock.monotonic()))
        out.working_on("driver", 20.0)
        a.clock.advance(20.0 + DEVICE_SLACK_S - 0.001)
        verdicts.append(a.job.evict(a.store, a.clock.monotonic()))
        a.clock.advance(0.001)
        verdicts.append(a.job.evict(a.store, a.clock.monotonic()))

    verdicts: list[bool] = []
    a = bench(tmp_path, on_collect=read)
    a.job.times_devices = True
    a.run()
    assert verdicts == [False, False, False, False, True]


def test_what_an_evicted_run_still_brings_is_refused(tmp_path: Path) -> None:
    def late(out: Out, series: Series) -> None:
        out.add(series, 1)
        out.event(Event("kit", Severity.INFO, "kit", "before the deadline"))
        a.clock.advance(5)
        assert a.job.evict(a.store, a.clock.monotonic())
        late_output: list[Callable[[], object]] = [
            lambda: out.add(series, 2),
            lambda: out.extend([series], [2]),
            lambda: out.event(Event("kit", Severity.INFO, "kit", "late")),
            lambda: out.failed("mlx5_0", "late"),
            lambda: out.working_on("mlx5_0"),
        ]
        for bring in late_output:
            with pytest.raises(EvictedError):
                bring()

    a = bench(tmp_path, on_collect=late)
    assert a.run() == {}
    assert a.events == []
    assert a.job.state is JobState.HUNG
    a.job._collector.on_collect = lambda out, series: out.add(series, 3)  # type: ignore[union-attr]
    assert a.run() == {"kit_value": 3}


def test_repeated_hang_is_logged_once_and_counted_every_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def hang(out: Out, series: Series) -> None:
        a.clock.advance(5)
        a.job.evict(a.store, a.clock.monotonic())

    a = bench(tmp_path, on_collect=hang)
    for _ in range(3):
        a.run()
    assert len(messages(caplog)) == 1
    assert (a.job.evictions, a.job.errors) == (3, 3)


def test_late_return_of_a_retired_run_leaves_its_successors_series_alone(tmp_path: Path) -> None:
    def hang(out: Out, series: Series) -> None:
        a.job.retire(a.store)
        successor.job.hand_over(successor)
        successor.store = a.store
        successor.run()
        raise ValueError("too late")

    successor = bench(tmp_path)
    a = bench(tmp_path, on_collect=hang)
    assert a.run() == {"kit_value": 1}
    assert not a.job.run(a, a.store, a.clock, a.events.extend), "retired means never again"


def test_only_the_thread_in_charge_runs_a_job(tmp_path: Path) -> None:
    a = bench(tmp_path)
    assert not a.job.run(object(), a.store, a.clock, a.events.extend)
    assert a.job.hand_over(other := object())
    assert not a.job.run(a, a.store, a.clock, a.events.extend)
    assert a.job.run(other, a.store, a.clock, a.events.extend)


def test_running_job_is_not_handed_over(tmp_path: Path) -> None:
    a = bench(tmp_path, on_collect=lambda out, series: out.add(series, int(a.job.hand_over(object()))))
    assert a.run() == {"kit_value": 0}
    assert a.run() == {"kit_value": 0}


def test_failing_close_is_told_and_the_collector_is_gone_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = bench(tmp_path)
    a.run()
    a.job._collector.close = refuse(SystemExit("no"))  # type: ignore[method-assign, union-attr]
    a.job.close()
    a.job.close()
    assert messages(caplog) == [("WARNING", "collector scripted: close failed: SystemExit: no")]


def test_hardware_that_was_only_expected_does_not_count_as_seen(tmp_path: Path) -> None:
    def is_absent(out: Out, series: Series) -> None:
        raise NotPresent("nothing here")

    a = bench(tmp_path)
    a.run()
    collector = a.job._collector
    assert a.job.was_present
    a.job.was_present = False
    collector.seen = lambda: False  # type: ignore[union-attr, method-assign]
    a.run()
    assert (a.job.enabled, a.job.was_present) == (True, False)
    collector.on_collect = is_absent  # type: ignore[union-attr]
    a.run()
    assert not a.job.enabled
