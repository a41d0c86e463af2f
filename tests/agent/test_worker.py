"""Claims about collectors in a process of their own: what comes over, what a hang or a crash costs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from agent import child, log, remote
from agent.api import Device, Event, NotPresent, Severity
from agent.child import WorkerError
from agent.context import NodeContext
from agent.quarantine import AVOID_FIRST_S, AVOID_LAST_S
from agent.remote import CollectorError, Remote, Usage
from agent.sim.harness import MemoryState
from agent.snapshot import Batch, EvictedError
from agent.worker import Assignment
from tests.agent.kit import (
    DEVICE,
    ROOT,
    Devices,
    FolderOptions,
    answers,
    context,
    gone,
    hangs,
    recovers,
    state_of,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agent.api import Collector, Out

PATIENT_S = 20.0  # where nothing hangs, a busy machine must not make it look so
HASTY_S = 1.0


class TravellingClock:
    """Real time, moved forward on request; both ends of the pipe have it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class Lane:
    """A collector in a child process, and the folder with its devices."""

    def __init__(
        self,
        tmp_path: Path,
        timeout_s: float,
        collector: type[Collector] = Devices,
        limits_s: Mapping[str, float] | None = None,
    ) -> None:
        self.folder = tmp_path / "devices"
        self.folder.mkdir()
        self.clock = TravellingClock()
        ctx: dict[str, Any] = {**vars(context(tmp_path)), "clock": self.clock, "timeout_s": timeout_s}
        for key in ("avoid", "inventory", "state", "_made"):
            del ctx[key]
        self.assignment = Assignment(
            collector, FolderOptions(str(self.folder), limits_s or {}), ctx, partial(log.setup, "info", "text")
        )
        self.remote = Remote(self.assignment, NodeContext(**ctx, state=MemoryState()))
        self.pids: set[int] = set()
        self.out = Batch()

    def set(self, **devices: str) -> None:
        for name, text in devices.items():
            answers(self.folder / name, text)

    def hang(self, device: str) -> None:
        hangs(self.folder / device)

    def run(self) -> dict[str, int | float]:
        """Collect once; return the devices' values."""
        self.out = Batch()
        try:
            self.remote.collect(self.out)
        finally:
            if self.remote._child is not None:
                self.pids.add(self.remote._child.process.pid)
        return {
            dict(series.labels)["device"]: value
            for series, value in zip(self.out.series, self.out.values, strict=True)
            if series.metric is DEVICE
        }

    @property
    def pid(self) -> int:
        assert self.remote._child is not None
        return self.remote._child.pid

    @property
    def trial(self) -> int:
        assert self.remote._trial is not None
        return self.remote._trial.run.child.pid


class Starter(Devices):
    """Starts a program; the value is its process number. The device `stuck` then hangs with the interpreter's lock."""

    def _read(self, name: str, out: Out) -> None:
        self._program = subprocess.Popen(["sleep", "600"])  # noqa: S607 - whichever there is
        out.add(self._series[name], self._program.pid)
        if name == "stuck":
            answers(Path(self.options.folder) / "started", str(self._program.pid))
            ctypes.PyDLL(None).sleep(60)


class Stillborn(Devices):
    """Ends its process as soon as it is made."""

    def __init__(self, options: Any, ctx: Any) -> None:
        os._exit(7)


class Stubborn(Devices):
    """Reads what it should leave alone."""

    def collect(self, out: Out) -> None:
        for name in self._names:
            out.working_on(name)
            self._read(name, out)


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Lane]:
    yield from make_lane(tmp_path, PATIENT_S, Starter)


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    yield from make_lane(tmp_path, PATIENT_S)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Lane]:
    yield from make_lane(tmp_path, HASTY_S)


