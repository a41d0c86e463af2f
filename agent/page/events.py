"""The latest events, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.page.markup import ABSENT, Grade, Html, Row, join, mark, section, small, table, tag
from agent.page.quantities import ago, clock, rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.events import Recorded

COLUMNS = ("Time (UTC)", "Severity", "Event", "Device", "Details")
EVENTS_MOST = 20
LABELS_MOST = 8
LABEL_LIMIT = 40  # characters of one label's value
GRADES = {"warning": Grade.WARNING, "error": Grade.BAD, "critical": Grade.BAD}


def event_section(events: Sequence[Recorded], now_s: float, *, with_message: bool) -> Html:
    """Return the table. `events` oldest first; the text of a log line only for those who may see it."""
    if not events:
        return section("Events", tag("p", small("None since the agent started.")))
    newest = [*reversed(events)][:EVENTS_MOST]
    rows = [_row(event, now_s, with_message=with_message) for event in newest]
    return section("Events", table("Newest first", COLUMNS, rows, "events"))


def _row(recorded: Recorded, now_s: float, *, with_message: bool) -> Row:
    event = recorded.event
    when = tag("time", clock(recorded.time, now_s), datetime=rfc3339(recorded.time))
    severity = event.severity.value
    message = event.message if with_message else ""
    details = [part for part in (message, _labels(event.labels, event.device)) if part]
    cells = (
        join(when, " ", small(ago(recorded.time, now_s))),
        mark(GRADES.get(severity, Grade.NONE), severity),
        event.kind,
        f"{event.component} {event.device}".strip() or ABSENT,
        join(*details, between=" ") if details else ABSENT,
    )
    return Row(cells)


def _labels(labels: Mapping[str, str], device: str) -> str:
    """Give the labels that tell more than the device's name does; the uuid is long, and the table of GPUs has it."""
    told = [
        f"{name}={value[:LABEL_LIMIT]}"
        for name, value in labels.items()
        if value and value != device and not (device and name == "uuid")
    ]
    return small("  ".join(told[:LABELS_MOST])) if told else ""
