"""The part of the benchmark about a whole node: every built-in collector, eight GPUs, an agent and its child process.

The driver's library is a stand-in that answers at once, so nothing here tells how long a driver takes. What can be
told exactly is how often it is asked.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.perf import servers
from tests.perf.gpunode import CYCLES_PER_MINUTE, SIZE, SLOW, GpuNode, cycles
from tests.perf.sharednumber import SharedNumber

MEMORY_GOAL_MIB = 55
COMPILER = "cc"
PUBLISHED_DCGM_EXPORTER = "417 to 511 MiB (github.com/pytorch/ci-infra, issue 1011)"
GPU, DEVICE, HOST, KERNEL = (
    b"\ngpu_up{",
    b"\nnode_infiniband_info{",
    b"\nhost_uptime_seconds ",
    b"\nkernel_log_records_total{",
)
EVERYTHING = (GPU, DEVICE, HOST, KERNEL)
SETTLING_S = 2.0  # after the start, until the caches of the first round are as they stay
CPU_CYCLES = 120
WARM_UP = 3


def measure(scratch: Path, idle_s: float) -> dict[str, Any] | None:
    """Measure it all; print as it goes. None where there is no compiler for the stand-in."""
    if shutil.which(COMPILER) is None:
        print(f"\n{COMPILER} is missing: nothing about GPUs (apt-get install gcc libc6-dev)")
        return None
    node = GpuNode(scratch)
    print(f"\nwhole node ({SIZE}), every built-in collector on:")
    print("  the library in place of the GPU driver's answers at once: no driver's time is in these figures")
    report = _running(node, idle_s)
    report["nvml_calls"] = _calls(node)
    report["cycle_cpu_s"] = {
        "fast tier": _cycle_cpu(node, "fast tier"),
        "both tiers": _cycle_cpu(node, "both tiers", SLOW),
    }
    return report


def _running(node: GpuNode, idle_s: float) -> dict[str, Any]:
    with servers.whole_agent(node.settings, EVERYTHING, node.environment(logged=False)) as agent:
        (worker,) = agent.children()
        page = agent.scrape()
        series = sum(not line.startswith(b"#") for line in page.splitlines())
        print(f"  page: {series} series, {len(page) / 1000:.0f} kB, ", end="")
        print(f"of {page.count(GPU)} GPUs and {page.count(DEVICE)} InfiniBand devices among others; ", end="")
        print(f"first whole one after {agent.first_page_s * 1000:.0f} ms")
        time.sleep(SETTLING_S)
        memory = _memory(agent, worker)
        idle = _idle(agent, worker, idle_s)
        scrape_s = {
            "keep-alive": agent.cost_s(2000, keep_alive=True),
            "new connection each": agent.cost_s(1000, keep_alive=False),
        }
    costs = ", ".join(f"{name} {cost_s * 1e6:.0f} us" for name, cost_s in scrape_s.items())
    print(f"  cached scrape: {costs}")
    return {
        "series": series,
        "page_bytes": len(page),
        "first_page_s": agent.first_page_s,
        "memory": memory,
        "idle": idle,
        "scrape_s": scrape_s,
    }


def _memory(agent: servers.Process, worker: servers.Process) -> dict[str, dict[str, float]]:
    own, its = agent.memory_mib(), worker.memory_mib()
    both = own[0] + its[0], own[1] + its[1]
    print(f"  RSS: agent {own[0]:.1f} + gpu process {its[0]:.1f} = {both[0]:.1f} MiB (goal: {MEMORY_GOAL_MIB})")
    print(f"    dcgm-exporter alone is published at {PUBLISHED_DCGM_EXPORTER}")
    print(f"  PSS: agent {own[1]:.1f} + gpu process {its[1]:.1f} = {both[1]:.1f} MiB")
    named = {"agent": own, "gpu process": its, "both": both}
    return {name: {"rss_mib": rss, "pss_mib": pss} for name, (rss, pss) in named.items()}


def _idle(agent: servers.Process, worker: servers.Process, idle_s: float) -> dict[str, float]:
    begun_s, before = time.monotonic(), (agent.cpu_s(), worker.cpu_s())
    time.sleep(idle_s)
    used_s = agent.cpu_s() - before[0], worker.cpu_s() - before[1]
    passed_s = time.monotonic() - begun_s
    own, its = (used / passed_s for used in used_s)
    print(f"  idle for {idle_s:g} s at the default intervals: ", end="")
    print(f"agent {own:.3%} + gpu process {its:.3%} = {own + its:.3%} of a core")
    return {"seconds": passed_s, "agent": own, "gpu process": its}


def _calls(node: GpuNode) -> dict[str, Any]:
    """Count a first cycle and the minute after it; exact, the same on every machine."""
    with cycles(node) as driven:
        first = driven.cycle()
        minute = [driven.cycle() for _ in range(CYCLES_PER_MINUTE)]
    counts = {"first cycle": first, "fast tier": min(minute, key=len), "both tiers": max(minute, key=len)}
    print(f"  calls into the driver's library, {node.gpus} GPUs:")
    for name, calls in counts.items():
        about = Counter(call.gpu for call in calls)
        print(f"    {name}: {len(calls)}, of them {about[0]} for each GPU")
    per_minute = sum(map(len, minute))
    print(f"    per minute at the default intervals: {per_minute}, whatever the number of scrapers")
    most = Counter(call.function for calls in minute for call in calls).most_common()
    print("    most of them: " + ", ".join(f"{count} {function}" for function, count in most[:5]))
    return {**{name: len(calls) for name, calls in counts.items()}, "per_minute": per_minute, "by_function": dict(most)}


def _cycle_cpu(node: GpuNode, tiers: str, *settings: str) -> dict[str, float]:
    """Return what a cycle with its page costs, others right before and after it, in seconds of processor time."""
    in_library = SharedNumber(node.folder / "library_s")
    with cycles(node, *settings, time_into=in_library) as driven:
        for _ in range(WARM_UP):
            driven.run()
        before_s = time.process_time(), driven.worker_cpu_s(), in_library.get()
        for _ in range(CPU_CYCLES):
            driven.run(0.0)
        after_s = time.process_time(), driven.worker_cpu_s(), in_library.get()
    agent_s, worker_s, library_s = (
        (after - before) / CPU_CYCLES for before, after in zip(before_s, after_s, strict=True)
    )
    own_s = worker_s - library_s
    print(f"  gpu cycle, {tiers}: agent {agent_s * 1e6:.0f} us, gpu process {own_s * 1e6:.0f} us ", end="")
    print(f"without {library_s * 1e6:.0f} us in the stand-in library")
    return {"agent_s": agent_s, "gpu_process_s": own_s, "library_s": library_s}
