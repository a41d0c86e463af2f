"""A whole agent on a node whose GPUs break in every way a driver's library can: what a scraper and an operator see."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.agent.kit import hangs, until
from tests.collectors.gpunode import labels_of
from tests.contract.watched import GPUS, Site, Watched, by_gpu, down, select, series_of
from tests.fakenvml.library import functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

HANG_MS = 120_000
PAUSE_S = 30.0  # before a GPU is tried again that a process hung on or crashed in
LOOKUPS = tuple(f"nvmlDeviceGetHandleBy{key}" for key in ("Index_v2", "PciBusId_v2", "UUID"))

# What happens to GPU 3, and the reason that is shown. The first kind comes back as soon as it answers again; the second
# cost a process its life, so the GPU is left alone for half a minute.
ANSWERED = {
    "lost": ({"gpu.3.return.*": 15}, "gpu_lost"),
    "lost, and no handle": ({"gpu.3.return.*": 15, **{f"gpu.3.return.{name}": 999 for name in LOOKUPS}}, "unknown"),
    "no longer listed": ({"gpu.3.absent": 1}, "gpu_lost"),
    "every getter is 999": ({"gpu.3.return.*": 999}, "unknown"),
    "every answer is garbage": ({"gpu.3.garbage.*": 1}, "unknown"),
    "needs a reset": ({"gpu.3.return.*": 16}, "reset_required"),
}
FATAL = {
    "every call hangs": ({"gpu.3.hang_ms.*": HANG_MS}, "timeout"),
    "one getter hangs": ({"gpu.3.hang_ms.nvmlDeviceGetFieldValues": HANG_MS}, "timeout"),
    "the handle lookup hangs": ({f"gpu.3.hang_ms.{name}": HANG_MS for name in LOOKUPS}, "timeout"),
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
    until(lambda: series_of(before, {"3"}) <= series_of(watched.look(), {"3"}), "GPU 3 is complete again")
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


def test_gpus_that_break_at_once_cost_only_themselves_also_over_a_reload_and_come_back_by_themselves(
    site: Site, start: Callable[..., Watched]
) -> None:
    watched = start(site)
    watched.is_well()
    changes = {"gpu.1.hang_ms.*": HANG_MS, "gpu.3.return.*": 15, "gpu.6.crash.nvmlDeviceGetUtilizationRates": 1}
    reasons = {"1": "timeout", "3": "gpu_lost", "6": "unknown"}
    breaks(watched, changes, reasons)
    before = watched.processes()
    site.configure(gpu={"timeout": "1100ms"})
    watched.agent.send(signal.SIGHUP)
    until(lambda: watched.processes() not in ([], before) and down(watched.page()) == reasons, "the new configuration")
    watched.sees_changes(set(GPUS) - set(reasons))
    assert len(watched.told()) == len(reasons), "none is told again"
    site.node.change(dict.fromkeys(changes, None))
    until(lambda: len(watched.told()) == 2 * len(reasons), "all are back", PAUSE_S + 25)
    assert sorted(watched.told()) == [(kind, gpu) for kind in ("gpu_lost", "gpu_recovered") for gpu in reasons]
    watched.is_well()
    watched.sees_changes(GPUS)
    watched.ends()


def test_gpus_that_hang_at_once_cost_only_themselves(site: Site, start: Callable[..., Watched]) -> None:
    site.configure(gpu={"timeout": "500ms"})
    watched = start(site)
    watched.is_well()
    breaks(watched, {f"gpu.{gpu}.hang_ms.*": HANG_MS for gpu in "257"}, dict.fromkeys("257", "timeout"))
    watched.ends()


def test_values_that_cannot_be_true_show_nowhere_and_cost_no_other_gpu(
    site: Site, start: Callable[..., Watched]
) -> None:
    watched = start(site)
    watched.is_well()
    before = watched.look()
    others = set(GPUS) - {"3"}
    getters = {name for name in functions() if name.startswith("nvmlDeviceGet") and "Handle" not in name}
    garbage = {f"gpu.3.garbage.{name}": 1 for name in getters - {"nvmlDeviceGetUUID"}}
    site.node.change(garbage)

    def dropped() -> dict[str, float]:
        return select(watched.look(), "gpu_invalid_samples_total", gpu="3", metric="gpu_utilization_ratio")

    until(lambda: max(dropped().values(), default=0) >= 3, "garbage is dropped and counted")
    page = watched.look()
    assert by_gpu(page, "gpu_up") == dict.fromkeys(GPUS, 1), "it answers"
    assert series_of(page, others) == series_of(before, others)
    judged = {text for text in series_of(page, {"3"}) if not text.startswith(("gpu_invalid_samples_total", "gpu_info"))}
    assert {text: page[text] for text in judged if page[text] != before.get(text)} == {}
    watched.sees_changes(others)
    site.node.change(dict.fromkeys(garbage, None))
    until(lambda: series_of(before, {"3"}) <= series_of(watched.look(), {"3"}), "all values are back")
    watched.sees_changes(GPUS)
    assert watched.told() == []


def test_gpus_that_come_and_go_keep_their_names(site: Site, start: Callable[..., Watched]) -> None:
    watched = start(site)
    watched.is_well()
    names = {str(gpu): site.node.uuid(gpu) for gpu in range(8)}
    expected, before = [], ""
    for gone in ("0", "06", "6", "", "1234567", "7"):
        site.node.change({f"gpu.{gpu}.absent": 1 if gpu in gone else None for gpu in GPUS})
        up = {gpu: 0.0 if gpu in gone else 1.0 for gpu in GPUS}
        until(lambda up=up: by_gpu(watched.look(), "gpu_up") == up, f"GPUs {gone} are gone")  # type: ignore[misc]
        page = watched.look()
        assert {labels_of(text)["gpu"]: labels_of(text)["uuid"] for text in select(page, "gpu_up")} == names
        assert by_gpu(page, "gpu_info").keys() == set(GPUS) - set(gone)
        watched.sees_changes(set(GPUS) - set(gone))
        expected += [
            ("gpu_lost" if gpu in gone else "gpu_recovered", gpu) for gpu in GPUS if (gpu in gone) != (gpu in before)
        ]
        before = gone
    assert watched.told() == expected


def test_a_gpu_keeps_its_names_while_it_answers_garbage(site: Site, start: Callable[..., Watched]) -> None:
    watched = start(site)
    watched.is_well()
    before = select(watched.look(), "gpu_info", gpu="3")
    getters = {name for name in functions() if name.startswith("nvmlDeviceGet") and "Handle" not in name}
    site.node.change({f"gpu.3.garbage.{name}": 1 for name in getters - {"nvmlDeviceGetUUID"}})

    def dropped() -> float:
        return sum(select(watched.look(), "gpu_invalid_samples_total", gpu="3", metric="gpu_ecc_mode_enabled").values())

    until(lambda: dropped() >= 2, "the slow values were read twice")
    assert select(watched.look(), "gpu_info", gpu="3") == before


# The process that asks the driver


def test_a_process_that_somebody_kills_is_replaced_and_no_gpu_is_blamed(
    site: Site, start: Callable[..., Watched]
) -> None:
    watched = start(site)
    watched.is_well()
    for _ in range(5):
        (before,) = watched.processes()
        os.kill(before, signal.SIGKILL)
        is_replaced(watched, before)
        watched.sees_changes(GPUS)
    assert watched.told() == []
    watched.ends()


def test_a_process_that_somebody_stops_is_replaced_and_no_gpu_is_blamed(
    site: Site, start: Callable[..., Watched]
) -> None:
    site.configure(gpu={"interval": "1s"})  # so that it is stopped between two of its runs
    watched = start(site)
    watched.is_well()
    watched.sees_changes(GPUS)
    (before,) = watched.processes()
    os.kill(before, signal.SIGSTOP)
    is_replaced(watched, before)
    watched.sees_changes(GPUS)
    (before,) = watched.processes()
    os.kill(before, signal.SIGSTOP)
    watched.ends()


def is_replaced(watched: Watched, process: int) -> None:
    until(lambda: watched.processes() not in ([], [process]), "another process")
    until(lambda: by_gpu(watched.page(), "gpu_up") == dict.fromkeys(GPUS, 1), "it reads all GPUs")
    assert len(watched.processes()) == 1


def test_an_agent_that_cannot_start_a_process_tries_again(site: Site, start: Callable[..., Watched]) -> None:
    watched = start(site)
    watched.is_well()
    (process,) = watched.processes()
    number = watched.agent.process.pid
    limits = resource.prlimit(number, resource.RLIMIT_NOFILE)
    open_files = len(list(Path(f"/proc/{number}/fd").iterdir()))
    resource.prlimit(number, resource.RLIMIT_NOFILE, (open_files + 1, limits[1]))
    os.kill(process, signal.SIGKILL)
    until(lambda: "Too many open files" in watched.agent.log, "no process can be started")
    resource.prlimit(number, resource.RLIMIT_NOFILE, limits)
    watched.is_well()
    watched.sees_changes(GPUS)
    assert watched.told() == []


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"[[[[", b'{"version":1,"content":{"gpus":7,"seen":"x"}}'])
def test_a_memory_that_is_damaged_is_lived_without(site: Site, start: Callable[..., Watched], content: bytes) -> None:
    folder = site.place.folder / "state"
    folder.mkdir()
    for name in ("collector-gpu", "collector-kernel", "presence", "events"):
        (folder / f"{name}.json").write_bytes(content)
    site.configure(kernel={})
    watched = start(site)
    watched.is_well()
    watched.sees_changes(GPUS)
    assert watched.problems() == []
    watched.ends()


@pytest.mark.parametrize(
    ("changes", "gpu"),
    [({"gpu.3.hang_ms.*": HANG_MS}, "3"), ({"init.hang_ms": HANG_MS}, "-")],
    ids=["a GPU", "the start"],
)
def test_the_agent_ends_in_time_while_a_call_hangs_that_is_still_waited_for(
    site: Site, start: Callable[..., Watched], changes: Mapping[str, int], gpu: str
) -> None:
    site.configure(gpu={"timeout": "60s"})
    site.node.change(changes)
    watched = start(site)
    calls(site, gpu)
    watched.page()
    assert len(watched.processes()) == 1
    watched.ends()


def test_an_agent_that_is_killed_leaves_no_process_though_a_call_hangs(
    site: Site, start: Callable[..., Watched]
) -> None:
    site.configure(gpu={"timeout": "60s"})
    site.node.change({"gpu.3.hang_ms.*": HANG_MS})
    watched = start(site)
    calls(site, "3")
    watched.ends(signal.SIGKILL)


def calls(site: Site, gpu: str) -> None:
    until(lambda: gpu in called(site), f"GPU {gpu} is asked")


def called(site: Site) -> set[str]:
    """Return which GPUs were asked; `-` is the driver as a whole."""
    return {line.split()[1] for line in site.calls.read_text().splitlines()} if site.calls.exists() else set()


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


def test_a_library_that_is_replaced_behind_its_link_is_used_without_a_restart(
    site: Site, start: Callable[..., Watched]
) -> None:
    watched = start(site)
    watched.is_well()
    before = watched.look()
    assert versions(before) == ["570.133.20"]
    site.link("580.82.07")
    shown: set[str] = set()

    def changed() -> bool:
        page = watched.look()
        shown.add(versions(page)[0])
        assert series_of(page, GPUS) == series_of(before, GPUS), "no series has a gap"
        return versions(page) == ["580.82.07"]

    until(changed, "the new version")
    assert shown <= {"570.133.20", "580.82.07"}
    watched.sees_changes(GPUS)
    assert watched.told() == []
    assert len(watched.processes()) == 1
    watched.ends()


def test_a_kernel_module_that_is_replaced_brings_a_new_process_and_no_gap(
    site: Site, start: Callable[..., Watched]
) -> None:
    watched = start(site)
    watched.is_well()
    before, processes = watched.look(), watched.processes()
    site.node.load_module("580.82.07")

    def changed() -> bool:
        page = watched.look()
        assert series_of(page, GPUS) == series_of(before, GPUS), "no series has a gap"
        return modules(page) == ["580.82.07"]

    until(changed, "the new version")
    watched.sees_changes(GPUS)
    replaced = watched.processes()
    assert (len(replaced), set(replaced) & set(processes)) == (1, set())
    site.link("580.82.07")
    until(lambda: versions(watched.look()) == ["580.82.07"], "the new library")
    watched.sees_changes(GPUS)
    assert watched.told() == []


def test_a_library_that_is_gone_is_used_on_and_found_again_by_the_next_process(
    site: Site, start: Callable[..., Watched]
) -> None:
    watched = start(site)
    watched.is_well()
    (process,) = watched.processes()
    site.library.unlink()
    watched.sees_changes(GPUS)
    assert watched.processes() == [process]
    os.kill(process, signal.SIGKILL)
    until(lambda: watched.page().get("gpu_nvml_up") == 0, "there is no library")
    page = watched.look()
    assert page["gpu_nvml_return_code"] == 12
    assert by_gpu(page, "gpu_up") == dict.fromkeys(GPUS, 0)
    site.link("570.133.20")
    watched.is_well()
    watched.sees_changes(GPUS)
    assert watched.told() == []


def test_a_driver_that_comes_late_is_found_without_a_restart(tmp_path: Path, start: Callable[..., Watched]) -> None:
    site = Site(tmp_path / "node")
    watched = start(site)
    watched.is_ready()
    page = watched.look()
    assert counts(page) == {"pci": 8, "proc": 0, "dev": 0}
    assert (page["gpu_nvml_up"], page["gpu_expected_count"]) == (0, 8)
    assert by_gpu(page, "gpu_up") == {}
    site.install()
    watched.is_well()
    page = watched.look()
    assert counts(page) == {"nvml": 8, "pci": 8, "proc": 8, "dev": 8}
    assert (page["gpu_nvml_up"], page["gpu_expected_count"]) == (1, 8)
    assert watched.told() == []


@pytest.mark.parametrize("file", ["version", "gpus/0004:00:00.0/information"])
def test_a_kernel_module_whose_files_hang_hides_no_gpu(site: Site, start: Callable[..., Watched], file: str) -> None:
    watched = start(site)
    watched.is_well()
    site.node.change({"gpu.3.return.*": 999})
    hangs(site.place.folder / "proc/driver/nvidia" / file)
    watched.sees_changes(set(GPUS) - {"3"})
    (process,) = watched.processes()
    os.kill(process, signal.SIGKILL)
    until(lambda: watched.processes() not in ([], [process]), "another process")
    until(lambda: down(watched.page()) == {"3": "unknown"}, "the others are read")
    watched.sees_changes(set(GPUS) - {"3"})
    watched.ends()


# Which GPUs there should be


def test_a_node_without_gpus_is_quiet(tmp_path: Path, start: Callable[..., Watched]) -> None:
    site = Site(tmp_path / "node", gpus=0)
    watched = start(site)
    watched.is_ready()
    page = watched.page()
    assert page['hpcwatch_collector_enabled{collector="gpu"}'] == 0
    assert 'hpcwatch_collector_up{collector="gpu"}' not in page
    assert [text for text in page if text.startswith("gpu_")] == []
    assert watched.processes() == []
    assert watched.problems() == []
    assert " WARNING " not in watched.agent.log
    watched.ends()


def test_a_node_whose_size_has_gpus_misses_them(tmp_path: Path, start: Callable[..., Watched]) -> None:
    site = Site(tmp_path / "node", gpus=0)
    site.configure(agent={"sku": "Standard_ND96asr_v4"})
    watched = start(site)
    watched.is_ready()
    page = watched.look()
    assert page["gpu_expected_count"] == 8
    assert page["gpu_nvml_up"] == 0
    assert max(counts(page).values()) == 0


def test_gpus_that_the_configuration_excludes_are_neither_called_nor_missed(
    site: Site, start: Callable[..., Watched]
) -> None:
    site.configure(gpu={"device_exclude": ["3", site.node.uuid(5)]}, agent={"sku": "ND96asr_v4"})
    watched = start(site)
    watched.is_well(set(GPUS) - {"3", "5"})
    page = watched.look()
    assert page["gpu_expected_count"] == 6
    assert counts(page) == dict.fromkeys(("nvml", "pci", "proc", "dev"), 6)
    assert series_of(page, {"3", "5"}) == set()
    assert "3" not in called(site)


def test_a_reload_excludes_gpus_and_takes_them_in_again(site: Site, start: Callable[..., Watched]) -> None:
    site.configure(gpu={"expected_count": 9})
    watched = start(site)
    watched.is_well()
    assert watched.look()["gpu_expected_count"] == 9
    site.configure(gpu={"device_exclude": ["3", site.node.uuid(5)]})
    watched.agent.send(signal.SIGHUP)
    watched.is_well(set(GPUS) - {"3", "5"})
    page = watched.look()
    assert page["gpu_expected_count"] == 6
    assert set(counts(page).values()) == {6}
    assert series_of(page, {"3", "5"}) == set()
    site.configure()
    watched.agent.send(signal.SIGHUP)
    watched.is_well()
    until(lambda: set(counts(watched.look()).values()) == {8}, "all are counted again")
    assert watched.look()["gpu_expected_count"] == 8
    assert watched.told() == [], "nothing was lost"
    watched.ends()


def test_a_configuration_that_is_wrong_changes_nothing(site: Site, start: Callable[..., Watched]) -> None:
    site.configure(gpu={"expected_count": 9})
    watched = start(site)
    watched.is_well()
    process = watched.processes()
    site.configure(gpu={"expected_count": "all"})
    watched.agent.send(signal.SIGHUP)
    until(lambda: watched.agent.value("hpcwatch_config_last_reload_successful") == 0)
    watched.sees_changes(GPUS)
    assert watched.processes() == process
    assert watched.look()["gpu_expected_count"] == 9


def test_two_agents_on_one_node_do_not_disturb_each_other(
    site: Site, tmp_path: Path, start: Callable[..., Watched]
) -> None:
    other = Site(tmp_path / "other")
    other.environment = site.environment
    other.link("570.133.20")
    roots = ("--sysfs", str(site.node.sys), "--procfs", str(site.node.proc), "--set", f"agent.devfs={site.node.dev}")
    first, second = start(site), start(other, *roots)
    second.site.node = site.node
    first.is_well()
    second.is_well()
    site.node.change({"gpu.3.hang_ms.*": HANG_MS})
    for watched in (first, second):
        watched.meets({"3": "timeout"})
        watched.sees_changes(set(GPUS) - {"3"})
    first.ends()
    second.sees_changes(set(GPUS) - {"3"})
    second.ends()


def versions(page: Mapping[str, float]) -> list[str]:
    return [labels_of(series)["driver_version"] for series in select(page, "gpu_driver_info")]


def modules(page: Mapping[str, float]) -> list[str]:
    return [labels_of(series)["kernel_module_version"] for series in select(page, "gpu_driver_info")]


def by_uuid(page: Mapping[str, float], name: str) -> dict[str, float]:
    return {labels_of(series)["uuid"]: value for series, value in select(page, name).items()}


def reason(series: str) -> str:
    return labels_of(series)["reason"]


def counts(page: Mapping[str, float]) -> dict[str, float]:
    return {labels_of(series)["source"]: value for series, value in select(page, "gpu_count").items()}
