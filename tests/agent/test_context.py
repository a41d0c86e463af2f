"""What a collector is handed: handles that are shared while held, and memories that commands do not change."""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path

import pytest

from agent.api import Kind, Metric
from agent.context import NodeContext, SystemClock
from agent.sim.clock import FakeClock
from agent.sim.harness import MemoryState

PORT = Metric("port_up", Kind.GAUGE, "Up.", ("device", "port"))
FREE = Metric("free", Kind.HISTOGRAM, "Free.")


def context() -> NodeContext:
    nowhere = Path("/nonexistent")
    return NodeContext(
        log=logging.getLogger("x"),
        sys=nowhere,
        proc=nowhere,
        dev=nowhere,
        kmsg=nowhere,
        clock=FakeClock(),
        state=MemoryState(),
        vm_size=None,
        interval_s=10.0,
        timeout_s=5.0,
        run_id="run",
    )


def test_same_values_give_the_same_handle_while_it_is_held() -> None:
    ctx = context()
    held = ctx.series(PORT, "mlx5_0", "1")
    assert ctx.series(PORT, "mlx5_0", "1") is held
    assert ctx.series(PORT, "mlx5_0", "2") is not held
    assert ctx.sample(FREE, {"le": "1"}, "_bucket") is not ctx.sample(FREE, {"le": "1"}, "_sum")


def test_metrics_of_equal_declaration_have_their_own_handles() -> None:
    ctx = context()
    again = Metric(PORT.name, PORT.kind, PORT.help, PORT.labels)
    first, second = ctx.series(PORT, "a", "1"), ctx.series(again, "a", "1")
    assert (first.metric, second.metric) == (PORT, again)


def test_handles_that_nobody_holds_are_forgotten() -> None:
    ctx = context()
    held = [ctx.series(PORT, "mlx5_0", str(number)) for number in range(100)]
    for number in range(1000):
        ctx.sample(FREE, {"job": str(number)})
    gc.collect()
    assert len(ctx._made) == 100
    held.clear()
    gc.collect()
    assert len(ctx._made) == 0


def test_label_values_are_given_in_declared_order() -> None:
    assert context().series(PORT, "mlx5_0", "1").labels == (("device", "mlx5_0"), ("port", "1"))


@pytest.mark.parametrize("values", [(), ("a",), ("a", "b", "c")])
def test_wrong_count_of_label_values_is_refused_with_both(values: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"metric port_up has the labels \('device', 'port'\), got the values"):
        context().series(PORT, *values)


def test_free_label_that_a_scraper_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="'job-id' is not a valid label name"):
        context().sample(FREE, {"job-id": "1"})


def test_system_clock_is_the_machines() -> None:
    before = (time.time(), time.monotonic())
    now = (SystemClock.wall(), SystemClock.monotonic())
    after = (time.time(), time.monotonic())
    assert before[0] <= now[0] <= after[0]
    assert before[1] <= now[1] <= after[1]
