"""Real programs of the field, started on loopback for a test."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
from typing import TYPE_CHECKING
from urllib.parse import urlencode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Prometheus:
    """A real Prometheus on a loopback port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def query(self, expression: str) -> set[str]:
        """Return the values that a PromQL expression has now; empty while the server does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/api/v1/query?" + urlencode({"query": expression}))
            answer = json.loads(connection.getresponse().read())
        except (OSError, ValueError):
            return set()
        finally:
            connection.close()
        return {sample["value"][1] for sample in answer.get("data", {}).get("result", [])}


@contextlib.contextmanager
def prometheus(program: str, config: Path, data: Path) -> Iterator[Prometheus]:
    """Run a Prometheus; at first it may not answer yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={data}", "--log.level=error"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield Prometheus(port)
        finally:
            process.kill()
