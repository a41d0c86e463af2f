"""The kernel log read again: after restarts, kills and lost memories, from other rings. Nothing counts twice."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Severity
from agent.hw.kmsg import Record
from agent.sim.harness import MemoryState, Probe, Result
from collectors.kernel import ledger
from collectors.kernel.folding import KEPT
from collectors.kernel.position import MEMORY, Position
from tests.collectors.test_kernel import (
    GPU0,
    GPU1,
    KILLED,
    OOM,
    UPTIME_S,
    UUID0,
    UUID1,
    WALL_S,
    Node,
    label,
    records,
    series,
    sxid,
    xid,
    xids,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.api import Event, Value

FIRST = label("0", UUID0, 31, "warning")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


class Ring(Node):
    """A node whose log is a FIFO: what it gives can be given again, as the kernel's ring is."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.kmsg.unlink()
        os.mkfifo(self.kmsg)
        self.content: list[bytes] = []

    def log(self, *texts: str, priority: int = 3, at_s: float | None = None) -> None:
        at_us = round((self.uptime_s if at_s is None else at_s) * 1e6)
        for text in texts:
            self.content.append(f"{priority},{self.sequence},{at_us},-;{text}\n".encode())
            self.sequence += 1
            self.give(self.content[-1:])

    def give(self, content: list[bytes]) -> None:
        descriptor = os.open(self.kmsg, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"".join(content))
        os.close(descriptor)


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path)


def opened(node: Node) -> Probe:
    probe = node.probe()
    probe.open()
    return probe


def everything(result: Result) -> dict[str, Value]:
    return {name: value for name, value in result.values.items() if value}


FACTS = (
    xid(GPU0, 31),
    xid(GPU1, 79),
    sxid("20034, Fatal"),
    OOM,
    KILLED,
    "INFO: task x:1 blocked for more than 9 seconds.",
)


# On one boot


def test_the_first_start_on_a_boot_counts_what_the_log_holds_already(node: Node) -> None:
    node.log(*FACTS, "unrelated")
    assert records(node.probe().collect())["matched"] == len(FACTS)


def test_a_restart_counts_nothing_again_and_goes_on(node: Node) -> None:
    node.log(*FACTS, "unrelated")
    first = node.probe().collect()
    second = node.probe().collect()
    assert everything(second) == everything(first)
    assert second.events == []
    node.log(xid(GPU0, 31), "unrelated")
    third = node.probe().collect()
    assert xids(third)[FIRST] == 2
    assert records(third) == {"matched": 7, "unmatched": 2, "ignored": 0, "error": 0}
    assert len(third.events) == 1


def test_kills_at_any_moment_neither_lose_nor_repeat(node: Node) -> None:
    kept: dict[str, Any] = {}
    for number in range(30):
        node.log(xid(GPU0, 31), "unrelated", f"INFO: task x:{number} blocked for more than 9 seconds.")
        node.advance(1)
        probe = node.probe()
        result = probe.collect()
        if number % 3 == 0:
            kept = copy.deepcopy(node.state.content)  # the last that reached the disk before the kill
        elif number % 3 == 1:
            node.state.content = copy.deepcopy(kept)
    assert xids(result) == {FIRST: 30}
    assert result.values["kernel_hung_tasks_total"] == 30
    assert records(result) == {"matched": 60, "unmatched": 30, "ignored": 0, "error": 0}


def test_a_lost_memory_gives_the_same_totals_and_events_with_the_same_keys(node: Node) -> None:
    node.log(*FACTS)
    first = node.probe().collect()
    node.state.content = {}
    node.advance(100)
    again = node.probe().collect()
    assert everything(again) == everything(first)
    assert [event.key for event in again.events] == [event.key for event in first.events]
    assert [event.time for event in again.events] == [event.time for event in first.events]
    assert len({event.key for event in first.events}) == len(first.events)


def test_a_fifo_that_gives_its_records_again_counts_them_once(ring: Ring) -> None:
    probe = opened(ring)
    ring.log(*FACTS, *FACTS)
    first = probe.collect()
    assert xids(first)[FIRST] == 2
    second = opened(ring)
    ring.give(ring.content)
    ring.log(xid(GPU0, 31))
    result = second.collect()
    assert xids(result)[FIRST] == 3
    assert len(result.events) == 1
    ring.give(ring.content)
    assert xids(second.collect())[FIRST] == 3


