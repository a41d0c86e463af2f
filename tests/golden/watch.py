"""A simulated node watched by the gpu, infiniband and kernel collectors: its page and events, the same every time.

The host collector is left out, because it asks the system for more than files, and so is what the agent says of itself.
"""

from __future__ import annotations

import logging
import math
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent.api import DEVICE_SHARE, Duration
from agent.context import NodeContext
from agent.events import Ring
from agent.exposition import Exposition
from agent.job import Job
from agent.sim import nvml
from agent.sim.clock import FakeClock
from agent.sim.harness import MemoryState
from agent.sim.node import SimNode
from agent.snapshot import Store
from collectors import gpu, infiniband, kernel
from tests.collectors.gpunode import untouched_binding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.api import Collector
    from agent.events import Recorded

TICK_S = 1
TIMEOUT_S = 6.0  # an adapter that hangs takes a quarter of it, in real time
_MEMORY = Path("/dev/shm")  # noqa: S108 - only a directory made safely below it is used


@dataclass(frozen=True)
class Sight:
    """What was seen of a node at a second of its life, and the events until then."""

    page: str
    events: Sequence[Recorded]


class Watch:
    """The collectors on one node, each at its own interval. Time is the node's; what a scraper sees is in `sight`.

    The intervals are those of the demonstration, or nearly: on a node that stays for months the agent is not as hasty.
    """

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self._clock = FakeClock()
        self._store = Store()
        self._ring = Ring(MemoryState(), self._clock, {})
        self._exposition = Exposition(self._store)
        self._threads: list[threading.Thread] = []
        self._seconds = 0
        self._jobs = [  # the last is told by the first what GPUs are called
            self._job(gpu.Gpu, gpu.Options(slow_interval=Duration(10)), 5),
            self._job(infiniband.InfiniBand, infiniband.Options(slow_interval=Duration(5)), 5),
            self._job(kernel.Kernel, kernel.Options(), 1),
        ]

    def sight(self, seconds: int) -> Sight:
        """Watch on until then."""
        for now in range(self._seconds, seconds + 1):
            self._clock.advance(now - self._seconds)
            self._seconds = now
            self._node.at(now)
            for job in self._jobs:
                if now % job.interval_s == 0:
                    self._run(job)
        return Sight(self._exposition.page().decode(), self._ring.latest())

    def close(self) -> None:
        """Let go of everything, and of reads that hang."""
        for port in self._node.ports:
            port.release()
        for thread in self._threads:
            thread.join()
        for job in self._jobs:
            job.close()

    def _job(self, collector: type[Collector], options: object, interval_s: int) -> Job:
        node = self._node
        context = NodeContext(
            log=logging.getLogger(collector.name),
            sys=node.sys,
            proc=node.proc,
            dev=node.dev,
            kmsg=node.kmsg,
            clock=self._clock,
            state=MemoryState(),
            vm_size=node.vm_size,
            interval_s=interval_s,
            timeout_s=TIMEOUT_S,
            run_id="run",
            inventory=self._store.inventory,
        )
        return Job(
            collector.name,
            partial(collector, options, context),
            lane=collector.lane,
            interval_s=interval_s,
            timeout_s=TIMEOUT_S,
            isolates_devices=collector.isolates_devices,
        )

    def _run(self, job: Job) -> None:
        """Run it as the agent does, in another thread from where a device hung. Only one that does is given up."""
        while True:
            thread = threading.Thread(target=job.run, args=(None, self._store, self._clock, self._ring.record))
            thread.start()
            may_hang = job.isolates_devices and any(port.hung for port in self._node.ports)
            thread.join(TIMEOUT_S * DEVICE_SHARE if may_hang else None)
            if not thread.is_alive():
                return
            self._threads.append(thread)
            job.evict(self._store, math.inf)


@cache
def watch(sku: str, scenario: str, *seconds: int) -> Mapping[int, Sight]:
    """Return what is seen of a scenario at each of these seconds, which are given in the order of time."""
    with _node(sku, scenario) as node:
        watching = Watch(node)
        try:
            return {second: watching.sight(second) for second in seconds}
        finally:
            watching.close()


@contextmanager
def _node(sku: str, scenario: str) -> Iterator[SimNode]:
    memory = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="hpcwatch-golden-") as folder, untouched_binding():
        node = SimNode(Path(folder), sku, scenario)
        nvml.install(node.nvml_state)
        yield node
