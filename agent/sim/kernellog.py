"""A simulated kernel log: a file of records as /dev/kmsg gives them (Documentation/ABI/testing/dev-kmsg)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ERROR, WARNING, INFO = 3, 4, 6  # of the facility 0, the kernel's own
_ESCAPED = str.maketrans({"\\": r"\x5c", "\n": r"\x0a"})


class KernelLog:
    """Appends records; their numbers and times go on as in one boot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sequence = 0
        path.write_bytes(b"")

    def write(self, uptime_s: float, text: str, priority: int = INFO) -> None:
        """Append a record of that time after boot."""
        with self._path.open("a", encoding="utf-8") as log:
            log.write(f"{priority},{self._sequence},{int(uptime_s * 1e6)},-;{text.translate(_ESCAPED)}\n")
        self._sequence += 1
