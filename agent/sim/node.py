"""A whole simulated node below a folder: what the kernel, the GPU driver and Slurm would show, moved by a scenario.

    node = SimNode(tmp_path, "ND96asr_v4", "link_flap")
    node.advance(12)          # the link of mlx5_ib3 is down since 2 s
    Probe(InfiniBand, sysfs=node.sys, procfs=node.proc).collect()

Time goes in steps of STEP_S. What is shown follows from size, scenario, seed and step only, so two runs give the same
files, however time was cut into calls. There are no threads: `agent.sim.demo` has the one that moves its node.
"""

from __future__ import annotations

import random
from datetime import timezone
from typing import TYPE_CHECKING

from agent.sim import driver, kernellog, nvml
from agent.sim.gpu import IDLE
from agent.sim.hardware import write_hardware
from agent.sim.host import SimProcess
from agent.sim.kernellog import KernelLog
from agent.sim.machines import machine
from agent.sim.scenarios import SCENARIOS
from agent.sim.slurmd import SlurmdLog, process_of
from agent.sim.workload import Job

if TYPE_CHECKING:
    from datetime import tzinfo
    from pathlib import Path

    from agent.sim.fabric import SimPort
    from agent.sim.gpu import SimGpu

STEP_S = 0.5
STARTED_AT_S = 1_800_000_000.0  # where `agent.sim.clock.FakeClock` begins
_READY_S = 20.0  # after boot
_BACKGROUND = 0.004  # what the front-end network carries, as a share of a fabric port's usual work
_TASKS_WITHOUT_GPUS = 8
_TRAFFIC_LAG_S = 1.5
_HOST_LAG_S = 4.0
_HOST_IDLE, _HOST_WITH_GPUS, _HOST_COMPUTING = 0.03, 0.4, 1.25  # SimHost.load


class UnknownScenarioError(ValueError):
    """A scenario that there is not, or that the node lacks the hardware for. Says which there are, or what lacks."""


