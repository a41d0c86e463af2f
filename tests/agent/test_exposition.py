"""The page: valid in both formats whatever the hardware says, exact, and made once per change."""

from __future__ import annotations

import gzip
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.api import Kind, Metric, Series
from agent.exposition import Exposition
from agent.snapshot import POINTS_LIMIT, Snapshot, Store
from tests.conftest import need

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from agent.api import Value

UP = Metric("thing_up", Kind.GAUGE, "Whether it is up.", ("device",))
READS = Metric("thing_reads_total", Kind.COUNTER, "Reads.", ("device",))
PLAIN = Metric("thing_bytes", Kind.GAUGE, "Size.", unit="bytes")


def stored(*points: tuple[Series, Value], source: str = "test", store: Store | None = None) -> Store:
    store = Store() if store is None else store
    store.put(Snapshot(source, 1.0, [series for series, _ in points], [value for _, value in points]))
    return store


def page_of(*points: tuple[Series, Value]) -> str:
    return Exposition(stored(*points)).page().decode()


def families_of(exposition: Exposition) -> tuple[list[Family], list[Family]]:
    """Parse both formats as a scraper does."""
    text = exposition.page().decode()
    openmetrics = exposition.page(openmetrics=True).decode()
    return [*parse_text(text)], [*parse_openmetrics(openmetrics)]  # type: ignore[no-untyped-call] # the library's


def samples_of(families: list[Family]) -> dict[tuple[str, frozenset[tuple[str, str]]], Any]:
    samples = [(sample.name, frozenset(sample.labels.items()), sample.value) for f in families for sample in f.samples]
    assert len({sample[:2] for sample in samples}) == len(samples)
    return {(name, labels): value for name, labels, value in samples}


def test_page_is_what_the_format_says() -> None:
    points = [(Series(READS, [("device", "b")]), 2), (Series(PLAIN, []), 1.5), (Series(READS, [("device", "a")]), 3)]
    exposition = Exposition(stored(*points))
    assert exposition.page().decode() == (
        "# HELP thing_bytes Size.\n# TYPE thing_bytes gauge\nthing_bytes 1.5\n"
        "# HELP thing_reads_total Reads.\n# TYPE thing_reads_total counter\n"
        'thing_reads_total{device="b"} 2\nthing_reads_total{device="a"} 3\n'
    )
    assert exposition.page(openmetrics=True).decode() == (
        "# TYPE thing_bytes gauge\n# UNIT thing_bytes bytes\n# HELP thing_bytes Size.\nthing_bytes 1.5\n"
        "# TYPE thing_reads counter\n# HELP thing_reads Reads.\n"
        'thing_reads_total{device="b"} 2\nthing_reads_total{device="a"} 3\n# EOF\n'
    )


def test_help_is_escaped_as_each_format_says() -> None:
    exposition = Exposition(stored((Series(Metric("a", Kind.GAUGE, 'A "b" \\ c\nd.'), []), 1)))
    assert b'# HELP a A "b" \\\\ c\\nd.\n' in exposition.page()
    assert b'# HELP a A \\"b\\" \\\\ c\\nd.\n' in exposition.page(openmetrics=True)


def test_unit_is_told_only_where_the_name_has_it_as_openmetrics_demands() -> None:
    metrics = [
        Metric("a_seconds_total", Kind.COUNTER, "A.", unit="seconds"),
        Metric("b", Kind.GAUGE, "B.", unit="ratio"),
    ]
    exposition = Exposition(stored(*((Series(metric, []), 1) for metric in metrics)))
    assert [family.unit for family in families_of(exposition)[1]] == ["seconds", ""]


def test_empty_store_gives_an_empty_page_that_is_valid() -> None:
    exposition = Exposition(Store())
    assert (exposition.page(), exposition.page(openmetrics=True)) == (b"", b"# EOF\n")
    assert gzip.decompress(exposition.page(compress=True)) == b""


def test_single_series_is_a_page() -> None:
    assert page_of((Series(PLAIN, []), 1)).endswith("\nthing_bytes 1\n")


