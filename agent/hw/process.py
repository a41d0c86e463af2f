"""What this process uses, from /proc/self (proc_pid_statm(5), proc_pid_status(5))."""

from __future__ import annotations

import ctypes
import os
import resource
import time

_PAGE_BYTES = resource.getpagesize()


_M_ARENA_MAX = -8  # malloc.h


def share_one_heap() -> None:
    """Have all threads take memory from one heap (mallopt(3)), for they never run side by side. Before the first."""
    _c_function("mallopt", _M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """Give the heap's free pages back to the system (malloc_trim(3)): after a start, which needs more than the rest."""
    _c_function("malloc_trim", 0)


def _c_function(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)  # another C library may not have it
    if function is not None:
        function(*arguments)


class OwnProcess:
    """Reads this process's own use of memory, processor and descriptors."""

    def __init__(self) -> None:
        try:
            self._statm: int | None = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._statm = None
        self.started_at = time.time()

    def resident_bytes(self) -> int | None:
        """Resident memory; None where /proc does not tell."""
        if self._statm is None:
            return None
        try:
            return int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):
            return None

    @staticmethod
    def cpu_seconds() -> float:
        """Processor time of all threads, user and system."""
        return time.process_time()

    @staticmethod
    def open_descriptors() -> int | None:
        """Open file descriptors; None where /proc does not tell."""
        try:
            # Linux 6.2 and newer give the number as the directory's size: a fortieth of the time of listing hundreds.
            return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1  # less the listing's own
        except OSError:
            return None
