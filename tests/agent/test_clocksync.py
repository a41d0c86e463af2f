from __future__ import annotations

import ctypes
import errno
from typing import TYPE_CHECKING

import pytest

from agent.hw import clocksync
from agent.hw.clocksync import ClockState, Timex

if TYPE_CHECKING:
    from collections.abc import Callable

STA_UNSYNC, STA_NANO = 0x40, 0x2000


def kernel(*, offset: int = 0, maxerror: int = 0, status: int = 0) -> Callable[[Timex], int]:
    def adjtimex(timex: Timex) -> int:
        assert timex.modes == 0, "a monitoring agent must not set the clock"
        timex.offset, timex.maxerror, timex.status = offset, maxerror, status
        return 0

    return adjtimex


def test_structure_has_the_size_of_the_kernels() -> None:
    assert ctypes.sizeof(Timex) == 208


def test_offset_is_in_microseconds_unless_the_kernel_says_nanoseconds() -> None:
    assert clocksync.read(kernel(offset=-1500)).offset_s == pytest.approx(-0.0015)
    assert clocksync.read(kernel(offset=-1500, status=STA_NANO)).offset_s == pytest.approx(-0.0000015)


def test_error_bound_at_the_kernels_limit_means_unsynchronized() -> None:
    assert clocksync.read(kernel(maxerror=16_000_000)) == ClockState(synchronized=False, offset_s=0.0, max_error_s=16.0)


def test_daemon_that_only_spares_the_hardware_clock_is_synchronized() -> None:
    assert clocksync.read(kernel(maxerror=2_500, status=STA_UNSYNC)).synchronized


def test_refused_call_says_so() -> None:
    def refuse(_: Timex) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    with pytest.raises(PermissionError, match="adjtimex"):
        clocksync.read(refuse)
