"""CPU time and the scheduler's counters, from /proc/stat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.api import Kind, Metric
from agent.hw import procfs
from collectors.host.part import Keys

if TYPE_CHECKING:
    from agent.api import Context, Out, Series

MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
GUEST_MODES = ("user", "nice")

# These two may step back a little (proc.rst says so of iowait), which a scraper would take for a restart from zero.
_UNSTEADY = (MODES.index("idle"), MODES.index("iowait"))
_STEP_BACK_TICKS = 5 * procfs.TICKS_PER_S

SECONDS = Metric(
    "host_cpu_seconds_total",
    Kind.COUNTER,
    "CPU time of all CPUs together by mode; user and nice include the time of guests.",
    ("mode",),
    unit="seconds",
    source="/proc/stat cpu",
)
GUEST_SECONDS = Metric(
    "host_cpu_guest_seconds_total",
    Kind.COUNTER,
    "CPU time spent in virtual machines run by this one; it is part of the user and nice time.",
    ("mode",),
    unit="seconds",
    source="/proc/stat cpu",
)
CORE_SECONDS = Metric(
    "host_cpu_core_seconds_total",
    Kind.COUNTER,
    "CPU time of one logical CPU by mode; only with per_cpu.",
    ("cpu", "mode"),
    unit="seconds",
    source="/proc/stat cpuN",
)
ONLINE = Metric("host_cpus_online", Kind.GAUGE, "Logical CPUs that are online.", source="/proc/stat cpuN")
SWITCHES = Metric("host_context_switches_total", Kind.COUNTER, "Context switches.", source="/proc/stat ctxt")
INTERRUPTS = Metric("host_interrupts_total", Kind.COUNTER, "Interrupts serviced.", source="/proc/stat intr")
FORKS = Metric("host_forks_total", Kind.COUNTER, "Processes and threads created.", source="/proc/stat processes")
BOOT_TIME = Metric(
    "host_boot_time_seconds",
    Kind.GAUGE,
    "When the node booted, in seconds since the epoch.",
    unit="seconds",
    source="/proc/stat btime",
)
RUNNING = Metric(
    "host_procs_running", Kind.GAUGE, "Threads that run or wait for a CPU.", source="/proc/stat procs_running"
)
BLOCKED = Metric(
    "host_procs_blocked", Kind.GAUGE, "Threads that wait for block I/O.", source="/proc/stat procs_blocked"
)
METRICS = (SECONDS, GUEST_SECONDS, CORE_SECONDS, ONLINE, SWITCHES, INTERRUPTS, FORKS, BOOT_TIME, RUNNING, BLOCKED)


class Cpu(Keys):
    """Everything that /proc/stat tells, read once."""

    def __init__(self, ctx: Context, *, per_cpu: bool) -> None:
        keys = {
            "ctxt": (SWITCHES, 1),
            "intr": (INTERRUPTS, 1),
            "processes": (FORKS, 1),
            "btime": (BOOT_TIME, 1),
            "procs_running": (RUNNING, 1),
            "procs_blocked": (BLOCKED, 1),
        }
        super().__init__(ctx, "stat", keys)
        self._ctx = ctx
        self._per_cpu = per_cpu
        self._total = _Times([ctx.series(SECONDS, mode) for mode in MODES])
        self._guest = [ctx.series(GUEST_SECONDS, mode) for mode in GUEST_MODES]
        self._online = ctx.series(ONLINE)
        self._cores: dict[str, _Times] = {}

    def collect(self, out: Out) -> None:
        content = b"\n" + procfs.read(self._path)
        try:
            self._collect_times(content, out)
        except procfs.FormatError as error:
            out.failed("stat cpu", error)
        self.pick(content, out)

    def _collect_times(self, content: bytes, out: Out) -> None:
        line = content[1 : content.find(b"\n", 1)]
        if not line.startswith(b"cpu "):
            raise procfs.FormatError("the first line is not that of all CPUs")
        ticks = procfs.parse_cpu_ticks(line)
        self._total.add(ticks, out)
        guest = ticks[len(MODES) : len(MODES) + len(GUEST_MODES)]
        out.extend(self._guest[: len(guest)], [value / procfs.TICKS_PER_S for value in guest])
        if online := content.count(b"\ncpu") - 1:  # one of these lines is the sum
            out.add(self._online, online)
        if self._per_cpu:
            self._collect_cores(content, out)

    def _collect_cores(self, content: bytes, out: Out) -> None:
        present: dict[str, _Times] = {}
        for cpu, ticks in procfs.parse_cores(content).items():
            if isinstance(ticks, procfs.FormatError):
                out.failed(f"stat cpu{cpu}", ticks)
                continue
            times = present[cpu] = self._cores.get(cpu) or self._open_core(cpu)
            times.add(ticks, out)
        self._cores = present  # a CPU that went offline starts anew: the kernel may have set it back

    def _open_core(self, cpu: str) -> _Times:
        return _Times([self._ctx.series(CORE_SECONDS, cpu, mode) for mode in MODES])


class _Times:
    """The counters of one CPU, or of all: series by mode, and what they showed last."""

    def __init__(self, series: list[Series]) -> None:
        self._series = series
        self._last: list[int] = []

    def add(self, ticks: list[int], out: Out) -> None:
        shown = ticks[: len(self._series)]
        if self._last:
            for mode in _UNSTEADY:
                if mode < len(shown) and 0 < self._last[mode] - shown[mode] <= _STEP_BACK_TICKS:
                    shown[mode] = self._last[mode]
        self._last = shown
        out.extend(self._series[: len(shown)], [value / procfs.TICKS_PER_S for value in shown])
