"""The node in two lines: what it is and how it runs; what watches it, and from when the newest values are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.page.markup import Html, join, small, tag
from agent.page.quantities import ago, clock, count, memory_of, span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agent.page.readings import Readings

LINKS = (("/metrics", "metrics"), ("/api/v1/status", "status"), ("/api/v1/events", "events"))


def node_header(name: str, facts: Readings, *, size: str, version: str, taken_s: float | None, now_s: float) -> Html:
    """Return the head of the page. `taken_s`: wall time of the newest values, None when there are none yet."""
    links = join(*(tag("a", word, href=path) for path, word in LINKS), between=" ")
    newest = "none yet" if taken_s is None else f"{clock(taken_s, now_s)} UTC, {ago(taken_s, now_s)}"
    watched = (("Agent", f"hpcwatch {version}"), ("Newest values", newest))
    return tag("header", tag("h1", name), tag("nav", small(links)), _list(_facts(facts, size)), _list(watched))


def _list(told: Iterable[tuple[str, str]]) -> Html:
    return tag("dl", *(tag("div", tag("dt", title), tag("dd", value)) for title, value in told))


def _facts(facts: Readings, size: str) -> Iterator[tuple[str, str]]:
    if size:
        yield "Size", size
    for title, metric, label in (
        ("Kernel", "host_uname_info", "release"),
        ("Driver", "gpu_driver_info", "driver_version"),
    ):
        value = facts.info(metric, label)
        if value:
            yield title, value
    uptime = facts.value("host_uptime_seconds")
    if uptime is not None:
        yield "Up", span(uptime)
    load, cpus = facts.value("host_load1"), facts.value("host_cpus_online")
    if load is not None:
        yield "Load", f"{load:.1f}" if cpus is None else f"{load:.1f} on {count(cpus, 'CPU')}"
    total, available = facts.value("host_memory_total_bytes"), facts.value("host_memory_available_bytes")
    if total is not None and available is not None:
        yield "Memory", memory_of(total - available, total)
