"""What the service manager is told, over the socket it named."""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.notify import Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def received(manager: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in manager.recv(4096).decode().splitlines())


def test_service_manager_is_told_each_step(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.ready("serving on 0.0.0.0:9753")
    assert received(manager) == {"READY": "1", "STATUS": "serving on 0.0.0.0:9753"}
    notifier.alive()
    assert received(manager) == {"WATCHDOG": "1"}
    notifier.stopping()
    assert received(manager) == {"STOPPING": "1"}


def test_reload_is_told_with_the_time_it_began(manager: socket.socket) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    Notifier().reloading()
    message = received(manager)
    assert message["RELOADING"] == "1"
    assert before <= int(message["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def test_abstract_socket_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"hpcwatch-test-{secrets.token_hex(8)}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(10)
        Notifier().alive()
        assert received(listener) == {"WATCHDOG": "1"}


def test_without_a_service_manager_nothing_is_sent_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    notifier = Notifier()
    notifier.ready("serving")
    assert notifier.watchdog_s is None


def test_service_manager_that_does_not_listen_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in (str(tmp_path / "nobody"), str(tmp_path / ("x" * 200))):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        Notifier().ready("serving")


def test_service_manager_whose_queue_is_full_does_not_block(manager: socket.socket) -> None:
    notifier = Notifier()
    for _ in range(5000):
        notifier.alive()
    assert received(manager) == {"WATCHDOG": "1"}


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("30000000", None, 15.0),
        ("30000000", "own", 15.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("", None, None),
        ("soon", None, None),
    ],
)
def test_watchdog_is_fed_at_half_its_time_if_it_is_for_us(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, usec: str, pid: str | None, seconds: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    assert Notifier().watchdog_s == seconds
