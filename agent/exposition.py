"""Snapshots as Prometheus text (0.0.4) and OpenMetrics (1.0), rendered once per change for all scrapers.

A page is a fixed list of text pieces with a value between each two. The pieces change only when a series comes or
goes; in a steady state a render is one `repr` per value and one join.
"""

from __future__ import annotations

import logging
import threading
import zlib
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from agent.api import Kind, Metric, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from agent.snapshot import Snapshot, Store

log = logging.getLogger("page")

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# What a sample's name may add to its metric's, and which names beside its own OpenMetrics keeps for a family.
_SUFFIXES = {
    Kind.HISTOGRAM: {"_bucket", "_sum", "_count", "_created"},
    Kind.SUMMARY: {"", "_sum", "_count", "_created"},
}
_KEPT_NAMES = {**_SUFFIXES, Kind.COUNTER: {"_total", "_created"}}


class _Layout:
    """The fixed pieces of a page for the series of all sources, in both formats.

    `owners` names the source that declared a metric: from any other, a series of that name is refused. `refused` are
    the series left off, as (source, series).
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Sequence[Series]]],
        hidden_prefixes: tuple[str, ...] = (),
        declared_by: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        series = [one for _, several in sources for one in several]
        came_from = [source for source, several in sources for _ in several]
        families: dict[str, list[int]] = {}
        owners: dict[str, Metric] = {}
        claims = _Claims()
        known: set[object] = set()
        self.refused: list[tuple[str, str]] = []
        for index, one in enumerate(series):
            if one.metric.name.startswith(hidden_prefixes):
                continue
            identity = _identity(one)
            misplaced = one.suffix not in _SUFFIXES.get(one.metric.kind, {""})
            stranger = declared_by.get(one.metric.name, came_from[index]) != came_from[index]
            if misplaced or stranger or identity in known or not claims.hold(one.metric):
                # A scraper would refuse the whole page for it.
                self.refused.append((came_from[index], one.prefix.rstrip()))
                continue
            known.add(identity)
            name = _family(one.metric)
            owners.setdefault(name, one.metric)
            families.setdefault(name, []).append(index)
        ordered = sorted(families)
        order = [index for name in ordered for index in families[name]]
        self.gather = _gatherer(order)
        self.text = _pieces(series, [(owners[name], families[name]) for name in ordered], _text_head)
        self.openmetrics = _pieces(series, [(owners[name], families[name]) for name in ordered], _openmetrics_head)


class _Claims:
    """Which metric each name on the page belongs to: the first that came with it, and those declared alike."""

    def __init__(self) -> None:
        self._owners: dict[str, Metric] = {}
        self._held: dict[Metric, bool] = {}

    def hold(self, metric: Metric) -> bool:
        """Claim the metric's names; False when a contradicting metric has one of them."""
        held = self._held.get(metric)
        if held is None:
            family = _family(metric)
            names = [family, *(family + suffix for suffix in _KEPT_NAMES.get(metric.kind, ()))]
            held = self._held[metric] = not any(_differ(self._owners.get(name, metric), metric) for name in names)
            if held:
                self._owners.update(dict.fromkeys(names, metric))
        return held


def _family(metric: Metric) -> str:
    """Name the family as OpenMetrics does, so that x and x_total are seen to clash."""
    return metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name


def _identity(series: Series) -> object:
    """Give what makes a series the same to a scraper: neither the order of labels nor empty ones tell two apart."""
    return series.metric.name + series.suffix, frozenset(label for label in series.labels if label[1])


def _differ(one: Metric, other: Metric) -> bool:
    return (one.name, one.kind, one.help, one.unit) != (other.name, other.kind, other.help, other.unit)


def _gatherer(order: Sequence[int]) -> Callable[[Sequence[str]], tuple[str, ...]]:
    if len(order) > 1:
        return itemgetter(*order)
    return lambda texts: tuple(texts[index] for index in order)


def _pieces(
    series: Sequence[Series], families: Iterable[tuple[Metric, Sequence[int]]], head: Callable[[Metric], str]
) -> list[str]:
    pieces: list[str] = []
    for metric, indexes in families:
        lead = head(metric)
        for index in indexes:
            pieces += (lead + series[index].prefix, "")
            lead = "\n"
    return pieces


