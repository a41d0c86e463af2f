"""prometheus-client collectors as plug-ins, and the agent's values in a prometheus-client registry."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import prometheus_client as client
import pytest
from prometheus_client import core
from prometheus_client.metrics_core import Metric as ClientMetric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.adapter import PrometheusCollector, SnapshotCollector, Source, adapt
from agent.api import Collector, Kind, Lane, Metric, NotPresent, Series
from agent.exposition import Exposition
from agent.sim.harness import Probe
from agent.snapshot import Batch, Snapshot, Store


class Fixed:
    """A client collector that gives always the same families."""

    def __init__(self, *families: ClientMetric) -> None:
        self.families = families

    def collect(self) -> Iterable[ClientMetric]:
        return self.families


def probe_of(*families: ClientMetric) -> Probe:
    return Probe(adapt("fixed", lambda: Fixed(*families)))


def batch_of(probe: Probe) -> Batch:
    batch = Batch()
    probe.open()
    probe.collector.collect(batch)
    return batch


def all_types() -> list[ClientMetric]:
    return [
        core.CounterMetricFamily("c", "A counter.", value=1),
        core.GaugeMetricFamily("g", "A gauge.", value=2),
        core.UnknownMetricFamily("u", "Unknown.", value=3),
        core.InfoMetricFamily("i", "Info.", {"version": "1"}),
        core.StateSetMetricFamily("st", "States.", {"on": True, "off": False}),
        core.HistogramMetricFamily("h", "A histogram.", [("1", 1), ("+Inf", 2)], 3.5),
        core.GaugeHistogramMetricFamily("gh", "A gauge histogram.", [("1.0", 1), ("+Inf", 2)], 3.5),
        core.SummaryMetricFamily("s", "A summary.", count_value=2, sum_value=3.5),
    ]


def test_every_type_of_family_is_shown() -> None:
    assert probe_of(*all_types()).collect().values == {
        "c_total": 1,
        "g": 2,
        "u": 3,
        'i_info{version="1"}': 1,
        'st{st="on"}': 1,
        'st{st="off"}': 0,
        'h_bucket{le="1.0"}': 1,
        'h_bucket{le="+Inf"}': 2,
        "h_sum": 3.5,
        "h_count": 2,
        'gh_bucket{le="1.0"}': 1,
        'gh_bucket{le="+Inf"}': 2,
        "gh_gsum": 3.5,
        "gh_gcount": 2,
        "s_sum": 3.5,
        "s_count": 2,
    }


def test_every_type_has_its_kind() -> None:
    kinds = {series.metric.name: series.metric.kind for series in batch_of(probe_of(*all_types())).series}
    assert kinds == {
        "c_total": Kind.COUNTER,
        "g": Kind.GAUGE,
        "u": Kind.UNTYPED,
        "i_info": Kind.GAUGE,
        "st": Kind.GAUGE,
        "h": Kind.HISTOGRAM,
        "gh_bucket": Kind.GAUGE,
        "gh_gsum": Kind.GAUGE,
        "gh_gcount": Kind.GAUGE,
        "s": Kind.SUMMARY,
    }


def test_scrapers_can_read_what_an_adapted_collector_gives() -> None:
    store = Store()
    store.put(batch_of(probe_of(*all_types())).finish("fixed", 0.0))
    exposition = Exposition(store)
    text = {family.name: family.type for family in parse_text(exposition.page().decode())}
    assert (text["c"], text["h"], text["u"], text["gh_bucket"]) == ("counter", "histogram", "unknown", "gauge")
    page = exposition.page(openmetrics=True).decode()
    types = {family.name: family.type for family in parse_openmetrics(page)}  # type: ignore[no-untyped-call]
    assert (types["c"], types["s"], types["i_info"], types["st"]) == ("counter", "summary", "gauge", "gauge")


def test_help_and_unit_are_kept() -> None:
    family = core.GaugeMetricFamily("room_celsius", "How warm.", value=20, unit="celsius")
    metric = batch_of(probe_of(family, core.GaugeMetricFamily("x", "", value=1))).series[0].metric
    assert (metric.name, metric.help, metric.unit) == ("room_celsius", "How warm.", "celsius")


def test_a_whole_registry_is_a_collector() -> None:
    registry = client.CollectorRegistry()
    client.Counter("jobs", "Jobs.", ["queue"], registry=registry).labels("a").inc(3)
    client.Histogram("wait_seconds", "Waiting.", buckets=(1, 5), registry=registry).observe(2)
    client.Enum("mode", "Mode.", states=["up", "down"], registry=registry).state("down")
    client.Summary("size", "Size.", registry=registry).observe(4)
    result = Probe(adapt("mine", lambda: registry)).collect()
    assert result.failures == []
    assert result.values == {  # and none of the _created samples
        'jobs_total{queue="a"}': 3,
        'wait_seconds_bucket{le="1.0"}': 0,
        'wait_seconds_bucket{le="5.0"}': 1,
        'wait_seconds_bucket{le="+Inf"}': 1,
        "wait_seconds_count": 1,
        "wait_seconds_sum": 2,
        'mode{mode="up"}': 0,
        'mode{mode="down"}': 1,
        "size_count": 1,
        "size_sum": 4,
    }


def test_the_client_collector_is_made_once_and_keeps_counting() -> None:
    registry = client.CollectorRegistry()
    counter = client.Counter("n", "N.", registry=registry)
    made: list[Source] = []

    def make() -> Source:
        made.append(registry)
        return registry

    probe = Probe(adapt("n", make))
    counter.inc()
    assert probe.collect().values == {"n_total": 1}
    counter.inc()
    probe.open()
    assert probe.collect().values == {"n_total": 2}
    assert len(made) == 1


def test_series_keep_their_identity_from_run_to_run() -> None:
    probe = probe_of(*all_types())
    first, second = batch_of(probe), batch_of(probe)
    assert all(one is other for one, other in zip(first.series, second.series, strict=True))


@dataclass(frozen=True)
class RoomOptions:
    celsius: float = 20.0


class Room(PrometheusCollector):
    name = "room"
    Options = RoomOptions

    def make(self) -> Source:
        return Fixed(core.GaugeMetricFamily("room_celsius", "How warm.", value=self.options.celsius))


class Cellar(PrometheusCollector):
    name = "cellar"
    make = staticmethod(lambda: Fixed(core.GaugeMetricFamily("cellar_celsius", "How cold.", value=8)))


def test_a_subclass_may_use_options_or_be_one_line() -> None:
    assert Probe(Room, RoomOptions(25)).collect().values == {"room_celsius": 25}
    assert Probe(Cellar).collect().values == {"cellar_celsius": 8}


def test_an_adapted_class_is_a_plug_in() -> None:
    plug_in = adapt("fixed", Fixed, needs="a fixed thing", lane=Lane.PROCESS)
    assert issubclass(plug_in, Collector)
    assert (plug_in.name, plug_in.needs, plug_in.lane, list(plug_in.metrics)) == (
        "fixed",
        "a fixed thing",
        Lane.PROCESS,
        [],
    )


def test_not_present_passes_through() -> None:
    def make() -> Source:
        raise NotPresent("no such thing")

    with pytest.raises(NotPresent, match="no such thing"):
        Probe(adapt("fixed", make)).open()


def test_a_failure_of_the_client_collector_fails_the_run() -> None:
    class Broken:
        def collect(self) -> Iterable[ClientMetric]:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        Probe(adapt("broken", Broken)).collect()


def raw(name: str, kind: str, *samples: tuple[str, dict[str, str], float]) -> ClientMetric:
    family = ClientMetric(name, "Raw.", kind)
    for sample in samples:
        family.add_sample(*sample)
    return family


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (raw("a.b", "gauge", ("a.b", {}, 1)), "'a.b': not a valid Prometheus metric name"),
        (raw("a", "gauge", ("a", {"x.y": "1"}, 1)), "'x.y' is not a label name"),
        (raw("a", "gauge", ("a", {"__x": "1"}, 1)), "'__x' is not a label name"),
        (raw("a", "gauge", ("b", {}, 1)), "sample b has no place in a family of type gauge"),
        (raw("a", "gauge", ("", {}, 1)), "sample  has no place"),
        (raw("a", "histogram", ("a", {}, 1)), "sample a has no place in a family of type histogram"),
        (raw("a", "histogram", ("a_bucket", {"le": "big"}, 1)), "has no number as label le"),
        (raw("a", "summary", ("a", {}, 1)), "has no number as label quantile"),
    ],
)
def test_a_bad_family_is_reported_and_the_rest_goes_on(family: ClientMetric, reason: str) -> None:
    result = probe_of(family, core.GaugeMetricFamily("good", "Good.", value=1)).collect()
    assert result.values == {"good": 1}
    [(what, text)] = result.failures
    assert what == family.name
    assert reason in text


def test_a_series_given_twice_is_shown_once() -> None:
    twice = raw("a", "gauge", ("a", {"x": "1"}, 1), ("a", {"x": "1"}, 2), ("a", {"x": "2"}, 3))
    result = probe_of(twice).collect()
    assert result.values == {'a{x="1"}': 1, 'a{x="2"}': 3}
    assert result.failures == [("a", 'a{x="1"} is given more than once; the first is shown')]


def test_names_that_break_our_own_rules_are_kept() -> None:
    result = probe_of(raw("x_total", "gauge", ("x_total", {}, 1)), raw("c", "counter", ("c", {}, 2))).collect()
    assert result.values == {"x_total": 1, "c_total": 2}


def test_what_is_not_finite_is_absent() -> None:
    assert probe_of(core.GaugeMetricFamily("a", "A.", value=float("nan"))).collect().values == {}


# ---- the other way

BYTES = Metric("x_bytes_total", Kind.COUNTER, "Bytes.", ("device",), unit="bytes")
WARMTH = Metric("warmth", Kind.GAUGE, "No unit in its name.", unit="celsius")
WAIT = Metric("wait", Kind.HISTOGRAM, "Waiting.")
ODD = Metric("odd", Kind.UNTYPED, "Odd.")


def points() -> list[tuple[Series, int | float]]:
    return [
        (Series(BYTES, [("device", "mlx5_0")]), 2**53 + 1),
        (Series(WARMTH, []), 21.5),
        (Series(WAIT, [("le", "+Inf")], "_bucket"), 1),
        (Series(WAIT, [], "_sum"), 0.5),
        (Series(WAIT, [], "_count"), 1),
        (Series(BYTES, [("device", "mlx5_1")]), 4),
        (Series(ODD, []), 5),
    ]


def test_registering_reads_nothing_and_a_scrape_reads_once() -> None:
    reads: list[int] = []

    def read() -> list[tuple[Series, int | float]]:
        reads.append(1)
        return points()

    registry = client.CollectorRegistry(auto_describe=True)
    registry.register(SnapshotCollector(read))
    assert reads == []
    client.generate_latest(registry)
    assert reads == [1]


def test_values_appear_in_a_registry_under_their_own_names() -> None:
    registry = client.CollectorRegistry()
    registry.register(SnapshotCollector(points))
    families = {family.name: family for family in registry.collect()}
    assert {name: family.type for name, family in families.items()} == {
        "x_bytes": "counter",
        "warmth": "gauge",
        "wait": "histogram",
        "odd": "unknown",
    }
    assert [(s.name, s.labels, s.value) for s in families["x_bytes"].samples] == [
        ("x_bytes_total", {"device": "mlx5_0"}, 2**53 + 1),
        ("x_bytes_total", {"device": "mlx5_1"}, 4),
    ]
    assert (families["x_bytes"].unit, families["warmth"].unit) == ("bytes", "")
    assert families["warmth"].documentation == "No unit in its name."


def test_the_page_of_such_a_registry_is_valid() -> None:
    registry = client.CollectorRegistry()
    registry.register(SnapshotCollector(points))
    page = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]
    parsed = list(parse_openmetrics(page))  # type: ignore[no-untyped-call]
    assert [family.name for family in parsed] == ["x_bytes", "warmth", "wait", "odd"]
    assert "# TYPE x_bytes_total counter\n" in client.generate_latest(registry).decode()


def test_of_two_metrics_with_one_family_name_the_first_is_given() -> None:
    clash = Metric("x_bytes", Kind.GAUGE, "Bytes.")
    families = list(SnapshotCollector(lambda: [*points(), (Series(clash, []), 1)]).collect())
    assert [sample.name for sample in families[0].samples] == ["x_bytes_total", "x_bytes_total"]


def test_the_store_of_an_agent_can_be_registered() -> None:
    store = Store()
    series, values = zip(*points(), strict=True)
    store.put(Snapshot("host", 0.0, series, values))

    def read() -> Iterable[tuple[Series, int | float]]:
        _, snapshots = store.latest()
        for snapshot in snapshots.values():
            yield from zip(snapshot.series, snapshot.values, strict=True)

    assert len(list(SnapshotCollector(read).collect())) == 4


def test_round_trip_through_both_directions() -> None:
    result = Probe(adapt("both", lambda: SnapshotCollector(points))).collect()
    assert result.values == {series.prefix.strip(): value for series, value in points()}


def test_the_client_is_imported_by_the_adapter_alone() -> None:
    code = "import sys, agent.api, agent.hw.promfile; assert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
