"""Claims about a collector that isolates its devices: one that hangs costs its own values and one thread."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from agent.api import DEVICE_SHARE, Collector, Kind, Lane, Metric, NotPresent
from agent.context import SystemClock
from agent.hw.bulkhead import Bulkhead, Stalled
from agent.job import HANGS_IN_A_ROW, LEFT_BEHIND_LIMIT, Job, JobState
from agent.schedule import TOGETHER_S, Scheduler
from agent.sim.clock import FakeClock
from agent.snapshot import EvictedError, Store
from tests.agent.kit import Scripted, context, shown, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agent.api import Clock, Out
    from agent.context import NodeContext

TIMEOUT_S = 4.0  # on the tests' clock
LIMIT_S = TIMEOUT_S * DEVICE_SHARE
INTERVAL_S = 10.0
ALONE_S = 0.1  # how long, truly, a thread of its own is waited for
READS = Metric("kit_reads_total", Kind.COUNTER, "Reads of a device that returned.", ("device",))
STALLED = Metric("kit_stalled", Kind.GAUGE, "1 while a read of the device has not returned.", ("device",))


class Device:
    """A device whose reads hang while it is told so, and that notices when two read it at once."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.begun = self.returned = self.readers = self.most_readers = 0
        self._lock = threading.Lock()

    def read(self) -> int:
        with self._lock:
            self.begun += 1
            self.readers += 1
            self.most_readers = max(self.most_readers, self.readers)
        self.free.wait(60)
        with self._lock:
            self.readers -= 1
            self.returned += 1
            return self.returned


class Isolating(Collector):
    """Keeps its promise: a bulkhead tells the agent which device is in hand."""

    name: ClassVar[str] = "kit_isolating"
    metrics = (READS, STALLED)
    lane = Lane.THREAD
    isolates_devices = True

    def __init__(self, node: Node, ctx: NodeContext, scale: int = 1) -> None:
        super().__init__(None, ctx)
        self._node = node
        self._scale = scale
        self._bulkhead: Bulkhead[int] = Bulkhead(f"kit-{ctx.sys}", ALONE_S, node.bulkhead_clock.monotonic)

    def open(self) -> None:
        self._node.on_open()
        if not self._node.devices:
            raise NotPresent("no device")

    def collect(self, out: Out) -> None:
        calls = {name: device.read for name, device in list(self._node.devices.items())}
        for name, outcome in self._bulkhead.run(calls, out.working_on).items():
            if isinstance(outcome, int):
                out.add(self.ctx.series(READS, name), outcome * self._scale)
            else:
                out.failed(name, "no answer")
            out.add(self.ctx.series(STALLED, name), int(isinstance(outcome, Stalled)))

    def found(self) -> str:
        return f"{len(self._node.devices)} devices"

    def close(self) -> None:
        self._node.closed += 1
        self._bulkhead.close()


class Careless(Collector):
    """Promises isolation and does not keep it: every run reads the one device, whether it hangs or not."""

    name = "kit_careless"
    metrics = (READS,)
    lane = Lane.THREAD
    isolates_devices = True

    def __init__(self, node: Node, ctx: NodeContext) -> None:
        super().__init__(None, ctx)
        self._device = node.devices["0"]

    def collect(self, out: Out) -> None:
        out.working_on("0")
        out.add(self.ctx.series(READS, "0"), self._device.read())


