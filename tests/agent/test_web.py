"""What HTTP clients are answered: formats by negotiation, states, events, and nothing that is not for them."""

from __future__ import annotations

import gzip
import json
import re
import socket
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from agent import __version__
from agent.api import Collector, Event, Kind, Lane, Metric, NotPresent, Out, Series, Severity
from agent.config import Sources, load
from agent.engine import Engine
from agent.exposition import OPENMETRICS, TEXT
from agent.registry import GROUP, Plugin
from agent.server.exchange import Request, Response
from agent.snapshot import Snapshot
from agent.web import WebApp, accepts_gzip, prefers_openmetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

NASTY = "<script>alert('1')</script>&\"{node}\udc80\n"
LEVEL = Metric("tank_level", Kind.GAUGE, "Level.")
LOAD = Metric("host_load1", Kind.GAUGE, "Load.")


class Tank(Collector):
    name = "tank"
    metrics = (LEVEL, LOAD)
    needs = "a tank"

    def open(self) -> None:
        self.series = self.ctx.series(LEVEL)

    def collect(self, out: Out) -> None:
        out.add(self.series, 7)

    def found(self) -> str:
        return NASTY


class Leaking(Collector):
    name = "leaking"
    metrics = ()
    lane = Lane.THREAD

    def collect(self, out: Out) -> None:
        raise ValueError(f"secret {NASTY}")


class Dry(Collector):
    name = "dry"
    metrics = ()
    needs = "water"

    def open(self) -> None:
        raise NotPresent("no water")


class Off(Collector):
    name = "off"
    metrics = ()


class Browser:
    """Asks one application as the servers do."""

    def __init__(self, engine: Engine, mistake: str = "") -> None:
        self.engine = engine
        self.reloads = 0
        self._mistake = mistake
        self.app = WebApp(engine, self._reload)

    def _reload(self) -> str:
        self.reloads += 1
        return self._mistake

    def ask(
        self, target: str, method: str = "GET", *, trusted: bool = False, control: bool = False, **headers: str
    ) -> Response:
        parts = urlsplit(target)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        query = parse_qs(parts.query, keep_blank_values=True)
        return self.app.answer(Request(method, parts.path, query, fields, trusted=trusted, control=control))

    def json(self, target: str, *, trusted: bool = False) -> Any:
        answer = self.ask(target, trusted=trusted)
        assert (answer.status, answer.content_type) == (200, "application/json; charset=utf-8")
        return json.loads(answer.body)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    classes = {cls.name: cls for cls in (Tank, Leaking, Dry, Off)}
    plugins = {
        name: Plugin(name, "hpcwatch", EntryPoint(name, f"{__name__}:{cls.__name__}", GROUP))
        for name, cls in sorted(classes.items())
    }
    sets = [
        f"agent.state_dir={tmp_path / 'state'}",
        f"agent.devfs={tmp_path / 'dev'}",
        "agent.labels={cluster: blue}",
        "collectors.off.enabled=false",
    ]
    sources = Sources(
        sets=sets,
        directory="/nonexistent",
        default_file="/nonexistent",
        environ={},
        sysfs=str(tmp_path),
        procfs=str(tmp_path),
    )
    settings = load(sources, collector_names=list(plugins), output_names=[])
    engine = Engine(settings, plugins, child_setup=lambda: None, look_once=True)
    yield engine
    engine.stop()


@pytest.fixture
def browser(engine: Engine) -> Browser:
    engine.start()
    engine.wait_for_first_round()
    engine.stop()  # what follows the last run has happened, too
    return Browser(engine)


def test_metrics_are_text_unless_asked_otherwise(browser: Browser) -> None:
    answer = browser.ask("/metrics")
    assert (answer.status, answer.content_type) == (200, TEXT)
    assert b"\ntank_level 7\n" in answer.body
    assert ("Vary", "Accept, Accept-Encoding") in answer.headers
    assert "Content-Encoding" not in dict(answer.headers)


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
PROTOBUF_FIRST = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6," + PROMETHEUS_3
)


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, PROTOBUF_FIRST])
def test_prometheus_gets_openmetrics_compressed(browser: Browser, accept: str) -> None:
    answer = browser.ask("/metrics", accept=accept, accept_encoding="gzip")
    assert answer.content_type == OPENMETRICS
    assert ("Content-Encoding", "gzip") in answer.headers
    page = gzip.decompress(answer.body)
    assert page == browser.ask("/metrics", accept=accept).body
    assert page.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
        ("application/openmetrics-text", True),
        ("APPLICATION/OpenMetrics-Text; Version=1.0.0", True),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0.5,text/plain;q=0.5", True),
        ("text/plain;q=0.1,application/openmetrics-text;q=0.2", True),
        ("application/openmetrics-text;q=x", False),
        ("application/openmetrics-text;q=nan", False),
        (",;,;=;q", False),
    ],
)
def test_format_is_what_the_client_would_rather_have(accept: str, openmetrics: bool) -> None:  # noqa: FBT001
    assert prefers_openmetrics(accept) is openmetrics


