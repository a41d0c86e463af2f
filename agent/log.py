"""The agent's own log, on standard error: plain text for people and journald, or one JSON object a line."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque

LINES_LIMIT = 2000
FLUSH_PATIENCE_S = 0.5
LEVELS = ("debug", "info", "warning", "error")
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class TextFormatter(logging.Formatter):
    """`2026-11-30T15:00:00.123Z WARNING infiniband: mlx5_ib3: ...`; under journald its priority instead of the time."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Control characters are escaped: a device name must not forge a line."""
        text = one_line(record.getMessage())
        if record.exc_info:  # indented, for the same reason
            lines = self.formatException(record.exc_info).splitlines()
            text = "\n".join([text, *("  " + one_line(line) for line in lines)])
        if self._journal:
            return f"<{_PRIORITY.get(record.levelno, 6)}>{record.name}: {text}"
        return f"{_stamp(record.created)} {record.levelname} {record.name}: {text}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        import json  # noqa: PLC0415 - 1.4 MB that a collector's own process need not pay

        return json.dumps(line)  # ASCII: valid whatever the stream's encoding, and no character ends a line early


class PatientHandler(logging.Handler):
    """Hands lines to a thread that writes them, because standard error may be a pipe that nobody reads.

    Lines that pile up beyond `LINES_LIMIT` are dropped; the next one that gets through says how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._writer: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record. Never blocks."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a record that cannot be formatted must not stop who logs
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) >= LINES_LIMIT:
                self._dropped += 1
                return
            self._lines.append(line)
            self._changed.notify_all()
            if self._writer is None:
                writer = threading.Thread(target=self._write, name="log", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads: the next line tries again
                    writer.start()
                    self._writer = writer

    def flush(self) -> None:
        """Wait until everything is written, for a moment at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, FLUSH_PATIENCE_S)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines, dropped = list(self._lines), self._dropped
                self._dropped = 0
            if dropped:
                text = f"{dropped} lines were dropped: standard error did not take them"
                told = {"name": "log", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
                lines.append(self.format(logging.makeLogRecord(told)))
            data = "".join(line + "\n" for line in lines).encode("utf-8", "replace")
            with contextlib.suppress(OSError):  # closed, or on a full disk: there is nobody to tell
                while data:
                    data = data[os.write(2, data) :]
            with self._changed:
                for _ in range(len(lines) - bool(dropped)):
                    self._lines.popleft()
                self._changed.notify_all()


def setup(level: str = "info", form: str = "text") -> None:
    """Send the root logger to standard error. Called once, by the command line or a worker process."""
    handler = PatientHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(journal=_stderr_is_journal()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.raiseExceptions = False  # a log that cannot be written must not become more text on the same stream


def _stderr_is_journal() -> bool:
    # systemd.exec(5): JOURNAL_STREAM holds device:inode of the stream that the service's standard error is.
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _stamp(created: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created * 1000) % 1000:03d}Z"


def one_line(text: str) -> str:
    """Escape what is not printable: line breaks, terminal control sequences, undecodable bytes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
