"""Count the system calls that matter: file reads, and what a steady cycle must not do at all."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import TracebackType
from typing import Any

from agent.hw import sysfs

_counting: list[Counter[str]] = []


def _audit(event: str, _: tuple[Any, ...]) -> None:
    # Audit hooks cannot be removed, so one hook serves all; sys.audit covers open, os.listdir, os.scandir.
    if _counting and event in ("open", "os.listdir", "os.scandir"):
        _counting[-1][event.removeprefix("os.")] += 1


sys.addaudithook(_audit)


class CountedCalls:
    """Counts the calls of this process while it is entered. `reads` are reads of kept descriptors."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    @property
    def reads(self) -> int:
        """Reads of kept descriptors."""
        return self._calls["pread"]

    def as_dict(self) -> dict[str, int]:
        """All counts, those that must be zero included."""
        return {name: self._calls[name] for name in ("pread", "open", "stat", "listdir", "scandir")}

    def __enter__(self) -> CountedCalls:
        """Start counting."""
        self._real = {"pread": os.pread, "stat": os.stat, "lstat": os.lstat}
        for name in self._real:
            setattr(sysfs.os, name, self._wrapped(name))
        _counting.append(self._calls)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting."""
        _counting.pop()
        for name, call in self._real.items():
            setattr(sysfs.os, name, call)

    def _wrapped(self, name: str) -> Any:
        real, calls = self._real[name], self._calls

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name.removeprefix("l")] += 1
            return real(*args, **kwargs)

        return counted
