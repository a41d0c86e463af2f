"""The collectors: which run, how old their values are, and what they found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.page.markup import ABSENT, Grade, Html, Row, mark, section, small, table, tag
from agent.page.quantities import number

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

COLUMNS = ("Collector", "State", "Age", "Series", "Errors", "Found")
NOTE = "ok: it ran. Its devices may still be in trouble, see above."
GRADES = {"ok": Grade.OK, "failed": Grade.BAD, "hung": Grade.BAD, "absent": Grade.BAD}


def collector_section(rows: Sequence[Mapping[str, Any]], old: Collection[str]) -> Html:
    """Return the table; those that do not run come last. `old`: those whose values are too old."""
    if not rows:
        return Html()
    ordered = sorted(rows, key=is_idle)
    on = sum(not is_idle(row) for row in rows)
    caption = f"{on} of {len(rows)} in use"
    shown = [_row(row, is_old=row["name"] in old) for row in ordered]
    return section("Collectors", tag("p", small(NOTE)), table(caption, COLUMNS, shown, "collectors"))


def trouble(row: Mapping[str, Any]) -> str:
    """Say what is wrong with a collector; empty when nothing is."""
    if row["state"] in ("failed", "hung"):
        what = str(row["state"])
    elif row["state"] == "absent" and not is_idle(row):
        what = "expected and absent"
    else:
        return ""
    return f"{what}: {row['reason']}" if row["reason"] else what


def is_idle(row: Mapping[str, Any]) -> bool:
    """Say whether a collector has nothing to do: it is off, or what it reads was not here since boot."""
    return row["state"] == "off" or (row["state"] == "absent" and not row["enabled"])


def _row(row: Mapping[str, Any], *, is_old: bool) -> Row:
    state = str(row["state"])
    idle = is_idle(row)
    age = str(row["age"]) or ABSENT
    needs = f"needs {row['needs']}" if state in ("absent", "off") and row["needs"] else ""
    cells = (
        str(row["name"]),
        mark(Grade.NONE if idle else GRADES.get(state, Grade.NONE), state),
        mark(Grade.WARNING, age) if is_old else age,
        ABSENT if idle else number(row["series"]),
        number(row["errors"]),
        str(row["found"] or row["reason"] or needs or ABSENT),
    )
    return Row(cells, muted=idle)
