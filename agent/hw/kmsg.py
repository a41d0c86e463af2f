"""The kernel log as /dev/kmsg gives it: from the device, or from a FIFO or regular file of records in its format.

Format: the kernel's Documentation/ABI/testing/dev-kmsg. A record is a line `priority,sequence,microseconds,flags;text`,
with lines ` KEY=value` behind it that this reader skips. The device gives one whole record per read; elsewhere reads
cut records anywhere.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE_LIMIT_BYTES = 65536  # the kernel's longest record, all bytes escaped, is 8 KiB

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_CHUNK_BYTES = 65536
_TAIL_BYTES = 256
_FAILURE_COSTS_BYTES = 1024  # of a call's allowance, so that a device that only fails does not hold it up
_FAILURES_IN_A_ROW = 16
_NULL_DEVICE = os.makedev(1, 3)
_HEADER_FIELDS = 3  # Linux 3.5 had no flags, later ones append fields
_LONGEST_NUMBER = 20  # digits of 2**64
_HEADER = re.compile(rb"\d{1,6},\d{1,20},\d{1,20}(,[^;,]*)*;")
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")
_SPACE = 32


class Record(NamedTuple):
    """One record. `priority`: facility * 8 + level (syslog(3)); `text` still has the kernel's escapes (`plain`).

    `time_us`: microseconds since boot by the clock of the kernel's log, which may stop while the machine sleeps.
    """

    priority: int
    sequence: int
    time_us: int
    text: bytes


class MaskedError(OSError):
    r"""What is there in the log's place is /dev/null: container runtimes hide files that way."""


def plain(text: bytes) -> str:
    r"""Return a record's text without the kernel's escapes (`\x0a`). Bytes that are no UTF-8 are replaced."""
    return _ESCAPE.sub(lambda match: bytes((int(match[1], 16),)), text).decode("utf-8", "replace")


def parse(line: bytes) -> Record | None:
    """Read a record's first line; None when it is none."""
    head, semicolon, text = line.partition(b";")
    fields = head.split(b",")
    if not semicolon or len(fields) < _HEADER_FIELDS:
        return None
    priority, sequence, time_us = fields[:_HEADER_FIELDS]
    if not (priority.isdigit() and sequence.isdigit() and time_us.isdigit()) or len(head) > LINE_LIMIT_BYTES:
        return None
    if max(len(priority), len(sequence), len(time_us)) > _LONGEST_NUMBER:
        return None
    return Record(int(priority), int(sequence), int(time_us), text)


class Reader:
    """Reads on where it stopped; the end is never final. Raises OSError when it cannot be opened, MaskedError.

    A file that was replaced, truncated or rewritten is read from its start: whoever counts must look at the records'
    sequence numbers. `overruns` counts how often records were lost because the kernel overwrote them before they were
    read, `errors` lines and reads that gave no record.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.overruns = 0
        self.errors = 0
        self._descriptor = -1
        self._open()

    def read(self, limit_bytes: int) -> Iterator[Record]:
        """Give the records that are there, about `limit_bytes` of them at most. Never blocks. Raises OSError.

        To be read to its end: what was read and not taken is lost.
        """
        if self._is_file and self._is_rewritten():
            self._begin(os.lseek(self._descriptor, 0, os.SEEK_SET))
        failures = 0
        while limit_bytes > 0:
            try:
                chunk = os.read(self._descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                failures += 1
                limit_bytes -= _FAILURE_COSTS_BYTES
                self._count(error, failures)
                continue
            failures = 0
            limit_bytes -= len(chunk)
            if chunk:
                yield from self._records(chunk)
            elif not self._renew():
                return

    @property
    def is_device(self) -> bool:
        """Whether this is the kernel's own ring: one per boot, its sequence numbers never go back."""
        return self._is_device

    @property
    def replays(self) -> bool:
        """Whether a reader that starts anew gets the same records again. A FIFO gives each once."""
        return self._is_device or self._is_file

    def close(self) -> None:
        """Give the descriptor back."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        """Give back what is still open."""
        self.close()

    def _open(self) -> None:
        descriptor = os.open(self.path, _FLAGS)
        self.close()
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self._is_device = stat.S_ISCHR(status.st_mode)
        self._is_file = stat.S_ISREG(status.st_mode)
        self._identity = (status.st_dev, status.st_ino)
        if self._is_device and status.st_rdev == _NULL_DEVICE:
            self.close()
            raise MaskedError(errno.ENODEV, "is /dev/null", self.path)
        self._begin(0)

    def _begin(self, offset: int) -> None:
        self._offset = offset
        self._tail = b""  # what precedes the offset, to know the file again by
        self._rest = b""  # the begun line
        self._cut = 0  # where in it the last writer of a FIFO left off
        self._skipping = False  # the rest of a line that is too long

    def _renew(self) -> bool:
        """At the end: True when there is something else under the path, which is open now."""
        if self._is_device:
            return False
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                self._cut = len(self._rest)
                return False
            self._open()
        except FileNotFoundError:
            return False  # in the middle of being replaced, or gone for good: there may be writers still
        return True

    def _is_rewritten(self) -> bool:
        # What stood before the offset: of a shorter file less comes back, of another one something else.
        return os.pread(self._descriptor, len(self._tail), self._offset - len(self._tail)) != self._tail

    def _count(self, error: OSError, failures: int) -> None:
        """Count a failed read that need not be the last. Raises OSError for any other."""
        if error.errno == errno.EPIPE:
            self.overruns += 1
        elif error.errno == errno.EINVAL and failures < _FAILURES_IN_A_ROW:
            self.errors += 1  # a record that does not fit; the kernel goes on with the next
        else:
            raise OSError(error.errno, error.strerror, self.path)

    def _records(self, chunk: bytes) -> Iterator[Record]:
        self._offset += len(chunk)
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        lines = (self._rest + chunk).split(b"\n")
        cut, self._cut = self._cut, 0
        self._rest = lines.pop()
        if not lines:
            self._cut = cut
        elif self._skipping:
            self._skipping = False
            del lines[0]
        elif cut and _HEADER.match(lines[0], cut):
            self.errors += 1  # a writer died in mid-record, and another came
            lines[0] = lines[0][cut:]
        if len(self._rest) > LINE_LIMIT_BYTES:
            self.errors += not self._skipping
            self._skipping, self._rest, self._cut = True, b"", 0
        for line in lines:
            if not line or line[0] == _SPACE:
                continue
            record = parse(line)
            if record is None:
                self.errors += 1
            else:
                yield record
