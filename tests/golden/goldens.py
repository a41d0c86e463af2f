"""Which goldens there are, and what stands in each.

    pages/SIZE.prom           the whole page of each VM size on which nothing goes wrong
    scenarios/NAME.diff       what of it another scenario changes, on an ND96asr_v4 at the same second
    scenarios/NAME.jsonl      that scenario's events until then, as the agent's API gives them

A scenario that is not over within a moment is seen at several: `NAME.15s.diff`.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from agent.sim.machines import MACHINES
from agent.sim.scenarios import SCENARIOS
from tests.golden.watch import watch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).parent
COMMAND = "python -m tests.golden"
HEALTHY = "healthy"
SIZE = "ND96asr_v4"
SEEN_AT_S = 60  # every story has told its own by then
EARLIER_S = {"link_flap": (15,)}  # and this while it goes on

# A scenario changes what the job does, and with it what the whole node draws, computes and sends. In the diffs these
# are taken for equal, and so are totals as close as LOAD_SHARE; series that come or go are shown of all metrics.
FOLLOWS_LOAD = {
    "gpu_clock_event_active",
    "gpu_clock_hertz",
    "gpu_memory_free_bytes",
    "gpu_memory_used_bytes",
    "gpu_memory_utilization_ratio",
    "gpu_power_average_watts",
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "gpu_throttle_seconds_total",
    "gpu_utilization_ratio",
}
LOAD_SHARE = 0.05
_NAME = re.compile(r"\w+")
_FAMILY = re.compile(r"(# HELP .*\n# TYPE (\w+) .*\n)((?:[^#\n].*\n)*)")


def names() -> list[str]:
    """Return every golden, as paths below FOLDER."""
    pages = [f"pages/{size}.prom" for size in MACHINES]
    scenarios = [scenario for scenario in SCENARIOS if scenario != HEALTHY]
    earlier = [f"scenarios/{scenario}.{at_s}s.diff" for scenario in scenarios for at_s in EARLIER_S.get(scenario, ())]
    return pages + earlier + [f"scenarios/{scenario}.{kind}" for scenario in scenarios for kind in ("diff", "jsonl")]


def text_of(name: str) -> str:
    """Return what a golden is to hold."""
    folder, _, file = name.partition("/")
    what, *moment, kind = file.split(".")
    if folder == "pages":
        return watch(what, HEALTHY, *_moments(what))[SEEN_AT_S].page
    at_s = int(moment[0].removesuffix("s")) if moment else SEEN_AT_S
    seen = watch(SIZE, what, *_moments(SIZE))[at_s]
    if kind == "jsonl":
        return "".join(json.dumps(event.as_json()) + "\n" for event in seen.events)
    healthy = watch(SIZE, HEALTHY, *_moments(SIZE))[at_s]
    return _difference(healthy.page, seen.page, (f"{SIZE} {HEALTHY} at {at_s} s", f"{SIZE} {what} at {at_s} s"))


def stored() -> list[str]:
    """Return every golden that there is, as paths below FOLDER."""
    return [str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*") if path.suffix in {".prom", ".diff", ".jsonl"}]


def write() -> None:
    """Write all goldens anew; those that there are no more go."""
    for name in set(stored()) - set(names()):
        (FOLDER / name).unlink()
    for name in names():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text_of(name), encoding="utf-8")


def _moments(size: str) -> Sequence[int]:
    """Return all seconds at which a size is looked at, so that each scenario is watched once."""
    return sorted({SEEN_AT_S, *(at_s for many in EARLIER_S.values() for at_s in many if size == SIZE)})


def _difference(before: str, after: str, titles: tuple[str, str]) -> str:
    """Return a unified diff of two pages, without context and without positions, which every new series would move.

    A metric of which nothing is left is one line.
    """
    values = _values(before)
    lines = [_alike(line, values) for line in after.splitlines()]
    found = difflib.unified_diff(_without_lost(before, after), lines, *titles, n=0, lineterm="")
    return "".join(f"{line}\n" for line in found if not line.startswith("@@"))


def _without_lost(before: str, after: str) -> list[str]:
    """Return the lines of a page, but one line for each metric that the other does not have."""
    lines = []
    for head, metric, samples in _FAMILY.findall(before):
        if f"# TYPE {metric} " in after:
            lines += [*head.splitlines(), *samples.splitlines()]
        else:
            lines.append(f"{metric}: all {len(samples.splitlines())}")
    return lines


def _values(page: str) -> Mapping[str, str]:
    samples = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {series: value for series, _, value in samples}


def _alike(line: str, healthy: Mapping[str, str]) -> str:
    """Return the line as it would be under the other's load, where that is all that may tell them apart."""
    series, _, value = line.rpartition(" ")
    if line.startswith("#") or series not in healthy:
        return line
    return f"{series} {healthy[series]}" if _differs_by_load(series, value, healthy[series]) else line


def _differs_by_load(series: str, value: str, other: str) -> bool:
    name = _NAME.match(series)
    if name is None or name[0] in FOLLOWS_LOAD:
        return True
    is_total = name[0].endswith("_total")
    return is_total and abs(float(value) - float(other)) <= LOAD_SHARE * float(other)
