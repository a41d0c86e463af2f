"""NVIDIA GPUs through the driver's library, NVML: what they do, how they are, and whether any are missing.

Also counted are the GPUs that the system shows without NVML. What each metric means and what its absence means: gpu.md.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agent.api import Collector, Duration, Lane, NotPresent
from agent.hw.nvml import library
from agent.hw.nvml.session import NO_PERMISSION, NvmlError, SessionEndedError
from collectors.gpu import metrics
from collectors.gpu.census import Census
from collectors.gpu.connection import Connection
from collectors.gpu.expectation import Expectation
from collectors.gpu.fleet import Fleet
from collectors.gpu.lookup import UNKNOWN
from collectors.gpu.memory import Memory
from collectors.gpu.selection import Selection

if TYPE_CHECKING:
    from agent.api import Context, Out, Series
    from collectors.gpu.census import Listing


@dataclass(frozen=True)
class Options:
    """Configuration of the collector."""

    slow_interval: Duration = field(
        default=Duration(60),
        metadata={"help": "How often limits, ECC totals, links and identity are read, and GPUs looked for."},
    )
    nvml_library: str | None = field(
        default=None,
        metadata={"help": "File of the driver's library; null: wherever the dynamic loader finds it.", "path": True},
    )
    expected_count: Literal["auto"] | int = field(
        default="auto",
        metadata={"help": "GPUs that should be there; auto: by VM size, or as many as there were.", "minimum": 0},
    )
    per_process: bool = field(default=False, metadata={"help": "Memory by process. Not part of this version."})
    device_include: tuple[str, ...] = field(
        default=(), metadata={"help": "Globs of NVML indices or UUIDs of the GPUs to read; empty: all."}
    )
    device_exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Globs of NVML indices or UUIDs of GPUs never to read; wins over device_include."}
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be had. Raises ValueError."""
        if self.per_process:
            raise ValueError("per_process: true is not part of this version")


