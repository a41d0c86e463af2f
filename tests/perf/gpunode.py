"""A simulated ND96asr_v4 with a C library in place of the driver's, and its gpu collector driven cycle by cycle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from agent import log
from agent.config import Sources, load
from agent.engine import Engine
from agent.registry import installed
from agent.remote import usage
from agent.sim import nvml
from agent.sim.node import SimNode
from tests.fakenvml import library
from tests.perf import timedlibrary
from tests.perf.sharednumber import SharedNumber
from tests.perf.steppedclock import SteppedClock

SIZE = "ND96asr_v4"
INTERVAL_S = 5.0  # the collector's default; the slow tier's is 60 s
CYCLES_PER_MINUTE = 12
SLOW = "collectors.gpu.slow_interval=1s"  # every cycle is one of both tiers
_USUAL = partial(log.setup, "error", "text")


class Call(NamedTuple):
    """One call into the driver's library. `gpu` is the number of the GPU it was about, None for none."""

    function: str
    gpu: int | None
    thread: int


class GpuNode:
    """The node's trees, and the library that logs the calls it gets."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.sim = SimNode(folder / "node", SIZE)
        self.library = library.build(folder / "lib")
        self._log = folder / "calls"
        self.forget_calls()

    @property
    def gpus(self) -> int:
        """How many it has."""
        return len(self.sim.gpus)

    @property
    def settings(self) -> tuple[str, ...]:
        """What the agent has to be told to see this node and nothing of the machine."""
        return (
            f"agent.sysfs={self.sim.sys}",
            f"agent.procfs={self.sim.proc}",
            f"agent.devfs={self.sim.dev}",
            f"agent.kmsg={self.sim.kmsg}",
            f"agent.sku={SIZE}",
            f"agent.state_dir={self.folder / 'state'}",
            f"agent.socket={self.folder / 'agent.sock'}",
            f"collectors.gpu.nvml_library={self.library}",
        )

    def environment(self, *, logged: bool) -> dict[str, str]:
        """Return the environment of an agent on this node. To log a call costs more than the call."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FAKENVML_")}
        calls = {"FAKENVML_CALLS": str(self._log)} if logged else {}
        return {**kept, "FAKENVML_STATE": str(self.sim.nvml_state), **calls}

    def change(self, changes: Mapping[str, str | None]) -> None:
        """Change what the library answers; None takes a key out."""
        state = {**nvml.read(self.sim.nvml_state).values, **changes}
        nvml.write(self.sim.nvml_state, {key: value for key, value in state.items() if value is not None})

    def calls(self) -> list[Call]:
        """Return the calls since they were last forgotten, in their order."""
        lines = [line.split() for line in self._log.read_text(encoding="ascii").splitlines()]
        return [Call(name, None if gpu == "-" else int(gpu), int(thread)) for name, gpu, thread, _ in lines]

    def forget_calls(self) -> None:
        """Empty the log."""
        self._log.write_text("", encoding="ascii")


class GpuCycles:
    """The agent's engine with its gpu collector in a process of its own, one cycle at a time."""

    def __init__(self, node: GpuNode, settings: tuple[str, ...], child_setup: Callable[[], None]) -> None:
        self._node = node
        plugins = {"gpu": installed()["gpu"]}
        loaded = load(
            Sources(directory="/nonexistent", default_file="/nonexistent", sets=(*node.settings, *settings)),
            collector_names=list(plugins),
            output_names=[],
        )
        self.clock = SteppedClock(SharedNumber(node.folder / "ahead_s"))
        self.engine = Engine(loaded, plugins, child_setup=child_setup, clock=self.clock)
        (self._job,) = self.engine.make_jobs()

    def run(self, after_s: float = INTERVAL_S) -> None:
        """Collect once, so long after the cycle before, and render the page."""
        self.clock.step(after_s)
        self._job.run(None, self.engine.store, self.clock, self.engine.emit)
        self.engine.after_tick()
        self.engine.exposition.page()

    def cycle(self) -> list[Call]:
        """Run once; return the calls that this made."""
        self._node.forget_calls()
        self.run()
        return self._node.calls()

    @staticmethod
    def worker_cpu_s() -> float:
        """Processor time of the collector's processes so far, as of their last cycle."""
        return usage["gpu"].cpu_seconds

    def close(self) -> None:
        """End the collector's process."""
        self._job.close()
        self.engine.stop()


@contextlib.contextmanager
def cycles(node: GpuNode, *settings: str, time_into: SharedNumber | None = None) -> Iterator[GpuCycles]:
    """Make cycles on a node. Their calls are logged, or the time that they take is added up in a number of seconds."""
    setup = _USUAL if time_into is None else partial(timedlibrary.install, _USUAL, str(node.library), time_into)
    # The library looks into the environment, which a collector's process inherits.
    environment = mock.patch.dict(os.environ, node.environment(logged=time_into is None), clear=True)
    # What this process's agents know of another node's GPUs by the same numbers is not this node's.
    with environment, mock.patch.dict(usage, clear=True):
        made = GpuCycles(node, settings, setup)
        try:
            yield made
        finally:
            made.close()