@pytest.mark.parametrize(
    ("header", "gzipped"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("gzip;q=0.1", True),
        ("*", True),
        ("*;q=0", False),
        ("*;q=0, gzip", True),
        ("*, gzip;q=0", False),
        ("identity", False),
        ("br, deflate", False),
        ("gzip;q=high", False),
        (";;,", False),
    ],
)
def test_gzip_only_for_clients_that_take_it(header: str, gzipped: bool) -> None:  # noqa: FBT001
    assert accepts_gzip(header) is gzipped


def test_page_is_not_rendered_again_for_the_next_scraper(browser: Browser) -> None:
    browser.ask("/metrics")
    renders = browser.engine.exposition.renders
    assert browser.ask("/metrics").body is browser.ask("/metrics").body
    assert browser.engine.exposition.renders == renders


@pytest.mark.parametrize("target", ["/", "/metrics", "/healthz", "/readyz", "/api/v1/status", "/api/v1/events"])
def test_head_is_answered_as_get(browser: Browser, target: str) -> None:
    get, head = browser.ask(target), browser.ask(target, "HEAD")
    assert (head.status, head.content_type, head.headers) == (get.status, get.content_type, get.headers)


@pytest.mark.parametrize("target", ["/nothing", "/metrics/", "/api/v1", "/control/reload", "", "/METRICS"])
def test_unknown_path_is_not_found(browser: Browser, target: str) -> None:
    assert browser.ask(target, trusted=True).status == 404


def test_readiness_comes_with_the_first_collection_and_health_before(engine: Engine) -> None:
    browser = Browser(engine)
    engine.scheduler.jobs.update({job.name: job for job in engine.make_jobs()})
    assert (browser.ask("/healthz").status, browser.ask("/readyz").status) == (200, 503)
    engine.start()
    engine.wait_for_first_round()
    assert (browser.ask("/healthz").status, browser.ask("/readyz").status) == (200, 200)


def test_status_lists_every_collector_with_its_state(browser: Browser) -> None:
    status = browser.json("/api/v1/status", trusted=True)
    assert (status["node"], status["version"]) == (socket.gethostname(), __version__)
    assert [(row["name"], row["state"], row["enabled"]) for row in status["collectors"]] == [
        ("dry", "absent", False),
        ("leaking", "failed", True),
        ("off", "off", False),
        ("tank", "ok", True),
    ]
    dry, leaking, off, tank = status["collectors"]
    assert dry["reason"] == "no water"
    assert leaking["reason"].startswith("ValueError: secret")
    assert (leaking["errors"], leaking["age"]) == (1, "")
    assert (tank["series"], tank["needs"], tank["reason"]) == (1, "a tank", "")
    assert re.fullmatch(r"\d+ s", tank["age"])
    assert off.keys() == tank.keys()


def test_text_of_errors_is_not_for_everybody(browser: Browser) -> None:
    for target in ("/api/v1/status", "/"):
        assert b"secret" not in browser.ask(target).body
        assert b"secret" in browser.ask(target, trusted=True).body
    assert all(row["reason"] == "" for row in browser.json("/api/v1/status")["collectors"])


def test_status_page_escapes_whatever_hardware_and_errors_say(browser: Browser) -> None:
    answer = browser.ask("/", trusted=True)
    assert (answer.status, answer.content_type) == (200, "text/html; charset=utf-8")
    page = answer.body.decode()
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&amp;&quot;{node}?") == 3
    assert [name for name in ("tank", "leaking", "dry", "off") if f">{name}</th>" not in page] == []
    assert page.count("<tr ") == page.count("</tr>") == 5


def test_status_page_shows_the_values_of_those_that_declared_them(browser: Browser) -> None:
    load = Series(LOAD, ())
    for source, value in (("tank", 34.5), ("dry", 66.5)):
        browser.engine.store.put(Snapshot(source, 1_800_000_000.0, [load], [value]))
    page = browser.ask("/").body.decode()
    assert "<dd>34.5</dd>" in page
    assert "66.5" not in page
    assert "<dt>Size</dt>" not in page  # not known here


def test_status_page_tells_of_values_that_are_older_than_their_collector_allows(browser: Browser) -> None:
    browser.engine.store.put(Snapshot("tank", 1_000_000_000.0, [Series(LOAD, ())], [34.5]))
    assert "brought nothing new for" in browser.ask("/").body.decode()


def test_status_page_tells_the_traffic_at_the_first_view(browser: Browser) -> None:
    received = Metric("node_infiniband_port_data_received_bytes_total", Kind.COUNTER, "Received.", ("device", "port"))
    series = Series(received, (("device", "mlx5_ib0"), ("port", "1")))
    for taken_at, total in ((1_800_000_000.0, 0), (1_800_000_010.0, 125_000_000_000)):
        browser.engine.store.put(Snapshot("infiniband", taken_at, [series], [total]))
    assert ">100 Gb/s<" in browser.ask("/").body.decode()