def test_a_fifo_loses_nothing_that_was_read_before_a_kill(ring: Ring) -> None:
    probe = opened(ring)
    ring.log("unrelated", "unrelated")
    probe.collect()
    ring.log("written by a program", priority=11)
    probe.collect()
    assert records(opened(ring).collect()) == {"matched": 0, "unmatched": 2, "ignored": 1, "error": 0}


def test_a_file_that_is_replaced_by_the_same_with_more_counts_the_rest(node: Node) -> None:
    probe = node.probe()
    node.log(*FACTS)
    probe.collect()
    node.log(xid(GPU0, 31))
    copied = node.kmsg.with_name("copy")
    copied.write_bytes(node.kmsg.read_bytes())
    copied.replace(node.kmsg)
    result = probe.collect()
    assert xids(result)[FIRST] == 2
    assert records(result)["matched"] == len(FACTS) + 1


def test_a_file_that_keeps_its_latest_records_only_counts_each_once(node: Node) -> None:
    probe = node.probe()
    for total in range(1, 21):
        node.log(xid(GPU0, 31), "other", xid(GPU1, 31))
        lines = node.kmsg.read_bytes().splitlines(keepends=True)[-7:]
        node.kmsg.write_bytes(b"".join(lines))
        assert xids(probe.collect())[FIRST] == total
        if total == 10:
            probe = node.probe()


# Another ring


def test_a_ring_that_begins_anew_on_the_same_boot_is_counted_on_top(node: Node) -> None:
    probe = node.probe()
    node.log("other", xid(GPU0, 31), "other")
    probe.collect()
    node.sequence = 0
    node.kmsg.write_bytes(b"")
    node.advance(1)
    node.log("others", xid(GPU0, 31), "others")
    assert xids(probe.collect()) == {FIRST: 2}
    result = node.probe().collect()
    assert xids(result) == {FIRST: 2}
    assert result.events == []


def test_a_ring_that_begins_anew_while_the_agent_is_away_is_counted_on_top(node: Node) -> None:
    node.log(xid(GPU0, 31))
    first = node.probe().collect()
    node.sequence = 0
    node.kmsg.write_bytes(b"")
    node.advance(1)
    node.log(xid(GPU0, 31))
    second = node.probe().collect()
    assert xids(second) == {FIRST: 2}
    assert first.events[0].key != second.events[0].key


@pytest.mark.parametrize("before", [(), ("other",)])
def test_a_ring_that_begins_anew_after_a_storm_is_counted_on_top(node: Node, before: tuple[str, ...]) -> None:
    probe = node.probe()
    node.log(*[xid(GPU0, 31)] * (MEMORY * 3))
    probe.collect()
    node.sequence = 0
    node.kmsg.write_bytes(b"")
    node.advance(1)
    node.log(*before, xid(GPU0, 31), xid(GPU0, 31))
    assert xids(probe.collect()) == {FIRST: MEMORY * 3 + 2}


def test_a_ring_without_numbers_is_counted_by_what_it_says(node: Node) -> None:
    probe = node.probe()
    for _ in range(3):
        node.sequence = 0
        node.advance(1)
        node.log(xid(GPU0, 31))
    assert xids(probe.collect()) == {FIRST: 3}
    assert xids(node.probe().collect()) == {FIRST: 3}


def test_another_boot_begins_at_zero(node: Node) -> None:
    node.log(*FACTS)
    node.probe().collect()
    node.boot("boot-2")
    node.sequence = 0
    node.kmsg.write_bytes(b"")
    node.uptime(50)
    node.log(xid(GPU0, 31))
    result = node.probe().collect()
    assert xids(result) == {FIRST: 1}
    assert records(result)["matched"] == 1
    assert len(result.events) == 1


def test_events_of_two_boots_have_different_keys(node: Node) -> None:
    node.log(xid(GPU0, 31), at_s=1)
    first = node.probe().collect()
    node.boot("boot-2")
    second = node.probe().collect()
    assert first.events[0].key != second.events[0].key


def test_without_a_boot_id_nothing_is_kept_and_each_start_reads_anew(node: Node) -> None:
    (node.proc / "sys/kernel/random/boot_id").unlink()
    node.log(xid(GPU0, 31))
    probe = node.probe()
    probe.collect()
    probe.collector.close()
    assert node.state.content == {}
    assert xids(node.probe().collect()) == {FIRST: 1}