def make_lane(
    tmp_path: Path,
    timeout_s: float,
    collector: type[Collector] = Devices,
    limits_s: Mapping[str, float] | None = None,
) -> Iterator[Lane]:
    lane = Lane(tmp_path, timeout_s, collector, limits_s or {})
    yield lane
    lane.remote.close()
    quarantine = remote.usage.pop(Devices.name, Usage()).quarantine
    for process in (*quarantine._strays, *(case.process for case in quarantine._cases.values())):
        if process is not None:
            process.wait(10)
    for pid in lane.pids:
        until(lambda pid=pid: gone(pid), "every child ends")  # type: ignore[misc]


# What comes over


def test_values_come_over_exactly_with_their_types(lane: Lane) -> None:
    lane.set(a="18446744073709551615", b="-9223372036854775808", c="0.1", d="340282366920938463463374607431768211456")
    values = lane.run()
    assert values == {"a": 2**64 - 1, "b": -(2**63), "c": 0.1, "d": 2**128}
    assert [type(value) for value in values.values()] == [int, int, float, int]


def test_series_are_those_the_collector_declares_with_help_and_unit(lane: Lane) -> None:
    lane.set(**{'odd "name"\\ \u00e4': "7"})
    lane.run()
    series = lane.out.series[-1]
    assert series.metric is DEVICE
    assert series.prefix == 'kit_device_value{device="odd \\"name\\"\\\\ \u00e4"} '


def test_handles_stay_the_same_from_run_to_run_and_over_a_replaced_child(lane: Lane) -> None:
    lane.set(a="1", b="2")
    lane.run()
    before = [series for series in lane.out.series if series.metric is DEVICE]
    lane.run()
    os.kill(lane.pid, signal.SIGKILL)
    lane.run()
    after = [series for series in lane.out.series if series.metric is DEVICE]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_events_come_over_with_all_their_fields(lane: Lane) -> None:
    lane.set(a="event")
    lane.run()
    assert lane.out.events == [
        Event(
            kind="gpu_xid",
            severity=Severity.CRITICAL,
            component="gpu",
            message="fell off the bus \u2026 \U0001f525",
            device="a",
            labels={"xid": "79", "gpu": "0"},
            source="/dev/kmsg",
            time=1_800_000_000.125,
            key="kmsg-1234",
        )
    ]


def test_found_and_failures_come_over(lane: Lane) -> None:
    lane.set(a="1", b="part")
    assert lane.run() == {"a": 1}
    assert lane.remote.found() == "2 devices"
    assert lane.out.failures == [("b", "it broke")]


def test_one_child_serves_all_runs_and_opens_again_when_asked(lane: Lane) -> None:
    lane.set(a="1")
    lane.run()
    first = lane.pid
    lane.set(b="2")
    assert lane.run() == {"a": 1}
    lane.remote.open()
    assert lane.run() == {"a": 1, "b": 2}
    assert lane.pid == first


def test_absent_hardware_is_absent_here_too(lane: Lane) -> None:
    with pytest.raises(NotPresent, match="no device in"):
        lane.run()


def test_exception_in_the_child_arrives_with_its_text_and_the_child_goes_on(lane: Lane) -> None:
    lane.set(a="1")
    lane.run()
    first = lane.pid
    lane.set(a="raise")
    with pytest.raises(CollectorError, match="a: Input/output error"):
        lane.run()
    lane.set(a="4", b="5")
    assert lane.run() == {"a": 4, "b": 5}, "opened again after the failure"
    assert lane.pid == first


def test_exit_of_a_library_in_the_child_is_a_failure_of_the_collector(lane: Lane) -> None:
    lane.set(a="exit")
    with pytest.raises(CollectorError, match="SystemExit: 3"):
        lane.run()
    lane.set(a="1")
    assert lane.run() == {"a": 1}


def test_run_that_fails_at_its_very_end_confuses_no_later_one(lane: Lane) -> None:
    lane.set(a="1")
    lane.run()
    first = lane.pid
    lane.set(a="2", b="3", c="lost")
    lane.remote.open()
    with pytest.raises(CollectorError, match="they were here a moment ago"):
        lane.run()
    lane.set(a="7", c="4")
    assert lane.run() == {"a": 7, "b": 3, "c": 4}
    assert lane.pid == first


