"""HTML that cannot be forgotten to be escaped: text becomes markup here only, and only by `tag`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.api import Value

TEXT_LIMIT = 200  # characters of one text from outside: the page stays small whatever a device calls itself
ABSENT = "\N{EN DASH}"


class Html(str):
    """Finished markup. Everything else is text, and `tag` escapes it."""

    __slots__ = ()


class Grade(Enum):
    """How something is, best first. Shown as a word and a shape; colour only repeats it."""

    NONE = ""
    OK = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Row:
    """One line of a table: the first cell names it. `muted` for what is of little interest."""

    cells: Sequence[str]
    muted: bool = False


def text(value: object) -> Html:
    """Make text markup: escaped, cut at TEXT_LIMIT, and without characters that could rearrange what is around it."""
    shown = str(value)
    if len(shown) > TEXT_LIMIT:
        shown = shown[: TEXT_LIMIT - 1] + "\N{HORIZONTAL ELLIPSIS}"
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in shown)
    return Html(escape(shown))


def join(*content: str, between: str = "") -> Html:
    """Put pieces one after the other; those that are no Html are text, and so is what stands between them."""
    return Html(text(between).join(piece if isinstance(piece, Html) else text(piece) for piece in content))


def tag(name: str, /, *content: str, **attributes: str) -> Html:
    """Make an element. `content` that is no Html is text. `class_` gives class, `data_name` gives data-name."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{join(*content)}</{name}>")


def mark(grade: Grade, word: str) -> Html:
    """Show how something is: a word, with the shape of its grade before it."""
    return tag("span", word, class_=f"mark {grade.value}") if grade.value else tag("span", word)


def small(content: str) -> Html:
    """Make a remark beside a value."""
    return tag("small", content)


def bar(part: Value, of: Value) -> Html:
    """Draw how much of a whole that is. For the eye only: the text beside it says the same."""
    percent = round(100 * min(1.0, max(0.0, part / of))) if of > 0 else 0
    return Html(
        '<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{percent}" height="1"/></svg>'
    )


def table(caption: str, columns: Sequence[str], rows: Sequence[Row], kind: str) -> Html:
    """Make a table. On a narrow screen each row becomes a card, where every cell brings the title of its column.

    The roles repeat what the elements mean, because some browsers forget it when the style changes their layout.
    """
    head = join(*(tag("th", title, scope="col", role="columnheader") for title in columns))
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head, role="row"), role="rowgroup"),
        tag("tbody", *(_row(row, columns) for row in rows), role="rowgroup"),
        class_=kind,
        role="table",
    )


def _row(row: Row, columns: Sequence[str]) -> Html:
    name, *others = row.cells
    cells = (tag("td", cell, role="cell", data_title=title) for cell, title in zip(others, columns[1:], strict=True))
    first = tag("th", name, scope="row", role="rowheader", data_title=columns[0])
    return tag("tr", first, *cells, role="row", class_="muted") if row.muted else tag("tr", first, *cells, role="row")


def section(title: str, *content: str) -> Html:
    """Make a part of the page under its own heading."""
    return tag("section", tag("h2", title), *content)
