"""What a simulated NVIDIA driver knows, in a file of `key = value` lines: written by the simulator, read by libraries.

    driver.version = 570.133.20
    gpu.count = 8
    gpu.0.power_mw = 315000

A line that begins with `#` is a comment, of two lines with one key the later one counts, unknown keys mean nothing. A
key that is missing is a fact that the driver does not tell.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_GPUS = 64


class State:
    """What a state file says: `values` by key, `gpus` the N of those gpu.N that the driver enumerates, in order."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values
        blocks = min(self.number("gpu.count") or 0, MAX_GPUS)
        self.gpus = tuple(gpu for gpu in range(blocks) if not self.number(f"gpu.{gpu}.absent"))

    def number(self, key: str) -> int | None:
        """Return the first word as a number; None where the key is missing or is no number."""
        text = self.values.get(key)
        if text is None:
            return None
        try:
            return number_of(text.split()[0])
        except (IndexError, ValueError):
            return None


def number_of(word: str) -> int:
    """Return a decimal number, leading zeros or not, or one of base 16 that begins with 0x. Raises ValueError."""
    return int(word, 16 if word.startswith("0x") else 10)


class StateFile:
    """A state file that is replaced while it is in use."""

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        self._seen: tuple[tuple[int, int, int], State] | None = None

    def current(self) -> State | None:
        """Return what the file says now, None while it cannot be read. It is read again only when it was replaced."""
        try:
            if self._seen is not None and _stamp(os.stat(self._path)) == self._seen[0]:  # noqa: PTH116 - in every call
                return self._seen[1]
            self._seen = _load(self._path)
        except OSError:
            self._seen = None
            return None
        return self._seen[1]


def read(path: Path) -> State:
    """Return what the file says. Raises OSError."""
    return _load(os.fspath(path))[1]


def write(path: Path, mapping: Mapping[str, str | int]) -> None:
    """Replace the file so that a reader sees the old state or the new one, and notices. Raises OSError."""
    beside = path.with_name(f".{path.name}.new")
    text = "".join(f"{key} = {value}\n" for key, value in mapping.items())
    beside.write_text(text, encoding="utf-8", errors="surrogateescape")
    # The kernel's own stamp is as coarse as its tick, and inode numbers are used again: two states would look alike.
    now_ns = time.time_ns()
    os.utime(beside, ns=(now_ns, now_ns))
    beside.replace(path)


def _load(path: str) -> tuple[tuple[int, int, int], State]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123 - the stamp is this file's
        return _stamp(os.fstat(file.fileno())), State(_parse(file.read()))


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _parse(text: str) -> dict[str, str]:
    values = {}
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        if equals and not key.lstrip().startswith("#"):
            values[key.strip()] = value.strip()
    return values
