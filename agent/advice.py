"""What is valid in a configuration and still not what its author hopes for: told at start, reload and check."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from agent import sizes

if TYPE_CHECKING:
    from agent.config.settings import Settings


def advise(settings: Settings) -> list[str]:
    """Return one line for each setting that will have less effect than it seems to."""
    lines = []
    sku = settings.agent.sku
    if sku != "auto" and sizes.load(sku) is None:
        known = {name.lower(): name for name in sizes.names()}
        bare = sku.lower().removeprefix("standard_")
        near = [known[name] for name in difflib.get_close_matches(bare, known, n=1, cutoff=0.8)]
        hint = f"; did you mean {near[0]}?" if near else ""
        lines.append(f"agent.sku: VM size {sku!r} is not in the table, so nothing is expected of this node{hint}")
    if settings.prometheus.compat:
        lines.append("outputs.prometheus.compat: without effect yet; this version has its own names only")
    lines += [f"{path}: ignored, this version of hpcwatch does not have it" for path in settings.later]
    return lines
