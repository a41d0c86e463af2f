"""The plug-in contract: what a declaration refuses, how durations are written, what text a series becomes."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Collector, Duration, Event, Kind, Metric, NoOptions, Series, Severity
from agent.sim.harness import Probe

UP = Metric("thing_up", Kind.GAUGE, "Whether.", ("device", "port"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("10s", 10.0), ("5m", 300.0), ("4h", 14400.0), ("1d", 86400.0), ("1.5s", 1.5), (" 10s ", 10.0)],
)
def test_duration_is_seconds(text: str, seconds: float) -> None:
    assert Duration.parse(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "10 s", "10S", "1e3s", "1s1m", "nan", "infs", "9" * 400 + "d"])
def test_what_is_no_duration_is_refused_with_the_accepted_form(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration such as 500ms, 10s, 5m or 4h"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(14400, "4h"), (90, "90s"), (1.5, "1500ms"), (0.5, "500ms"), (172800, "2d"), (0, "0ms")]
)
def test_duration_is_written_in_the_largest_unit_that_divides_it(seconds: float, text: str) -> None:
    assert str(Duration(seconds)) == text


@given(st.integers(0, 10**12), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_written_duration_reads_back_as_the_same(count: int, unit: str) -> None:
    duration = Duration.parse(f"{count}{unit}")
    assert math.isclose(Duration.parse(str(duration)), duration, rel_tol=1e-12)


@pytest.mark.parametrize("name", ["", "1up", "a-b", "a b", "a\n", "höhe", "_total"])
def test_metric_name_that_prometheus_refuses_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid Prometheus metric name"):
        Metric(name, Kind.COUNTER if name.endswith("_total") else Kind.GAUGE, "Help.")


@pytest.mark.parametrize("name", ["a", "a_total_", "total"])
def test_name_of_a_counter_ends_in_total(name: str) -> None:
    with pytest.raises(ValueError, match=f"metric {name}: the name of a counter ends in _total"):
        Metric(name, Kind.COUNTER, "Help.")


@pytest.mark.parametrize("label", ["", "1st", "__name__", "a:b", "a-b", "port\n"])
def test_label_that_prometheus_refuses_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="not a valid label name"):
        Metric("a", Kind.GAUGE, "Help.", (label,))
    with pytest.raises(ValueError, match="not a valid label name"):
        Series(UP, [(label, "x")])


def test_label_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        Metric("a", Kind.GAUGE, "Help.", ("port", "port"))


@pytest.mark.parametrize("suffix", [" ", "{", "_sum\n", "-x"])
def test_suffix_that_is_no_part_of_a_name_is_refused(suffix: str) -> None:
    with pytest.raises(ValueError, match="suffix"):
        Series(UP, [], suffix)


def test_series_is_the_finished_text_before_a_value() -> None:
    assert Series(UP, []).prefix == "thing_up "
    assert Series(UP, [("device", "mlx5_0"), ("port", "1")]).prefix == 'thing_up{device="mlx5_0",port="1"} '
    assert Series(Metric("h", Kind.HISTOGRAM, "H."), [("le", "+Inf")], "_bucket").prefix == 'h_bucket{le="+Inf"} '


def test_series_escapes_what_would_end_a_label() -> None:
    assert Series(UP, [("device", 'a"b\\c\nd')]).prefix == 'thing_up{device="a\\"b\\\\c\\nd"} '


def test_series_replaces_what_is_no_utf_8_and_nothing_else() -> None:
    series = Series(UP, [("device", "a\udc80b\0c")])
    assert series.labels == (("device", "a?b\0c"),)
    assert series.prefix.encode() == b'thing_up{device="a?b\0c"} '


@pytest.mark.parametrize("time", [math.nan, math.inf, -1e12, 253402300800.0])
def test_event_at_a_time_that_no_calendar_has_is_refused(time: float) -> None:
    with pytest.raises(ValueError, match="years 1 to 9999"):
        Event("gpu_lost", Severity.ERROR, "gpu", "Gone.", time=time)


def test_event_of_a_wrong_type_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"severity 'error' is not an agent\.api\.Severity"):
        Event("gpu_lost", "error", "gpu", "Gone.")  # type: ignore[arg-type] # the mistake in question
    with pytest.raises(ValueError, match="must be text"):
        Event("gpu_lost", Severity.ERROR, "gpu", "Gone.", labels={"gpu": 1})  # type: ignore[dict-item] # as above
    with pytest.raises(ValueError, match="must be text"):
        Event("gpu_lost", Severity.ERROR, "gpu", None)  # type: ignore[arg-type] # as above


def test_collector_needs_nothing_but_a_name_metrics_and_collect() -> None:
    class Minimal(Collector):
        name = "minimal"
        metrics = ()

    probe = Probe(Minimal)
    assert (probe.collector.options, probe.collector.found()) == (NoOptions(), "")
    with pytest.raises(NotImplementedError):
        probe.collect()
    probe.collector.close()


def test_contract_loads_without_the_rest_of_the_agent() -> None:
    code = "import sys, agent.api; print([m for m in sys.modules if m.startswith(('agent.', 'yaml', 'msgspec'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "['agent.api']"
