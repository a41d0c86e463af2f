"""Memory, swap and the kernel's reactions to a lack of it, from /proc/meminfo and /proc/vmstat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.api import Kind, Metric
from agent.hw import procfs
from collectors.host.part import Keys

if TYPE_CHECKING:
    from agent.api import Context, Out

_KIB = 1024  # meminfo writes kB and means this


def _bytes(name: str, text: str, key: str) -> Metric:
    return Metric(f"host_{name}_bytes", Kind.GAUGE, text, unit="bytes", source=f"/proc/meminfo {key}")


def _events(name: str, text: str, key: str, unit: str = "") -> Metric:
    return Metric(f"host_{name}_total", Kind.COUNTER, text, unit=unit, source=f"/proc/vmstat {key}")


MEMINFO = {
    f"{key}:": (_bytes(name, text, key), _KIB)
    for key, name, text in (
        ("MemTotal", "memory_total", "Memory that the kernel manages."),
        ("MemFree", "memory_free", "Memory that nothing uses, caches included."),
        ("MemAvailable", "memory_available", "Memory that new programs can get without swapping, as estimated."),
        ("Buffers", "memory_buffers", "Cache of raw block devices."),
        ("Cached", "memory_cached", "Cache of files, shared memory and tmpfs included."),
        ("Active", "memory_active", "Memory used lately."),
        ("Inactive", "memory_inactive", "Memory not used lately, first to be reclaimed."),
        ("Unevictable", "memory_unevictable", "Memory that cannot be reclaimed, locked memory included."),
        ("Mlocked", "memory_locked", "Memory that programs locked."),
        ("Dirty", "memory_dirty", "Memory that waits to be written to disk."),
        ("Writeback", "memory_writeback", "Memory that is being written to disk."),
        ("AnonPages", "memory_anonymous", "Memory of programs that no file backs."),
        ("AnonHugePages", "memory_anonymous_huge", "Memory of programs in transparent huge pages."),
        ("Mapped", "memory_mapped", "Files mapped into programs."),
        ("Shmem", "memory_shared", "Shared memory and tmpfs."),
        ("Slab", "memory_slab", "The kernel's own data structures."),
        ("SReclaimable", "memory_slab_reclaimable", "Part of the slab that can be given back."),
        ("SUnreclaim", "memory_slab_unreclaimable", "Part of the slab that cannot be given back."),
        ("KernelStack", "memory_kernel_stack", "Stacks of threads in the kernel."),
        ("PageTables", "memory_page_tables", "Page tables."),
        ("CommitLimit", "memory_commit_limit", "Memory that may be promised, where overcommitting is forbidden."),
        ("Committed_AS", "memory_committed", "Memory promised to programs."),
        ("HardwareCorrupted", "memory_hardware_corrupted", "Memory taken out of use because its hardware failed."),
        ("Hugetlb", "memory_hugetlb", "Memory set aside as huge pages of all sizes."),
        ("SwapTotal", "swap_total", "Swap space."),
        ("SwapFree", "swap_free", "Swap space that is free."),
        ("SwapCached", "swap_cached", "Memory that has a copy in swap space."),
    )
}
# These count pages of the default size, which is another line of the file.
HUGE_PAGES = {
    f"{key}:": _bytes(f"memory_hugepages_{name}", text, f"{key} * Hugepagesize")
    for key, name, text in (
        ("HugePages_Total", "total", "Pool of huge pages of the default size."),
        ("HugePages_Free", "free", "Huge pages of the default size that are not in use."),
        ("HugePages_Rsvd", "reserved", "Huge pages of the default size that are promised and not yet in use."),
        ("HugePages_Surp", "surplus", "Huge pages of the default size beyond the size set for the pool."),
    )
}
VMSTAT = {
    "pswpin": (_events("swap_in_pages", "Pages read from swap space.", "pswpin", "pages"), 1),
    "pswpout": (_events("swap_out_pages", "Pages written to swap space.", "pswpout", "pages"), 1),
    "pgmajfault": (_events("major_page_faults", "Page faults that had to wait for storage.", "pgmajfault"), 1),
    "oom_kill": (_events("oom_kills", "Processes killed for lack of memory, in control groups too.", "oom_kill"), 1),
}
METRICS = (
    *(metric for metric, _ in MEMINFO.values()),
    *HUGE_PAGES.values(),
    *(metric for metric, _ in VMSTAT.values()),
)


class Memory(Keys):
    """The file meminfo."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx, "meminfo", MEMINFO)
        self._huge = [(b"\n" + key.encode() + b" ", ctx.series(metric)) for key, metric in HUGE_PAGES.items()]

    def pick(self, content: bytes, out: Out) -> None:
        """Add what is found, and the pool of huge pages."""
        super().pick(content, out)
        size_kib = procfs.lookup(content, b"\nHugepagesize: ")
        if size_kib is None:  # a kernel without huge pages
            return
        for key, series in self._huge:
            pages = procfs.lookup(content, key)
            if pages is not None:
                out.add(series, pages * size_kib * _KIB)
