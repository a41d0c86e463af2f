"""All GPUs of the node: reading those that NVML has handles of, and showing how each of them is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from agent.api import Device, Event, Severity
from agent.hw.nvml.session import NvmlError
from collectors.gpu import metrics
from collectors.gpu.board import Board
from collectors.gpu.survey import FIRST_SHARE, UNKNOWN, Survey, device_name, reason_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from agent.api import Context, Metric, Out, Series
    from agent.hw.nvml.session import Session
    from collectors.gpu.census import Census
    from collectors.gpu.memory import Entry, Memory
    from collectors.gpu.selection import Selection

# Counted from the start, so that a first dropped answer shows as an increase.
JUDGED = (
    metrics.UTILIZATION,
    metrics.MEMORY_UTILIZATION,
    metrics.MEMORY_TOTAL,
    metrics.MEMORY_USED,
    metrics.TEMPERATURE,
    metrics.POWER,
)


class Fleet:
    """The GPUs that the configuration wants: entries in the memory, and boards of those that NVML has handles of."""

    def __init__(self, ctx: Context, memory: Memory, selection: Selection, slow_interval_s: float) -> None:
        self._ctx = ctx
        self._memory = memory
        self._selection = selection
        self._slow_interval_s = slow_interval_s
        self._boards: dict[str, Board] = {}  # by UUID
        self._fresh: set[str] = set()  # boards that were not read yet
        self._series: dict[tuple[object, ...], Series] = {}

    @property
    def entries(self) -> list[Entry]:
        """All known GPUs, in the order of their labels."""
        return sorted(self._memory.entries, key=lambda e: (not e.label, len(e.label), e.label, e.address, e.uuid))

    @property
    def answering(self) -> int:
        """How many of them answer."""
        return sum(not entry.reason for entry in self._memory.entries)

    @property
    def incomplete(self) -> bool:
        """Whether there is a GPU that NVML has no handle of, so that another look may find it."""
        return any(entry.uuid not in self._boards and not self._deed(entry) for entry in self._memory.entries)

    def survey(self, nvml: Session, count: int, census: Census, out: Out, fatal: Collection[int]) -> None:
        """Look who is there. Raises NvmlError for the codes in `fatal`.

        A GPU that did not answer, for its own or for NVML's sake, gets a new handle and is asked anew what it supports.
        """
        answering = {entry.uuid for entry in self._memory.entries if not entry.reason}
        self._boards = {uuid: board for uuid, board in self._boards.items() if uuid in answering}
        survey = Survey(self._ctx, self._memory, self._selection, out, held=self._boards.keys(), fatal=fatal)
        survey.take(nvml, count, census)
        self._boards = {uuid: board for uuid, board in self._boards.items() if uuid in survey.handles}
        for entry in self._memory.entries:
            if entry.uuid in survey.handles and entry.uuid not in self._boards:
                make, drop = partial(self._make, entry), partial(_count_dropped, entry)
                gpu = survey.handles[entry.uuid]
                self._boards[entry.uuid] = Board(gpu, entry.address, make, drop, slow_interval_s=self._slow_interval_s)
                self._fresh.add(entry.uuid)

    def survey_without_nvml(self, census: Census, out: Out) -> None:
        """Look whom the kernel module shows."""
        Survey(self._ctx, self._memory, self._selection, out).add_strangers(census)

    def read(self, out: Out, now_s: float, fatal: Collection[int]) -> None:
        """Read every GPU that can be, and show how each is. Raises NvmlError for the codes in `fatal`."""
        for entry in self.entries:
            deed = self._deed(entry)
            if deed == "hang":
                entry.fail("timeout", "a process hung on it; it is left alone for a while")
            elif deed:
                entry.fail(UNKNOWN, "a process ended on it; it is left alone for a while")
            elif entry.uuid in self._boards:
                self._read(entry, self._boards[entry.uuid], out, now_s, fatal)
            self._show(entry, out)

    def show_without_nvml(self, out: Out, reason: str, trouble: str) -> None:
        """Show every GPU as one that does not answer."""
        for entry in self.entries:
            entry.fail(reason, trouble)
            self._show(entry, out)

    def tell_changes(self, out: Out) -> None:
        """Report which GPUs were lost or came back since that was last told. Not while NVML as a whole is gone."""
        for entry in self.entries:
            alive = not entry.reason
            if alive != (entry.alive is not False):
                # Lost before this run began: for each later run of this boot it is the same fact.
                key = f"gpu_lost {self._memory.boot_id} {entry.name}" if entry.alive is None else ""
                out.event(_event(entry, key, alive=alive))
            entry.alive = alive

    def _read(self, entry: Entry, board: Board, out: Out, now_s: float, fatal: Collection[int]) -> None:
        is_first = entry.uuid in self._fresh
        out.working_on(device_name(entry.label), FIRST_SHARE * self._ctx.timeout_s if is_first else None)
        try:
            answer = board.read(now_s, slack_s=self._ctx.interval_s / 2, fatal=fatal)
        except NvmlError as error:
            if error.code in fatal:
                raise
            entry.fail(reason_of(error), str(error))
            return
        entry.fail("", "")
        out.extend(answer.series, answer.values)
        for what, failure in answer.failures:
            out.failed(f"{device_name(entry.label)} {what}", failure)
        if is_first:
            self._fresh.discard(entry.uuid)
            self._tell_lacking(entry, board.lacking())

    def _tell_lacking(self, entry: Entry, lacking: list[str]) -> None:
        """Log what the GPU does not support, unless a process before this one has."""
        if lacking != entry.lacking:
            entry.lacking = lacking
            self._ctx.log.info("GPU %s does not support: %s", entry.label, ", ".join(lacking) or "nothing")

    def _show(self, entry: Entry, out: Out) -> None:
        out.device(Device("gpu", entry.label, entry.uuid, entry.address))
        out.add(self._own(entry, metrics.UP), 0 if entry.reason else 1)
        if entry.reason:
            out.add(self._own(entry, metrics.ERROR, entry.reason), 1)
            out.failed(device_name(entry.name), entry.trouble)
        else:
            for name, count in {**{metric.name: 0 for metric in JUDGED}, **entry.invalid}.items():
                out.add(self._own(entry, metrics.INVALID_SAMPLES, name), count)

    def _deed(self, entry: Entry) -> str:
        """Return what a process before did on the GPU, so that it is left alone; empty when nothing."""
        return self._ctx.avoid.get(device_name(entry.label), "") if entry.label else ""

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


def _event(entry: Entry, key: str, *, alive: bool) -> Event:
    labels = {"gpu": entry.label, "uuid": entry.uuid, "cause": entry.reason}
    labels = {name: value for name, value in labels.items() if value}
    if alive:
        text = f"GPU {entry.name} answers again"
        return Event("gpu_recovered", Severity.INFO, "gpu", text, device=entry.name, labels=labels, source="nvml")
    text = f"GPU {entry.name} does not answer: {entry.trouble}"
    return Event("gpu_lost", Severity.CRITICAL, "gpu", text, device=entry.name, labels=labels, source="nvml", key=key)
