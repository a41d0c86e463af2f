"""The node itself: CPU, memory, pressure, disks, network, file systems, processes, clock."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent.api import Collector, Duration, Lane, NotPresent
from agent.hw import clocksync, mounts, procfs
from collectors.host import cpu, disks, filesystems, memory, network, pressure, processes, system, timesync
from collectors.host.part import Keys
from collectors.host.selection import Selection

if TYPE_CHECKING:
    from agent.api import Context, Out
    from collectors.host.part import Part

# Both ends of a container's link would be counted, and bridges count what their ports do.
VIRTUAL_INTERFACES = (
    "lo", "veth*", "docker*", "br-*", "cali*", "cni*", "flannel*", "azv*", "lxc*", "cilium_*", "virbr*", "vnet*",
    "tunl*", "vxlan*", "kube-*", "nodelocaldns", "dummy*", "ifb*",
)  # fmt: skip
# Without storage of their own, removable, or a second path to a disk that is there anyway.
MINOR_DISKS = ("loop*", "ram*", "zram*", "fd[0-9]*", "sr[0-9]*", "nbd*", "nvme*c*n*")


@dataclass(frozen=True)
class Options:
    """The configuration keys of `collectors.host`."""

    per_cpu: bool = field(
        default=False, metadata={"help": "CPU time of every logical CPU, beside that of all together."}
    )
    slow_interval: Duration = field(
        default=Duration(60), metadata={"help": "Seconds between two counts of the processes.", "minimum": 1}
    )
    device_include: tuple[str, ...] = field(
        default=(), metadata={"help": "Globs of the disks and network interfaces to show; empty: all."}
    )
    device_exclude: tuple[str, ...] = field(
        default=VIRTUAL_INTERFACES + MINOR_DISKS,
        metadata={"help": "Globs of the disks and network interfaces to leave out, whatever device_include says."},
    )
    mountpoint_exclude: tuple[str, ...] = field(
        default=mounts.CLUTTER, metadata={"help": "Globs of the mount points to leave out; * matches slashes too."}
    )
    fstype_exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Globs of file system types to leave out, beside those without storage."}
    )


class Host(Collector):
    """Reads each source once per run. THREAD: asking file systems waits up to three quarters of the timeout."""

    name = "host"
    metrics = (
        *cpu.METRICS,
        *system.METRICS,
        *memory.METRICS,
        *pressure.METRICS,
        *disks.METRICS,
        *network.METRICS,
        *timesync.METRICS,
        *processes.METRICS,
        *filesystems.METRICS,
    )
    lane = Lane.THREAD
    Options = Options
    needs = "/proc/stat"

    def __init__(self, options: Any, ctx: Context) -> None:
        super().__init__(options, ctx)
        keys: Options = options
        devices = Selection(keys.device_include, keys.device_exclude)
        self._disks = disks.Disks(ctx, devices)
        self._network = network.Network(ctx, devices)
        self._filesystems = filesystems.Filesystems(
            ctx,
            Selection(exclude=keys.mountpoint_exclude),
            Selection(exclude=keys.fstype_exclude),
            self.statvfs,
        )
        self._parts: list[Part] = [
            cpu.Cpu(ctx, per_cpu=keys.per_cpu),
            *system.parts(ctx),
            memory.Memory(ctx),
            Keys(ctx, "vmstat", memory.VMSTAT),
            pressure.Pressure(ctx),
            self._disks,
            self._network,
            timesync.TimeSync(ctx, self.read_clock),
            processes.Processes(ctx, keys.slow_interval),
            self._filesystems,  # last: only these may make the run wait
        ]
        self._unopened: dict[Part, Exception] = {}

    # Two system calls that no root directory leads elsewhere: a subclass of the simulation answers them instead.

    @staticmethod
    def statvfs(path: bytes) -> os.statvfs_result:
        """Ask a mounted file system for its space. Raises OSError; may never return."""
        return os.statvfs(path)

    @staticmethod
    def read_clock() -> clocksync.ClockState:
        """Ask how well the clock is disciplined. Raises OSError."""
        return clocksync.read()

    def open(self) -> None:
        try:
            procfs.read(f"{self.ctx.proc}/stat")
        except FileNotFoundError as error:
            raise NotPresent(f"no {self.ctx.proc}/stat: is that where procfs is mounted?") from error
        except OSError:
            pass  # there, so this is a node; `collect` tells what is wrong with the file
        self._unopened = {}
        for part in self._parts:
            try:
                part.open()
            except (OSError, procfs.FormatError) as error:
                self._unopened[part] = error

    def collect(self, out: Out) -> None:
        for part in self._parts:
            if part in self._unopened:
                out.failed(part.source, self._unopened[part])
                continue
            try:
                part.collect(out)
            except (OSError, procfs.FormatError) as error:
                out.failed(part.source, error)

    def found(self) -> str:
        return f"{self._disks.found()}, {self._network.found()}, {self._filesystems.found()}"

    def close(self) -> None:
        for part in self._parts:
            part.close()
