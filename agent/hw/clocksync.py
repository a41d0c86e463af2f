"""How well the kernel's clock is disciplined: adjtimex(2), asked and never set.

Python has no such call, so the C library's is used. `struct timex` is that of 64-bit Linux (linux/timex.h).
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_STA_NANO = 0x2000  # offset is in nanoseconds rather than microseconds
_UNKNOWN_ERROR_US = 16_000_000  # NTP_PHASE_LIMIT: the kernel stops there, 9 hours after the last correction


class Timex(ctypes.Structure):
    """The kernel's `struct timex`."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("ppsfreq", ctypes.c_long),
        ("jitter", ctypes.c_long),
        ("shift", ctypes.c_int),
        ("stabil", ctypes.c_long),
        ("jitcnt", ctypes.c_long),
        ("calcnt", ctypes.c_long),
        ("errcnt", ctypes.c_long),
        ("stbcnt", ctypes.c_long),
        ("tai", ctypes.c_int),
        ("reserved", ctypes.c_int * 11),
    )


class ClockState(NamedTuple):
    """`offset_s` is what is still to be corrected; negative when the clock is ahead."""

    synchronized: bool
    offset_s: float
    max_error_s: float


def read(call: Callable[[Timex], int] | None = None) -> ClockState:
    """Ask the kernel. Raises OSError: PermissionError where a sandbox forbids the call.

    Synchronized is judged by the error bound, not by STA_UNSYNC: a time daemon may set that flag only to keep the
    kernel from writing the hardware clock (chronyd without rtcsync does).
    """
    timex = Timex(modes=0)  # 0: change nothing
    if (call or _adjtimex)(timex) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"adjtimex: {os.strerror(code)}")
    per_s = 1e9 if timex.status & _STA_NANO else 1e6
    return ClockState(timex.maxerror < _UNKNOWN_ERROR_US, timex.offset / per_s, timex.maxerror / 1e6)


def _adjtimex(timex: Timex) -> int:
    return int(_library().adjtimex(ctypes.byref(timex)))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