class Gpu(Collector):
    """Reads one GPU after the other; one that hangs ends the process, and the next one leaves that GPU alone."""

    name = "gpu"
    metrics = metrics.METRICS
    lane = Lane.PROCESS
    Options = Options
    needs = "an NVIDIA GPU, and the driver with its library (libnvidia-ml.so.1)"
    interval = Duration(5)
    timeout = Duration(2)

    def __init__(self, options: Any, ctx: Context) -> None:
        super().__init__(options, ctx)
        keys: Options = options
        selection = Selection(keys.device_include, keys.device_exclude)
        self._slow_interval_s = float(keys.slow_interval)
        self._memory = Memory(ctx)
        self._memory.keep_out(selection)
        self._census = Census(ctx)
        self._connection = Connection(keys.nvml_library, ctx, self._memory)
        self._expectation = Expectation(keys.expected_count, ctx.vm_size, self._memory, selection)
        self._fleet = Fleet(ctx, self._memory, selection, self._slow_interval_s)
        self._enumerated: int | None = None  # in this session
        self._hidden = 0  # GPUs that the system shows and others are given
        self._surveyed_s = float("-inf")
        self._driver_info: tuple[tuple[str, ...], Series] | None = None

    @classmethod
    def look(cls, options: Any, ctx: Context) -> None:
        """Raise NotPresent when neither system, configuration, VM size nor this boot's past knows a GPU.

        That the library is installed counts where the system cannot tell, for sysfs shows no PCI.
        """
        keys: Options = options
        census = Census(ctx)
        census.take(lambda what, error: ctx.log.debug("%s: %s", what, error))
        if keys.nvml_library is not None or not census.is_empty:
            return
        if census.pci is None and library.installed(None):
            return
        memory = Memory(ctx)
        selection = Selection(keys.device_include, keys.device_exclude)
        if not Expectation(keys.expected_count, ctx.vm_size, memory, selection).count():
            raise NotPresent(f"no NVIDIA GPU in {ctx.sys}/bus/pci, {ctx.proc}/driver/nvidia or {ctx.dev}")

    def open(self) -> None:
        pass  # everything may hang, and is done where a hang can be blamed on what is in hand

    def collect(self, out: Out) -> None:
        """Read all GPUs. Raises NotPresent when there are none and none are expected, Outdated for a new driver."""
        now_s = self.ctx.clock.monotonic()
        self._census.take(out.failed)
        try:
            is_up = self._ask_nvml(out, now_s)
        except SessionEndedError as error:
            self._connection.give_up(error, now_s)
        if not is_up:
            self._go_without(out, now_s)
        self._show_node(out, is_up=is_up)
        self._memory.save()

    def found(self) -> str:
        total = max(len(self._memory.entries), self._expectation.count() or 0)
        answering = self._fleet.answering
        gpus = f"{answering} GPUs" if answering == total else f"{answering} of {total} GPUs"
        version = self._connection.driver.version
        return f"{gpus}, driver {version}" if version else f"{gpus}, no NVML"

    def seen(self) -> bool:
        return not self._census.is_empty or bool(self._memory.entries)

    def close(self) -> None:
        with contextlib.suppress(NvmlError):  # the process ends, and with it whatever NVML holds
            self._connection.close()

    def _ask_nvml(self, out: Out, now_s: float) -> bool:
        """Look who is there, when that is due, and read all; False when NVML cannot be had.

        Raises SessionEndedError.
        """
        nvml = self._connection.ensure(out, now_s)
        if nvml is None:
            return False
        session, count = nvml
        is_changed = count != self._enumerated
        if is_changed:
            self._fleet.look_at_once()
        if is_changed or self._survey_due(now_s) or self._fleet.is_due(now_s + self.ctx.interval_s / 2):
            self._fleet.survey(session, count, self._census, self._listing(out, count), out)
            self._enumerated = count
            self._surveyed_s = now_s
        self._fleet.read(out, now_s)
        self._require_anything("NVML lists none")
        lost = self._fleet.lost_for_long(self._census, now_s)
        if lost is not None:
            self._connection.renew(f"GPU {lost.name} stays lost ({lost.trouble})", now_s)
        self._fleet.tell_changes(out)
        return True

    def _require_anything(self, nvml: str) -> None:
        shown = self._enumerated or not self._census.is_empty
        if not (shown or self._memory.entries or self._expectation.count()):
            raise NotPresent(f"no NVIDIA GPU on PCI or in {self.ctx.proc}/driver/nvidia ({nvml})")

    def _listing(self, out: Out, count: int | None) -> Listing:
        listing = self._census.listing(out, nvml=count, promised=self._expectation.promised)
        self._hidden = listing.hidden
        return listing

    def _survey_due(self, now_s: float) -> bool:
        return now_s - self._surveyed_s + self.ctx.interval_s / 2 >= self._slow_interval_s

    def _go_without(self, out: Out, now_s: float) -> None:
        """Show what is known without NVML: which GPUs there are, and that none of them answers."""
        self._enumerated = None
        if self._survey_due(now_s):
            self._fleet.survey_without_nvml(self._census, self._listing(out, None), out)
            self._surveyed_s = now_s
        self._require_anything(self._trouble)
        reason = UNKNOWN
        if self._connection.avoided == "hang":
            reason = "timeout"
        elif self._connection.code == NO_PERMISSION:
            reason = "no_permission"
        out.failed("NVML", self._trouble)
        self._fleet.show_without_nvml(out, reason, self._trouble)

    @property
    def _trouble(self) -> str:
        if self._connection.avoided:
            return "a process did not survive its start; it is left alone for a while"
        return str(self._connection.error)

    def _show_node(self, out: Out, *, is_up: bool) -> None:
        counts = self._census.counts(self._connection.count, is_up=is_up)
        for source, number in counts.items():
            out.add(self.ctx.series(metrics.COUNT, source), max(number - self._memory.excluded, 0))
        entries = self._fleet.entries
        named = [(entry.label, entry.uuid) for entry in entries if entry.uuid or entry.address]
        indices = [(entry.label, "") for entry in entries if not entry.uuid and not entry.address]
        # What shows GPUs of others, too, does not tell how many there should be here.
        # Nor does a number of NVML's alone.
        others = {"nvml", "pci", "proc"} if self._hidden else {"nvml"}
        ours = [number for source, number in counts.items() if source not in others]
        unnamed = max(max(ours, default=0) - self._memory.excluded - len(named), 0)
        self._expectation.saw([*named, *[*indices, *[("", "")] * unnamed][:unnamed]])
        expected = self._expectation.count()
        if expected is not None:
            out.add(self.ctx.series(metrics.EXPECTED_COUNT), expected)
        out.add(self.ctx.series(metrics.NVML_UP), int(is_up))
        if self._connection.code is not None:
            out.add(self.ctx.series(metrics.NVML_RETURN_CODE), self._connection.code)
        self._show_driver(out)

    def _show_driver(self, out: Out) -> None:
        driver = self._connection.driver
        labels = (driver.version, driver.cuda_version, driver.nvml_version, self._connection.module_version or "")
        if not any(labels):
            return
        if self._driver_info is None or self._driver_info[0] != labels:
            self._driver_info = labels, self.ctx.series(metrics.DRIVER_INFO, *labels)
        out.add(self._driver_info[1], 1)
