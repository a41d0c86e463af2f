"""Values that other programs leave as `*.prom` files in a directory (textfile.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.api import Collector, Context, Kind, Lane, Metric, NotPresent, Out, Series
from agent.hw import promfile

if TYPE_CHECKING:
    from agent.api import Value

MTIME = Metric(
    "hpcwatch_textfile_mtime_seconds",
    Kind.GAUGE,
    "When the file was last changed, as seconds since the epoch. Absent when the name is no regular file.",
    labels=("file",),
    unit="seconds",
    source="stat(2) st_mtime of the file",
)
ERROR = Metric(
    "hpcwatch_textfile_error",
    Kind.GAUGE,
    "1 when the file or a part of it was refused, 0 when all of it was taken.",
    labels=("file",),
    source="the agent's reading of the file",
)

_NO_HELP = "Read from a text file that gives no help."
_COMPLAINTS_SHOWN = 3
_NS_PER_S = 1_000_000_000
# Sample names that OpenMetrics gives to a family beside its own, by kind; two families must not share one.
_PARTS = {
    Kind.COUNTER: ("_total", "_created"),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count", "_created"),
    Kind.SUMMARY: ("_sum", "_count", "_created"),
}


@dataclass(frozen=True)
class TextfileOptions:
    """Where the files are and how much of them is taken."""

    directory: str = field(
        default="/var/lib/hpcwatch/textfile",
        metadata={"help": "Where the *.prom files are; write elsewhere and rename into it.", "path": True},
    )
    max_file_bytes: int = field(default=1024 * 1024, metadata={"help": "A longer file is refused.", "minimum": 1})
    max_series: int = field(default=10_000, metadata={"help": "Series taken, of all files together.", "minimum": 1})


@dataclass
class _File:
    """What is known of one file: as it was when it was read, and what is wrong with it."""

    entry: promfile.Entry
    families: list[promfile.Family] = field(default_factory=list)
    problem: str = ""
    settled: bool = True  # False: reading failed, which may pass without the file changing


@dataclass
class _Shown:
    """One metric on the page: its series by suffix and labels."""

    metric: Metric
    points: dict[tuple[str, frozenset[tuple[str, str]]], tuple[Series, Value]] = field(default_factory=dict)


class Textfile(Collector):
    """Shows what other programs measured: cron jobs, health checks, prolog and epilog scripts."""

    name = "textfile"
    metrics = (MTIME, ERROR)
    lane = Lane.THREAD  # the directory may be on a file system that stalls
    Options = TextfileOptions
    needs = "a directory for *.prom files"

    def __init__(self, options: TextfileOptions, ctx: Context) -> None:
        super().__init__(options, ctx)
        self._count = 0
        self._files: dict[str, _File] = {}
        self._metrics: dict[tuple[str, Kind, str], Metric] = {}
        self._series: list[Series] = []
        self._values: list[Value] = []
        self._complaints: list[tuple[str, str]] = []

    def open(self) -> None:
        """Look whether the directory is there. Files that come later are found by `collect`."""
        self._count = len(self._scan())

    def collect(self, out: Out) -> None:
        """Read the files that changed and show what all of them say."""
        entries = self._scan()
        self._count = len(entries)
        known = [file.entry for file in self._files.values() if file.settled]
        if entries != known:
            self._files = {entry.name: self._read(entry) for entry in entries}
            self._merge()
        out.extend(self._series, self._values)
        for name, text in self._complaints:
            out.failed(name, text)

    def found(self) -> str:
        """Say how many files there are."""
        return f"{self._count} files in {self.options.directory}"

    def _scan(self) -> list[promfile.Entry]:
        try:
            return promfile.scan(self.options.directory)
        except FileNotFoundError:
            raise NotPresent(f"no directory {self.options.directory}") from None

    def _read(self, entry: promfile.Entry) -> _File:
        known = self._files.get(entry.name)
        if known is not None and known.entry == entry and known.settled:
            return known
        if entry.problem:
            return _File(entry, problem=entry.problem)
        try:
            text = promfile.read(entry.path, self.options.max_file_bytes)
            return _File(entry, promfile.parse(text, self.options.max_series))
        except promfile.PromFileError as error:
            return _File(entry, problem=str(error))
        except OSError as error:
            return _File(entry, problem=f"cannot be read: {error.strerror}", settled=False)

    def _merge(self) -> None:
        """Bring the files together in the order of their names: the first to name something has it."""
        page = _Page(self.ctx, self._metrics, self.options.max_series)
        state: list[tuple[Series, Value]] = []
        self._complaints = []
        for name, file in self._files.items():
            complaints = [file.problem] if file.problem else page.add(file.families)
            if complaints:
                more = len(complaints) - _COMPLAINTS_SHOWN
                tail = [f"and {more} more"] if more > 0 else []
                self._complaints.append((_printable(name), "; ".join(complaints[:_COMPLAINTS_SHOWN] + tail)))
            if file.entry.stamp:
                state.append((self.ctx.series(MTIME, _printable(name)), file.entry.stamp[0] / _NS_PER_S))
            state.append((self.ctx.series(ERROR, _printable(name)), int(bool(complaints))))
        self._metrics = page.used
        points = [*state, *page.points()]
        self._series = [series for series, _ in points]
        self._values = [value for _, value in points]


class _Page:
    """What the files say together, while it is put together."""

    def __init__(self, ctx: Context, metrics: dict[tuple[str, Kind, str], Metric], max_series: int) -> None:
        self._ctx = ctx
        self._metrics = metrics
        self._left = self._max_series = max_series
        self._shown: dict[str, _Shown] = {}
        self._claims = {metric.name: metric.name for metric in (MTIME, ERROR)}
        self.used: dict[tuple[str, Kind, str], Metric] = {}

    def points(self) -> list[tuple[Series, Value]]:
        """Return all series with their values, each metric's together."""
        return [point for shown in self._shown.values() for point in shown.points.values()]

    def add(self, families: list[promfile.Family]) -> list[str]:
        """Add one file and return what of it was refused, in words."""
        if sum(len(family.samples) for family in families) > self._left:
            return [f"more than {self._max_series} series together with the files before it"]
        complaints = []
        for family in families:
            kind = _kind(family)
            complaint = self._clash(family, kind)
            if not complaint:
                complaint = self._show(family, kind)
            if complaint:
                complaints.append(complaint)
        return complaints

    def _clash(self, family: promfile.Family, kind: Kind) -> str:
        """Say what stands in this family's way; empty when its name is free, or the same metric's."""
        shown = self._shown.get(family.name)
        if shown is not None:
            there = shown.metric
            if there.kind is not kind:
                return f"{family.name}: type {kind.value} here, {there.kind.value} in a file before this one"
            if family.help and there.help not in (family.help, _NO_HELP):
                return f"{family.name}: its help text differs from that in a file before this one"
            return ""
        names = _names(family.name, kind)
        owner = next((self._claims[name] for name in names if name in self._claims), None)
        if owner is not None:
            return f"{family.name}: its name or one of its parts is taken by {owner}"
        self._claims.update(dict.fromkeys(names, family.name))
        return ""

    def _show(self, family: promfile.Family, kind: Kind) -> str:
        """Add a family's series; say which were there already."""
        if family.name not in self._shown:
            key = (family.name, kind, family.help or _NO_HELP)
            metric = self._metrics.get(key) or Metric(*key, source="a text file")
            self.used[key] = metric
            self._shown[family.name] = _Shown(metric)
        shown = self._shown[family.name]
        repeated: list[Series] = []
        for sample in family.samples:
            series = self._ctx.sample(shown.metric, dict(sample.labels), sample.suffix)
            key_of_point = (sample.suffix, frozenset(sample.labels))
            if key_of_point in shown.points:
                repeated.append(series)
                continue
            shown.points[key_of_point] = (series, sample.value)
            self._left -= 1
        if not repeated:
            return ""
        return f"{family.name}: {len(repeated)} series are there already, first {repeated[0].prefix.strip()}"


def _kind(family: promfile.Family) -> Kind:
    """Return the kind as declared; a counter not named `..._total` cannot be one in OpenMetrics, so it is untyped."""
    if family.kind == "counter" and not family.name.endswith("_total"):
        return Kind.UNTYPED
    return Kind(family.kind)


def _names(name: str, kind: Kind) -> list[str]:
    base = name.removesuffix("_total") if kind is Kind.COUNTER else name
    return [base, *(base + part for part in _PARTS.get(kind, ()))]


def _printable(name: str) -> str:
    """Make a file name of any bytes text that stays different from other names'."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
