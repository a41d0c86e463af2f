"""Tells what of a process's time is the driver's library, or what stands in for it, and not the agent."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pynvml

from tests.perf.sharednumber import SharedNumber


class TimedLibrary:
    """The library, to be put under the binding; adds up the processor time of its calls, in seconds."""

    def __init__(self, path: str, spent_s: SharedNumber) -> None:
        self._library = ctypes.CDLL(path)
        self._spent_s = spent_s
        self._spent_ns = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the function of this name, timed. Raises AttributeError as the library does."""
        function = getattr(self._library, name)

        def timed(*arguments: Any) -> Any:
            begun_ns = time.thread_time_ns()
            code = function(*arguments)
            self._spent_ns += time.thread_time_ns() - begun_ns
            self._spent_s.set(self._spent_ns / 1e9)
            return code

        return timed


def install(usual: Callable[[], None], path: str, spent_s: SharedNumber) -> None:
    """Do what a collector's process usually does first, then put the timed library under its binding."""
    usual()
    pynvml.nvmlLib = TimedLibrary(path, spent_s)
