"""The plug-in contract: all that a collector may know of the agent. Standard library only.

A collector is two methods. `open()` discovers devices and makes one `Series` handle per value; `collect(out)` adds
values to those handles. Threads, deadlines, retries, presence, logging on change and the counting of errors are the
agent's business (docs/architecture.md).

Errors a collector may raise:

    Exception
    +-- NotPresent    the hardware is not here: parked, looked for again every minute, not an error
    +-- Outdated      the process has something loaded that the system has replaced: asked again in a new process
    +-- any other     the collector as a whole failed: its series vanish, `hpcwatch_collector_up` is 0, tried again
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import logging
    from pathlib import Path

    Value = int | float

API_VERSION = 1
DEVICE_SHARE = 0.25  # of a collector's timeout: what one device may take

_METRIC_NAME = re.compile(r"(?!_total$)[a-zA-Z_:][a-zA-Z0-9_:]*")
_SUFFIX = re.compile(r"[a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_YEARS_1_TO_9999_S = (-62_135_596_800, 253_402_300_799)  # what a calendar, and so an API answer, can show


class Kind(enum.Enum):
    """What a metric is. HISTOGRAM, SUMMARY and UNTYPED exist for data whose shape another program decides."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"
    UNTYPED = "untyped"


class Lane(enum.Enum):
    """Where a collector runs, chosen by the worst that its reads can do."""

    SHARED = "shared"  # cannot block: one thread for all of these
    THREAD = "thread"  # may block for a while: a thread of its own
    PROCESS = "process"  # may never return: a child process, killed and replaced at the deadline


class Severity(enum.Enum):
    """How bad an event is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class NotPresent(Exception):  # noqa: N818 - an outcome with its own name, as StopIteration is
    """The hardware or file a collector serves is not on this node. Says what was looked for and where."""


class Outdated(Exception):  # noqa: N818 - as NotPresent
    """What this process has loaded is not what the system has now (a driver was upgraded), or it is of no more use.

    In the PROCESS lane the agent asks a new process at once, one time per run. Elsewhere a failure like any other.
    """


class Duration(float):
    """Seconds; written `500ms`, `10s`, `5m`, `4h` or `1d` in the configuration."""

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read a duration such as `10s`. Raises ValueError with the accepted form."""
        match = _DURATION.fullmatch(text.strip())
        if match is None or not math.isfinite(float(match[1]) * _SECONDS[match[2]]):
            raise ValueError(f"expected a duration such as 500ms, 10s, 5m or 4h, got {text[:60]!r}")
        return cls(float(match[1]) * _SECONDS[match[2]])

    def __str__(self) -> str:
        """Give it in the largest unit that divides it: `4h`, `90s`, `1500ms`."""
        for unit in ("d", "h", "m", "s"):
            count = self / _SECONDS[unit]
            if self and count == int(count):
                return f"{int(count)}{unit}"
        count = round(self * 1000, 6)
        return f"{int(count) if count == int(count) else count}ms"


