"""What is kept between processes and restarts: the GPUs of this run, how many were there since boot, what was told.

What is read back may be damaged or of another version: each part that is not as written is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent.hw.sysfs import read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.api import Context

_GPUS_LIMIT = 1024  # no node has as many


@dataclass
class Entry:
    """One GPU of this run. `label` is its NVML index at first sight, empty when NVML never showed it.

    `index` is its NVML index at last sight, `alive` what people were told last (None: nothing yet), `invalid` counts
    dropped answers by metric, `lacking` is what was logged as not supported. `reason` (of `gpu_error`) and `trouble`
    say why it does not answer, in this process; empty when it does.
    """

    label: str
    uuid: str
    address: str = ""
    index: int | None = None
    alive: bool | None = None
    invalid: dict[str, int] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)
    reason: str = ""
    trouble: str = ""

    @property
    def name(self) -> str:
        """What it is called: the label, else the UUID."""
        return self.label or self.uuid

    def fail(self, reason: str, trouble: str) -> None:
        """Note why it does not answer."""
        self.reason, self.trouble = reason, trouble


class Memory:
    """The collector's memory. `save` writes when anything changed; what belongs to another run or boot is forgotten."""

    def __init__(self, ctx: Context) -> None:
        self._state = ctx.state
        self._run_id = ctx.run_id
        self.boot_id = _boot_id(ctx)
        content = ctx.state.load()
        run = content if content.get("run_id") == ctx.run_id else {}
        boot = content if self.boot_id and content.get("boot_id") == self.boot_id else {}
        self.entries: list[Entry] = _entries(run.get("gpus"))
        self.enumerated: int | None = _count(run.get("enumerated"))  # by NVML, when `Entry.index` was noted
        self.excluded: int = _count(run.get("excluded")) or 0  # GPUs that the configuration keeps out
        self.given_up_s: float | None = _seconds(run.get("given_up_s"))  # when a process was, by the monotonic clock
        self.seen: list[tuple[str, str]] = _pairs(boot.get("seen"))  # index and UUID, the most there were at once
        self._saved = self._content()

    def save(self) -> None:
        """Have it written, unless nothing changed."""
        content = self._content()
        if content != self._saved:
            self._state.save(content)
            self._saved = content

    def _content(self) -> dict[str, Any]:
        return {
            "run_id": self._run_id,
            "boot_id": self.boot_id,
            "seen": [list(pair) for pair in self.seen],
            "enumerated": self.enumerated,
            "excluded": self.excluded,
            "given_up_s": self.given_up_s,
            "gpus": [
                {
                    "label": entry.label,
                    "uuid": entry.uuid,
                    "address": entry.address,
                    "index": entry.index,
                    "alive": entry.alive,
                    "invalid": dict(entry.invalid),
                    "lacking": list(entry.lacking),
                }
                for entry in self.entries
            ],
        }


def _entries(kept: object) -> list[Entry]:
    found = [_entry(item) for item in kept[:_GPUS_LIMIT] if isinstance(item, dict)] if isinstance(kept, list) else []
    return [entry for entry in found if entry.label or entry.uuid]


def _entry(kept: Mapping[str, Any]) -> Entry:
    alive, invalid, lacking = kept.get("alive"), kept.get("invalid"), kept.get("lacking")
    return Entry(
        label=_text(kept.get("label")),
        uuid=_text(kept.get("uuid")),
        address=_text(kept.get("address")),
        index=_count(kept.get("index")),
        alive=alive if isinstance(alive, bool) else None,
        invalid={name: n for name, n in invalid.items() if type(n) is int} if isinstance(invalid, dict) else {},
        lacking=[name for name in lacking if isinstance(name, str)] if isinstance(lacking, list) else [],
    )


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
