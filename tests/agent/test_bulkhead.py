"""Claims about calls that may never return: agent.hw.bulkhead."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from agent.hw.bulkhead import BACKOFF_FIRST_S, FORGIVEN_AFTER_S, Bulkhead, Stalled, _Task
from agent.sim.clock import FakeClock
from tests.agent.kit import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 0.1


class Device:
    """A device whose reads hang while it is told so."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.free = threading.Event()
        self.free.set()
        self.threads: list[str] = []
        self.readers = 0

    def read(self) -> int:
        self.readers += 1
        self.threads.append(threading.current_thread().name)
        self.free.wait(30)
        self.readers -= 1
        return self.value


class Node:
    def __init__(self, count: int) -> None:
        self.clock = FakeClock()
        self.devices = {f"mlx5_{number}": Device(number) for number in range(count)}
        self.bulkhead: Bulkhead[int] = Bulkhead("kit-bulkhead", LIMIT_S, self.clock.monotonic)

    def read(self) -> dict[str, int | Stalled | Exception]:
        return self.bulkhead.run({name: device.read for name, device in self.devices.items()})

    def settle(self, device: str) -> None:
        """Let a stuck device's read return."""
        self.devices[device].free.set()
        until(lambda: self.devices[device].readers == 0)


@pytest.fixture
def make_node() -> Iterator[Callable[[int], Node]]:
    nodes: list[Node] = []

    def make(count: int) -> Node:
        nodes.append(Node(count))
        return nodes[-1]

    yield make
    for node in nodes:
        node.bulkhead.close()
        for device in node.devices.values():
            device.free.set()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("kit-bulkhead")], "all threads end")


def values(outcomes: dict[str, int | Stalled | Exception]) -> dict[str, int]:
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, int)}


def test_healthy_devices_are_read_in_one_thread_in_their_order(make_node: Callable[[int], Node]) -> None:
    node = make_node(4)
    for _ in range(2):
        outcomes = node.read()
        assert list(outcomes.items()) == [("mlx5_0", 0), ("mlx5_1", 1), ("mlx5_2", 2), ("mlx5_3", 3)]
    assert {thread for device in node.devices.values() for thread in device.threads} == {"kit-bulkhead"}


def test_device_that_raises_costs_itself_and_its_exception_is_its_outcome() -> None:
    bulkhead: Bulkhead[int] = Bulkhead("kit-bulkhead", 5.0, FakeClock().monotonic)

    def broken() -> int:
        raise OSError(5, "Input/output error")

    started_s = time.monotonic()
    outcomes = bulkhead.run({"a": broken, "b": lambda: 7})
    bulkhead.close()
    assert isinstance(outcomes["a"], OSError)
    assert outcomes["b"] == 7
    assert time.monotonic() - started_s < 2, "an exception is no hang"


def test_device_whose_library_exits_costs_itself_at_once_and_is_read_again() -> None:
    bulkhead: Bulkhead[int] = Bulkhead("kit-bulkhead", 5.0, FakeClock().monotonic)
    calls: dict[str, Callable[[], int]] = {"a": lambda: sys.exit(3), "b": lambda: 7}
    started_s = time.monotonic()
    for _ in range(2):
        outcomes = bulkhead.run(calls)
        assert "SystemExit: 3" in str(outcomes["a"])
        assert outcomes["b"] == 7
    bulkhead.close()
    assert time.monotonic() - started_s < 2


def test_device_that_hangs_stalls_alone_and_the_others_are_read_in_the_same_run(
    make_node: Callable[[int], Node],
) -> None:
    node = make_node(4)
    node.devices["mlx5_1"].free.clear()
    outcomes = node.read()
    assert isinstance(outcomes["mlx5_1"], Stalled)
    assert f"within {LIMIT_S:g} s" in outcomes["mlx5_1"].reason
    assert values(outcomes) == {"mlx5_0": 0, "mlx5_2": 2, "mlx5_3": 3}


def test_run_is_bounded_however_many_devices_hang(make_node: Callable[[int], Node]) -> None:
    node = make_node(16)
    for device in node.devices.values():
        device.free.clear()
    started_s = time.monotonic()
    outcomes = node.read()
    assert time.monotonic() - started_s < 3 * LIMIT_S + 0.5
    assert all(isinstance(outcome, Stalled) for outcome in outcomes.values())


