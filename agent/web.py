"""What the HTTP port and the control socket answer: metrics, health, the API, the status page. Reads snapshots only."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from agent import __version__
from agent.exposition import OPENMETRICS, TEXT
from agent.page import EVENTS_MOST as EVENTS_MOST_SHOWN
from agent.page import HEADERS, PORTS_SOURCE, Facts, render
from agent.server.exchange import Request, Response
from agent.status import collector_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.engine import Engine

JSON = "application/json; charset=utf-8"
HTML = "text/html; charset=utf-8"
EVENTS_DEFAULT = 100
EVENTS_MOST = 1000

log = logging.getLogger("http")


class WebApp:
    """Answers requests from the engine's snapshots. `reload` reads the configuration again; it returns the mistake."""

    def __init__(self, engine: Engine, reload: Callable[[], str]) -> None:
        self._engine = engine
        self._reload = reload
        self._routes: Mapping[str, Callable[[Request], Response]] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/healthz": self._healthy,
            "/readyz": self._ready,
            "/api/v1/status": self._status,
            "/api/v1/events": self._events,
        }

    def answer(self, request: Request) -> Response:
        """Route one request."""
        if request.method == "POST":
            return self._control(request)
        route = self._routes.get(request.path)
        if route is None:
            return Response(HTTPStatus.NOT_FOUND, b"not found\n")
        return route(request)

    def _control(self, request: Request) -> Response:
        if not request.control:
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, b"method not allowed\n", headers=(("Allow", "GET, HEAD"),))
        if request.path != "/control/reload":
            return Response(HTTPStatus.NOT_FOUND, b"not found\n")
        mistake = self._reload()
        if mistake:
            return _json({"reloaded": False, "error": mistake}, HTTPStatus.UNPROCESSABLE_ENTITY)
        return _json({"reloaded": True})

    def _metrics(self, request: Request) -> Response:
        openmetrics = prefers_openmetrics(request.headers.get("accept") or "")
        compress = accepts_gzip(request.headers.get("accept-encoding") or "")
        body = self._engine.exposition.page(openmetrics=openmetrics, compress=compress)
        encoding = (("Content-Encoding", "gzip"),) if compress else ()
        headers = (*encoding, ("Vary", "Accept, Accept-Encoding"))
        return Response(HTTPStatus.OK, body, OPENMETRICS if openmetrics else TEXT, headers)

    def _healthy(self, _: Request) -> Response:
        return Response(HTTPStatus.OK, b"ok\n")

    def _ready(self, _: Request) -> Response:
        if self._engine.first_round_done:
            return Response(HTTPStatus.OK, b"ready\n")
        return Response(HTTPStatus.SERVICE_UNAVAILABLE, b"first collection not finished\n")

    def _status(self, request: Request) -> Response:
        return _json(
            {
                "node": self._engine.node,
                "version": __version__,
                "collectors": collector_rows(self._engine, with_reason=request.trusted),
                "outputs": [{"name": "prometheus", "state": "ok"}],
            }
        )

    def _events(self, request: Request) -> Response:
        try:
            since, around = _number(request, "since"), _number(request, "around")
            wanted = _number(request, "limit")
        except ValueError as error:
            return Response(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())
        limit = EVENTS_DEFAULT if wanted is None else min(wanted, EVENTS_MOST)
        ring = self._engine.ring
        if around is not None:
            found = ring.around(around, limit)
        elif since is not None:
            found = ring.since(since, limit)
        else:
            found = ring.latest(limit)
        return _json({"events": [event.as_json(with_message=request.trusted) for event in found]})

    def _page(self, request: Request) -> Response:
        engine = self._engine
        sku = engine.settings.agent.sku
        running = engine.collectors.items()
        ports_before = engine.store.before(PORTS_SOURCE)  # first: what a run replaces meanwhile is still the one before
        facts = Facts(
            node=engine.node,
            version=__version__,
            size="" if sku == "auto" else sku,
            snapshots=engine.store.latest()[1],
            ports_before=ports_before,
            owners={metric.name: name for name, (spec, _) in running for metric in spec.collector.metrics},
            collectors=collector_rows(engine, with_reason=request.trusted),
            intervals_s={name: spec.interval_s for name, (spec, _) in running},
            events=engine.ring.latest(EVENTS_MOST_SHOWN),
            wall_s=engine.clock.wall(),
            trusted=request.trusted,
        )
        return Response(HTTPStatus.OK, render(facts), HTML, HEADERS)


def prefers_openmetrics(accept: str) -> bool:
    """Say whether a scraper would rather have OpenMetrics 1.0 than the text format, by its Accept header."""
    best = {True: 0.0, False: 0.0}
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        given = dict(parameter.replace('"', "").split("=", 1) for parameter in parameters if "=" in parameter)
        weight = _weight(given.get("q", "1"))
        if kind == "application/openmetrics-text" and given.get("version", "1.0.0") in ("1.0.0", "0.0.1"):
            best[True] = max(best[True], weight)
        elif kind in ("text/plain", "text/*", "*/*"):
            best[False] = max(best[False], weight)
    return best[True] > 0 and best[True] >= best[False]


def accepts_gzip(accept_encoding: str) -> bool:
    """Say whether a client takes gzip, by its Accept-Encoding header."""
    given: dict[str, float] = {}
    for part in accept_encoding.lower().split(","):
        coding, *parameters = (piece.strip() for piece in part.split(";"))
        weights = [p[2:] for p in parameters if p.startswith("q=")]
        given[coding] = _weight(weights[0] if weights else "1")
    return given.get("gzip", given.get("*", 0.0)) > 0


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _number(request: Request, name: str) -> int | None:
    values = request.query.get(name)
    if not values:
        return None
    if not (values[0].isascii() and values[0].isdigit()) or len(values[0]) > 18:  # noqa: PLR2004 - fits 64 bits
        raise ValueError(f"{name} must be a whole number")
    return int(values[0])


def _json(content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(status, json.dumps(content).encode("utf-8", "replace") + b"\n", JSON)
