"""Simulated nodes in memory: hundreds of files that change with each step are slow on some disks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pynvml
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY = Path("/dev/shm")  # noqa: S108 - only a directory made safely below it is used


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Give pytest's tmp_path, in memory where that is possible."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None, prefix="hpcwatch-test-") as directory:
        yield Path(directory)


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the NVML binding afterwards as it was found."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
