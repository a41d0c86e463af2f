"""Exact gates on cost: what a cycle does, counted; the same on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.sim.infiniband import write_nd96asr_v4
from tests.perf.bench import ALL_TIERS, FAST_INTERVAL_S, InProcess
from tests.perf.counting import CountedCalls

DEVICES = 9
FAST_FILES = 13  # state, phys_state, and of counters/ what moves at any time
ALL_FILES = 53  # of these devices: counters/, hw_counters/, state, phys_state, rate


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_nd96asr_v4(tmp_path / "sys")
    return tmp_path


def counted(engine: InProcess) -> CountedCalls:
    with CountedCalls() as calls:
        engine.cycle()
    return calls


def test_a_steady_cycle_of_all_tiers_reads_each_file_once_and_looks_up_nothing(tree: Path) -> None:
    engine = InProcess(tree / "sys", tree, *ALL_TIERS)
    calls = counted(engine).as_dict()
    assert calls == {"pread": DEVICES * ALL_FILES + 1, "open": 0, "stat": 0, "listdir": 0, "scandir": 0}


def test_a_steady_cycle_of_the_fast_tier_reads_a_quarter(tree: Path) -> None:
    engine = InProcess(tree / "sys", tree)
    engine.clock.advance(FAST_INTERVAL_S)
    calls = counted(engine).as_dict()
    assert calls == {"pread": DEVICES * FAST_FILES + 1, "open": 0, "stat": 0, "listdir": 0, "scandir": 0}


def test_scrapes_read_nothing_and_render_once_per_change(tree: Path) -> None:
    engine = InProcess(tree / "sys", tree)
    exposition = engine.engine.exposition
    before = exposition.renders
    with CountedCalls() as calls:
        pages = {exposition.page() for _ in range(100)}
    assert calls.as_dict() == dict.fromkeys(calls.as_dict(), 0)
    assert (len(pages), exposition.renders) == (1, before)


def test_more_scrapers_cost_no_more_reads(tree: Path) -> None:
    def reads_in_a_minute(scrapers: int) -> int:
        engine = InProcess(tree / "sys", tree)
        with CountedCalls() as calls:
            for _ in range(4):
                engine.clock.advance(FAST_INTERVAL_S)
                engine.cycle()
                for _ in range(scrapers):
                    engine.engine.exposition.page()
        return calls.reads

    assert reads_in_a_minute(scrapers=50) == reads_in_a_minute(scrapers=0)
