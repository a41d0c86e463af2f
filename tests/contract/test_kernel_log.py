"""A whole agent that reads a kernel log: what it counts and tells, over restarts, storms and logs that break."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent.kit import hangs, until
from tests.collectors.gpunode import labels_of
from tests.contract.watched import GPUS, UPTIME_S, Site, Watched, select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SOON_S = 2.0
ERROR, USER = 3, 8  # level of the kernel; facility of user space
HASTY: Mapping[str, object] = {"interval": "100ms"}
STORM = 100_000


class Log:
    """The kernel log of a site: a file, or a FIFO that somebody holds open for ever."""

    def __init__(self, site: Site, kind: str) -> None:
        self.path = site.kmsg
        self._sequence = 0
        self._holder = -1
        if kind == "fifo":
            self.path.unlink()
            os.mkfifo(self.path)
            self._holder = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def write(self, *texts: str, priority: int = ERROR) -> None:
        """Have the kernel write these texts."""
        descriptor = self._holder if self._holder >= 0 else os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, self.records(*texts, priority=priority))
        if self._holder < 0:
            os.close(descriptor)

    def records(self, *texts: str, priority: int = ERROR, ago_s: float = 0.0) -> bytes:
        """Return the next records."""
        at_us = round((UPTIME_S - ago_s) * 1e6)
        first = self._sequence
        self._sequence += len(texts)
        return "".join(f"{priority},{first + n},{at_us + n},-;{text}\n" for n, text in enumerate(texts)).encode()

    def close(self) -> None:
        """Let go of the FIFO."""
        if self._holder >= 0:
            os.close(self._holder)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path / "node")
    made.configure(gpu={"enabled": False}, kernel=HASTY)
    return made


@pytest.fixture
def make_log(site: Site) -> Iterator[Callable[[str], Log]]:
    made: list[Log] = []

    def make(kind: str = "file") -> Log:
        made.append(Log(site, kind))
        return made[-1]

    yield make
    for log in made:
        log.close()


@pytest.fixture
def start() -> Iterator[Callable[[Site], Watched]]:
    started: list[Watched] = []

    def begin(site: Site) -> Watched:
        started.append(Watched(site))
        return started[-1]

    yield begin
    for watched in started:
        watched.agent.end()


def xid(gpu: int, code: int, site: Site) -> str:
    return f"NVRM: Xid (PCI:{site.node.address(gpu).removesuffix('.0')}): {code}, pid=4711, name=python, something"


def storm(code: int, count: int, site: Site) -> list[str]:
    """Return so many XIDs, on all GPUs by turns."""
    return [xid(gpu, code, site) for gpu in range(8)] * (count // 8)


def xids(watched: Watched) -> dict[tuple[str, str, str], float]:
    """Return the XIDs that were counted, by `gpu`, `uuid` and `xid`."""
    counted = {}
    for series, value in select(watched.page(), "gpu_xid_errors_total").items():
        labels = labels_of(series)
        if value:
            counted[labels["gpu"], labels["uuid"], labels["xid"]] = value
    return counted


def totals(watched: Watched) -> dict[str, float]:
    """Return how often each XID was counted, on whatever GPU."""
    counted: dict[str, float] = {}
    for (_, _, code), value in xids(watched).items():
        counted[code] = counted.get(code, 0) + value
    return counted


def counts(watched: Watched, **expected: float) -> None:
    """Wait until these XIDs and no others were counted."""
    wanted = {code.removeprefix("xid_"): count for code, count in expected.items()}
    until(lambda: totals(watched) == wanted, f"{wanted} is counted, of {totals(watched)}")


def told(watched: Watched) -> list[dict[str, Any]]:
    return watched.events("gpu_xid")


def records(watched: Watched) -> dict[str, float]:
    page = watched.page()
    return {labels_of(series)["result"]: value for series, value in select(page, "kernel_log_records_total").items()}


# From a record to counter and event


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_a_record_is_a_counter_and_an_event_within_two_seconds(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched], kind: str
) -> None:
    site.configure(gpu={"enabled": False}, kernel={})  # at the pace that it has by default
    site.node.load_module()
    log = make_log(kind)
    watched = start(site)
    watched.is_ready()
    for count in (1, 2):
        log.write("unrelated", xid(2, 79, site))
        written_s = time.monotonic()
        until(lambda count=count: len(told(watched)) == count, "the event")  # type: ignore[misc]
        assert xids(watched) == {("2", site.node.uuid(2), "79"): count}
        assert time.monotonic() - written_s < SOON_S
    labels = {"xid": "79", "gpu": "2", "uuid": site.node.uuid(2)}
    event = told(watched)[0]
    assert labels.items() <= event["labels"].items()
    assert (event["severity"], event["component"], event["device"]) == ("critical", "gpu", "2")
    assert len({event["key"] for event in told(watched)}) == 2
    watched.ends()


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_what_user_space_wrote_is_no_fact(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched], kind: str
) -> None:
    log = make_log(kind)
    watched = start(site)
    watched.is_ready()
    for facility in (1, 3, 16, 23):
        log.write(xid(1, 48, site), "Out of memory: Killed process 1 (x)", priority=USER * facility + ERROR)
    log.write(xid(1, 31, site))
    counts(watched, xid_31=1)
    assert records(watched) == {"matched": 1, "unmatched": 0, "ignored": 8, "error": 0}
    assert len(watched.events("gpu_xid", "kernel_oom_kill")) == 1


def test_what_user_space_writes_into_the_real_log_is_no_fact(site: Site, start: Callable[[Site], Watched]) -> None:
    try:
        descriptor = os.open("/dev/kmsg", os.O_WRONLY | os.O_CLOEXEC)
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        pytest.skip(f"needs root and the kernel log: /dev/kmsg: {error.strerror}")
    site.configure(gpu={"enabled": False}, kernel=HASTY, agent={"kmsg": "/dev/kmsg"})
    watched = start(site)
    until(lambda: watched.agent.up("kernel") == 1, "it reads")
    before, facts = records(watched)["ignored"], (xids(watched), len(told(watched)))
    # A bus that no machine has: whoever else reads this log must not take it for a fault of a GPU.
    os.write(descriptor, b"<3>NVRM: Xid (PCI:ffff:ff:1f): 13, pid=0, name=none, written by a test, to be ignored\n")
    os.close(descriptor)
    until(lambda: records(watched)["ignored"] > before, "it is read")
    assert (xids(watched), len(told(watched))) == facts


@pytest.mark.parametrize("source", ["NVML", "the kernel module"])
def test_an_address_is_the_gpu_that_is_there(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched], source: str
) -> None:
    log = make_log("file")
    if source == "NVML":
        site.link("570.133.20")
        site.configure(kernel=HASTY)
    else:
        site.node.load_module()
    watched = start(site)
    watched.is_ready()
    for gpu in range(8):
        log.write(xid(gpu, 31, site))
    expected = {(str(gpu), site.node.uuid(gpu), "31"): 1 for gpu in range(8)}
    until(lambda: xids(watched) == expected, "each is counted under its name")
    log.write(xid(5, 48, site))
    until(lambda: [event["device"] for event in told(watched) if event["labels"]["xid"] == "48"] == ["5"])


def test_a_lost_gpu_keeps_its_name_in_the_log_and_tells_both_facts(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched]
) -> None:
    log = make_log("file")
    site.install()
    site.configure(kernel=HASTY)
    watched = start(site)
    watched.is_well()
    site.node.change({"gpu.3.absent": 1})
    log.write(xid(3, 79, site), f"NVRM: GPU {site.node.address(3)}: GPU has fallen off the bus.")
    watched.meets({"3": "gpu_lost"})
    until(lambda: xids(watched) == {("3", site.node.uuid(3), "79"): 1}, "one XID 79")
    until(lambda: len(watched.events("gpu_xid", "gpu_lost")) == 2, "both are told")
    assert {event["labels"]["uuid"] for event in watched.events("gpu_xid", "gpu_lost")} == {site.node.uuid(3)}
    watched.sees_changes(set(GPUS) - {"3"})


def test_a_kernel_module_that_hangs_costs_names_and_no_facts(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched]
) -> None:
    log = make_log("file")
    site.node.load_module()
    hangs(site.place.folder / f"proc/driver/nvidia/gpus/{site.node.address(3)}/information")
    watched = start(site)
    log.write(xid(2, 31, site), xid(3, 79, site))
    counts(watched, xid_31=1, xid_79=1)
    assert ("2", site.node.uuid(2), "31") in xids(watched)
    watched.ends()


# Over restarts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_a_restart_neither_loses_nor_counts_again(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched], kind: str, number: signal.Signals
) -> None:
    log = make_log(kind)
    kept = site.place.folder / "state/collector-kernel.json"
    keys: set[str] = set()
    for before in (0, 3, 6):
        log.write(xid(0, 31, site), "unrelated", xid(1, 31, site))  # while the agent is away
        watched = start(site)
        counts(watched, xid_31=before + 2)
        log.write(xid(2, 31, site), "unrelated")
        counts(watched, xid_31=before + 3)
        keys |= {event["key"] for event in told(watched)}
        assert len(keys) == before + 3
        if kind == "fifo":  # which gives nothing twice: what was not kept yet is lost with a kill
            contains(kept, f'"matched":{before + 3}')
        watched.ends(number)


def contains(path: Path, text: str) -> None:
    until(lambda: path.exists() and text in path.read_text(), f"{path} has {text}")


def test_an_agent_that_is_killed_in_the_middle_of_a_storm_counts_each_record_once(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched]
) -> None:
    log = make_log("file")
    log.write("the first", *storm(31, 20_000, site))
    for count in (1, 5_000, 15_000):
        watched = start(site)
        counts_at_least(watched, count)
        log.write(*storm(63, 1_000, site))
        watched.ends(signal.SIGKILL)
    counts(start(site), xid_31=20_000, xid_63=3_000)


def counts_at_least(watched: Watched, count: int) -> None:
    until(lambda: totals(watched).get("31", 0) >= count, f"{count} are counted")


def test_another_boot_begins_at_zero(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched]
) -> None:
    log = make_log("file")
    log.write(xid(0, 31, site))
    watched = start(site)
    counts(watched, xid_31=1)
    watched.ends()
    (site.node.proc / "sys/kernel/random/boot_id").write_text("7d9b6f6e-0000-4000-8000-000000000002\n")
    log.path.write_bytes(Log(site, "file").records(xid(0, 63, site)))
    watched = start(site)
    counts(watched, xid_63=1)


# Storms, and logs that break


def test_a_storm_does_not_stop_the_page_nor_the_gpus(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched]
) -> None:
    log = make_log("file")
    site.install()
    site.configure(kernel=HASTY)
    watched = start(site)
    watched.is_well()
    log.write(*storm(31, STORM, site))
    while totals(watched).get("31") != STORM:
        watched.sees_changes(GPUS)  # which fails when a page comes late
    assert len(told(watched)) <= 100, "few stand for many"
    log.write(xid(0, 48, site))
    until(lambda: totals(watched).get("48") == 1, "what comes after it is counted", SOON_S)
    assert records(watched) == {"matched": STORM + 1, "unmatched": 0, "ignored": 0, "error": 0}


def test_a_log_that_is_replaced_or_truncated_goes_on(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched]
) -> None:
    log = make_log("file")
    log.write(xid(0, 31, site), xid(1, 31, site))
    watched = start(site)
    counts(watched, xid_31=2)
    beside = log.path.with_name("beside")
    beside.write_bytes(log.path.read_bytes() + log.records(xid(2, 31, site)))
    beside.replace(log.path)
    counts(watched, xid_31=3)
    os.truncate(log.path, 0)
    log.write(xid(3, 31, site))
    counts(watched, xid_31=4)
    log.path.unlink()
    assert totals(watched) == {"31": 4}
    log.path.write_bytes(log.records(xid(4, 31, site)))
    counts(watched, xid_31=5)
    assert watched.problems() == []


def test_a_log_that_cannot_be_read_is_told_and_read_when_it_can(site: Site, start: Callable[[Site], Watched]) -> None:
    site.kmsg.unlink()
    site.kmsg.mkdir()
    watched = start(site)
    watched.is_ready()
    until(lambda: watched.agent.up("kernel") == 0, "the collector is down")
    assert len(watched.problems()) == 1, "told once"
    assert str(site.kmsg) in watched.problems()[0]
    site.kmsg.rmdir()
    site.kmsg.write_bytes(f"3,0,1,-;{xid(0, 31, site)}\n".encode())
    counts(watched, xid_31=1)
    assert watched.agent.up("kernel") == 1


def test_a_log_that_may_not_be_read_says_what_is_needed(site: Site, start: Callable[[Site], Watched]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    site.kmsg.chmod(0)
    watched = start(site)
    until(lambda: watched.agent.up("kernel") == 0, "the collector is down")
    assert "CAP_SYSLOG" in watched.problems()[0]


def test_a_log_that_is_not_there_is_quiet(site: Site, start: Callable[[Site], Watched]) -> None:
    site.kmsg.unlink()
    site.configure(gpu={"enabled": False}, kernel={**HASTY, "enabled": "auto"})
    watched = start(site)
    watched.is_ready()
    page = watched.page()
    assert page['hpcwatch_collector_enabled{collector="kernel"}'] == 0
    assert 'hpcwatch_collector_up{collector="kernel"}' not in page
    assert watched.problems() == []


def test_where_nothing_can_be_kept_all_is_counted_and_each_start_reads_anew(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched]
) -> None:
    (site.place.folder / "state").write_text("a file where the directory should be")
    log = make_log("file")
    log.write(xid(0, 31, site))
    for count in (2, 3):
        watched = start(site)
        watched.is_ready()
        log.write(xid(1, 31, site))
        counts(watched, xid_31=count)
        assert watched.agent.log.count("cannot keep state") == 1
        watched.ends()


def test_the_clock_of_a_record_is_the_clock_of_its_event(
    site: Site, make_log: Callable[[str], Log], start: Callable[[Site], Watched]
) -> None:
    log = make_log("file")
    log.path.write_bytes(log.records(xid(0, 31, site), ago_s=1000))
    watched = start(site)
    until(lambda: len(told(watched)) == 1)
    (at_s,) = select(watched.page(), "gpu_xid_last_timestamp_seconds").values()
    assert 990 < time.time() - at_s < 1010
