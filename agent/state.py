"""Small memories that survive a restart: one JSON file each under `state_dir`, written whole or not at all.

A corrupt file is set aside with a warning, a directory that cannot be written is told once and lived with. It may lie
on a disk that dies or a server that hangs: saving is left to a thread, and loading gives up after a while.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.snapshot import describe

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1
LARGEST_BYTES = 16 << 20
LOAD_PATIENCE_S = 2.0
SAVE_PATIENCE_S = 10.0
RETRY_S = 60.0

log = logging.getLogger("state")


class StateDir:
    """The directory; hands out one `FileState` per name. `problem` says why nothing can be kept, or is empty.

    `read_only` is for commands that look beside a running agent: nothing in the directory is touched.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        self.problem = ""
        self._changed = threading.Condition()
        self._pending: dict[Path, bytes] = {}
        self._writing_since_s: float | None = None
        self._retry_at_s = 0.0
        self._writer: threading.Thread | None = None

    def file(self, name: str) -> FileState:
        """Return the memory with this name."""
        return FileState(self, name)

    def pending(self, path: Path) -> bytes | None:
        """Return what is to be written there and is not yet."""
        with self._changed:
            return self._pending.get(path)

    def put(self, path: Path, data: bytes) -> None:
        """Have a file written soon; of several contents for one file the last. Never blocks."""
        if self.read_only:
            return
        with self._changed:
            self._pending[path] = data
            self._start_writer()
            since_s = self._writing_since_s
        if since_s is not None and time.monotonic() - since_s > SAVE_PATIENCE_S:
            self.failed(TimeoutError(f"no answer within {SAVE_PATIENCE_S:g} s"))

    def retry(self) -> None:
        """Try again what could not be written, once a minute. Called often."""
        with self._changed:
            if self._pending and time.monotonic() >= self._retry_at_s:
                self._start_writer()

    def flush(self, patience_s: float) -> None:
        """Wait until everything is written or has failed, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._writer is None, patience_s)

    def _start_writer(self) -> None:
        self._retry_at_s = time.monotonic() + RETRY_S
        if self._writer is None:
            writer = threading.Thread(target=self._write_all, name="state", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: tried again like a disk that is full
                writer.start()
                self._writer = writer

    def failed(self, error: OSError) -> None:
        """Tell once that nothing can be kept."""
        if not self.problem:
            self.problem = describe(error)
            what = "cannot keep state in %s: %s; going on without, a restart will forget (agent.state_dir)"
            log.warning(what, self.path, self.problem.removeprefix(f"{self.path}: "))

    def succeeded(self) -> None:
        """Note that writing works."""
        if self.problem:
            log.info("state in %s can be kept again", self.path)
            self.problem = ""

    def _write_all(self) -> None:
        failed: set[Path] = set()
        while True:
            with self._changed:
                path = next((path for path in self._pending if path not in failed), None)
                if path is None:
                    self._writer = None  # the next `put` brings another: changes are rare
                    self._changed.notify_all()
                    return
                data = self._pending[path]
                self._writing_since_s = time.monotonic()
            try:
                _replace(path, data)
            except OSError as error:
                self.failed(error)
                failed.add(path)
            else:
                self.succeeded()
            with self._changed:
                self._writing_since_s = None
                if self._pending.get(path) is data and path not in failed:
                    del self._pending[path]


class FileState:
    """One memory (`agent.api.State`)."""

    def __init__(self, directory: StateDir, name: str) -> None:
        self._directory = directory
        self._path = directory.path / f"{name}.json"

    def load(self) -> dict[str, Any]:
        """Return what was saved last; empty when there is nothing usable, or no answer within two seconds."""
        pending = self._directory.pending(self._path)
        if pending is not None:
            content: dict[str, Any] = json.loads(pending)["content"]
            return content
        loaded: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: loaded.append(self._load()), name="state-load", daemon=True)
        reader.start()
        reader.join(LOAD_PATIENCE_S)
        if not loaded:
            self._directory.failed(TimeoutError(f"no answer within {LOAD_PATIENCE_S:g} s"))
            return {}
        return loaded[0]

    def save(self, content: Mapping[str, Any]) -> None:
        """Replace what is kept, soon: written beside, synced, renamed over."""
        data = json.dumps({"version": VERSION, "content": content}, separators=(",", ":")).encode()
        self._directory.put(self._path, data)

    def _load(self) -> dict[str, Any]:
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

    def _set_aside(self, why: str) -> None:
        aside = self._path.with_suffix(".corrupt")
        try:
            if self._directory.read_only:
                raise PermissionError("this command changes nothing")
            self._path.replace(aside)
        except OSError as error:
            log.warning("state %s is unusable (%s) and stays: %s", self._path, why, describe(error))
        else:
            log.warning("state %s is unusable (%s); set aside as %s", self._path, why, aside.name)


def _replace(path: Path, data: bytes) -> None:
    """Write a file beside, sync it, rename it over. Raises OSError, and then the old file stands."""
    beside = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
