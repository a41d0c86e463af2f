"""What is visibly wrong now: read from the same values as the tables, worst first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.page import gpus, ports
from agent.page.markup import Grade, Html, mark, small, tag
from agent.page.quantities import count, listed, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.page.readings import Readings

FINDINGS_MOST = 12
NOTE = "What the values show; checks arrive with a later version."


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. Equal ones of several devices are told together: `kind` is their noun."""

    grade: Grade
    kind: str
    name: str
    what: str


def findings(readings: Readings, collectors: Sequence[Mapping[str, Any]], now_s: float) -> list[Finding]:
    """Return what is wrong, worst first."""
    found = [*_gpu_findings(readings, now_s), *_port_findings(readings), *_collector_findings(collectors)]
    return sorted(found, key=lambda finding: finding.grade is not Grade.BAD)


def summary(found: Sequence[Finding], *, anything_seen: bool) -> tuple[Grade, str]:
    """Say in a few words how the node is."""
    if found:
        return found[0].grade, f"{count(len(found), 'thing')} wrong"
    return (Grade.OK, "Nothing wrong seen") if anything_seen else (Grade.NONE, "Nothing seen yet")


def verdict(found: Sequence[Finding], *, anything_seen: bool) -> Html:
    """Return the panel that says it."""
    grade, words = summary(found, anything_seen=anything_seen)
    told = _together(found)
    more = len(told) - FINDINGS_MOST
    lines = [tag("li", mark(one.grade, _subject(one)), " ", one.what) for one in told[:FINDINGS_MOST]]
    if more > 0:
        lines.append(tag("li", f"and {more} more"))
    listing = tag("ul", *lines) if lines else Html()
    return tag(
        "section", tag("h2", mark(grade, words)), listing, tag("p", small(NOTE)), class_=f"verdict {grade.value}"
    )


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
        yield Finding(Grade.BAD, "NVML", "", "cannot be used: no GPU can be read")
    for gpu in known.values():
        name = gpus.name_of(gpu)
        if gpu.value("gpu_up") == 0:
            why = gpus.reasons(gpu)
            yield Finding(Grade.BAD, "GPU", name, f"down: {why}" if why else "down")
        for grade, what in gpus.troubles(gpu):
            yield Finding(grade, "GPU", name, what)
    missing = _missing_gpus(readings, len(known))
    if missing > 0:
        expected = number(readings.value("gpu_expected_count"))
        yield Finding(Grade.BAD, "GPUs", "", f"{number(missing)} of {expected} missing")
    for xid, name in _bad_xids(readings, now_s):
        yield Finding(Grade.BAD, "GPU", name, xid.shown(now_s))


def _missing_gpus(readings: Readings, known: int) -> float:
    """Count the expected GPUs of which nothing is seen; those that are down are no part of it."""
    expected = readings.value("gpu_expected_count")
    if expected is None:
        return 0
    seen = [known]
    if not readings.is_on("gpu_nvml_up"):  # then no GPU is known by itself, and the rest of the system must tell
        seen += [int(value) for _, value in readings.of("gpu_count")]
    return expected - max(seen)


def _bad_xids(readings: Readings, now_s: float) -> Iterator[tuple[gpus.Xid, str]]:
    for gpu in readings.by(gpus.identity).values():
        for xid in gpus.xids(gpu):
            if gpus.GRADE_OF_SEVERITY.get(xid.severity) is Grade.BAD and xid.is_recent(now_s):
                yield xid, gpus.name_of(gpu) or "unknown"


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
        words = f"{number(expected - present)} of {number(expected)} missing"
        yield Finding(Grade.BAD, "fabric ports", "", words)
    if present is not None and up is not None and present - up > told_down:
        yield Finding(Grade.BAD, "fabric ports", "", f"{number(present - up)} of {number(present)} not up")


def _collector_findings(collectors: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in collectors:
        if row["state"] in ("failed", "hung"):
            reason = f": {row['reason']}" if row["reason"] else ""
            yield Finding(Grade.BAD, "collector", str(row["name"]), f"{row['state']}{reason}")