def _help(metric: Metric) -> str:
    text = metric.help.encode("utf-8", "replace").decode("utf-8")  # as label values: the page must be UTF-8
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _text_head(metric: Metric) -> str:
    return f"\n# HELP {metric.name} {_help(metric)}\n# TYPE {metric.name} {metric.kind.value}\n"


def _openmetrics_head(metric: Metric) -> str:
    name = _family(metric)
    kind = "unknown" if metric.kind is Kind.UNTYPED else metric.kind.value
    help_text = _help(metric).replace('"', '\\"')
    unit = f"# UNIT {name} {metric.unit}\n" if metric.unit and name.endswith(f"_{metric.unit}") else ""
    return f"\n# TYPE {name} {kind}\n{unit}# HELP {name} {help_text}\n"


class Exposition:
    """The page of one store. Names that start with a hidden prefix are left out (they stay in the snapshots).

    `declared_by` gives for each declared metric its source; that one's series win over others of the same name.
    """

    def __init__(
        self,
        store: Store,
        hidden_prefixes: tuple[str, ...] = (),
        declared_by: Callable[[], Mapping[str, str]] = lambda: MappingProxyType({}),
    ) -> None:
        self._store = store
        self._hidden = hidden_prefixes
        self._declared_by = declared_by
        self._lock = threading.Lock()
        self._version = -1
        self._series: list[tuple[str, Sequence[Series]]] = []
        self._layout = _Layout(())
        self._texts: dict[str, tuple[Snapshot, list[str]]] = {}
        self._values: tuple[str, ...] = ()
        self._pages: dict[tuple[bool, bool], bytes] = {}
        self.renders = 0

    @property
    def refused(self) -> int:
        """How many series are left off the page because another has their name."""
        return len(self._layout.refused)

    def page(self, *, openmetrics: bool = False, compress: bool = False) -> bytes:
        """Return the page, the same bytes to everyone until a snapshot changes. Any thread may call."""
        with self._lock:
            version, snapshots = self._store.latest()
            if version != self._version:
                self._fill(snapshots)
                self._version = version
                self._pages.clear()
            key = (openmetrics, compress)
            page = self._pages.get(key)
            if page is None:
                page = self._pages[key] = self._gzip(openmetrics) if compress else self._render(openmetrics)
            return page

    def _fill(self, snapshots: Mapping[str, Snapshot]) -> None:
        """Bring values, and where series changed the layout, up to date."""
        series = [(source, snapshot.series) for source, snapshot in snapshots.items()]
        if series != self._series:  # compares by identity first: cheap when nothing came or went
            before, self._layout = self._layout, _Layout(series, self._hidden, self._declared_by())
            self._series = series
            self._tell(sorted(set(self._layout.refused) - set(before.refused)))
        texts = {}
        for source, snapshot in snapshots.items():
            known = self._texts.get(source)
            same = known is not None and known[0] is snapshot
            texts[source] = known if known and same else (snapshot, [*map(repr, snapshot.values)])
        self._texts = texts
        self._values = self._layout.gather([*chain.from_iterable(text for _, text in texts.values())])

    @staticmethod
    def _tell(refused: Sequence[tuple[str, str]]) -> None:
        if refused:
            source, series = refused[0]
            more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
            log.warning("left off the page, for another has the name: %s of %s%s", series, source, more)

    def _render(self, openmetrics: bool) -> bytes:  # noqa: FBT001 - private, one caller
        self.renders += 1
        pieces = (self._layout.openmetrics if openmetrics else self._layout.text).copy()
        pieces[1::2] = self._values
        body = "".join(pieces)[1:]
        end = "\n" if body else ""
        return f"{body}{end}{'# EOF' if openmetrics else ''}{chr(10) if openmetrics else ''}".encode()

    def _gzip(self, openmetrics: bool) -> bytes:  # noqa: FBT001 - private, one caller
        plain = self._pages.get((openmetrics, False))
        if plain is None:
            plain = self._pages[openmetrics, False] = self._render(openmetrics)
        packer = zlib.compressobj(1, wbits=31)  # level 1: a third of the time of level 6 for nearly the same size
        return packer.compress(plain) + packer.flush()
