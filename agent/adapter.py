"""Between prometheus-client and the agent, both ways; the only module of `agent` that imports it at the top.

`adapt` and `PrometheusCollector` make a plug-in of any prometheus-client collector or registry. `SnapshotCollector`
registers what the agent knows in a prometheus-client registry of another program (docs/plugins.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from prometheus_client import registry
from prometheus_client.metrics_core import Metric as ClientMetric

from agent.api import Collector, Context, Kind, Lane, Metric, NoOptions, Out, Series
from agent.hw.promfile import LABEL_NAME, canonical_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.samples import Sample

    from agent.api import Value

# (client's type, what the sample's name adds to the family's): our kind, what our metric's name adds, our suffix.
_PLACES: dict[tuple[str, str], tuple[Kind, str, str]] = {
    ("counter", ""): (Kind.COUNTER, "_total", ""),
    ("counter", "_total"): (Kind.COUNTER, "_total", ""),
    ("gauge", ""): (Kind.GAUGE, "", ""),
    ("unknown", ""): (Kind.UNTYPED, "", ""),
    ("info", ""): (Kind.GAUGE, "_info", ""),
    ("info", "_info"): (Kind.GAUGE, "_info", ""),
    ("stateset", ""): (Kind.GAUGE, "", ""),
    ("histogram", "_bucket"): (Kind.HISTOGRAM, "", "_bucket"),
    ("histogram", "_sum"): (Kind.HISTOGRAM, "", "_sum"),
    ("histogram", "_count"): (Kind.HISTOGRAM, "", "_count"),
    ("summary", ""): (Kind.SUMMARY, "", ""),
    ("summary", "_sum"): (Kind.SUMMARY, "", "_sum"),
    ("summary", "_count"): (Kind.SUMMARY, "", "_count"),
    # The text format has no gauge histogram, and as a histogram its falling counts would be a lie: three gauges.
    ("gaugehistogram", "_bucket"): (Kind.GAUGE, "_bucket", ""),
    ("gaugehistogram", "_gsum"): (Kind.GAUGE, "_gsum", ""),
    ("gaugehistogram", "_gcount"): (Kind.GAUGE, "_gcount", ""),
}
_BOUNDS = {"histogram": "le", "gaugehistogram": "le", "summary": "quantile"}
_CLIENT_TYPES = {Kind.UNTYPED: "unknown"}


class Source(Protocol):
    """What prometheus-client calls a collector; a CollectorRegistry is one too."""

    def collect(self) -> Iterable[ClientMetric]:
        """Read everything once."""


class PrometheusCollector(Collector):
    """A prometheus-client collector as a plug-in. Subclasses set `name` and say in `make` which.

    Metrics are learned from what is collected, so `metrics` is empty. `_created` samples, exemplars and timestamps are
    left out; label values become text. A family or sample that cannot be shown is reported and the rest goes on; an
    exception of the collector itself fails the run.
    """

    metrics: ClassVar[tuple[Metric, ...]] = ()
    lane = Lane.THREAD  # foreign code; choose PROCESS when it may hang for ever

    def __init__(self, options: object, ctx: Context) -> None:
        super().__init__(options, ctx)
        self._source: Source | None = None
        self._known: dict[tuple[str, Kind, str, str], Metric] = {}
        self._kept: list[Series] = []  # what is held here keeps its identity from run to run

    def make(self) -> Source:
        """Make the client collector, once. May use `self.options` and `self.ctx`; may raise NotPresent."""
        raise NotImplementedError

    def open(self) -> None:
        """Make the client collector if there is none yet: it keeps counts that must survive."""
        if self._source is None:
            self._source = self.make()

    def collect(self, out: Out) -> None:
        """Collect from the client collector and add what it gave."""
        if self._source is None:
            raise RuntimeError(f"collector {self.name}: collect was called before open")
        page = _Page(self.ctx, self._known, out)
        for family in self._source.collect():
            page.add(family)
        self._known = page.used
        self._kept = list(page.seen)

    def found(self) -> str:
        """Say how many series the last run gave."""
        return f"{len(self._kept)} series from {type(self._source).__name__}" if self._source else ""


def adapt(name: str, make: Callable[[], Source], *, needs: str = "", lane: Lane = Lane.THREAD) -> type[Collector]:
    """Return a plug-in class for a prometheus-client collector or registry that `make` returns.

    `Thermal = adapt("thermal", ThermalCollector)` at the top level of a module, and the entry point names `Thermal`.
    """
    body = {"name": name, "make": staticmethod(make), "needs": needs, "lane": lane, "Options": NoOptions}
    return type(name, (PrometheusCollector,), body)


class _Page:
    """One run's families on their way to `out`."""

    def __init__(self, ctx: Context, known: dict[tuple[str, Kind, str, str], Metric], out: Out) -> None:
        self._ctx = ctx
        self._known = known
        self._out = out
        self.used: dict[tuple[str, Kind, str, str], Metric] = {}
        self.seen: dict[Series, None] = {}

    def add(self, family: ClientMetric) -> None:
        """Add one family; a problem with it or with a sample of it is reported once, the rest goes on."""
        problem = ""
        for sample in family.samples:
            try:
                self._add(family, sample)
            except ValueError as error:
                problem = problem or str(error)
        if problem:
            self._out.failed(family.name, problem)

    def _add(self, family: ClientMetric, sample: Sample) -> None:
        part = sample.name.removeprefix(family.name)
        native = getattr(sample, "native_histogram", None) is not None  # the field came with client 0.21
        if native or (part == "_created" and family.type in ("counter", "histogram", "summary")):
            return
        place = _PLACES.get((family.type, part))
        if place is None or not sample.name.startswith(family.name):
            raise ValueError(f"sample {sample.name} has no place in a family of type {family.type}")
        kind, name_suffix, suffix = place
        metric = self._metric(family.name + name_suffix, kind, family)
        series = self._ctx.sample(metric, _labels(family, sample, part), suffix)
        if series in self.seen:
            raise ValueError(f"{series.prefix.strip()} is given more than once; the first is shown")
        self.seen[series] = None
        self._out.add(series, sample.value)

    def _metric(self, name: str, kind: Kind, family: ClientMetric) -> Metric:
        key = (name, kind, family.documentation or "Given without help by its collector.", family.unit)
        metric = self.used.get(key) or self._known.get(key)
        if metric is None:
            metric = Metric(name, kind, key[2], unit=family.unit, source="a prometheus-client collector")
        self.used[key] = metric
        return metric


