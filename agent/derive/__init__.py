"""Derivations: series and events computed from snapshots, events and job states, never from hardware.

A derivation runs after each tick, in the thread that just finished one, under one lock. It publishes like a collector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.api import Metric, Out
    from agent.events import Recorded
    from agent.job import Job
    from agent.snapshot import Snapshot


@dataclass(frozen=True)
class View:
    """What a derivation may look at: wall time in seconds, the latest snapshots, the jobs, and the new events."""

    now: float
    snapshots: Mapping[str, Snapshot]
    jobs: Sequence[Job]
    events: Sequence[Recorded]


class Derivation(Protocol):
    """Computes series and events from a view. `name` is its source name in the store."""

    name: ClassVar[str]
    metrics: ClassVar[Sequence[Metric]]

    def derive(self, view: View, out: Out) -> None:
        """Add what follows from the view. An exception costs this derivation's series, nothing else."""
