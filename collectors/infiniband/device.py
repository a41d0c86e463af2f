"""One device of /sys/class/infiniband: what it is, and reading its ports.

`read` may hang where the kernel does, so it runs in a bulkhead, one at a time per device. It hands back what it found;
nobody else looks inside. Descriptors are given back when nobody holds the device any more, which may be a thread that
is stuck in it.
"""

from __future__ import annotations

import errno
import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from agent.hw.sysfs import directory_identity, link_name, read_text
from collectors.infiniband import metrics, roles
from collectors.infiniband.faults import Faults
from collectors.infiniband.port import Port, PortState, listing_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.api import Clock, Value
    from collectors.infiniband.sections import Counters, Key, Status


class DeviceGoneError(Exception):
    """The device is not in the class directory any more, or what is there is no device."""


@dataclass(frozen=True)
class Surroundings:
    """What a device needs to know besides its own files."""

    proc: Path
    clock: Clock
    slow_interval_s: float
    tick_s: float
    hw_counters: bool
    fabric_ethernet: Sequence[str]


class Reading(NamedTuple):
    """What one read found: `values[i]` belongs to `keys[i]`, the same object until something comes or goes."""

    keys: tuple[Key, ...]
    values: list[Value]
    ports: tuple[PortState, ...]
    failing: Sequence[tuple[str, str]]  # files that fail at present, as (what, text)


class Section(Protocol):
    """Values that are shown together: `values[i]` belongs to `keys[i]`. A change replaces the whole list."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Metric and label values of each value."""

    @property
    def values(self) -> list[Value]:
        """The values."""


