"""What every test shares: system programs by name, reproducible random data, a guard, and which Python ran it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.terminal import TerminalReporter

# A busy machine is no failure, and the same change must give the same verdict twice: campaigns vary the seed.
settings.register_profile("hpcwatch", deadline=None, derandomize=True)
settings.load_profile("hpcwatch")


# Files of this machine that say what hardware it has. Processes that a test started are the test's own.
_HOST_PATH = re.compile(r"/sys(/|$)|/proc(/(?!self(/|$)|thread-self(/|$)|\d)|$)")
_READING = frozenset({"open", "os.listdir", "os.scandir"})
host_reads: list[str] = []


def _note_host_read(event: str, arguments: tuple[object, ...]) -> None:
    if event in _READING and isinstance(arguments[0], str) and _HOST_PATH.match(arguments[0]):
        host_reads.append(arguments[0])


sys.addaudithook(_note_host_read)


@pytest.fixture(autouse=True)
def _no_reads_of_this_machine() -> Iterator[None]:
    """Fail a test whose outcome could depend on the machine it runs on."""
    host_reads.clear()
    yield
    assert not host_reads, f"a test reads temporary trees only, this one read {sorted(set(host_reads))}"


def need(program: str, package: str) -> str:
    """Return the path of a system program; without it the test is skipped, naming the package that brings it.

    With HPCWATCH_REQUIRE_PROGRAMS=1, as in continuous integration, the test fails instead: there a skip would hide
    that something is never tested.
    """
    path = shutil.which(program)
    if path is not None:
        return path
    message = f"{program} is missing: apt-get install {package}"
    if os.environ.get("HPCWATCH_REQUIRE_PROGRAMS") == "1":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say which Python ran the tests: several do, one after the other."""
    terminalreporter.write_line(f"tested on {platform.python_implementation()} {platform.python_version()}")
