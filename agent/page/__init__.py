"""The status page: one look at the node, made on the server from the latest snapshots. No scripts, nothing external."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from agent.page.ages import outdated
from agent.page.collectors import collector_section
from agent.page.events import EVENTS_MOST, event_section
from agent.page.gpus import gpu_section
from agent.page.markup import Html, tag
from agent.page.node import node_header
from agent.page.ports import port_section
from agent.page.readings import read
from agent.page.traffic import PORTS_SOURCE, rates
from agent.page.verdict import Verdict, findings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.events import Recorded
    from agent.page.traffic import Rates
    from agent.snapshot import Snapshot

__all__ = ["EVENTS_MOST", "HEADERS", "PORTS_SOURCE", "Facts", "render"]

REFRESH_S = 10
STYLE = files(__name__).joinpath("page.css").read_text(encoding="utf-8")
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
# Whatever came through the escaping: nothing is run, nothing is fetched, no other style applies.
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'",
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
HEADERS = (
    ("Content-Security-Policy", "; ".join(_POLICY)),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)


@dataclass(frozen=True)
class Facts:
    """All that the page shows, as of one moment.

    `size`: the VM size, empty when not known. `ports_before`: the snapshot that the latest one of PORTS_SOURCE
    replaced, None when there is none. `owners`: the source of each declared metric. `collectors`: rows of
    `agent.status.collector_rows`. `intervals_s`: how often each of them runs. `events`: oldest first. `wall_s`: seconds
    since the epoch. `trusted`: whether the client may see log text.
    """

    node: str
    version: str
    size: str
    snapshots: Mapping[str, Snapshot]
    ports_before: Snapshot | None
    owners: Mapping[str, str]
    collectors: Sequence[Mapping[str, Any]]
    intervals_s: Mapping[str, float]
    events: Sequence[Recorded]
    wall_s: float
    trusted: bool


def render(facts: Facts) -> bytes:
    """Return the page as UTF-8. Whatever is missing is left out or shown as a dash."""
    readings = read(facts.snapshots, facts.owners)
    names = {str(row["name"]) for row in facts.collectors}
    times = [snapshot.taken_at for source, snapshot in facts.snapshots.items() if source in names]
    old = outdated(facts.snapshots, facts.intervals_s, facts.wall_s)
    verdict = Verdict(
        findings(readings, facts.collectors, old, facts.wall_s),
        waiting=[str(row["name"]) for row in facts.collectors if row["state"] == "starting"],
        anything_seen=bool(times),
    )
    body = tag(
        "main",
        node_header(
            facts.node,
            readings,
            size=facts.size,
            version=facts.version,
            taken_s=max(times, default=None),
            now_s=facts.wall_s,
        ),
        verdict.panel(),
        gpu_section(readings, facts.wall_s, old.get("gpu")),
        port_section(readings, _port_rates(facts), old.get("infiniband")),
        event_section(facts.events, facts.wall_s, with_message=facts.trusted),
        collector_section(facts.collectors, old),
    )
    return _document(f"{verdict.words} - {facts.node}", body).encode()


def _port_rates(facts: Facts) -> Rates:
    before, latest = facts.ports_before, facts.snapshots.get(PORTS_SOURCE)
    if before is None or latest is None:
        return {}
    former, newer = (read({PORTS_SOURCE: snapshot}, facts.owners) for snapshot in (before, latest))
    return rates(former, newer, latest.taken_at - before.taken_at)


def _document(title: str, body: Html) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}"><meta name="color-scheme" content="light dark">'
        f"{tag('title', title)}<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )
