"""What a line of the kernel log says, by its shape. What follows the part that is named here may be anything.

Sources of the shapes: NVIDIA's "XID Errors" and open-gpu-kernel-modules (nvErrorLog, osHandleGpuLost, nv-pci.c),
NVIDIA's Fabric Manager guide (SXid), and of the kernel mm/oom_kill.c, kernel/hung_task.c, kernel/watchdog.c,
kernel/watchdog_perf.c, kernel/rcu/tree_stall.h.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from agent.hw.kmsg import plain
from agent.hw.nvidia import address

if TYPE_CHECKING:
    from collections.abc import Callable

FATAL, NONFATAL = "fatal", "nonfatal"


class Xid(NamedTuple):
    """A GPU's driver reports an error. `word`: FATAL, NONFATAL, or empty where the line has neither.

    `gi` and `ci`: numbers of the MIG GPU instance and compute instance, empty where the whole GPU is meant.
    """

    address: str
    code: int
    word: str = ""
    gi: str = ""
    ci: str = ""


class FallenOff(NamedTuple):
    """A GPU does not answer on PCI any more, told without an XID. No address: it was in an earlier line."""

    address: str


class FallingOff(NamedTuple):
    """The first of three lines that say so."""

    address: str


class GpuNamed(NamedTuple):
    """The driver tells a GPU's UUID, before its first XID."""

    address: str
    uuid: str


class Sxid(NamedTuple):
    """An NVSwitch's driver reports an error. `word` as in Xid."""

    switch: str
    address: str
    code: int
    word: str


class FollowUp(NamedTuple):
    """More about what another line told."""


class OomKill(NamedTuple):
    """Memory was short and a process is chosen. `scope`: memcg or global; `cgroup` is the process's own."""

    scope: str
    pid: str
    task: str
    cgroup: str


class Killed(NamedTuple):
    """A process is killed for it; older kernels tell nothing else, newer ones after an OomKill."""

    scope: str
    pid: str
    task: str


class HungTask(NamedTuple):
    """A task did not run for long though it should."""

    pid: str
    task: str


class Stall(NamedTuple):
    """A processor did not come round for long. `kind`: soft_lockup, hard_lockup or rcu; `cpu` is empty for rcu."""

    kind: str
    cpu: str


Fact = Xid | FallenOff | FallingOff | GpuNamed | Sxid | FollowUp | OomKill | Killed | HungTask | Stall

_PCI = r"([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?"
_XID = re.compile(rf"(?:NVRM: *)+Xid \((?:PCI:)?{_PCI}(?![0-9a-zA-Z])([^)]*)\): (\d{{1,4}})(?!\d)(.*)", re.DOTALL)
_XID_WORD = re.compile(r".*, *\w+ +(Fatal|Non-?fatal) +XC\d", re.DOTALL)  # the last: a process' name comes before it
_GPU_INSTANCE = re.compile(r"\bGPU-I:(\d{1,4})\b")
_COMPUTE_INSTANCE = re.compile(r"\bGPU-CI:(\d{1,4})\b")
_GPU_AT = re.compile(rf"(?:NVRM: *)+GPU at (?:PCI:)?{_PCI}: (GPU-[0-9a-fA-F-]{{8,64}})(?![0-9a-zA-Z-])")
_GPU_NAME = re.compile(rf"(?:NVRM: *)+The NVIDIA GPU {_PCI}(?!:?[0-9a-zA-Z])")
_ANY_PCI = re.compile(rf"(?:(?<![0-9a-zA-Z:])|(?<=PCI:)){_PCI}(?!:?[0-9a-zA-Z])")
_FALLEN = re.compile(r"\bfallen off the bus\b")
_SXID = re.compile(
    rf"nvidia-nvswitch(\d{{1,3}}): SXid \((?:PCI:)?{_PCI}(?![0-9a-zA-Z])[^)]*\): (\d{{1,5}})(?!\d)(.*)", re.DOTALL
)
_SXID_FOLLOW_UP = re.compile(r",?\s*(Data\b|Severity\b)")
_SXID_WORD = re.compile(r", *((?:non-?)?fatal)\b", re.IGNORECASE)
_OOM_HEAD = re.compile(r"oom-kill:constraint=(\w+)(?:,|$)")
_OOM_TAIL = re.compile(r"(\d{1,10}),uid=\d+\s*")
_KILLED = re.compile(
    r"(Memory cgroup out of memory|Out of memory[^:]*)?(?:: )?Killed process (\d{1,10}) \((.{0,64}?)\)(?!\))", re.DOTALL
)
_HUNG = re.compile(r"INFO: task (.{1,64}):(\d{1,10}) blocked (?:in I/O wait )?for more than \d+ seconds", re.DOTALL)
_SOFT = re.compile(r"(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#(\d{1,6}) stuck for")
_HARD = re.compile(r"(?:(?:NMI )?watchdog: )?Watchdog detected hard LOCKUP on cpu (\d{1,6})")
_RCU = re.compile(r"(?:rcu: )?INFO: \S+ (?:self-)?detected (?:expedited )?stalls? on ()CPU")


