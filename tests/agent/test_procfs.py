from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hw import procfs
from agent.hw.procfs import FormatError

if TYPE_CHECKING:
    from pathlib import Path

# Bytes that look like the kernel's more often than chance would have it, and bytes that do not.
PIECES = st.sampled_from(
    [
        b"cpu ",
        b"cpu0",
        b"eth0:",
        b"sda",
        b"some ",
        b"full ",
        b"total=",
        b"MemTotal:",
        b"(a) ",
        b") S",
        b" ",
        b"\n",
        b"-1",
    ]
)
NUMBERS = st.integers(-5, 1 << 70).map(lambda value: b"%d " % value)
CONTENT = st.lists(st.one_of(PIECES, NUMBERS, st.binary(max_size=8)), max_size=60).map(b"".join)


def test_file_longer_than_one_read_is_read_whole(tmp_path: Path) -> None:
    content = b"0123456789" * 20_000
    (tmp_path / "stat").write_bytes(content)
    assert procfs.read(str(tmp_path / "stat")) == content


def test_reading_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "uptime").write_text("1.0 2.0\n")
    before = os.dup(0)
    os.close(before)
    procfs.read(str(tmp_path / "uptime"))
    with pytest.raises(FileNotFoundError):
        procfs.read(str(tmp_path / "missing"))
    after = os.dup(0)
    os.close(after)
    assert after == before


def test_boot_id_is_read_below_the_given_root(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/random"
    folder.mkdir(parents=True)
    (folder / "boot_id").write_text("b2bd6794-a9ed-4245-b72e-f67d7b349de8\n")
    assert procfs.boot_id(tmp_path) == "b2bd6794-a9ed-4245-b72e-f67d7b349de8"


def test_empty_boot_id_is_an_error_and_no_boot(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/random"
    folder.mkdir(parents=True)
    (folder / "boot_id").write_text("\n")
    with pytest.raises(FormatError):
        procfs.boot_id(tmp_path)


def test_whole_numbers_stay_whole_beyond_float_precision() -> None:
    assert procfs.number(b"18446744073709551615") == 18446744073709551615


@pytest.mark.parametrize(
    "word", [b"", b"-1", b"nan", b"inf", b"1e5", b"1_000", b".5", b"5.", b"0x10", b"1" * 21, b"\xd9\xa1", b"+1", b" 1"]
)
def test_word_that_the_kernel_would_not_write_is_no_number(word: bytes) -> None:
    with pytest.raises(FormatError):
        procfs.number(word)
    with pytest.raises(FormatError):
        procfs.whole_number(word)


def test_key_is_found_at_the_beginning_of_a_line_only() -> None:
    content = b"\nSwapCached:       7 kB\nCached:          42 kB"
    assert procfs.lookup(content, b"\nCached: ") == 42
    assert procfs.lookup(content, b"\nBuffers: ") is None


def test_key_without_a_number_is_an_error() -> None:
    with pytest.raises(FormatError, match="ctxt"):
        procfs.lookup(b"\nctxt \nbtime 5\n", b"\nctxt ")


def test_first_number_counts_on_a_line_of_many() -> None:
    assert procfs.lookup(b"\nintr 189211 0 0 14\n", b"\nintr ") == 189211


def test_cpu_line_gives_ticks_in_file_order() -> None:
    assert procfs.parse_cpu_ticks(b"cpu  3331 0 2171 141406 455 0 33 8 0 0") == [
        3331, 0, 2171, 141406, 455, 0, 33, 8, 0, 0,
    ]  # fmt: skip


def test_bad_core_costs_only_itself() -> None:
    cores = procfs.parse_cores(b"\ncpu  5 5 5 5\ncpu0 1 2 3 4\ncpu1 1 x 3 4\ncpu2 9 9 9 9\nintr 7\n")
    assert cores["0"] == [1, 2, 3, 4]
    assert isinstance(cores["1"], FormatError)
    assert cores["2"] == [9, 9, 9, 9]
    assert len(cores) == 3


def test_pressure_is_the_total_of_each_kind() -> None:
    content = b"some avg10=0.46 avg60=0.27 avg300=0.27 total=4976796\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=17\n"
    assert procfs.parse_pressure(content) == {"some": 4976796, "full": 17}


def test_diskstats_skips_what_was_not_asked_for() -> None:
    content = b"   8  0 sda 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15\n   8  1 sda1 1 1 1 1 1 1 1 1 1 1 1\n"
    assert procfs.parse_diskstats(content, {"sda"}) == {"sda": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}


def test_short_disk_row_is_an_error_in_its_place() -> None:
    content = b"8 0 sda 1 2 3 4\n8 16 sdb 1 2 3 4 5 6 7 8 9 10 11\n"
    rows = procfs.parse_diskstats(content, {"sda", "sdb"})
    assert isinstance(rows["sda"], FormatError)
    assert rows["sdb"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_net_dev_takes_a_row_without_a_space_behind_the_colon() -> None:
    content = b"Inter-| Receive | Transmit\n face |bytes packets\n  eth0:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
    assert procfs.parse_net_dev(content) == {"eth0": list(range(1, 17))}


def test_name_of_an_interface_may_hold_a_colon() -> None:
    assert list(procfs.parse_net_dev(b"eth0:1: " + b"1 " * 16)) == ["eth0:1"]


def test_name_that_is_no_utf8_is_shown_escaped() -> None:
    row = b"e\xff0: " + b"1 " * 16
    assert list(procfs.parse_net_dev(row)) == ["e\\xff0"]


def test_process_name_may_hold_brackets_and_spaces() -> None:
    line = b"4321 (a) R 7 (b) D 1 " + b"0 " * 17 + b"987 0 0\n"
    assert procfs.parse_process_state(line) == procfs.ProcessState("D", 987)


def test_processes_are_not_listed_when_others_are_hidden(tmp_path: Path) -> None:
    (tmp_path / "4242").mkdir()
    with pytest.raises(PermissionError, match="hidden"):
        procfs.list_processes(str(tmp_path))


@given(CONTENT)
def test_any_bytes_give_numbers_or_a_format_error(content: bytes) -> None:
    found: list[int | float] = []
    for parse in (
        lambda: [procfs.number(content)],
        lambda: [procfs.lookup(b"\n" + content, b"\nMemTotal:") or 0],
        lambda: procfs.parse_cpu_ticks(content),
        lambda: list(procfs.parse_pressure(content).values()),
        lambda: [procfs.parse_process_state(content).started],
    ):
        try:
            found += parse()
        except FormatError as error:
            assert str(error)  # noqa: PT017 - it must say something
    for rows in (
        procfs.parse_cores(content),
        procfs.parse_net_dev(content),
        procfs.parse_diskstats(content, {"sda", "eth0:"}),
    ):
        for row in rows.values():
            if not isinstance(row, FormatError):
                found += row
    assert all(math.isfinite(value) and value >= 0 for value in found)
