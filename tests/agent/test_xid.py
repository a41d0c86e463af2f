"""The table of XIDs and SXIDs: what it must say, and what a table may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.hw.xid import ACTIONS, SEVERITIES, Meaning, XidTable, XidTableError, load, own_table

ENTRY = {"codes": [8], "name": "something", "severity": "warning", "action": "app"}
UNKNOWN = {"name": "not known", "severity": "warning", "action": "inspect"}


def table(tmp_path: Path, **changes: Any) -> XidTable:
    content = {
        "zeros": [8],
        "xids": [ENTRY],
        "unknown_xid": UNKNOWN,
        "sxids": [{**ENTRY, "codes": [11012]}],
        "sxid_families": [{**ENTRY, "codes": ["11000-11999"], "name": "family"}],
        "unknown_sxid": UNKNOWN,
        **changes,
    }
    path = tmp_path / "xids.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return load(path)


def refusal(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(XidTableError) as caught:
        table(tmp_path, **changes)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/xids.yaml: ")
    assert "\n" not in text
    return text.removeprefix(f"{tmp_path}/xids.yaml: ")


# What the agent's own table must say


@pytest.mark.parametrize(
    ("code", "severity", "action"),
    [
        (13, "warning", "app"),
        (31, "warning", "app"),
        (43, "info", "app"),
        (45, "info", "follow"),
        (48, "critical", "reset"),
        (63, "info", "reset"),
        (64, "critical", "reset"),
        (74, "error", "link"),
        (79, "critical", "reboot"),
        (94, "error", "app"),
        (95, "critical", "reset"),
        (119, "critical", "reset"),
        (129, "warning", "app"),
        (154, "info", "follow"),
    ],
)
def test_what_the_codes_mean(code: int, severity: str, action: str) -> None:
    meaning = own_table().xid(code)
    assert (meaning.severity, meaning.action, meaning.by_word) == (severity, action, False)


def test_the_line_decides_for_nvlink_5_and_for_nothing_else() -> None:
    assert [code for code, meaning in own_table().xids.items() if meaning.by_word] == list(range(144, 151))


def test_the_codes_shown_before_they_come_are_few_and_severe() -> None:
    zeros = own_table().zeros
    assert {48, 74, 79, 94, 95, 119, 120} <= set(zeros)
    assert len(zeros) <= 12
    assert all(own_table().xid(code).severity in ("error", "critical") for code in zeros)


@pytest.mark.parametrize(
    ("code", "severity"),
    [(10003, "critical"), (11012, "info"), (11004, "error"), (11013, "critical"), (20034, "critical"), (24002, "info")],
)
def test_what_the_switch_codes_mean(code: int, severity: str) -> None:
    assert own_table().sxid(code).severity == severity


def test_a_switch_code_without_an_entry_is_its_familys() -> None:
    assert own_table().sxid(12999).name == "egress"


def test_codes_that_no_table_has_mean_something_all_the_same() -> None:
    assert own_table().xid(999).severity == "warning"
    assert own_table().sxid(99999).severity == "warning"


def test_every_meaning_is_short_text() -> None:
    own = own_table()
    families = [meaning for _, meaning in own.sxid_families]
    meanings = [*own.xids.values(), *own.sxids.values(), *families, own.unknown_xid, own.unknown_sxid]
    for meaning in meanings:
        assert 3 < len(meaning.name) <= 60
        assert meaning.severity in SEVERITIES
        assert meaning.action in ACTIONS


# What a table may say


def test_numbers_and_ranges(tmp_path: Path) -> None:
    read = table(tmp_path, xids=[{**ENTRY, "codes": [8, "10-12", 14]}])
    assert list(read.xids) == [8, 10, 11, 12, 14]
    assert read.xid(11) == Meaning("something", "warning", "app")
    assert read.sxid(11012).name == "something"
    assert read.sxid(11013).name == "family"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({**ENTRY, "colour": "red"}, "xids: entry 1 (8): unknown key 'colour'; known are codes, name"),
        ({**ENTRY, "severity": "warn"}, "xids: entry 1 (8): severity must be one of info, warning, error, critical"),
        ({**ENTRY, "severity": ["info"]}, "xids: entry 1 (8): severity must be"),
        ({**ENTRY, "action": "pray"}, "xids: entry 1 (8): action must be one of none, app"),
        ({**ENTRY, "name": ""}, "xids: entry 1 (8): name must be text, got ''"),
        ({**ENTRY, "name": 8}, "xids: entry 1 (8): name must be text, got 8"),
        ({**ENTRY, "by_word": "yes"}, "xids: entry 1 (8): by_word must be true or false, got 'yes'"),
        ({"codes": [8]}, "xids: entry 1 (8): name must be text, got None"),
        ({**ENTRY, "codes": []}, "xids: entry 1: expected a list of numbers and ranges such as 39-41, got []"),
        ({**ENTRY, "codes": 8}, "xids: entry 1: expected a list of numbers"),
        ({**ENTRY, "codes": ["8"]}, "xids: entry 1: expected a number or a range such as 39-41, got '8'"),
        ({**ENTRY, "codes": ["9-8"]}, "xids: entry 1: expected a number or a range"),
        ({**ENTRY, "codes": [True]}, "xids: entry 1: expected a number or a range such as 39-41, got True"),
        ({**ENTRY, "codes": [-1]}, "xids: entry 1: expected a number or a range"),
        ({**ENTRY, "codes": [100_000]}, "xids: entry 1: expected a number or a range"),
        ({**ENTRY, "codes": [8, "7-9"]}, "xids: entry 1 (8): 8 is there twice"),
        ({"name": "no codes"}, "xids: entry 1: expected a map with the key `codes`"),
        ("text", "xids: entry 1: expected a map with the key `codes`, got 'text'"),
    ],
)
def test_a_strange_entry_is_refused(tmp_path: Path, entry: object, complaint: str) -> None:
    assert refusal(tmp_path, xids=[entry]).startswith(complaint)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"colour": "red"}, "expected a map with the keys zeros, xids, unknown_xid"),
        ({"zeros": None}, "expected a map with the keys zeros, xids, unknown_xid"),
        ({"zeros": [9]}, "zeros: 9 is not among the xids"),
        ({"xids": {}}, "xids: expected a list of entries, got dict"),
        ({"unknown_xid": []}, "unknown_xid: expected a map with name, severity, action, got []"),
        ({"unknown_sxid": {**UNKNOWN, "codes": [1]}}, "unknown_sxid: unknown key 'codes'"),
    ],
)
def test_a_strange_table_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    assert refusal(tmp_path, **changes).startswith(complaint)


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe\xff", b"!!python/object/apply:os.getcwd []", b"- 1\n", b""])
def test_what_is_no_table_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "xids.yaml"
    path.write_bytes(content)
    with pytest.raises(XidTableError, match=r"xids\.yaml: (not valid YAML|expected a map)"):
        load(path)


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(XidTableError, match=r"none: cannot be read: No such file"):
        load(tmp_path / "none")
