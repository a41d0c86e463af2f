"""Facts as events."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from agent.api import Event, Severity
from agent.hw.kmsg import plain
from collectors.kernel.lines import HungTask, Killed, OomKill, Stall, Sxid, Xid
from collectors.kernel.position import mark_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.hw.kmsg import Record
    from collectors.kernel.gpus import Names
    from collectors.kernel.ledger import Reported
    from collectors.kernel.severities import Severities

MESSAGE_LIMIT_CHARS = 500
_JOB = re.compile(r"/job_(\d+)(?:/|$)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


class Reports:
    """Makes events. `boot_id` tells the records of one boot from those of another; it may be empty."""

    def __init__(self, severities: Severities, boot_id: str, names: Callable[[str], Names]) -> None:
        self._severities = severities
        self._boot_id = boot_id
        self._names = names

    def similarity(self, fact: Reported) -> str:
        """Return what facts have in common that are told together in a storm: nothing worse hides among milder ones."""
        return f"{type(fact).__name__} {self._severity(fact).value} {_subject(fact)}"

    def maker(self, fact: Reported, record: Record, at_s: float) -> Callable[[], Event]:
        """Return a function that makes the event of a fact: of a storm's facts few become one."""
        return partial(self._make, fact, record, at_s)

    def _make(self, fact: Reported, record: Record, at_s: float) -> Event:
        kind, component, device, labels = self._describe(fact)
        sequence, checksum = mark_of(record)
        return Event(
            kind=kind,
            severity=self._severity(fact),
            component=component,
            message=_CONTROL.sub(" ", plain(record.text))[:MESSAGE_LIMIT_CHARS],
            device=device,
            labels={name: value for name, value in labels.items() if value},
            source="kernel",
            time=at_s,
            key=f"kmsg:{self._boot_id}:{sequence}:{checksum:08x}",
        )

    def _severity(self, fact: Reported) -> Severity:
        if isinstance(fact, Xid):
            return self._severities.xid(fact.code, fact.word)
        if isinstance(fact, Sxid):
            return self._severities.sxid(fact.code, fact.word)
        if isinstance(fact, OomKill | Killed):
            return Severity.WARNING if fact.scope == "memcg" else Severity.ERROR
        return Severity.WARNING if isinstance(fact, HungTask) else Severity.ERROR

    def _describe(self, fact: Reported) -> tuple[str, str, str, dict[str, str]]:
        """Return kind, component, device and labels."""
        if isinstance(fact, Xid):
            called = self._names(fact.address)
            labels = {"xid": str(fact.code), "uuid": called.uuid, "gpu": called.number, "pci": fact.address}
            return "gpu_xid", "gpu", called.number or fact.address, {**labels, "gi": fact.gi, "ci": fact.ci}
        if isinstance(fact, Sxid):
            labels = {"sxid": str(fact.code), "switch": fact.switch, "pci": fact.address}
            return "nvswitch_sxid", "gpu", f"nvswitch{fact.switch}", labels
        if isinstance(fact, OomKill | Killed):
            cgroup = fact.cgroup if isinstance(fact, OomKill) else ""
            job = _JOB.search(cgroup)
            labels = {"pid": fact.pid, "task": fact.task, "cgroup": cgroup, "job_id": job[1] if job else ""}
            return "kernel_oom_kill", "kernel", "", {**labels, "scope": fact.scope}
        if isinstance(fact, HungTask):
            return "kernel_hung_task", "kernel", "", {"pid": fact.pid, "task": fact.task}
        return "kernel_stall", "kernel", "", {"kind": fact.kind, "cpu": fact.cpu}


def _subject(fact: Reported) -> str:
    if isinstance(fact, Xid):
        return f"{fact.address} {fact.code}"
    if isinstance(fact, Sxid):
        return f"{fact.switch} {fact.code}"
    if isinstance(fact, OomKill):
        return fact.cgroup
    return fact.kind if isinstance(fact, Stall) else fact.task