def _labels(family: ClientMetric, sample: Sample, part: str) -> dict[str, str]:
    labels = {name: str(value) for name, value in sample.labels.items()}
    for name in labels:
        if not LABEL_NAME.fullmatch(name):
            raise ValueError(f"{sample.name}: {name!r} is not a label name, or one that Prometheus reserves")
    bound_name = _BOUNDS.get(family.type, "")
    if bound_name and part in ("", "_bucket"):
        bound = canonical_bound(labels.get(bound_name, ""))
        if bound is None:
            raise ValueError(f"{sample.name}: part of a {family.type} but has no number as label {bound_name}")
        labels[bound_name] = bound
    return labels


class SnapshotCollector(registry.Collector):
    """The agent's values as a prometheus-client collector, for a program that serves its own page.

    `read` returns the values of the moment; it is called at each scrape and must not touch hardware. Registering calls
    nothing: `describe` knows no names, so clashes show only on the page.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[Series, Value]]]) -> None:
        self._read = read

    def describe(self) -> list[ClientMetric]:
        """Return nothing, so that registering reads nothing."""
        return []

    def collect(self) -> Iterable[ClientMetric]:
        """Yield one family for each metric. Of two metrics whose families have one name the first is given."""
        families: dict[str, tuple[Metric, ClientMetric]] = {}
        for series, value in self._read():
            metric = series.metric
            name = metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
            if name not in families:
                families[name] = (metric, _client_family(name, metric))
            owner, family = families[name]
            if (owner.name, owner.kind) == (metric.name, metric.kind):
                family.add_sample(metric.name + series.suffix, dict(series.labels), value)
        for _, family in families.values():
            yield family


def _client_family(name: str, metric: Metric) -> ClientMetric:
    # prometheus-client appends a unit that the name does not end with, and would rename the metric.
    unit = metric.unit if metric.unit and name.endswith(f"_{metric.unit}") else ""
    return ClientMetric(name, metric.help, _CLIENT_TYPES.get(metric.kind, metric.kind.value), unit)
