"""Count the system calls that matter: file reads, and what a steady cycle must not do at all."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

_COUNTED = ("pread", "open", "stat", "listdir", "scandir")
_AUDITED = {"open": "open", "os.listdir": "listdir", "os.scandir": "scandir"}
_counting: list[tuple[int, Counter[str]]] = []  # thread and counts


def _audit(event: str, _: tuple[Any, ...]) -> None:
    # Audit hooks cannot be removed, so one serves all counts.
    if _counting and event in _AUDITED and _counting[-1][0] == threading.get_ident():
        _counting[-1][1][_AUDITED[event]] += 1


sys.addaudithook(_audit)


class CountedCalls:
    """Counts this thread's calls while it is entered; the calls themselves are made as ever."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._real: dict[str, Callable[..., Any]] = {}

    @property
    def reads(self) -> int:
        """Reads of kept descriptors."""
        return self._calls["pread"]

    def as_dict(self) -> dict[str, int]:
        """All counts, those that must be zero included."""
        return {name: self._calls[name] for name in _COUNTED}

    def __enter__(self) -> "CountedCalls":  # noqa: PYI034, UP037 - typing.Self needs Python 3.11
        """Start counting."""
        self._real = {"pread": os.pread, "stat": os.stat, "lstat": os.lstat}
        for name in self._real:
            setattr(os, name, self._wrapped(name))
        _counting.append((threading.get_ident(), self._calls))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting."""
        _counting.pop()
        for name, call in self._real.items():
            setattr(os, name, call)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real, counted_as = self._real[name], name.removeprefix("l")

        def counted(*arguments: Any, **more: Any) -> Any:
            if _counting[-1][0] == threading.get_ident():
                self._calls[counted_as] += 1
            return real(*arguments, **more)

        return counted
