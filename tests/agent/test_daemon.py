"""Claims about `hpcwatch run`, told by a real process: signals, hangs, reload, service manager, control socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.agent.kit import answers, gone, hangs, recovers, until
from tests.agent.running import Agent, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HASTY = {"timeout": "300ms", "interval": "100ms"}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def start(place: Place) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def begin(*arguments: str, **environment: str) -> Agent:
        agents.append(Agent(place, *arguments, environment=environment))
        return agents[-1]

    yield begin
    for agent in agents:
        agent.end()


def source(place: Place, name: str, text: str = "1") -> Path:
    path = place.folder / name
    answers(path, text)
    return path


def of_threads(pid: int, name: str) -> list[str]:
    """Return this file of every thread that a process has; one may end meanwhile."""
    texts = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            texts.append((task / name).read_text())
    return texts


def children_of(pid: int) -> list[int]:
    return [int(word) for text in of_threads(pid, "children") for word in text.split()]


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if " ERROR " in line or "Traceback" in line]


# Start and end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_ends_the_agent_with_status_0_and_removes_its_socket(
    place: Place, start: Callable[..., Agent], number: int
) -> None:
    place.configure(kit_steady={"path": str(source(place, "steady"))})
    agent = start()
    until(lambda: agent.value("kit_steady_value") == 1)
    assert place.socket.is_socket()
    assert agent.stop(number) == 0
    assert not place.socket.exists()
    assert "Traceback" not in agent.log


def test_signal_right_after_the_port_is_told_is_not_lost(start: Callable[..., Agent]) -> None:
    agent = start()
    assert agent.port
    assert agent.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_hanging_collectors_in_all_lanes_hold_up_neither_the_page_nor_the_end(
    place: Place, start: Callable[..., Agent], number: int
) -> None:
    paths = {name: source(place, name) for name in ("kit_shared", "kit_thread", "kit_process", "kit_steady")}
    place.configure(
        **{name: {"path": str(path), "interval": "100ms", "timeout": "60s"} for name, path in paths.items()}
    )
    agent = start()
    until(lambda: all(agent.value(f"{name}_value") == 1 for name in paths))
    hanging = [name for name in paths if name != "kit_steady"]
    for name in hanging:
        hangs(paths[name])
    (child,) = children_of(agent.process.pid)
    for path in ("/metrics", "/", "/healthz", "/api/v1/status"):
        started_s = time.monotonic()
        assert agent.get(path)[0] == 200
        assert time.monotonic() - started_s < 1
    started_s = time.monotonic()
    assert agent.stop(number) == 0
    assert time.monotonic() - started_s < 5
    until(lambda: gone(child))


def test_port_that_is_taken_ends_the_agent_with_status_1_and_one_line(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = place.call(place.command("run", "--set", f"outputs.prometheus.listen=127.0.0.1:{port}"))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in lines[0]
    assert "outputs.prometheus.listen" in lines[0]


def test_socket_and_state_that_cannot_be_written_do_not_stop_the_agent(
    place: Place, start: Callable[..., Agent]
) -> None:
    place.configure(kit_steady={"path": str(source(place, "steady"))})
    place.socket = Path("/dev/null/agent.sock")
    (place.folder / "state").write_text("a file where the folder should be")
    agent = start()
    until(lambda: agent.value("kit_steady_value") == 1)
    until(lambda: agent.value("hpcwatch_state_writable") == 0)
    until(lambda: agent.log.count("cannot keep state") == 1)
    until(lambda: agent.log.count("control socket: ") == 1)
    assert "/dev/null/agent.sock" in agent.log
    assert agent.stop() == 0


def test_control_socket_of_another_agent_is_left_alone(place: Place, start: Callable[..., Agent]) -> None:
    first = start()
    assert first.get("/healthz")[0] == 200
    place.folder.joinpath("log").rename(place.folder / "first.log")
    first.log_path = place.folder / "first.log"
    second = start()
    until(lambda: "another agent answers there" in second.log)
    assert second.get("/healthz")[0] == 200
    assert second.stop() == 0
    assert first.control("GET", "/healthz")[0] == 200


def test_ready_means_that_the_first_collection_is_over(place: Place, start: Callable[..., Agent]) -> None:
    path = source(place, "thread")
    path.unlink()
    hangs(path)
    place.configure(kit_thread={"path": str(path), "timeout": "60s"}, kit_steady={"path": str(source(place, "steady"))})
    agent = start()
    until(lambda: agent.value("kit_steady_value") == 1)
    assert agent.get("/healthz")[0] == 200
    assert agent.get("/readyz")[0] == 503
    recovers(path, "1")
    until(lambda: agent.get("/readyz")[0] == 200)


def test_agent_that_cannot_read_a_collector_in_time_is_ready_without_it(
    place: Place, start: Callable[..., Agent]
) -> None:
    path = source(place, "shared")
    path.unlink()
    hangs(path)
    place.configure(kit_shared={"path": str(path), **HASTY})
    agent = start()
    until(lambda: agent.get("/readyz")[0] == 200)
    assert agent.up("kit_shared") == 0


# Hangs


@pytest.mark.parametrize("name", ["kit_shared", "kit_thread"])
def test_hang_is_visible_while_it_lasts_and_over_when_it_is_over(
    place: Place, start: Callable[..., Agent], name: str
) -> None:
    path = source(place, name)
    place.configure(
        **{name: {"path": str(path), **HASTY}, "kit_steady": {"path": str(source(place, "steady")), **HASTY}}
    )
    agent = start()
    until(lambda: agent.value(f"{name}_value") == 1)
    hangs(path)
    until(lambda: agent.up(name) == 0)
    assert agent.value(f"{name}_value") is None
    assert agent.value(f'hpcwatch_collector_timeouts_total{{collector="{name}"}}') == 1
    answers(place.folder / "steady", "2")
    until(lambda: agent.value("kit_steady_value") == 2)
    row = agent.status()[name]
    assert (row["state"], row["reason"]) == ("hung", "no answer within 0.3 s")
    recovers(path, "3")
    until(lambda: agent.value(f"{name}_value") == 3 and agent.up(name) == 1)
    until(lambda: agent.log.count("no answer within") == 1)


def test_hung_device_in_a_process_costs_itself(place: Place, start: Callable[..., Agent]) -> None:
    folder = place.folder / "devices"
    folder.mkdir()
    for device in ("a", "b", "c"):
        answers(folder / device, "1")
    place.configure(kit_devices={"folder": str(folder), "interval": "100ms", "timeout": "1s"})
    agent = start()
    until(lambda: agent.value('kit_device_value{device="c"}') == 1)
    hangs(folder / "b")
    answers(folder / "c", "2")
    until(lambda: agent.value('kit_device_value{device="c"}') == 2)
    assert agent.value('kit_device_value{device="a"}') == 1
    assert agent.value('kit_device_value{device="b"}') is None
    assert agent.up("kit_devices") == 1
    assert agent.value('hpcwatch_collector_timeouts_total{collector="kit_devices"}') == 0
    assert len(children_of(agent.process.pid)) == 1


def test_child_dies_with_an_agent_that_is_killed(place: Place, start: Callable[..., Agent]) -> None:
    path = source(place, "kit_process")
    place.configure(kit_process={"path": str(path), "interval": "100ms", "timeout": "60s"})
    agent = start()
    until(lambda: agent.value("kit_process_value") == 1)
    hangs(path)
    (child,) = children_of(agent.process.pid)
    agent.stop(signal.SIGKILL)
    until(lambda: gone(child))


# Reload


def settled(agent: Agent, ok: int) -> None:
    until(lambda: agent.value("hpcwatch_config_last_reload_successful") == ok)


def test_reload_leaves_alone_what_did_not_change_adds_what_is_new_and_removes_what_is_gone(
    place: Place, start: Callable[..., Agent]
) -> None:
    diary = place.folder / "diary"
    steady = {"path": str(source(place, "steady", "part")), "diary": str(diary), "interval": "100ms"}
    shared = {"path": str(source(place, "shared")), "diary": str(diary)}
    place.configure(kit_steady=steady, kit_shared=shared)
    agent = start()
    errors = 'hpcwatch_collector_errors_total{collector="kit_steady"}'
    until(lambda: (agent.value(errors) or 0) > 3 and agent.value("kit_shared_value") == 1)
    before = agent.value(errors) or 0
    place.configure(kit_steady=steady, kit_thread={"path": str(source(place, "thread")), "diary": str(diary)})
    agent.send(signal.SIGHUP)
    until(lambda: agent.value("kit_thread_value") == 1)
    until(lambda: agent.value('hpcwatch_collector_enabled{collector="kit_shared"}') == 0)
    values = agent.values()
    assert "kit_shared_value" not in values
    assert 'hpcwatch_collector_up{collector="kit_shared"}' not in values
    assert values[errors] >= before
    until(lambda: "kit_shared close" in diary.read_text())
    assert diary.read_text().splitlines().count("kit_steady open") == 1
    assert "kit_steady close" not in diary.read_text()
    assert agent.get("/readyz")[0] == 200


def test_changed_collector_is_replaced(place: Place, start: Callable[..., Agent]) -> None:
    path = str(source(place, "shared", "7"))
    place.configure(kit_shared={"path": path})
    agent = start()
    until(lambda: agent.value("kit_shared_value") == 7)
    place.configure(kit_shared={"path": path, "scale": 10})
    agent.send(signal.SIGHUP)
    until(lambda: agent.value("kit_shared_value") == 70)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("collectors:\n  kit_shared: {pat: /x}\n", ":2: collectors.kit_shared.pat: unknown key; did you mean path?"),
        ("collectors:\n  kit_shraed: {}\n", ":2: collectors.kit_shraed: unknown collector; did you mean kit_shared?"),
        ("agent: {labels: 5}\n", ":1: agent.labels: expected a mapping"),
        ("agent: [\n", ""),
    ],
    ids=["collector's key", "collector", "type", "syntax"],
)
def test_configuration_that_is_wrong_leaves_the_one_before_in_force(
    place: Place, start: Callable[..., Agent], text: str, told: str
) -> None:
    path = source(place, "shared")
    place.configure(kit_shared={"path": str(path), "diary": str(place.folder / "diary"), "interval": "100ms"})
    agent = start()
    until(lambda: agent.value("kit_shared_value") == 1)
    place.config.write_text(text)
    agent.send(signal.SIGHUP)
    settled(agent, 0)
    until(lambda: error_lines(agent.log))
    (line,) = error_lines(agent.log)
    assert f"the one before stays in force: {place.config}{told}" in line
    answers(path, "2")
    until(lambda: agent.value("kit_shared_value") == 2)
    assert (place.folder / "diary").read_text() == "kit_shared open\n"
    place.configure(kit_shared={"path": str(path)})
    agent.send(signal.SIGHUP)
    settled(agent, 1)


def test_port_is_not_changed_by_a_reload_and_that_is_told(place: Place, start: Callable[..., Agent]) -> None:
    agent = start()
    assert agent.port
    place.config.write_text("agent: {labels: {cluster: blue}}\n")
    agent.send(signal.SIGHUP)
    until(lambda: "configuration reloaded" in agent.log)
    until(lambda: "takes effect at the next restart: agent.labels\n" in agent.log)
    place.config.write_text("")
    agent.send(signal.SIGHUP)
    until(lambda: agent.log.count("configuration reloaded") == 2)
    assert agent.log.count("next restart") == 1, "what runs is what is configured again"
    assert agent.get("/healthz")[0] == 200


def test_many_reloads_cost_no_threads_and_no_descriptors(place: Place, start: Callable[..., Agent]) -> None:
    paths = {name: str(source(place, name)) for name in ("kit_shared", "kit_thread", "kit_process", "kit_steady")}
    agent = start()

    def reload(scale: int) -> None:
        place.configure(**{name: {"path": path, "scale": scale} for name, path in paths.items()})
        assert agent.control("POST", "/control/reload")[0] == 200

    def use() -> tuple[int, int, int]:
        until(lambda: all(agent.value(f"{name}_value") == scale for name in paths))
        own = Path(f"/proc/{agent.process.pid}")
        return (
            len(list((own / "task").iterdir())),
            len(list((own / "fd").iterdir())),
            len(children_of(agent.process.pid)),
        )

    assert agent.get("/healthz")[0] == 200
    scale = 1
    reload(scale)
    before = use()
    for scale in range(2, 22):
        reload(scale)
    until(lambda: all(now <= then for now, then in zip(use(), before, strict=True)), f"as few as before: {before}")


# Control socket


def test_control_socket_reloads_and_tells_what_is_wrong(place: Place, start: Callable[..., Agent]) -> None:
    agent = start()
    assert agent.get("/healthz")[0] == 200
    assert place.socket.stat().st_mode & 0o777 == 0o660
    status, body = agent.control("POST", "/control/reload")
    assert (status, json.loads(body)) == (200, {"reloaded": True})
    place.config.write_text("agent: {intervall: 5s}\n")
    status, body = agent.control("POST", "/control/reload")
    answer = json.loads(body)
    assert (status, answer["reloaded"]) == (422, False)
    assert answer["error"].startswith(f"{place.config}:1: agent.intervall: unknown key; did you mean interval?")
    assert agent.value("hpcwatch_config_last_reload_successful") == 0


def test_deadline_of_a_collector_added_through_the_socket_is_watched(place: Place, start: Callable[..., Agent]) -> None:
    agent = start()
    assert agent.get("/healthz")[0] == 200
    path = place.folder / "thread"
    hangs(path)
    place.configure(kit_thread={"path": str(path), **HASTY})
    assert agent.control("POST", "/control/reload")[0] == 200
    until(lambda: "no answer within 0.3 s" in agent.log, "without any request that would wake the main thread", 5)


def test_reload_is_no_business_of_the_http_port(start: Callable[..., Agent]) -> None:
    agent = start()
    assert agent.get("/control/reload")[0] == 404


# Service manager


class Manager:
    """A socket on which a service manager listens (sd_notify(3))."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(10)

    def next(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def test_service_manager_is_told_of_start_reload_and_end(
    place: Place, start: Callable[..., Agent], manager: Manager
) -> None:
    agent = start(NOTIFY_SOCKET=str(manager.path))
    ready = manager.next()
    assert ready["READY"] == "1"
    assert "STATUS" in ready
    assert agent.get("/healthz")[0] == 200
    for config in ("agent: {}\n", "agent: {nonsense: 1}\n"):
        place.config.write_text(config)
        agent.send(signal.SIGHUP)
        reloading = manager.next()
        assert reloading["RELOADING"] == "1"
        assert int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        assert manager.next()["READY"] == "1"
    agent.send(signal.SIGTERM)
    assert manager.next() == {"STOPPING": "1"}
    assert agent.process.wait(5) == 0


@pytest.mark.parametrize("hanging", [False, True], ids=["idle", "hanging"])
def test_watchdog_is_fed_in_time_also_while_collectors_hang(
    place: Place, start: Callable[..., Agent], manager: Manager, *, hanging: bool
) -> None:
    if hanging:
        path = place.folder / "shared"
        hangs(path)
        place.configure(kit_shared={"path": str(path), **HASTY})
    start(NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC="400000")
    assert manager.next()["READY"] == "1"
    assert manager.next() == {"WATCHDOG": "1"}
    last_s = time.monotonic()
    for _ in range(5):
        assert manager.next() == {"WATCHDOG": "1"}
        now_s = time.monotonic()
        assert 0.1 < now_s - last_s < 0.4, "half of what the unit allows, not a flood"
        last_s = now_s


def test_watchdog_meant_for_another_process_is_not_fed(start: Callable[..., Agent], manager: Manager) -> None:
    agent = start(NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC="20000", WATCHDOG_PID=str(os.getpid()))
    assert manager.next()["READY"] == "1"
    agent.send(signal.SIGTERM)
    assert manager.next() == {"STOPPING": "1"}


def test_idle_agent_sleeps(place: Place, start: Callable[..., Agent]) -> None:
    place.configure(kit_steady={"path": str(source(place, "steady")), "interval": "1h"})
    agent = start()
    until(lambda: agent.get("/readyz")[0] == 200)

    def wakes() -> int:
        statuses = of_threads(agent.process.pid, "status")
        return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in statuses)

    def sleeps_on() -> bool:
        before = wakes()
        threading.Event().wait(0.5)
        return wakes() == before

    until(sleeps_on, "half a second in which no thread wakes")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_it_is_still_loading_ends_it_without_complaint(
    place: Place, start: Callable[..., Agent], number: int
) -> None:
    fifo = place.folder / "more.yaml"
    os.mkfifo(fifo)  # reading the settings does not come to an end
    agent = start("--config", str(fifo))
    until(lambda: catches(agent, number) and catches(agent, signal.SIGTERM))
    assert agent.stop(number) == 0
    assert agent.log == ""