@pytest.mark.parametrize("working_on", [None, lambda device: None], ids=["shared thread", "own thread"])
def test_devices_that_are_slow_and_answer_are_all_read_within_the_bound(
    working_on: Callable[[str], None] | None,
) -> None:
    bulkhead: Bulkhead[int] = Bulkhead("kit-bulkhead-slow", LIMIT_S, FakeClock().monotonic)

    def read(value: int) -> int:
        threading.Event().wait(0.7 * LIMIT_S)
        return value

    started_s = time.monotonic()
    outcomes = bulkhead.run({str(number): partial(read, number) for number in range(12)}, working_on)
    bulkhead.close()
    assert outcomes == {str(number): number for number in range(12)}
    assert time.monotonic() - started_s < 3 * LIMIT_S + 0.5


def test_stuck_device_gets_no_second_reader_and_costs_the_next_runs_no_time(make_node: Callable[[int], Node]) -> None:
    node = make_node(3)
    node.devices["mlx5_0"].free.clear()
    node.read()
    threads = threading.active_count()
    started_s = time.monotonic()
    for _ in range(50):
        outcomes = node.read()
        assert isinstance(outcomes["mlx5_0"], Stalled)
        assert values(outcomes) == {"mlx5_1": 1, "mlx5_2": 2}
        assert node.devices["mlx5_0"].readers == 1
    assert time.monotonic() - started_s < 50 * LIMIT_S / 2
    assert threading.active_count() <= threads + 1, "at most the shared thread comes anew"


def test_device_is_read_again_in_the_first_run_after_its_stuck_read_returned(make_node: Callable[[int], Node]) -> None:
    node = make_node(2)
    node.devices["mlx5_0"].free.clear()
    node.read()
    node.settle("mlx5_0")
    assert values(node.read()) == {"mlx5_0": 0, "mlx5_1": 1}
    assert node.devices["mlx5_0"].threads[-1] == "kit-bulkhead-mlx5_0", "who stalled gets a thread of its own"


def test_late_value_of_a_stalled_read_is_not_taken_for_a_new_one(make_node: Callable[[int], Node]) -> None:
    node = make_node(1)
    device = node.devices["mlx5_0"]
    device.free.clear()
    node.read()
    node.settle("mlx5_0")
    device.value = 99
    assert node.read() == {"mlx5_0": 99}


def test_repeated_stalls_back_off_up_to_a_quarter_of_an_hour(make_node: Callable[[int], Node]) -> None:
    node = make_node(1)
    device = node.devices["mlx5_0"]

    def stall() -> None:
        device.free.clear()
        assert isinstance(node.read()["mlx5_0"], Stalled)
        node.settle("mlx5_0")

    stall()
    stall()  # the first stall has no pause after it
    for pause_s in (30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0):
        reads = len(device.threads)
        node.clock.advance(pause_s - 1)
        outcome = node.read()["mlx5_0"]
        assert isinstance(outcome, Stalled)
        assert f"left alone for {pause_s:g} s" in outcome.reason
        assert len(device.threads) == reads, "left alone means not read"
        node.clock.advance(1)
        stall()


def test_device_that_was_well_for_an_hour_is_forgiven(make_node: Callable[[int], Node]) -> None:
    node = make_node(1)
    device = node.devices["mlx5_0"]
    for _ in range(2):
        device.free.clear()
        node.read()
        node.settle("mlx5_0")
    assert isinstance(node.read()["mlx5_0"], Stalled)
    node.clock.advance(BACKOFF_FIRST_S)
    assert node.read() == {"mlx5_0": 0}
    node.clock.advance(FORGIVEN_AFTER_S)
    assert node.read() == {"mlx5_0": 0}
    assert device.threads[-1] == "kit-bulkhead-mlx5_0", "forgiven in this run, back among the others in the next"
    assert node.read() == {"mlx5_0": 0}
    assert device.threads[-1] == "kit-bulkhead"


def test_hanging_and_recovering_leaves_no_threads_behind(make_node: Callable[[int], Node]) -> None:
    node = make_node(3)
    node.read()
    before = threading.active_count()
    node.devices["mlx5_2"].free.clear()
    for _ in range(10):
        node.read()
        node.settle("mlx5_2")
        node.devices["mlx5_2"].free.clear()
        node.clock.advance(FORGIVEN_AFTER_S)
    node.settle("mlx5_2")
    until(lambda: threading.active_count() <= before, "the stuck threads end when their reads return")


def test_closing_ends_the_idle_thread_and_the_next_run_works_again(make_node: Callable[[int], Node]) -> None:
    node = make_node(1)
    node.read()
    node.bulkhead.close()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("kit-bulkhead")])
    assert node.read() == {"mlx5_0": 0}


