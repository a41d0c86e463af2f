"""Snapshots to show on the status page, and the page as its reader sees it: headings, lines, tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from agent.api import Event, Kind, Metric, Series, Severity
from agent.events import Recorded
from agent.page import Facts, render
from agent.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOW = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC
GIB = 2**30
VOID = {"meta", "link", "br", "img"}


class Node:
    """The series of a node, by source; `by` names the one that is not told by the name of the metric."""

    def __init__(self, taken_at: float = NOW - 3) -> None:
        self.taken_at = taken_at
        self.points: dict[str, list[tuple[Series, float]]] = {}

    def add(self, name: str, value: float, /, by: str = "", **labels: str) -> None:
        kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
        series = Series(Metric(name, kind, "Text.", tuple(labels)), tuple(labels.items()))
        self.points.setdefault(by or name.removeprefix("node_").partition("_")[0], []).append((series, value))

    def gpu(self, index: str, *, up: float = 1, uuid: str = "", **values: float) -> dict[str, str]:
        """Add a GPU that answers, or one that does not; `values` go under their names without `gpu_`."""
        labels = {"gpu": index, "uuid": uuid or f"GPU-{index}"}
        self.add("gpu_up", up, **labels)
        if up:
            self.add("gpu_info", 1, **labels, name="NVIDIA A100-SXM4-40GB")
            self.add("gpu_utilization_ratio", 0.97, **labels)
            self.add("gpu_memory_used_bytes", 30.5 * GIB, **labels)
            self.add("gpu_memory_total_bytes", 40 * GIB, **labels)
            self.add("gpu_temperature_celsius", 52, **labels, sensor="gpu")
            self.add("gpu_power_watts", 300, **labels, scope="gpu")
            self.add("gpu_power_limit_watts", 400, **labels, kind="enforced")
            self.add("gpu_row_remap_failure", 0, **labels)
        for name, value in values.items():
            self.add(f"gpu_{name}", value, **labels)
        return labels

    def xid(self, index: str, code: str, severity: str, age_s: float, *, total: int = 1, uuid: str = "") -> None:
        labels = {"gpu": index, "uuid": uuid or f"GPU-{index}"}
        self.add("gpu_xid_errors_total", total, **labels, xid=code, severity=severity)
        if total:
            self.add("gpu_xid_last_timestamp_seconds", NOW - age_s, **labels, xid=code)

    def sxid(self, switch: str, code: str, severity: str, age_s: float) -> None:
        labels = {"switch": switch, "pci": f"0000:0{switch}:00.0", "sxid": code}
        self.add("nvswitch_sxid_errors_total", 1, **labels, severity=severity)
        self.add("nvswitch_sxid_last_timestamp_seconds", NOW - age_s, **labels)

    def port(self, device: str, *, role: str = "fabric", up: float = 1, state: str = "active", port: str = "1",
             received: float = 1e12, rate: float = 25e9) -> dict[str, str]:  # fmt: skip
        labels = {"device": device, "port": port}
        self.add("infiniband_device_info", 1, **labels, role=role, netdev=f"net-{device}")
        self.add("infiniband_port_observable", 1, **labels)
        self.add("infiniband_port_up", up, **labels)
        for one in ("down", "init", "armed", "active"):
            self.add("infiniband_port_state", int(one == state), **labels, state=one)
        self.add("node_infiniband_physical_state_id", 5 if up else 2, **labels)
        self.add("node_infiniband_rate_bytes_per_second", rate, **labels)
        self.add("node_infiniband_port_data_received_bytes_total", received, **labels)
        self.add("node_infiniband_port_data_transmitted_bytes_total", 1e12, **labels)
        self.add("node_infiniband_link_downed_total", 3, **labels)
        self.add("node_infiniband_symbol_error_total", 0, **labels)
        return labels

    def snapshots(self) -> dict[str, Snapshot]:
        return {
            source: Snapshot(source, self.taken_at, [s for s, _ in points], [v for _, v in points])
            for source, points in self.points.items()
        }


def collector(name: str, state: str = "ok", **given: Any) -> dict[str, Any]:
    row = {"needs": "", "found": "", "reason": "", "series": 10, "errors": 0, "age": "3 s"}
    return {"name": name, "state": state, "enabled": True, **row, **given}


def event(age_s: float, kind: str = "link_down", severity: Severity = Severity.ERROR, **given: Any) -> Recorded:
    fields = {"component": "infiniband", "device": "mlx5_ib0", "message": "text of the log", **given}
    happened = Event(kind, severity, **fields)
    return Recorded(1, "key", NOW - age_s, happened, {**happened.labels, "cluster": "blue"})


def facts(node: Node | Mapping[str, Snapshot], /, **given: Any) -> Facts:
    snapshots = node.snapshots() if isinstance(node, Node) else node
    rows = [collector(source) for source in snapshots]
    return Facts(**{
        "node": "nd96-0007", "version": "0.1.0", "size": "", "snapshots": snapshots, "ports_before": None, "owners": {},
        "collectors": rows, "intervals_s": dict.fromkeys(snapshots, 5.0),
        "events": (), "wall_s": NOW, "trusted": True, **given,
    })  # fmt: skip


def show(node: Node | Mapping[str, Snapshot], /, **given: Any) -> Screen:
    return Screen(render(facts(node, **given)).decode("utf-8"))


@dataclass
class Table:
    """A table's caption, and its rows by the title of the column; `heads` are the cells that name the rows."""

    caption: str = ""
    titles: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    def row(self, head: str) -> dict[str, str]:
        """Return the row whose name begins so."""
        (found,) = [row for name, row in zip(self.heads, self.rows, strict=True) if name.split(" ")[0] == head]
        return dict(zip(self.titles, found, strict=True))


class Screen(HTMLParser):
    """The page, read strictly: an element that is not closed in its place is an error."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self.tables: dict[str, Table] = {}
        self.headings: list[str] = []
        self.lines: list[str] = []
        self.bars: list[str] = []
        self._open: list[str] = []
        self._gathered: list[str] = []
        self._scope = ""
        self.feed(source)
        self.close()
        assert self._open == []

    @property
    def verdict(self) -> str:
        return self.headings[0]

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert len(given) == len(attrs)
        self.elements.append((tag, tuple(given)))
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if tag in VOID:
            return
        self._open.append(tag)
        if tag == "th":
            self._scope = given["scope"]
        if tag in ("th", "td", "caption", "h2", "li"):
            self._gathered = []
        if tag == "tr" and "tbody" in self._open:
            self._table().rows.append([])
        if tag == "table":
            self.tables[self.headings[-1]] = Table()
        if tag == "rect":
            self.bars.append(given["width"])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        text = " ".join("".join(self._gathered).split())
        if tag == "h2":
            self.headings.append(text)
        elif tag == "li":
            self.lines.append(text)
        elif tag == "caption":
            self._table().caption = text
        elif tag in ("th", "td"):
            self._cell(tag, text)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        self._gathered.append(data)
        self.texts.append((self._open[-1] if self._open else "", data))

    def _cell(self, tag: str, text: str) -> None:
        if "thead" in self._open:
            self._table().titles.append(text)
            return
        if tag == "th":
            assert self._scope == "row"
            self._table().heads.append(text)
        self._table().rows[-1].append(text)

    def _table(self) -> Table:
        return [*self.tables.values()][-1]