@given(st.lists(st.text(), min_size=1, max_size=5))
@example(
    ["\n", '"', "\\", '\\"', "\\n", "a\\", "\r\n", "\x00", "\x1f\x7f\x85\u2028", "\udc80", "{", "}", ",", " # ", ""]
)
def test_any_label_text_survives_in_both_formats(texts: list[str]) -> None:
    series = {one.labels: one for one in (Series(UP, [("device", text)]) for text in texts)}
    points = [(one, number) for number, one in enumerate(series.values())]
    expected = {("thing_up", frozenset(one.labels)): number for one, number in points}
    for families in families_of(Exposition(stored(*points))):
        assert samples_of(families) == expected


@given(st.text())
@example('\x00a\udc80\n\\ "quoted" \\n')
@example("")
def test_any_help_text_leaves_the_page_valid_in_both_formats(text: str) -> None:
    exposition = Exposition(stored((Series(Metric("a", Kind.GAUGE, text), []), 1)))
    expected = text.encode("utf-8", "replace").decode()
    plain, openmetrics = families_of(exposition)
    assert [family.documentation for family in openmetrics] == [expected]
    assert samples_of(plain) == samples_of(openmetrics) == {("a", frozenset()): 1}


@given(st.lists(st.one_of(st.integers(-(2**63), 2**64), st.floats(allow_nan=False, allow_infinity=False)), max_size=9))
@example([2**53 + 1, 2**63 - 1, 2**64 - 1, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, -0.0])
def test_integers_are_exact_and_floats_round_trip(values: list[Value]) -> None:
    page = page_of(*((Series(UP, [("device", str(number))]), value) for number, value in enumerate(values)))
    texts = [line.rsplit(" ", 1)[1] for line in page.splitlines() if not line.startswith("#")]
    assert [type(value)(text) for value, text in zip(values, texts, strict=True)] == values
    assert all(text == str(value) for value, text in zip(values, texts, strict=True) if isinstance(value, int))


names = st.sampled_from(["a", "a_total", "a_count", "a_created", "a_bucket", "b", "ab", "a_b_total", "b_sum"])
kinds = st.sampled_from([Kind.GAUGE, Kind.COUNTER, Kind.UNTYPED, Kind.SUMMARY])
suffixes = st.sampled_from(["", "", "", "_sum", "_count", "_created", "_other"])
labels = st.dictionaries(st.sampled_from("xy"), st.sampled_from(["", "1", "2"]), max_size=2)


@given(st.lists(st.tuples(names, kinds, st.sampled_from(["H.", "Other."]), labels, suffixes), max_size=12))
def test_page_stays_valid_sorted_and_contiguous_whatever_sources_claim(choices: list[tuple[Any, ...]]) -> None:
    points: list[tuple[Series, Value]] = []
    for name, kind, text, free, suffix in choices:
        if kind is Kind.COUNTER and not name.endswith("_total"):
            continue
        quantile = {"quantile": "0.5"} if kind is Kind.SUMMARY and not suffix else {}
        points.append((Series(Metric(name, kind, text), [*{**free, **quantile}.items()], suffix), 1))
    exposition = Exposition(stored(*points))
    for families in families_of(exposition):
        assert len(samples_of(families)) == len(points) - exposition.refused
        found = [family.name for family in families]
        assert found == sorted(set(found))


def test_series_that_is_there_already_is_refused_and_counted_without_harm_to_others() -> None:
    store = stored((Series(UP, [("device", "a")]), 1), (Series(UP, [("device", "b")]), 2), source="first")
    stored((Series(UP, [("device", "a")]), 9), (Series(UP, [("device", "c")]), 3), source="second", store=store)
    exposition = Exposition(store)
    lines = exposition.page().decode().splitlines()[2:]
    assert lines == ['thing_up{device="a"} 1', 'thing_up{device="b"} 2', 'thing_up{device="c"} 3']
    assert exposition.refused == 1


