"""What a job does to the devices of its node, by the time since its start: it loads data, computes, saves its state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agent.sim.gpu import IDLE, Load

_LOADING_S = 3.0
_SAVING_EVERY_S, _SAVING_S = 45.0, 3.0
_WAVE_S = 7.0  # the longer of a training's rhythms
_MEMORY_SHARE = 0.83

_LOADING = Load(busy=0.18, intensity=0.1, memory=0.3)
_SAVING = Load(busy=0.35, intensity=0.3, memory=_MEMORY_SHARE)
# A rank that waits for others spins in a kernel: busy to the eye, and far from the power of one that computes.
_WAITING = Load(busy=1.0, intensity=0.2, memory=_MEMORY_SHARE)


@dataclass
class Job:
    """A job on the whole node, one task for each GPU. `dead` are the tasks that ended before it."""

    number: int
    tasks: int
    started_s: float
    dead: set[int] = field(default_factory=set)

    def load(self, now_s: float, *, waiting: bool) -> Load:
        """Return what a living task gives its GPU to do; `waiting` when it cannot reach all others."""
        age_s = now_s - self.started_s
        if age_s < _LOADING_S:
            return _LOADING
        if waiting or self.dead:
            return _WAITING
        if age_s % _SAVING_EVERY_S > _SAVING_EVERY_S - _SAVING_S:
            return _SAVING
        return Load(0.98, 0.93 + 0.05 * math.sin(age_s * 2 * math.pi / _WAVE_S), _MEMORY_SHARE)

    def load_of(self, task: int, now_s: float, *, waiting: bool) -> Load:
        """Return what one task gives its GPU to do."""
        return IDLE if task in self.dead else self.load(now_s, waiting=waiting)
