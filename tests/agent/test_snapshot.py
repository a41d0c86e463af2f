"""One run's output: what of it becomes a point, what a failure, and what the store shows of it."""

from __future__ import annotations

import enum
import errno
import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Device, Duration, Event, Kind, Metric, Series, Severity
from agent.snapshot import POINTS_LIMIT, Batch, EvictedError, Snapshot, Store, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.api import Value

METRIC = Metric("a", Kind.GAUGE, "Help.", ("n",))
A, B, C = (Series(METRIC, [("n", name)]) for name in "abc")


class Int64:
    """An integer scalar as numpy has them: no int, but usable as an index."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __float__(self) -> float:
        return float(self.value)


class Hostile:
    """An object that cannot be converted, compared or shown."""

    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


class Level(enum.IntEnum):
    HIGH = 3


def finished(*values: Any) -> tuple[Snapshot, Batch]:
    batch = Batch()
    for value in values:
        batch.add(A, value)
    return batch.finish("test", 1.0), batch


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1),
        (False, 0),
        (Level.HIGH, 3),
        (Int64(2**63 + 1), 2**63 + 1),
        (2**64 - 1, 2**64 - 1),
        (Duration(1.5), 1.5),
        (Decimal("0.5"), 0.5),
        (-0.0, -0.0),
    ],
)
def test_whatever_is_a_number_becomes_a_plain_one_unrounded(value: Any, number: Value) -> None:
    snapshot, batch = finished(value)
    assert [*snapshot.values] == [number]
    assert type(snapshot.values[0]) is type(number)
    assert batch.failures == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        math.nan,
        math.inf,
        -math.inf,
        "N/A",
        b"",
        [],
        {},
        object(),
        10**400,
        -(10**5000),
        Int64(10**400),
        Hostile(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_finite_number_is_absent_and_a_failure_and_costs_nothing_else(value: Any) -> None:
    batch = Batch()
    batch.extend([A, B, C], [1, value, 3])
    snapshot = batch.finish("test", 1.0)
    assert ([*snapshot.series], [*snapshot.values]) == ([A, C], [1, 3])
    assert [what for what, _ in batch.failures] == ['a{n="b"}']
    assert batch.failures[0][1].startswith("not a finite number: ")
    assert len(batch.failures[0][1]) < 100


def test_values_that_overflow_only_when_added_are_kept() -> None:
    assert [*finished(1e308, 1e308, 2**1023, 2**1023)[0].values] == [1e308, 1e308, 2**1023, 2**1023]


@pytest.mark.parametrize("handle", [METRIC, None, "a", Hostile()], ids=lambda handle: type(handle).__name__)
def test_what_is_no_handle_is_a_failure_and_costs_nothing_else(handle: Any) -> None:
    batch = Batch()
    batch.add(A, 1)
    batch.add(handle, 2)
    batch.add(B, 3)
    snapshot = batch.finish("test", 1.0)
    assert ([*snapshot.series], [*snapshot.values]) == ([A, B], [1, 3])
    assert [what for what, _ in batch.failures] == ["points"]
    assert "not a handle from Context.series" in batch.failures[0][1]


@given(st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3)), max_size=20))
def test_finish_never_raises_and_gives_plain_finite_numbers(values: list[Any]) -> None:
    snapshot, batch = finished(*values)
    assert {type(value) for value in snapshot.values} <= {int, float}
    assert all(math.isfinite(value) for value in snapshot.values)
    assert len(snapshot.values) == len(snapshot.series)
    assert len(snapshot.values) + len(batch.failures) == len(values)


def test_run_beyond_the_limit_is_cut_and_told() -> None:
    batch = Batch()
    batch.extend([A] * (POINTS_LIMIT + 1), range(POINTS_LIMIT + 1))
    snapshot = batch.finish("test", 1.0)
    assert len(snapshot.series) == len(snapshot.values) == POINTS_LIMIT
    assert batch.failures == [("points", f"{POINTS_LIMIT + 1} in one run, limit {POINTS_LIMIT}: the rest dropped")]


def test_run_at_the_limit_is_whole() -> None:
    batch = Batch()
    batch.extend([A] * POINTS_LIMIT, range(POINTS_LIMIT))
    assert (len(batch.finish("test", 1.0).series), batch.failures) == (POINTS_LIMIT, [])


def test_lists_of_different_length_are_refused_whole() -> None:
    batch = Batch()
    with pytest.raises(ValueError, match="2 series but 1 values"):
        batch.extend([A, B], [1])
    assert [*batch.finish("test", 1.0).series] == []


def test_snapshot_does_not_change_when_the_collector_keeps_its_output() -> None:
    batch = Batch()
    batch.add(A, 1)
    snapshot = batch.finish("test", 1.0)
    batch.add(B, 2)
    assert ([*snapshot.series], [*snapshot.values]) == ([A], [1])


def test_what_is_no_event_is_refused_where_it_is_reported() -> None:
    batch = Batch()
    with pytest.raises(TypeError, match=r"expected an agent\.api\.Event"):
        batch.event("link down")  # type: ignore[arg-type] # the mistake in question
    assert batch.events == []


def test_failure_tells_what_failed_and_why() -> None:
    batch = Batch()
    batch.failed("mlx5_0", OSError(errno.EIO, "Input/output error", "ports/1/state"))
    batch.failed("mlx5_1", "no such port")
    batch.failed(["odd"], ValueError("bad"))  # type: ignore[arg-type] # must stay usable as a key
    assert batch.failures == [
        ("mlx5_0", "ports/1/state: Input/output error"),
        ("mlx5_1", "no such port"),
        ("['odd']", "ValueError: bad"),
    ]


def test_evicted_run_is_stopped_at_whatever_it_touches_next() -> None:
    batch = Batch()
    Store().evict(batch, "test")
    event = Event("a", Severity.INFO, "agent", "text")
    touches: list[Callable[[], None]] = [
        lambda: batch.add(A, 1),
        lambda: batch.extend([A], [1]),
        lambda: batch.event(event),
        lambda: batch.failed("a", "b"),
        lambda: batch.working_on("gpu0"),
        lambda: batch.device(Device("gpu", "0")),
    ]
    for touch in touches:
        with pytest.raises(EvictedError):
            touch()
    assert (batch.series, batch.events, batch.failures, batch.in_hand) == ([], [], [], "")


def test_evicted_run_is_never_published_and_what_it_published_before_vanishes() -> None:
    store, batch = Store(), Batch()
    assert store.put(finished(1)[0])
    store.evict(batch, "test")
    assert store.latest()[1] == {}
    assert not store.put(finished(2)[0], batch)
    assert store.latest()[1] == {}


def test_store_changes_its_version_with_its_content_only() -> None:
    store = Store()
    versions = [store.latest()[0]]
    store.drop("test")
    versions.append(store.latest()[0])
    store.put(finished(1)[0])
    versions.append(store.latest()[0])
    store.drop("test")
    versions.append(store.latest()[0])
    assert versions == [0, 0, 1, 2]


def test_reader_keeps_what_it_took_while_the_store_goes_on() -> None:
    store = Store()
    first, second = finished(1)[0], finished(2)[0]
    store.put(first)
    _, taken = store.latest()
    store.put(second)
    store.drop("test")
    assert taken == {"test": first}


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOENT, "No such file or directory", "x"), "x: No such file or directory"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (ValueError("bad"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (MuteError(), "MuteError"),
    ],
)
def test_error_is_described_in_one_phrase(error: Exception, text: str) -> None:
    assert describe(error) == text


def test_snapshot_before_the_latest_is_kept_until_its_source_vanishes() -> None:
    store = Store()
    first, second = (Batch().finish("test", at_s) for at_s in (1.0, 2.0))
    store.put(first)
    assert store.before("test") is None
    store.put(second)
    assert store.before("test") is first
    store.drop("test")
    store.put(second)
    assert store.before("test") is None, "what lies a failure apart tells no rate"
