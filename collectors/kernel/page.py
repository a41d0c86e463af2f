"""The series of what was counted: handles kept as long as neither totals nor names change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectors.kernel import metrics
from collectors.kernel.ledger import OTHER, RESULTS, SCOPES, STALLS

if TYPE_CHECKING:
    from agent.api import Context, Metric, Out, Series, Value
    from agent.hw.xid import XidTable
    from collectors.kernel.gpus import Gpus
    from collectors.kernel.ledger import Ledger
    from collectors.kernel.severities import Severities

    Points = dict[tuple[Metric, tuple[str, ...]], Value]


class Page:
    """Turns totals into series."""

    def __init__(self, ctx: Context, table: XidTable, severities: Severities) -> None:
        self._ctx = ctx
        self._table = table
        self._severities = severities
        self._log = [ctx.series(metrics.RECORDS, result) for result in RESULTS]
        self._log.append(ctx.series(metrics.OVERRUNS))
        self._shown: tuple[Ledger, int] | None = None  # whose totals, and the version of the names
        self._series: list[Series] = []
        self._values: list[Value] = []
        self._last: list[Series] = []
        self._times: list[Value] = []  # by the monotonic clock

    def show(self, ledger: Ledger, gpus: Gpus, wall_s: float, out: Out) -> None:
        """Add everything that was counted. Nothing was later than `wall_s`, which is now."""
        out.extend(self._log, [*ledger.records.values(), ledger.overruns])
        if ledger.changed or self._shown != (ledger, gpus.version):
            points: Points = {}
            times: Points = {}
            self._add_gpus(points, times, ledger, gpus)
            self._add_switches(points, times, ledger)
            self._add_kernel(points, ledger)
            self._series, self._values = self._handles(points), list(points.values())
            self._last, self._times = self._handles(times), list(times.values())
            self._shown = (ledger, gpus.version)
            ledger.changed = False
        out.extend(self._series, self._values)
        out.extend(self._last, [round(min(at_s + ledger.clock_offset_s, wall_s), 3) for at_s in self._times])

    def _handles(self, points: Points) -> list[Series]:
        return [self._ctx.series(metric, *labels) for metric, labels in points]

    def _add_gpus(self, points: Points, times: Points, ledger: Ledger, gpus: Gpus) -> None:
        for names in gpus.all():
            for code in self._table.zeros:
                severity = self._severities.xid(code).value
                points[metrics.XID_ERRORS, (names.gpu, names.uuid, str(code), severity)] = 0
        for (address, code, word), total in ledger.xids.items():
            names = gpus.names(address)
            severity = self._severities.xid(code, word).value
            _add(points, metrics.XID_ERRORS, (names.gpu, names.uuid, _label(code), severity), total)
        for (address, code), at_s in ledger.xid_times.items():
            names = gpus.names(address)
            _raise(times, metrics.XID_LAST, (names.gpu, names.uuid, _label(code)), at_s)
        for code, word in sorted({(code, word) for _, code, word in ledger.xids}):
            name, severity = self._table.xid(code).name, self._severities.xid(code, word).value
            points[metrics.XID_INFO, (_label(code), name, severity, self._severities.action(code, word))] = 1

    def _add_switches(self, points: Points, times: Points, ledger: Ledger) -> None:
        for (switch, address, code, word), total in ledger.sxids.items():
            labels = (switch, address, _label(code), self._severities.sxid(code, word).value)
            _add(points, metrics.SXID_ERRORS, labels, total)
        for (switch, address, code), at_s in ledger.sxid_times.items():
            _raise(times, metrics.SXID_LAST, (switch, address, _label(code)), at_s)

    def _add_kernel(self, points: Points, ledger: Ledger) -> None:
        for scope in SCOPES:
            points[metrics.OOM_KILLS, (scope,)] = ledger.oom_kills[scope]
        points[metrics.HUNG_TASKS, ()] = ledger.hung_tasks
        for kind in STALLS:
            points[metrics.STALLS, (kind,)] = ledger.stalls[kind]


def _label(code: int) -> str:
    return "other" if code == OTHER else str(code)


def _add(points: Points, metric: Metric, labels: tuple[str, ...], total: int) -> None:
    """Add a total: two addresses may have one name, two words one severity."""
    points[metric, labels] = points.get((metric, labels), 0) + total


def _raise(times: Points, metric: Metric, labels: tuple[str, ...], at_s: float) -> None:
    times[metric, labels] = max(times.get((metric, labels), at_s), at_s)
