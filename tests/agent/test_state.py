"""Small memories: whole or not at all, and no trouble with a disk stops the agent."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.state import LARGEST_BYTES, FileState, StateDir


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_saved_is_loaded_by_the_next_agent(tmp_path: Path) -> None:
    content = {"positions": [1, 2.5, None, True], "name": "ü\udc80\n", "big": 2**64}
    StateDir(tmp_path / "new" / "dir").file("collector-host").save(content)
    assert StateDir(tmp_path / "new" / "dir").file("collector-host").load() == content


def test_nothing_saved_is_empty_and_no_complaint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert StateDir(tmp_path / "missing").file("events").load() == {}
    assert caplog.records == []


def test_memories_do_not_mix(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    directory.file("a").save({"x": 1})
    directory.file("a.b").save({"x": 2})
    assert (directory.file("a").load(), directory.file("a.b").load()) == ({"x": 1}, {"x": 2})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"version":1,"content":{"a":',
        b"\xff\xfe",
        b"[]",
        b"1",
        b'"text"',
        b"null",
        b"{}",
        b'{"version":1}',
        b'{"version":1,"content":[]}',
        b'{"content":{}}',
        b"[" * 200_000,
        b" " * (LARGEST_BYTES + 1),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_corrupt_file_is_set_aside_with_a_warning(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.json"
    path.write_bytes(text)
    state = StateDir(tmp_path).file("events")
    assert state.load() == {}
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    assert "set aside as events.corrupt" in warning
    assert (tmp_path / "events.corrupt").read_bytes() == text
    state.save({"a": 1})
    assert state.load() == {"a": 1}


def test_file_of_another_version_is_set_aside_and_not_understood(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events.json").write_text('{"version":2,"content":{"next_id":5}}')
    assert StateDir(tmp_path).file("events").load() == {}
    assert "version 2, this agent writes 1" in warnings_of(caplog)[0]
    assert (tmp_path / "events.corrupt").exists()


def test_directory_that_cannot_be_written_is_told_once_and_lived_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    directory = StateDir(tmp_path / "file" / "state")
    for name in ("events", "presence", "collector-host"):
        assert directory.file(name).load() == {}
    for _ in range(3):
        directory.file("events").save({"a": 1})
        directory.file("presence").save({"a": 1})
    (warning,) = warnings_of(caplog)
    assert str(directory.path) in warning
    assert "Not a directory" in warning
    assert directory.problem


def test_file_that_cannot_be_read_is_told_and_lived_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.json").mkdir()
    directory = StateDir(tmp_path)
    assert directory.file("events").load() == {}
    directory.file("events").save({"a": 1})
    (warning,) = warnings_of(caplog)
    assert "events.json: Is a directory" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["events.json"]


def test_directory_that_can_be_written_again_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    obstacle = tmp_path / "state"
    obstacle.write_text("")
    directory = StateDir(obstacle)
    directory.file("events").save({"a": 1})
    assert directory.problem
    obstacle.unlink()
    directory.file("events").save({"a": 2})
    directory.file("events").save({"a": 3})
    assert not directory.problem
    assert directory.file("events").load() == {"a": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    state = FileState(StateDir(tmp_path), "events")
    sizes = (10, 200_000)
    state.save({"a": "x" * sizes[0]})
    done = threading.Event()

    def write() -> None:
        for turn in range(60):
            state.save({"a": "x" * sizes[turn % 2]})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(len(json.loads((tmp_path / "events.json").read_bytes())["content"]["a"]))
    writer.join()
    assert seen <= set(sizes)
    assert [path.name for path in tmp_path.iterdir()] == ["events.json"]


def test_content_is_on_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(descriptor: int) -> None:
        steps.append("sync")
        fsync(descriptor)

    def noting_replace(path: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    StateDir(tmp_path).file("events").save({"a": 1})
    assert steps == ["sync", "rename"]


def test_disk_that_fails_in_the_middle_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateDir(tmp_path).file("events")
    state.save({"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    state.save({"a": 2})
    assert state.load() == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["events.json"]
    assert "No space left on device" in warnings_of(caplog)[0]


def test_rest_of_a_killed_agent_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / f"events.{os.getpid()}.new").write_bytes(b"half a docum")
    (tmp_path / "events.1.new").write_bytes(b"half a docum")
    state = StateDir(tmp_path).file("events")
    assert state.load() == {}
    state.save({"a": 1})
    assert state.load() == {"a": 1}


@pytest.mark.parametrize("content", [{"a": {1, 2}}, {"a": Path("x")}, {"a": object()}])
def test_what_is_no_json_is_refused_and_what_was_there_stays(content: dict[str, Any], tmp_path: Path) -> None:
    state = StateDir(tmp_path).file("events")
    state.save({"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        state.save(content)
    assert state.load() == {"a": 1}


def test_state_is_not_for_everybody(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.umask(0); from pathlib import Path; from agent.state import StateDir;"
        "StateDir(Path(sys.argv[1])).file('events').save({})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "state")], timeout=30, check=True)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "state" / "events.json").stat().st_mode & 0o777 == 0o640
