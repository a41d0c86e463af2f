"""Which devices and mounts the configuration wants: globs on the whole name, exclude wins."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Selection:
    """`name in selection` is true for names that `include` matches (all, when it is empty) and `exclude` does not."""

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include = _compile(include)
        self._exclude = _compile(exclude)

    def __contains__(self, name: str) -> bool:
        if self._include is not None and not self._include.fullmatch(name):
            return False
        return self._exclude is None or not self._exclude.fullmatch(name)


def _compile(globs: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(fnmatch.translate, globs))) if globs else None
