"""Space of the mounted file systems, asked so that one which never answers costs nothing but itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from agent.api import Kind, Metric
from agent.hw import mounts, procfs
from agent.hw.bulkhead import Bulkhead, Stalled
from collectors.host.part import Part

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from agent.api import Context, Out, Series
    from agent.hw.mounts import Mount
    from collectors.host.selection import Selection

_LABELS = ("mountpoint", "device", "fstype")


def _gauge(name: str, text: str, unit: str = "", source: str = "statvfs(3)") -> Metric:
    return Metric(f"host_filesystem_{name}", Kind.GAUGE, text, _LABELS, unit=unit, source=source)


SIZE = _gauge("size_bytes", "Size of the file system.", "bytes")
FREE = _gauge("free_bytes", "Free space, what is reserved for root included.", "bytes")
AVAILABLE = _gauge("available_bytes", "Free space for users other than root.", "bytes")
FILES = _gauge("files", "Files that fit (inodes); absent where there is no limit.")
FILES_FREE = _gauge("files_free", "Files that can still be created; absent where there is no limit.")
READ_ONLY = _gauge(
    "read_only", "1 when the file system is read-only, as after an I/O error.", source="/proc/self/mountinfo"
)
STALLED = _gauge("stalled", "1 when the file system does not answer; its sizes are absent then.")
METRICS = (SIZE, FREE, AVAILABLE, FILES, FILES_FREE, READ_ONLY, STALLED)


class _Handles(NamedTuple):
    """The series of one mount, in the order of METRICS."""

    size: Series
    free: Series
    available: Series
    files: Series
    files_free: Series
    read_only: Series
    stalled: Series


class Filesystems(Part):
    """Every mounted file system with storage behind it, at one mount point."""

    source = "self/mountinfo"

    def __init__(
        self,
        ctx: Context,
        mountpoints: Selection,
        fstypes: Selection,
        statvfs: Callable[[bytes], os.statvfs_result],
    ) -> None:
        self._ctx = ctx
        self._mountpoints = mountpoints
        self._fstypes = fstypes
        self._statvfs = statvfs
        self._path = f"{ctx.proc}/{self.source}"
        self._table = b""
        self._mounts: dict[str, tuple[Mount, _Handles]] = {}
        self._bad_lines: dict[str, procfs.FormatError] = {}
        # A run waits three limits at most, so the whole collector stays within its deadline.
        self._bulkhead: Bulkhead[os.statvfs_result] = Bulkhead("host-statvfs", ctx.timeout_s / 4, ctx.clock.monotonic)

    def open(self) -> None:
        self._choose(procfs.read(self._path))

    def collect(self, out: Out) -> None:
        # Read every time: under the name of a mount that is gone, statvfs would answer for another file system.
        table = procfs.read(self._path)
        if table != self._table:
            self._choose(table)
        for line, error in self._bad_lines.items():
            out.failed(f"{self.source} {line}", error)
        calls = {point: partial(self._statvfs, mount.path) for point, (mount, _) in self._mounts.items()}
        for point, outcome in self._bulkhead.run(calls).items():
            mount, handles = self._mounts[point]
            if isinstance(outcome, Exception):
                # A user's private FUSE mount refuses everybody else, root too: nothing is wrong with it.
                if not (isinstance(outcome, PermissionError) and mount.fstype.startswith("fuse")):
                    out.failed(point, outcome)
            elif isinstance(outcome, Stalled):
                out.failed(point, outcome.reason)
                out.add(handles.stalled, 1)
                out.add(handles.read_only, int(mount.read_only))
            elif outcome.f_blocks:  # without blocks it is a pseudo file system of a new kind, or a tmpfs without limit
                self._add(outcome, mount, handles, out)

    def found(self) -> str:
        """Say how many file systems there are."""
        return f"file systems {len(self._mounts)}"

    def close(self) -> None:
        self._bulkhead.close()

    def _choose(self, table: bytes) -> None:
        found = mounts.parse_mountinfo(table)
        if not found:
            raise procfs.FormatError("it is empty")
        self._bad_lines = {line: error for line, error in found.items() if isinstance(error, procfs.FormatError)}
        wanted = [mount for mount in found.values() if isinstance(mount, mounts.Mount) and self._wants(mount)]
        self._mounts = {mount.point: (mount, self._make(mount)) for mount in mounts.without_repeats(wanted)}
        self._table = table

    def _wants(self, mount: Mount) -> bool:
        return (
            mount.fstype not in mounts.PSEUDO_TYPES
            and mount.fstype in self._fstypes
            and mount.point in self._mountpoints
        )

    def _make(self, mount: Mount) -> _Handles:
        return _Handles(*(self._ctx.series(metric, mount.point, mount.source, mount.fstype) for metric in METRICS))

    def _add(self, space: os.statvfs_result, mount: Mount, handles: _Handles, out: Out) -> None:
        out.add(handles.stalled, 0)
        out.add(handles.read_only, int(mount.read_only))
        if max(space.f_bfree, space.f_bavail) > space.f_blocks or space.f_ffree > space.f_files:
            out.failed(mount.point, f"more space free than there is: {space}")
            return
        block_bytes = space.f_frsize
        out.extend(
            (handles.size, handles.free, handles.available),
            (space.f_blocks * block_bytes, space.f_bfree * block_bytes, space.f_bavail * block_bytes),
        )
        if space.f_files:
            out.extend((handles.files, handles.files_free), (space.f_files, space.f_ffree))
