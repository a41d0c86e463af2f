"""Files of procfs: reading one whole, and the formats that the host collector needs.

Formats: proc(5) and the kernel's Documentation/filesystems/proc.rst, admin-guide/iostats.rst, accounting/psi.rst.
What is not in the documented format raises `FormatError`; where a file has a row per device, a row's error stands in
place of that row, so that it costs no other. No value is ever negative or not finite.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # the unit of CPU times in procfs, USER_HZ
SECTOR_BYTES = 512  # of diskstats, whatever the disk's own sector size is

_CHUNK = 65536  # one read for most files; the kernel's own buffer is a page at first
_LONGEST_NUMBER = 20  # digits of 2**64
_SHOWN = 60
_DISK_COLUMNS = 11  # since Linux 2.6; later kernels append columns for discards and flushes
_NET_COLUMNS = 16
_CPU_COLUMNS = 4  # user nice system idle, there since the beginning
_STARTED = 19  # of /proc/PID/stat, counted from the state: clock ticks after boot at which the process started


class FormatError(ValueError):
    """Content that is not what the kernel documents. Says what was found instead."""


class ProcessState(NamedTuple):
    """One process: the letter of its state, and when it started in ticks after boot (pids are used again)."""

    letter: str
    started: int


def read(path: str) -> bytes:
    """Return a whole file. Raises OSError.

    A file of many records comes a page at a time, so it is read until nothing more comes.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = os.read(descriptor, _CHUNK)
        while more := os.read(descriptor, _CHUNK):
            content += more
    finally:
        os.close(descriptor)
    return content


def read_word(path: str) -> str:
    """Return a file's text without white space around it, as one-line files of sysfs and procfs hold it."""
    return text(read(path).strip())


def text(raw: bytes) -> str:
    """Make text of a name. Names are bytes to the kernel: what is no UTF-8 is shown as an escape."""
    return raw.decode("utf-8", "backslashreplace")


def boot_id(proc: str | os.PathLike[str]) -> str:
    """Return the id that the kernel drew at this boot. Raises OSError, or FormatError when it is empty."""
    found = read_word(os.path.join(proc, "sys/kernel/random/boot_id"))
    if not found:
        raise FormatError("boot_id is empty")
    return found


def list_names(folder: str) -> list[str]:
    """Return what a folder holds, undecodable names as escapes. Raises OSError."""
    return [text(os.fsencode(name)) for name in os.listdir(folder)]


def number(word: bytes) -> int | float:
    """Read an unsigned number, whole (stays an int) or with a decimal point. Raises FormatError."""
    if len(word) <= _LONGEST_NUMBER:
        if word.isdigit():
            return int(word)
        whole, _, fraction = word.partition(b".")
        if whole.isdigit() and fraction.isdigit():
            return float(word)
    raise FormatError(f"not a number: {_show(word)}")


def whole_number(word: bytes) -> int:
    """Read an unsigned whole number. Raises FormatError."""
    if word.isdigit() and len(word) <= _LONGEST_NUMBER:
        return int(word)
    raise FormatError(f"not a whole number: {_show(word)}")


def lookup(content: bytes, key: bytes) -> int | None:
    """Return the first number on the line that begins with `key`; None without such a line. Raises FormatError.

    `key` begins with a newline (and so must `content`: put one in front) and ends where the number may begin.
    """
    start = content.find(key)
    if start < 0:
        return None
    start += len(key)
    end = content.find(b"\n", start)
    words = content[start : end if end >= 0 else len(content)].split(None, 1)
    if not words:
        raise FormatError(f"nothing after {_show(key.strip())}")
    return whole_number(words[0])


def parse_cpu_ticks(line: bytes) -> list[int]:
    """Read a `cpu` line of /proc/stat: ticks by mode.

    The modes are user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice; old kernels have
    fewer. Raises FormatError.
    """
    words = line.split()[1:]
    if len(words) < _CPU_COLUMNS:
        raise FormatError(f"expected at least {_CPU_COLUMNS} CPU times: {_show(line)}")
    return [whole_number(word) for word in words]