class InterruptedJob(Job):
    """A job with something that happens in the very moment in which it is given up."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.moments: list[Callable[[], object]] = []

    def evict(self, store: Store, now_s: float) -> bool:
        given_up = super().evict(store, now_s)
        if given_up:
            moments, self.moments = self.moments, []
            for moment in moments:
                moment()
        return given_up


class Node:
    """Devices, and a scheduler whose time passes when the test says so."""

    def __init__(self, tmp_path: Path, devices: int, clock: Clock | None = None) -> None:
        self.clock = FakeClock(wall=1_800_000_001.0)
        self.bulkhead_clock = FakeClock()
        self.devices = {str(number): Device() for number in range(devices)}
        self.all_devices = list(self.devices.values())
        self.closed = 0
        self.on_open: Callable[[], object] = lambda: None
        self.store = Store()
        self.gaps = 0
        self._appeared = False
        self.ctx = context(tmp_path, clock or self.clock)
        self.scheduler = Scheduler(self.store, clock or self.clock, lambda _: None, self.look)

    def look(self) -> None:
        there = bool(shown(self.store, Isolating.name))
        self.gaps += self._appeared and not there
        self._appeared = self._appeared or there

    def job(self, make: Callable[[], Collector] | None = None, kind: type[Job] = Job, lane: Lane = Lane.THREAD) -> Job:
        return kind(
            Isolating.name,
            make or (lambda: Isolating(self, self.ctx)),
            lane=lane,
            interval_s=INTERVAL_S,
            timeout_s=TIMEOUT_S,
            isolates_devices=True,
        )

    def start(self, job: Job | None = None) -> Job:
        """Start the job and see its first run through."""
        job = job or self.job()
        self.scheduler.start([job])
        self.idle(job)
        return job

    def idle(self, job: Job) -> None:
        until(lambda: job.runs and job.started_s is None and job.due_s > self.clock.monotonic() + TOGETHER_S)

    def begin_tick(self) -> None:
        self.clock.advance(INTERVAL_S)
        for runner in self.scheduler._runners:
            runner.wake.set()

    def tick(self, job: Job) -> None:
        self.idle(job)
        runs = job.runs
        self.begin_tick()
        until(lambda: job.runs > runs, "the tick ends")
        self.idle(job)

    def hang(self, *names: str) -> None:
        for name in names:
            self.devices[name].free.clear()

    def is_stuck(self, *names: str) -> None:
        until(lambda: all(self.devices[name].readers == 1 for name in names), "they hang")

    def give_up(self) -> None:
        """Let the device in hand have had its time."""
        self.clock.advance(LIMIT_S)
        self.scheduler.check()

    def hanging_tick(self, job: Job, *names: str) -> None:
        """Begin a tick in which these devices begin to hang, and see it through."""
        self.idle(job)
        self.hang(*names)
        runs = job.runs
        self.begin_tick()
        self.is_stuck(names[0])
        self.give_up()
        until(lambda: job.runs > runs, "the run that went on without it ends")
        self.idle(job)

    def release(self, *names: str) -> None:
        for name in names:
            self.devices[name].free.set()
        until(lambda: all(self.devices[name].readers == 0 for name in names))

    def values(self) -> dict[str, int | float]:
        page = shown(self.store, Isolating.name)
        return {s.partition('"')[2].rstrip('"}'): value for s, value in page.items() if s.startswith(READS.name)}

    def shown(self) -> set[str]:
        return set(self.values())

    def stalled(self) -> set[str]:
        page = shown(self.store, Isolating.name)
        return {s.partition('"')[2].rstrip('"}') for s, value in page.items() if s.startswith(STALLED.name) and value}

    def shut_down(self) -> None:
        for device in self.all_devices:
            device.free.set()
        self.scheduler.stop()


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("lane-", "kit-"))]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(devices: int, clock: Clock | None = None) -> Node:
        nodes.append(Node(tmp_path, devices, clock))
        return nodes[-1]

    yield make
    for node in nodes:
        node.shut_down()
    until(lambda: not threads(), "all threads end")


@contextlib.contextmanager
def supervised(node: Node) -> Iterator[None]:
    """Watch deadlines from another thread, and that the series never vanish."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            node.scheduler.check()
            node.look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    done.set()
    watcher.join()


# One device


