"""What the kernel log tells: GPU errors (XID), NVSwitch errors (SXID), processes killed for memory, tasks that hang.

What each metric means and what its absence means: kernel.md.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agent.api import Collector, Duration, Lane, NotPresent
from agent.hw.kmsg import MaskedError, Reader
from agent.hw.procfs import FormatError, boot_id
from agent.hw.sysfs import read_text
from agent.hw.xid import own_table
from collectors.kernel import metrics
from collectors.kernel.folding import Folding
from collectors.kernel.gpus import Gpus
from collectors.kernel.ledger import Ledger
from collectors.kernel.lines import Xid, read
from collectors.kernel.page import Page
from collectors.kernel.position import Position
from collectors.kernel.reports import Reports, similarity
from collectors.kernel.severities import Severities

if TYPE_CHECKING:
    from agent.api import Context, Event, Out
    from agent.hw.kmsg import Record
    from collectors.kernel.gpus import Names
    from collectors.kernel.lines import Fact

RUN_LIMIT_BYTES = 8 << 20  # of records read in one run; a storm's others wait for the next
UNIMPORTANT_SAVE_S = 60.0
_USER_SPACE = 8  # the lowest priority with a facility other than the kernel's
_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True)
class Options:
    """Configuration of the collector."""

    xid_severity: Mapping[str, Literal["info", "warning", "error", "critical"]] = field(
        default_factory=dict,
        metadata={"help": "Severities by XID, as in {'63': warning}; win over the table and the word in the line."},
    )

    def __post_init__(self) -> None:
        """Refuse what is no XID."""
        for code in self.xid_severity:
            if not (code.isascii() and code.isdigit() and len(code) <= 4):  # noqa: PLR2004 - as in the log's lines
                raise ValueError(f"xid_severity: expected XIDs such as '63', got {code!r}")


class Kernel(Collector):
    """Reads the kernel log to its end at each run."""

    name = "kernel"
    metrics = metrics.METRICS
    lane = Lane.THREAD  # files of the GPU driver
    Options = Options
    needs = "read access to the kernel log (/dev/kmsg; CAP_SYSLOG where kernel.dmesg_restrict is set)"
    interval = Duration(1)

    def __init__(self, options: Any, ctx: Context) -> None:
        super().__init__(options, ctx)
        keys: Options = options
        self._boot_id = _boot_id(ctx)
        self._reader: Reader | None = None
        self._position = Position(ordered=False)
        self._ledger = Ledger()
        self._gpus = Gpus(ctx)
        self._severities = Severities(own_table(), keys.xid_severity)
        self._reports = Reports(self._severities, self._boot_id)
        self._folding = Folding()
        self._events: list[Event] = []  # until they are handed over
        self._failed: list[tuple[str, Exception | str]] = []  # of looking for GPUs
        self._page = Page(ctx, own_table(), self._severities)
        self._saved_s = ctx.clock.monotonic()
        self._restored = False
        self._unsaved = False  # something was counted
        self._urgent = False  # and it was a fact

    def open(self) -> None:
        """Open the log, and ask the driver which GPUs there are. Raises NotPresent, OSError."""
        if self._reader is None:
            self._reader = _open(str(self.ctx.kmsg))
            self._restore(self._reader)
        self._failed = self._gpus.look()

    def collect(self, out: Out) -> None:
        """Read what is new, and show what was counted since boot."""
        reader = self._reader
        if reader is None:
            raise RuntimeError("not open")
        self._gpus.hear()
        wall_s, boot_s = self.ctx.clock.wall(), _uptime_s(self.ctx)
        try:
            for record in reader.read(RUN_LIMIT_BYTES):
                self._take(record, wall_s, boot_s)
        except BaseException:
            self.close()  # what it had read and nobody took is to be read again
            raise
        self._count_reading(reader)
        now_s = self.ctx.clock.monotonic() if boot_s is None else boot_s
        self._events += self._folding.due(now_s)
        self._save(reader)
        self._page.show(self._ledger, self._gpus, out)
        for event in self._events:
            out.event(event)
        self._events = []
        for what, error in self._failed:
            out.failed(what, error)

    def found(self) -> str:
        """Say what is read."""
        return f"kernel log {self.ctx.kmsg}"

    def close(self) -> None:
        """Let go of the log and of the thread that asks the driver."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._count_reading(reader)
            self._save(reader, at_once=True)
            reader.close()
        self._gpus.close()

    def _take(self, record: Record, wall_s: float, uptime_s: float | None) -> None:
        """Count a record, unless it was read before."""
        fact = read(record.text) if record.priority < _USER_SPACE else None
        if not self._position.take(record, tells=fact is not None):
            return
        self._unsaved = True
        if fact is not None:
            self._ledger.records["matched"] += 1
            self._count(fact, record, *self._when(record, wall_s, uptime_s))
        else:
            self._ledger.records["unmatched" if record.priority < _USER_SPACE else "ignored"] += 1

    def _count(self, fact: Fact, record: Record, at_s: float, boot_s: float) -> None:
        self._urgent = True
        reported = self._ledger.take(fact, at_s, boot_s)
        if reported is None:
            return
        if isinstance(reported, Xid) and not self._gpus.knows(reported.address) and self._gpus.looked_long_ago():
            self._failed = self._gpus.look()
        make = self._reports.maker(reported, record, at_s, self._names)
        self._events += self._folding.take(similarity(reported), boot_s, make)

    def _when(self, record: Record, wall_s: float, uptime_s: float | None) -> tuple[float, float]:
        """Return when a record was written, since the epoch and since boot; of one that cannot be, when it was read."""
        written_s = record.time_us / 1e6
        if uptime_s is None:
            return wall_s, self.ctx.clock.monotonic()
        if written_s > uptime_s + _CLOCK_SLACK_S:
            return wall_s, uptime_s
        return wall_s - max(0.0, uptime_s - written_s), written_s

    def _names(self, address: str) -> Names:
        return self._gpus.names(address, self._ledger.uuids.get(address, ""))

    def _count_reading(self, reader: Reader) -> None:
        if reader.overruns or reader.errors:
            self._ledger.overruns += reader.overruns
            self._ledger.records["error"] += reader.errors
            reader.overruns = reader.errors = 0
            self._unsaved = True

    def _restore(self, reader: Reader) -> None:
        """Go on from where the log was left on this boot, by this collector or by one before it."""
        if not self._restored:
            self._restored = True
            content = self.ctx.state.load()
            if self._boot_id and content.get("boot_id") == self._boot_id and content.get("path") == reader.path:
                try:
                    position, ledger = Position.from_json(content["position"]), Ledger.from_json(content["ledger"])
                except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    self.ctx.log.warning("what was kept of the kernel log is unusable (%r); read from its start", error)
                else:
                    self._position, self._ledger = position, ledger
        if self._position.ordered != reader.is_device:
            self._position = Position(ordered=reader.is_device)

    def _save(self, reader: Reader, *, at_once: bool = False) -> None:
        """Keep position and totals together. What a reader would read again, and count again, may wait."""
        now_s = self.ctx.clock.monotonic()
        waits = reader.replays and not self._urgent and not at_once and now_s - self._saved_s < UNIMPORTANT_SAVE_S
        if not self._boot_id or not self._unsaved or waits:
            return
        self._unsaved = self._urgent = False
        self._saved_s = now_s
        self.ctx.state.save(
            {
                "boot_id": self._boot_id,
                "path": reader.path,
                "position": self._position.to_json(),
                "ledger": self._ledger.to_json(),
            }
        )


def _open(path: str) -> Reader:
    """Open the log. Raises NotPresent, and OSError that says what is needed."""
    try:
        return Reader(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NotPresent(f"no kernel log {path}") from None
    except MaskedError:
        raise NotPresent(f"{path} is /dev/null, as container runtimes hide it") from None
    except PermissionError as error:
        need = f"{error.strerror}: needs read access, and CAP_SYSLOG where kernel.dmesg_restrict is set"
        raise PermissionError(error.errno, f"{need}; in a container the device too", path) from None
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.ENXIO):
            raise NotPresent(f"{path}: the kernel keeps no log ({error.strerror})") from None
        raise


def _boot_id(ctx: Context) -> str:
    """Return this boot's id; empty when it cannot be read, and then nothing is kept or taken over."""
    try:
        return boot_id(ctx.proc)
    except (OSError, FormatError):
        return ""


def _uptime_s(ctx: Context) -> float | None:
    """Return seconds since boot; None when they cannot be read."""
    try:
        uptime_s = float(read_text(f"{ctx.proc}/uptime").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return uptime_s if math.isfinite(uptime_s) else None
