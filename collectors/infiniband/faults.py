"""What failed under one device: totals by errno, patience with files that keep failing, and what to tell people."""

from __future__ import annotations

import errno
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collectors.infiniband.metrics import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.api import Metric, Value

STRIKES = 3  # failures running after which a file is left alone
REST_S = 600.0  # a driver that refuses a file logs each refusal into the kernel's ring

TOLD_ALONE = 3  # files of one directory that fail alike; more are told together

PARSE = "parse"  # a text that is no value
RANGE = "range"  # a number that this value cannot have

# What a driver answers when it does not let this function see a counter, as opposed to failing to read it.
REFUSALS = frozenset({"EACCES", "EINVAL", "ENOSYS", "EOPNOTSUPP", "ENOTSUPP", "EPERM"})

_ERRNO_NAMES = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EAGAIN: "EAGAIN", 524: "ENOTSUPP"}


class BadValueError(Exception):
    """A file was read but holds no value. `label` is PARSE or RANGE."""

    def __init__(self, label: str, text: bytes) -> None:
        super().__init__(f"expected a value, got {text[:40].decode('utf-8', 'replace')!r}")
        self.label = label


def label_of(error: Exception) -> str:
    """Return the `errno` label for a failed read: the errno's name in upper case, `parse` or `range`."""
    if isinstance(error, BadValueError):
        return error.label
    number = error.errno if isinstance(error, OSError) else None
    return _ERRNO_NAMES.get(number or 0, f"E{number}")


@dataclass
class _Trouble:
    """One failing file: failures running, what the last one was, and until when the file rests."""

    count: int
    label: str
    text: str
    rests_until_s: float | None = None


class Faults:
    """The failures of one device. `file` is a path below the device, `port` the port's number or empty."""

    def __init__(self, device: str) -> None:
        self.lost = False  # set when a file or the whole device seems to have gone, until somebody looked
        self._device = device
        self._totals: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._troubles: dict[str, _Trouble] = {}
        self._told: list[tuple[str, str]] | None = None  # made when somebody asks
        self.keys: tuple[tuple[Metric, tuple[str, ...]], ...] = ()
        self.values: list[Value] = []  # the totals, in the order of `keys`

    @property
    def any(self) -> bool:
        """Whether anything ever failed."""
        return bool(self._totals)

    def strike(self, port: str, file: str, error: Exception, now_s: float) -> float | None:
        """Count one failed read; return until when the file rests (monotonic seconds), None when it does not."""
        label = label_of(error)
        trouble = self._troubles.get(file)
        if trouble is None or trouble.label != label:
            self._told = None
        trouble = self._troubles[file] = _Trouble(1 if trouble is None else trouble.count + 1, label, _text_of(error))
        if trouble.count >= STRIKES:
            trouble.rests_until_s = now_s + REST_S
        if (port, label) not in self._totals:
            self.keys += ((READ_ERRORS, (self._device, port, label)),)
        self._totals[port, label] += 1
        self.values = list(self._totals.values())
        return trouble.rests_until_s

    def clear(self, file: str) -> None:
        """Forget what was held against a file: it could be read again, or is not there any more."""
        if self._troubles.pop(file, None) is not None:
            self._told = None

    def rests(self, file: str, now_s: float) -> bool:
        """Say whether the file is to be left alone now."""
        trouble = self._troubles.get(file)
        return trouble is not None and trouble.rests_until_s is not None and now_s < trouble.rests_until_s

    def refused(self, file: str) -> bool:
        """Say whether the driver refused the file when it was read last."""
        trouble = self._troubles.get(file)
        return trouble is not None and trouble.label in REFUSALS

    def failing(self) -> Sequence[tuple[str, str]]:
        """Return what fails now, as (what, text); many files of one directory that fail alike are one failure."""
        if self._told is None:
            alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
            for file, trouble in self._troubles.items():
                alike[file.rpartition("/")[0], trouble.text].append(file)
            self._told = []
            for (directory, text), files in alike.items():
                if len(files) > TOLD_ALONE:
                    self._told.append((f"{self._device}/{directory}", f"{text} ({len(files)} files)"))
                else:
                    self._told += [(f"{self._device}/{file}", text) for file in files]
        return self._told


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{label_of(error)}: {error.strerror}"
    return str(error)
