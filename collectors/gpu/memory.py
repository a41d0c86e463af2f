"""What is kept between processes and restarts: the GPUs of this run, how many were there since boot, what was told.

What is read back may be damaged or of another version: each part that is not as written is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.hw.sysfs import read_text
from collectors.gpu.entry import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.api import Context
    from collectors.gpu.selection import Selection

INVALID_SAVED_EVERY_S = 60.0  # a driver that answers garbage all the time must not have the disk written all the time

_GPUS_LIMIT = 1024  # no node has as many


@dataclass(frozen=True)
class Loss:
    """The losses of one GPU on this boot: how many were told, and whether the last one still holds."""

    number: int = 0
    holds: bool = False


class Memory:
    """The collector's memory. `save` writes when anything changed; what belongs to another run or boot is forgotten."""

    def __init__(self, ctx: Context) -> None:
        self._clock = ctx.clock
        self._state = ctx.state
        self._run_id = ctx.run_id
        self.boot_id = _boot_id(ctx)
        content = ctx.state.load()
        run = content if content.get("run_id") == ctx.run_id else {}
        boot = content if self.boot_id and content.get("boot_id") == self.boot_id else {}
        self.entries: list[Entry] = _entries(run.get("gpus"))
        self.excluded: int = _count(run.get("excluded")) or 0  # GPUs that the configuration keeps out
        self.given_up_s: float | None = _seconds(run.get("given_up_s"))  # when a process was, by the monotonic clock
        self.renewed_s: float | None = _seconds(run.get("renewed_s"))  # when one was for a lost GPU's sake, likewise
        self.seen: list[tuple[str, str]] = _pairs(boot.get("seen"))  # index and UUID, the most there were at once
        self.losses: dict[str, Loss] = _losses(boot.get("losses"))  # by UUID, else by what else the GPU is known by
        self._saved = self._content()
        self._saved_invalid, self._saved_s = self._invalid(), float("-inf")

    def keep_out(self, selection: Selection) -> None:
        """Forget the GPUs that the configuration does not want any more."""
        self.entries = [entry for entry in self.entries if not selection.refuses(entry.label, entry.uuid)]

    def by_uuid(self, uuid: str | None) -> Entry | None:
        """Return the GPU of this UUID."""
        return next((entry for entry in self.entries if uuid and entry.uuid == uuid), None)

    def by_address(self, address: str) -> Entry | None:
        """Return the GPU at this PCI address."""
        return next((entry for entry in self.entries if address and entry.address == address), None)

    def nameless(self, label: str) -> Entry | None:
        """Return the GPU of which no more than its index is known."""
        nameless = (entry for entry in self.entries if not entry.uuid and not entry.address)
        return next((entry for entry in nameless if label and entry.label == label), None)

    def label(self, entry: Entry, label: str) -> None:
        """Note the index of a GPU; one of which no more than this index is known was this GPU."""
        nameless = self.nameless(label)
        if nameless is not None and nameless is not entry:
            self.entries.remove(nameless)
        entry.label = label

    def save(self, *, whole: bool = False) -> None:
        """Have it written, unless nothing changed; `whole`: the counts of dropped answers, too, which may else wait."""
        content, invalid, now_s = self._content(), self._invalid(), self._clock.monotonic()
        may_wait = not whole and now_s - self._saved_s < INVALID_SAVED_EVERY_S
        if content != self._saved or (invalid != self._saved_invalid and not may_wait):
            gpus = [{**gpu, "invalid": counts} for gpu, counts in zip(content["gpus"], invalid, strict=True)]
            self._state.save({**content, "gpus": gpus})
            self._saved, self._saved_invalid, self._saved_s = content, invalid, now_s

    def _invalid(self) -> list[dict[str, int]]:
        return [dict(entry.invalid) for entry in self.entries]

    def _content(self) -> dict[str, Any]:
        return {
            "run_id": self._run_id,
            "boot_id": self.boot_id,
            "seen": [list(pair) for pair in self.seen],
            "losses": {gpu: [loss.number, loss.holds] for gpu, loss in self.losses.items()},
            "excluded": self.excluded,
            "given_up_s": self.given_up_s,
            "renewed_s": self.renewed_s,
            "gpus": [
                {
                    "label": entry.label,
                    "uuid": entry.uuid,
                    "address": entry.address,
                    "alive": entry.alive,
                    "told_as": entry.told_as,
                    "persistent": entry.persistent,
                }
                for entry in self.entries
            ],
        }


def _entries(kept: object) -> list[Entry]:
    found = [_entry(item) for item in kept[:_GPUS_LIMIT] if isinstance(item, dict)] if isinstance(kept, list) else []
    return [entry for entry in found if entry.label or entry.uuid]


def _entry(kept: Mapping[str, Any]) -> Entry:
    alive, invalid = kept.get("alive"), kept.get("invalid")
    return Entry(
        label=_text(kept.get("label")),
        uuid=_text(kept.get("uuid")),
        address=_text(kept.get("address")),
        alive=alive if isinstance(alive, bool) else None,
        told_as=_text(kept.get("told_as")),
        persistent=kept.get("persistent") is True,
        invalid={name: n for name, n in invalid.items() if type(n) is int} if isinstance(invalid, dict) else {},
    )


def _losses(kept: object) -> dict[str, Loss]:
    found = {}
    for gpu, loss in list(kept.items())[:_GPUS_LIMIT] if isinstance(kept, dict) else ():
        number, holds = loss if isinstance(loss, list) and len(loss) == len(("number", "holds")) else (None, None)
        if type(number) is int and isinstance(holds, bool):
            found[gpu] = Loss(number, holds)
    return found


def _pairs(kept: object) -> list[tuple[str, str]]:
    items = kept[:_GPUS_LIMIT] if isinstance(kept, list) else []
    return [(_text(item[0]), _text(item[1])) for item in items if isinstance(item, list) and len(item) == len("iu")]


def _count(kept: object) -> int | None:
    return kept if type(kept) is int and 0 <= kept <= _GPUS_LIMIT else None  # the type itself: true is an int, too


def _seconds(kept: object) -> float | None:
    return kept if isinstance(kept, float) and math.isfinite(kept) else None


def _text(kept: object) -> str:
    return kept if isinstance(kept, str) else ""


def _boot_id(ctx: Context) -> str:
    """Return this boot's id; empty when it cannot be read, and then nothing is taken over from before."""
    try:
        return read_text(f"{ctx.proc}/sys/kernel/random/boot_id")
    except OSError:
        return ""
