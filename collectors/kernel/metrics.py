"""What the collector emits."""

from __future__ import annotations

from agent.api import Kind, Metric

_LOG = "the kernel log (Linux, Documentation/ABI/testing/dev-kmsg)"
_XID = f"`NVRM: Xid` lines in {_LOG}"
_SXID = f"`SXid` lines in {_LOG}"
_TABLE = "agent/data/xids.yaml"

XID_ERRORS = Metric(
    "gpu_xid_errors_total",
    Kind.COUNTER,
    "Errors that the GPU driver wrote into the kernel log since boot; the severe codes stand at 0 before they come.",
    ("gpu", "uuid", "xid", "severity"),
    source=_XID,
)
XID_LAST = Metric(
    "gpu_xid_last_timestamp_seconds",
    Kind.GAUGE,
    "When this XID came last, as seconds since the epoch. Absent when it did not since boot.",
    ("gpu", "uuid", "xid"),
    unit="seconds",
    source=_XID,
)
XID_INFO = Metric(
    "gpu_xid_info",
    Kind.GAUGE,
    "1 for each XID and severity that came since boot: what it means, and what to do.",
    ("xid", "name", "severity", "action"),
    source=_TABLE,
)
SXID_ERRORS = Metric(
    "nvswitch_sxid_errors_total",
    Kind.COUNTER,
    "Errors that the NVSwitch driver wrote into the kernel log since boot.",
    ("switch", "pci", "sxid", "severity"),
    source=_SXID,
)
SXID_LAST = Metric(
    "nvswitch_sxid_last_timestamp_seconds",
    Kind.GAUGE,
    "When this SXID came last, as seconds since the epoch. Absent when it did not since boot.",
    ("switch", "pci", "sxid"),
    unit="seconds",
    source=_SXID,
)
OOM_KILLS = Metric(
    "kernel_oom_kills_total",
    Kind.COUNTER,
    "Processes killed since boot because memory was short: in a cgroup (memcg) or in the whole node (global).",
    ("scope",),
    source=f"`oom-kill:` and `Killed process` lines in {_LOG}, mm/oom_kill.c",
)
HUNG_TASKS = Metric(
    "kernel_hung_tasks_total",
    Kind.COUNTER,
    "Reports since boot of tasks that were blocked for longer than kernel.hung_task_timeout_secs.",
    source=f"`blocked for more than` lines in {_LOG}, kernel/hung_task.c",
)
STALLS = Metric(
    "kernel_stalls_total",
    Kind.COUNTER,
    "Reports since boot of processors that did not come round: soft_lockup, hard_lockup, rcu.",
    ("kind",),
    source=f"{_LOG}, kernel/watchdog.c, kernel/watchdog_perf.c, kernel/rcu/tree_stall.h",
)
RECORDS = Metric(
    "kernel_log_records_total",
    Kind.COUNTER,
    "Records of the kernel log that were read: matched, unmatched, ignored (written by user space), error (no record).",
    ("result",),
    source=_LOG,
)
OVERRUNS = Metric(
    "kernel_log_overruns_total",
    Kind.COUNTER,
    "How often the kernel overwrote records before they were read. What they told is in no total.",
    source=f"EPIPE from {_LOG}",
)

METRICS = (
    XID_ERRORS,
    XID_LAST,
    XID_INFO,
    SXID_ERRORS,
    SXID_LAST,
    OOM_KILLS,
    HUNG_TASKS,
    STALLS,
    RECORDS,
    OVERRUNS,
)
