"""A whole agent on a node whose GPUs break in every way a driver's library can: what a scraper and an operator see."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.agent.kit import until
from tests.contract.watched import GPUS, Site, Watched, by_gpu, down, select, series_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

HANG_MS = 120_000
BY_INDEX = "nvmlDeviceGetHandleByIndex_v2"
ALL_ONES = 2**32 - 1

# What happens to GPU 3, and the reason that is shown. The first kind comes back as soon as it answers again; the second
# cost a process its life, so the GPU is left alone for half a minute.
ANSWERED = {
    "lost": ({"gpu.3.return.*": 15}, "gpu_lost"),
    "lost, and no handle": ({"gpu.3.return.*": 15, f"gpu.3.return.{BY_INDEX}": 999}, "unknown"),
    "no longer listed": ({"gpu.3.absent": 1}, "gpu_lost"),
    "every getter is 999": ({"gpu.3.return.*": 999}, "unknown"),
    "needs a reset": ({"gpu.3.return.*": 16}, "reset_required"),
}
FATAL = {
    "every call hangs": ({"gpu.3.hang_ms.*": HANG_MS}, "timeout"),
    "one getter hangs": ({"gpu.3.hang_ms.nvmlDeviceGetFieldValues": HANG_MS}, "timeout"),
    "the handle lookup hangs": ({f"gpu.3.hang_ms.{BY_INDEX}": HANG_MS}, "timeout"),
    "the library crashes": ({"gpu.3.crash.nvmlDeviceGetTemperature": 1}, "unknown"),
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path / "node")
    made.install()
    return made


@pytest.fixture
def start() -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def begin(site: Site, *arguments: str) -> Watched:
        started.append(Watched(site, *arguments))
        return started[-1]

    yield begin
    for watched in started:
        watched.agent.end()


def breaks(watched: Watched, changes: Mapping[str, int], reasons: Mapping[str, str]) -> None:
    """Break GPUs; the others must be as complete as before and fresh, and each loss told once."""
    others = set(GPUS) - set(reasons)
    before = watched.look()
    watched.site.node.change(changes)
    page = watched.meets(reasons)
    assert series_of(page, others) == series_of(before, others), "the other GPUs are complete"
    for gpu, reason in reasons.items():
        uuid = watched.site.node.uuid(int(gpu))
        own = f'gpu="{gpu}",uuid="{uuid}"'
        assert series_of(page, {gpu}) == {f"gpu_up{{{own}}}", f'gpu_error{{{own},reason="{reason}"}}'}
    watched.sees_changes(others)
    watched.sees_changes(others)
    assert sorted(watched.told()) == sorted(("gpu_lost", gpu) for gpu in reasons)


@pytest.mark.parametrize(("changes", "reason"), ANSWERED.values(), ids=list(ANSWERED))
def test_a_gpu_that_fails_costs_only_itself_and_comes_back(
    site: Site, start: Callable[..., Watched], changes: Mapping[str, int], reason: str
) -> None:
    watched = start(site)
    watched.is_well()
    before, process = watched.look(), watched.processes()
    breaks(watched, changes, {"3": reason})
    site.node.change(dict.fromkeys(changes, None))
    watched.is_well()
    until(lambda: series_of(watched.look(), {"3"}) == series_of(before, {"3"}), "GPU 3 is complete again")
    watched.sees_changes(GPUS)
    assert watched.told() == [("gpu_lost", "3"), ("gpu_recovered", "3")]
    assert watched.processes() == process, "no process is needed that was not there"
    watched.ends()


@pytest.mark.parametrize(("changes", "reason"), FATAL.values(), ids=list(FATAL))
def test_a_gpu_that_ends_a_process_costs_only_itself_and_the_agent_ends_in_time(
    site: Site, start: Callable[..., Watched], changes: Mapping[str, int], reason: str
) -> None:
    watched = start(site)
    watched.is_well()
    breaks(watched, changes, {"3": reason})
    assert len(watched.processes()) == 1, "what hung is gone"
    watched.ends()
