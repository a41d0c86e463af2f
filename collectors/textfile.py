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
# Of all files together, their state included: below what the agent keeps of one run, which would cut the end unseen.
_POINTS_LIMIT = 18_000
_STATE_POINTS = 2  # MTIME and ERROR of one file
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
    """What is known of one file: as it was when it was read, and what is wrong with it.

    Without families it is refused: for its own problem, or without one for the limits that all files share.
    """

    entry: promfile.Entry
    families: list[promfile.Family] | None = None
    lines: int = 0  # with a sample; 0 also for a file that was not opened
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
            self._merge(entries)
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

    def _read(self, entry: promfile.Entry, left: int) -> _File:
        """Return a file's content when it has at most `left` series. With none left the file is not even opened."""
        known = self._files.get(entry.name)
        if known is None or known.entry != entry or not known.settled:
            known = _File(entry, problem=entry.problem)
        if known.problem:
            return known
        if left <= 0 or known.lines > left:
            return _File(entry, lines=known.lines)
        if known.families is not None:
            return known
        try:
            text = promfile.read(entry.path, self.options.max_file_bytes)
            lines = promfile.count_samples(text)
            return _File(entry, promfile.parse(text, left) if lines <= left else None, lines)
        except promfile.PromFileError as error:
            return _File(entry, problem=str(error))
        except OSError as error:
            return _File(entry, problem=f"cannot be read: {error.strerror}", settled=False)

    def _merge(self, entries: list[promfile.Entry]) -> None:
        """Bring the files together in the order of their names: the first to name something has it."""
        page = _Page(self.ctx, self._metrics, self.options.max_series)
        files: dict[str, _File] = {}
        state: list[tuple[Series, Value]] = []
        self._complaints = []
        for entry in entries:
            file = files[entry.name] = self._read(entry, page.left)
            if file.families is not None:
                complaints = page.add(file.families)
                self._complain(entry, complaints)
                state += self._state(entry, error=bool(complaints))
        self._files = files
        # Last, for what the others leave: many bad files must not take the place of a good one's values.
        refused = [file for file in files.values() if file.families is None]
        beyond: list[_File] = []
        for number, file in enumerate(refused, 1):
            fits = number * _STATE_POINTS <= page.room
            if fits:
                state += self._state(file.entry, error=True)
            if fits and file.problem:
                self._complain(file.entry, [file.problem])
            else:
                beyond.append(file)
        if beyond:
            self._complaints.append(("files", self._excess(beyond)))
        self._metrics = page.used
        points = [*page.points(), *state]
        self._series = [series for series, _ in points]
        self._values = [value for _, value in points]

    def _complain(self, entry: promfile.Entry, complaints: list[str]) -> None:
        if complaints:
            more = len(complaints) - _COMPLAINTS_SHOWN
            tail = [f"and {more} more"] if more > 0 else []
            self._complaints.append((_printable(entry.name), "; ".join(complaints[:_COMPLAINTS_SHOWN] + tail)))

    def _excess(self, beyond: list[_File]) -> str:
        return (
            f"{len(beyond)} of {len(self._files)} refused, first {_printable(beyond[0].entry.name)}: together with the "
            f"files before it more than {self.options.max_series} series (max_series), "
            f"or {_POINTS_LIMIT} with {_STATE_POINTS} for each file's state; remove files or leave out series"
        )

    def _state(self, entry: promfile.Entry, *, error: bool) -> list[tuple[Series, Value]]:
        """Return the at most `_STATE_POINTS` points that tell of a file itself."""
        name = _printable(entry.name)
        points: list[tuple[Series, Value]] = [(self.ctx.series(ERROR, name), int(error))]
        if entry.stamp:
            points.append((self.ctx.series(MTIME, name), entry.stamp[0] / _NS_PER_S))
        return points


class _Page:
    """What the files say together, while it is put together."""

    def __init__(self, ctx: Context, metrics: dict[tuple[str, Kind, str], Metric], max_series: int) -> None:
        self._ctx = ctx
        self._metrics = metrics
        self._series_left = max_series
        self.room = _POINTS_LIMIT  # for points of any sort
        self._shown: dict[str, _Shown] = {}
        self._claims = {metric.name: metric.name for metric in (MTIME, ERROR)}
        self.used: dict[tuple[str, Kind, str], Metric] = {}

    @property
    def left(self) -> int:
        """How many series one more file may have; below 1 when there is no place for it."""
        return min(self._series_left, self.room - _STATE_POINTS)

    def points(self) -> list[tuple[Series, Value]]:
        """Return all series with their values, each metric's together."""
        return [point for shown in self._shown.values() for point in shown.points.values()]

    def add(self, families: list[promfile.Family]) -> list[str]:
        """Add one file and return what of it was refused, in words."""
        # Refused ones count too: they stay in memory as long as their file.
        samples = sum(len(family.samples) for family in families)
        self._series_left -= samples
        self.room -= samples + _STATE_POINTS
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
