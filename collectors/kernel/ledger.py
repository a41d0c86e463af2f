"""What was counted since boot, and what of it is one fact told by several lines. Kept across restarts of the agent.

Totals of GPUs stand by PCI address: what a GPU is called may become known later.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from collectors.kernel.lines import (
    FallenOff,
    FallingOff,
    FollowUp,
    GpuNamed,
    HungTask,
    Killed,
    OomKill,
    Stall,
    Sxid,
    Xid,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from collectors.kernel.lines import Fact

FALLEN_OFF = 79
OTHER = -1  # the code under which is counted what exceeds KEYS_LIMIT
SAME_LOSS_S = 300.0  # a GPU that is told to be lost twice within this time was lost once
SAME_MESSAGE_S = 60.0  # lines that belong together are not further apart
SCOPES = ("memcg", "global")
STALLS = ("soft_lockup", "hard_lockup", "rcu")
RESULTS = ("matched", "unmatched", "ignored", "error")
KEYS_LIMIT = 2000  # of addresses and codes; no node has as many, a damaged log may
_UUIDS_LIMIT = 256

Reported = Xid | Sxid | OomKill | Killed | HungTask | Stall


class Ledger:
    """Totals. `changed` is set by whatever changes them and cleared by who has seen it."""

    def __init__(self) -> None:
        self.changed = True
        self.xids: dict[tuple[str, int, str], int] = {}  # by address, code, word in the line
        self.xids_at: dict[tuple[str, int], float] = {}  # wall time of the latest, by address and code
        self.sxids: dict[tuple[str, str, int, str], int] = {}  # by switch, address, code, word in the line
        self.sxids_at: dict[tuple[str, str, int], float] = {}
        self.uuids: dict[str, str] = {}  # by address, as the log told
        self.oom_kills = dict.fromkeys(SCOPES, 0)
        self.hung_tasks = 0
        self.stalls = dict.fromkeys(STALLS, 0)
        self.records = dict.fromkeys(RESULTS, 0)
        self.overruns = 0
        self._lost: dict[str, tuple[float, bool]] = {}  # by address: seconds since boot, and whether an XID told it
        self._falling: list[tuple[str, float]] = []  # addresses whose second and third line are to come
        self._dying: dict[str, float] = {}  # process ids whose second line is to come

    def take(self, fact: Fact, wall_s: float, boot_s: float) -> Reported | None:
        """Count a fact; return it in the form in which it is to be reported, None when it is no new one.

        `wall_s` and `boot_s`: when it was, since the epoch and since boot.
        """
        self.changed = True
        if isinstance(fact, FallingOff | GpuNamed | FollowUp):
            self._hear(fact, boot_s)
            return None
        if isinstance(fact, FallenOff):
            return self._take_fallen(fact, wall_s, boot_s)
        if isinstance(fact, OomKill | Killed):
            return self._take_kill(fact, boot_s)
        if isinstance(fact, Xid):
            if fact.code == FALLEN_OFF and not self._is_new_loss(fact.address, boot_s, by_xid=True):
                return None
            self._count_xid(fact, wall_s)
        elif isinstance(fact, Sxid):
            self._count_sxid(fact, wall_s)
        elif isinstance(fact, HungTask):
            self.hung_tasks += 1
        else:
            self.stalls[fact.kind] += 1
        return fact

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "xids": _rows(self.xids),
            "xids_at": _rows(self.xids_at),
            "sxids": _rows(self.sxids),
            "sxids_at": _rows(self.sxids_at),
            "uuids": self.uuids,
            "oom_kills": self.oom_kills,
            "hung_tasks": self.hung_tasks,
            "stalls": self.stalls,
            "records": self.records,
            "overruns": self.overruns,
            "lost": [[address, at_s, by_xid] for address, (at_s, by_xid) in self._lost.items()],
            "falling": self._falling,
            "dying": self._dying,
        }

    @classmethod
    def from_json(cls, content: Any) -> Ledger:
        """Restore what `to_json` gave. Raises LookupError, TypeError, ValueError for anything else."""
        ledger = cls()
        ledger.xids = {(str(at), int(code), str(word)): _total(n) for at, code, word, n in content["xids"]}
        ledger.xids_at = {(str(at), int(code)): _time(when_s) for at, code, when_s in content["xids_at"]}
        ledger.sxids = {
            (str(switch), str(at), int(code), str(word)): _total(n) for switch, at, code, word, n in content["sxids"]
        }
        ledger.sxids_at = {
            (str(switch), str(at), int(code)): _time(when_s) for switch, at, code, when_s in content["sxids_at"]
        }
        ledger.uuids = {str(address): str(uuid) for address, uuid in dict(content["uuids"]).items()}
        ledger.oom_kills = {scope: _total(content["oom_kills"][scope]) for scope in SCOPES}
        ledger.hung_tasks = _total(content["hung_tasks"])
        ledger.stalls = {kind: _total(content["stalls"][kind]) for kind in STALLS}
        ledger.records = {result: _total(content["records"][result]) for result in RESULTS}
        ledger.overruns = _total(content["overruns"])
        ledger._lost = {str(address): (_time(at_s), by_xid is True) for address, at_s, by_xid in content["lost"]}
        ledger._falling = [(str(address), _time(at_s)) for address, at_s in content["falling"]]
        ledger._dying = {str(pid): _time(at_s) for pid, at_s in dict(content["dying"]).items()}
        return ledger

    def _hear(self, fact: FallingOff | GpuNamed | FollowUp, boot_s: float) -> None:
        if isinstance(fact, FallingOff):
            self._falling = [*_recent(self._falling, boot_s), (fact.address, boot_s)]
        elif isinstance(fact, GpuNamed) and (fact.address in self.uuids or len(self.uuids) < _UUIDS_LIMIT):
            self.uuids[fact.address] = fact.uuid

    def _count_xid(self, xid: Xid, wall_s: float) -> None:
        address, code, word = xid
        if len(self.xids) >= KEYS_LIMIT and (address, code, word) not in self.xids:
            address, code, word = "", OTHER, ""
        self.xids[address, code, word] = self.xids.get((address, code, word), 0) + 1
        self.xids_at[address, code] = max(wall_s, self.xids_at.get((address, code), wall_s))

    def _count_sxid(self, sxid: Sxid, wall_s: float) -> None:
        switch, address, code, word = sxid
        if len(self.sxids) >= KEYS_LIMIT and (switch, address, code, word) not in self.sxids:
            switch, address, code, word = "", "", OTHER, ""
        self.sxids[switch, address, code, word] = self.sxids.get((switch, address, code, word), 0) + 1
        self.sxids_at[switch, address, code] = max(wall_s, self.sxids_at.get((switch, address, code), wall_s))

    def _take_fallen(self, fallen: FallenOff, wall_s: float, boot_s: float) -> Xid | None:
        """Take the line for the XID 79 that did not come, or is yet to come."""
        address = fallen.address
        falling = _recent(self._falling, boot_s)
        if not address and falling:
            address = falling[0][0]
        self._falling = [other for other in falling if other[0] != address]
        xid = Xid(address, FALLEN_OFF, "")
        if not self._is_new_loss(address, boot_s, by_xid=False):
            return None
        self._count_xid(xid, wall_s)
        return xid

    def _is_new_loss(self, address: str, boot_s: float, *, by_xid: bool) -> bool:
        """Say whether this is another loss: two XIDs are two, any other two lines within SAME_LOSS_S are one."""
        self._lost = {at: lost for at, lost in self._lost.items() if abs(boot_s - lost[0]) < SAME_LOSS_S}
        if not address and self._lost and not by_xid:
            return False  # a line that does not say which: one of those
        told_by_xid = self._lost[address][1] if address in self._lost else None
        self._lost[address] = (boot_s, by_xid or told_by_xid is True)
        return told_by_xid is None or (by_xid and told_by_xid)

    def _take_kill(self, kill: OomKill | Killed, boot_s: float) -> OomKill | Killed | None:
        self._dying = {pid: at_s for pid, at_s in self._dying.items() if abs(boot_s - at_s) < SAME_MESSAGE_S}
        if isinstance(kill, OomKill):
            self._dying[kill.pid] = boot_s
        elif self._dying.pop(kill.pid, None) is not None:
            return None
        self.oom_kills[kill.scope] += 1
        return kill


def _recent(falling: list[tuple[str, float]], boot_s: float) -> list[tuple[str, float]]:
    return [other for other in falling if abs(boot_s - other[1]) < SAME_MESSAGE_S]


def _rows(table: Mapping[Any, object]) -> list[list[object]]:
    return [[*key, value] for key, value in table.items()]


def _total(kept: object) -> int:
    if type(kept) is not int or kept < 0:  # the type itself: true is an int to isinstance
        raise ValueError(f"not a total: {kept!r}")
    return kept


def _time(kept: object) -> float:
    if not isinstance(kept, int | float) or not 0 <= kept < math.inf:
        raise ValueError(f"not a time: {kept!r}")
    return float(kept)