def parse_cores(content: bytes) -> dict[str, list[int] | FormatError]:
    """Read the lines of single CPUs in /proc/stat: ticks by CPU number, for those that are online."""
    cores: dict[str, list[int] | FormatError] = {}
    for line in content.split(b"\n"):
        name = line.partition(b" ")[0]
        if name.startswith(b"cpu") and (cpu := name[3:]).isdigit():
            try:
                cores[text(cpu)] = parse_cpu_ticks(line)
            except FormatError as error:
                cores[text(cpu)] = error
    return cores


def parse_pressure(content: bytes) -> dict[str, int]:
    """Read a file of /proc/pressure: microseconds since boot by `some` and `full`. Raises FormatError."""
    totals: dict[str, int] = {}
    for line in content.splitlines():
        kind, _, rest = line.partition(b" ")
        if kind in (b"some", b"full"):
            totals[text(kind)] = whole_number(rest.rpartition(b"total=")[2])
    if not totals:
        raise FormatError(f"neither a line `some` nor `full`: {_show(content)}")
    return totals


def parse_diskstats(content: bytes, names: Collection[str]) -> dict[str, list[int] | FormatError]:
    """Read /proc/diskstats for the named block devices: the columns behind the name, at least eleven."""
    found: dict[str, list[int] | FormatError] = {}
    for line in content.splitlines():
        words = line.split()
        if len(words) > 2 and (name := text(words[2])) in names:  # noqa: PLR2004 - major, minor, name
            found[name] = _columns(words[3:], _DISK_COLUMNS)
    return found


def parse_net_dev(content: bytes, names: Collection[str] | None = None) -> dict[str, list[int] | FormatError]:
    """Read /proc/net/dev for the named interfaces (None: all): eight columns of receiving, then eight of sending."""
    found: dict[str, list[int] | FormatError] = {}
    for line in content.splitlines():
        raw, colon, rest = line.rpartition(b":")
        name = text(raw.strip())
        if colon and name and (names is None or name in names):
            found[name] = _columns(rest.split(), _NET_COLUMNS)
    return found


def list_processes(proc: str) -> list[str]:
    """Return the ids of all processes.

    Raises OSError, and PermissionError when process 1 is not among them: then others are hidden too.
    """
    found = [name for name in os.listdir(proc) if name.isdecimal()]
    if "1" not in found:
        reason = "processes of others are hidden (hidepid= of procfs, or ProtectProc= of the service)"
        raise PermissionError(errno.EACCES, reason, proc)
    return found


def read_process_state(proc: str, process: str) -> ProcessState:
    """Read one process's state. Raises OSError (FileNotFoundError or ProcessLookupError when it ended), FormatError."""
    descriptor = os.open(f"{proc}/{process}/stat", os.O_RDONLY)
    try:
        content = os.read(descriptor, 1024)  # always one record, below 500 bytes
    finally:
        os.close(descriptor)
    return parse_process_state(content)


def parse_process_state(content: bytes) -> ProcessState:
    """Read /proc/PID/stat. The name in brackets may hold anything, brackets too. Raises FormatError."""
    words = content.rpartition(b")")[2].split()
    if len(words) <= _STARTED or len(words[0]) != 1:
        raise FormatError(f"not the state of a process: {_show(content)}")
    return ProcessState(text(words[0]), whole_number(words[_STARTED]))


def _columns(words: list[bytes], least: int) -> list[int] | FormatError:
    # One test for all words, one conversion each: these rows are most of what a collection parses.
    if len(words) >= least and b"".join(words).isdigit() and max(map(len, words)) <= _LONGEST_NUMBER:
        return list(map(int, words))
    return FormatError(f"expected at least {least} whole numbers: {_show(b' '.join(words))}")


def _show(raw: bytes) -> str:
    shown = text(raw[:_SHOWN])
    return repr(shown + "..." if len(raw) > _SHOWN else shown)
