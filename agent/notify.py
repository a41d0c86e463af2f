"""Messages to systemd (sd_notify(3)): ready, reloading, stopping, status, and the watchdog."""

from __future__ import annotations

import contextlib
import os
import socket
import time


class Notifier:
    """Talks to the service manager where there is one; costs nothing where there is none."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")

    @property
    def watchdog_s(self) -> float | None:
        """Seconds between two signs of life: half of what the unit allows. None without a watchdog."""
        usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
        if not self._address or not usec.isdigit() or (pid and pid != str(os.getpid())):
            return None
        return int(usec) / 2_000_000 or None  # 0 means that it is off

    def ready(self, status: str) -> None:
        """Say that the service serves; ends a reload, too."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Say that the configuration is being read again."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Say that the service ends."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        # A service manager that does not listen is no reason to stop serving.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.setblocking(False)  # noqa: FBT003 - its only argument
            s.sendto(message.encode(), name)
