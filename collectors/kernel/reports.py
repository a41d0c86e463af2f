"""Facts as events."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from agent.api import Event, Severity
from agent.hw.kmsg import plain
from collectors.kernel.lines import HungTask, Killed, OomKill, Sxid, Xid
from collectors.kernel.position import mark_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from agent.hw.kmsg import Record
    from collectors.kernel.gpus import Names
    from collectors.kernel.ledger import Reported
    from collectors.kernel.severities import Severities

MESSAGE_LIMIT_CHARS = 500
_JOB = re.compile(r"/job_(\d+)(?:/|$)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def similarity(fact: Reported) -> Hashable:
    """Return what facts have in common that are told together in a storm."""
    if isinstance(fact, Xid):
        return ("gpu_xid", fact.address, fact.code)
    if isinstance(fact, Sxid):
        return ("nvswitch_sxid", fact.switch, fact.code)
    if isinstance(fact, OomKill):
        return ("kernel_oom_kill", fact.cgroup)
    if isinstance(fact, Killed | HungTask):
        return (type(fact).__name__, fact.task)
    return ("kernel_stall", fact.kind)


class Reports:
    """Makes events. `boot_id` tells the records of one boot from those of another; it may be empty."""

    def __init__(self, severities: Severities, boot_id: str) -> None:
        self._severities = severities
        self._boot_id = boot_id

    def maker(self, fact: Reported, record: Record, at_s: float, names: Callable[[str], Names]) -> Callable[[], Event]:
        """Return a function that makes the event of a fact: of a storm's facts few become one."""
        return partial(self._make, fact, record, at_s, names)

    def _make(self, fact: Reported, record: Record, at_s: float, names: Callable[[str], Names]) -> Event:
        kind, severity, component, device, labels = self._describe(fact, names)
        sequence, checksum = mark_of(record)
        return Event(
            kind=kind,
            severity=severity,
            component=component,
            message=_CONTROL.sub(" ", plain(record.text))[:MESSAGE_LIMIT_CHARS],
            device=device,
            labels={name: value for name, value in labels.items() if value},
            source="kernel",
            time=at_s,
            key=f"kmsg:{self._boot_id}:{sequence}:{checksum:08x}",
        )

    def _describe(
        self, fact: Reported, names: Callable[[str], Names]
    ) -> tuple[str, Severity, str, str, dict[str, str]]:
        """Return kind, severity, component, device and labels."""
        if isinstance(fact, Xid):
            called = names(fact.address)
            labels = {"xid": str(fact.code), "uuid": called.uuid, "gpu": called.number, "pci": fact.address}
            severity = self._severities.xid(fact.code, fact.word)
            return "gpu_xid", severity, "gpu", called.number or fact.address, labels
        if isinstance(fact, Sxid):
            labels = {"sxid": str(fact.code), "switch": fact.switch, "pci": fact.address}
            severity = self._severities.sxid(fact.code, fact.word)
            return "nvswitch_sxid", severity, "gpu", f"nvswitch{fact.switch}", labels
        if isinstance(fact, OomKill | Killed):
            cgroup = fact.cgroup if isinstance(fact, OomKill) else ""
            job = _JOB.search(cgroup)
            labels = {"pid": fact.pid, "task": fact.task, "cgroup": cgroup, "job_id": job[1] if job else ""}
            severity = Severity.WARNING if fact.scope == "memcg" else Severity.ERROR
            return "kernel_oom_kill", severity, "kernel", "", {**labels, "scope": fact.scope}
        if isinstance(fact, HungTask):
            return "kernel_hung_task", Severity.WARNING, "kernel", "", {"pid": fact.pid, "task": fact.task}
        return "kernel_stall", Severity.ERROR, "kernel", "", {"kind": fact.kind, "cpu": fact.cpu}
