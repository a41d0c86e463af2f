"""Real programs of the field, started on loopback for a test."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlencode

if TYPE_CHECKING:
    from pathlib import Path


class Prometheus:
    """A real Prometheus with its own data directory."""

    def __init__(self, program: str, config: Path, data: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={data}"]
        command += [f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=error"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Prometheus:
        """Give the server, which may not answer yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(10)

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