class Info:
    """Series that are 1, for their labels' sake."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys
        self.values: list[Value] = [1] * len(keys)


class Device:
    """One adapter, by its entry in the class directory."""

    def __init__(self, directory: str, name: str, around: Surroundings) -> None:
        self.name = name
        self._path = f"{directory}/{name}"
        self._around = around
        self._identity: tuple[str, tuple[int, int]] | None = None
        self.ports_found: tuple[PortState, ...] = ()  # set as a whole, so that it can be read while a read hangs
        self._forget()

    def rescan(self) -> None:
        """Have the next read look anew what the device is and which files it has."""
        self._scan_due = True

    def read(self) -> Reading:
        """Read what is due. Raises DeviceGoneError."""
        if self._scan_due:
            self._scan()
        self._read_tiers(last_try=False)
        if self._faults.lost:
            # The device went, or came back as another, or a file was replaced: look, and read once more.
            self._scan()
            self._slow_due_s = float("-inf")
            self._read_tiers(last_try=True)
        values = self._assemble()
        return Reading(self._keys, values, self._port_states(), self._faults.failing())

    def _forget(self) -> None:
        self._faults = Faults(self.name)
        self._ports: list[Port] = []
        self._roles: dict[str, str] = {}
        self._link_layers: dict[str, str] = {}
        self._info: Section = Info(())
        self._scan_due = True
        self._slow_due_s = float("-inf")
        self._durations_s: list[Value] = [0.0, 0.0]
        self._sections: list[Section] = []  # in the order of what is shown
        self._statuses: list[Status] = []
        self._fast: list[Counters] = []
        self._slow: list[Counters] = []
        self._parts: tuple[list[tuple[Key, ...]], list[list[Value]]] = ([], [])
        self._keys: tuple[Key, ...] = ()
        self._values: list[Value] = []

    # Reading

    def _read_tiers(self, *, last_try: bool) -> None:
        clock = self._around.clock
        start_s = clock.monotonic()
        # A tick comes a little early or late: half a tick before the time is the time.
        slow = start_s >= self._slow_due_s - self._around.tick_s / 2
        for status in self._statuses:
            status.read(start_s, last_try=last_try, with_rate=slow)
        for section in self._fast:
            section.read(start_s, last_try=last_try)
        fast_end_s = clock.monotonic()
        slow_s = self._durations_s[1]
        if slow:
            for section in self._slow:
                section.read(start_s, last_try=last_try)
            self._slow_due_s = start_s + self._around.slow_interval_s
            slow_s = clock.monotonic() - fast_end_s
        self._durations_s = [fast_end_s - start_s, slow_s]
        if self._faults.any:
            for port in self._ports:
                port.restriction.judge()

    def _assemble(self) -> list[Value]:
        """Return all values, and make the keys that go with them; both anew only when a section's changed."""
        parts = ([section.keys for section in self._sections], [section.values for section in self._sections])
        if parts != self._parts:
            if parts[0] != self._parts[0]:
                durations = tuple((metrics.DURATION, (self.name, tier)) for tier in ("fast", "slow"))
                self._keys = (*(key for keys in parts[0] for key in keys), *durations)
            self._values = [value for values in parts[1] for value in values]
            self._parts = parts
        return self._values + self._durations_s

    def _port_states(self) -> tuple[PortState, ...]:
        return tuple([PortState(port.name, self._roles[port.name], port.status.up) for port in self._ports])

    # Discovery

    def _scan(self) -> None:
        directory = directory_identity(self._path)
        if directory is None:
            raise DeviceGoneError(f"{self._path}: gone, or no device")
        self._scan_due = True
        self._faults.lost = False
        guid = self._attribute("node_guid")
        identity = (guid, directory)
        if identity != self._identity:
            self._forget()
            self._identity = identity
        self._list_ports()
        self._describe(guid)
        self.ports_found = tuple(PortState(port.name, self._roles[port.name]) for port in self._ports)
        self._scan_files()
        self._order()
        self._scan_due = False

    def _list_ports(self) -> None:
        now_s = self._around.clock.monotonic()
        names = listing_of(self._path, "ports", "", self._faults, now_s)
        numbers = {int(name) for name in names if _is_port(name)}
        kept = {port.number: port for port in self._ports}
        for number in kept.keys() - numbers:
            kept.pop(number).forget()
        for number in numbers - kept.keys():
            kept[number] = Port(self._path, self.name, number, self._faults, hw_counters=self._around.hw_counters)
        self._ports = [kept[number] for number in sorted(kept)]

    def _scan_files(self) -> None:
        now_s = self._around.clock.monotonic()
        for port in self._ports:
            if port.scan(now_s):
                self._slow_due_s = float("-inf")

    def _describe(self, guid: str) -> None:
        """Make the info keys, which hold what the device is."""
        pci = f"{self._path}/device"
        driver = link_name(f"{pci}/driver")
        board = (self._attribute("board_id"), self._attribute("fw_ver"), self._attribute("hca_type"))
        numa = self._attribute("device/numa_node")
        keys: list[Key] = [(metrics.INFO, (self.name, *board))]
        declared = any(fnmatch.fnmatchcase(self.name, pattern) for pattern in self._around.fabric_ethernet)
        for port in self._ports:
            netdevs = roles.netdevs_of_port(f"{pci}/net", port.number, only_port=len(self._ports) == 1)
            link_layer = self._attribute(f"{port.directory}/link_layer", port.name) or self._link_layers.get(port.name)
            self._link_layers[port.name] = link_layer = link_layer or ""
            role = roles.role_of(
                self.name,
                link_layer,
                driver=driver,
                serves_host=link_layer == roles.ETHERNET and self._serves_host(f"{pci}/net", netdevs),
                declared_fabric=declared,
            )
            self._roles[port.name] = role
            where = (guid, link_name(pci), "" if numa == "-1" else numa, ",".join(netdevs), driver)
            keys.append((metrics.DEVICE_INFO, (self.name, port.name, role, link_layer, *where)))
        self._info = Info(tuple(keys))

    def _serves_host(self, net: str, netdevs: Sequence[str]) -> bool:
        routes = roles.default_routes(self._around.proc)
        return any(roles.serves_host(net, netdev, routes) for netdev in netdevs)

    def _order(self) -> None:
        """List what is read in each tier and what is shown."""
        self._statuses = [port.status for port in self._ports]
        self._fast = [port.fast for port in self._ports]
        self._slow = [port.slow for port in self._ports]
        self._sections = [self._info]
        for port in self._ports:
            self._sections += [port.restriction, port.status, port.fast, port.slow]
        self._sections.append(self._faults)

    def _attribute(self, file: str, port: str = "") -> str:
        """Return a describing text; empty when there is none, which for these is no error, or it cannot be read."""
        now_s = self._around.clock.monotonic()
        if self._faults.rests(file, now_s):
            return ""
        try:
            text = read_text(f"{self._path}/{file}")
        except FileNotFoundError:
            return ""
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.ENOTDIR):  # the device just went: the next look tells
                self._faults.strike(port, file, error, now_s)
            return ""
        self._faults.clear(file)
        return text


def _is_port(name: str) -> bool:
    """Say whether a directory's name is a port's number, as the kernel writes it."""
    return name.isascii() and name.isdigit() and name == str(int(name))
