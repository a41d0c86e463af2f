"""What commands print: the collectors, the declared metrics, one collection as JSON."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from agent.derive.selfmetrics import SelfMetrics
from agent.log import one_line
from agent.registry import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.api import Collector, Metric
    from agent.engine import Engine
    from agent.registry import Plugin

log = logging.getLogger("hpcwatch")


def usable_collectors(plugins: Mapping[str, Plugin]) -> dict[str, type[Collector]]:
    """Import every installed collector; those that cannot be imported are told and left out."""
    classes = {}
    for name, plugin in plugins.items():
        try:
            classes[name] = plugin.load()
        except PluginError as error:
            log.warning("%s", error)
    return classes


def declared_metrics(plugins: Mapping[str, Plugin]) -> list[dict[str, Any]]:
    """Return every declared metric as contract fields, sorted by name."""
    owners: list[tuple[str, Iterable[Metric]]] = [(SelfMetrics.name, SelfMetrics.metrics)]
    owners += [(name, cls.metrics) for name, cls in usable_collectors(plugins).items()]
    rows = [
        {
            "name": metric.name,
            "type": metric.kind.value,
            "unit": metric.unit,
            "labels": list(metric.labels),
            "help": metric.help,
            "collector": owner,
            "stability": metric.stability,
            "source": metric.source,
        }
        for owner, metrics in owners
        for metric in metrics
    ]
    return sorted(rows, key=lambda row: str(row["name"]))


def metrics_text(rows: Sequence[Mapping[str, Any]], form: str) -> str:
    """Write declared metrics as a table, Markdown or JSON."""
    if form == "json":
        return json.dumps(rows, indent=1) + "\n"
    if form == "markdown":
        return _metrics_markdown(rows)
    return _table(
        ("METRIC", "TYPE", "LABELS", "COLLECTOR", "HELP"),
        [(row["name"], row["type"], ",".join(row["labels"]), row["collector"], row["help"]) for row in rows],
    )


def _metrics_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["# Metrics", "", "Written by `hpcwatch metrics --format markdown`.", ""]
    for owner in sorted({row["collector"] for row in rows}):
        title = "The agent itself" if owner == SelfMetrics.name else f"Collector `{owner}`"
        lines += [f"## {title}", "", "| metric | type | unit | labels | meaning | source |", "|---" * 6 + "|"]
        for row in rows:
            if row["collector"] == owner:
                labels = ", ".join(f"`{label}`" for label in row["labels"])
                source = f"`{row['source']}`" if row["source"] else ""
                cells = (f"`{row['name']}`", row["type"], row["unit"], labels, row["help"], source)
                lines.append("| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def collectors_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write collector rows for people."""
    return _table(
        ("COLLECTOR", "STATE", "NEEDS", "FOUND"),
        [(row["name"], row["state"], row["needs"], row["found"] or row["reason"]) for row in rows],
    )


def collectors_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write collector rows for programs."""
    return json.dumps(rows, indent=1) + "\n"


def snapshot_json(engine: Engine) -> bytes:
    """Write the latest snapshots as JSON: collectors with their states, metrics with their samples."""
    metrics: dict[str, dict[str, Any]] = {}
    _, snapshots = engine.store.latest()
    for snapshot in snapshots.values():
        for series, value in zip(snapshot.series, snapshot.values, strict=True):
            metric = series.metric
            fresh = {"name": metric.name, "type": metric.kind.value, "unit": metric.unit, "help": metric.help}
            entry = metrics.setdefault(metric.name, {**fresh, "samples": []})
            sample: dict[str, Any] = {"labels": dict(series.labels), "value": value}
            if series.suffix:
                sample["suffix"] = series.suffix
            entry["samples"].append(sample)
    collectors = [
        {"name": name, "state": job.state.value, "reason": job.reason} for name, (_, job) in engine.collectors.items()
    ]
    document = {"time": engine.clock.wall(), "collectors": collectors, "metrics": [metrics[n] for n in sorted(metrics)]}
    return json.dumps(document).encode() + b"\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align all columns but the last."""
    lines = [tuple(heads), *(tuple(one_line(str(cell)) for cell in row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads) - 1)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip() + "\n"
        for line in lines
    )