def test_call_that_two_threads_come_to_is_made_once() -> None:
    # The stuck thread may return in the very moment in which the devices behind it get threads of their own.
    calls: list[int] = []
    task = _Task("mlx5_0", lambda: calls.append(1))
    task.run()
    task.run()
    assert calls == [1]


def test_nothing_to_read_is_nothing_read(make_node: Callable[[int], Node]) -> None:
    assert make_node(0).read() == {}


# Calls in the caller's own thread, with somebody who watches


class Caller:
    """A thread that runs a bulkhead as a lane does, until it is given up."""

    def __init__(self, node: Node) -> None:
        self.told: list[str] = []
        self.given_up = False
        self.outcomes: dict[str, int | Stalled | Exception] | None = None
        self._node = node
        self._thread = threading.Thread(target=self._run, name="kit-bulkhead-caller", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def working_on(self, device: str) -> None:
        self.told.append(device)
        if self.given_up:
            raise InterruptedError

    def hangs_in(self, device: str) -> None:
        until(lambda: self.told[-1:] == [device] and self._node.devices[device].readers == 1, f"it hangs in {device}")

    def _run(self) -> None:
        calls = {name: device.read for name, device in self._node.devices.items()}
        with contextlib.suppress(InterruptedError):
            self.outcomes = self._node.bulkhead.run(calls, self.working_on)


def watched(node: Node) -> dict[str, int | Stalled | Exception]:
    """Run to the end in a thread that nobody gives up."""
    caller = Caller(node)
    until(lambda: caller.ended)
    assert caller.outcomes is not None
    return caller.outcomes


def stall(node: Node, device: str) -> Caller:
    """Have a caller hang in a device and give it up."""
    node.devices[device].free.clear()
    caller = Caller(node)
    caller.hangs_in(device)
    caller.given_up = True
    return caller


def test_watched_devices_are_read_in_the_callers_thread_each_named_before(make_node: Callable[[int], Node]) -> None:
    node = make_node(3)
    caller = Caller(node)
    until(lambda: caller.ended)
    assert caller.outcomes == {"mlx5_0": 0, "mlx5_1": 1, "mlx5_2": 2}
    assert caller.told == ["mlx5_0", "mlx5_1", "mlx5_2", ""], "after the last one no device is to blame any more"
    assert {thread for device in node.devices.values() for thread in device.threads} == {"kit-bulkhead-caller"}


def test_watched_run_without_devices_blames_none(make_node: Callable[[int], Node]) -> None:
    caller = Caller(make_node(0))
    until(lambda: caller.ended)
    assert (caller.outcomes, caller.told) == ({}, [""])


def test_run_after_a_watched_one_hangs_leaves_its_device_out_and_reads_the_others_one_by_one(
    make_node: Callable[[int], Node],
) -> None:
    node = make_node(4)
    stall(node, "mlx5_1")
    outcomes = watched(node)
    assert isinstance(outcomes["mlx5_1"], Stalled)
    assert values(outcomes) == {"mlx5_0": 0, "mlx5_2": 2, "mlx5_3": 3}
    threads = {name: device.threads[-1] for name, device in node.devices.items() if name != "mlx5_1"}
    assert threads == {name: f"kit-bulkhead-{name}" for name in threads}, "another may hang, too"
    assert values(watched(node)) == {"mlx5_0": 0, "mlx5_2": 2, "mlx5_3": 3}
    assert node.devices["mlx5_3"].threads[-1] == "kit-bulkhead-caller", "the next run trusts the others again"
    assert node.devices["mlx5_1"].threads == ["kit-bulkhead-caller"], "no second reader"


def test_caller_that_was_given_up_reads_nothing_more_when_its_call_returns(make_node: Callable[[int], Node]) -> None:
    node = make_node(3)
    caller = stall(node, "mlx5_1")
    node.settle("mlx5_1")
    until(lambda: caller.ended)
    assert caller.outcomes is None
    assert node.devices["mlx5_2"].threads == []


def test_watched_run_is_bounded_when_all_other_devices_hang_too(make_node: Callable[[int], Node]) -> None:
    node = make_node(8)
    for device in node.devices.values():
        device.free.clear()
    stall(node, "mlx5_0")
    started_s = time.monotonic()
    for _ in range(5):
        assert all(isinstance(outcome, Stalled) for outcome in watched(node).values())
    assert time.monotonic() - started_s < 2 * LIMIT_S + 0.5, "one limit for all, once"
    assert [device.readers for device in node.devices.values()] == [1] * 8


def test_device_in_a_thread_of_its_own_that_hangs_while_its_caller_does_gets_no_second_reader(
    make_node: Callable[[int], Node],
) -> None:
    node = make_node(3)
    stall(node, "mlx5_0")
    watched(node)
    node.settle("mlx5_0")
    watched(node)  # from now on mlx5_0 has a thread of its own
    node.devices["mlx5_0"].free.clear()
    stall(node, "mlx5_1")
    until(lambda: node.devices["mlx5_0"].readers == 1)
    outcomes = watched(node)
    assert values(outcomes) == {"mlx5_2": 2}
    assert [node.devices[f"mlx5_{number}"].readers for number in (0, 1)] == [1, 1]


def test_successor_of_a_closed_bulkhead_knows_what_its_caller_hangs_in(make_node: Callable[[int], Node]) -> None:
    node = make_node(2)
    stall(node, "mlx5_0")
    node.bulkhead.close()  # before any other run could notice
    node.bulkhead = Bulkhead("kit-bulkhead", LIMIT_S, node.clock.monotonic)
    outcomes = watched(node)
    assert isinstance(outcomes["mlx5_0"], Stalled)
    assert values(outcomes) == {"mlx5_1": 1}
    assert node.devices["mlx5_0"].readers == 1
    node.settle("mlx5_0")
    assert values(watched(node)) == {"mlx5_0": 0, "mlx5_1": 1}


@pytest.mark.parametrize("raises", [True, False])
def test_caller_that_was_given_up_before_its_call_began_never_makes_it(
    make_node: Callable[[int], Node], *, raises: bool
) -> None:
    node = make_node(2)
    inside, go_on = threading.Event(), threading.Event()

    def working_on(device: str) -> None:
        if device == "mlx5_1" and not inside.is_set():
            inside.set()
            go_on.wait(30)
            if raises:
                raise InterruptedError

    def run() -> None:
        with contextlib.suppress(InterruptedError):
            node.bulkhead.run({name: device.read for name, device in node.devices.items()}, working_on)

    slow = threading.Thread(target=run)
    slow.start()
    assert inside.wait(10)
    node.devices["mlx5_1"].free.clear()
    other = Caller(node)
    other.hangs_in("mlx5_1")
    go_on.set()
    slow.join(10)
    assert not slow.is_alive(), "it must not hang in the device that another has in hand"
    assert node.devices["mlx5_1"].readers == 1
    node.settle("mlx5_1")
    until(lambda: other.ended)
    assert other.outcomes == {"mlx5_0": 0, "mlx5_1": 1}, "a device that nobody read did not stall"


def test_one_hang_counts_once_and_the_device_is_read_again_in_the_first_run_after_it(
    make_node: Callable[[int], Node],
) -> None:
    node = make_node(2)
    stall(node, "mlx5_0")
    for _ in range(5):
        assert isinstance(watched(node)["mlx5_0"], Stalled)
    node.settle("mlx5_0")
    assert values(watched(node)) == {"mlx5_0": 0, "mlx5_1": 1}
    assert node.devices["mlx5_0"].threads[-1] == "kit-bulkhead-mlx5_0", "who stalled gets a thread of its own"


def test_watched_stalls_back_off_as_all_others(make_node: Callable[[int], Node]) -> None:
    node = make_node(2)
    device = node.devices["mlx5_0"]
    stall(node, "mlx5_0")
    assert isinstance(watched(node)["mlx5_0"], Stalled)
    node.settle("mlx5_0")
    device.free.clear()
    assert isinstance(watched(node)["mlx5_0"], Stalled)  # in a thread of its own: nobody needs to give it up
    node.settle("mlx5_0")
    reads = len(device.threads)
    node.clock.advance(BACKOFF_FIRST_S - 1)
    outcome = watched(node)["mlx5_0"]
    assert isinstance(outcome, Stalled)
    assert "left alone for 30 s" in outcome.reason
    assert len(device.threads) == reads
    node.clock.advance(1)
    assert values(watched(node)) == {"mlx5_0": 0, "mlx5_1": 1}
    node.clock.advance(FORGIVEN_AFTER_S)
    watched(node)
    watched(node)
    assert device.threads[-1] == "kit-bulkhead-caller"


def test_caller_that_fails_on_its_way_leaves_no_device_suspected(make_node: Callable[[int], Node]) -> None:
    node = make_node(3)
    caller = stall(node, "mlx5_0")
    node.settle("mlx5_0")
    until(lambda: caller.ended)
    assert watched(node) == {"mlx5_0": 0, "mlx5_1": 1, "mlx5_2": 2}, "it returned before anybody looked"
    assert node.devices["mlx5_0"].threads[-1] == "kit-bulkhead-caller"
