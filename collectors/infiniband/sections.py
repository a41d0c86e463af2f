"""Parts of a port that are read together and become values together.

A section reads its files, and only when their text changed makes `values` anew; `keys` says what each value is. While
nothing fails, `keys` stays the same object, so that whoever turns keys into series does that once.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING, NamedTuple

from agent.hw.sysfs import FileGroup
from collectors.infiniband import metrics
from collectors.infiniband.faults import PARSE, RANGE, BadValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.api import Metric, Value
    from collectors.infiniband.faults import Faults

    Key = tuple[Metric, tuple[str, ...]]

LARGEST = 2**64 - 1  # what the kernel's counters can hold
LARGEST_RATE_GBPS = 10_000.0  # several times the fastest link there is (12 lanes of XDR: 2,400)

# The device or the file behind a descriptor is not there any more: look again before calling it a failure.
_LOST = frozenset({errno.ENODEV, errno.ENOENT, errno.ENXIO, errno.ESPIPE})

_STATE = re.compile(rb"(\d{1,3}): ?(.*)", re.DOTALL)
_RATE = re.compile(rb"(\d{1,6}(?:\.\d+)?) Gb/sec(?: \(.*\))?")
_INTEGER = re.compile(rb"-?\d+")
_NOT_AVAILABLE = b"N/A"  # "N/A (no PMA)": the driver has no such counter


class PatientFiles:
    """Files of one port, of which those that keep failing are left alone for a while.

    `names` are paths below the device. After `read`, `contents` belongs to the files `active` (positions in `names`).
    """

    def __init__(self, root: str, names: Sequence[str], port: str, faults: Faults) -> None:
        self.names = tuple(names)
        self.active: tuple[int, ...] = tuple(range(len(self.names)))
        self.contents: list[bytes] = []
        self.failed: set[int] = set()  # positions in `contents`
        self._port = port
        self._faults = faults
        self._group = FileGroup([f"{root}/{name}" for name in self.names])
        self._clean = True
        self._resting: dict[int, float] = {}
        self._choose_at_s = float("inf")

    def read(self, now_s: float, *, last_try: bool) -> bool:
        """Read each active file once; True when there is anything new: another text, a failure, or a failure's end.

        Unless this is the `last_try`, a file whose device seems gone is no failure yet but sets the faults' `lost`.
        """
        if now_s >= self._choose_at_s:
            self._choose(now_s)
        contents, errors = self._group.read()
        if self._group.reopened:
            self._group.reopened = False
            self._faults.lost |= not last_try
        if not errors and self._clean and contents == self.contents:
            return False
        self.contents = contents
        self.failed = set()
        self._clean = True
        for position, error in errors.items():
            if error.errno in _LOST and not last_try:
                self._faults.lost = True
                self._clean = False
                self.failed.add(position)
            else:
                self.reject(position, error, now_s)
        return True

    def reject(self, position: int, error: Exception, now_s: float) -> None:
        """Count a file of the last read as failed."""
        self._clean = False
        self.failed.add(position)
        index = self.active[position]
        rests_until_s = self._faults.strike(self._port, self.names[index], error, now_s)
        if rests_until_s is not None:
            self._resting[index] = rests_until_s
            self._choose_at_s = now_s  # from the next read on, so that positions hold until then

    def accept(self, position: int) -> None:
        """Count a file of the last read as good."""
        self._faults.clear(self.names[self.active[position]])

    def _choose(self, now_s: float) -> None:
        self._resting = {index: until_s for index, until_s in self._resting.items() if now_s < until_s}
        self._choose_at_s = min(self._resting.values(), default=float("inf"))
        self.active = tuple(index for index in range(len(self.names)) if index not in self._resting)
        self._group.choose(self.active)
        self._clean = False  # the last contents belong to other files


class Column(NamedTuple):
    """One counter: its file (below the device), what it becomes, and how; `flag` is its saturation, if it has one."""

    file: str
    key: Key
    source: metrics.Source
    flag: Key | None


class Counters:
    """Counters of one port that are read together, and a flag for each narrow one that stands at its maximum."""

    def __init__(self, root: str, columns: Sequence[Column], port: str, faults: Faults) -> None:
        self.files = PatientFiles(root, [column.file for column in columns], port, faults)
        self._columns = tuple(columns)
        self._converted = [(i, convert) for i, c in enumerate(columns) if (convert := _conversion(c.source))]
        self._narrow = [(i, c.source.limit, c.flag) for i, c in enumerate(columns) if c.flag is not None]
        self._all_keys = tuple(column.key for column in columns)
        self._troubled = False
        self.keys: tuple[Key, ...] = ()
        self.values: list[Value] = []

    def read(self, now_s: float, *, last_try: bool) -> None:
        """Read all files once."""
        if not self.files.read(now_s, last_try=last_try):
            return
        complete = not self.files.failed and not self._troubled and len(self.files.active) == len(self._columns)
        if complete and (numbers := plain_numbers(self.files.contents)) is not None:
            self._take(numbers)
        else:
            self._look_at_each(now_s)

    def _take(self, numbers: list[int]) -> None:
        """Take all numbers at once."""
        values: list[Value] = [*numbers]
        for i, convert in self._converted:
            values[i] = convert(numbers[i])
        full = [flag for i, limit, flag in self._narrow if numbers[i] == limit]
        self.keys = (*self._all_keys, *full) if full else self._all_keys
        self.values = values + [1] * len(full)

    def _look_at_each(self, now_s: float) -> None:
        """Take what can be read, one by one."""
        found: list[tuple[Key, Value]] = []
        flags: list[tuple[Key, Value]] = []
        for position, content in enumerate(self.files.contents):
            if position in self.files.failed:
                continue
            column = self._columns[self.files.active[position]]
            try:
                number = number_of(content)
            except BadValueError as error:
                self.files.reject(position, error, now_s)
                continue
            self.files.accept(position)
            if number is None:
                continue
            convert = _conversion(column.source)
            found.append((column.key, convert(number) if convert else number))
            if column.flag is not None and number == column.source.limit:
                flags.append((column.flag, 1))
        self._troubled = bool(self.files.failed) or len(self.files.active) < len(self._columns)
        self.keys, self.values = _unzip(found + flags)


class Status:
    """State and rate of one port. The rate is read when the state changed, and when the caller says so."""

    def __init__(self, root: str, device: str, port: str, faults: Faults) -> None:
        directory = f"ports/{port}"
        self.files = PatientFiles(root, (f"{directory}/state", f"{directory}/phys_state"), port, faults)
        self.rate_files = PatientFiles(root, (f"{directory}/rate",), port, faults)
        self.up: bool | None = None
        self.keys: tuple[Key, ...] = ()
        self.values: list[Value] = []
        self._labels = (device, port)
        self._state: tuple[tuple[Key, ...], list[Value]] = ((), [])
        self._rate: tuple[tuple[Key, ...], list[Value]] = ((), [])

    def read(self, now_s: float, *, last_try: bool, with_rate: bool) -> None:
        """Read the state, and the rate where it may have changed."""
        changed = self.files.read(now_s, last_try=last_try)
        if changed:
            self._understand_state(now_s)
        if (changed or with_rate) and self.rate_files.read(now_s, last_try=last_try):
            self._understand_rate(now_s)
            changed = True
        if changed:
            self.keys = self._state[0] + self._rate[0]
            self.values = self._state[1] + self._rate[1]

    def _understand_state(self, now_s: float) -> None:
        numbers = self._parsed(self.files, _state_number, now_s)
        state, physical = numbers.get(0), numbers.get(1)
        understood = state is not None and state < len(metrics.STATES)  # a state nobody knows is not "down"
        found: list[tuple[Key, Value]] = [((metrics.OBSERVABLE, self._labels), 1 if understood else 0)]
        self.up = None
        if state is not None:
            found.append(((metrics.STATE_ID, self._labels), state))
        if understood:
            # An active logical state implies a physical link (IBTA volume 1, port state machine).
            self.up = state in metrics.UP_STATES and physical in (metrics.PHYSICAL_LINK_UP, None)
            found.append(((metrics.PORT_UP, self._labels), 1 if self.up else 0))
            found.extend(
                ((metrics.PORT_STATE, (*self._labels, name)), 1 if number == state else 0)
                for number, name in enumerate(metrics.STATES)
            )
        if physical is not None:
            found.append(((metrics.PHYSICAL_STATE_ID, self._labels), physical))
        keys, values = _unzip(found)
        self._state = (self._state[0] if keys == self._state[0] else keys, values)

    def _understand_rate(self, now_s: float) -> None:
        rate = self._parsed(self.rate_files, _rate_bytes_per_second, now_s).get(0)
        self._rate = ((), []) if rate is None else (((metrics.RATE, self._labels),), [rate])

    @staticmethod
    def _parsed(files: PatientFiles, parse: Callable[[bytes], int], now_s: float) -> dict[int, int]:
        """Return what could be read, by position in `files.names`."""
        numbers: dict[int, int] = {}
        for position, content in enumerate(files.contents):
            if position not in files.failed:
                try:
                    numbers[files.active[position]] = parse(content.strip())
                except BadValueError as error:
                    files.reject(position, error, now_s)
                else:
                    files.accept(position)
        return numbers


def plain_numbers(contents: list[bytes]) -> list[int] | None:
    """Return the numbers when each text is one as the kernel writes it; None when any has to be looked at."""
    if not b"".join(contents).translate(None, b"\n").isdigit():
        return None  # a sign, a space, an underscore, a word: int() would let some of these pass
    try:
        numbers = list(map(int, contents))
    except ValueError:
        return None
    return numbers if max(numbers) <= LARGEST else None


def number_of(content: bytes) -> int | None:
    """Return a counter's number, None where the driver says that it has none. Raises BadValueError."""
    text = content.strip()
    if text.isdigit():
        number = int(text)  # decimal whatever the leading zeros
        if number > LARGEST:
            raise BadValueError(RANGE, text)
        return number
    if text.startswith(_NOT_AVAILABLE):
        return None
    raise BadValueError(RANGE if _INTEGER.fullmatch(text) else PARSE, text)


def _state_number(text: bytes) -> int:
    match = _STATE.fullmatch(text)
    if match is None:
        raise BadValueError(PARSE, text)
    return int(match[1])


def _rate_bytes_per_second(text: bytes) -> int:
    match = _RATE.fullmatch(text)
    if match is None:
        raise BadValueError(PARSE, text)
    gbps = float(match[1])
    if not 0 < gbps <= LARGEST_RATE_GBPS:
        raise BadValueError(RANGE, text)
    return int(gbps * 125_000_000)


def _conversion(source: metrics.Source) -> Callable[[int], Value] | None:
    if source.words:
        return lambda words: words * 4
    if source.milliseconds:
        return lambda milliseconds: milliseconds / 1000
    return None


def _unzip(pairs: Sequence[tuple[Key, Value]]) -> tuple[tuple[Key, ...], list[Value]]:
    return tuple(key for key, _ in pairs), [value for _, value in pairs]