@dataclass(frozen=True, eq=False)  # a metric is declared once, so identity is equality
class Metric:
    """One metric, declared once: documentation, checks and the exposition all derive from it.

    `unit` is the base unit (bytes, seconds, ratio, celsius, ...), `source` where the value comes from (a kernel file,
    a header, a document). Raises ValueError for what would make the exposition invalid.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    source: str = ""
    stability: str = "stable"

    def __post_init__(self) -> None:
        """Refuse names that Prometheus would refuse, here rather than at the first scrape."""
        if not _METRIC_NAME.fullmatch(self.name):
            raise ValueError(f"metric {self.name!r}: not a valid Prometheus metric name")
        if self.kind is Kind.COUNTER and not self.name.endswith("_total"):
            raise ValueError(f"metric {self.name}: the name of a counter ends in _total")
        for label in self.labels:
            if not _LABEL_NAME.fullmatch(label):
                raise ValueError(f"metric {self.name}: label {label!r} is not a valid label name")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"metric {self.name}: a label is named twice")


class Series:
    """A metric with its label values: the handle that values are added to. Made by `Context.series`, kept, reused.

    `labels` are (name, value) pairs in declared order; `prefix` is the finished, escaped text before the value. Raises
    ValueError for a label name or suffix that would make the exposition invalid.
    """

    __slots__ = ("__weakref__", "labels", "metric", "prefix", "suffix")

    def __init__(self, metric: Metric, labels: Sequence[tuple[str, str]], suffix: str = "") -> None:
        if not _SUFFIX.fullmatch(suffix):
            raise ValueError(f"metric {metric.name}: suffix {suffix!r} is not part of a valid metric name")
        for name, _ in labels:
            if not _LABEL_NAME.fullmatch(name):
                raise ValueError(f"metric {metric.name}: label {name!r} is not a valid label name")
        self.metric = metric
        self.labels = tuple((name, _sendable(value)) for name, value in labels)
        self.suffix = suffix
        self.prefix = metric.name + suffix + _label_text(self.labels) + " "

    def __repr__(self) -> str:
        """Show what a scraper would see."""
        return f"<Series {self.prefix.rstrip()}>"


def _label_text(labels: Sequence[tuple[str, str]]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _sendable(value: str) -> str:
    # Text from hardware may hold anything; lone surrogates (undecodable bytes) would break the page's UTF-8.
    return value.encode("utf-8", "replace").decode("utf-8")


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@dataclass(frozen=True)
class Event:
    """Something that happened. `time` is the fact's own wall time in seconds, None when only the reader knows it.

    `key` is equal when the same fact is read again (after a restart, say); the agent derives it from the other fields
    where the collector leaves it empty. `device` is empty when the fact concerns no single device. Raises ValueError
    for what could not be shown later: a severity or label value of a wrong type, a time outside the years 1 to 9999.
    """

    kind: str
    severity: Severity
    component: str
    message: str
    device: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    time: float | None = None
    key: str = ""

    def __post_init__(self) -> None:
        """Refuse here, where the collector that made it is blamed, rather than when it is read."""
        if not isinstance(self.severity, Severity):
            raise ValueError(f"event {self.kind}: severity {self.severity!r} is not an agent.api.Severity")  # noqa: TRY004
        texts = (self.kind, self.component, self.message, self.device, self.source, self.key)
        if not all(isinstance(text, str) for text in (*texts, *self.labels, *self.labels.values())):
            raise ValueError(f"event {self.kind}: all but time, severity and labels, and all in labels, must be text")
        first_s, last_s = _YEARS_1_TO_9999_S
        if self.time is not None and not first_s <= self.time <= last_s:
            raise ValueError(f"event {self.kind}: time {self.time!r} is not within the years 1 to 9999")


@dataclass(frozen=True)
class Device:
    """What a device is called: a collector that meets it by one name learns the others (`Context.devices`).

    `component` as in events; `name` as in the labels of its series (a GPU's index, an adapter's name); `address` the
    PCI address as the kernel writes it, `0001:00:00.0`. Empty where not known.
    """

    component: str
    name: str
    uuid: str = ""
    address: str = ""


@dataclass(frozen=True)
class VmSize:
    """What a VM size promises. 0 means it has none of it; None means the table does not know: no expectation.

    `gpu_count` counts devices the guest sees (a quarter GPU is one device). Rates are per port, in bits per second.
    """

    name: str
    gpu_model: str = ""
    gpu_count: int | None = None
    gpu_memory_bytes: int | None = None
    fabric_ports: int | None = None
    fabric_rate_bps: int | None = None
    nvlinks_per_gpu: int | None = None


class Clock(Protocol):
    """Time, injected so that tests do not sleep: stamps from `wall`, windows from `monotonic`, both in seconds."""

    def wall(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that never jump."""


class State(Protocol):
    """One collector's small memory across restarts. Never raises: what cannot be kept is told once and lived with.

    In the PROCESS lane it is kept in the agent's own process, so that a process that is replaced leaves it behind.
    """

    def load(self) -> dict[str, Any]:
        """Return what was saved last; empty when there is nothing usable."""

    def save(self, content: Mapping[str, Any]) -> None:
        """Replace what is kept, atomically. JSON types only."""