class SimNode:
    """One node. `at` and `advance` move it and write what it shows then; the rest is what may happen to it.

    `started_at_s` is the wall time at its start, `zone` that of its log files, whose stamps go on by one second while
    `seconds_per_s` pass on the node. Raises UnknownSizeError and
    UnknownScenarioError.
    """

    def __init__(
        self,
        root: Path,
        sku: str,
        scenario: str = "healthy",
        *,
        seed: int = 0,
        started_at_s: float = STARTED_AT_S,
        seconds_per_s: float = 1.0,
        zone: tzinfo = timezone.utc,
    ) -> None:
        self.vm_size, self.machine = machine(sku)
        if scenario not in SCENARIOS:
            raise UnknownScenarioError(f"no scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
        self.scenario = SCENARIOS[scenario]
        self.root, self.sys, self.proc, self.dev = root, root / "sys", root / "proc", root / "dev"
        self.kmsg, self.slurmd_log, self.nvml_state = root / "kmsg", root / "slurm/slurmd.log", root / "nvml.state"
        chance = random.Random(f"{self.vm_size.name}/{seed}")  # noqa: S311 - it must be the same each time
        gpu_driver = self.scenario.gpu_driver
        hardware = write_hardware(root, self.vm_size, self.machine, chance, gpu_driver=gpu_driver)
        self.gpus, self.ports, self._frontend = hardware.gpus, hardware.ports, hardware.frontend
        self.host = hardware.host
        self.host.booted_at_s = started_at_s - self.host.uptime_s
        self.host.load, self.host.worked_s = _HOST_IDLE, self.host.uptime_s * _HOST_IDLE
        lacking = self.scenario.lacks(self)
        if lacking:
            raise UnknownScenarioError(f"scenario {scenario!r} needs {lacking}, and {self.vm_size.name} has none")
        self._started_at_s = started_at_s
        self._seconds_per_s = seconds_per_s
        self._steps = 0
        self._job: Job | None = None
        self._intensity = 0.0
        self._idle_memory_bytes = self.host.memory_available_bytes
        self._kernel = KernelLog(self.kmsg)
        self._slurmd = SlurmdLog(self.slurmd_log, zone)
        self._actions = self.scenario.actions(self)
        self._next = next(self._actions, None)
        self._boot()
        self._act()
        self.write()

    @property
    def now_s(self) -> float:
        """Seconds since its start."""
        return self._steps * STEP_S

    @property
    def wall_s(self) -> float:
        """The wall time that its log files show."""
        return self._started_at_s + self.now_s / self._seconds_per_s

    def at(self, t_s: float) -> None:
        """Move on to the last step at or before this time since the start, and show it. Time does not go back."""
        while (self._steps + 1) * STEP_S <= t_s:
            self._steps += 1
            self._step()
            self._act()
        self.write()

    def advance(self, seconds: float) -> None:
        """Move on by so many seconds, in whole steps."""
        self.at(self.now_s + seconds)

    def write(self) -> None:
        """Show what is now. `at` does it; only who changed a device by hand calls it."""
        for port in self._all_ports():
            port.write()
        self.host.write()
        drives = self.gpus and self.scenario.gpu_driver
        state = driver.nvml_state(self.machine, self.gpus) if drives else driver.nvml_state_without_driver()
        nvml.write(self.nvml_state, state)

    def log(self, text: str, priority: int = kernellog.INFO) -> None:
        """Write into the kernel log."""
        self._kernel.write(self.host.uptime_s, text, priority)

    # Jobs

    def start_job(self, number: int) -> None:
        """Start a job on the whole node."""
        self._job = Job(number, len(self.gpus) or _TASKS_WITHOUT_GPUS, self.now_s)
        self._slurmd.job_started(self.wall_s, number, self._job.tasks)
        for task in range(self._job.tasks):
            self.host.processes[process_of(number, task)] = SimProcess("python3", "R", self._ticks())

    def end_job(self, exit_code: int = 0) -> None:
        """End the job that runs. Does nothing when none does."""
        if self._job is None:
            return
        job, self._job = self._job, None
        alive = [task for task in range(job.tasks) if task not in job.dead]
        self._slurmd.job_ended(self.wall_s, job.number, alive, exit_code)
        for task in alive:
            del self.host.processes[process_of(job.number, task)]

    # Links and adapters

    def lose_link(self, port: SimPort) -> None:
        """Take a fabric port's link away."""
        port.go_down()
        self._change_carrier(port)
        self.log(f"mlx5_core {port.address}: Port module event: module 0, Cable unplugged")

    def regain_link(self, port: SimPort) -> None:
        """Give a fabric port its link back."""
        port.come_back()
        self._change_carrier(port)
        self.log(f"mlx5_core {port.address}: Port module event: module 0, Cable plugged")
        self.log(f"IPv6: ADDRCONF(NETDEV_CHANGE): {port.netdev}: link becomes ready")

    def hang_adapter(self, port: SimPort) -> None:
        """Have an adapter's firmware stop answering; `SimPort.release` brings it back."""
        port.hang()
        self.log(
            f"mlx5_core {port.address}: wait_func:1197:(pid {process_of(0, 0)}): ACCESS_REG(0x805) timeout. "
            "Will cause a leak of a command resource",
            kernellog.ERROR,
        )

    def reset_adapter(self, port: SimPort) -> None:
        """Reset an adapter: it counts from 0."""
        port.reset()
        self.log(f"mlx5_core {port.address}: firmware version: {self.machine.hca.firmware}")

    # GPUs

    def fault(self, gpu: SimGpu) -> None:
        """Have the job on a GPU touch memory that it has not; its task there ends."""
        self._xid(
            gpu,
            31,
            "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ "
            "0x7f3c_2a000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        )
        self._end_task(gpu)

    def strike_memory(self, gpu: SimGpu) -> None:
        """Have an uncorrectable error in a GPU's memory that takes only its task with it."""
        row = "Row Remapper: New row (0x00000000012a4f00) marked for remapping, reset gpu to activate."
        gpu.strike_memory()
        self._xid(gpu, 63, row, of_job=False)
        self._xid(gpu, 94, "Contained: SM (0x1). RST: No, D-RST: No")
        change = "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
        self._xid(gpu, 154, change, of_job=False)
        self._end_task(gpu)

    def lose_gpu(self, gpu: SimGpu) -> None:
        """Have a GPU fall off the bus; `SimGpu.reset` brings it back."""
        gpu.faults.lost = True
        self._xid(gpu, 79, "GPU has fallen off the bus.", of_job=False)
        self.log(f"NVRM: GPU {gpu.address}: GPU has fallen off the bus.", kernellog.ERROR)
        self._end_task(gpu)

    def reload_driver(self) -> None:
        """Unload the GPU driver and load it again: what it counts starts at 0."""
        for gpu in self.gpus:
            gpu.reset()
        self._greet(self.host.uptime_s)

    # Inside

    def _all_ports(self) -> list[SimPort]:
        return [*self.ports, *([self._frontend] if self._frontend else [])]

    def _boot(self) -> None:
        if self.gpus and self.scenario.gpu_driver:
            driver.write_driver(self.proc, self.dev, self.machine, self.gpus)
            self._greet(_READY_S)
        for port in self.ports:
            self._kernel.write(_READY_S, f"IPv6: ADDRCONF(NETDEV_CHANGE): {port.netdev}: link becomes ready")
        self._slurmd.daemon_started(self.host.booted_at_s + _READY_S)

    def _greet(self, uptime_s: float) -> None:
        self._kernel.write(uptime_s, f"NVRM: loading {driver.module_name(self.machine)}")

    def _act(self) -> None:
        """Do what is due."""
        while self._next is not None and self._next.at_s <= self.now_s:
            self._next.do()
            self._next = next(self._actions, None)

    def _step(self) -> None:
        """Let one step pass on every device."""
        before_s = self.now_s - STEP_S
        job = self._job
        waiting = not all(port.up for port in self.ports)
        load = IDLE if job is None else job.load(before_s, waiting=waiting)
        self._intensity += (load.intensity - self._intensity) * STEP_S / _TRAFFIC_LAG_S
        for gpu in self.gpus:
            gpu.advance(STEP_S, IDLE if job is None else job.load_of(gpu.number, before_s, waiting=waiting))
        for port in self.ports:
            port.advance(STEP_S, 0.0 if job is None or waiting or job.dead else self._intensity)
        if self._frontend is not None:
            self._frontend.advance(STEP_S, _BACKGROUND)
        self._step_host()

    def _step_host(self) -> None:
        host = self.host
        wanted = _HOST_IDLE if self._job is None else _HOST_WITH_GPUS if self.gpus else _HOST_COMPUTING
        host.load += (wanted - host.load) * STEP_S / _HOST_LAG_S
        host.memory_available_bytes = int(self._idle_memory_bytes * (1 - 0.4 * min(host.load, 1.0)))
        for disk in host.disks.values():
            disk.read_bytes_per_s = int((48 << 20) * host.load)
            disk.written_bytes_per_s = int((12 << 20) * host.load) + (1 << 18)
        host.advance(STEP_S)

    def _change_carrier(self, port: SimPort) -> None:
        interface = self.host.interfaces[port.netdev]
        interface.change_carrier(up=port.up)
        interface.speed_mbps = port.rate_bps // 10**6 if port.up else None

    def _xid(self, gpu: SimGpu, code: int, text: str, *, of_job: bool = True) -> None:
        who = "pid='<unknown>', name=<unknown>"
        if of_job and self._job is not None:
            who = f"pid={process_of(self._job.number, gpu.number)}, name=python3"
        self.log(f"NVRM: Xid (PCI:{gpu.address.rpartition('.')[0]}): {code}, {who}, {text}", kernellog.ERROR)

    def _end_task(self, gpu: SimGpu) -> None:
        """End the job's task on a GPU, as its driver's error does."""
        job = self._job
        if job is None or gpu.number in job.dead:
            return
        job.dead.add(gpu.number)
        self._slurmd.task_killed(self.wall_s, job.number, gpu.number)
        del self.host.processes[process_of(job.number, gpu.number)]

    def _ticks(self) -> int:
        return int(self.host.uptime_s * 100)
