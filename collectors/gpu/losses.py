"""What people are told of GPUs that are lost and come back: each loss once, under the same key whoever tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.api import Event, Severity
from collectors.gpu.memory import Loss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from collectors.gpu.entry import Entry
    from collectors.gpu.memory import Memory


def change_of(entry: Entry, memory: Memory) -> Event | None:
    """Return what is to be told of the GPU, and note that it was; None where nothing changed since.

    A loss that still holds is told again after a restart of the agent, under the key that it had.
    """
    alive, told, loss = not entry.reason, entry.alive, _loss_of(entry, memory, is_known=not entry.reason)
    entry.alive = alive
    if alive:
        if told is not False and not loss.holds:
            return None
        event, loss = _recovered, Loss(loss.number if loss.holds else loss.number + 1)
    else:
        if told is False:
            return None
        event, loss = _lost, loss if loss.holds else Loss(loss.number + 1, holds=True)
    memory.losses[entry.id] = loss
    entry.told_as = entry.told_as or entry.name
    labels = {"gpu": entry.label, "uuid": entry.uuid, "cause": entry.reason}
    key = f"{memory.boot_id} {entry.id} {loss.number}" if memory.boot_id else ""
    return event(entry, {name: value for name, value in labels.items() if value}, key)


def _loss_of(entry: Entry, memory: Memory, *, is_known: bool) -> Loss:
    """Return what was told of the GPU last; what was told of it when it had no UUID is its own once it has one."""
    loss = memory.losses.get(entry.id) or Loss()
    for other in sorted({entry.address, entry.label} - {entry.id, ""}) if is_known else ():
        earlier = memory.losses.get(other) or Loss()
        if earlier.holds:
            memory.losses[other] = Loss(earlier.number)  # the next one without a name is another fact
            loss = Loss(max(loss.number, earlier.number), holds=True)
    return loss


def _lost(entry: Entry, labels: Mapping[str, str], key: str) -> Event:
    text = f"GPU {entry.name} does not answer: {entry.trouble}"
    return Event(
        *("gpu_lost", Severity.CRITICAL, "gpu", text),
        device=entry.told_as,
        labels=labels,
        source="nvml",
        key=key and f"gpu_lost {key}",
    )


def _recovered(entry: Entry, labels: Mapping[str, str], key: str) -> Event:
    return Event(
        *("gpu_recovered", Severity.INFO, "gpu", f"GPU {entry.name} answers again"),
        device=entry.told_as,
        labels=labels,
        source="nvml",
        key=key and f"gpu_recovered {key}",
    )
