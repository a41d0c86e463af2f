"""The event ring: ids that only grow, facts told once, and the form that readers see."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agent.api import Event, Severity, State
from agent.events import BLOCK, KEYS_REMEMBERED, Ring
from agent.sim.clock import FakeClock
from agent.sim.harness import MemoryState
from agent.state import StateDir


def down(device: str = "mlx5_0", time: float | None = None, **fields: Any) -> Event:
    return Event("link_down", Severity.WARNING, "infiniband", "Port is down.", device=device, time=time, **fields)


def ring(state: State | None = None, clock: FakeClock | None = None, size: int = 2000, **labels: str) -> Ring:
    return Ring(MemoryState() if state is None else state, FakeClock() if clock is None else clock, labels, size)


def devices(events: Any) -> list[str]:
    return [recorded.event.device for recorded in events]


FIRST = 1_800_000_000_000  # the fake clock's milliseconds


def test_ids_grow_by_one_from_the_clocks_milliseconds() -> None:
    one = ring()
    assert [recorded.id for recorded in one.record([down("a"), down("b")])] == [FIRST, FIRST + 1]
    assert [recorded.id for recorded in one.record([down("c")])] == [FIRST + 2]
    assert one.total == 3


def test_ids_grow_over_a_kill_at_any_moment(tmp_path: Path) -> None:
    last = 0
    for count in (1, BLOCK - 1, BLOCK, BLOCK + 1, 0, 3):  # a new ring on the same file each time: nobody said goodbye
        directory = StateDir(tmp_path)
        one = ring(directory.file("events"))
        for number in range(count):
            (recorded,) = one.record([down(str(number))])
            assert recorded.id > last
            last = recorded.id
        directory.flush(20)


def test_ids_grow_with_the_clock_where_nothing_can_be_kept() -> None:
    clock = FakeClock()
    (before,) = Ring(MemoryState(), clock, {}).record([down()])
    clock.advance(1)
    (after,) = Ring(MemoryState(), clock, {}).record([down()])
    assert after.id > before.id


def test_ids_are_reserved_in_blocks_and_not_written_for_each_event() -> None:
    class Counting(MemoryState):
        saves = 0

        def save(self, content: Any) -> None:
            super().save(content)
            self.saves += 1

    state = Counting()
    ring(state).record(down(str(number)) for number in range(BLOCK))
    assert state.saves == 1


@pytest.mark.parametrize("kept", [{"next_id": "7"}, {"next_id": None}, {"next_id": -5}, {"next_id": 1.5}, {}])
def test_nonsense_that_was_kept_starts_anew(kept: dict[str, Any]) -> None:
    assert [recorded.id for recorded in ring(MemoryState(kept)).record([down()])] == [FIRST]


def test_same_fact_read_again_is_recorded_once() -> None:
    one = ring()
    assert len(one.record([down(time=5.0), down(time=5.0)])) == 1
    assert one.record([down(time=5.0)]) == []
    assert len(one.record([down(key="k"), down("other", key="k")])) == 1
    assert one.total == 2


def test_key_is_equal_after_a_restart_and_differs_between_facts() -> None:
    def key(event: Event) -> str:
        return ring().record([event])[0].key

    assert key(down(time=5.0)) == key(down(time=5.0))
    assert key(down(key="mine")) == "mine"
    facts = [
        down(time=5.0),
        down(time=5.001),
        down("mlx5_1", time=5.0),
        down(time=5.0, labels={"port": "1"}),
        Event("link_flap", Severity.WARNING, "infiniband", "Port is down.", device="mlx5_0", time=5.0),
        Event("link_down", Severity.WARNING, "kernel", "Port is down.", device="mlx5_0", time=5.0),
        Event("link_down", Severity.WARNING, "infiniband", "Other words.", device="mlx5_0", time=5.0),
    ]
    assert len({key(fact) for fact in facts}) == len(facts)


def test_undecodable_text_has_a_key_and_an_answer() -> None:
    (recorded,) = ring().record([down("a\udc80")])
    assert json.dumps(recorded.as_json()).encode()


def test_keys_are_remembered_in_bounded_memory() -> None:
    one = ring(size=10)
    one.record(down(str(number), time=1.0) for number in range(KEYS_REMEMBERED + 1))
    assert len(one._keys) == KEYS_REMEMBERED
    assert one.record([down(str(KEYS_REMEMBERED), time=1.0)]) == []
    assert len(one.record([down("0", time=1.0)])) == 1  # the oldest was forgotten


def test_ring_keeps_the_latest() -> None:
    one = ring(size=3)
    one.record(down(name) for name in "abcde")
    assert devices(one.since()) == ["c", "d", "e"]
    assert one.total == 5


def test_time_is_the_facts_own_or_else_the_clocks() -> None:
    clock = FakeClock(wall=1000.0)
    first, second = ring(clock=clock).record([down("a"), down("b", time=5.5)])
    assert (first.time, second.time) == (1000.0, 5.5)


def test_since_gives_the_oldest_after_an_id_so_that_none_is_missed() -> None:
    one = ring()
    one.record(down(name) for name in "abcde")
    assert devices(one.since(FIRST + 1, limit=2)) == ["c", "d"]
    assert devices(one.since(FIRST + 4)) == []
    assert devices(one.since(FIRST + 98)) == []
    assert devices(one.since(0, limit=0)) == []


def test_latest_gives_the_newest_oldest_first() -> None:
    one = ring()
    one.record(down(name) for name in "abcde")
    assert devices(one.latest(2)) == ["d", "e"]
    assert devices(one.latest(9)) == list("abcde")
    assert devices(one.latest(0)) == []


def test_around_gives_what_is_near_in_time_in_order_of_time() -> None:
    one = ring()
    one.record([down("late", time=1300.0), down("centre", time=1000.0), down("early", time=700.0)])
    one.record([down("too early", time=699.9), down("too late", time=1300.1)])
    assert devices(one.around(FIRST + 1)) == ["early", "centre", "late"]
    assert devices(one.around(FIRST + 1, seconds=0)) == ["centre"]


def test_around_keeps_the_nearest_and_always_the_one_asked_for() -> None:
    one = ring()
    one.record(down(str(number), time=1000.0 + number // 5) for number in range(10))
    for asked in range(FIRST, FIRST + 10):
        assert [recorded.id for recorded in one.around(asked, limit=1)] == [asked]
    assert {recorded.time for recorded in one.around(FIRST, limit=5)} == {1000.0}


def test_around_an_event_that_is_no_longer_known_is_empty() -> None:
    one = ring(size=1)
    one.record(down(name) for name in "ab")
    assert one.around(FIRST) == []


def test_answer_has_the_fields_of_the_contract() -> None:
    one = ring(cluster="blue", port="overridden")
    (recorded,) = one.record([down(time=1.5, labels={"port": "1"}, source="sysfs", key="k")])
    assert recorded.as_json() == {
        "id": FIRST,
        "key": "k",
        "time": "1970-01-01T00:00:01.500Z",
        "kind": "link_down",
        "severity": "warning",
        "component": "infiniband",
        "device": "mlx5_0",
        "labels": {"cluster": "blue", "port": "1"},
        "message": "Port is down.",
        "source": "sysfs",
        "workload": None,
    }
    assert recorded.as_json(with_message=False) == {**recorded.as_json(), "message": ""}


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (1_800_000_000, "2027-01-15T08:00:00.000Z"),
        (1_800_000_000.0009, "2027-01-15T08:00:00.000Z"),
        (0.999, "1970-01-01T00:00:00.999Z"),
        (-62_135_596_800, "0001-01-01T00:00:00.000Z"),
        (math.nextafter(253_402_300_799, 0), "9999-12-31T23:59:58.999Z"),
    ],
)
def test_time_is_rfc_3339_in_utc_with_milliseconds(time: float, text: str) -> None:
    (recorded,) = ring().record([down(time=time)])
    assert recorded.as_json()["time"] == text
