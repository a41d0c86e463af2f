"""Storms told in few words: of facts that repeat, the first ones are reported alone and later ones together."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.api import Event, Severity

if TYPE_CHECKING:
    from collections.abc import Callable

ALONE = 10
TOGETHER_S = 60.0
QUIET_S = 600.0  # after this long without a fact its next ones are reported alone again
STORMS_LIMIT = 1000  # at a time; a log that tells of more is damaged, and the one that was quiet longest is over
KEPT = 200  # storms over a restart, the latest; of more at a time their last facts are only counted


@dataclass
class _Storm:
    given: int
    given_at_s: float
    seen_at_s: float
    held: int = 0
    latest: Callable[[], Event] | None = None


class Folding:
    """Decides which facts become events, by what they have in common. All times are seconds since boot."""

    def __init__(self) -> None:
        self._storms: OrderedDict[str, _Storm] = OrderedDict()  # the one that had a fact last is the last

    def take(self, key: str, at_s: float, make: Callable[[], Event]) -> list[Event]:
        """Take a fact; return the events that are due now. One that stands for several has the label `count`."""
        storm = self._storms.pop(key, None)
        if storm is None or at_s - storm.seen_at_s >= QUIET_S:
            if storm is None and len(self._storms) >= STORMS_LIMIT:
                _, storm = self._storms.popitem(last=False)
            self._storms[key] = _Storm(1, at_s, at_s)
            return [*([] if storm is None else _release(storm, at_s)), make()]
        self._storms[key] = storm
        storm.seen_at_s = at_s
        if storm.given < ALONE:
            storm.given += 1
            storm.given_at_s = at_s
            return [make()]
        storm.held += 1
        storm.latest = make
        return _release(storm, at_s) if at_s - storm.given_at_s >= TOGETHER_S else []

    def due(self, now_s: float) -> list[Event]:
        """Return the events whose time has come though no further fact did."""
        events: list[Event] = []
        for key, storm in list(self._storms.items()):
            if now_s - storm.given_at_s >= TOGETHER_S:
                events += _release(storm, now_s)
            if now_s - storm.seen_at_s >= QUIET_S:
                del self._storms[key]
        return events

    def end(self) -> list[Event]:
        """Return the events of what is still held: nothing will be added to it."""
        return [event for storm in self._storms.values() for event in _release(storm, storm.seen_at_s)]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the storms as JSON types, with the events that their held facts would become."""
        latest = sorted(self._storms.items(), key=lambda item: item[1].seen_at_s)[-KEPT:]
        return [
            {
                "key": key,
                "given": storm.given,
                "given_at": storm.given_at_s,
                "seen_at": storm.seen_at_s,
                "held": storm.held,
                "latest": None if storm.latest is None else _event_to_json(storm.latest()),
            }
            for key, storm in latest
        ]

    @classmethod
    def from_json(cls, content: Any) -> Folding:
        """Restore what `to_json` gave. Raises LookupError, TypeError, ValueError, AttributeError for anything else."""
        folding = cls()
        for kept in content:
            storm = _Storm(int(kept["given"]), float(kept["given_at"]), float(kept["seen_at"]), int(kept["held"]))
            if not (math.isfinite(storm.given_at_s) and math.isfinite(storm.seen_at_s)):
                raise ValueError(f"not a time: {kept!r}")
            if kept["latest"] is not None:
                event = _event_from_json(kept["latest"])
                storm.latest = partial(replace, event)
            folding._storms[str(kept["key"])] = storm
        return folding


def _event_to_json(event: Event) -> dict[str, Any]:
    return {**asdict(event), "severity": event.severity.value}


def _event_from_json(content: Any) -> Event:
    return Event(**{**content, "severity": Severity(content["severity"]), "labels": dict(content["labels"])})


def _release(storm: _Storm, at_s: float) -> list[Event]:
    latest, held = storm.latest, storm.held
    if latest is None:
        return []
    storm.given_at_s, storm.held, storm.latest = at_s, 0, None
    event = latest()
    return [replace(event, labels={**event.labels, "count": str(held)})]
