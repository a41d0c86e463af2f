"""Run one collector without the engine: the test kit for authors of collectors.

probe = Probe(Thermal, sysfs=tmp_path)
assert probe.collect().values == {'host_temperature_celsius{zone="cpu"}': 41.5}
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.api import DEVICE_SHARE
from agent.context import NodeContext
from agent.inventory import Inventory
from agent.sim.clock import FakeClock
from agent.snapshot import Batch, EvictedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.api import Clock, Collector, Device, Event, Value, VmSize

_NOWHERE = Path("/nonexistent")  # a collector under test must not read the machine it runs on


@dataclass
class MemoryState:
    """A collector's memory across restarts, kept in the test."""

    content: dict[str, Any] = field(default_factory=dict)

    def load(self) -> dict[str, Any]:
        """Return what was saved last, as JSON brings it back: tuples as lists, keys as text."""
        loaded: dict[str, Any] = json.loads(json.dumps(self.content))
        return loaded

    def save(self, content: Mapping[str, Any]) -> None:
        """Replace what is kept. Raises TypeError for what the agent could not keep: JSON types only."""
        self.content = json.loads(json.dumps(content))


@dataclass(frozen=True)
class Result:
    """What one run produced: values by series text (`name{label="x"}`), failures as (what, text), events, devices."""

    values: dict[str, Value]
    failures: list[tuple[str, str]]
    events: list[Event]
    devices: list[Device] = field(default_factory=list)


class Probe:
    """One collector with its context. `open` is called by the first `collect`; call it again to rediscover."""

    def __init__(
        self,
        collector: type[Collector],
        options: object = None,
        *,
        sysfs: Path = _NOWHERE,
        procfs: Path = _NOWHERE,
        devfs: Path = _NOWHERE,
        kmsg: Path = _NOWHERE,
        clock: Clock | None = None,
        state: MemoryState | None = None,
        vm_size: VmSize | None = None,
        interval_s: float = 10.0,
        timeout_s: float = 5.0,
        run_id: str = "run",
        avoid: Mapping[str, str] | None = None,
        devices: Sequence[Device] = (),
    ) -> None:
        self.state = MemoryState() if state is None else state
        inventory = Inventory()
        inventory.put("test", devices)
        self.context = NodeContext(
            log=logging.getLogger(f"probe.{collector.name}"),
            sys=sysfs,
            proc=procfs,
            dev=devfs,
            kmsg=kmsg,
            clock=FakeClock() if clock is None else clock,
            state=self.state,
            vm_size=vm_size,
            interval_s=interval_s,
            timeout_s=timeout_s,
            run_id=run_id,
            avoid=avoid or {},
            inventory=inventory,
        )
        self.collector = collector(collector.Options() if options is None else options, self.context)
        self._opened = False

    def open(self) -> None:
        """Discover, as the agent does at the start and every minute. Raises what the collector raises."""
        type(self.collector).look(self.collector.options, self.context)
        self.collector.open()
        self._opened = True

    def collect(self) -> Result:
        """Collect once. Raises AssertionError when a series was added twice: a scraper would refuse the page."""
        if not self._opened:
            self.open()
        batch = self._run() if self.collector.isolates_devices else self._run_here()
        snapshot = batch.finish(self.collector.name, self.context.clock.wall())
        values = {s.prefix.rstrip(): value for s, value in zip(snapshot.series, snapshot.values, strict=True)}
        if len(values) != len(snapshot.series):
            raise AssertionError("a series was added twice")
        return Result(values, batch.failures, batch.events, batch.devices)

    def _run_here(self) -> Batch:
        batch = Batch()
        self.collector.collect(batch)
        return batch

    def _run(self) -> Batch:
        """Run it as the agent runs one that isolates devices: when a run hangs, another goes on without the device."""
        while True:
            attempt = _Attempt(self.collector)
            if attempt.ended(self.context.timeout_s * DEVICE_SHARE):
                if attempt.error is not None:
                    raise attempt.error
                return attempt.batch


class _Attempt:
    """One run in a thread of its own."""

    def __init__(self, collector: Collector) -> None:
        self.batch = Batch()
        self.error: Exception | None = None
        self._collector = collector
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ended(self, patience_s: float) -> bool:
        """Wait for the end; False, and whatever it still brings is refused, when it does not come."""
        while self._thread.is_alive():
            device = self.batch.in_hand
            self._thread.join(patience_s)
            if self._thread.is_alive() and self.batch.in_hand == device:
                self.batch.evicted = True
                return False
        return True

    def _run(self) -> None:
        try:
            self._collector.collect(self.batch)
        except EvictedError:
            pass
        except Exception as error:  # noqa: BLE001 - raised again in the test's thread
            self.error = error
