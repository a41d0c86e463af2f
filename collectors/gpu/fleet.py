"""All GPUs of the node: reading those that NVML has handles of, and showing how each of them is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from agent.api import Device
from agent.hw.nvml.session import NvmlError, SessionEndedError
from collectors.gpu import metrics
from collectors.gpu.board import Board
from collectors.gpu.lookup import FIRST_SHARE, UNKNOWN, Lookup, reason_of
from collectors.gpu.losses import change_of
from collectors.gpu.survey import Survey

if TYPE_CHECKING:
    from agent.api import Context, Metric, Out, Series
    from agent.hw.nvml.session import Session
    from collectors.gpu.census import Census, Listing
    from collectors.gpu.entry import Entry
    from collectors.gpu.memory import Memory
    from collectors.gpu.selection import Selection

LOST_AFTER_S = 60.0  # a reset is over by then

# Counted from the start, so that a first dropped answer shows as an increase.
JUDGED = (
    metrics.UTILIZATION,
    metrics.MEMORY_UTILIZATION,
    metrics.MEMORY_TOTAL,
    metrics.MEMORY_USED,
    metrics.TEMPERATURE,
    metrics.POWER,
)


@dataclass
class _Held:
    """A GPU that there is a handle of."""

    board: Board
    known_as: tuple[str, str]  # label and address: the board shows both
    is_fresh: bool = True  # not read yet


class Fleet:
    """The GPUs that the configuration wants: entries in the memory, and boards of those that NVML has handles of."""

    def __init__(self, ctx: Context, memory: Memory, selection: Selection, slow_interval_s: float) -> None:
        self._ctx = ctx
        self._memory = memory
        self._selection = selection
        self._slow_interval_s = slow_interval_s
        self._held: dict[str, _Held] = {}  # by UUID
        self._series: dict[tuple[object, ...], Series] = {}

    @property
    def entries(self) -> list[Entry]:
        """All known GPUs that have a name of their own, in the order of their labels."""
        named = {(entry.label, entry.uuid): entry for entry in self._memory.entries if entry.name}
        return sorted(named.values(), key=lambda e: (not e.label, len(e.label), e.label, e.address, e.uuid))

    @property
    def answering(self) -> int:
        """How many of them answer."""
        return sum(not entry.reason for entry in self._memory.entries)

    def is_due(self, now_s: float) -> bool:
        """Say whether there is a GPU that does not answer and is to be looked for."""
        return any(entry.is_due(now_s) and not self._deed(entry) for entry in self._memory.entries)

    def survey(self, nvml: Session, count: int, census: Census, listing: Listing, out: Out) -> None:
        """Look who is there. Raises SessionEndedError.

        A GPU that did not answer, for its own or for NVML's sake, gets a new handle and is asked anew what it supports.
        """
        now_s = self._ctx.clock.monotonic() + self._ctx.interval_s / 2
        failing = {entry.uuid for entry in self._memory.entries if entry.reason}
        due = {entry.uuid for entry in self._memory.entries if entry.is_due(now_s)}
        self._held = {uuid: held for uuid, held in self._held.items() if uuid not in due}
        survey = self._survey(census, listing, out)
        survey.take(Lookup(nvml, count, out, held=self._held.keys(), timeout_s=self._ctx.timeout_s), count)
        kept: dict[str, _Held] = {}
        for entry in self._memory.entries:
            held, handle = self._held.get(entry.uuid), survey.handles.get(entry.uuid)
            if held is not None and (handle is None or held.known_as == (entry.label, entry.address)):
                if handle is not None or entry.uuid in failing:  # else it was looked up just now, in vain
                    kept[entry.uuid] = held
            elif handle is not None:
                make, drop = partial(self._make, entry), partial(_count_dropped, entry)
                board = Board(handle, entry.address, make, drop, slow_interval_s=self._slow_interval_s)
                kept[entry.uuid] = _Held(board, (entry.label, entry.address))
        self._held = kept

    def survey_without_nvml(self, census: Census, listing: Listing, out: Out) -> None:
        """Look whom the kernel module shows."""
        self._survey(census, listing, out).take_without_nvml()

    def look_at_once(self) -> None:
        """Have every GPU that does not answer looked for by the next survey."""
        for entry in self._memory.entries:
            entry.look_at_once()

    def read(self, out: Out, now_s: float) -> None:
        """Read every GPU that can be, and show how each is. Raises SessionEndedError."""
        for entry in self.entries:
            deed = self._deed(entry)
            if deed == "hang":
                entry.fail("timeout", "a process hung on it; it is left alone for a while", now_s)
            elif deed:
                entry.fail(UNKNOWN, "a process ended on it; it is left alone for a while", now_s)
            elif entry.uuid in self._held:
                self._read(entry, self._held[entry.uuid], out, now_s)
            self._show(entry, out)
        for entry in self._memory.entries:
            if not entry.name:
                out.failed(entry.device, entry.trouble)

    def show_without_nvml(self, out: Out, reason: str, trouble: str) -> None:
        """Show every GPU as one that does not answer."""
        now_s = self._ctx.clock.monotonic()
        self._held = {}  # the handles ended with the session
        for entry in self.entries:
            entry.fail(reason, trouble, now_s)
            self._show(entry, out)

    def lost_for_long(self, census: Census, now_s: float) -> Entry | None:
        """Return a GPU that NVML says is lost though the system shows it: it may be lost to this session alone."""
        shown = set(census.pci or ()).intersection(census.driver or ())
        for entry in self.entries:
            since_s = entry.lost_since_s
            if since_s is not None and now_s - since_s > LOST_AFTER_S and entry.address in shown:
                return entry
        return None

    def tell_changes(self, out: Out) -> None:
        """Report which GPUs were lost or came back since that was last told. Not while NVML as a whole is gone."""
        for entry in self.entries:
            event = change_of(entry, self._memory)
            if event is not None:
                out.event(event)

    def _survey(self, census: Census, listing: Listing, out: Out) -> Survey:
        return Survey(
            *(self._ctx, self._memory, self._selection, census, out),
            listing=listing,
            first_wait_s=self._slow_interval_s,
        )

    def _read(self, entry: Entry, held: _Held, out: Out, now_s: float) -> None:
        is_starting = held.is_fresh and not entry.persistent
        out.working_on(entry.device, FIRST_SHARE * self._ctx.timeout_s if is_starting else None)
        try:
            answer = held.board.read(now_s, slack_s=self._ctx.interval_s / 2)
        except SessionEndedError:
            raise
        except NvmlError as error:
            if not entry.reason or held.is_fresh:
                entry.wait(now_s, self._slow_interval_s)
            held.is_fresh = False
            entry.fail(reason_of(error), str(error), now_s)
            return
        entry.answer()
        entry.persistent = held.board.persistent is True
        out.extend(answer.series, answer.values)
        for what, failure in answer.failures:
            out.failed(f"GPU {entry.name} {what}", failure)
        if held.is_fresh:
            lacking = ", ".join(held.board.lacking()) or "nothing"
            self._ctx.log.info("GPU %s does not support: %s", entry.name, lacking)
        held.is_fresh = False

    def _show(self, entry: Entry, out: Out) -> None:
        out.device(Device("gpu", entry.label, entry.uuid, entry.address))
        out.add(self._own(entry, metrics.UP), 0 if entry.reason else 1)
        if entry.reason:
            out.add(self._own(entry, metrics.ERROR, entry.reason), 1)
            out.failed(f"GPU {entry.name}", entry.trouble)
        else:
            for name, count in {**{metric.name: 0 for metric in JUDGED}, **entry.invalid}.items():
                out.add(self._own(entry, metrics.INVALID_SAMPLES, name), count)

    def _deed(self, entry: Entry) -> str:
        """Return what a process before did on the GPU, so that it is left alone; empty when nothing."""
        return self._ctx.avoid.get(entry.device, "")

    def _own(self, entry: Entry, metric: Metric, *labels: str) -> Series:
        key = (metric, entry.label, entry.uuid, *labels)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._make(entry, metric, *labels)
        return series

    def _make(self, entry: Entry, metric: Metric, *labels: str) -> Series:
        return self._ctx.series(metric, entry.label, entry.uuid, *labels)


def _count_dropped(entry: Entry, metric: Metric) -> None:
    entry.invalid[metric.name] = entry.invalid.get(metric.name, 0) + 1
