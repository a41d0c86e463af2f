"""What is visibly wrong now: read from the same values as the tables, worst first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.page import collectors, gpus, ports
from agent.page.markup import Grade, Html, mark, small, tag
from agent.page.quantities import count, listed, number, span
from agent.page.readings import natural
from agent.page.xids import sxids, xids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.api import Value
    from agent.page.readings import Labels, Readings

FINDINGS_MOST = 12
NOTE = "What the values show by themselves; checks arrive with a later version."


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. Equal ones of several devices are told together: `kind` is their noun."""

    grade: Grade
    kind: str
    name: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """How the node is as far as its values tell: that nothing is wrong with them does not say that it is healthy.

    `waiting`: the collectors that have brought nothing yet. `anything_seen`: whether any has.
    """

    findings: Sequence[Finding]
    waiting: Sequence[str]
    anything_seen: bool

    @property
    def grade(self) -> Grade:
        """How bad it is; none of both where nothing is known to be wrong."""
        return self.findings[0].grade if self.findings else Grade.NONE

    @property
    def words(self) -> str:
        """The same in a few words."""
        if self.findings:
            return f"{count(len(self.findings), 'thing')} wrong"
        if self.waiting:
            return "Collection has not finished"
        return "Nothing wrong in these values" if self.anything_seen else "Nothing collected"

    def panel(self) -> Html:
        """Return the part of the page that says it."""
        told = _together(self.findings)
        more = len(told) - FINDINGS_MOST
        lines = [tag("li", mark(one.grade, _subject(one)), " ", one.what) for one in told[:FINDINGS_MOST]]
        if more > 0:
            lines.append(tag("li", f"and {more} more"))
        if self.waiting:
            lines.append(tag("li", f"Waiting for the first values of {listed(self.waiting)}"))
        return tag(
            "section",
            tag("h2", mark(self.grade, self.words)),
            tag("ul", *lines) if lines else Html(),
            tag("p", small(NOTE)),
            class_=f"verdict {self.grade.value}",
        )


def findings(
    readings: Readings, rows: Sequence[Mapping[str, Any]], old: Mapping[str, float], now_s: float
) -> list[Finding]:
    """Return what is wrong, worst first. `rows` of the collectors; `old`: the age in seconds of values too old."""
    found = [
        *_gpu_findings(readings, now_s),
        *_switch_findings(readings, now_s),
        *_port_findings(readings),
        *_collector_findings(rows, old),
    ]
    return sorted(found, key=lambda finding: finding.grade is not Grade.BAD)


def _together(found: Sequence[Finding]) -> list[Finding]:
    names: dict[tuple[Grade, str, str], list[str]] = {}
    for one in found:
        names.setdefault((one.grade, one.kind, one.what), []).append(one.name)
    return [Finding(grade, kind, listed(several), what) for (grade, kind, what), several in names.items()]


def _subject(finding: Finding) -> str:
    return f"{finding.kind} {finding.name}".strip()


def _gpu_findings(readings: Readings, now_s: float) -> Iterator[Finding]:
    known = gpus.by_gpu(readings)
    if readings.value("gpu_nvml_up") == 0:
        yield _unreadable_gpus(readings)
    for gpu in known.values():
        name = gpus.name_of(gpu)
        if gpu.value("gpu_up") == 0:
            why = gpus.reasons(gpu)
            yield Finding(Grade.BAD, "GPU", name, f"down: {why}" if why else "down")
        for grade, what in gpus.troubles(gpu):
            yield Finding(grade, "GPU", name, what)
    missing = _missing_gpus(readings, len(known))
    expected = readings.value("gpu_expected_count")
    if expected is not None and missing > 0:
        yield _part("GPU", missing, expected, "missing")
    for gpu in readings.by(gpus.identity).values():
        for xid in xids(gpu):
            grade = xid.grade(now_s)
            if grade is not Grade.NONE:
                yield Finding(grade, "GPU", gpus.name_of(gpu) or "unknown", xid.shown(now_s))


def _unreadable_gpus(readings: Readings) -> Finding:
    """Say that NVML does not work, and of how many GPUs that takes the values."""
    # Where the driver lists GPUs in /proc it is loaded, and something else is amiss.
    hint = "" if readings.is_on("gpu_count", source="proc") else " (is the driver loaded?)"
    on_pci, expected = readings.value("gpu_count", source="pci") or 0, readings.value("gpu_expected_count") or 0
    for gpu_count, where in ((on_pci, "on PCI"), (expected, "expected")):
        if gpu_count > 0:
            none = "it cannot be read" if gpu_count == 1 else "none can be read"
            what = f"{where}, {none}: NVML cannot be used{hint}"
            return Finding(Grade.BAD, count(gpu_count, "GPU"), "", what)
    return Finding(Grade.BAD, "NVML", "", f"cannot be used{hint}: no GPU can be read")


def _part(noun: str, part: Value, whole: Value, what: str) -> Finding:
    """Say of how many something is the case: `GPUs 1 of 8 missing`, or `1 GPU missing` where there is but one."""
    if whole == 1:
        return Finding(Grade.BAD, count(whole, noun), "", what)
    return Finding(Grade.BAD, f"{noun}s", "", f"{number(part)} of {number(whole)} {what}")


def _missing_gpus(readings: Readings, known: int) -> float:
    """Count the expected GPUs of which nothing is seen; those that are down are no part of it."""
    expected = readings.value("gpu_expected_count")
    if expected is None:
        return 0
    seen = [known]
    if not readings.is_on("gpu_nvml_up"):  # then no GPU is known by itself, and the rest of the system must tell
        seen += [int(value) for _, value in readings.of("gpu_count")]
    return expected - max(seen)


def _switch_findings(readings: Readings, now_s: float) -> Iterator[Finding]:
    for name, switch in sorted(readings.by(_switch).items(), key=lambda item: natural(item[0])):
        for sxid in sxids(switch):
            grade = sxid.grade(now_s)
            if grade is not Grade.NONE:
                yield Finding(grade, "NVSwitch", name or "unknown", sxid.shown(now_s))


def _switch(name: str, labels: Labels) -> str | None:
    return labels.get("switch", "") if name.startswith("nvswitch_sxid_") else None


def _port_findings(readings: Readings) -> Iterator[Finding]:
    told_down = 0
    for key, port in ports.by_port(readings).items():
        trouble = ports.trouble(port)
        if trouble is not None and ports.is_fabric(port):
            grade, what = trouble
            told_down += grade is Grade.BAD
            yield Finding(grade, "port" if key[1] else "adapter", ports.name_of(key), what)
    expected, present, up = (
        readings.value("infiniband_fabric_ports", status=status) for status in ("expected", "present", "up")
    )
    if expected is not None and present is not None and present < expected:
        yield _part("fabric port", expected - present, expected, "missing")
    if present is not None and up is not None and present - up > told_down:
        yield _part("fabric port", present - up, present, "not up")


def _collector_findings(rows: Sequence[Mapping[str, Any]], old: Mapping[str, float]) -> Iterator[Finding]:
    for row in rows:
        what = collectors.trouble(row)
        if what:
            yield Finding(Grade.BAD, "collector", str(row["name"]), what)
    for name, age_s in old.items():
        yield Finding(Grade.WARNING, "collector", name, f"brought nothing new for {span(age_s)}")
