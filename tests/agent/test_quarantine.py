"""Claims about the quarantine: how long a device is left alone, and what keeps it there."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from agent.quarantine import AVOID_FIRST_S, AVOID_LAST_S, FORGIVEN_AFTER_S, Quarantine

if TYPE_CHECKING:
    from collections.abc import Iterator

Process = subprocess.Popen[bytes]


@pytest.fixture
def process() -> Iterator[Process]:
    alive = subprocess.Popen(["sleep", "600"])  # noqa: S607 - whichever there is
    yield alive
    alive.kill()
    alive.wait()


def test_pause_grows_to_a_quarter_of_an_hour() -> None:
    quarantine = Quarantine()
    now_s, pauses = 0.0, []
    for _ in range(8):
        quarantine.confine("GPU 3", "hang", now_s)
        begin_s = now_s
        while not quarantine.due(now_s):
            now_s += 5
        pauses.append(now_s - begin_s)
    assert pauses == [30, 60, 120, 240, 480, 900, 900, AVOID_LAST_S]


def test_device_stays_confined_until_it_is_released_however_long_that_takes() -> None:
    quarantine = Quarantine()
    quarantine.confine("GPU 3", "hang", 0.0)
    assert quarantine.due(1e9) == "GPU 3"
    assert quarantine.avoid == {"GPU 3": "hang"}
    quarantine.release("GPU 3", 1e9)
    assert quarantine.avoid == {}
    assert quarantine.due(2e9) == ""


def test_device_that_was_well_for_an_hour_begins_anew_and_one_that_was_not_goes_on() -> None:
    for well_s, pause_s in ((FORGIVEN_AFTER_S, AVOID_FIRST_S), (FORGIVEN_AFTER_S - 1, 2 * AVOID_FIRST_S)):
        quarantine = Quarantine()
        quarantine.confine("GPU 3", "hang", 0.0)
        quarantine.release("GPU 3", 100.0)
        quarantine.confine("GPU 3", "hang", 100.0 + well_s)
        assert quarantine.due(100.0 + well_s + pause_s - 1) == ""
        assert quarantine.due(100.0 + well_s + pause_s) == "GPU 3"


def test_only_what_differs_from_before_is_news() -> None:
    quarantine = Quarantine()
    told = [quarantine.confine("GPU 3", what, at_s) for at_s, what in enumerate(("hang", "hang", "crash", "crash"))]
    assert told == [True, False, True, False]


def test_device_whose_process_is_stuck_is_not_due(process: Process) -> None:
    quarantine = Quarantine()
    quarantine.confine("GPU 3", "hang", 0.0)
    quarantine.abandon(process, "GPU 3")
    assert quarantine.due(1e9) == ""
    assert quarantine.stuck() == [process.pid]
    quarantine.confine("GPU 3", "hang", 1.0)
    assert quarantine.due(1e9) == "", "nor when it is confined anew meanwhile"
    process.kill()
    process.wait()
    assert quarantine.due(1e9) == "GPU 3"
    assert quarantine.stuck() == []


def test_process_that_is_stuck_on_no_device_counts_as_well(process: Process) -> None:
    quarantine = Quarantine()
    quarantine.abandon(process, "")
    assert quarantine.stuck() == [process.pid]
    process.kill()
    process.wait()
    assert quarantine.stuck() == []
