"""The command line as a user starts it: in a process of its own, on a machine that has nothing but test collectors."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.agent.kit import ROOT, Devices, ProcessReading, Reading, Steady, ThreadReading, plug_in, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

KIT = {cls.name: f"tests.agent.kit:{cls.__name__}" for cls in (Reading, ThreadReading, ProcessReading, Steady, Devices)}
# The collectors that come with the agent stay off: these are claims about the engine.
QUIET = "collectors: {host: {enabled: false}, infiniband: {enabled: false}, textfile: {enabled: false}}\n"


class Place:
    """A folder with the roots, the configuration and the plug-ins of one agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("sys", "proc", "plugins"):
            (folder / name).mkdir()
        plug_in(folder / "plugins", KIT)
        self.config = folder / "hpcwatch.yaml"
        self.config.write_text(QUIET)
        self.quiet = folder / "quiet.yaml"
        self.quiet.write_text(QUIET + f"agent: {{devfs: {folder / 'dev'}, kmsg: {folder / 'kmsg'}}}\n")
        self.socket = folder / "agent.sock"

    @property
    def environment(self) -> dict[str, str]:
        """What the process gets: nothing of a service manager, and the plug-ins on its path."""
        strange = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM"}
        kept = {name: value for name, value in os.environ.items() if name not in strange}
        return {**kept, "PYTHONPATH": f"{self.folder / 'plugins'}:{ROOT}"}

    def command(self, verb: str, *arguments: str) -> list[str]:
        """Return the command line of a verb that reads configuration."""
        return [
            *(sys.executable, "-m", "agent", verb),
            *("--config", str(self.quiet), "--config", str(self.config), "--config-dir", str(self.folder / "none")),
            *("--sysfs", str(self.folder / "sys"), "--procfs", str(self.folder / "proc")),
            *("--set", f"agent.state_dir={self.folder / 'state'}", "--set", f"agent.socket={self.socket}"),
            *("--set", "outputs.prometheus.listen=127.0.0.1:0", "--set", "agent.interval=100ms"),
            *arguments,
        ]

    def call(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=30, check=False
        )

    def configure(self, **collectors: Mapping[str, object]) -> None:
        """Write the configuration of these collectors; JSON is YAML."""
        self.config.write_text(json.dumps({"collectors": collectors}))


class Agent:
    """`hpcwatch run` in a process of its own."""

    def __init__(self, place: Place, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.place = place
        self.log_path = place.folder / "log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                place.command("run", *arguments),
                env={**place.environment, **(environment or {})},
                cwd=place.folder,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def log(self) -> str:
        """What it logged so far."""
        return self.log_path.read_text()

    @property
    def port(self) -> int:
        """Its HTTP port, as soon as it says so."""
        until(lambda: "serves http://" in self.log or self.process.poll() is not None, "the agent starts")
        match = re.search(r"serves http://127\.0\.0\.1:(\d+)/metrics", self.log)
        assert match, self.log
        return int(match[1])

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
        """Ask its HTTP port; return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def values(self) -> dict[str, float]:
        """Return what /metrics shows: values by series text."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#")]
        return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}

    def value(self, series: str) -> float | None:
        """Return one value; None when the series is absent."""
        return self.values().get(series)

    def up(self, collector: str) -> float | None:
        """Return whether a collector is up; None when there is no such enabled collector."""
        return self.value(f'hpcwatch_collector_up{{collector="{collector}"}}')

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the collectors' rows by name."""
        return {row["name"]: row for row in json.loads(self.get("/api/v1/status")[1])["collectors"]}

    def control(self, method: str, path: str) -> tuple[int, str]:
        """Ask the control socket."""
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(5)
            connection.sock.connect(str(self.place.socket))
            connection.request(method, path, headers={"Content-Length": "0"} if method == "POST" else {})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 5.0) -> int:
        """Have it end; return its exit status."""
        self.send(number)
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """End it whatever it does, and its children with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