def test_status_page_shows_the_newest_events_and_their_text_to_trusted_clients_only(browser: Browser) -> None:
    record(browser.engine, 25)
    page = browser.ask("/", trusted=True).body.decode()
    assert "infiniband mlx5_24<" in page
    assert "text 24" in page
    anyones = browser.ask("/")
    assert "infiniband mlx5_24<" in anyones.body.decode()
    assert "text 24" not in anyones.body.decode()
    assert dict(anyones.headers)["Cache-Control"] == "no-store"


def record(engine: Engine, count: int, **fields: Any) -> None:
    engine.ring.record(
        Event("link_down", Severity.WARNING, "infiniband", f"text {number}", device=f"mlx5_{number}", **fields)
        for number in range(count)
    )


def numbers(answer: Any) -> list[int]:
    """Return which events an answer holds, by the number in their device's name."""
    return [int(event["device"].removeprefix("mlx5_")) for event in answer["events"]]


def id_of(browser: Browser, number: int) -> int:
    """Return the id of a recorded event, by its place."""
    recorded: int = browser.engine.ring.since(0, 10_000)[number].id
    return recorded


def test_events_are_the_latest_oldest_first_with_the_sites_labels(browser: Browser) -> None:
    record(browser.engine, 150)
    events = browser.json("/api/v1/events")
    assert numbers(events) == list(range(50, 150))
    assert events["events"][0]["labels"] == {"cluster": "blue"}


def test_events_are_followed_by_id(browser: Browser) -> None:
    record(browser.engine, 10)
    assert numbers(browser.json(f"/api/v1/events?since={id_of(browser, 6)}")) == [7, 8, 9]
    assert numbers(browser.json("/api/v1/events?since=0&limit=2")) == [0, 1]
    assert numbers(browser.json("/api/v1/events?limit=3")) == [7, 8, 9]
    assert numbers(browser.json("/api/v1/events?limit=0")) == []
    assert numbers(browser.json(f"/api/v1/events?since={id_of(browser, 9)}")) == []


def test_events_around_one_are_those_near_in_time(browser: Browser) -> None:
    record(browser.engine, 3, time=1000.0)
    record(browser.engine, 3, time=9000.0)
    assert numbers(browser.json(f"/api/v1/events?around={id_of(browser, 1)}")) == [0, 1, 2]
    assert numbers(browser.json("/api/v1/events?around=99")) == []


def test_one_answer_holds_a_bounded_number_of_events(browser: Browser) -> None:
    record(browser.engine, 1500)
    assert numbers(browser.json("/api/v1/events?limit=999999999&since=0")) == list(range(1000))


def test_log_text_in_events_is_for_trusted_clients_only(browser: Browser) -> None:
    record(browser.engine, 1)
    for target in ("/api/v1/events", "/api/v1/events?since=0", f"/api/v1/events?around={id_of(browser, 0)}"):
        assert [event["message"] for event in browser.json(target)["events"]] == [""]
        assert [event["message"] for event in browser.json(target, trusted=True)["events"]] == ["text 0"]


@pytest.mark.parametrize("parameter", ["since", "limit", "around"])
@pytest.mark.parametrize(
    "value", ["", "x", "-1", "1.5", "1e3", " 1", "9" * 19, "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_what_is_no_number_is_a_bad_request_that_names_the_parameter(
    browser: Browser, parameter: str, value: str
) -> None:
    answer = browser.ask(f"/api/v1/events?{parameter}={value}")
    assert (answer.status, answer.body) == (400, f"{parameter} must be a whole number\n".encode())


def test_parameters_that_nobody_knows_are_ignored(browser: Browser) -> None:
    record(browser.engine, 1)
    assert numbers(browser.json("/api/v1/events?other=x")) == [0]


def test_reload_is_for_the_control_socket_only(browser: Browser) -> None:
    refused = browser.ask("/control/reload", "POST", trusted=True)
    assert (refused.status, dict(refused.headers)["Allow"]) == (405, "GET, HEAD")
    assert browser.reloads == 0
    done = browser.ask("/control/reload", "POST", trusted=True, control=True)
    assert (done.status, json.loads(done.body), browser.reloads) == (200, {"reloaded": True}, 1)
    assert browser.ask("/metrics", "POST", trusted=True, control=True).status == 404
    assert browser.reloads == 1


def test_reload_that_fails_says_what_is_wrong(engine: Engine) -> None:
    browser = Browser(engine, "hpcwatch.yaml:3: no such key")
    answer = browser.ask("/control/reload", "POST", trusted=True, control=True)
    assert answer.status == 422
    assert json.loads(answer.body) == {"reloaded": False, "error": "hpcwatch.yaml:3: no such key"}


def test_control_socket_answers_what_http_does(browser: Browser) -> None:
    assert browser.ask("/metrics", control=True, trusted=True).status == 200