def test_library_that_prints_or_reads_standard_input_breaks_nothing(
    lane: Lane, capfd: pytest.CaptureFixture[str]
) -> None:
    lane.set(a="chatter", b="2")
    assert lane.run() == {"a": 0, "b": 2}
    assert lane.run() == {"a": 0, "b": 2}
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "a library that prints" in printed.err


def test_log_of_the_child_goes_to_standard_error(lane: Lane, capfd: pytest.CaptureFixture[str]) -> None:
    lane.set(a="log")
    lane.run()
    printed = {"out": "", "err": ""}

    def spoken() -> bool:  # a thread of the child writes it, perhaps after the run's answer
        for stream, text in capfd.readouterr()._asdict().items():
            printed[stream] += text
        return "WARNING kit: spoken in the child" in printed["err"]

    until(spoken, "the child's line on standard error")
    assert printed["out"] == ""


def test_frames_of_megabytes_come_over_whole(lane: Lane) -> None:
    lane.set(a="many-first")
    values = lane.run()
    assert len(values) == 19_998
    assert values["-first-19997-" + "x" * 100] == 19_997


def test_series_that_went_away_are_forgotten_by_both_sides(lane: Lane) -> None:
    lane.set(a="many-first")
    lane.run()
    lane.set(a="many-second")
    lane.run()
    lane.set(a="3")
    lane.run()
    assert lane.run() == {"a": 3}
    assert lane.remote._child is not None
    assert len(lane.remote._child.series) < 10


# Crashes


def test_child_that_somebody_killed_is_replaced_within_the_run(lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    lane.set(a="1")
    lane.run()
    first = lane.pid
    os.kill(first, signal.SIGKILL)
    assert lane.run() == {"a": 1}
    assert lane.pid != first
    assert gone(first)
    told = f"process {first}: its process ended: killed by signal 9 (Killed); going on in a new one"
    assert caplog.messages == [told]
    assert lane.remote._usage.restarts == 1


def test_child_that_ends_as_soon_as_it_begins_fails_the_collector(tmp_path: Path) -> None:
    for lane in make_lane(tmp_path, PATIENT_S, Stillborn):
        lane.set(a="1")
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"its process ended: exit status 7$"):
                lane.run()
        assert lane.remote._usage.restarts == 4, "one more is tried in each run"


