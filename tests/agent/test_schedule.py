"""Claims about when and in which thread collectors run: the grid, lanes, eviction, retry (agent.schedule)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.api import Lane
from agent.context import SystemClock
from agent.job import Job, JobState
from agent.schedule import Scheduler
from agent.sim.clock import FakeClock
from agent.snapshot import Store
from tests.agent.kit import (
    FileOptions,
    Reading,
    Scripted,
    Steady,
    ThreadReading,
    answers,
    context,
    hangs,
    recovers,
    shown,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.api import Out


class Grid:
    """A lane's arithmetic without its thread: when the job would run, for as long as one likes."""

    def __init__(self, interval_s: float, wall: float = 1_800_000_003.7) -> None:
        self.clock = FakeClock(wall=wall)
        self.scheduler = Scheduler(Store(), self.clock, lambda _: None, lambda: None)
        self.job = Job("kit", lambda: None, lane=Lane.SHARED, interval_s=interval_s, timeout_s=5.0)  # type: ignore[arg-type, return-value]

    def sleep(self) -> float:
        """Sleep until the job is due; return how long that was."""
        wait_s = self.scheduler.next_due_s(self.job) - self.clock.monotonic()
        self.clock.advance(wait_s)
        return wait_s


@pytest.mark.parametrize("interval_s", [0.5, 1.0, 5.0, 10.0, 15.0, 60.0, 3600.0])
def test_runs_lie_on_the_wall_clocks_grid(interval_s: float) -> None:
    grid = Grid(interval_s)
    first = grid.sleep()
    assert 0 < first <= interval_s + 0.001 * interval_s + 0.06
    for _ in range(5):
        off_s = grid.clock.wall() % interval_s
        assert min(off_s, interval_s - off_s) < 1e-3
        grid.clock.advance(0.04)  # the run itself
        assert grid.sleep() == pytest.approx(interval_s - 0.04, abs=1e-3)


def test_two_nodes_that_started_at_different_times_collect_at_the_same_instants() -> None:
    early, late = Grid(10.0, wall=1_800_000_001.0), Grid(10.0, wall=1_800_000_008.9)
    early.sleep()
    late.sleep()
    assert early.clock.wall() == pytest.approx(late.clock.wall(), abs=1e-3)


def test_run_longer_than_its_interval_skips_points_and_makes_no_burst() -> None:
    grid = Grid(10.0)
    grid.sleep()
    grid.clock.advance(34)
    assert grid.sleep() == pytest.approx(6.0, abs=1e-3)
    grid.clock.advance(0.01)
    assert grid.sleep() == pytest.approx(9.99, abs=1e-3)


@pytest.mark.parametrize("jump_s", [3.0, -3.0, 3600.0, -3600.0, 86400.0 * 365, -86400.0 * 365, 0.4, -0.4])
def test_jump_of_the_wall_clock_neither_stalls_nor_bursts(jump_s: float) -> None:
    grid = Grid(10.0)
    grid.sleep()
    started_s, runs = grid.clock.monotonic(), 0
    for _ in range(30):
        grid.clock.jump(jump_s)
        wait_s = grid.sleep()
        assert 0 < wait_s <= 10.06, "at most one interval away, whatever the clock says"
        runs += 1
        for _ in range(9):
            grid.clock.advance(0.01)
            grid.sleep()
            runs += 1
    elapsed_s = grid.clock.monotonic() - started_s
    assert runs <= elapsed_s / 10 + 31, "at most one run more for each jump"


@pytest.mark.parametrize("interval_s", [1.0, 10.0, 3600.0])
def test_slewed_clock_makes_no_second_run_for_one_point(interval_s: float) -> None:
    grid = Grid(interval_s)
    grid.sleep()
    for _ in range(100):
        grid.clock.advance(0.001)
        wait_s = grid.sleep()
        grid.clock.jump(-0.0005 * wait_s)  # NTP slows the wall clock as far as adjtime allows
        assert wait_s > 0.9 * interval_s


def test_run_that_came_early_with_its_neighbours_is_not_repeated_at_its_own_time() -> None:
    grid = Grid(10.0, wall=1_800_000_009.96)
    assert grid.sleep() == pytest.approx(10.04, abs=1e-3)


