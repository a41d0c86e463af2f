"""Claims about calls that may never return: agent.hw.bulkhead."""

from __future__ import annotations

import sys
import threading
import time
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
