"""Which GPUs the configuration wants: globs on the NVML index or the UUID."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Selection:
    """`include` empty takes all; `exclude` wins."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def wants(self, index: str, uuid: str) -> bool:
        """Say whether a GPU is to be read; either name may be empty where it is not known."""
        return (not self.include or _matches(self.include, index, uuid)) and not _matches(self.exclude, index, uuid)

    def refuses(self, index: str, uuid: str = "") -> bool:
        """Say whether a GPU is to be kept out, whatever a name is that is empty here: it is not even looked up."""
        if _matches(self.exclude, index, uuid):
            return True
        if not self.include or _matches(self.include, index, uuid):
            return False
        only_indices = all(pattern.isdecimal() for pattern in self.include)
        return bool(index) and (bool(uuid) or only_indices)


def _matches(patterns: Sequence[str], *names: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names if name)