def test_absent_hardware_is_looked_for_once_a_minute() -> None:
    grid = Grid(5.0)
    grid.job.state = JobState.ABSENT
    grid.sleep()
    grid.clock.advance(0.01)
    assert grid.sleep() == pytest.approx(59.99, abs=1e-3)


def test_deadline_is_watched_from_the_start_of_the_run() -> None:
    grid = Grid(10.0)
    grid.scheduler.jobs["kit"] = grid.job
    now_s = grid.clock.monotonic()
    grid.job.due_s = now_s + 7
    assert grid.scheduler.check() == now_s + 12
    grid.job.started_s = now_s - 2
    assert grid.scheduler.check() == now_s + 3
    grid.job.batch.evicted = True
    assert grid.scheduler.check() == now_s + 5, "it may come back and get stuck again"


def test_supervisor_never_waits_for_ever() -> None:
    grid = Grid(10.0)
    now_s = grid.clock.monotonic()
    assert grid.scheduler.check() == now_s + 60
    grid.scheduler.jobs["kit"] = grid.job
    grid.job.due_s = float("inf")  # looked at once
    assert grid.scheduler.check() == now_s + 60


def test_lane_that_died_is_noticed_and_one_that_hangs_is_no_cause_to_restart() -> None:
    grid = Grid(10.0)
    grid.scheduler.jobs["kit"] = grid.job
    grid.job.due_s = grid.clock.monotonic()
    grid.clock.advance(3600)
    assert grid.scheduler.progressing, "before its first run nothing is overdue"
    grid.job.runs = 1
    assert not grid.scheduler.progressing
    grid.job.started_s = grid.clock.monotonic() - 3600
    assert grid.scheduler.progressing


# Lanes, with their threads


