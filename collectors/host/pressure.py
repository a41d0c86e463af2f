"""Pressure stall information: how long work waited for CPU, memory and I/O, from /proc/pressure."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from agent.api import Kind, Metric
from agent.hw import procfs
from collectors.host.part import Part

if TYPE_CHECKING:
    from agent.api import Context, Out

RESOURCES = ("cpu", "memory", "io")
# A kernel without it, and one that has it switched off at boot (psi=0).
_ABSENT = (errno.ENOENT, errno.EOPNOTSUPP)

WAITING = Metric(
    "host_pressure_waiting_seconds_total",
    Kind.COUNTER,
    "Time in which at least one thread waited for the resource.",
    ("resource",),
    unit="seconds",
    source="/proc/pressure/* some",
)
STALLED = Metric(
    "host_pressure_stalled_seconds_total",
    Kind.COUNTER,
    "Time in which all threads that had work waited for the resource.",
    ("resource",),
    unit="seconds",
    source="/proc/pressure/* full",
)
METRICS = (WAITING, STALLED)


class Pressure(Part):
    """The files of /proc/pressure. A kernel without them is normal: no series."""

    source = "pressure"

    def __init__(self, ctx: Context) -> None:
        self._files = []
        for resource in RESOURCES:
            series = {"some": ctx.series(WAITING, resource)}
            if resource != "cpu":  # "full" is undefined for the CPU of a whole node, and 0 there (psi.rst)
                series["full"] = ctx.series(STALLED, resource)
            self._files.append((f"pressure/{resource}", f"{ctx.proc}/pressure/{resource}", series))

    def collect(self, out: Out) -> None:
        for name, path, series in self._files:
            try:
                totals_us = procfs.parse_pressure(procfs.read(path))
            except OSError as error:
                if error.errno not in _ABSENT:
                    out.failed(name, error)
            except procfs.FormatError as error:
                out.failed(name, error)
            else:
                for kind, handle in series.items():
                    if kind in totals_us:
                        out.add(handle, totals_us[kind] / 1e6)