@pytest.mark.parametrize("how", ["abort", "leave", "trap"])
def test_device_that_the_child_ends_on_costs_only_itself(
    lane: Lane, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    lane.set(a=how, b="2")
    assert lane.run() == {"b": 2}
    assert lane.out.failures == [("a", "avoided: crash")]
    (told,) = caplog.messages
    assert told.startswith("a: its process ended: ")
    assert "is replaced by one that leaves it alone" in told


def test_child_that_somebody_killed_while_it_read_is_no_fault_of_the_device(lane: Lane) -> None:
    lane.set(a="killed once", b="2")
    assert lane.run() == {"a": 0, "b": 2}


def test_device_on_which_children_are_killed_again_and_again_is_left_alone(lane: Lane) -> None:
    lane.set(a="killed", b="2")
    assert lane.run() == {"b": 2}
    assert lane.out.failures == [("a", "avoided: crash")]
    assert lane.remote._usage.restarts == 2


def test_collector_that_cannot_be_sent_is_a_failure_and_leaves_no_process(tmp_path: Path) -> None:
    class Local(Devices):
        """Not importable anywhere."""

    lane = Lane(tmp_path, PATIENT_S, Local)
    before = children()
    with pytest.raises(Exception, match="Local"):
        lane.run()
    assert children() == before


def test_collector_that_the_child_cannot_import_is_told_the_same_way_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ghost = type("Ghost", (Devices,), {"__module__": "kit_ghost"})
    module = ModuleType("kit_ghost")
    module.Ghost = ghost  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kit_ghost", module)
    lane = Lane(tmp_path, PATIENT_S, ghost)
    for _ in range(3):
        with pytest.raises(CollectorError, match="ModuleNotFoundError: No module named 'kit_ghost'"):
            lane.run()
    assert len(lane.pids) == 1, "no new process each time"
    lane.remote.close()


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_interrupts_are_the_parents_to_handle(lane: Lane) -> None:
    lane.set(a="1")
    lane.run()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(lane.pid, number)
        assert lane.run() == {"a": 1}


def test_run_refused_halfway_is_never_taken_for_the_next_ones_answer(lane: Lane) -> None:
    lane.set(a="1", b="2")
    lane.run()
    evicted = Batch()
    evicted.evicted = True
    with pytest.raises(EvictedError):
        lane.remote.collect(evicted)
    lane.set(a="3", b="4")
    assert lane.run() == {"a": 3, "b": 4}


# Programs that a child starts


def started(lane: Lane) -> int:
    """Have the child start a program."""
    lane.set(a="")
    return int(lane.run()["a"])


def test_program_that_a_child_started_is_killed_with_it(starting: Lane) -> None:
    program = started(starting)
    assert not gone(program)
    starting.remote.close()
    until(lambda: gone(program), "the program ends with the child")


def test_program_is_killed_even_when_the_child_died_before_it(starting: Lane) -> None:
    program = started(starting)
    os.kill(starting.pid, signal.SIGKILL)
    starting.run()
    until(lambda: gone(program), "the program ends when the child's death is noticed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_program_does_not_inherit_that_the_child_outlives_signals(starting: Lane, number: signal.Signals) -> None:
    program = started(starting)
    os.kill(program, number)
    until(lambda: gone(program), "the program ends by the signal")


# Hangs


def test_device_that_hangs_costs_itself_and_the_others_are_there_in_the_same_run(
    hasty: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    hasty.set(a="1", c="3")
    hasty.hang("b")
    started_s = time.monotonic()
    assert hasty.run() == {"a": 1, "c": 3}
    assert time.monotonic() - started_s < 2 * HASTY_S + 1
    assert hasty.out.failures == [("b", "avoided: hang")]
    assert len(hasty.pids) == 1
    child = hasty.pid
    assert hasty.run() == {"a": 1, "c": 3}
    assert hasty.pid == child, "the replacement stays"
    (told,) = caplog.messages
    assert told.startswith("b: no answer within 1 s; process ")


def test_device_is_tried_beside_the_runs_which_go_on_meanwhile(hasty: Lane) -> None:
    hasty.set(a="1")
    hasty.hang("b")
    hasty.run()
    child = hasty.pid
    hasty.clock.ahead_s += AVOID_FIRST_S - 2
    hasty.run()
    assert hasty.remote._trial is None, "not before its time"
    hasty.clock.ahead_s += 2.1
    hasty.set(a="2")
    assert hasty.run() == {"a": 2}
    trial = hasty.trial
    until(lambda: hasty.run() == {"a": 2} and hasty.remote._trial is None, "the trial ends")
    assert gone(trial)
    assert hasty.pid == child, "the others' child was never disturbed"
    assert hasty.remote._quarantine.avoid == {"b": "hang"}


def test_device_that_answers_again_is_back_with_the_child_that_found_out(
    hasty: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    hasty.set(a="1")
    hasty.hang("b")
    hasty.run()
    child = hasty.pid
    hasty.set(b="event")
    hasty.clock.ahead_s += AVOID_FIRST_S + 0.1
    assert hasty.run() == {"a": 1}
    trial = hasty.trial
    events = []

    def is_back() -> bool:
        hasty.run()
        events.extend(hasty.out.events)
        return hasty.remote._trial is None

    until(is_back, "the trial ends")
    assert hasty.pid == trial
    assert gone(child)
    assert caplog.messages[-1] == "b: answers again"
    assert len(events) >= 2, "of the trial's run, and of the first one after it"
    hasty.set(b="3")
    assert hasty.run() == {"a": 1, "b": 3}


def test_what_is_remembered_during_a_trial_is_not_forgotten_for_it(hasty: Lane) -> None:
    hasty.set(b="1")
    hasty.hang("a")
    hasty.run()
    hasty.clock.ahead_s += AVOID_FIRST_S + 0.1
    hasty.run()
    trial = hasty.trial
    hasty.set(b="remember word")
    hasty.run()
    hasty.set(b="recall")
    recovers(hasty.folder / "a", "2")
    until(lambda: hasty.run() == {"a": 2, "b": len("word")}, "the device is back")
    assert hasty.pid != trial
    assert gone(trial)


def test_device_on_which_a_process_is_stuck_is_not_tried_before_that_is_gone(
    hasty: Lane, hold: Callable[[int], Unkillable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second reader would get stuck like the first, until no process may be started for anybody."""
    monkeypatch.setattr(child, "KILL_PATIENCE_S", 0.05)
    hasty.set(a="1")
    hasty.run()
    first = hasty.pid
    hasty.hang("b")
    hasty.remote.open()
    held = hold(first)
    assert hasty.run() == {"a": 1}
    assert hasty.remote._quarantine.stuck() == [first]
    successor = hasty.pid
    for _ in range(3):
        hasty.clock.ahead_s += AVOID_LAST_S + 1
        assert hasty.run() == {"a": 1}
        assert hasty.remote._trial is None
    assert hasty.pid == successor
    held.let_go()
    until(lambda: gone(first))
    hasty.set(b="2")
    until(lambda: hasty.run() == {"a": 1, "b": 2}, "it is tried when the stuck process is gone")


def test_device_stays_left_alone_over_a_reload(hasty: Lane) -> None:
    hasty.set(a="1")
    hasty.hang("b")
    hasty.run()
    hasty.remote.close()
    successor = Remote(hasty.assignment, hasty.remote.ctx)
    out = Batch()
    successor.collect(out)
    successor.close()
    assert out.failures == [("b", "avoided: hang")]
    assert hasty.remote._usage.restarts == 1


def test_devices_that_hang_take_no_more_of_one_run_than_its_budget(
    hasty: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HANG_BUDGET", 2)
    hasty.set(z="3")
    for device in "abcd":
        hasty.hang(device)
    with pytest.raises(WorkerError, match=r"took 3 s of one run"):
        hasty.run()
    assert hasty.run() == {"z": 3}
    assert set(hasty.remote._quarantine.avoid) == set("abcd")


def test_hang_that_no_device_can_be_blamed_for_fails_the_run_and_replaces_the_child(hasty: Lane) -> None:
    hasty.set(a="1")
    hasty.run()
    first = hasty.pid
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"no answer within 1 s$"):
        hasty.run()
    assert gone(first)
    assert hasty.run() == {"a": 1}


def test_devices_that_hang_at_once_cost_themselves_and_no_other(hasty: Lane) -> None:
    hasty.set(c="3")
    for device in ("a", "b", "d"):
        hasty.hang(device)
    assert hasty.run() == {"c": 3}
    assert hasty.out.failures == [(device, "avoided: hang") for device in ("a", "b", "d")]
    assert hasty.remote._usage.restarts == 3


def test_each_device_has_the_timeout_to_itself(hasty: Lane) -> None:
    """All together take longer than one may."""
    for name in "abcd":
        hasty.hang(name)
    with answering_late(hasty, dict.fromkeys("abcd", HASTY_S / 2)):
        started_s = time.monotonic()
        assert hasty.run() == dict.fromkeys("abcd", 1)
        assert time.monotonic() - started_s > HASTY_S
    assert hasty.remote._usage.restarts == 0


def test_device_that_is_known_to_need_longer_gets_it(tmp_path: Path) -> None:
    for lane in make_lane(tmp_path, HASTY_S, limits_s={"slow": PATIENT_S}):
        lane.set(a="7")
        lane.hang("slow")
        with answering_late(lane, {"slow": 2 * HASTY_S}):
            assert lane.run() == {"a": 7, "slow": 1}


@contextlib.contextmanager
def answering_late(lane: Lane, after_s: Mapping[str, float]) -> Iterator[None]:
    """Let each of these devices answer so long after it was asked, one after the other."""

    def answer() -> None:
        for name, seconds in after_s.items():
            with (lane.folder / name).open("w") as device:  # returns when it is asked
                threading.Event().wait(seconds)
                device.write("1")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield
    thread.join(PATIENT_S)
    assert not thread.is_alive()


def test_collector_that_hangs_on_what_it_should_avoid_fails_as_a_whole(tmp_path: Path) -> None:
    for lane in make_lane(tmp_path, HASTY_S, Stubborn):
        lane.hang("a")
        with pytest.raises(WorkerError, match="no answer within 1 s on a"):
            lane.run()
        assert lane.remote._usage.restarts == 2


# What a child leaves behind


def test_memory_of_a_child_outlives_it_where_no_disk_keeps_it(lane: Lane) -> None:
    lane.set(a="remember fourteen chars")
    lane.run()
    os.kill(lane.pid, signal.SIGKILL)
    lane.set(a="recall")
    assert lane.run() == {"a": 14}


def test_memory_of_a_child_is_kept_for_the_next_start_of_the_agent(lane: Lane) -> None:
    lane.set(a="remember seven")
    lane.run()
    assert lane.remote.ctx.state.load() == {"word": "seven"}
    lane.set(a="recall")
    successor = Remote(lane.assignment, lane.remote.ctx)
    out = Batch()
    successor.collect(out)
    successor.close()
    assert 5 in out.values


def test_names_of_devices_come_over(lane: Lane) -> None:
    lane.set(a="1", b="2")
    lane.run()
    assert lane.out.devices == [Device("kit", "a", uuid="uuid-a"), Device("kit", "b", uuid="uuid-b")]


# What is outdated, what is not there


def test_child_that_is_outdated_is_replaced_within_the_run(lane: Lane) -> None:
    lane.set(a="1")
    lane.run()
    first = lane.pid
    lane.set(a="outdated")
    with pytest.raises(WorkerError, match="another driver"):
        lane.run()
    assert lane.remote._usage.restarts == 2
    lane.set(a="outdated once")
    assert lane.run() == {"a": 0}
    lane.set(a="2")
    assert lane.run() == {"a": 2}
    assert gone(first)


def test_no_process_is_started_where_a_look_tells_that_there_is_nothing(lane: Lane) -> None:
    lane.folder.rmdir()
    lane.folder.write_text("")
    before = children()
    with pytest.raises(NotPresent, match="plainly nothing"):
        lane.remote.open()
    assert children() == before


def test_use_of_replaced_children_is_added_up(lane: Lane) -> None:
    lane.set(a="1")
    lane.run()
    first = lane.remote._usage.cpu_seconds
    assert first > 0
    assert (lane.remote._usage.resident_bytes or 0) > 1 << 20
    lane.remote.close()
    assert lane.remote._usage.resident_bytes is None
    lane.run()
    assert lane.remote._usage.cpu_seconds >= first + 0.001


# Stops at the tracee's exit (PTRACE_O_TRACEEXIT): from then on it is dying and not dead, until the tracer is gone.
TRACER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
SEIZE, TRACE_EXIT = 0x4206, 0x40
print(libc.ptrace(SEIZE, int(sys.argv[1]), None, TRACE_EXIT) and ctypes.get_errno(), flush=True)
sys.stdin.read()
"""


class Unkillable:
    """A child that a debugger holds as a driver would: SIGKILL does not end it before the debugger lets go."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._tracer = subprocess.Popen(
            [sys.executable, "-c", TRACER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._tracer.stdout is not None
        number = int(self._tracer.stdout.readline())
        if number:
            self.let_go()
            pytest.skip(f"this machine lets no process be traced: {os.strerror(number)}")

    def let_go(self) -> None:
        if self._tracer.returncode is None:
            self._tracer.communicate(timeout=10)


@pytest.fixture
def hold() -> Iterator[Callable[[int], Unkillable]]:
    held: list[Unkillable] = []

    def take(pid: int) -> Unkillable:
        held.append(Unkillable(pid))
        return held[-1]

    yield take
    for one in held:
        one.let_go()


def test_children_that_cannot_be_killed_are_abandoned_and_two_of_them_are_the_limit(
    lane: Lane, hold: Callable[[int], Unkillable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "KILL_PATIENCE_S", 0.05)
    lane.set(a="1")
    held = {}
    for _ in range(2):
        lane.run()
        pid = lane.pid
        held[pid] = hold(pid)
        lane.remote.close()
        assert not gone(pid), "the test holds it"
    first, second = held
    message = rf"^processes {first}, {second} hang in the kernel and cannot be killed; no more are started"
    with pytest.raises(WorkerError, match=message):
        lane.run()
    successor = Remote(lane.assignment, lane.remote.ctx)
    with pytest.raises(WorkerError, match=message):
        successor.collect(Batch())
    held[first].let_go()
    until(lambda: gone(first))
    assert lane.run() == {"a": 1}, "one of them died at last"


def test_replaced_children_leave_no_descriptor_behind(lane: Lane) -> None:
    lane.set(a="1")
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names alone
    lane.run()
    lane.remote.close()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


# The end of the parent

PARENT = """
import sys
from pathlib import Path
from agent import log
from agent.child import WorkerError
from agent.context import NodeContext
from agent.snapshot import Batch
from agent.remote import Remote
from agent.sim.harness import MemoryState
from agent.worker import Assignment
from tests.agent import kit, test_worker
from tests.agent.kit import FolderOptions, context

class Talkative(Batch):
    def working_on(self, device, limit_s=None):
        if device:
            print("working on", device, flush=True)

ctx = {**vars(context(Path("/nonexistent"))), "timeout_s": 60.0}
for key in ("avoid", "inventory", "state", "_made"):
    del ctx[key]
collector = test_worker.Starter if sys.argv[2:] else kit.Devices
assignment = Assignment(collector, FolderOptions(sys.argv[1]), ctx, log.setup)
remote = Remote(assignment, NodeContext(**ctx, state=MemoryState()))
print(remote._running_child(Batch()).process.pid, flush=True)
remote.collect(Talkative())
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("content", ["1", "a FIFO", "sleep in C"])
def test_child_ends_with_its_parent_even_when_that_is_killed_and_it_hangs(tmp_path: Path, content: str) -> None:
    device = tmp_path / "a"
    answers(device, content)
    if content == "a FIFO":
        hangs(device)
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "working on a\n"
        if content == "1":
            assert parent.stdout.readline() == "done\n"
        until(lambda: state_of(child) == "S", "its main thread sleeps in the kernel")
        parent.kill()
    until(lambda: gone(child), "the child ends", timeout_s=5)


def test_child_that_hangs_with_the_interpreters_lock_ends_with_a_killed_parent_and_so_does_its_program(
    tmp_path: Path,
) -> None:
    answers(tmp_path / "stuck", "")
    command = [sys.executable, "-c", PARENT, str(tmp_path), "Starter"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        until((tmp_path / "started").exists, "the program runs")
        program = int((tmp_path / "started").read_text())
        until(lambda: state_of(child) == "S", "its main thread sleeps in the kernel")
        assert not gone(program)
        parent.kill()
    until(lambda: gone(child), "the child ends", timeout_s=5)
    until(lambda: gone(program), "the program ends", timeout_s=5)
