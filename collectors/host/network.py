"""Traffic and state of network interfaces, from /proc/net/dev and /sys/class/net."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from agent.api import Kind, Metric
from agent.hw import procfs
from agent.hw.bulkhead import Bulkhead
from collectors.host.part import Part

if TYPE_CHECKING:
    from agent.api import Context, Out, Series
    from collectors.host.selection import Selection

_DIRECTIONS = {"rx": 0, "tx": 8}  # the first column of each direction behind the interface's name
_BITS_PER_BYTE = 8
_MEGA = 1_000_000
_FASTEST_MBPS = 10_000_000  # above: drivers write -1 as 4294967295 when they do not know


def _counter(name: str, text: str, unit: str = "") -> Metric:
    return Metric(
        f"host_network_{name}_total", Kind.COUNTER, text, ("device", "direction"), unit=unit, source="/proc/net/dev"
    )


# In the order of the columns of each direction.
COUNTERS = (
    _counter("bytes", "Data received (rx) or sent (tx).", "bytes"),
    _counter("packets", "Packets received (rx) or sent (tx)."),
    _counter("errors", "Packets that an error stopped."),
    _counter("drops", "Packets dropped, for lack of buffers as a rule."),
)
UP = Metric(
    "host_network_up",
    Kind.GAUGE,
    "1 when the interface can carry traffic, 0 when it cannot; absent when its driver does not tell.",
    ("device",),
    source="/sys/class/net/*/operstate",
)
CARRIER_CHANGES = Metric(
    "host_network_carrier_changes_total",
    Kind.COUNTER,
    "Times the link was lost or came back, each counted.",
    ("device",),
    source="/sys/class/net/*/carrier_changes",
)
SPEED = Metric(
    "host_network_speed_bytes_per_second",
    Kind.GAUGE,
    "Speed of the link, looked up once a minute; absent when the driver does not tell.",
    ("device",),
    unit="bytes_per_second",
    source="/sys/class/net/*/speed",
)
METRICS = (*COUNTERS, UP, CARRIER_CHANGES, SPEED)


class _Interface(NamedTuple):
    """The handles of one interface. `link` is its folder in sysfs, empty where that shows none."""

    counters: list[Series]
    link: str
    up: Series
    changes: Series
    speed: Series


class Network(Part):
    """The interfaces of the agent's network namespace."""

    source = "net/dev"

    def __init__(self, ctx: Context, selection: Selection) -> None:
        self._ctx = ctx
        self._selection = selection
        self._path = f"{ctx.proc}/net/dev"
        self._interfaces: dict[str, _Interface] = {}
        self._speeds: dict[str, int] = {}
        # Asking for the speed waits for the lock that a network card in reset may hold for long. The limit leaves the
        # time of the run to the file systems.
        self._bulkhead: Bulkhead[int | None] = Bulkhead("host-speed", ctx.timeout_s / 24, ctx.clock.monotonic)

    def open(self) -> None:
        names = sorted(name for name in procfs.parse_net_dev(procfs.read(self._path)) if name in self._selection)
        self._interfaces = {name: self._make(name) for name in names}
        outcomes = self._bulkhead.run(
            {
                name: partial(_read_speed, interface.link)
                for name, interface in self._interfaces.items()
                if interface.link
            }
        )
        self._bulkhead.close()  # until the next look, a minute from now
        self._speeds = {name: speed for name, speed in outcomes.items() if isinstance(speed, int)}

    def collect(self, out: Out) -> None:
        if not self._interfaces:
            return
        rows = procfs.parse_net_dev(procfs.read(self._path), self._interfaces)
        if not rows:
            raise procfs.FormatError(f"none of {', '.join(self._interfaces)} is in it")
        for name, row in rows.items():
            interface = self._interfaces[name]
            if isinstance(row, procfs.FormatError):
                out.failed(f"net/dev {name}", row)
            else:
                out.extend(
                    interface.counters,
                    [row[first + column] for column in range(len(COUNTERS)) for first in _DIRECTIONS.values()],
                )
            if interface.link:
                self._collect_link(name, interface, out)
            if name in self._speeds:
                out.add(interface.speed, self._speeds[name])

    def found(self) -> str:
        """Say how many interfaces there are."""
        return f"network interfaces {len(self._interfaces)}"

    def close(self) -> None:
        self._bulkhead.close()

    def _make(self, name: str) -> _Interface:
        series = self._ctx.series
        link = f"{self._ctx.sys}/class/net/{name}"
        return _Interface(
            [series(metric, name, direction) for metric in COUNTERS for direction in _DIRECTIONS],
            link if _can_read(f"{link}/operstate") else "",
            series(UP, name),
            series(CARRIER_CHANGES, name),
            series(SPEED, name),
        )

    def _collect_link(self, name: str, interface: _Interface, out: Out) -> None:
        try:
            state = procfs.read_word(f"{interface.link}/operstate")
            if state != "unknown":
                out.add(interface.up, int(state == "up"))
            changes = procfs.read(f"{interface.link}/carrier_changes")
            out.add(interface.changes, procfs.whole_number(changes.strip()))
        except (OSError, procfs.FormatError) as error:
            out.failed(f"net {name}", error)


def _read_speed(link: str) -> int | None:
    """Return bytes per second; None when the driver does not know (it refuses, or writes -1)."""
    try:
        mbps = procfs.whole_number(procfs.read(f"{link}/speed").strip())
    except (OSError, procfs.FormatError):
        return None
    return mbps * _MEGA // _BITS_PER_BYTE if 0 < mbps <= _FASTEST_MBPS else None


def _can_read(path: str) -> bool:
    try:
        procfs.read(path)
    except OSError:
        return False
    return True