class Context(Protocol):
    """What the agent hands a collector: roots to read below, time, memory, a logger, and the maker of series."""

    @property
    def log(self) -> logging.Logger:
        """For rare messages; failures go to `Out.failed`, which logs on change."""

    @property
    def sys(self) -> Path:
        """Root of sysfs, normally /sys."""

    @property
    def proc(self) -> Path:
        """Root of procfs, normally /proc."""

    @property
    def dev(self) -> Path:
        """Root of the device files, normally /dev."""

    @property
    def kmsg(self) -> Path:
        """The kernel log: normally /dev/kmsg, else a FIFO or file of records in its format."""

    @property
    def clock(self) -> Clock:
        """The time source."""

    @property
    def state(self) -> State:
        """The collector's memory across restarts."""

    @property
    def vm_size(self) -> VmSize | None:
        """What this VM's size promises; None when the size is unknown."""

    @property
    def run_id(self) -> str:
        """Text that is the same in all processes of this agent and another after its restart."""

    @property
    def interval_s(self) -> float:
        """Seconds between two calls of `collect`."""

    @property
    def timeout_s(self) -> float:
        """Seconds after which the agent gives up on one call of `open` or `collect`."""

    @property
    def avoid(self) -> Mapping[str, str]:
        """Devices (as told to `Out.working_on`) to leave alone, with what an earlier process did on them: `hang` or
        `crash`. PROCESS lane only, else empty.
        """

    def devices(self, component: str) -> Sequence[Device]:
        """Return what the collectors told of this component's devices (`Out.device`), also of those that failed since.

        Empty in the PROCESS lane.
        """

    def series(self, metric: Metric, *values: str) -> Series:
        """Return the handle for these label values, in the order the metric declares its labels.

        The same values give the same handle for as long as anybody holds it. Raises ValueError on a wrong count.
        """

    def sample(self, metric: Metric, labels: Mapping[str, str], suffix: str = "") -> Series:
        """Return a handle with free labels, for data whose shape another program decides (`_bucket`, `_sum`)."""


class Out(Protocol):
    """Where one run of a collector puts what it read. Points of one run appear together or not at all."""

    def add(self, series: Series, value: Value) -> None:
        """Add one value. What could not be read is not added: never 0, -1 or NaN in its place."""

    def extend(self, series: Sequence[Series], values: Sequence[Value]) -> None:
        """Add many values at once, pairwise; the cheap form for kept handles."""

    def event(self, event: Event) -> None:
        """Report that something happened."""

    def failed(self, what: str, error: Exception | str) -> None:
        """Report one device or file that failed while the rest goes on. Counted always, logged when it changes."""

    def device(self, device: Device) -> None:
        """Tell a device's names to whoever meets it by another. Remembered until this collector tells others."""

    def working_on(self, device: str, limit_s: float | None = None) -> None:
        """Name the device that the next reads touch, so that a hang can be blamed on it.

        In the PROCESS lane each device has the collector's timeout to itself, or `limit_s` where it is known to need
        longer (a driver that has to start, say).
        """


@dataclass(frozen=True)
class NoOptions:
    """For collectors without configuration keys of their own."""


class Collector:
    """Base of all collectors. Subclasses set the class attributes and write `open` and `collect`.

    One instance lives in one lane and is never called by two threads at once, unless it `isolates_devices`.
    """

    name: ClassVar[str]
    metrics: ClassVar[Sequence[Metric]]
    lane: ClassVar[Lane] = Lane.SHARED
    Options: ClassVar[type] = NoOptions  # a frozen dataclass; its fields are the collector's configuration keys
    needs: ClassVar[str] = ""  # one line for `hpcwatch collectors`: what must be there
    interval: ClassVar[Duration | None] = None  # None: agent.interval
    timeout: ClassVar[Duration] = Duration(5)
    api: ClassVar[int] = API_VERSION
    # True: a hang between two calls of `Out.working_on` is one device's, which gets DEVICE_SHARE of the timeout. The
    # agent then calls `collect` again at once, in another thread, on the same object; `agent.hw.bulkhead` knows which
    # device to leave out.
    isolates_devices: ClassVar[bool] = False
    rescan_s: float = 60.0  # how often `open` is called again; an instance may choose

    def __init__(self, options: Any, ctx: Context) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def look(cls, options: Any, ctx: Context) -> None:
        """Raise NotPresent when there is plainly nothing to collect. Must not block. Called before each start.

        For the PROCESS lane: it saves the node a process that would only find that out.
        """

    def open(self) -> None:
        """Discover devices and make series. Called before the first `collect`, again every `rescan_s` and after a
        failure, so it must be repeatable. Raises NotPresent when there is nothing to collect.
        """

    def collect(self, out: Out) -> None:
        """Read everything once and add it to `out`. Discovery belongs into `open`."""
        raise NotImplementedError

    def found(self) -> str:
        """Say in a few words what `open` found, for people (`hpcwatch collectors`, the status page)."""
        return ""

    def seen(self) -> bool:
        """Say whether the last run saw the hardware itself. Not where it is merely expected, and missing: hardware that
        was seen on this boot keeps its collector on.
        """
        return True

    def close(self) -> None:
        """Release descriptors. Called once, possibly never when the collector hangs."""
