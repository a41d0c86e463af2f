"""InfiniBand and RoCE adapters through /sys/class/infiniband: counters, states, rates, and whether any are missing.

Source of the files: the kernel's Documentation/ABI/stable/sysfs-class-infiniband. What each metric means and what its
absence means: infiniband.md.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent.api import DEVICE_SHARE, Collector, Duration, Lane, NotPresent
from agent.hw.bulkhead import Bulkhead, Stalled
from agent.hw.sysfs import entries
from collectors.infiniband import metrics, roles
from collectors.infiniband.device import Device, DeviceGoneError, Reading, Surroundings
from collectors.infiniband.expectation import Expectation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.api import Context, Out, Series, Value
    from collectors.infiniband.port import PortState
    from collectors.infiniband.sections import Key

    Ports = tuple[PortState, ...]
    Outcome = Reading | Stalled | Exception

SOONEST_RESCAN_S = 5.0
_HANGS = "a read does not return; left alone until it does, the others go on; the kernel log may tell more"
_NODE = ""  # the owner, among devices' names, of the series that belong to the whole node


@dataclass(frozen=True)
class Options:
    """Configuration of the collector."""

    slow_interval: Duration = field(
        default=Duration(60),
        metadata={"help": "How often error counters and hw_counters are read, and (from 5s to 1m) devices looked for."},
    )
    device_include: tuple[str, ...] = field(default=(), metadata={"help": "Globs of device names to read; empty: all."})
    device_exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Globs of device names that are never touched; wins over device_include."}
    )
    hw_counters: bool = field(default=True, metadata={"help": "Read hw_counters/ of each port."})
    fabric_ethernet: tuple[str, ...] = field(
        default=(), metadata={"help": "Globs of devices whose Ethernet ports are the fabric (RoCE clusters)."}
    )


class InfiniBand(Collector):
    """Reads each device in a bulkhead: one that hangs costs its own values only."""

    name = "infiniband"
    metrics = metrics.METRICS
    lane = Lane.THREAD
    isolates_devices = True
    Options = Options
    needs = "an InfiniBand or RoCE adapter with its driver loaded (/sys/class/infiniband)"
    interval = Duration(15)

    def __init__(self, options: Any, ctx: Context) -> None:
        super().__init__(options, ctx)
        keys: Options = options
        self._options = keys
        self._class = f"{ctx.sys}/class/infiniband"
        self._around = Surroundings(
            proc=ctx.proc,
            clock=ctx.clock,
            slow_interval_s=keys.slow_interval,
            tick_s=ctx.interval_s,
            hw_counters=keys.hw_counters,
            fabric_ethernet=keys.fabric_ethernet,
        )
        # Devices come and go, and what is wanted to be seen often is wanted to be found soon.
        self.rescan_s = min(max(options.slow_interval, SOONEST_RESCAN_S), type(self).rescan_s)
        self._bulkhead: Bulkhead[Reading] = Bulkhead(self._class, ctx.timeout_s * DEVICE_SHARE, ctx.clock.monotonic)
        self._expectation = Expectation(ctx, self._is_wanted)
        self._told_missing = 0
        self._devices: dict[str, Device] = {}
        self._excluded: set[str] = set()
        self._ports: dict[str, Ports] = {}  # as last seen, also of a device that is stuck now
        self._series: dict[str, tuple[tuple[Key, ...], list[Series]]] = {}

    def open(self) -> None:
        """List the devices; the next read looks what each has. Raises NotPresent when none is there or expected."""
        wanted = self._wanted()
        for name in self._devices.keys() - wanted:
            self._drop(name)
        for name in wanted:
            if name in self._devices:
                self._devices[name].rescan()
            else:
                self._devices[name] = Device(self._class, name, self._around)
        self._devices = dict(sorted(self._devices.items()))
        self._require_anything()

    def collect(self, out: Out) -> None:
        """Read what is due of each device. Raises NotPresent as `open` does."""
        calls = {name: device.read for name, device in list(self._devices.items())}
        outcomes = self._bulkhead.run(calls, out.working_on)
        keys: list[Key] = []
        values: list[Value] = []
        for name, outcome in outcomes.items():
            if isinstance(outcome, Reading):
                self._ports[name] = outcome.ports
                out.extend(self._series_of(name, outcome.keys), outcome.values)
                for what, text in outcome.failing:
                    out.failed(what, text)
            elif isinstance(outcome, DeviceGoneError):
                if name in self._ports:  # else it was never a device: a stray file, a dangling link
                    out.failed(name, outcome)
                self._drop(name)
                continue
            else:
                self._lose(out, name, outcome, keys, values)
            keys.append((metrics.STALLED, (name,)))
            values.append(1 if isinstance(outcome, Stalled) else 0)
        self._require_anything()
        self._judge_fabric(keys, values)
        out.extend(self._series_of(_NODE, tuple(keys)), values)

    def found(self) -> str:
        """Say how many devices and fabric ports there are."""
        expected = self._expected()
        of = "" if expected is None else f" of {expected} expected"
        return f"{len(self._fabric())} fabric ports{of} on {len(self._devices)} devices"

    def seen(self) -> bool:
        return bool(self._devices)

    def close(self) -> None:
        """Let go of the devices: descriptors go back when no read holds them any more."""
        self._devices.clear()
        self._bulkhead.close()

    def _require_anything(self) -> None:
        if not self._devices and not self._expected():
            kept_out = f" ({len(self._excluded)} kept out by the configuration)" if self._excluded else ""
            raise NotPresent(f"no InfiniBand device in {self._class}{kept_out}")

    def _wanted(self) -> set[str]:
        """Return the devices to read. Names alone decide: nothing below a device that is kept out is touched."""
        names = set(entries(self._class))
        wanted = {name for name in names if self._is_wanted(name)}
        self._excluded |= names - wanted
        return wanted

    def _is_wanted(self, name: str) -> bool:
        def matches(patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

        options = self._options
        return (not options.device_include or matches(options.device_include)) and not matches(options.device_exclude)

    def _lose(self, out: Out, name: str, outcome: Outcome, keys: list[Key], values: list[Value]) -> None:
        """Show a device that is there but gave nothing: of its ports only that they cannot be observed."""
        stalled = isinstance(outcome, Stalled)
        out.failed(name, _HANGS if stalled else _as_exception(outcome))
        known = self._ports.get(name) or self._devices[name].ports_found
        self._ports[name] = tuple(port._replace(up=None) for port in known)
        keys.extend((metrics.OBSERVABLE, (name, port.port)) for port in self._ports[name])
        values.extend(0 for _ in self._ports[name])

    def _judge_fabric(self, keys: list[Key], values: list[Value]) -> None:
        """Add how many fabric ports there are, should be and are up, and the rate they should have."""
        fabric = self._fabric()
        others = {n for n, ports in self._ports.items() if ports and all(p.role in roles.NO_FABRIC for p in ports)}
        self._expectation.saw(Counter(name for name, _ in fabric), others)
        expected = self._expected()
        self._tell_missing((expected or 0) - len(fabric), expected)
        counts = {"expected": expected, "present": len(fabric), "up": sum(bool(p.up) for _, p in fabric)}
        for status, count in counts.items():
            if count is not None:
                keys.append((metrics.FABRIC_PORTS, (status,)))
                values.append(count)
        size = self.ctx.vm_size
        if size is not None and size.fabric_rate_bps:
            keys.extend((metrics.EXPECTED_RATE, (name, port.port)) for name, port in fabric)
            values.extend(size.fabric_rate_bps // 8 for _ in fabric)

    def _tell_missing(self, missing: int, expected: int | None) -> None:
        """Log a change in how many fabric ports are missing."""
        if missing > 0 and missing != self._told_missing:
            self.ctx.log.warning("%d of %d expected fabric ports are not there", missing, expected)
        elif missing <= 0 < self._told_missing:
            self.ctx.log.info("all %d expected fabric ports are there again", expected)
        self._told_missing = max(missing, 0)

    def _fabric(self) -> list[tuple[str, PortState]]:
        return [(name, port) for name, ports in self._ports.items() for port in ports if port.role == roles.FABRIC]

    def _expected(self) -> int | None:
        return self._expectation.ports(sum(not roles.named_as_frontend(name) for name in self._excluded))

    def _series_of(self, owner: str, keys: tuple[Key, ...]) -> list[Series]:
        """Return the handles for these keys: the same list as long as the keys are the same."""
        kept = self._series.get(owner)
        if kept is not None and kept[0] is keys:
            return kept[1]
        if kept is not None and kept[0] == keys:
            series = kept[1]
        else:
            series = [self.ctx.series(metric, *labels) for metric, labels in keys]
        self._series[owner] = (keys, series)  # these keys, so that the next comparison is by identity
        return series

    def _drop(self, name: str) -> None:
        self._devices.pop(name, None)
        self._ports.pop(name, None)
        self._series.pop(name, None)


def _as_exception(outcome: Outcome) -> Exception:
    return outcome if isinstance(outcome, Exception) else TypeError(f"unexpected outcome {outcome!r}")
