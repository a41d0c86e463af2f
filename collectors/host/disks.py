"""Disk I/O of whole block devices, from /proc/diskstats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.api import Kind, Metric
from agent.hw import procfs
from collectors.host.part import Part

if TYPE_CHECKING:
    from agent.api import Context, Out, Series, Value
    from collectors.host.selection import Selection


def _counter(name: str, text: str, column: int, unit: str = "") -> Metric:
    source = f"/proc/diskstats column {column + 4}"
    return Metric(f"host_disk_{name}_total", Kind.COUNTER, text, ("device",), unit=unit, source=source)


# Column behind the device's name, and factor and divisor to the base unit (divided: 1001 ms are 1.001 s).
_SECTOR, _MS, _ONE = (procfs.SECTOR_BYTES, None), (1, 1000), (1, None)
COLUMNS = (
    (0, _ONE, _counter("reads_completed", "Reads completed.", 0)),
    (2, _SECTOR, _counter("read_bytes", "Data read.", 2, "bytes")),
    (3, _MS, _counter("read_time_seconds", "Time that all reads took together.", 3, "seconds")),
    (4, _ONE, _counter("writes_completed", "Writes completed.", 4)),
    (6, _SECTOR, _counter("written_bytes", "Data written.", 6, "bytes")),
    (7, _MS, _counter("write_time_seconds", "Time that all writes took together.", 7, "seconds")),
    (
        8,
        _ONE,
        Metric(
            "host_disk_io_in_flight",
            Kind.GAUGE,
            "Requests that the device works on now.",
            ("device",),
            source="/proc/diskstats column 12",
        ),
    ),
    (9, _MS, _counter("io_time_seconds", "Time with at least one request in flight.", 9, "seconds")),
    (
        10,
        _MS,
        _counter(
            "io_time_weighted_seconds", "Time in flight, each request counted; its rate is the queue.", 10, "seconds"
        ),
    ),
)
METRICS = tuple(metric for _, _, metric in COLUMNS)


class Disks(Part):
    """The rows of whole disks, as /sys/block lists them: partitions are not there."""

    source = "diskstats"

    def __init__(self, ctx: Context, selection: Selection) -> None:
        self._ctx = ctx
        self._selection = selection
        self._path = f"{ctx.proc}/diskstats"
        self._series: dict[str, list[Series]] = {}

    def open(self) -> None:
        # The kernel writes the slash of a name such as cciss/c0d0 as an exclamation mark in sysfs.
        names = [name.replace("!", "/") for name in procfs.list_names(f"{self._ctx.sys}/block")]
        self._series = {
            name: [self._ctx.series(metric, name) for metric in METRICS]
            for name in sorted(names)
            if name in self._selection
        }

    def collect(self, out: Out) -> None:
        if not self._series:
            return
        rows = procfs.parse_diskstats(procfs.read(self._path), self._series)
        if not rows:
            raise procfs.FormatError(f"none of {', '.join(self._series)} is in it")
        for name, row in rows.items():
            if isinstance(row, procfs.FormatError):
                out.failed(f"diskstats {name}", row)
                continue
            out.extend(self._series[name], [_in_base_units(row[column], *unit) for column, unit, _ in COLUMNS])

    def found(self) -> str:
        """Say how many disks there are."""
        return f"disks {len(self._series)}"


def _in_base_units(value: int, factor: int, divisor: int | None) -> Value:
    return value * factor if divisor is None else value / divisor
