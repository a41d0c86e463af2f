"""Where the driver's library is: whether there is one to load, and which file the loaded one came from."""

from __future__ import annotations

import ctypes
import os
import re
from typing import NamedTuple

SONAME = "libnvidia-ml.so.1"

_VERSION = re.compile(r"\.so\.(\d+(?:\.\d+)+)$")
_CACHE = "/etc/ld.so.cache"
_FOLDERS = ("/usr/lib64", "/usr/lib", "/lib64", "/lib")  # those of ld.so(8)
_CACHE_LIMIT = 16 << 20


class Identity(NamedTuple):
    """What tells one file from the one that replaced it."""

    device: int
    inode: int
    mtime_ns: int


class _DlInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def installed(library: str | None) -> bool:
    """Say whether there is a library that could be loaded: this file, else wherever ld.so(8) would look."""
    if library is not None:
        return os.path.exists(library)
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":") if folder]
    folders += [*_FOLDERS, *(f"{folder}/{os.uname().machine}-linux-gnu" for folder in ("/usr/lib", "/lib"))]
    if any(os.path.exists(f"{folder}/{SONAME}") for folder in folders):
        return True
    try:
        with open(_CACHE, "rb") as cache:
            return SONAME.encode() + b"\0" in cache.read(_CACHE_LIMIT)
    except OSError:
        return False


def path_of(loaded: ctypes.CDLL, symbol: str) -> str | None:
    """Return the path a library was loaded by, found through one of its functions; None when that tells nothing."""
    try:
        function = ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p)
    except AttributeError:
        return None
    info = _DlInfo()
    if not ctypes.CDLL(None).dladdr(function, ctypes.byref(info)) or not info.dli_fname:
        return None
    return os.fsdecode(info.dli_fname)


def identity(path: str) -> Identity | None:
    """Return what file is behind a path now, links followed; None when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return Identity(status.st_dev, status.st_ino, status.st_mtime_ns)


def version(path: str) -> str | None:
    """Return the driver version in the name of the file behind a path (`libnvidia-ml.so.570.133.20`), as NVIDIA's
    packages name it; None when the name has none.
    """
    match = _VERSION.search(os.path.realpath(path))
    return match[1] if match else None
