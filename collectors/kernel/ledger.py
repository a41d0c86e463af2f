"""What was counted since boot, and what of it is one fact told by several lines. Kept across restarts of the agent.

Totals of GPUs stand by PCI address: what a GPU is called may become known later.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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
from collectors.kernel.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from collectors.kernel.lines import Fact
    from collectors.kernel.moments import Moment

FALLEN_OFF = 79
OTHER = -1  # the code under which is counted what exceeds KEYS_LIMIT
SAME_LOSS_S = 300.0  # a GPU that is told to be lost twice within this time was lost once
SAME_MESSAGE_S = 60.0  # lines that belong together are not further apart
SCOPES = ("memcg", "global")
STALLS = ("soft_lockup", "hard_lockup", "rcu")
RESULTS = ("matched", "unmatched", "ignored", "error")
TOTAL_LIMIT = 2**63  # no machine counts as far; a total that is read back above it is damaged
KEYS_LIMIT = 2000  # of addresses and codes; no node has as many, a damaged log may
CLOCK_SET_S = 1.0  # by which the wall clock must move before the times of what was counted move with it

K = TypeVar("K")
Reported = Xid | Sxid | OomKill | Killed | HungTask | Stall


class Ledger:
    """Totals. `changed` is set by whatever changes them and cleared by who has seen it.

    The times of the latest XIDs and SXIDs are those of the monotonic clock, so that a wall clock that was wrong and is
    set right is wrong for none of them: since the epoch they are `clock_offset_s` later.
    """

    def __init__(self) -> None:
        self.changed = True
        self.xids: dict[tuple[str, int, str], int] = {}  # by address, code, word in the line
        self.xid_times: dict[tuple[str, int], float] = {}  # of the latest, by address and code
        self.sxids: dict[tuple[str, str, int, str], int] = {}  # by switch, address, code, word in the line
        self.sxid_times: dict[tuple[str, str, int], float] = {}
        self.clock_offset_s = 0.0
        self.oom_kills = dict.fromkeys(SCOPES, 0)
        self.hung_tasks = 0
        self.stalls = dict.fromkeys(STALLS, 0)
        self.records = dict.fromkeys(RESULTS, 0)
        self.overruns = 0
        self._lost: Recent[bool] = Recent(SAME_LOSS_S)  # addresses, and whether an XID told it
        self._falling: Recent[Literal[True]] = Recent(SAME_MESSAGE_S)  # addresses whose last line is to come
        self._dying: Recent[Literal[True]] = Recent(SAME_MESSAGE_S)  # process ids whose second line is to come

    def set_clock(self, now: Moment) -> None:
        """Take over a wall clock that was set. One that only seems to move, between two readings, moves no time."""
        offset_s = now.wall_s - now.monotonic_s
        if abs(offset_s - self.clock_offset_s) > CLOCK_SET_S:
            self.clock_offset_s = offset_s

    def take(self, fact: Fact, written: Moment) -> Reported | None:
        """Count a fact; return it in the form in which it is to be reported, None when it is no new one."""
        self.changed = True
        boot_s = written.boot_s
        if isinstance(fact, GpuNamed | FollowUp):
            return None
        if isinstance(fact, FallingOff):
            self._falling.oldest(boot_s)
            self._falling.put(fact.address, boot_s, value=True)
            return None
        if isinstance(fact, FallenOff):
            return self._take_fallen(fact, written)
        if isinstance(fact, OomKill | Killed):
            return self._take_kill(fact, boot_s)
        if isinstance(fact, Xid):
            if fact.code == FALLEN_OFF and not self._is_new_loss(fact.address, boot_s, by_xid=True):
                return None
            self._count_xid(fact, written)
        elif isinstance(fact, Sxid):
            self._count_sxid(fact, written)
        elif isinstance(fact, HungTask):
            self.hung_tasks += 1
        else:
            self.stalls[fact.kind] += 1
        return fact

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "xids": _rows(self.xids),
            "xid_times": _rows(self.xid_times),
            "sxids": _rows(self.sxids),
            "sxid_times": _rows(self.sxid_times),
            "clock_offset": self.clock_offset_s,
            "oom_kills": self.oom_kills,
            "hung_tasks": self.hung_tasks,
            "stalls": self.stalls,
            "records": self.records,
            "overruns": self.overruns,
            "lost": [list(lost) for lost in self._lost],
            "falling": [[address, at_s] for address, at_s, _ in self._falling],
            "dying": {pid: at_s for pid, at_s, _ in self._dying},
        }

    @classmethod
    def from_json(cls, content: Any) -> Ledger:
        """Restore what `to_json` gave. Raises LookupError, TypeError, ValueError for anything else."""
        ledger = cls()
        ledger.xids = {(str(at), int(code), str(word)): _total(n) for at, code, word, n in content["xids"]}
        ledger.xid_times = {(str(at), int(code)): _seconds(when_s) for at, code, when_s in content["xid_times"]}
        ledger.sxids = {
            (str(switch), str(at), int(code), str(word)): _total(n) for switch, at, code, word, n in content["sxids"]
        }
        ledger.sxid_times = {
            (str(switch), str(at), int(code)): _seconds(when_s) for switch, at, code, when_s in content["sxid_times"]
        }
        ledger.clock_offset_s = _seconds(content["clock_offset"])
        ledger.oom_kills = {scope: _total(content["oom_kills"][scope]) for scope in SCOPES}
        ledger.hung_tasks = _total(content["hung_tasks"])
        ledger.stalls = {kind: _total(content["stalls"][kind]) for kind in STALLS}
        ledger.records = {result: _total(content["records"][result]) for result in RESULTS}
        ledger.overruns = _total(content["overruns"])
        for address, at_s, by_xid in content["lost"]:
            ledger._lost.put(str(address), _seconds(at_s), value=by_xid is True)
        for address, at_s in content["falling"]:
            ledger._falling.put(str(address), _seconds(at_s), value=True)
        for pid, at_s in dict(content["dying"]).items():
            ledger._dying.put(str(pid), _seconds(at_s), value=True)
        return ledger

    def _count_xid(self, xid: Xid, written: Moment) -> None:
        key = (xid.address, xid.code, xid.word)
        if len(self.xids) >= KEYS_LIMIT and key not in self.xids:
            key = ("", OTHER, "")
        self.xids[key] = self.xids.get(key, 0) + 1
        _raise(self.xid_times, key[:2], written.monotonic_s)

    def _count_sxid(self, sxid: Sxid, written: Moment) -> None:
        key = (sxid.switch, sxid.address, sxid.code, sxid.word)
        if len(self.sxids) >= KEYS_LIMIT and key not in self.sxids:
            key = ("", "", OTHER, "")
        self.sxids[key] = self.sxids.get(key, 0) + 1
        _raise(self.sxid_times, key[:3], written.monotonic_s)

    def _take_fallen(self, fallen: FallenOff, written: Moment) -> Xid | None:
        """Take the line for the XID 79 that did not come, or is yet to come."""
        address, boot_s = fallen.address, written.boot_s
        address = address or self._falling.oldest(boot_s) or ""
        self._falling.pop(address, boot_s)
        xid = Xid(address, FALLEN_OFF)
        if not self._is_new_loss(address, boot_s, by_xid=False):
            return None
        self._count_xid(xid, written)
        return xid

    def _is_new_loss(self, address: str, boot_s: float, *, by_xid: bool) -> bool:
        """Say whether this is another loss: two XIDs are two, any other two lines within SAME_LOSS_S are one."""
        is_any_lost = self._lost.oldest(boot_s) is not None
        if not address and is_any_lost and not by_xid:
            return False  # a line that does not say which: one of those
        told_by_xid = self._lost.find(address, boot_s)
        self._lost.put(address, boot_s, value=by_xid or told_by_xid is True)
        return told_by_xid is None or (by_xid and told_by_xid)

    def _take_kill(self, kill: OomKill | Killed, boot_s: float) -> OomKill | Killed | None:
        self._dying.oldest(boot_s)
        if isinstance(kill, OomKill):
            self._dying.put(kill.pid, boot_s, value=True)
        elif self._dying.pop(kill.pid, boot_s) is not None:
            return None
        self.oom_kills[kill.scope] += 1
        return kill


def _raise(times: dict[K, float], key: K, to_s: float) -> None:
    times[key] = max(to_s, times.get(key, to_s))


def _rows(table: Mapping[Any, object]) -> list[list[object]]:
    return [[*key, value] for key, value in table.items()]


def _total(kept: object) -> int:
    if type(kept) is not int or not 0 <= kept <= TOTAL_LIMIT:  # the type itself: true is an int to isinstance
        raise ValueError(f"not a total: {kept!r}")
    return kept


def _seconds(kept: object) -> float:
    if not isinstance(kept, int | float) or not math.isfinite(kept):
        raise ValueError(f"not a number of seconds: {kept!r}")
    return float(kept)
