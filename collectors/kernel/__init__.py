"""What the kernel log tells: GPU errors (XID), NVSwitch errors (SXID), processes killed for memory, tasks that hang.

What each metric means and what its absence means: kernel.md.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agent.api import Collector, Duration, Lane, NotPresent
from agent.hw.kmsg import MaskedError, Reader
from agent.hw.procfs import FormatError, boot_id
from agent.hw.xid import own_table
from collectors.kernel import metrics
from collectors.kernel.folding import Folding
from collectors.kernel.gpus import Gpus
from collectors.kernel.ledger import Ledger
from collectors.kernel.lines import GpuNamed, Xid, read
from collectors.kernel.moments import Present
from collectors.kernel.page import Page
from collectors.kernel.position import Position
from collectors.kernel.reports import Reports
from collectors.kernel.severities import Severities

if TYPE_CHECKING:
    from agent.api import Context, Event, Out
    from agent.hw.kmsg import Record
    from collectors.kernel.lines import Fact
    from collectors.kernel.moments import Moment

RUN_LIMIT_BYTES = 8 << 20  # of records read in one run; a storm's others wait for the next
UNIMPORTANT_SAVE_S = 60.0
_USER_SPACE = 8  # the lowest priority with a facility other than the kernel's


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
        self._reports = Reports(self._severities, self._boot_id, self._gpus.names)
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
        self._gpus.hear()
        self._failed = self._gpus.look()

    def collect(self, out: Out) -> None:
        """Read what is new, and show what was counted since boot."""
        reader = self._reader
        if reader is None:
            raise RuntimeError("not open")
        self._gpus.hear()
        present = Present(self.ctx)
        self._ledger.set_clock(present.now)
        try:
            for record in reader.read(RUN_LIMIT_BYTES):
                self._take(record, present)
        except BaseException:
            self.close()  # what it had read and nobody took is to be read again
            raise
        self._count_reading(reader)
        if due := self._folding.due(present.now.boot_s):
            self._events += due
            self._unsaved = self._urgent = True
        self._save(reader)
        self._page.show(self._ledger, self._gpus, present.now.wall_s, out)
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

    def _take(self, record: Record, present: Present) -> None:
        """Count a record, unless it was read before."""
        fact = read(record.text) if record.priority < _USER_SPACE else None
        if not self._position.take(record, tells=fact is not None):
            return
        self._unsaved = True
        if fact is not None:
            self._ledger.records["matched"] += 1
            self._count(fact, record, present.written(record))
        else:
            self._ledger.records["unmatched" if record.priority < _USER_SPACE else "ignored"] += 1

    def _count(self, fact: Fact, record: Record, written: Moment) -> None:
        self._urgent = True
        if isinstance(fact, GpuNamed):
            self._gpus.learn(fact.address, fact.uuid)
        reported = self._ledger.take(fact, written)
        if reported is None:
            return
        if isinstance(reported, Xid) and not self._gpus.knows(reported.address) and self._gpus.looked_long_ago():
            self._failed = self._gpus.look()
        make = self._reports.maker(reported, record, written.wall_s)
        self._events += self._folding.take(self._reports.similarity(reported), written.boot_s, make)

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
            try:
                if content := self.ctx.state.load():
                    self._take_over(content, reader.path)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self.ctx.log.warning("what was kept of the kernel log is unusable (%r); read from its start", error)
        if self._position.ordered != reader.is_device:
            self._position = Position(ordered=reader.is_device)

    def _take_over(self, content: Mapping[str, Any], path: str) -> None:
        folding = Folding.from_json(content["folding"])
        if not self._boot_id or (content["boot_id"], content["path"]) != (self._boot_id, path):
            self._events += folding.end()
            self._unsaved = self._urgent = True
            return
        position, ledger = Position.from_json(content["position"]), Ledger.from_json(content["ledger"])
        self._gpus.restore(content["gpus"])
        self._position, self._ledger, self._folding = position, ledger, folding

    def _save(self, reader: Reader, *, at_once: bool = False) -> None:
        """Keep position and totals together. What a reader would read again, and count again, may wait."""
        now_s = self.ctx.clock.monotonic()
        urgent = self._urgent or self._gpus.unsaved or at_once or not reader.replays
        waits = not urgent and now_s - self._saved_s < UNIMPORTANT_SAVE_S
        if not self._boot_id or not (self._unsaved or self._gpus.unsaved) or waits:
            return
        self._unsaved = self._urgent = self._gpus.unsaved = False
        self._saved_s = now_s
        self.ctx.state.save(
            {
                "boot_id": self._boot_id,
                "path": reader.path,
                "position": self._position.to_json(),
                "ledger": self._ledger.to_json(),
                "folding": self._folding.to_json(),
                "gpus": self._gpus.to_json(),
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
