"""How old the values are: a table looks the same whether its collector brought it now or stopped bringing any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.page.markup import Grade, Html, join, mark, text
from agent.page.quantities import span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.snapshot import Snapshot

INTERVALS = 3  # missed in a row
RUN_S = 15.0  # values are dated from the start of a run, and one that waits for hardware may last its timeout


def outdated(snapshots: Mapping[str, Snapshot], intervals_s: Mapping[str, float], now_s: float) -> dict[str, float]:
    """Return the age in seconds of what each collector brought, where it should long have brought something newer."""
    ages_s = {name: now_s - snapshots[name].taken_at for name in intervals_s if name in snapshots}
    return {name: age_s for name, age_s in ages_s.items() if age_s > INTERVALS * intervals_s[name] + RUN_S}


def with_age(caption: str, age_s: float | None) -> Html:
    """Add to a table's caption how old its values are; None where they are as new as they should be."""
    return text(caption) if age_s is None else join(caption, " ", mark(Grade.WARNING, f"values {span(age_s)} old"))