def test_state_on_a_disk_that_hangs_holds_up_neither_the_page_nor_the_end(
    place: Place, start: Callable[..., Agent]
) -> None:
    hanging = "import os, threading\nos.fsync = lambda descriptor: threading.Event().wait()\n"
    (place.folder / "plugins" / "sitecustomize.py").write_text(hanging)
    place.configure(kit_shared={"path": str(source(place, "kit_shared"))})
    agent = start()
    until(lambda: agent.up("kit_shared") == 1)
    until((place.folder / "state" / "presence.new").exists)
    assert agent.get("/metrics", timeout_s=1)[0] == 200
    assert agent.get("/api/v1/events", timeout_s=1)[0] == 200
    assert agent.stop() == 0


def test_standard_error_that_nobody_reads_holds_up_neither_the_page_nor_the_end(place: Place) -> None:
    place.configure(kit_shared={"path": str(source(place, "kit_shared", "boom"))})
    listen = f"outputs.prometheus.listen=127.0.0.1:{free_port()}"
    port = int(listen.rpartition(":")[2])
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"x" * 65536):
            pass
    os.set_blocking(writer, True)
    process = subprocess.Popen(
        place.command("run", "--set", listen), env=place.environment, cwd=place.folder, stderr=writer
    )
    try:
        until(lambda: answers_ok(port), "the page answers")
        process.send_signal(signal.SIGHUP)
        until(lambda: answers_ok(port), "the page answers after a reload")
        process.terminate()
        assert process.wait(5) == 0
    finally:
        process.kill()
        os.close(reader)
        os.close(writer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers_ok(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_configuration_on_a_mount_that_hangs_holds_up_neither_the_page_nor_the_end(
    place: Place, start: Callable[..., Agent]
) -> None:
    agent = start()
    assert agent.port
    hangs(place.config)  # opening it does not return
    agent.send(signal.SIGHUP)
    for _ in range(3):
        assert agent.get("/metrics", timeout_s=1)[0] == 200
    assert agent.stop() == 0


def test_reload_asked_for_during_another_takes_the_last_configuration(
    place: Place, start: Callable[..., Agent]
) -> None:
    path = str(source(place, "kit_shared", "1"))
    place.configure(kit_shared={"path": path})
    agent = start()
    until(lambda: agent.value("kit_shared_value") == 1)
    for scale in range(2, 12):
        place.configure(kit_shared={"path": path, "scale": scale})
        agent.send(signal.SIGHUP)
    until(lambda: agent.value("kit_shared_value") == 11, "soon, not at the next deadline", 4)


def catches(agent: Agent, number: int) -> bool:
    """Tell whether the process has a handler for a signal (proc_pid_status(5), SigCgt)."""
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)
