"""The agent's own log: one line is one record, whatever text from the system is in it."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.log import JsonFormatter, TextFormatter, one_line

CODE = "import logging, sys; from agent import log; log.setup(*sys.argv[2:]); exec(sys.argv[1])"


def record(message: str, *, error: BaseException | None = None, level: int = logging.WARNING) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("infiniband", level, __file__, 1, message.replace("%", "%%"), ("unused",), info)
    made.args = ()
    made.msg = message
    made.created = 1_800_000_000.25
    return made


def raised(message: str) -> BaseException:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def stderr_of(statements: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", CODE, statements, *arguments]
    done = subprocess.run(
        command, capture_output=True, timeout=30, check=True, env={**os.environ, "JOURNAL_STREAM": "", **(env or {})}
    )
    assert done.stdout == b""
    return done.stderr.decode()


def test_text_line_is_time_level_logger_message() -> None:
    line = TextFormatter(journal=False).format(record("mlx5_ib3: gone"))
    assert line == "2027-01-15T08:00:00.250Z WARNING infiniband: mlx5_ib3: gone"


@pytest.mark.parametrize(
    ("level", "priority"),
    [
        (logging.DEBUG, 7),
        (logging.INFO, 6),
        (logging.WARNING, 4),
        (logging.ERROR, 3),
        (logging.CRITICAL, 2),
        (25, 6),
    ],
)
def test_journal_line_has_the_priority_and_no_time(level: int, priority: int) -> None:
    assert TextFormatter(journal=True).format(record("gone", level=level)) == f"<{priority}>infiniband: gone"


@given(st.text())
@example("a\n<0>kernel: forged")
@example("\x1b[2Ja\r\x85\u2028\udc80\x00")
def test_text_cannot_forge_a_line(text: str) -> None:
    for journal in (False, True):
        line = TextFormatter(journal=journal).format(record(text))
        assert line.splitlines() == [line]
        assert line.isprintable()


def test_printable_text_is_left_as_it_is() -> None:
    assert one_line("mlx5_ib3: größer als 5 \\ %s") == "mlx5_ib3: größer als 5 \\ %s"
    assert one_line("a\nb\x1b\udc80") == "a\\nb\\x1b\\udc80"


@pytest.mark.parametrize("journal", [False, True])
def test_traceback_is_shown_and_cannot_forge_a_line(journal: bool) -> None:  # noqa: FBT001 - a parameter
    error = raised("bad\n<0>kernel: forged\n2027-01-15T08:00:00.250Z ERROR agent: forged\x1b[2J")
    first, *rest = TextFormatter(journal=journal).format(record("failed", error=error)).splitlines()
    assert first.endswith("infiniband: failed")
    assert any("ValueError: bad" in line for line in rest)
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


@given(st.text())
@example('"\\\n\x1b\u2028\udc80')
def test_json_line_is_valid_json_in_one_line_of_ascii(text: str) -> None:
    line = JsonFormatter().format(record(text))
    assert line.isascii()
    assert line.splitlines() == [line]
    assert json.loads(line) == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "warning",
        "logger": "infiniband",
        "message": text,
    }


def test_json_line_has_the_traceback_in_it() -> None:
    line = JsonFormatter().format(record("failed", error=raised("bad\nworse")))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["traceback"].endswith("ValueError: bad\nworse")


def test_log_goes_to_standard_error_from_the_level_on() -> None:
    statements = "logging.getLogger('a').info('seen'); logging.getLogger('a').debug('hidden')"
    line = stderr_of(statements)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO a: seen\n", line)
    assert stderr_of(statements, "warning") == ""
    assert "DEBUG a: hidden" in stderr_of(statements, "debug")


def test_json_form_is_chosen_by_name() -> None:
    line = json.loads(stderr_of("logging.getLogger('a').warning('größer')", "info", "json", env={"LC_ALL": "C"}))
    assert (line["level"], line["message"]) == ("warning", "größer")


def test_second_setup_does_not_double_the_lines() -> None:
    assert stderr_of("log.setup(); logging.getLogger('a').warning('once')").count("once") == 1


def test_wrong_arguments_of_a_message_do_not_become_a_traceback() -> None:
    assert "Traceback" not in stderr_of("logging.getLogger('a').warning('%d', 'x')")


@pytest.mark.parametrize("matches", [False, True])
def test_journal_is_recognized_by_its_stream(matches: bool) -> None:  # noqa: FBT001 - a parameter
    read_end, write_end = os.pipe()
    try:
        status = os.fstat(write_end)
        stream = f"{status.st_dev}:{status.st_ino if matches else status.st_ino + 1}"
        command = [sys.executable, "-c", CODE, "logging.getLogger('a').error('x')"]
        env = {**os.environ, "JOURNAL_STREAM": stream}
        subprocess.run(command, stderr=write_end, timeout=30, check=True, env=env)
        line = os.read(read_end, 4096).decode()
    finally:
        os.close(read_end)
        os.close(write_end)
    assert line.startswith("<3>a: x") is matches
    assert line.endswith("ERROR a: x\n") is not matches