def test_order_of_labels_and_empty_labels_do_not_make_another_series() -> None:
    free = Metric("free", Kind.UNTYPED, "Free.")
    first = Series(free, [("a", "1"), ("b", "2")])
    store = stored((first, 1), (Series(free, [("b", "2"), ("a", "1"), ("c", "")]), 2))
    exposition = Exposition(store)
    assert exposition.page().decode().splitlines()[2:] == ['free{a="1",b="2"} 1']
    assert exposition.refused == 1


@pytest.mark.parametrize(
    "other",
    [
        Metric("thing_up", Kind.GAUGE, "Another meaning.", ("device",)),
        Metric("thing_up", Kind.UNTYPED, "Whether it is up.", ("device",)),
        Metric("thing_up", Kind.GAUGE, "Whether it is up.", ("device",), unit="up"),
        Metric("thing_up_total", Kind.COUNTER, "Whether it is up.", ("device",)),
    ],
    ids=["help", "kind", "unit", "counter of the same family"],
)
def test_metric_that_contradicts_an_earlier_one_is_refused_and_counted(other: Metric) -> None:
    store = stored((Series(UP, [("device", "a")]), 1), source="first")
    stored((Series(other, [("device", "b")]), 2), (Series(PLAIN, []), 3), source="second", store=store)
    exposition = Exposition(store)
    assert [line for line in exposition.page().decode().splitlines() if line[0] != "#"] == [
        "thing_bytes 3",
        'thing_up{device="a"} 1',
    ]
    assert exposition.refused == 1


def test_equal_declarations_of_two_sources_share_one_family() -> None:
    again = Metric(UP.name, UP.kind, UP.help, UP.labels)
    store = stored((Series(UP, [("device", "a")]), 1), source="first")
    stored((Series(again, [("device", "b")]), 2), source="second", store=store)
    exposition = Exposition(store)
    assert exposition.page().decode().count("# TYPE thing_up gauge\n") == 1
    assert exposition.refused == 0


def test_metric_may_not_take_a_name_that_belongs_to_a_histogram() -> None:
    histogram = Metric("wait_seconds", Kind.HISTOGRAM, "Waiting.", unit="seconds")
    points: list[tuple[Series, Value]] = [
        (Series(histogram, [("le", "1.0")], "_bucket"), 1),
        (Series(histogram, [("le", "+Inf")], "_bucket"), 2),
        (Series(histogram, [], "_sum"), 1.5),
        (Series(histogram, [], "_count"), 2),
    ]
    intruder = Metric("wait_seconds_count", Kind.GAUGE, "Intruder.", ("who",))
    exposition = Exposition(stored(*points, (Series(intruder, [("who", "me")]), 7)))
    for families in families_of(exposition):
        assert [(family.name, family.type, len(family.samples)) for family in families] == [
            ("wait_seconds", "histogram", 4)
        ]
    assert exposition.refused == 1


def test_refused_series_comes_back_when_the_one_before_it_goes() -> None:
    store = stored((Series(UP, [("device", "a")]), 1), source="first")
    stored((Series(UP, [("device", "a")]), 2), source="second", store=store)
    exposition = Exposition(store)
    exposition.page()
    store.drop("first")
    assert exposition.page().decode().splitlines()[2:] == ['thing_up{device="a"} 2']
    assert exposition.refused == 0


def test_hidden_names_are_off_the_page_and_stay_in_the_snapshots() -> None:
    store = stored((Series(UP, [("device", "a")]), 1), (Series(PLAIN, []), 2))
    exposition = Exposition(store, ("thing_u", "other_"))
    assert "thing_up" not in exposition.page().decode()
    assert b"thing_bytes 2" in exposition.page()
    assert exposition.refused == 0
    assert len(store.latest()[1]["test"].series) == 2


