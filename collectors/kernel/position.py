"""Which records were read before: after a restart, or from a file that was written anew, they come again.

The device's sequence numbers grow for as long as the machine runs, so there they decide alone. A file or FIFO may hold
another ring within one boot, whose numbers begin anew. A record with a low number is of another ring when it tells
something and is not among the records remembered, or precedes all that were ever read; until one such record comes, low
numbers are taken for the same ring read again. Records that tell something are remembered, the latest MEMORY of them:
of those, none counts twice, whatever its number.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.hw.kmsg import Record

    Mark = tuple[int, int]  # sequence number and checksum

MEMORY = 512


class Position:
    """How far a source was read. `ordered`: it is the device."""

    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self._last = -1
        self._first: Mark | None = None
        self._facts: dict[Mark, None] = {}  # in the order they came
        self._forgot = False

    @classmethod
    def from_json(cls, content: Any) -> Position:
        """Restore what `to_json` gave. Raises LookupError, TypeError, ValueError for anything else."""
        position = cls(ordered=content["ordered"] is True)
        position._last = int(content["last"])
        position._first = None if content["first"] is None else _mark(content["first"])
        position._facts = dict.fromkeys(map(_mark, content["facts"]))
        position._forgot = content["forgot"] is True
        return position

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "ordered": self.ordered,
            "last": self._last,
            "first": self._first,
            "facts": list(self._facts),
            "forgot": self._forgot,
        }

    def take(self, record: Record, *, tells: bool) -> bool:
        """Move on to this record; False when it was read before. `tells`: it is one of those to be remembered."""
        sequence = record.sequence
        if self.ordered or (not tells and sequence > self._last and self._first is not None):
            new = sequence > self._last
            self._last = max(self._last, sequence)
            return new
        mark = mark_of(record)
        if mark in self._facts:
            return False
        if self._first is None or (sequence <= self._last and self._is_of_another_ring(mark, tells=tells)):
            self._first = mark
        elif sequence <= self._last:
            return False
        self._last = sequence
        if tells:
            self._remember(mark)
        return True

    def _is_of_another_ring(self, mark: Mark, *, tells: bool) -> bool:
        if self._first is not None and mark[0] <= self._first[0]:
            return mark != self._first
        if not tells:
            return False
        # Of the records that were forgotten none can be told from new ones: rather one too few than a storm twice.
        return not self._forgot or mark[0] >= next(iter(self._facts))[0]

    def _remember(self, mark: Mark) -> None:
        self._facts[mark] = None
        if len(self._facts) > MEMORY:
            del self._facts[next(iter(self._facts))]
            self._forgot = True


def mark_of(record: Record) -> Mark:
    """Return what a record is known again by."""
    return record.sequence, zlib.crc32(b"%d;%b" % (record.time_us, record.text))


def _mark(content: Any) -> Mark:
    sequence, checksum = content
    return int(sequence), int(checksum)
