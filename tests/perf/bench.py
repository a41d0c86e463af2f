"""`make bench`: what the agent costs, beside node_exporter's InfiniBand collector and on a whole simulated GPU node.

Prints ratios and writes `bench.json`. The two sides take turns in one run and the median of the pairs counts, because
the machine's speed drifts. A fake tree has no firmware behind it, a stand-in for a library no driver: this measures
the agents, not the hardware. For the same reason the counts matter more than the times: each of those reads is a
command to a real adapter, each of those calls one to a real GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import __version__
from agent.config import Sources, load
from agent.engine import Engine
from agent.registry import installed
from agent.sim.clock import FakeClock
from agent.sim.infiniband import write_nd96asr_v4
from tests.perf import servers, wholenode
from tests.perf.counting import CountedCalls

PEER = "prometheus-node-exporter"


class InProcess:
    """The agent's engine with its InfiniBand collector, driven one cycle at a time in this process.

    Time stands still unless it is told to advance, so a tight loop sees exactly the tiers it asks for.
    """

    def __init__(self, sysfs: Path, scratch: Path, *settings: str) -> None:
        plugins = {"infiniband": installed()["infiniband"]}
        roots = (f"agent.sysfs={sysfs}", f"agent.procfs={scratch / 'none'}", f"agent.state_dir={scratch / 'state'}")
        loaded = load(
            Sources(directory="/nonexistent", default_file="/nonexistent", sets=(*roots, *settings)),
            collector_names=list(plugins),
            output_names=[],
        )
        self.clock = FakeClock()
        self.engine = Engine(loaded, plugins, child_setup=lambda: None, clock=self.clock)
        self._job = self.engine.make_jobs()[0]
        self.cycle()
        gc.freeze()  # as the daemon does after its first round

    def cycle(self) -> None:
        """Collect what is due, derive, and render the page once."""
        self._job.run(None, self.engine.store, self.clock, self.engine.emit)
        self.engine.after_tick()
        self.engine.exposition.page()

    def cost_s(self, cycles: int, *, advance_s: float = 0.0) -> float:
        """Return this process's processor time per cycle, so many seconds apart on the engine's clock."""
        before_s = time.process_time()
        for _ in range(cycles):
            self.clock.advance(advance_s)
            self.cycle()
        return (time.process_time() - before_s) / cycles


# Half an interval early is in time, so with a standing clock every cycle finds the slow tier due.
ALL_TIERS = ("collectors.infiniband.interval=1m", "collectors.infiniband.slow_interval=10s")
FAST_INTERVAL_S = 15.0  # the collector's default; the slow tier's is 60 s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="how often both sides take their turn")
    parser.add_argument("--idle", type=float, default=20.0, help="how many seconds to watch the agent when nobody asks")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where the figures go")
    options = parser.parse_args(arguments)
    logging.disable(logging.INFO)
    peer = shutil.which(PEER)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a safely made directory in it
    with tempfile.TemporaryDirectory(dir=memory) as scratch:
        report = measure(Path(scratch), peer, options.pairs)
        report["whole_node"] = wholenode.measure(Path(scratch) / "whole", options.idle)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {options.json}")
    return 0 if all(goal["held"] for goal in report["goals"]) else 1


def measure(scratch: Path, peer: str | None, pairs: int) -> dict[str, Any]:
    """Measure the InfiniBand collector by itself; print as it goes."""
    sysfs = scratch / "sys"
    write_nd96asr_v4(sysfs)
    (scratch / "none").mkdir()
    report: dict[str, Any] = {"environment": _environment(peer), "goals": []}
    print("\n".join(f"{key}: {value}" for key, value in report["environment"].items()))
    with servers.agent(sysfs, scratch) as ours:
        report["start"] = _start(ours, _count_series(ours.scrape()))
        if peer is None:
            print(f"\n{PEER} is missing: no ratios (apt-get install {PEER})")
        else:
            with servers.node_exporter(peer, sysfs) as theirs:
                engines = InProcess(sysfs, scratch, *ALL_TIERS), InProcess(sysfs, scratch)
                _against_peer(report, ours, theirs, engines, pairs)
    report["work"] = _work(sysfs, scratch)
    return report


def _environment(peer: str | None) -> dict[str, str]:
    return {
        "hpcwatch": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": str(os.cpu_count()),
        "peer": servers.version(peer) if peer else "missing",
        "tree": "ND96asr_v4: 9 devices of one port, counters/ and hw_counters/",
    }


@dataclass(frozen=True)
class Comparison:
    """Two costs in seconds of processor time that are measured in turn; `goal` bounds their ratio."""

    name: str
    goal: float | None
    own: Callable[[], float]
    peer: Callable[[], float]


def _start(ours: servers.Server, series: int) -> dict[str, float]:
    rss_mib, first_page_s = ours.resident_mib(), ours.first_page_s
    print(f"\nagent: {series} series, RSS {rss_mib:.1f} MiB (goal: 35), first page {first_page_s * 1000:.0f} ms")
    return {"rss_mib": rss_mib, "first_page_s": first_page_s, "series": series}


def _against_peer(
    report: dict[str, Any],
    ours: servers.Server,
    theirs: servers.Server,
    engines: tuple[InProcess, InProcess],
    pairs: int,
) -> None:
    peer_series, own_series = _count_series(theirs.scrape()), _count_series(ours.scrape())
    rss_mib, first_page_ms = theirs.resident_mib(), theirs.first_page_s * 1000
    print(f"peer:  {peer_series} series, RSS {rss_mib:.1f} MiB, first page {first_page_ms:.0f} ms\n")
    print(f"processor time against {PEER}, median of {pairs} pairs (least .. most):")
    report["ratios"] = {}
    for comparison in _comparisons(ours, theirs, engines):
        taken = [(comparison.own(), comparison.peer()) for _ in range(pairs)]
        ratios = [own / peer for own, peer in taken]
        median = statistics.median(ratios)
        report["ratios"][comparison.name] = {"pairs_s": taken, "ratios": ratios, "median": median}
        verdict = ""
        if comparison.goal is not None:
            held = median <= comparison.goal
            report["goals"].append({"name": comparison.name, "goal": comparison.goal, "got": median, "held": held})
            verdict = f"goal {comparison.goal:g}: {'held' if held else 'MISSED'}"
        own_us, peer_us = (statistics.median(side) * 1e6 for side in zip(*taken, strict=True))
        print(f"  {comparison.name:38} {median:.3f} ({min(ratios):.3f} .. {max(ratios):.3f})  ", end="")
        print(f"{own_us:4.0f} us / {peer_us:4.0f} us  {verdict}")
    share = own_series / peer_series
    report["goals"].append({"name": "series per peer's series", "goal": 2, "got": share, "held": share >= 2})
    print(f"  {'series':38} {share:.2f}  goal >= 2: {'held' if share >= 2 else 'MISSED'}")


def _comparisons(
    ours: servers.Server, theirs: servers.Server, engines: tuple[InProcess, InProcess]
) -> list[Comparison]:
    everything, usual = engines

    def peer_scrape() -> float:
        return theirs.cost_s(300, keep_alive=True)

    return [
        Comparison("collection cycle, all tiers / scrape", 0.25, lambda: everything.cost_s(600), peer_scrape),
        Comparison(
            "mean cycle at default intervals *",
            None,
            lambda: usual.cost_s(600, advance_s=FAST_INTERVAL_S),
            peer_scrape,
        ),
        Comparison("cached scrape, keep-alive", 0.05, lambda: ours.cost_s(4000, keep_alive=True), peer_scrape),
        Comparison(
            "cached scrape, new connection each",
            0.3,
            lambda: ours.cost_s(1500, keep_alive=False),
            lambda: theirs.cost_s(300, keep_alive=False),
        ),
    ]


def _work(sysfs: Path, scratch: Path) -> dict[str, Any]:
    """Count what one steady cycle does; exact, the same on every machine."""
    everything = InProcess(sysfs, scratch, *ALL_TIERS)
    with CountedCalls() as full:
        everything.cycle()
    steady = InProcess(sysfs, scratch)
    steady.clock.advance(FAST_INTERVAL_S)
    with CountedCalls() as fast:
        steady.cycle()
    counts = {"fast tier": fast.as_dict(), "all tiers": full.as_dict()}
    print("  * three of the fast tier, one of both with the minute's look for devices and files")
    print("\nwork of one steady cycle (9 devices):")
    for name, calls in counts.items():
        print(f"  {name}: " + ", ".join(f"{count} {call}" for call, count in calls.items()))
    per_minute = 3 * fast.reads + full.reads
    print(f"  file reads per minute at the default intervals: {per_minute}, whatever the number of scrapers")
    return {**counts, "reads_per_minute": per_minute}


def _count_series(page: bytes) -> int:
    return sum(line.startswith((b"node_infiniband", b"infiniband")) for line in page.splitlines())


if __name__ == "__main__":
    sys.exit(main())
