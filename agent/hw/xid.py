"""What the codes of NVIDIA's kernel log lines mean: XIDs and SXIDs, from `agent/data/xids.yaml`."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEVERITIES = ("info", "warning", "error", "critical")
ACTIONS = ("none", "app", "follow", "reset", "reboot", "inspect", "link", "fw")

_TABLE = Path(__file__).parent.parent / "data" / "xids.yaml"
_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")
_CODE_LIMIT = 100_000  # SXIDs have five digits
_MEANING = ("name", "severity", "action")
_KEYS = ("zeros", "xids", "unknown_xid", "sxids", "sxid_families", "unknown_sxid")


class XidTableError(ValueError):
    """A table of codes cannot be used. One line: file, entry in it, what was found, what was expected."""


@dataclass(frozen=True)
class Meaning:
    """What a code means. `severity` is one of SEVERITIES, `action` one of ACTIONS.

    `by_word`: a word in the line decides both, and these hold where there is none.
    """

    name: str
    severity: str
    action: str
    by_word: bool = False


@dataclass(frozen=True)
class XidTable:
    """All codes. `zeros`: XIDs severe enough to be shown as 0 before the first one comes."""

    zeros: tuple[int, ...]
    xids: Mapping[int, Meaning]
    unknown_xid: Meaning
    sxids: Mapping[int, Meaning]
    sxid_families: Sequence[tuple[range, Meaning]]
    unknown_sxid: Meaning

    def xid(self, code: int) -> Meaning:
        """Return what an XID means; of one that is not in the table, that it is not."""
        return self.xids.get(code, self.unknown_xid)

    def sxid(self, code: int) -> Meaning:
        """Return what an SXID means, or its family; of one that is in neither, that it is not."""
        family = next((meaning for codes, meaning in self.sxid_families if code in codes), self.unknown_sxid)
        return self.sxids.get(code, family)


@functools.cache  # the package's file cannot change while the agent runs
def own_table() -> XidTable:
    """Return the agent's own table."""
    return load(_TABLE)


def load(path: Path) -> XidTable:
    """Read a table. Raises XidTableError for a file that cannot be used."""
    import yaml  # noqa: PLC0415 - only nodes with a kernel log need it here

    try:
        # The C loader is the same safe subset, ten times faster; PyYAML is sometimes built without it.
        content = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except OSError as error:
        raise XidTableError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise XidTableError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or set(content) != set(_KEYS):
        found = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise XidTableError(f"{path}: expected a map with the keys {', '.join(_KEYS)}, got {found}")
    xids = _entries(content["xids"], f"{path}: xids")
    zeros = _codes(content["zeros"], f"{path}: zeros")
    if strange := [code for code in zeros if code not in xids]:
        raise XidTableError(f"{path}: zeros: {strange[0]} is not among the xids")
    return XidTable(
        zeros=tuple(zeros),
        xids=xids,
        unknown_xid=_meaning(content["unknown_xid"], f"{path}: unknown_xid"),
        sxids=_entries(content["sxids"], f"{path}: sxids"),
        sxid_families=_families(content["sxid_families"], f"{path}: sxid_families"),
        unknown_sxid=_meaning(content["unknown_sxid"], f"{path}: unknown_sxid"),
    )


def _entries(groups: object, where: str) -> dict[int, Meaning]:
    return {code: meaning for codes, meaning in _families(groups, where) for code in codes}


def _families(groups: object, where: str) -> list[tuple[range, Meaning]]:
    if not isinstance(groups, list):
        raise XidTableError(f"{where}: expected a list of entries, got {type(groups).__name__}")
    table: list[tuple[range, Meaning]] = []
    for number, group in enumerate(groups, 1):
        place = f"{where}: entry {number}"
        if not isinstance(group, dict) or "codes" not in group:
            raise XidTableError(f"{place}: expected a map with the key `codes`, got {group!r}")
        ranges = _ranges(group["codes"], place)
        place = f"{place} ({ranges[0].start})"
        meaning = _meaning({key: value for key, value in group.items() if key != "codes"}, place)
        for codes in ranges:
            for known, _ in table:
                if (again := max(codes.start, known.start)) < min(codes.stop, known.stop):
                    raise XidTableError(f"{place}: {again} is there twice")
            table.append((codes, meaning))
    return table


def _meaning(facts: Any, where: str) -> Meaning:
    if not isinstance(facts, dict):
        raise XidTableError(f"{where}: expected a map with {', '.join(_MEANING)}, got {facts!r}")
    if unknown := [key for key in facts if key not in (*_MEANING, "by_word")]:
        raise XidTableError(f"{where}: unknown key {unknown[0]!r}; known are codes, {', '.join(_MEANING)}, by_word")
    name, severity, action = (facts.get(key) for key in _MEANING)
    if not isinstance(name, str) or not name:
        raise XidTableError(f"{where}: name must be text, got {name!r}")
    if severity not in SEVERITIES:
        raise XidTableError(f"{where}: severity must be one of {', '.join(SEVERITIES)}, got {severity!r}")
    if action not in ACTIONS:
        raise XidTableError(f"{where}: action must be one of {', '.join(ACTIONS)}, got {action!r}")
    by_word = facts.get("by_word", False)
    if not isinstance(by_word, bool):
        raise XidTableError(f"{where}: by_word must be true or false, got {by_word!r}")
    return Meaning(name, severity, action, by_word)


def _codes(written: object, where: str) -> list[int]:
    return [code for codes in _ranges(written, where) for code in codes]


def _ranges(written: object, where: str) -> list[range]:
    """Return the numbers of a list such as `[8, 39-41]`, a number as a range of one."""
    if not isinstance(written, list) or not written:
        raise XidTableError(f"{where}: expected a list of numbers and ranges such as 39-41, got {written!r}")
    ranges: list[range] = []
    for item in written:
        match = _RANGE.fullmatch(item) if isinstance(item, str) else None
        first, last = (int(match[1]), int(match[2])) if match else (item, item)
        if type(first) is not int or not 0 <= first <= last < _CODE_LIMIT:
            raise XidTableError(f"{where}: expected a number or a range such as 39-41, got {item!r}")
        ranges.append(range(first, last + 1))
    return ranges
