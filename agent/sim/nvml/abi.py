"""The C side of the NVML library: return codes, arguments as ctypes takes them, and the caller's memory."""

from __future__ import annotations

import ctypes
from typing import Any

from agent.sim.nvml.table import UINT

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999

_ERROR_NAMES = (
    "Success",
    "Uninitialized",
    "Invalid Argument",
    "Not Supported",
    "Insufficient Permissions",
    "Already Initialized",
    "Not Found",
    "Insufficient Size",
    "Insufficient External Power",
    "Driver Not Loaded",
    "Timeout",
    "Interrupt Request Issue",
    "NVML Shared Library Not Found",
    "Function Not Found",
    "Corrupted infoROM",
    "GPU is lost",
    "GPU requires reset",
    "Blocked by Operating System",
    "Driver/library version mismatch",
    "In use",
    "Insufficient Memory",
    "No data",
    "vGPU ECC Not Supported",
    "Insufficient Resources",
    "Frequency Not Supported",
    "Argument Version Mismatch",
    "Deprecated",
    "Not Ready",
    "GPU Not Found",
    "Invalid State",
    "Reset Type Not Supported",
)


class Failure(Exception):  # noqa: N818 - an nvmlReturn_t on its way to the caller, not an error of the simulation
    """Ends a function of the library; `code` is what it returns."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def fail(code: int) -> None:
    """Raise Failure, unless the code is that of success."""
    if code != SUCCESS:
        raise Failure(code)


def error_name(code: int) -> bytes:
    """Return what nvmlErrorString says of a return code."""
    return (_ERROR_NAMES[code] if 0 <= code < len(_ERROR_NAMES) else "Unknown Error").encode()


def integer(argument: Any) -> int:
    """Return an argument that is a number, plain or of a C type."""
    return int(getattr(argument, "value", argument))


def string(argument: Any) -> str:
    """Return an argument that is bytes or a c_char_p; empty for a null pointer."""
    text: bytes = getattr(argument, "value", argument) or b""
    return text.decode(errors="surrogateescape")


def address(argument: Any) -> int:
    """Return where byref, a pointer or an array points to; 0 for None and a null pointer."""
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


def pointer(argument: Any) -> int:
    """Return where an argument points to. Raises Failure for a null pointer."""
    where = address(argument)
    if where == 0:
        raise Failure(INVALID_ARGUMENT)
    return where


def put(argument: Any, ctype: Any, number: int, offset: int = 0) -> None:
    """Write a number of a C type, cut to its size, so many bytes behind where the argument points to."""
    ctype.from_address(pointer(argument) + offset).value = number


def put_text(text: str, buffer: Any, length: Any) -> None:
    """Write a text and its final null byte. Raises Failure where the buffer is too small."""
    content = text.encode(errors="surrogateescape") + b"\0"
    if len(content) > integer(length):
        raise Failure(INSUFFICIENT_SIZE)
    ctypes.memmove(pointer(buffer), content, len(content))


def check_version(struct: Any, version: int) -> None:
    """Raise Failure unless the first word of the struct is this version."""
    if UINT.from_address(pointer(struct)).value != version:
        raise Failure(ARGUMENT_VERSION_MISMATCH)
