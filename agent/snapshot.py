"""What one run of a collector produced, and the store that outputs read. Snapshots are immutable; a run shows whole.

A batch collects (`agent.api.Out`), a snapshot is a batch that was checked, the store holds the latest of each source.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.api import Device, Event, Series
from agent.inventory import Inventory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.api import Value

TEXT_LIMIT = 500  # characters of what people are told about one failure
POINTS_LIMIT = 20_000  # of one run; a collector that exceeds it is broken, and the page must stay readable
_PLAIN = {int, float}


class EvictedError(Exception):
    """Raised inside a collector that overran its deadline, as soon as it touches its output again."""


@dataclass(frozen=True)
class Snapshot:
    """The points of one run: `series[i]` has `values[i]`. `taken_at` is wall time in seconds, of the run's start."""

    source: str
    taken_at: float
    series: Sequence[Series]
    values: Sequence[Value]
    devices: Sequence[Device] = ()


class Batch:
    """The output of one run (`agent.api.Out`), until `finish` makes it a snapshot."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.series: list[Series] = []
        self.values: list[Value] = []
        self.events: list[Event] = []
        self.failures: list[tuple[str, str]] = []
        self.devices: list[Device] = []
        self.in_hand = ""  # the device that is being read
        self.in_hand_since_s = 0.0  # monotonic
        self.in_hand_limit_s = 0.0  # 0: the collector's own
        self.evicted = False

    def add(self, series: Series, value: Value) -> None:
        """Add one value."""
        if self.evicted:
            raise EvictedError
        self.series.append(series)
        self.values.append(value)

    def extend(self, series: Sequence[Series], values: Sequence[Value]) -> None:
        """Add many values, pairwise. Raises ValueError when the lengths differ."""
        if self.evicted:
            raise EvictedError
        if len(series) != len(values):
            raise ValueError(f"{len(series)} series but {len(values)} values")
        self.series.extend(series)
        self.values.extend(values)

    def event(self, event: Event) -> None:
        """Report that something happened. Raises TypeError for what is no event."""
        if self.evicted:
            raise EvictedError
        if not isinstance(event, Event):
            raise TypeError(f"expected an agent.api.Event, got {_shown(event)}")
        self.events.append(event)

    def failed(self, what: str, error: Exception | str) -> None:
        """Report one device or file that failed."""
        if self.evicted:
            raise EvictedError
        text = error[:TEXT_LIMIT] if isinstance(error, str) else describe(error)
        self.failures.append((str(what)[:TEXT_LIMIT], text))

    def device(self, device: Device) -> None:
        """Tell a device's names. Raises TypeError for what is none."""
        if self.evicted:
            raise EvictedError
        if not isinstance(device, Device):
            raise TypeError(f"expected an agent.api.Device, got {_shown(device)}")
        self.devices.append(device)

    def working_on(self, device: str, limit_s: float | None = None) -> None:
        """Name the device that the next reads touch."""
        if self.evicted:
            raise EvictedError
        self.in_hand_limit_s = limit_s or 0.0
        self.in_hand_since_s = self._monotonic()  # before: whoever looks must not see a new device with an old time
        self.in_hand = device

    def finish(self, source: str, taken_at: float) -> Snapshot:
        """Check the points and freeze them. What is no finite number becomes absent and a failure. Never raises."""
        plain = not (set(map(type, self.series)) - {Series} or set(map(type, self.values)) - _PLAIN)
        if not (plain and _all_finite(self.values)):
            self._drop_what_is_no_point()
        if len(self.series) > POINTS_LIMIT:
            self.failures.append(("points", f"{len(self.series)} in one run, limit {POINTS_LIMIT}: the rest dropped"))
        return Snapshot(source, taken_at, self.series[:POINTS_LIMIT], self.values[:POINTS_LIMIT], tuple(self.devices))

    def _drop_what_is_no_point(self) -> None:
        kept: list[tuple[Series, Value]] = []
        for series, value in zip(self.series, self.values, strict=True):
            number = _as_number(value)
            if not isinstance(series, Series):
                self.failures.append(("points", f"not a handle from Context.series: {_shown(series)}"))
            elif number is None:
                self.failures.append((series.prefix.rstrip(), f"not a finite number: {_shown(value)}"))
            else:
                kept.append((series, number))
        self.series = [series for series, _ in kept]
        self.values = [value for _, value in kept]


def _all_finite(values: Sequence[Value]) -> bool:
    # One addition per value in C; integers beyond float range and sums that overflow take the slow way round.
    try:
        return math.isfinite(sum(values))
    except OverflowError:
        return False


def _as_number(value: object) -> Value | None:
    try:
        number = float(value)  # type: ignore[arg-type] # numpy scalars, Decimal, whatever a plug-in found
        if not math.isfinite(number):
            return None
        # Integers stay exact, numpy's too; bool included: True is 1. Beyond float's range no scraper could read them.
        return int(operator.index(value)) if hasattr(value, "__index__") else number
    except Exception:  # noqa: BLE001 - a foreign object's conversion may raise anything
        return None


def _shown(value: object) -> str:
    try:
        return repr(value)[:60]
    except Exception:  # noqa: BLE001 - a foreign object, or an integer of more digits than Python writes
        return f"a {type(value).__name__}"


def describe(error: BaseException) -> str:
    """Say what came back, for a log line: an errno's own text and path, else the type and message."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a foreign error; its type must do
        text = ""
    return f"{type(error).__name__}: {text[:TEXT_LIMIT]}" if text else type(error).__name__


class Store:
    """The latest snapshot of each source. Readers take the whole mapping, which never changes under them."""

    def __init__(self) -> None:
        self.inventory = Inventory()
        self._latest: dict[str, Snapshot] = {}
        self._before: dict[str, Snapshot] = {}
        self._lock = threading.Lock()
        self.version = 0

    def put(self, snapshot: Snapshot, batch: Batch | None = None) -> bool:
        """Publish a snapshot; False when the batch it came from was evicted meanwhile."""
        with self._lock:
            if batch is not None and batch.evicted:
                return False
            former = self._latest.get(snapshot.source)
            if former is not None:
                self._before = {**self._before, snapshot.source: former}
            self._latest = {**self._latest, snapshot.source: snapshot}
            self.inventory.put(snapshot.source, snapshot.devices)
            self.version += 1
            return True

    def refuse(self, batch: Batch) -> None:
        """Refuse whatever this batch still brings."""
        with self._lock:
            batch.evicted = True

    def evict(self, batch: Batch, source: str) -> None:
        """Refuse whatever this batch still brings, and drop what its source published."""
        self.refuse(batch)
        self.drop(source)

    def drop(self, source: str) -> None:
        """Make a source's series vanish."""
        with self._lock:
            if source in self._latest:
                self._latest = {name: snapshot for name, snapshot in self._latest.items() if name != source}
                self._before = {name: snapshot for name, snapshot in self._before.items() if name != source}
                self.version += 1

    def latest(self) -> tuple[int, Mapping[str, Snapshot]]:
        """Return the version and all snapshots by source."""
        with self._lock:
            return self.version, self._latest

    def before(self, source: str) -> Snapshot | None:
        """Return the snapshot that a source's latest one replaced, so that a reader can tell rates."""
        with self._lock:
            return self._before.get(source)
