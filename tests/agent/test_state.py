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

from agent import state as state_module
from agent.state import LARGEST_BYTES, FileState, StateDir
from tests.agent.kit import until


class PromptDir(StateDir):
    """A directory that has written when `save` returns."""

    def put(self, path: Path, data: bytes) -> None:
        super().put(path, data)
        self.flush(20)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_saved_is_loaded_by_the_next_agent(tmp_path: Path) -> None:
    content = {"positions": [1, 2.5, None, True], "name": "ü\udc80\n", "big": 2**64}
    PromptDir(tmp_path / "new" / "dir").file("collector-host").save(content)
    assert PromptDir(tmp_path / "new" / "dir").file("collector-host").load() == content


def test_nothing_saved_is_empty_and_no_complaint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert PromptDir(tmp_path / "missing").file("events").load() == {}
    assert caplog.records == []


def test_memories_do_not_mix(tmp_path: Path) -> None:
    directory = PromptDir(tmp_path)
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
    state = PromptDir(tmp_path).file("events")
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
    assert PromptDir(tmp_path).file("events").load() == {}
    assert "version 2, this agent writes 1" in warnings_of(caplog)[0]
    assert (tmp_path / "events.corrupt").exists()


def test_directory_that_cannot_be_written_is_told_once_and_lived_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    directory = PromptDir(tmp_path / "file" / "state")
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
    directory = PromptDir(tmp_path)
    assert directory.file("events").load() == {}
    directory.file("events").save({"a": 1})
    (warning,) = warnings_of(caplog)
    assert "events.json: Is a directory" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["events.json"]


def test_directory_that_can_be_written_again_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    obstacle = tmp_path / "state"
    obstacle.write_text("")
    directory = PromptDir(obstacle)
    directory.file("events").save({"a": 1})
    assert directory.problem
    obstacle.unlink()
    directory.file("events").save({"a": 2})
    directory.file("events").save({"a": 3})
    assert not directory.problem
    assert directory.file("events").load() == {"a": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    state = FileState(PromptDir(tmp_path), "events")
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
    PromptDir(tmp_path).file("events").save({"a": 1})
    assert steps == ["sync", "rename"]


def test_disk_that_fails_in_the_middle_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = PromptDir(tmp_path).file("events")
    state.save({"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    state.save({"a": 2})
    assert StateDir(tmp_path).file("events").load() == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["events.json"]
    assert "No space left on device" in warnings_of(caplog)[0]


def test_rest_of_a_killed_agent_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "events.new").write_bytes(b"half a docum")
    state = PromptDir(tmp_path).file("events")
    assert state.load() == {}
    state.save({"a": 1})
    assert state.load() == {"a": 1}


@pytest.mark.parametrize("content", [{"a": {1, 2}}, {"a": Path("x")}, {"a": object()}])
def test_what_is_no_json_is_refused_and_what_was_there_stays(content: dict[str, Any], tmp_path: Path) -> None:
    state = PromptDir(tmp_path).file("events")
    state.save({"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        state.save(content)
    assert state.load() == {"a": 1}


def test_state_is_not_for_everybody(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.umask(0); from pathlib import Path; from agent.state import StateDir;"
        "d = StateDir(Path(sys.argv[1])); d.file('events').save({}); d.flush(20)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "state")], timeout=30, check=True)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "state" / "events.json").stat().st_mode & 0o777 == 0o640


def test_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answer.wait(20))
    directory = StateDir(tmp_path)
    state = directory.file("events")
    for number in range(3):
        state.save({"a": number})
    assert state.load() == {"a": 2}, "what is to be written is what was saved last"
    directory.flush(0.05)
    assert not (tmp_path / "events.json").exists()
    answer.set()
    directory.flush(20)
    assert json.loads((tmp_path / "events.json").read_bytes())["content"] == {"a": 2}


def test_disk_that_does_not_answer_for_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answer.wait(20))
    monkeypatch.setattr(state_module, "SAVE_PATIENCE_S", -1.0)
    directory = StateDir(tmp_path)
    directory.file("events").save({"a": 1})
    until((tmp_path / "events.new").exists)
    directory.file("events").save({"a": 2})
    assert "no answer within" in directory.problem
    assert len(warnings_of(caplog)) == 1
    answer.set()
    directory.flush(20)
    assert not directory.problem


def test_directory_that_hangs_when_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "events.json")
    monkeypatch.setattr(state_module, "LOAD_PATIENCE_S", 0.05)
    directory = StateDir(tmp_path)
    assert directory.file("events").load() == {}
    assert "no answer within" in directory.problem
    os.close(os.open(tmp_path / "events.json", os.O_RDWR | os.O_NONBLOCK))  # a writer that comes and goes frees it
    until(lambda: not any(thread.name == "state-load" for thread in threading.enumerate()))


def test_read_only_directory_is_read_and_left_alone(tmp_path: Path) -> None:
    PromptDir(tmp_path).file("seen").save({"a": 1})
    (tmp_path / "bad.json").write_text("{")
    directory = StateDir(tmp_path, read_only=True)
    directory.file("seen").save({"a": 2})
    directory.flush(20)
    assert directory.file("seen").load() == {"a": 1}
    assert directory.file("bad").load() == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "seen.json"]


def test_what_could_not_be_written_is_written_when_the_disk_takes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacle = tmp_path / "state"
    obstacle.write_text("")
    directory = PromptDir(obstacle)
    directory.file("events").save({"a": 1})
    assert directory.problem
    obstacle.unlink()
    directory.retry()
    assert directory.problem, "not before its time"
    monkeypatch.setattr(state_module, "RETRY_S", 0.0)
    directory._retry_at_s = 0.0
    directory.retry()
    until((obstacle / "events.json").exists)
    directory.flush(20)
    assert not directory.problem
