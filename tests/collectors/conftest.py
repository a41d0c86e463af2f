"""Trees in memory, and nothing left over from one test to the next."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent.sim.harness import Probe

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY = Path("/dev/shm")  # noqa: S108 - only a directory made safely below it is used


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Give pytest's tmp_path, in memory where that is possible: on some disks each small file costs a millisecond."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None, prefix="hpcwatch-test-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _closed_collectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every collector that the test made: its descriptors and threads are the next test's otherwise."""
    made: list[Probe] = []
    make = Probe.__init__

    def make_and_note(self: Probe, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        made.append(self)

    monkeypatch.setattr(Probe, "__init__", make_and_note)
    yield
    for probe in made:
        probe.collector.close()
