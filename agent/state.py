"""Small memories that survive a restart: one JSON file each under `state_dir`, written whole or not at all.

A corrupt file is set aside with a warning, a directory that cannot be written is told once and lived with.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.snapshot import describe

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1
LARGEST_BYTES = 16 << 20

log = logging.getLogger("state")


class StateDir:
    """The directory; hands out one `FileState` per name. `problem` says why nothing can be kept, or is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""

    def file(self, name: str) -> FileState:
        """Return the memory with this name."""
        return FileState(self, name)

    def failed(self, error: OSError) -> None:
        """Tell once that nothing can be kept."""
        if not self.problem:
            self.problem = describe(error)
            log.warning(
                "cannot keep state: %s; going on without, a restart will forget (agent.state_dir)", self.problem
            )

    def succeeded(self) -> None:
        """Note that writing works."""
        if self.problem:
            log.info("state in %s can be kept again", self.path)
            self.problem = ""


class FileState:
    """One memory (`agent.api.State`)."""

    def __init__(self, directory: StateDir, name: str) -> None:
        self._directory = directory
        self._path = directory.path / f"{name}.json"

    def load(self) -> dict[str, Any]:
        """Return what was saved last; empty when there is nothing usable."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(LARGEST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._directory.failed(error)
            return {}
        try:
            document = json.loads(raw)
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']!r}, this agent writes {VERSION}")
            content = document["content"]
            if not isinstance(content, dict):
                raise TypeError("content is not a mapping")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._set_aside(describe(error))
            return {}
        return content

    def save(self, content: Mapping[str, Any]) -> None:
        """Replace what is kept: written beside, synced, renamed over."""
        data = json.dumps({"version": VERSION, "content": content}, separators=(",", ":")).encode()
        beside = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            self._directory.path.mkdir(parents=True, exist_ok=True, mode=0o750)
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            try:
                _write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            beside.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            self._directory.failed(error)
        else:
            self._directory.succeeded()

    def _set_aside(self, why: str) -> None:
        aside = self._path.with_suffix(".corrupt")
        try:
            self._path.replace(aside)
        except OSError as error:
            log.warning("state %s is unusable (%s) and stays: %s", self._path, why, describe(error))
        else:
            log.warning("state %s is unusable (%s); set aside as %s", self._path, why, aside.name)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