def read(text: bytes) -> Fact | None:
    """Return what a record's text says; None when it is nothing of interest."""
    # Nearly all records end here, so this is what a busy log costs: the rarest letters first, no regular expression.
    if b"NVRM" in text:
        return _read_nvrm(plain(text))
    for word, read_it in _BY_WORD:
        if word in text:
            return read_it(plain(text))
    return None


def _read_nvrm(text: str) -> Fact | None:
    if match := _XID.match(text):
        place, instances, code, rest = match.groups()
        word = _word(_XID_WORD.match(rest))
        return Xid(
            _gpu(place), int(code), word, _number(_GPU_INSTANCE, instances), _number(_COMPUTE_INSTANCE, instances)
        )
    if match := _GPU_AT.match(text):
        return GpuNamed(_gpu(match[1]), match[2])
    if text.startswith("NVRM:") and _FALLEN.search(text):
        place = _ANY_PCI.search(text)
        return FallenOff(_gpu(place[1]) if place else "")
    if match := _GPU_NAME.match(text):
        return FallingOff(_gpu(match[1]))
    return None


def _read_sxid(text: str) -> Fact | None:
    match = _SXID.match(text)
    if match is None:
        return None
    if _SXID_FOLLOW_UP.match(match[4]):
        return FollowUp()
    return Sxid(match[1], _gpu(match[2]), int(match[3]), _word(_SXID_WORD.match(match[4])))


def _read_oom(text: str) -> Fact | None:
    # Cut at its marks: an expression with as many gaps would try every combination of them on a line without end.
    before, _, rest = text.partition(",task_memcg=")
    cgroup, _, rest = rest.partition(",task=")
    task, _, rest = rest.rpartition(",pid=")
    head, tail = _OOM_HEAD.match(before), _OOM_TAIL.fullmatch(rest)
    if head is None or tail is None:
        return None
    return OomKill("memcg" if head[1] == "CONSTRAINT_MEMCG" else "global", tail[1], task, cgroup)


def _read_killed(text: str) -> Fact | None:
    match = _KILLED.match(text)
    if match is None:
        return None
    return Killed("memcg" if (match[1] or "").startswith("Memory cgroup") else "global", match[2], match[3])


def _read_hung(text: str) -> Fact | None:
    match = _HUNG.match(text)
    return HungTask(match[2], match[1]) if match else None


def _stall(kind: str, shape: re.Pattern[str]) -> Callable[[str], Fact | None]:
    def read_it(text: str) -> Fact | None:
        match = shape.match(text)
        return Stall(kind, match[1]) if match else None

    return read_it


_BY_WORD: tuple[tuple[bytes, Callable[[str], Fact | None]], ...] = (
    (b": SXid (", _read_sxid),
    (b"oom-kill:", _read_oom),
    (b"Killed process", _read_killed),
    (b" for more than ", _read_hung),
    (b"soft lockup", _stall("soft_lockup", _SOFT)),
    (b"hard LOCKUP", _stall("hard_lockup", _HARD)),
    (b"detected stall", _stall("rcu", _RCU)),
    (b"detected expedited stall", _stall("rcu", _RCU)),
)


def _gpu(place: str) -> str:
    """Return an address in one form, without regard to the function: lines of one GPU have it or have it not."""
    return address(place) or place


def _word(match: re.Match[str] | None) -> str:
    if match is None:
        return ""
    return FATAL if match[1].lower() == "fatal" else NONFATAL


def _number(shape: re.Pattern[str], text: str) -> str:
    match = shape.search(text)
    return str(int(match[1])) if match else ""
