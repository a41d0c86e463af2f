"""Load, uptime, file descriptors, and which boot of which kernel this is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agent.api import Kind, Metric
from agent.hw import procfs
from collectors.host.part import Columns, Part

if TYPE_CHECKING:
    from agent.api import Context, Out, Series

LOADAVG = {
    0: Metric("host_load1", Kind.GAUGE, "Load average over 1 minute.", source="/proc/loadavg"),
    1: Metric("host_load5", Kind.GAUGE, "Load average over 5 minutes.", source="/proc/loadavg"),
    2: Metric("host_load15", Kind.GAUGE, "Load average over 15 minutes.", source="/proc/loadavg"),
    4: Metric("host_threads", Kind.GAUGE, "Threads of all processes, the kernel's included.", source="/proc/loadavg"),
}
UPTIME = {
    0: Metric("host_uptime_seconds", Kind.GAUGE, "Time since the node booted.", unit="seconds", source="/proc/uptime"),
}
FILE_NR = {
    0: Metric("host_file_descriptors_allocated", Kind.GAUGE, "Open files of the node.", source="/proc/sys/fs/file-nr"),
    2: Metric(
        "host_file_descriptors_maximum", Kind.GAUGE, "Open files that the node allows.", source="/proc/sys/fs/file-nr"
    ),
}
BOOT = Metric(
    "host_boot_info",
    Kind.GAUGE,
    "Which boot this is; always 1.",
    ("boot_id",),
    source="/proc/sys/kernel/random/boot_id",
)
UNAME = Metric(
    "host_uname_info",
    Kind.GAUGE,
    "Which kernel runs; always 1.",
    ("sysname", "release", "version", "machine"),
    source="/proc/sys/kernel and uname(2)",
)
METRICS = (*LOADAVG.values(), *UPTIME.values(), *FILE_NR.values(), BOOT, UNAME)


def parts(ctx: Context) -> list[Part]:
    """Return the parts of this module."""
    return [
        Columns(ctx, "loadavg", LOADAVG),
        Columns(ctx, "uptime", UPTIME),
        Columns(ctx, "sys/fs/file-nr", FILE_NR),
        Boot(ctx),
        Kernel(ctx),
    ]


class _Constant(Part):
    """A series that is 1 and says something in its labels, which cannot change while the agent runs."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._series: Series | None = None

    def collect(self, out: Out) -> None:
        if self._series is None:
            self._series = self.read()
        out.add(self._series, 1)

    def read(self) -> Series:
        raise NotImplementedError


class Boot(_Constant):
    """The kernel's random id of this boot."""

    source = "sys/kernel/random/boot_id"

    def read(self) -> Series:
        return self._ctx.series(BOOT, procfs.boot_id(self._ctx.proc))


class Kernel(_Constant):
    """What uname(1) prints, the name of the node left out: the scrape adds that."""

    source = "sys/kernel"

    def read(self) -> Series:
        names = [procfs.read_word(f"{self._ctx.proc}/sys/kernel/{file}") for file in ("ostype", "osrelease", "version")]
        return self._ctx.series(UNAME, *names, os.uname().machine)  # procfs has no file of it before Linux 6.1
