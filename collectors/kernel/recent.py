"""What was told a short while ago, by name, without end: what is too old goes, and so does what is too much."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 2000  # of names at a time, the latest; a log with as many in a short while is damaged

V = TypeVar("V")


class Recent(Generic[V]):
    """Names, each with the time at which it came last and a value, for `span_s`. All times are seconds since boot.

    A time that goes back is as far away as one that goes on. Nothing looks at more names than it drops.
    """

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        # No dict: finding its first entry takes the longer the more entries before it were dropped.
        self._kept: OrderedDict[str, tuple[float, V]] = OrderedDict()  # in the order they came

    def __iter__(self) -> Iterator[tuple[str, float, V]]:
        """Give name, time and value of all, those that came first before the others."""
        return ((name, at_s, value) for name, (at_s, value) in self._kept.items())

    def put(self, name: str, at_s: float, value: V) -> None:
        """Take a name that came at this time."""
        self._kept[name] = (at_s, value)
        self._kept.move_to_end(name)
        if len(self._kept) > LIMIT:
            self._kept.popitem(last=False)

    def find(self, name: str, now_s: float) -> V | None:
        """Return a name's value; None when it did not come within `span_s`."""
        at_s, value = self._kept.get(name, (now_s, None))
        return value if self._is_near(at_s, now_s) else None

    def pop(self, name: str, now_s: float) -> V | None:
        """Return what `find` does, and forget the name."""
        value = self.find(name, now_s)
        self._kept.pop(name, None)
        return value

    def oldest(self, now_s: float) -> str | None:
        """Return which name came first of those that came within `span_s`; None when none did. Forgets those before."""
        while self._kept:
            name, (at_s, _) = next(iter(self._kept.items()))
            if self._is_near(at_s, now_s):
                return name
            del self._kept[name]
        return None

    def _is_near(self, at_s: float, now_s: float) -> bool:
        return abs(now_s - at_s) < self._span_s
