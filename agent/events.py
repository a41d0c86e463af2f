"""The event ring: the latest events in bounded memory, with ids that grow also across restarts.

Ids start at the wall clock's milliseconds, so they grow even where nothing can be kept; what is kept, in blocks, makes
them grow when the clock was set back.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.api import Clock, Event, State

RING_SIZE = 2000
KEYS_REMEMBERED = 10_000
BLOCK = 1000


@dataclass(frozen=True)
class Recorded:
    """An event with the id, key and time that it got when it was recorded."""

    id: int
    key: str
    time: float
    event: Event
    labels: Mapping[str, str]

    def as_json(self, *, with_message: bool = True) -> dict[str, Any]:
        """Return the public form. Without the message for those who may not see log text."""
        event = self.event
        return {
            "id": self.id,
            "key": self.key,
            "time": _rfc3339(self.time),
            "kind": event.kind,
            "severity": event.severity.value,
            "component": event.component,
            "device": event.device,
            "labels": dict(self.labels),
            "message": event.message if with_message else "",
            "source": event.source,
            "workload": None,
        }


class Ring:
    """The latest events. Any thread may record and read. `labels` are added to every event."""

    def __init__(self, state: State, clock: Clock, labels: Mapping[str, str], size: int = RING_SIZE) -> None:
        self._state = state
        self._clock = clock
        self._labels = dict(labels)
        self._events: deque[Recorded] = deque(maxlen=size)
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        kept = state.load().get("next_id")
        self._next = max(int(clock.wall() * 1000), kept if isinstance(kept, int) else 1)
        self._reserved = self._next
        self.total = 0

    def record(self, events: Iterable[Event]) -> list[Recorded]:
        """Record new events; one whose key was recorded before is the same fact read again and is left out."""
        fresh = []
        with self._lock:
            for event in events:
                time = self._clock.wall() if event.time is None else event.time
                key = event.key or _derived_key(event, time)
                if key in self._keys:
                    continue
                self._keys[key] = None
                if len(self._keys) > KEYS_REMEMBERED:
                    self._keys.popitem(last=False)
                fresh.append(Recorded(self._take_id(), key, time, event, {**self._labels, **event.labels}))
            self._events.extend(fresh)
            self.total += len(fresh)
        return fresh

    def since(self, id_: int = 0, limit: int = 100) -> Sequence[Recorded]:
        """Return events with a higher id, oldest first; of more than `limit`, the oldest of them."""
        with self._lock:
            return [*islice((event for event in self._events if event.id > id_), limit)]

    def latest(self, limit: int = 100) -> Sequence[Recorded]:
        """Return the newest events, oldest first."""
        with self._lock:
            return [*islice(self._events, max(0, len(self._events) - limit), None)]

    def around(self, id_: int, limit: int = 100, seconds: float = 300.0) -> Sequence[Recorded]:
        """Return the events within `seconds` of this one, in order of time; empty when it is no longer known."""
        with self._lock:
            events = list(self._events)
        centre = next((event for event in events if event.id == id_), None)
        if centre is None:
            return []
        near = [event for event in events if abs(event.time - centre.time) <= seconds]
        near.sort(key=lambda event: (abs(event.time - centre.time), abs(event.id - centre.id)))
        return sorted(near[:limit], key=lambda event: (event.time, event.id))

    def _take_id(self) -> int:
        if self._next >= self._reserved:
            self._reserved = self._next + BLOCK
            self._state.save({"next_id": self._reserved})
        taken, self._next = self._next, self._next + 1
        return taken


def _derived_key(event: Event, time: float) -> str:
    labels = sorted(event.labels.items())
    parts = (event.kind, event.component, event.device, f"{time:.3f}", event.message, repr(labels))
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def _rfc3339(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
