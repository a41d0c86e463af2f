"""Start the agent or a peer on a fake tree, scrape it, and read what it cost from /proc."""

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
from collections.abc import Iterator
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SERVES = re.compile(rb"serves http://127\.0\.0\.1:(\d+)/metrics")


class Server:
    """A process that answers /metrics on a loopback port."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, first_page_s: float) -> None:
        self.process = process
        self.port = port
        self.first_page_s = first_page_s

    def cpu_s(self) -> float:
        """User and system time of the process so far, threads that ended included."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def resident_mib(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

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
    command = [sys.executable, "-m", "agent", "run", "--sysfs", str(sysfs), "--config-dir", str(scratch / "none")]
    fixed = (
        "outputs.prometheus.listen=127.0.0.1:0",
        f"agent.state_dir={scratch / 'state'}",
        f"agent.socket={scratch / 'agent.sock'}",
        "collectors.host.enabled=false",
        "collectors.textfile.enabled=false",
    )
    for setting in (*fixed, *settings):
        command += ["--set", setting]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, bufsize=0) as process:
        try:
            port = _announced_port(process)
            yield _first_page(process, port, started_s, b"node_infiniband_info")
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
            yield _first_page(process, port, started_s, b"node_infiniband_info")
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


def _first_page(process: subprocess.Popen[bytes], port: int, started_s: float, wanted: bytes) -> Server:
    server = Server(process, port, 0.0)
    deadline_s = started_s + 10
    while time.perf_counter() < deadline_s:
        with contextlib.suppress(OSError):
            if wanted in server.scrape():
                server.first_page_s = time.perf_counter() - started_s
                return server
    raise RuntimeError(f"no page with {wanted.decode()} on port {port} within 10 s")