class Lanes:
    """A scheduler at work, with a thread that watches its deadlines as the agent's main thread does."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.ctx = context(tmp_path)
        self.store = Store()
        self.ticks = 0
        self.scheduler = Scheduler(self.store, SystemClock(), lambda _: None, self._tick)
        self.fifos: list[Path] = []
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._supervise)
        self._watch.start()

    def _tick(self) -> None:
        self.ticks += 1

    def _supervise(self) -> None:
        while not self._stop.wait(0.01):
            self.scheduler.check()

    def job(self, cls: type[Reading], text: str = "1", timeout_s: float = 0.3, scale: int = 1) -> Job:
        path = self.path(cls)
        if not path.exists():
            answers(path, text)
        options = FileOptions(str(path), str(self.tmp_path / "diary"), scale)
        return Job(cls.name, lambda: cls(options, self.ctx), lane=cls.lane, interval_s=0.1, timeout_s=timeout_s)

    def path(self, cls: type[Reading]) -> Path:
        return self.tmp_path / cls.name

    def hang(self, cls: type[Reading]) -> None:
        hangs(self.path(cls))
        self.fifos.append(self.path(cls))

    def values(self, cls: type[Reading]) -> list[int | float]:
        return list(shown(self.store, cls.name).values())

    def diary(self) -> list[str]:
        return (self.tmp_path / "diary").read_text().splitlines()

    def shut_down(self) -> None:
        for fifo in self.fifos:
            recovers(fifo, "0")
        self.scheduler.stop()
        self._stop.set()
        self._watch.join()


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lane-")]


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[Lanes]:
    lanes = Lanes(tmp_path)
    yield lanes
    lanes.shut_down()
    until(lambda: not lane_threads(), "all lane threads end")


def other_of(cls: type[Reading]) -> type[Reading]:
    return Steady if cls is Reading else Reading


@pytest.mark.parametrize("cls", [Reading, ThreadReading], ids=["shared", "thread"])
def test_hung_collector_is_evicted_and_the_others_go_on(lanes: Lanes, cls: type[Reading]) -> None:
    stuck, steady = lanes.job(cls), lanes.job(Steady)
    lanes.scheduler.start([stuck, steady])
    until(lambda: lanes.values(cls) == [1] and lanes.values(Steady) == [1])
    lanes.hang(cls)
    until(lambda: stuck.state is JobState.HUNG)
    assert lanes.values(cls) == [], "its series vanish"
    assert (stuck.up, stuck.enabled, stuck.evictions) == (False, True, 1)
    answers(lanes.path(Steady), "2")
    until(lambda: lanes.values(Steady) == [2], "the other collector goes on")
    runs = steady.runs
    until(lambda: steady.runs >= runs + 3)
    assert (stuck.state, stuck.evictions) == (JobState.HUNG, 1), "given up once, not once a tick"
    assert len(lane_threads()) == 2, "one stuck thread, one that works"


@pytest.mark.parametrize("cls", [Reading, ThreadReading], ids=["shared", "thread"])
def test_hung_collector_is_tried_again_when_its_thread_came_back(lanes: Lanes, cls: type[Reading]) -> None:
    stuck, steady = lanes.job(cls), lanes.job(Steady)
    lanes.scheduler.start([stuck, steady])
    until(lambda: lanes.values(cls) == [1])
    lanes.hang(cls)
    until(lambda: stuck.state is JobState.HUNG)
    recovers(lanes.path(cls), "3")
    until(lambda: lanes.values(cls) == [3] and stuck.up)
    assert stuck.evictions == 1


def test_hang_at_the_very_first_open_does_not_hold_up_the_lane(lanes: Lanes) -> None:
    gate = threading.Event()

    class Slow(Reading):
        name = "kit_slow"

        def open(self) -> None:
            gate.wait(30)

        def collect(self, out: Out) -> None:
            """Nothing to add."""

    stuck = lanes.job(Slow)
    lanes.scheduler.start([stuck, lanes.job(Steady)])
    until(lambda: stuck.evictions == 1 and lanes.values(Steady) == [1])
    gate.set()
    until(lambda: stuck.up)


def test_second_hang_after_a_recovery_is_evicted_in_time_too(lanes: Lanes) -> None:
    stuck = lanes.job(Reading)
    lanes.scheduler.start([stuck, lanes.job(Steady)])
    for count in (1, 2, 3):
        lanes.hang(Reading)
        until(lambda count=count: stuck.evictions == count, timeout_s=3.0)  # type: ignore[misc]
        recovers(lanes.path(Reading), "3")
        until(lambda: stuck.up)


def test_shared_collectors_run_in_turn_in_one_thread(lanes: Lanes) -> None:
    inside: list[str] = []
    met: set[tuple[str, ...]] = set()
    threads: set[str] = set()

    class Careful(Reading):
        def collect(self, out: Out) -> None:
            inside.append(self.name)
            threads.add(threading.current_thread().name)
            met.add(tuple(inside))
            inside.remove(self.name)

    jobs = []
    for number in range(4):
        cls = type(f"Careful{number}", (Careful,), {"name": f"careful_{number}"})
        jobs.append(lanes.job(cls))
    lanes.scheduler.start(jobs)
    until(lambda: all(job.runs >= 3 for job in jobs))
    assert met == {(job.name,) for job in jobs}
    assert threads == {"lane-shared"}


def test_collectors_due_together_make_one_tick(lanes: Lanes) -> None:
    jobs = [lanes.job(Reading), lanes.job(Steady)]
    lanes.scheduler.start(jobs)
    until(lambda: all(job.runs >= 5 for job in jobs))
    assert lanes.ticks <= max(job.runs for job in jobs) + 2


def test_thread_collector_does_not_make_the_shared_ones_wait(lanes: Lanes) -> None:
    slow, steady = lanes.job(ThreadReading, timeout_s=30.0), lanes.job(Steady)
    lanes.path(ThreadReading).unlink()
    lanes.hang(ThreadReading)
    lanes.scheduler.start([slow, steady])
    until(lambda: steady.runs >= 3)
    assert (slow.runs, slow.state) == (0, JobState.STARTING)


def test_removed_collector_vanishes_at_once_and_is_closed_by_its_thread(lanes: Lanes) -> None:
    gone, steady = lanes.job(Reading), lanes.job(Steady)
    lanes.scheduler.start([gone, steady])
    until(lambda: gone.up and steady.up)
    lanes.scheduler.remove(Reading.name)
    assert lanes.values(Reading) == []
    until(lambda: "kit_shared close" in lanes.diary())
    runs = steady.runs
    until(lambda: steady.runs > runs + 1)
    assert lanes.values(Reading) == []
    assert lane_threads() == ["lane-shared"]


def test_removing_the_last_collector_of_a_lane_ends_its_thread_and_closes_it(lanes: Lanes) -> None:
    lanes.scheduler.start([lanes.job(ThreadReading), lanes.job(Steady)])
    until(lambda: lanes.values(ThreadReading) == [1] and lanes.values(Steady) == [1])
    for name in (ThreadReading.name, Steady.name):
        lanes.scheduler.remove(name)
    until(lambda: not lane_threads())
    assert {"kit_thread close", "kit_steady close"} <= set(lanes.diary())


def test_replaced_collector_is_closed_before_its_successor_opens(lanes: Lanes) -> None:
    lanes.scheduler.start([lanes.job(Reading), lanes.job(Steady)])
    until(lambda: lanes.values(Reading) == [1])
    lanes.scheduler.remove(Reading.name)
    lanes.scheduler.start([lanes.job(Reading, scale=10)])
    until(lambda: lanes.values(Reading) == [10])
    assert [line for line in lanes.diary() if "shared" in line] == [
        "kit_shared open",
        "kit_shared close",
        "kit_shared open",
    ]
    assert lane_threads() == ["lane-shared"], "the successor joins the lane that is there"


@pytest.mark.parametrize("cls", [Reading, ThreadReading], ids=["shared", "thread"])
def test_successor_of_a_hung_collector_waits_for_it_and_is_no_second_reader(lanes: Lanes, cls: type[Reading]) -> None:
    steady = lanes.job(Steady)
    lanes.scheduler.start([lanes.job(cls), steady])
    until(lambda: lanes.values(cls) == [1])
    lanes.hang(cls)
    until(lambda: lanes.scheduler.jobs[cls.name].state is JobState.HUNG)
    for _ in range(20):
        lanes.scheduler.remove(cls.name)
        lanes.scheduler.start([lanes.job(cls, scale=10)])
    successor = lanes.scheduler.jobs[cls.name]
    assert (successor.state, successor.enabled, successor.up) == (JobState.HUNG, True, False)
    runs = steady.runs
    until(lambda: steady.runs > runs + 1)
    assert successor.runs == 0
    assert len(lane_threads()) <= 2, "twenty reloads, one stuck thread"
    recovers(lanes.path(cls), "2")
    until(lambda: lanes.values(cls) == [20] and successor.up)


def test_removing_a_collector_in_the_middle_of_a_hang_frees_the_lane(lanes: Lanes) -> None:
    stuck, steady = lanes.job(Reading, timeout_s=3600.0), lanes.job(Steady)
    lanes.scheduler.start([stuck, steady])
    until(lambda: stuck.up)
    lanes.hang(Reading)
    until(lambda: (since_s := stuck.started_s) is not None and time.monotonic() - since_s > 0.2, "it hangs")
    lanes.scheduler.remove(Reading.name)
    runs = steady.runs
    until(lambda: steady.runs > runs + 1, "nobody watches the removed collector's deadline, so nobody may need to")


def test_collector_that_is_removed_while_its_predecessor_hangs_never_begins(lanes: Lanes) -> None:
    lanes.scheduler.start([lanes.job(ThreadReading), lanes.job(Steady)])
    until(lambda: lanes.values(ThreadReading) == [1])
    lanes.hang(ThreadReading)
    until(lambda: lanes.scheduler.jobs[ThreadReading.name].state is JobState.HUNG)
    lanes.scheduler.remove(ThreadReading.name)
    second = lanes.job(ThreadReading, scale=10)
    lanes.scheduler.start([second])
    lanes.scheduler.remove(ThreadReading.name)
    recovers(lanes.path(ThreadReading), "2")
    until(lambda: lane_threads() == ["lane-shared"])
    assert second.runs == 0
    assert lanes.values(ThreadReading) == []


def test_stopping_waits_for_no_one_that_hangs(lanes: Lanes) -> None:
    lanes.scheduler.start([lanes.job(Reading), lanes.job(ThreadReading), lanes.job(Steady)])
    until(lambda: lanes.values(Reading) == [1] and lanes.values(ThreadReading) == [1])
    lanes.hang(Reading)
    lanes.hang(ThreadReading)
    until(lambda: all(lanes.scheduler.jobs[c.name].state is JobState.HUNG for c in (Reading, ThreadReading)))
    stopping = threading.Thread(target=lanes.scheduler.stop)
    stopping.start()
    stopping.join(2.5)
    assert not stopping.is_alive()
    assert "kit_steady close" in lanes.diary(), "who can is closed properly"


def test_two_hundred_hangs_and_recoveries_leave_nothing_behind(tmp_path: Path) -> None:
    gate, waiting = threading.Semaphore(0), threading.Event()
    clock = FakeClock()

    class Gate(Reading):
        def open(self) -> None:
            """Nothing to find."""

        def collect(self, out: Out) -> None:
            waiting.set()
            gate.acquire()

    scheduler = Scheduler(Store(), clock, lambda _: None, lambda: None)
    job = Job("kit", lambda: Gate(FileOptions(), context(tmp_path)), lane=Lane.SHARED, interval_s=10, timeout_s=5)
    steady = Job("steady", lambda: Scripted(context(tmp_path)), lane=Lane.SHARED, interval_s=10, timeout_s=5)
    scheduler.start([job, steady])
    counts = []
    for count in range(1, 201):
        assert waiting.wait(10)
        waiting.clear()
        clock.advance(5)
        scheduler.check()
        assert job.evictions == count
        gate.release()
        until(lambda count=count: job.runs == count)  # type: ignore[misc]
        counts.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), len(scheduler._runners)))
    gate.release()
    until(lambda: job.up)
    assert counts[10] == counts[-1]
    scheduler.stop()
    until(lambda: not lane_threads())


def test_two_hundred_reloads_leave_nothing_behind(lanes: Lanes) -> None:
    lanes.scheduler.start([lanes.job(Reading), lanes.job(ThreadReading), lanes.job(Steady)])
    for number in range(200):
        for cls in (Reading, ThreadReading):
            lanes.scheduler.remove(cls.name)
        lanes.scheduler.start([lanes.job(Reading, scale=number), lanes.job(ThreadReading, scale=number)])
    until(lambda: lanes.values(Reading) == [199] and lanes.values(ThreadReading) == [199])
    until(lambda: len(lane_threads()) == 2)
    assert len([runner for runner in lanes.scheduler._runners if not runner.ended]) == 2
    assert lanes.scheduler._leaving == lanes.scheduler._waiting == {}
    opened = [line for line in lanes.diary() if line == "kit_shared open"]
    closed = [line for line in lanes.diary() if line == "kit_shared close"]
    assert len(opened) == len(closed) + 1


def test_collector_that_hangs_when_it_is_closed_does_not_hold_up_its_lane(lanes: Lanes) -> None:
    gate = threading.Event()

    class Clinging(Reading):
        name = "kit_clinging"

        def close(self) -> None:
            gate.wait(30)

    clinging, steady = lanes.job(Clinging), lanes.job(Steady)
    lanes.scheduler.start([clinging, steady])
    until(lambda: clinging.runs and lanes.values(Steady) == [1])
    lanes.scheduler.remove("kit_clinging")
    answers(lanes.path(Steady), "2")
    until(lambda: lanes.values(Steady) == [2], "the other collector goes on")
    gate.set()


def test_lane_that_gets_no_thread_is_started_when_there_are_threads_again(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as starved:
        starved.setattr(threading.Thread, "start", refuse)
        lanes.scheduler.start([lanes.job(Steady)])
        for _ in range(3):
            assert lanes.scheduler.check() <= time.monotonic() + 1.1
    assert sum("wait for a thread" in message for message in caplog.messages) == 1
    lanes.scheduler.check()
    until(lambda: lanes.values(Steady) == [1])
