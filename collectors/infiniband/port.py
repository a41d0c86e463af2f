"""One port: its sections, kept while the files behind them are the same, and read in two tiers."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, NamedTuple

from agent.hw.sysfs import entries
from collectors.infiniband import metrics
from collectors.infiniband.sections import Column, Counters, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.api import Value
    from collectors.infiniband.faults import Faults
    from collectors.infiniband.sections import Key

_STATUS_FILES = ("state", "phys_state", "rate")


class PortState(NamedTuple):
    """What the rest of the collector must know of a port. `up` is None when its state could not be read."""

    port: str
    role: str
    up: bool | None = None


class Restriction:
    """Whether the driver refuses all that a port's counters/ holds."""

    def __init__(self, device: str, port: str, faults: Faults) -> None:
        self.files: Sequence[str] = ()
        self.keys: tuple[Key, ...] = ((metrics.RESTRICTED, (device, port)),)
        self.values: list[Value] = [0]
        self._faults = faults

    def judge(self) -> None:
        """Look how the last reads of the files ended."""
        self.values = [1 if self.files and all(map(self._faults.refused, self.files)) else 0]


class Port:
    """The files of one port. `root` is the device's directory; `hw_counters` says whether those are wanted.

    After the first `scan`: `status`, `fast` (what may move at any time: traffic, congestion, link_downed) and `slow`
    (the other error counters, then the hardware counters) are what is to be read.
    """

    status: Status
    fast: Counters
    slow: Counters

    def __init__(self, root: str, device: str, number: int, faults: Faults, *, hw_counters: bool) -> None:
        self.number = number
        self.name = str(number)
        self.directory = f"ports/{number}"
        self.restriction = Restriction(device, self.name, faults)
        self._root = root
        self._labels = (device, self.name)
        self._faults = faults
        self._directories = ("", "counters", "counters_ext", *(("hw_counters",) if hw_counters else ()))
        self._found: dict[str, Mapping[str, int]] = {}
        self._listings: dict[str, Mapping[str, int]] = {}  # file and inode that each section was made from

    def scan(self, now_s: float) -> bool:
        """Look which files there are; True when any are new. Unchanged sections keep their descriptors."""
        found = {directory: self._list(directory, now_s) for directory in self._directories}
        if found == self._found:
            return False
        self._found = found
        status = found[""]
        pma = self._columns("counters", metrics.COUNTERS, found["counters"])
        extended = self._columns("counters_ext", metrics.COUNTERS_EXT, found["counters_ext"])
        fast = {column: inode for column, inode in pma.items() if column.source.often} | extended
        # Hardware counters last and in one go: the driver answers all of them from one query while that is young.
        slow = {column: inode for column, inode in pma.items() if not column.source.often} | self._hw_columns(found)
        self.restriction.files = [column.file for column in pma]
        changed = False
        if self._is_new("status", {f"{self.directory}/{name}": status.get(name, 0) for name in _STATUS_FILES}):
            # Every port has these three: one that is missing is opened all the same, so that it is told as missing.
            self.status = Status(self._root, *self._labels, self._faults)
            changed = True
        if self._is_new("fast", {column.file: inode for column, inode in fast.items()}):
            self.fast = Counters(self._root, tuple(fast), self.name, self._faults)
            changed = True
        if self._is_new("slow", {column.file: inode for column, inode in slow.items()}):
            self.slow = Counters(self._root, tuple(slow), self.name, self._faults)
            changed = True
        return changed

    def forget(self) -> None:
        """Hold nothing against the files any more: they are not there."""
        self._found = {}
        for section in self._listings:
            self._is_new(section, {})

    def _is_new(self, section: str, listing: Mapping[str, int]) -> bool:
        known = self._listings.get(section)
        if listing == known:
            return False
        for file in known or ():
            self._faults.clear(file)
        self._listings[section] = listing
        return True

    def _list(self, directory: str, now_s: float) -> Mapping[str, int]:
        path = f"{self.directory}/{directory}" if directory else self.directory
        return listing_of(self._root, path, self.name, self._faults, now_s)

    def _columns(
        self, directory: str, table: Mapping[str, metrics.Source], found: Mapping[str, int]
    ) -> dict[Column, int]:
        columns: dict[Column, int] = {}
        for file, source in table.items():
            if file in found:
                flag = None if source.limit is None else (metrics.SATURATED, (*self._labels, file))
                path = f"{self.directory}/{directory}/{file}"
                columns[Column(path, (source.metric, self._labels), source, flag)] = found[file]
        return columns

    def _hw_columns(self, listings: Mapping[str, Mapping[str, int]]) -> dict[Column, int]:
        """Return the hardware counters: those with names of their own, then others, sorted, as far as allowed."""
        found = listings.get("hw_counters", {})
        columns = self._columns("hw_counters", metrics.HW_COUNTERS, found)
        others = sorted(file for file in found if file not in metrics.HW_COUNTERS and _is_wanted(file))
        generic = metrics.Source(metrics.HW_COUNTER)
        for file in others[: metrics.HW_COUNTER_LIMIT]:
            key = (metrics.HW_COUNTER, (*self._labels, file))
            columns[Column(f"{self.directory}/hw_counters/{file}", key, generic, None)] = found[file]
        return columns


def listing_of(root: str, directory: str, port: str, faults: Faults, now_s: float) -> Mapping[str, int]:
    """Return names and inodes in a device's directory; empty when it has none or (counted) it cannot be listed."""
    if faults.rests(directory, now_s):
        return {}
    try:
        found = entries(f"{root}/{directory}")
    except OSError as error:
        faults.strike(port, directory, error, now_s)
        return {}
    faults.clear(directory)
    return found


def _is_wanted(file: str) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in metrics.HW_COUNTER_NAMES)
