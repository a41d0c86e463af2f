"""Start the agent or a peer on a fake tree, scrape it, and see what it cost."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_SERVES = re.compile(rb"serves http://127\.0\.0\.1:(\d+)/metrics")
_KIB_PER_MIB = 1024
INFINIBAND = b"node_infiniband_info"
OTHERS = ("gpu", "host", "kernel", "textfile")  # the collectors that come with the agent, without InfiniBand


class Process:
    """What a process uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def cpu_s(self) -> float:
        """User and system time of the process so far, threads that ended included."""
        return time.clock_gettime(~self.pid << 3 | 2)  # its clock's number, as in clock_getcpuclockid(3) of glibc

    def memory_mib(self) -> tuple[float, float]:
        """Resident memory, and that with each page divided by the number of processes that have it (PSS)."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        kib = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines)}
        return kib["Rss"] / _KIB_PER_MIB, kib["Pss"] / _KIB_PER_MIB

    def children(self) -> list[Process]:
        """The processes that it started and that have not ended."""
        pids: list[int] = []
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the thread ended meanwhile
                pids += map(int, (thread / "children").read_text(encoding="ascii").split())
        return [Process(pid) for pid in pids]


class Server(Process):
    """A process that answers /metrics on a loopback port."""

    def __init__(self, pid: int, port: int, first_page_s: float) -> None:
        super().__init__(pid)
        self.port = port
        self.first_page_s = first_page_s

    def resident_mib(self) -> float:
        """Resident memory."""
        return self.memory_mib()[0]

    def scrape(self) -> bytes:
        """Fetch the page over a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            return _get(connection)

    def cost_s(self, scrapes: int, *, keep_alive: bool) -> float:
        """Scrape so often and return the server's processor time per scrape."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            _get(connection)
            before_s = self.cpu_s()
            for _ in range(scrapes):
                if not keep_alive:
                    connection.close()
                _get(connection)
            return (self.cpu_s() - before_s) / scrapes


def _get(connection: http.client.HTTPConnection) -> bytes:
    connection.request("GET", "/metrics")
    return connection.getresponse().read()


@contextlib.contextmanager
def agent(sysfs: Path, scratch: Path, *settings: str) -> Iterator[Server]:
    """Run the agent with its InfiniBand collector only."""
    fixed = (
        f"agent.sysfs={sysfs}",
        f"agent.state_dir={scratch / 'state'}",
        f"agent.socket={scratch / 'agent.sock'}",
        *(f"collectors.{name}.enabled=false" for name in OTHERS),
    )
    with whole_agent((*fixed, *settings), [INFINIBAND]) as server:
        yield server


@contextlib.contextmanager
def whole_agent(
    settings: Sequence[str], wanted: Sequence[bytes], environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run the agent with all its collectors, and wait until the page has all that is wanted."""
    command = [sys.executable, "-m", "agent", "run", "--config-dir", "/nonexistent", "--config", os.devnull]
    for setting in ("outputs.prometheus.listen=127.0.0.1:0", *settings):
        command += ["--set", setting]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, bufsize=0, env=environment) as process:
        try:
            yield _first_page(process, _announced_port(process), started_s, wanted)
        finally:
            process.terminate()


@contextlib.contextmanager
def node_exporter(program: str, sysfs: Path) -> Iterator[Server]:
    """Run node_exporter with its InfiniBand collector only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--collector.disable-defaults", "--collector.infiniband", f"--path.sysfs={sysfs}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--web.disable-exporter-metrics"]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield _first_page(process, port, started_s, [INFINIBAND])
        finally:
            process.terminate()


def version(program: str) -> str:
    """Return the first line a program prints for --version."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).splitlines()[0]


def _announced_port(process: subprocess.Popen[bytes]) -> int:
    assert process.stderr is not None
    seen = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.select(timeout=10):
            part = os.read(process.stderr.fileno(), 65536)
            seen += part
            if (match := _SERVES.search(seen)) is not None:
                return int(match[1])
            if not part:
                break
    raise RuntimeError(f"the agent did not start: {seen.decode(errors='replace')}")


def _first_page(process: subprocess.Popen[bytes], port: int, started_s: float, wanted: Sequence[bytes]) -> Server:
    server = Server(process.pid, port, 0.0)
    deadline_s = started_s + 10
    while time.perf_counter() < deadline_s:
        with contextlib.suppress(OSError):
            page = server.scrape()
            if all(part in page for part in wanted):
                server.first_page_s = time.perf_counter() - started_s
                return server
    raise RuntimeError(f"no page with {b', '.join(wanted).decode()} on port {port} within 10 s")