def test_page_is_rendered_once_per_change_for_all_scrapers() -> None:
    store = stored((Series(UP, [("device", "a")]), 1))
    exposition = Exposition(store)
    pages = {id(exposition.page()) for _ in range(50)}
    assert (len(pages), exposition.renders) == (1, 1)
    exposition.page(compress=True)
    exposition.page(compress=True)
    assert exposition.renders == 1
    exposition.page(openmetrics=True)
    exposition.page(openmetrics=True, compress=True)
    assert exposition.renders == 2
    stored((Series(UP, [("device", "a")]), 2), store=store)
    assert b"} 2\n" in exposition.page()
    assert exposition.renders == 3


def test_nothing_is_rendered_for_nobody() -> None:
    store = Store()
    exposition = Exposition(store)
    for value in range(10):
        stored((Series(UP, [("device", "a")]), value), store=store)
    assert exposition.renders == 0


@pytest.mark.parametrize("openmetrics", [False, True])
def test_compressed_page_is_the_plain_one(openmetrics: bool) -> None:  # noqa: FBT001 - a parameter
    store = stored((Series(UP, [("device", "a")]), 1))
    exposition = Exposition(store)
    for value in range(3):
        stored((Series(UP, [("device", "a")]), value), store=store)
        packed = exposition.page(openmetrics=openmetrics, compress=True)
        assert gzip.decompress(packed) == exposition.page(openmetrics=openmetrics)


def test_layout_is_kept_while_no_series_comes_or_goes() -> None:
    a, b = Series(UP, [("device", "a")]), Series(UP, [("device", "b")])
    store = stored((a, 1))
    stored((Series(PLAIN, []), 5), source="other", store=store)
    exposition = Exposition(store)
    exposition.page()
    layout = exposition._layout
    stored((a, 2), store=store)
    assert b'thing_up{device="a"} 2' in exposition.page()
    assert exposition._layout is layout
    stored((a, 2), (b, 3), store=store)
    assert b'thing_up{device="b"} 3' in exposition.page()
    assert exposition._layout is not layout


def test_values_of_unchanged_snapshots_are_not_written_again() -> None:
    store = stored((Series(UP, [("device", "a")]), 1), source="steady")
    exposition = Exposition(store)
    exposition.page()
    texts = exposition._texts["steady"][1]
    stored((Series(PLAIN, []), 5), source="other", store=store)
    assert b"thing_bytes 5" in exposition.page()
    assert exposition._texts["steady"][1] is texts


def test_series_that_swap_places_keep_their_values() -> None:
    a, b = Series(UP, [("device", "a")]), Series(UP, [("device", "b")])
    store = stored((a, 1), (b, 2))
    exposition = Exposition(store)
    exposition.page()
    stored((b, 2), (a, 1), store=store)
    assert exposition.page().decode().splitlines()[2:] == ['thing_up{device="b"} 2', 'thing_up{device="a"} 1']


def test_source_that_stops_is_gone_from_the_page() -> None:
    store = stored((Series(UP, [("device", "a")]), 1))
    exposition = Exposition(store)
    exposition.page()
    store.drop("test")
    assert exposition.page() == b""


def test_linter_of_prometheus_finds_nothing_wrong() -> None:
    promtool = need("promtool", "prometheus")
    odd = Series(UP, [("device", 'a"\\\n\r\x01\x1b\udc80\0ü')])
    big = Series(Metric("thing_reads_total", Kind.COUNTER, 'With "quotes", \\ and\nlines.'), [])
    page = Exposition(stored((odd, 1), (big, 2**64 - 1), (Series(PLAIN, []), 1e300))).page()
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_largest_snapshot_is_one_page() -> None:
    points = [(Series(UP, [("device", str(number))]), number) for number in range(POINTS_LIMIT)]
    assert page_of(*points).count("\n") == POINTS_LIMIT + 2


def test_declared_metric_belongs_to_its_source_whoever_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    store = stored((Series(UP, [("device", "a")]), 9), source="stranger")
    stored((Series(UP, [("device", "a")]), 1), source="owner", store=store)
    exposition = Exposition(store, declared_by=lambda: {UP.name: "owner"})
    assert exposition.page().decode().splitlines()[2:] == ['thing_up{device="a"} 1']
    assert caplog.messages == ['left off the page, for another has the name: thing_up{device="a"} of stranger']
