"""A whole agent on a node whose GPUs break in every way a driver's library can: what a scraper and an operator see."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.agent.kit import until
from tests.contract.watched import GPUS, Site, Watched, by_gpu, down, select, series_of
from tests.collectors.gpunode import labels_of

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


def test_gpus_that_break_at_once_cost_themselves_and_are_read_again_after_a_reload(
    site: Site, start: Callable[..., Watched]
) -> None:
    watched = start(site)
    watched.is_well()
    changes = {
        "gpu.1.hang_ms.*": HANG_MS,
        "gpu.3.return.*": 15,
        "gpu.4.hang_ms.nvmlDeviceGetMemoryInfo_v2": HANG_MS,
        "gpu.6.crash.nvmlDeviceGetUtilizationRates": 1,
    }
    breaks(watched, changes, {"1": "timeout", "3": "gpu_lost", "4": "timeout", "6": "unknown"})
    site.node.change(dict.fromkeys(changes, None))
    until(lambda: set(down(watched.look())) == {"1", "4", "6"}, "the one that only failed is back")
    site.configure(gpu={"timeout": "1100ms"})
    watched.agent.send(signal.SIGHUP)
    watched.is_well()
    watched.sees_changes(GPUS)
    recovered = [device for kind, device in watched.told() if kind == "gpu_recovered"]
    assert (recovered[0], sorted(recovered)) == ("3", ["1", "3", "4", "6"])
    watched.ends()


def test_garbage_shows_nowhere_and_costs_no_other_gpu(site: Site, start: Callable[..., Watched]) -> None:
    watched = start(site)
    watched.is_well()
    before = watched.look()
    site.node.change({"gpu.3.garbage.*": 1})
    invalid = 'gpu_invalid_samples_total{gpu="3",uuid="%s",metric="gpu_utilization_ratio"}' % site.node.uuid(3)
    until(lambda: watched.look()[invalid] >= 3, "garbage is counted")
    page = watched.look()
    assert by_gpu(page, "gpu_up") == dict.fromkeys(GPUS, 1), "it answers"
    others = set(GPUS) - {"3"}
    assert series_of(page, others) == series_of(before, others)
    shown = {text: value for text, value in page.items() if text in series_of(page, {"3"})}
    shown = {text: value for text, value in shown.items() if not text.startswith("gpu_invalid_samples_total")}
    assert {text: value for text, value in shown.items() if value not in (before.get(text), 0, 1)} == {}
    watched.sees_changes(others)
    site.node.change({"gpu.3.garbage.*": None})
    until(lambda: series_of(watched.look(), {"3"}) == series_of(before, {"3"}), "all values are back")
    watched.sees_changes(GPUS)
    assert watched.told() == []


# The process that asks the driver


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV], ids=lambda number: number.name)
def test_a_process_that_somebody_ends_or_stops_is_replaced_and_no_gpu_is_blamed(
    site: Site, start: Callable[..., Watched], number: signal.Signals
) -> None:
    watched = start(site)
    watched.is_well()
    for _ in range(3):
        (before,) = watched.processes()
        os.kill(before, number)
        until(lambda before=before: watched.processes() not in ([], [before]), "another process")  # type: ignore[misc]
        until(lambda: by_gpu(watched.page(), "gpu_up") == dict.fromkeys(GPUS, 1))
        watched.sees_changes(GPUS)
    assert watched.told() == []
    assert len(watched.processes()) == 1
    watched.ends()


@pytest.mark.parametrize(
    ("changes", "function"),
    [({"gpu.3.hang_ms.*": HANG_MS}, "nvmlDeviceGetHandleByIndex_v2 3"), ({"init.hang_ms": HANG_MS}, "nvmlInit")],
    ids=["a GPU", "the start"],
)
def test_the_agent_ends_in_time_while_a_call_hangs_that_is_still_waited_for(
    site: Site, start: Callable[..., Watched], changes: Mapping[str, int], function: str
) -> None:
    site.configure(gpu={"timeout": "60s"})
    site.node.change(changes)
    watched = start(site)
    until(lambda: site.calls.exists() and function in site.calls.read_text(), "the call hangs")
    watched.page()
    assert len(watched.processes()) == 1
    watched.ends()


def test_an_agent_that_is_killed_leaves_no_process_though_a_call_hangs(
    site: Site, start: Callable[..., Watched]
) -> None:
    site.configure(gpu={"timeout": "60s"})
    site.node.change({"gpu.3.hang_ms.*": HANG_MS})
    watched = start(site)
    until(lambda: site.calls.exists() and f"{BY_INDEX} 3" in site.calls.read_text(), "the call hangs")
    watched.ends(signal.SIGKILL)


# The driver as a whole


def test_nvml_that_hangs_at_its_start_hides_no_gpu(site: Site, start: Callable[..., Watched]) -> None:
    site.configure(gpu={"timeout": "200ms"})
    site.node.change({"init.hang_ms": HANG_MS})
    watched = start(site)
    watched.is_ready()
    until(lambda: watched.page().get("gpu_nvml_up") == 0, "NVML is told to be down")
    page = watched.look()
    assert by_uuid(page, "gpu_up") == {site.node.uuid(gpu): 0 for gpu in range(8)}
    assert set(map(reason, select(page, "gpu_error"))) == {"timeout"}
    assert counts(page) == {"pci": 8, "proc": 8, "dev": 8}
    watched.ends()


def test_nvml_that_begins_to_fail_hides_no_gpu_and_comes_back(site: Site, start: Callable[..., Watched]) -> None:
    watched = start(site)
    watched.is_well()
    site.node.change({"init.return": 9})
    (process,) = watched.processes()
    os.kill(process, signal.SIGKILL)
    until(lambda: watched.page().get("gpu_nvml_up") == 0, "NVML is told to be down")
    page = watched.look()
    assert by_gpu(page, "gpu_up") == dict.fromkeys(GPUS, 0)
    assert page["gpu_nvml_return_code"] == 9
    assert counts(page) == {"pci": 8, "proc": 8, "dev": 8}
    site.node.change({"init.return": None})
    watched.is_well()
    assert watched.told() == [], "no GPU of its own was lost"


def by_uuid(page: Mapping[str, float], name: str) -> dict[str, float]:
    return {labels_of(series)["uuid"]: value for series, value in select(page, name).items()}


def reason(series: str) -> str:
    return labels_of(series)["reason"]


def counts(page: Mapping[str, float]) -> dict[str, float]:
    return {labels_of(series)["source"]: value for series, value in select(page, "gpu_count").items()}