def test_another_log_is_another_matter(node: Node) -> None:
    node.log(xid(GPU0, 31))
    node.probe().collect()
    node.kmsg = node.kmsg.with_name("other")
    node.kmsg.write_bytes(b"")
    node.sequence = 0
    node.advance(1)
    node.log(xid(GPU0, 31), xid(GPU0, 31), xid(GPU0, 31))
    assert xids(node.probe().collect()) == {FIRST: 3}


# What is kept


@pytest.mark.parametrize("part", ["position", "ledger", "folding", "gpus"])
@pytest.mark.parametrize("damage", [None, {}, [], [None], {"a": "b"}, [7], 7, "x"])
def test_a_damaged_memory_is_no_memory(node: Node, part: str, damage: object) -> None:
    node.log(*FACTS)
    first = node.probe().collect()
    node.state.content[part] = damage
    assert everything(node.probe().collect()) == everything(first)


@pytest.mark.parametrize(
    "path",
    [("overruns",), ("hung_tasks",), ("oom_kills", "memcg"), ("stalls", "rcu"), ("xids", 0, 3), ("sxids", 0, 4)],
)
@pytest.mark.parametrize(("total", "is_usable"), [(2**63, True), (2**63 + 1, False), (10**400, False)])
def test_a_total_that_nobody_can_have_counted_to_is_no_memory(
    node: Node, path: tuple[Any, ...], total: int, *, is_usable: bool
) -> None:
    node.log(*FACTS)
    first = node.probe().collect()
    inner = node.state.content["ledger"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = total
    again = node.probe().collect()
    assert (total in again.values.values()) == is_usable
    assert (everything(again) == everything(first)) == (not is_usable)


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


@pytest.mark.parametrize("damage", [None, -1, True, "x", [], [[]], {"a": "b"}, 1e400, float("nan")])
def test_a_memory_damaged_anywhere_ends_nothing(node: Node, damage: object) -> None:
    node.log(*FACTS, "NVRM: GPU at PCI:0001:00:00: " + UUID0, "NVRM: The NVIDIA GPU 0001:00:00.0", OOM)
    node.log(*[xid(GPU0, 95)] * 12)
    node.driver_gpu(GPU0, UUID0)
    node.probe().collect()
    good = copy.deepcopy(node.state.content)
    for path in leaves(good):
        damaged = copy.deepcopy(good)
        inner = damaged
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = damage
        node.state = MemoryState(damaged)
        result = node.probe().collect()
        assert all(value >= 0 for value in result.values.values())


def test_what_matters_is_kept_at_once_and_what_does_not_once_a_minute(node: Node) -> None:
    saves: list[int] = []

    class Counting(MemoryState):
        def save(self, content: Any) -> None:
            saves.append(1)
            super().save(content)

    node.state = Counting()
    probe = node.probe()
    probe.collect()
    saves.clear()  # of the GPUs' names
    for _ in range(50):
        node.log("unrelated")
        node.advance(1)
        probe.collect()
    assert saves == []
    node.advance(10)
    probe.collect()
    assert len(saves) == 1
    node.log(xid(GPU0, 31), xid(GPU0, 31))
    probe.collect()
    assert len(saves) == 2
    for _ in range(120):
        probe.collect()
        node.advance(1)
    assert len(saves) == 2, "nothing came, nothing is kept"
    for _ in range(50):
        node.log("unrelated")
        probe.collect()
        node.advance(1)
    assert len(saves) == 3


def test_what_was_read_before_a_good_end_is_kept(node: Node) -> None:
    probe = node.probe()
    node.log("unrelated")
    probe.collect()
    probe.collector.close()
    node.kmsg.write_bytes(b"")
    assert records(node.probe().collect())["unmatched"] == 1


def test_a_storm_keeps_a_bounded_memory(node: Node) -> None:
    node.log(*[xid(GPU0, 95)] * (MEMORY * 3))
    node.probe().collect()
    assert len(node.state.content["position"]["facts"]) == MEMORY
    again = node.probe().collect()
    assert sum(xids(again).values()) == MEMORY * 3
    assert again.events == []


# What was held back


def test_what_a_storm_held_back_is_told_after_a_restart(node: Node) -> None:
    probe = node.probe()
    node.log(*[xid(GPU0, 95)] * 500)
    assert len(probe.collect().events) == 10
    probe.collector.close()
    node.advance(30)
    probe = node.probe()
    assert probe.collect().events == [], "its minute is not over"
    node.advance(30)
    node.devices = []
    [event] = probe.collect().events
    assert event.labels == {"xid": "95", "uuid": UUID0, "gpu": "0", "pci": GPU0, "count": "490"}
    assert (event.severity, event.time, event.device) == (Severity.CRITICAL, WALL_S, "0")
    assert node.probe().collect().events == [], "once"


def test_what_a_storm_held_back_goes_on_over_kills(node: Node) -> None:
    events: list[Event] = []
    for _ in range(40):
        node.log(*[xid(GPU0, 95)] * 5)
        events += node.probe().collect().events
        node.advance(6)
    node.advance(60)
    events += node.probe().collect().events
    assert [int(event.labels.get("count", "1")) for event in events] == [1] * 10 + [46, 50, 50, 44]


def test_what_a_storm_held_back_before_the_machine_went_down_is_told_after(node: Node) -> None:
    node.log(*[xid(GPU0, 95)] * 15, *[xid(GPU1, 95)] * 3)
    node.probe().collect()
    node.boot("boot-2")
    node.sequence = 0
    node.kmsg.write_bytes(b"")
    node.advance(100)
    node.uptime(50)
    node.log(xid(GPU0, 95))
    probe = node.probe()
    before, now = probe.collect().events
    assert (before.labels["count"], before.time) == ("5", WALL_S)
    assert before.key.startswith("kmsg:boot-1:")
    assert ("count" in now.labels, now.time) == (False, WALL_S + 100)
    assert node.probe().collect().events == []


def test_what_was_held_back_is_told_once_though_nothing_new_comes(node: Node) -> None:
    node.log(*[xid(GPU0, 95)] * 15)
    node.probe().collect()
    node.boot("boot-2")
    node.kmsg.write_bytes(b"")
    assert len(node.probe().collect().events) == 1
    assert node.probe().collect().events == []


def test_of_storms_without_number_the_latest_are_kept(node: Node) -> None:
    for number in range(3 * KEPT):
        node.log(
            *[f"INFO: task t{number}:1 blocked for more than 9 seconds."] * 11, at_s=UPTIME_S + (number - 999) / 100
        )
    node.probe().collect()
    assert len(node.state.content["folding"]) == KEPT
    node.advance(60)
    tasks = {event.labels["task"] for event in node.probe().collect().events}
    assert tasks == {f"t{number}" for number in range(2 * KEPT, 3 * KEPT)}


# Names and times


def test_names_that_were_known_once_outlive_the_driver_and_the_agent(node: Node) -> None:
    node.devices = []
    for address, uuid in (("0000:00:00.0", "GPU-first"), (GPU0, UUID0), (GPU1, UUID1)):
        node.driver_gpu(address, uuid)
    node.log(xid(GPU0, 119))
    probe = node.probe()
    first = probe.collect()
    assert xids(first) == {label("1", UUID0, 119, "critical"): 1}
    shutil.rmtree(node.proc / "driver")
    probe.open()
    assert probe.collect().values == first.values
    assert node.probe().collect().values == first.values


def test_names_are_kept_though_nothing_happens(node: Node) -> None:
    node.devices = []
    node.driver_gpu(GPU0, UUID0)
    probe = node.probe()
    probe.collect()
    probe.collector.close()
    shutil.rmtree(node.proc / "driver")
    node.log(xid(GPU0, 31))
    assert xids(node.probe().collect()) == {FIRST: 1}


def test_names_of_one_boot_are_not_those_of_the_next(node: Node) -> None:
    node.devices = []
    node.driver_gpu(GPU0, UUID0)
    node.log(xid(GPU0, 31))
    node.probe().collect()
    shutil.rmtree(node.proc / "driver")
    node.boot("boot-2")
    assert xids(node.probe().collect()) == {label(GPU0, "", 31, "warning"): 1}


def test_a_clock_that_is_set_right_sets_the_times_right_also_over_a_restart(node: Node) -> None:
    node.clock.jump(8 * 3600)
    node.log(xid(GPU0, 31), sxid("20034, Fatal"), at_s=UPTIME_S - 5)
    node.probe().collect()
    node.clock.jump(-8 * 3600)
    node.advance(600)
    result = node.probe().collect()
    for metric in ("gpu_xid_last_timestamp_seconds", "nvswitch_sxid_last_timestamp_seconds"):
        assert list(series(result, metric).values()) == [WALL_S - 5]


def test_a_clock_that_is_adjusted_a_little_while_the_agent_is_away_moves_no_time(node: Node) -> None:
    node.log(xid(GPU0, 31))
    first = node.probe().collect()
    node.advance(10)
    node.clock.jump(0.4)
    assert node.probe().collect().values == first.values


# Failures


def test_events_of_a_run_that_came_to_nothing_are_told_by_the_next(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = node.probe()
    probe.collect()
    node.log(xid(GPU0, 31))
    with monkeypatch.context() as patch:
        patch.setattr(probe.context.state, "save", fail)
        with pytest.raises(OSError, match="told to"):
            probe.collect()
    node.log(xid(GPU1, 31))
    result = probe.collect()
    assert sum(xids(result).values()) == 2
    assert len(result.events) == 2


def fail(*_: object) -> None:
    raise OSError(5, "told to")


def test_a_log_that_fails_is_opened_again_and_goes_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = node.probe()
    node.log(xid(GPU0, 31))
    probe.collect()
    node.log(xid(GPU0, 31))
    with monkeypatch.context() as patch:
        patch.setattr("agent.hw.kmsg.os.read", fail)
        with pytest.raises(OSError, match="told to"):
            probe.collect()
    with pytest.raises(RuntimeError, match="not open"):
        probe.collect()
    probe.open()
    assert xids(probe.collect()) == {FIRST: 2}


def test_overruns_are_counted_and_survive_a_restart(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.proc / "uptime").unlink()  # whose reading would take an answer
    probe = node.probe()
    probe.open()
    answers = [OSError(32, "Broken pipe"), BlockingIOError(11, "later"), OSError(32, "Broken pipe"), OSError(5, "dead")]

    def read(*_: object) -> bytes:
        raise answers.pop(0)

    with monkeypatch.context() as patch:
        patch.setattr("agent.hw.kmsg.os.read", read)
        assert probe.collect().values["kernel_log_overruns_total"] == 1
        with pytest.raises(OSError, match="dead"):
            probe.collect()
    assert node.probe().collect().values["kernel_log_overruns_total"] == 2


# Which records are new, by themselves


def record(sequence: int, text: str = "x", time_us: int = 0) -> Record:
    return Record(3, sequence, time_us, text.encode())


def kept(position: Position) -> Position:
    return Position.from_json(MemoryState({"p": position.to_json()}).load()["p"])


def test_the_devices_numbers_decide_alone() -> None:
    position = Position(ordered=True)
    assert [position.take(record(n), tells=True) for n in (5, 6, 6, 2, 7)] == [True, True, False, False, True]
    position = kept(position)
    assert [position.take(record(n), tells=False) for n in (0, 7, 8)] == [False, False, True]
    assert position.to_json()["facts"] == []


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_a_ring_read_again_from_anywhere_counts_each_fact_once(lines: list[tuple[bool, int]], reads: list[int]) -> None:
    ring = [(record(n, f"{text}", n), tells) for n, (tells, text) in enumerate(lines)]
    position = Position(ordered=False)
    counted = 0
    read_to = 0
    for start in [*reads, 0]:
        read_to = max(read_to, min(len(ring), start))
        first = min(start, 7)  # the ring has lost its oldest records, some of them before they were read
        for item, tells in ring[first:read_to]:
            counted += position.take(item, tells=tells) and tells
        position = kept(position)
    for item, tells in ring:
        counted += position.take(item, tells=tells) and tells
    assert counted == sum(tells for _, tells in ring)


def test_the_ledger_comes_back_as_it_was(node: Node) -> None:
    node.log(*FACTS, "NVRM: GPU at PCI:0001:00:00: " + UUID0, "NVRM: The NVIDIA GPU 0001:00:00.0", OOM)
    node.probe().collect()
    content = node.state.load()["ledger"]
    again = MemoryState()
    again.save(ledger.Ledger.from_json(content).to_json())
    assert again.content == content
    assert content["dying"]
    assert content["falling"]
    assert content["lost"]
    assert series(node.probe().collect(), "kernel_oom_kills_total") == {'{scope="memcg"}': 2}
