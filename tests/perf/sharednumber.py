"""A number that several processes see, in a file that each of them maps."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_NUMBER = struct.Struct("=d")


class SharedNumber:
    """Begins at 0 where the file is not there. Pickled, it is the same number in another process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            path.write_bytes(_NUMBER.pack(0.0))
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), _NUMBER.size)

    def __reduce__(self) -> tuple[type[SharedNumber], tuple[Path]]:
        """Have another process map the same file."""
        return SharedNumber, (self._path,)

    def get(self) -> float:
        """Return what was set last."""
        return float(_NUMBER.unpack_from(self._mapped)[0])

    def set(self, number: float) -> None:
        """Set it, for all."""
        _NUMBER.pack_into(self._mapped, 0, number)