def test_others_are_published_again_within_a_device_limit_and_at_every_tick_while_one_hangs(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(4, SystemClock())
    job = node.job()
    job.interval_s, job.timeout_s = 0.05, 2.0
    node.scheduler.start([job])
    with supervised(node):
        until(lambda: job.runs >= 3)
        node.hang("1")
        node.is_stuck("1")
        began_s, returned = time.monotonic(), node.devices["3"].returned
        until(lambda: node.values().get("3", 0) > returned, "what comes after it is read in the same tick")
        assert time.monotonic() - began_s < 2 * job.timeout_s * DEVICE_SHARE
        assert node.stalled() == {"1"}
        for _ in range(10):
            before = node.values()
            until(lambda before=before: all(node.values()[n] > before[n] for n in "023"), timeout_s=1)  # type: ignore[misc]
        assert (job.state, job.evictions, node.gaps) == (JobState.OK, 0, 0)
        node.release("1")
        until(lambda: not node.stalled() and node.shown() == set("0123"))
    assert node.gaps == 0
    assert node.devices["1"].most_readers == 1


def test_stuck_device_holds_one_thread_and_gets_no_second_reader_for_as_long_as_it_hangs(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(3)
    job = node.start()
    node.hanging_tick(job, "0")
    until(lambda: len(threads()) == 2, "the threads in which the others were read once have ended")
    for _ in range(30):
        node.tick(job)
        node.scheduler.check()
        assert sorted(threads()) == ["lane-kit_isolating"] * 2
        assert (node.devices["0"].begun, node.shown(), node.stalled()) == (2, {"1", "2"}, {"0"})
    assert node.values()["2"] == node.devices["2"].returned == 32
    assert (job.up, job.evictions, node.gaps) == (True, 0, 0)


def test_device_is_read_again_in_the_first_tick_after_its_read_returned(make_node: Callable[..., Node]) -> None:
    node = make_node(3)
    job = node.start()
    node.hanging_tick(job, "0")
    node.release("0")
    until(lambda: len(threads()) == 1, "the stuck thread has ended")
    assert node.shown() == {"1", "2"}, "what it brought came too late"
    node.tick(job)
    assert (node.values()["0"], node.stalled()) == (3, set())


def test_hang_at_the_very_first_run_costs_its_device_only(make_node: Callable[..., Node]) -> None:
    node = make_node(3)
    node.hang("0")
    job = node.job()
    node.scheduler.start([job])
    node.is_stuck("0")
    assert (job.runs, job.state) == (0, JobState.STARTING)
    node.give_up()
    node.idle(job)
    assert (node.values(), node.stalled()) == ({"1": 1, "2": 1}, {"0"})
    assert (job.runs, job.evictions, job.errors, job.up) == (1, 0, 2, True)
    assert job.found == "3 devices", "the run that opened it did not end, and yet it is told what was found"


def test_device_is_given_up_at_its_limit_and_not_before(make_node: Callable[..., Node]) -> None:
    node = make_node(2)
    job = node.start()
    node.hang("1")
    node.begin_tick()
    node.is_stuck("1")
    assert node.scheduler.check() == node.clock.monotonic() + LIMIT_S
    node.clock.advance(LIMIT_S - 0.001)
    assert node.scheduler.check() == pytest.approx(node.clock.monotonic() + 0.001)
    assert job.started_s is not None
    node.clock.advance(0.001)
    node.scheduler.check()
    node.idle(job)
    assert node.stalled() == {"1"}


def test_hang_in_a_device_that_was_not_named_yet_at_the_last_look_is_noticed_in_time(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(1)
    gate = Device()
    node.all_devices.append(gate)
    gate.free.clear()
    node.on_open = gate.read
    node.hang("0")
    node.scheduler.start([node.job()])
    until(lambda: gate.readers == 1)
    assert node.scheduler.check() == node.clock.monotonic() + LIMIT_S, "not the whole timeout: it may go on and hang"
    gate.free.set()
    node.is_stuck("0")
    node.give_up()
    until(lambda: node.stalled() == {"0"})


def test_repeated_stalls_back_off(make_node: Callable[..., Node]) -> None:
    node = make_node(2)
    job = node.start()
    node.hanging_tick(job, "0")
    node.release("0")
    node.hang("0")
    node.tick(job)  # a thread of its own this time, which the run itself gives up
    node.is_stuck("0")
    node.release("0")
    begun = node.devices["0"].begun
    for _ in range(5):
        node.tick(job)
        assert (node.devices["0"].begun, node.stalled()) == (begun, {"0"})
    node.bulkhead_clock.advance(30)
    node.tick(job)
    assert (node.devices["0"].begun, node.stalled()) == (begun + 1, set())


def test_thread_that_comes_back_in_the_moment_it_is_given_up_makes_no_second_one(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(2)
    job = node.job(kind=InterruptedJob)
    assert isinstance(job, InterruptedJob)
    job.moments = [lambda: node.release("0")]
    node.start(job)
    node.hanging_tick(job, "0")
    assert node.values() == {"0": 3, "1": 2}
    until(lambda: len(threads()) == 1)
    node.tick(job)
    assert node.values() == {"0": 4, "1": 3}


# Several


def test_devices_that_hang_together_cost_themselves_only_and_recover(make_node: Callable[..., Node]) -> None:
    node = make_node(6)
    job = node.start()
    node.hanging_tick(job, "1", "3", "4")
    for _ in range(3):
        assert (node.shown(), node.stalled()) == (set("025"), set("134"))
        node.tick(job)
    until(lambda: len(threads()) == 4, "each holds one thread, and one works")
    assert job.up
    node.release("1", "3", "4")
    node.tick(job)
    assert (node.shown(), node.stalled()) == (set("012345"), set())
    until(lambda: len(threads()) == 1)
    assert [device.most_readers for device in node.all_devices] == [1] * 6


def test_devices_that_hang_one_after_the_other_are_each_left_behind_and_recover(make_node: Callable[..., Node]) -> None:
    node = make_node(12)
    job = node.start()
    for count in range(1, 12):
        node.hanging_tick(job, str(count - 1))
        assert node.stalled() == {str(number) for number in range(count)}
        until(lambda count=count: len(threads()) == count + 1)  # type: ignore[misc]
    assert (job.up, job.evictions, node.gaps) == (True, 0, 0)
    node.release(*node.devices)
    node.tick(job)
    assert node.shown() == set(node.devices)
    until(lambda: len(threads()) == 1, "every thread that was left behind ends")
    assert [device.most_readers for device in node.all_devices] == [1] * 12


def test_collector_stays_up_when_all_devices_hang_and_recovers(make_node: Callable[..., Node]) -> None:
    node = make_node(5)
    job = node.start()
    node.hanging_tick(job, *node.devices)
    for _ in range(5):
        assert (node.values(), node.stalled()) == ({}, set("01234"))
        node.tick(job)
    assert (job.up, len(threads())) == (True, 6)
    node.release(*node.devices)
    node.tick(job)
    assert (node.shown(), node.stalled()) == (set("01234"), set())
    until(lambda: len(threads()) == 1)


# Reload, absence, stop


def rescaled(node: Node) -> Job:
    return node.job(lambda: Isolating(node, node.ctx, scale=1000))


def test_reload_while_a_device_is_stuck_sends_no_second_reader_and_waits_for_nothing(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(3)
    node.hanging_tick(node.start(), "0")
    for _ in range(5):
        node.scheduler.remove(Isolating.name)
        successor = node.start(rescaled(node))
    assert (successor.up, node.shown(), node.stalled()) == (True, {"1", "2"}, {"0"})
    assert node.values()["1"] >= 1000, "the new option holds"
    assert (node.devices["0"].readers, node.devices["0"].most_readers, node.closed) == (1, 1, 5)
    until(lambda: len(threads()) == 2)
    node.release("0")
    node.tick(successor)
    assert node.values()["0"] == 3000
    until(lambda: len(threads()) == 1)


def test_reload_before_the_hang_was_noticed_waits_for_the_device_limit_only(make_node: Callable[..., Node]) -> None:
    node = make_node(3)
    node.start()
    node.hang("0")
    node.begin_tick()
    node.is_stuck("0")
    node.scheduler.remove(Isolating.name)
    successor = rescaled(node)
    node.scheduler.start([successor])
    assert node.scheduler.check() == node.clock.monotonic() + LIMIT_S, "the one that leaves is watched"
    node.give_up()
    node.idle(successor)
    assert (node.shown(), node.stalled()) == ({"1", "2"}, {"0"})
    assert (node.devices["0"].most_readers, node.closed) == (1, 1)
    node.release("0")
    node.tick(successor)
    assert node.values()["0"] == 3000
    until(lambda: len(threads()) == 1)


@pytest.mark.parametrize("back", [False, True], ids=["stuck", "back"])
def test_reload_in_the_moment_a_device_is_given_up_loses_neither_job_nor_thread(
    make_node: Callable[..., Node], *, back: bool
) -> None:
    node = make_node(2)
    successor = rescaled(node)

    def reload() -> None:
        node.scheduler.remove(Isolating.name)
        node.scheduler.start([successor])
        if back:
            node.release("0")
            until(lambda: successor.runs, "the thread that came back closes the old one, the new one begins")

    job = node.job(kind=InterruptedJob)
    assert isinstance(job, InterruptedJob)
    node.start(job)
    node.hang("0")
    node.begin_tick()
    node.is_stuck("0")
    job.moments = [reload]
    node.give_up()
    node.idle(successor)
    assert node.stalled() == (set() if back else {"0"})
    assert (node.devices["0"].most_readers, node.closed) == (1, 1)
    node.scheduler.check()
    node.tick(successor)
    node.release("0")
    node.tick(successor)
    assert node.shown() == {"0", "1"}
    until(lambda: len(threads()) == 1)
    assert node.scheduler._leaving == node.scheduler._waiting == {}


def test_removed_collector_is_closed_although_a_device_is_stuck(make_node: Callable[..., Node]) -> None:
    node = make_node(2)
    node.hanging_tick(node.start(), "0")
    node.scheduler.remove(Isolating.name)
    until(lambda: node.closed == 1 and len(threads()) == 1)
    assert node.values() == {}
    node.release("0")
    until(lambda: not threads())
    assert node.closed == 1


def test_devices_that_vanish_while_one_is_stuck_make_the_hardware_absent(make_node: Callable[..., Node]) -> None:
    node = make_node(2)
    job = node.start()
    node.hanging_tick(job, "0")
    devices, node.devices = node.devices, {}
    for _ in range(7):  # until it looks again
        node.tick(job)
        if job.state is JobState.ABSENT:
            break
    assert (job.state, node.values(), node.closed) == (JobState.ABSENT, {}, 1)
    node.devices = devices
    node.clock.advance(50)
    node.tick(job)
    assert (node.shown(), node.stalled()) == ({"1"}, {"0"})
    assert devices["0"].most_readers == 1, "a new instance knows what the one before hangs in"
    node.release("0")
    node.tick(job)
    assert node.shown() == {"0", "1"}


def test_stopping_closes_the_collector_and_waits_for_no_stuck_device(make_node: Callable[..., Node]) -> None:
    node = make_node(3, SystemClock())
    job = node.job()
    job.timeout_s = 0.4
    node.hang("0", "1")
    node.scheduler.start([job])
    with supervised(node):
        until(lambda: job.runs)
    started_s = time.monotonic()
    node.scheduler.stop()
    assert time.monotonic() - started_s < 2.5
    assert node.closed == 1


# What a run that was left behind does late


@pytest.mark.parametrize("late", [NotPresent("gone"), ValueError("late"), SystemExit(3), None], ids=repr)
def test_however_a_run_that_was_left_behind_ends_it_changes_nothing(
    make_node: Callable[..., Node], late: BaseException | None
) -> None:
    node = make_node(2)

    class Stubborn(Isolating):
        def collect(self, out: Out) -> None:
            try:
                super().collect(out)
            except EvictedError:
                if late is not None:
                    raise late from None

    job = node.start(node.job(lambda: Stubborn(node, node.ctx)))
    node.hanging_tick(job, "0")
    node.on_open = lambda: opened.append(1)
    opened: list[int] = []
    before = (job.state, job.runs, job.errors, job.duration_s, job.last_success_at, node.values())
    node.release("0")
    until(lambda: len(threads()) == 1)
    assert (job.state, job.runs, job.errors, job.duration_s, job.last_success_at, node.values()) == before
    node.tick(job)
    assert (job.state, node.closed, opened) == (JobState.OK, 0, []), "neither closed nor opened again"
    assert node.shown() == {"0", "1"}


# Hangs of another kind


def test_hang_outside_any_device_is_the_collectors_own(make_node: Callable[..., Node]) -> None:
    node = make_node(2)
    gate = Device()
    node.all_devices.append(gate)
    gate.free.clear()
    job = node.start()
    node.on_open = gate.read
    node.clock.advance(60)
    node.begin_tick()
    until(lambda: gate.readers == 1)
    node.give_up()
    assert (job.state, node.shown()) == (JobState.OK, {"0", "1"}), "the whole run has the whole timeout"
    node.clock.advance(TIMEOUT_S - LIMIT_S)
    node.scheduler.check()
    assert (job.state, node.values(), job.evictions) == (JobState.HUNG, {}, 1)
    assert threads() == ["lane-kit_isolating"], "the job waits for its thread"
    gate.free.set()
    until(lambda: job.up)
    assert node.shown() == {"0", "1"}


def test_one_collector_that_does_not_keep_its_promise_holds_few_threads_and_goes_down(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(1)
    job = node.start(node.job(lambda: Careless(node, node.ctx)))
    node.hang("0")
    node.begin_tick()
    for count in range(1, HANGS_IN_A_ROW + 1):
        until(lambda count=count: node.devices["0"].readers == count)  # type: ignore[misc]
        node.give_up()
    until(lambda: node.devices["0"].readers == HANGS_IN_A_ROW + 1)
    for _ in range(20):
        node.clock.advance(TIMEOUT_S)
        node.scheduler.check()
    assert (job.state, job.reason) == (JobState.HUNG, f"no answer within {TIMEOUT_S:g} s on 0")
    assert shown(node.store, Isolating.name) == {}
    assert len(threads()) == HANGS_IN_A_ROW + 1
    node.devices["0"].free.set()
    until(lambda: job.up and len(threads()) == 1)


def test_no_number_of_reloads_lets_a_careless_collector_hold_more_than_so_many_threads(
    make_node: Callable[..., Node],
) -> None:
    node = make_node(1)
    node.hang("0")
    most = LEFT_BEHIND_LIMIT + 1
    node.scheduler.start([node.job(lambda: Careless(node, node.ctx))])

    def reload() -> bool:
        node.scheduler.remove(Isolating.name)
        node.scheduler.start([node.job(lambda: Careless(node, node.ctx))])
        node.give_up()
        return node.devices["0"].readers >= most

    until(reload)
    for _ in range(20):
        reload()
    assert (node.devices["0"].readers, len(threads())) == (most, most)
    node.devices["0"].free.set()
    until(lambda: node.scheduler.jobs[Isolating.name].up and len(threads()) == 1)


def test_collector_that_names_devices_for_ever_is_given_up_as_a_whole(make_node: Callable[..., Node]) -> None:
    node = make_node(0)
    named: list[int] = []

    wanted = threading.Event()
    wanted.set()

    def endless(out: Out) -> None:
        while wanted.is_set():
            out.working_on(str(len(named)))
            named.append(1)

    job = node.job(lambda: Scripted(node.ctx, lambda out, _series: endless(out)))
    node.scheduler.start([job])
    until(lambda: named)
    node.clock.advance(TIMEOUT_S)
    named.clear()
    until(lambda: named)
    node.scheduler.check()
    assert (job.state, job.evictions) == (JobState.HUNG, 1)
    until(lambda: job.runs, "its thread learns of it")
    wanted.clear()
    until(lambda: job.up)


# The SHARED lane


def test_shared_collector_with_a_stuck_device_goes_on_in_the_shared_lane(make_node: Callable[..., Node]) -> None:
    node = make_node(3)
    steady = Job("steady", lambda: Scripted(node.ctx), lane=Lane.SHARED, interval_s=INTERVAL_S, timeout_s=TIMEOUT_S)
    job = node.job(lane=Lane.SHARED)
    node.scheduler.start([steady, job])
    node.idle(job)
    node.hanging_tick(job, "1")
    for _ in range(5):
        runs = steady.runs
        node.tick(job)
        node.idle(steady)
        assert steady.runs == runs + 1
        assert (node.shown(), node.stalled()) == ({"0", "2"}, {"1"})
    assert sorted(threads()) == ["lane-shared", "lane-shared"], "one that is stuck, one for both"
    node.release("1")
    until(lambda: threads() == ["lane-shared"])
    node.tick(job)
    assert node.shown() == {"0", "1", "2"}
    assert job.lane_thread is steady.lane_thread


# Everything at once


def test_random_hangs_returns_reloads_and_lookings_lose_nothing(make_node: Callable[..., Node]) -> None:
    chance = random.Random(20)  # noqa: S311 - reproducible on purpose
    node = make_node(4)
    steady = Job("steady", lambda: Scripted(node.ctx), lane=Lane.SHARED, interval_s=INTERVAL_S, timeout_s=TIMEOUT_S)
    lanes = [Lane.SHARED, Lane.THREAD]
    node.scheduler.start([steady, node.job(lane=Lane.SHARED)])
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(1500):
            step = chance.random()
            device = node.devices[chance.choice("0123")]
            if step < 0.15:
                device.free.clear()
            elif step < 0.4:
                device.free.set()
            elif step < 0.45:
                node.scheduler.remove(Isolating.name)
                node.scheduler.start([node.job(lane=chance.choice(lanes))])
            elif step < 0.6:
                node.begin_tick()
            else:
                node.clock.advance(chance.choice([0.0, LIMIT_S / 2, LIMIT_S]))
                node.scheduler.check()
    finally:
        sys.setswitchinterval(switch_s)
    assert [device.most_readers for device in node.all_devices] == [1] * 4
    for device in node.all_devices:
        device.free.set()
    node.bulkhead_clock.advance(3600)

    def settled() -> bool:
        node.clock.advance(1)
        node.begin_tick()
        node.scheduler.check()
        return node.scheduler.jobs[Isolating.name].up and node.shown() == set(node.devices) and steady.up

    until(settled)
    until(lambda: len(threads()) <= 2, "one lane each, nothing left behind")
    assert node.scheduler._leaving == node.scheduler._waiting == {}
