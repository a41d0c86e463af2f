"""A simulated node's /proc, /sys/block and /sys/class/net: written to a folder, moved on by hand.

    node = SimHost(tmp_path)
    node.advance(10)          # ten seconds of work on every counter
    node.write()              # what the kernel would show now

Values follow from the time that passed and nothing else, so that two runs give the same files. What it cannot write as
a file, the answers of system calls, it gives as `statvfs` and `read_clock`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from agent.hw.clocksync import ClockState
from agent.sim.tree import replace

T = TypeVar("T")

GIB = 1 << 30
_BOOTED_AT_S = 1_799_990_000
_TICKS_PER_S = 100
_BLOCK_BYTES = 4096
SYNCHRONIZED = ClockState(synchronized=True, offset_s=0.000_012, max_error_s=0.002)

# Share of CPU time, in the order of /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice.
_IDLE = 3
_CPU_SHARES = (0.70, 0.0, 0.04, 0.25, 0.005, 0.0, 0.005, 0.0, 0.0, 0.0)


@dataclass
class SimDisk:
    """A block device: what it reads and writes per second of simulated time, and what it has done so far."""

    read_bytes_per_s: int = 2 << 20
    written_bytes_per_s: int = 8 << 20
    read_bytes: int = GIB
    written_bytes: int = 4 * GIB


@dataclass
class SimInterface:
    """A network interface: its traffic per second of simulated time and so far, and its link."""

    received_bytes_per_s: int = 1_000_000
    sent_bytes_per_s: int = 500_000
    received_bytes: int = GIB
    sent_bytes: int = GIB // 2
    up: bool = True
    carrier_changes: int = 2
    speed_mbps: int | None = 100_000

    def change_carrier(self, *, up: bool) -> None:
        """Lose the carrier or gain it again. Nothing where it is so already."""
        self.carrier_changes += up != self.up
        self.up = up


@dataclass
class SimMount:
    """A mounted file system. While `stalled`, statvfs does not return."""

    source: str = "/dev/root"
    fstype: str = "ext4"
    size_bytes: int = 1024 * GIB
    free_bytes: int = 700 * GIB
    read_only: bool = False
    stalled: bool = False


@dataclass
class SimProcess:
    """A process: the letter of its state as in /proc/PID/stat, and its start in ticks after boot."""

    name: str
    letter: str = "S"
    started: int = 100


@dataclass
class SimHost:
    """A node with 96 CPUs, an NVMe and a system disk, and one Ethernet interface, unless told otherwise.

    Change what it has between two calls of `write`; `omit` names files (below proc) that the kernel does not have.
    """

    root: Path
    cpus: int = 96
    memory_bytes: int = 900 * GIB
    memory_available_bytes: int = 800 * GIB
    uptime_s: float = 10_000.0
    booted_at_s: float = _BOOTED_AT_S
    load: float = 1.0  # how busy the CPUs are now: 1 is three quarters of them
    worked_s: float | None = None  # time since boot weighted with the load; None: it was 1 all the time
    oom_kills: int = 0
    boot_id: str = "00000000-0000-4000-8000-000000000001"
    clock: ClockState = SYNCHRONIZED
    disks: dict[str, SimDisk] = field(default_factory=lambda: {"sda": SimDisk(), "nvme0n1": SimDisk(8 << 20, 32 << 20)})
    interfaces: dict[str, SimInterface] = field(default_factory=lambda: {"eth0": SimInterface()})
    mounts: dict[str, SimMount] = field(
        default_factory=lambda: {"/": SimMount(), "/mnt/nvme": SimMount("/dev/nvme0n1", "xfs", 3840 * GIB, 3000 * GIB)}
    )
    processes: dict[int, SimProcess] = field(
        default_factory=lambda: {1: SimProcess("systemd"), 2: SimProcess("kthreadd"), 900: SimProcess("python3", "R")}
    )
    omit: set[str] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def proc(self) -> Path:
        """The root of the simulated procfs."""
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        """The root of the simulated sysfs."""
        return self.root / "sys"

    def advance(self, seconds: float) -> None:
        """Let time pass on every counter; `write` shows it."""
        if self.worked_s is not None or self.load != 1:
            self.worked_s = self._worked_s() + seconds * self.load
        self.uptime_s += seconds
        for disk in self.disks.values():
            disk.read_bytes += int(disk.read_bytes_per_s * seconds)
            disk.written_bytes += int(disk.written_bytes_per_s * seconds)
        for interface in self.interfaces.values():
            interface.received_bytes += int(interface.received_bytes_per_s * seconds)
            interface.sent_bytes += int(interface.sent_bytes_per_s * seconds)

    def write(self) -> None:
        """Write what the kernel would show now. Each file changes as a whole; what is gone is removed."""
        for name, content in self._proc_files().items():
            if name in self.omit:
                (self.proc / name).unlink(missing_ok=True)
            else:
                replace(self.proc / name, content)
        self._write_processes()
        for name in self.disks:
            (self.sys / "block" / name).mkdir(parents=True, exist_ok=True)
        for name, interface in self.interfaces.items():
            link = self.sys / "class/net" / name
            replace(link / "operstate", "up\n" if interface.up else "down\n")
            replace(link / "carrier", f"{int(interface.up)}\n")
            replace(link / "carrier_changes", f"{interface.carrier_changes}\n")
            replace(link / "carrier_up_count", f"{interface.carrier_changes // 2}\n")
            replace(link / "carrier_down_count", f"{(interface.carrier_changes + 1) // 2}\n")
            replace(link / "speed", f"{-1 if interface.speed_mbps is None else interface.speed_mbps}\n")

    def statvfs(self, path: bytes) -> os.statvfs_result:
        """Answer for a simulated mount; while it is stalled, only when `released` is set."""
        mount = self.mounts[os.fsdecode(path)]
        if mount.stalled:
            self.released.wait()
        free, files = mount.free_bytes // _BLOCK_BYTES, mount.size_bytes // (16 * _BLOCK_BYTES)
        blocks = mount.size_bytes // _BLOCK_BYTES
        return os.statvfs_result(
            (_BLOCK_BYTES, _BLOCK_BYTES, blocks, free, free, files, files // 2, files // 2, 0, 255)
        )

    def read_clock(self) -> ClockState:
        """Answer as adjtimex(2) would."""
        return self.clock

    def answering(self, collector: type[T]) -> type[T]:
        """Return a kind of the host collector whose system calls this node answers."""
        answers = {"statvfs": staticmethod(self.statvfs), "read_clock": staticmethod(self.read_clock)}
        return type(f"Simulated{collector.__name__}", (collector,), answers)

    def _proc_files(self) -> dict[str, str]:
        return {
            "stat": self._stat(),
            "loadavg": self._loadavg(),
            "uptime": f"{self.uptime_s:.2f} {self._cpu_times_s()[_IDLE] * self.cpus:.2f}\n",
            "meminfo": self._meminfo(),
            "vmstat": f"nr_free_pages 1\npswpin 0\npswpout 0\npgmajfault 12345\noom_kill {self.oom_kills}\n",
            "diskstats": self._diskstats(),
            "net/dev": self._net_dev(),
            "self/mountinfo": self._mountinfo(),
            "pressure/cpu": self._pressure(0.01),
            "pressure/memory": self._pressure(0.0),
            "pressure/io": self._pressure(0.02),
            "sys/fs/file-nr": "9216\t0\t9223372036854775807\n",
            "sys/kernel/ostype": "Linux\n",
            "sys/kernel/osrelease": "6.8.0-1021-azure\n",
            "sys/kernel/version": "#25-Ubuntu SMP\n",
            "sys/kernel/random/boot_id": f"{self.boot_id}\n",
        }

    def _worked_s(self) -> float:
        return self.uptime_s if self.worked_s is None else self.worked_s

    def _cpu_times_s(self) -> list[float]:
        """Return what each CPU spent in each of the states since boot: what is not worked is idle."""
        worked_s = self._worked_s()
        times = [worked_s * share for share in _CPU_SHARES]
        times[_IDLE] += self.uptime_s - worked_s
        return times

    def _loadavg(self) -> str:
        loads = " ".join(f"{self.cpus * self.load * share:.2f}" for share in (0.7, 0.6, 0.5))
        return f"{loads} 70/2400 31337\n"

    def _stat(self) -> str:
        ticks = [int(seconds * _TICKS_PER_S) for seconds in self._cpu_times_s()]
        core = " ".join(map(str, ticks))
        total = " ".join(str(count * self.cpus) for count in ticks)
        cores = "".join(f"cpu{number} {core}\n" for number in range(self.cpus))
        count = int(self.uptime_s)
        return (
            f"cpu  {total}\n{cores}intr {count * 9000} 0 0\nctxt {count * 20000}\nbtime {int(self.booted_at_s)}\n"
            f"processes {count * 3}\nprocs_running 70\nprocs_blocked 0\nsoftirq {count} 0 0\n"
        )

    def _meminfo(self) -> str:
        used = self.memory_bytes - self.memory_available_bytes
        anonymous, slab = used * 3 // 4, used // 20
        cached = self.memory_available_bytes // 12
        sizes = {
            "MemTotal": self.memory_bytes,
            "MemFree": self.memory_available_bytes - cached,
            "MemAvailable": self.memory_available_bytes,
            "Buffers": GIB // 8,
            "Cached": cached,
            "SwapCached": 0,
            "Active": anonymous,
            "Inactive": cached,
            "Unevictable": 0,
            "Mlocked": 0,
            "SwapTotal": 0,
            "SwapFree": 0,
            "Dirty": 1 << 20,
            "Writeback": 0,
            "AnonPages": anonymous,
            "Mapped": anonymous // 10,
            "Shmem": GIB // 4,
            "Slab": slab,
            "SReclaimable": slab // 2,
            "SUnreclaim": slab - slab // 2,
            "KernelStack": 40 << 20,
            "PageTables": anonymous >> 9,
            "CommitLimit": self.memory_bytes // 2,
            "Committed_AS": anonymous * 2,
            "HardwareCorrupted": 0,
            "AnonHugePages": anonymous // 2,
            "Hugetlb": 0,
        }
        lines = [f"{key + ':':<16}{size // 1024:>8} kB\n" for key, size in sizes.items()]
        pages = ("HugePages_Total", "HugePages_Free", "HugePages_Rsvd", "HugePages_Surp")
        lines += [f"{key + ':':<16}{0:>8}\n" for key in pages]
        return "".join(lines) + "Hugepagesize:       2048 kB\n"

    def _diskstats(self) -> str:
        lines = []
        for minor, (name, disk) in enumerate(self.disks.items()):
            read, written = disk.read_bytes, disk.written_bytes
            io = [read >> 16, 0, read >> 9, read >> 14, written >> 16, 0, written >> 9, written >> 14, 1]
            io += [(read + written) >> 15, (read + written) >> 14]
            lines.append(f"{8:4d} {minor:7d} {name} {' '.join(map(str, io))} 0 0 0 0 0 0\n")
        return "".join(lines)

    def _net_dev(self) -> str:
        header = "Inter-|   Receive  |  Transmit\n face |bytes    packets errs drop|bytes    packets errs drop\n"
        lines = []
        for name, interface in self.interfaces.items():
            rx, tx = interface.received_bytes, interface.sent_bytes
            lines.append(f"{name:>6}: {rx} {rx // 1400} 0 0 0 0 0 0 {tx} {tx // 1400} 0 0 0 0 0 0\n")
        return header + "".join(lines)

    def _mountinfo(self) -> str:
        lines = ["21 1 0:21 / /proc rw - proc proc rw\n"]
        for minor, (point, mount) in enumerate(self.mounts.items(), 1):
            mode = "ro" if mount.read_only else "rw"
            escaped = point.replace("\\", "\\134").replace(" ", "\\040")
            lines.append(
                f"{30 + minor} 1 259:{minor} / {escaped} rw,relatime shared:1 - {mount.fstype} {mount.source} {mode}\n"
            )
        return "".join(lines)

    def _pressure(self, share: float) -> str:
        us = int(self.uptime_s * share * 1e6)
        return "".join(
            f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n"
            for kind, total in (("some", us), ("full", us // 2))
        )

    def _write_processes(self) -> None:
        for folder in self.proc.iterdir():
            if folder.name.isdecimal() and int(folder.name) not in self.processes:
                (folder / "stat").unlink(missing_ok=True)
                folder.rmdir()
        for pid, process in self.processes.items():
            zeros = " ".join("0" * 17)
            line = f"{pid} ({process.name}) {process.letter} 1 {zeros} {process.started} 0 0\n"
            replace(self.proc / str(pid) / "stat", line)
