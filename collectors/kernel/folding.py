"""Storms told in few words: of facts that repeat, the first ones are reported alone and later ones together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from agent.api import Event

ALONE = 10
TOGETHER_S = 60.0
QUIET_S = 600.0  # after this long without a fact its next ones are reported alone again


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
        self._storms: dict[Hashable, _Storm] = {}

    def take(self, key: Hashable, at_s: float, make: Callable[[], Event]) -> list[Event]:
        """Take a fact; return the events that are due now. One that stands for several has the label `count`."""
        storm = self._storms.get(key)
        if storm is None or at_s - storm.seen_at_s >= QUIET_S:
            self._storms[key] = _Storm(1, at_s, at_s)
            return [*([] if storm is None else _release(storm, at_s)), make()]
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


def _release(storm: _Storm, at_s: float) -> list[Event]:
    latest, held = storm.latest, storm.held
    if latest is None:
        return []
    storm.given_at_s, storm.held, storm.latest = at_s, 0, None
    event = latest()
    return [replace(event, labels={**event.labels, "count": str(held)})]
