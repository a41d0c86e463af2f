"""The collectors: which run, how old their values are, and what they found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.page.markup import ABSENT, Grade, Html, Row, mark, section, table
from agent.page.quantities import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS = ("Collector", "State", "Age", "Series", "Errors", "Found")
GRADES = {"ok": Grade.OK, "failed": Grade.BAD, "hung": Grade.BAD}
IDLE = ("absent", "off")


def collector_section(rows: Sequence[Mapping[str, Any]]) -> Html:
    """Return the table; those that do not run come last."""
    if not rows:
        return Html()
    ordered = sorted(rows, key=lambda row: row["state"] in IDLE)
    on = sum(row["state"] not in IDLE for row in rows)
    caption = f"{on} of {len(rows)} in use"
    return section("Collectors", table(caption, COLUMNS, [_row(row) for row in ordered], "collectors"))


def _row(row: Mapping[str, Any]) -> Row:
    state = str(row["state"])
    idle = state in IDLE
    needs = f"needs {row['needs']}" if idle and row["needs"] else ""
    cells = (
        str(row["name"]),
        mark(GRADES.get(state, Grade.NONE), state),
        str(row["age"]) or ABSENT,
        ABSENT if idle else number(row["series"]),
        number(row["errors"]),
        str(row["found"] or row["reason"] or needs or ABSENT),
    )
    return Row(cells, muted=idle)
