"""One simulated fabric port: traffic by load, a link that goes and returns, a driver that hangs or resets."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from agent.sim.infiniband import port_directory
from agent.sim.tree import rewrite

if TYPE_CHECKING:
    from pathlib import Path

WORD_BYTES = 4  # port_*_data count words
_PACKET_BYTES = 4096
_WRITE_BYTES = 1 << 20
_BUSY_SHARE = 0.62  # of the link's rate while a job computes and exchanges by turns
_NARROW = (1 << 32) - 1  # where port_xmit_wait stays
_DOWNED_LIMIT = 255
_WAKES = 4  # after the FIFO went
_HANGING = "counters/port_xmit_data"
_STATUS = {
    True: {"state": "4: ACTIVE", "phys_state": "5: LinkUp"},
    False: {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"},
}


class SimPort:
    """The only port of an adapter that `agent.sim.infiniband` has written. `write` shows what changed."""

    def __init__(self, sys: Path, device: str, *, netdev: str, rate_bps: int, phase: float) -> None:
        self.device = device
        self.netdev = netdev
        self.rate_bps = rate_bps
        self.up = True
        self._directory = port_directory(sys, device).resolve()
        self._aside = self._directory.parents[2]  # where nobody looks for files of a port
        self.address = self._directory.parents[3].name
        self._rate_text = (self._directory / "rate").read_text(encoding="utf-8").strip()
        self._phase = phase
        self._sent = rate_bps * 4750 * (1 + phase / 9)  # bytes, of some days of work
        self._received = rate_bps * 4700 * (1 + phase / 7)
        self._waited = 4.1e8 * (1 + phase)  # ticks
        self._downed = 0
        self._shown: dict[str, str] = {}
        self._hung = False
        self._let_go = self._aside / "released"
        self._wakes_left = 0

    @property
    def hung(self) -> bool:
        """Whether a read of its traffic does not return."""
        return self._hung

    def advance(self, seconds: float, intensity: float) -> None:
        """Let time pass with so much of the usual traffic (0 to 1)."""
        sent = self.rate_bps / 8 * _BUSY_SHARE * intensity * seconds
        self._sent += sent
        self._received += sent * (0.985 + 0.03 * self._phase)
        self._waited += sent / 9e4

    def go_down(self) -> None:
        """Lose the link."""
        self.up = False
        self._downed = min(self._downed + 1, _DOWNED_LIMIT)

    def come_back(self) -> None:
        """Have the link again."""
        self.up = True

    def reset(self) -> None:
        """Start every counter anew, as a reset of the adapter does."""
        self._sent = self._received = self._waited = 0.0
        self._downed = 0

    def hang(self) -> None:
        """Have reads of the traffic sent not return, by a FIFO in place of the file.

        Who holds the file open reads its last content until it looks for new files.
        """
        fifo = self._aside / "fifo"
        os.mkfifo(fifo)
        fifo.replace(self._directory / _HANGING)
        self._hung = True

    def release(self) -> None:
        """Have the reads return and the next ones succeed. Does nothing unless it hangs."""
        if not self._hung:
            return
        self._hung = False
        path = self._directory / _HANGING
        self._let_go.unlink(missing_ok=True)
        self._let_go.hardlink_to(path)
        draft = self._aside / "draft"
        draft.write_text(f"{self._files()[_HANGING]}\n", encoding="utf-8")
        draft.replace(path)  # first: who goes on must find the file
        self._wakes_left = _WAKES
        self._wake_reader()

    def write(self) -> None:
        """Show what changed since the last time, in the files as they are."""
        for file, text in self._files().items():
            if self._shown.get(file) != text and not (self._hung and file == _HANGING):
                rewrite(self._directory / file, text)
                self._shown[file] = text
        if self._wakes_left:
            self._wake_reader()

    def _wake_reader(self) -> None:
        """Let a reader of the FIFO go on; it may have found it just before it went, and come to read it only now."""
        with contextlib.suppress(OSError):  # ENXIO: nobody reads
            os.close(os.open(self._let_go, os.O_WRONLY | os.O_NONBLOCK))
        self._wakes_left -= 1
        if not self._wakes_left:
            self._let_go.unlink()

    def _files(self) -> dict[str, str]:
        sent, received = int(self._sent), int(self._received)
        packets = {"xmit": sent // _PACKET_BYTES, "rcv": received // _PACKET_BYTES}
        counters = {
            "port_xmit_data": sent // WORD_BYTES,
            "port_rcv_data": received // WORD_BYTES,
            "port_xmit_wait": min(int(self._waited), _NARROW),
            "link_downed": self._downed,
            **{f"port_{way}_packets": count for way, count in packets.items()},
            **{f"unicast_{way}_packets": count for way, count in packets.items()},
        }
        return {
            "rate": self._rate_text,
            **_STATUS[self.up],
            **{f"counters/{name}": str(count) for name, count in counters.items()},
            "hw_counters/rx_write_requests": str(received // _WRITE_BYTES),
        }
