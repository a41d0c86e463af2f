"""Files that other programs leave: what of them is shown, and what a bad one may spoil."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.api import Kind, NotPresent
from agent.exposition import Exposition
from agent.hw import promfile
from agent.sim.harness import Probe, Result
from agent.snapshot import Batch, Store
from collectors.textfile import Textfile, TextfileOptions

if TYPE_CHECKING:
    from agent.api import Value

GOOD = "# HELP a_total Things.\n# TYPE a_total counter\na_total 3\n"


def write(directory: Path, name: str, content: str | bytes) -> Path:
    """Put a file in place as a well-behaved program does: a new inode each time."""
    fresh = directory / f"{name}.new"
    fresh.write_bytes(content.encode() if isinstance(content, str) else content)
    return fresh.rename(directory / name)


def probe_of(directory: Path, *, max_file_bytes: int = 1024 * 1024, max_series: int = 10_000) -> Probe:
    return Probe(Textfile, TextfileOptions(str(directory), max_file_bytes, max_series))


def foreign(result: Result) -> dict[str, Value]:
    return {name: value for name, value in result.values.items() if not name.startswith("hpcwatch_")}


def error_of(result: Result, name: str) -> Value:
    return result.values[f'hpcwatch_textfile_error{{file="{name}"}}']


def collect(directory: Path) -> Result:
    return probe_of(directory).collect()


def refusal(directory: Path, content: str | bytes) -> str:
    """Return why a file is refused as a whole, having checked that only it suffers."""
    write(directory, "bad.prom", content)
    write(directory, "good.prom", GOOD)
    result = collect(directory)
    assert foreign(result) == {"a_total": 3}
    assert (error_of(result, "bad.prom"), error_of(result, "good.prom")) == (1, 0)
    [(what, text)] = result.failures
    assert what == "bad.prom"
    return text


def pages(probe: Probe) -> tuple[str, str]:
    """Return what a scraper gets of one run: text and OpenMetrics."""
    batch = Batch()
    probe.open()
    probe.collector.collect(batch)
    store = Store()
    store.put(batch.finish("textfile", 0.0))
    exposition = Exposition(store)
    return exposition.page().decode(), exposition.page(openmetrics=True).decode()


def test_a_missing_directory_is_not_present(tmp_path: Path) -> None:
    with pytest.raises(NotPresent, match=r"no directory .*/none"):
        probe_of(tmp_path / "none").open()


def test_a_directory_that_vanishes_is_not_present(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    probe = probe_of(directory)
    probe.collect()
    directory.rmdir()
    with pytest.raises(NotPresent):
        probe.collect()


def test_a_directory_that_is_none_is_a_failure_not_an_absence(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        probe_of(write(tmp_path, "x", "")).open()


def test_an_empty_directory_shows_nothing(tmp_path: Path) -> None:
    result = collect(tmp_path)
    assert (result.values, result.failures) == ({}, [])


def test_values_and_the_state_of_their_file(tmp_path: Path) -> None:
    path = write(tmp_path, "a.prom", GOOD + 'b{x="1",y="two"} 0.5\n')
    os.utime(path, ns=(0, 1_700_000_000_250_000_000))
    result = collect(tmp_path)
    assert result.values == {
        "a_total": 3,
        'b{x="1",y="two"}': 0.5,
        'hpcwatch_textfile_mtime_seconds{file="a.prom"}': 1_700_000_000.25,
        'hpcwatch_textfile_error{file="a.prom"}': 0,
    }
    assert result.failures == []


def test_other_names_are_ignored(tmp_path: Path) -> None:
    for name in ("a.prom.tmp", "a.txt", "prom"):
        write(tmp_path, name, GOOD)
    assert collect(tmp_path).values == {}


def test_an_empty_file_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", "")
    assert error_of(collect(tmp_path), "a.prom") == 0


def test_a_counter_of_64_bits_stays_exact(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", f"a_total {2**63 + 1}\n")
    assert foreign(collect(tmp_path)) == {"a_total": 2**63 + 1}


def test_a_removed_file_takes_its_values_along(tmp_path: Path) -> None:
    path = write(tmp_path, "a.prom", GOOD)
    probe = probe_of(tmp_path)
    assert foreign(probe.collect()) == {"a_total": 3}
    path.unlink()
    assert probe.collect().values == {}


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "a.prom", GOOD)
    status = path.stat()
    probe = probe_of(tmp_path)
    probe.collect()
    with path.open("r+") as file:  # same inode and size, and the time is put back: nothing shows the change
        file.write(GOOD.replace("3", "4"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert foreign(probe.collect()) == {"a_total": 3}
    write(tmp_path, "b.prom", "b 1\n")  # nor when another one changed
    assert foreign(probe.collect()) == {"a_total": 3, "b": 1}


def test_unchanged_files_keep_their_series(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", GOOD)
    probe = probe_of(tmp_path)
    first, second = Batch(), Batch()
    probe.open()
    probe.collector.collect(first)
    write(tmp_path, "b.prom", "b 1\n")
    probe.collector.collect(second)
    kept = [series for series in second.series if any(series is known for known in first.series)]
    assert [series.metric.name for series in kept] == [series.metric.name for series in first.series]


@pytest.mark.parametrize("change", ["inode", "size", "mtime"])
def test_a_changed_file_is_read_again(tmp_path: Path, change: str) -> None:
    path = write(tmp_path, "a.prom", GOOD)
    status = path.stat()
    probe = probe_of(tmp_path)
    probe.collect()
    if change == "inode":
        write(tmp_path, "a.prom", GOOD.replace("3", "4"))
    else:
        with path.open("r+") as file:
            file.write(GOOD.replace("3", "4") + ("\n" if change == "size" else ""))
    later_ns = status.st_mtime_ns + (1 if change == "mtime" else 0)
    os.utime(path, ns=(status.st_atime_ns, later_ns))
    assert foreign(probe.collect()) == {"a_total": 4}


def test_a_file_that_becomes_bad_loses_what_it_showed_and_gets_it_back(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", GOOD)
    probe = probe_of(tmp_path)
    probe.collect()
    write(tmp_path, "a.prom", GOOD + "junk\n")
    for _ in range(2):  # the failure is told at every run, although the file is parsed once
        result = probe.collect()
        assert foreign(result) == {}
        assert error_of(result, "a.prom") == 1
        assert [what for what, _ in result.failures] == ["a.prom"]
    write(tmp_path, "a.prom", GOOD)
    result = probe.collect()
    assert (foreign(result), error_of(result, "a.prom"), result.failures) == ({"a_total": 3}, 0, [])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("# ok\nx 1\ny\n", "line 3: "),
        ("x one\n", "line 1: "),
        ('x{a="1} 2\n', "line 1: "),
        ("# TYPE x\n", "line 1: cannot be parsed"),
        ("\n\nx 1 1700000000000\n", "x has a timestamp: the value would stay for ever; leave it out"),
        ('x{a="1"} 1 5\n', "x{a='1'} has a timestamp"),
        ("x 1", "the last line has no end; write to another name and rename, so that no half is read"),
        (b'x 1\ny{a="\xff"} 1\n', "line 2: not UTF-8: byte 0xff"),
        ("# TYPE x enum\nx 1\n", "line 1: x has the type 'enum'; known are counter, gauge"),
        ("# TYPE x gauge\nx 1\n# TYPE x gauge\n", "line 3: second TYPE line for x"),
        ('{"a.b"} 1\n', "'a.b' is not a metric name"),
        ('x{"a.b"="1"} 1\n', "'a.b' is not a label name"),
        ('x{__a="1"} 1\n', "__a"),
        (f'x{{a="{"b" * 20000}"}} 1\n', "line 1: longer than 16384 characters"),
        (
            '# TYPE h histogram\nh_bucket{le="1"} 1\nh_sum 1\nh_count 1\n',
            "h_bucket{le='1.0'} has no bucket with le=\"+Inf\"",
        ),
        ("# TYPE h histogram\nh_sum 1\nh_count 1\n", 'h_sum has no bucket with le="+Inf"'),
        ("# TYPE h histogram\nh_bucket 1\n", "h_bucket is part of a histogram but has no number as label le"),
        ('# TYPE h histogram\nh_bucket{le="x"} 1\n', "has no number as label le"),
        ('# TYPE h histogram\nh_bucket{le="NaN"} 1\n', "has no number as label le"),
        ("# TYPE h histogram\nh 1\n", "h is a histogram: a sample of that bare name is no part of one"),
        ('# TYPE h histogram\nh_bucket{le="1"} 2\nh_bucket{le="+Inf"} 1\n', "is less than the bucket below it"),
        ("# TYPE s summary\ns 1\n", "s is part of a summary but has no number as label quantile"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason_and_costs_itself_only(
    tmp_path: Path, content: str | bytes, reason: str
) -> None:
    assert reason in refusal(tmp_path, content)


def test_a_file_beyond_the_size_limit_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", "a 1\n" + "#" * 95 + "\n")
    write(tmp_path, "b.prom", "b 1\n" + "#" * 96 + "\n")
    result = probe_of(tmp_path, max_file_bytes=100).collect()
    assert foreign(result) == {"a": 1}
    assert result.failures == [("b.prom", "larger than 100 bytes")]


def test_a_file_beyond_the_series_limit_is_refused_and_smaller_ones_after_it_are_not(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", "a1 1\na2 1\n")
    write(tmp_path, "b.prom", "b1 1\nb2 1\n")
    write(tmp_path, "c.prom", "c1 1\n")
    write(tmp_path, "d.prom", "d1 1\nd2 1\nd3 1\nd4 1\n")
    result = probe_of(tmp_path, max_series=3).collect()
    assert foreign(result) == {"a1": 1, "a2": 1, "c1": 1}
    assert [error_of(result, f"{name}.prom") for name in "abcd"] == [0, 1, 0, 1]
    [(what, text)] = result.failures
    assert what == "files"
    assert text.startswith("2 of 4 refused, first b.prom: together with the files before it more than 3 series ")


def test_a_file_is_shown_as_soon_as_the_limit_has_room_for_it(tmp_path: Path) -> None:
    first = write(tmp_path, "a.prom", "a1 1\na2 1\na3 1\n")
    write(tmp_path, "b.prom", "b1 1\nb2 1\n")
    probe = probe_of(tmp_path, max_series=3)
    assert foreign(probe.collect()) == {"a1": 1, "a2": 1, "a3": 1}
    write(tmp_path, "a.prom", "a1 1\na2 1\n")
    assert foreign(probe.collect()) == {"a1": 1, "a2": 1}
    first.unlink()
    result = probe.collect()
    assert (foreign(result), error_of(result, "b.prom"), result.failures) == ({"b1": 1, "b2": 1}, 0, [])


def test_a_shown_file_gives_way_to_one_before_it(tmp_path: Path) -> None:
    write(tmp_path, "b.prom", "b1 1\nb2 1\n")
    probe = probe_of(tmp_path, max_series=3)
    assert foreign(probe.collect()) == {"b1": 1, "b2": 1}
    write(tmp_path, "a.prom", "a1 1\na2 1\n")
    result = probe.collect()
    assert (foreign(result), error_of(result, "b.prom")) == ({"a1": 1, "a2": 1}, 1)


def test_files_after_the_limit_is_used_up_are_not_opened(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", "a 1\n")
    write(tmp_path, "b.prom", b"\xff\n")  # were it opened, it would be refused for that
    [(what, text)] = probe_of(tmp_path, max_series=1).collect().failures
    assert (what, text.split(":")[0]) == ("files", "1 of 2 refused, first b.prom")


def test_series_that_are_there_already_use_up_the_limit(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", "# TYPE m gauge\nm 1\n")
    write(tmp_path, "b.prom", "# TYPE m gauge\nm 1\n")
    write(tmp_path, "c.prom", "c 1\n")
    result = probe_of(tmp_path, max_series=2).collect()
    assert foreign(result) == {"m": 1}
    assert [what for what, _ in result.failures] == ["b.prom", "files"]


@pytest.mark.parametrize("max_series", [10_000, 1_000_000])
def test_thousands_of_files_stay_within_one_run_and_complain_once(tmp_path: Path, max_series: int) -> None:
    for number in range(6_100):
        (tmp_path / f"{number:04}.prom").write_text(f"m{number} 1\n")
    result = probe_of(tmp_path, max_series=max_series).collect()
    assert len(foreign(result)) == 6_000
    assert len(result.values) == 18_000
    [(what, text)] = result.failures
    assert what == "files"
    assert text.startswith("100 of 6100 refused, first 6000.prom: ")


def test_thousands_of_bad_files_do_not_take_the_place_of_a_good_one(tmp_path: Path) -> None:
    for number in range(9_100):
        (tmp_path / f"{number:04}.prom").symlink_to(tmp_path / "none")
    write(tmp_path, "z.prom", GOOD)
    probe = probe_of(tmp_path)
    result = probe.collect()
    assert (foreign(result), error_of(result, "z.prom")) == ({"a_total": 3}, 0)
    assert len(result.values) <= 18_000
    what, text = result.failures[-1]
    assert (what, text.split(":")[0]) == ("files", "102 of 9101 refused, first 8998.prom")


def test_values_come_before_the_state_of_files(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", GOOD)
    write(tmp_path, "b.prom", "b 1\n")
    assert list(collect(tmp_path).values)[:2] == ["a_total", "b"]


def test_a_refused_file_takes_no_memory(tmp_path: Path) -> None:
    write(tmp_path, "00.prom", "first 1\n")
    probe = probe_of(tmp_path, max_series=1000)
    probe.collect()
    for number in range(1, 30):
        write(tmp_path, f"{number:02}.prom", "".join(f'm{number}{{x="{n}"}} {n}\n' for n in range(1000)))
    tracemalloc.start()
    try:
        probe.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 200_000  # one such file would take more when it is parsed


@given(st.text(alphabet=st.sampled_from("a#1 \t\n\r\x0b\x1c\x85\u2028"), max_size=40))
def test_counted_lines_are_those_that_are_neither_empty_nor_comments(text: str) -> None:
    bare = [line.strip() for line in text.split("\n")]
    assert promfile.count_samples(text) == sum(1 for line in bare if line and not line.startswith("#"))


@pytest.mark.timeout(10)
def test_a_fifo_or_device_or_directory_is_reported_and_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.prom")
    (tmp_path / "null.prom").symlink_to("/dev/null")
    (tmp_path / "dir.prom").mkdir()
    (tmp_path / "gone.prom").symlink_to(tmp_path / "none")
    write(tmp_path, "good.prom", GOOD)
    result = collect(tmp_path)
    assert foreign(result) == {"a_total": 3}
    assert dict(result.failures) == {
        "fifo.prom": "not a regular file",
        "null.prom": "not a regular file",
        "dir.prom": "not a regular file",
        "gone.prom": "symbolic link to nothing",
    }
    assert 'hpcwatch_textfile_mtime_seconds{file="fifo.prom"}' not in result.values


@pytest.mark.timeout(10)
def test_a_file_replaced_by_a_fifo_after_the_look_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.prom")
    with pytest.raises(promfile.PromFileError, match="not a regular file"):
        promfile.read(str(tmp_path / "fifo.prom"), 100)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.prom").symlink_to(write(tmp_path, "elsewhere", GOOD))
    assert foreign(collect(tmp_path)) == {"a_total": 3}


@contextmanager
def without_root() -> Iterator[None]:
    """Drop what lets root read everything, where the tests run as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_an_unreadable_file_is_tried_again_although_it_did_not_change() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to others
        directory = Path(name)
        directory.chmod(0o755)
        path = write(directory, "a.prom", GOOD)
        path.chmod(0)
        probe = probe_of(directory)
        with without_root():
            assert probe.collect().failures == [("a.prom", "cannot be read: Permission denied")]
        path.chmod(0o644)
        with without_root():
            assert foreign(probe.collect()) == {"a_total": 3}


def test_a_file_name_of_any_bytes_is_a_label(tmp_path: Path) -> None:
    for name in (b"\xff.prom", b"\xfe.prom", '"é\n.prom'.encode()):
        (Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))).write_text("")
    errors = {name for name in collect(tmp_path).values if name.startswith("hpcwatch_textfile_error")}
    assert errors == {
        'hpcwatch_textfile_error{file="\\\\xff.prom"}',
        'hpcwatch_textfile_error{file="\\\\xfe.prom"}',
        'hpcwatch_textfile_error{file="\\"é\\n.prom"}',
    }


# ---- types


def kinds(probe: Probe) -> dict[str, Kind]:
    batch = Batch()
    probe.open()
    probe.collector.collect(batch)
    return {s.metric.name: s.metric.kind for s in batch.series if not s.metric.name.startswith("hpcwatch_")}


def test_types_are_as_declared_but_for_a_counter_that_cannot_be_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.prom",
        "# TYPE c_total counter\nc_total 1\n# TYPE c2 counter\nc2 1\n# TYPE g gauge\ng 1\n# TYPE u untyped\nu 1\nn 1\n"
        "# TYPE g_total gauge\ng_total 1\nn_total 1\n# TYPE c3 counter\n# TYPE c3_total counter\nc3 1\nc3_total 2\n",
    )
    probe = probe_of(tmp_path)
    assert kinds(probe) == {
        "c_total": Kind.COUNTER,
        "c2": Kind.UNTYPED,
        "g": Kind.GAUGE,
        "u": Kind.UNTYPED,
        "n": Kind.UNTYPED,
        "g_total": Kind.GAUGE,
        "n_total": Kind.UNTYPED,
        "c3": Kind.UNTYPED,
    }
    result = probe.collect()  # the names are as written: nothing gains or loses _total
    assert (result.values["c2"], result.values["c3"]) == (1, 1)
    assert result.failures == [("a.prom", "c3_total: its name or one of its parts is taken by c3")]


def test_help_is_kept_and_given_where_there_is_none(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", "# HELP a One\\n\\\\two.\n# TYPE a gauge\na 1\nb 1\n")
    text, _ = pages(probe_of(tmp_path))
    assert "# HELP a One\\n\\\\two.\n# TYPE a gauge\n" in text
    assert "# HELP b Read from a text file that gives no help.\n# TYPE b untyped\n" in text


def test_bounds_are_in_canonical_form_and_in_order(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.prom",
        '# TYPE h histogram\nh_count 3\nh_bucket{le="inf"} 3\nh_bucket{le="1"} 2\nh_bucket{le="1e-05"} 0\nh_sum 2.5\n'
        '# TYPE s summary\ns_sum 9\ns{quantile="1"} 4\ns{quantile="0.50"} 2\ns_count 3\n',
    )
    assert list(foreign(collect(tmp_path))) == [
        'h_bucket{le="1e-05"}',
        'h_bucket{le="1.0"}',
        'h_bucket{le="+Inf"}',
        "h_count",
        "h_sum",
        's{quantile="0.5"}',
        's{quantile="1.0"}',
        "s_sum",
        "s_count",
    ]


def test_bounds_that_are_one_number_in_two_spellings_are_one_bucket(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", '# TYPE h histogram\nh_bucket{le="1"} 1\nh_bucket{le="1.0"} 1\nh_bucket{le="+Inf"} 1\n')
    result = collect(tmp_path)
    assert len(foreign(result)) == 2
    assert result.failures == [("a.prom", 'h: 1 series are there already, first h_bucket{le="1.0"}')]


def test_interleaved_families_are_brought_together(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.prom",
        '# TYPE a gauge\na{x="1"} 1\nb 2\na{x="2"} 3\n'
        '# TYPE h histogram\nh_bucket{le="+Inf"} 1\nc 1\nh_sum 1\nh_count 1\n',
    )
    probe = probe_of(tmp_path)
    assert kinds(probe) == {"a": Kind.GAUGE, "b": Kind.UNTYPED, "h": Kind.HISTOGRAM, "c": Kind.UNTYPED}
    assert probe.collect().failures == []


def test_a_name_that_looks_like_a_part_but_is_declared_is_its_own_metric(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", "# TYPE a_count gauge\na_count 1\nb_sum 2\n")
    assert kinds(probe_of(tmp_path)) == {"a_count": Kind.GAUGE, "b_sum": Kind.UNTYPED}


def test_created_gauges_of_prometheus_client_are_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.prom",
        "# TYPE c_total counter\nc_total 1\n# TYPE c_created gauge\nc_created 1.7e+09\n"
        "# TYPE s summary\ns_count 1\ns_sum 1\n# TYPE s_created gauge\ns_created 1.7e+09\n"
        "# TYPE vm_created gauge\nvm_created 5\n",
    )
    result = collect(tmp_path)
    assert foreign(result) == {"c_total": 1, "s_count": 1, "s_sum": 1, "vm_created": 5}
    assert result.failures == []


def test_what_is_not_finite_is_absent(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", f"a NaN\nb +Inf\nc 1\nd {'9' * 400}\n")
    result = collect(tmp_path)
    assert foreign(result) == {"c": 1}
    assert [what for what, _ in result.failures] == ["a", "b", "d"]


# ---- between files


def test_two_files_share_a_metric(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", '# HELP m Help.\n# TYPE m gauge\nm{x="1"} 1\n')
    write(tmp_path, "b.prom", '# TYPE m gauge\nm{x="2"} 2\n')
    write(tmp_path, "c.prom", '# HELP m Help.\n# TYPE m gauge\nm{x="3"} 3\n')
    result = collect(tmp_path)
    assert foreign(result) == {'m{x="1"}': 1, 'm{x="2"}': 2, 'm{x="3"}': 3}
    assert result.failures == []


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ('# HELP m Help.\n# TYPE m counter\nm{x="2"} 2\n', "m: type untyped here, gauge in a file before this one"),
        (
            '# HELP m Other.\n# TYPE m gauge\nm{x="2"} 2\n',
            "m: its help text differs from that in a file before this one",
        ),
        ('m{x="1"} 2\n', "m: type untyped here, gauge in a file before this one"),
        ('# TYPE m gauge\nm{x="1"} 2\n', 'm: 1 series are there already, first m{x="1"}'),
        ("# TYPE m_total counter\nm_total 2\n", "m_total: its name or one of its parts is taken by m"),
    ],
)
def test_the_first_file_in_name_order_wins_and_the_rest_of_the_other_stays(
    tmp_path: Path, second: str, complaint: str
) -> None:
    write(tmp_path, "b.prom", second + "other 1\n")
    write(tmp_path, "a.prom", '# HELP m Help.\n# TYPE m gauge\nm{x="1"} 1\n')
    result = collect(tmp_path)
    assert foreign(result) == {'m{x="1"}': 1, "other": 1}
    assert result.failures == [("b.prom", complaint)]
    assert (error_of(result, "a.prom"), error_of(result, "b.prom")) == (0, 1)


def test_the_order_of_labels_makes_no_other_series(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", 'm{x="1",y="2"} 1\nm{y="2",x="1"} 2\n')
    result = collect(tmp_path)
    assert foreign(result) == {'m{x="1",y="2"}': 1}
    assert len(result.failures) == 1


def test_a_part_of_a_histogram_is_not_taken_by_a_later_metric(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", '# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_sum 1\nh_count 1\n')
    write(tmp_path, "b.prom", "# TYPE h_sum gauge\nh_sum 2\n")
    result = collect(tmp_path)
    assert result.values["h_sum"] == 1
    assert result.failures == [("b.prom", "h_sum: its name or one of its parts is taken by h")]


def test_a_file_cannot_speak_in_the_collectors_own_name(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", '# TYPE hpcwatch_textfile_error gauge\nhpcwatch_textfile_error{file="a.prom"} 0\n')
    result = collect(tmp_path)
    assert error_of(result, "a.prom") == 1
    assert len(result.values) == 2


def test_many_complaints_make_one_short_failure(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", "".join(f"m{n} 1\n" for n in range(9)))
    write(tmp_path, "b.prom", "".join(f"m{n} 1\n" for n in range(9)))
    [(what, text)] = collect(tmp_path).failures
    assert what == "b.prom"
    assert text.endswith("; and 6 more")
    assert len(text) < 300


# ---- the page


def test_scrapers_can_read_what_files_say(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.prom",
        GOOD + "# TYPE c counter\nc 1\n# TYPE g_total gauge\ng_total 1\nn_total 1\n"
        '# TYPE h histogram\nh_bucket{p="2",le="1"} 1\nh_bucket{p="1",le="1"} 1\nh_bucket{p="1",le="+Inf"} 2\n'
        'h_sum{p="1"} 3\nh_count{p="1"} 2\nh_bucket{p="2",le="+Inf"} 1\nh_sum{p="2"} 3\nh_count{p="2"} 1\n'
        '# TYPE s summary\ns{quantile="0.5"} 2\ns_sum 3\ns_count 2\n',
    )
    text, openmetrics = pages(probe_of(tmp_path))
    assert {sample.name for family in parse_text(text) for sample in family.samples} >= {"c", "g_total", "h_bucket"}
    types = {family.name: family.type for family in parse_openmetrics(openmetrics)}  # type: ignore[no-untyped-call]
    assert types == {
        "a": "counter",
        "c": "unknown",
        "g_total": "gauge",
        "n_total": "unknown",
        "h": "histogram",
        "s": "summary",
        "hpcwatch_textfile_mtime_seconds": "gauge",
        "hpcwatch_textfile_error": "gauge",
    }


LINES = st.one_of(
    st.sampled_from(
        [
            "# TYPE a counter",
            "# TYPE a_total counter",
            "# TYPE a histogram",
            "# TYPE a summary",
            "# HELP a Text \\n more.",
            "a 1",
            "a_total 2",
            "a_created 2",
            'a_bucket{le="1"} 1',
            'a_bucket{le="+Inf"} 1',
            "a_sum 1",
            "a_count 1",
            'a{quantile="0.5"} 1',
            'a{x="1"} -3',
            "b NaN",
        ]
    ),
    st.text(alphabet=st.sampled_from('ab_{}="\\,# 1.\téЖ\x00\x85'), max_size=30),
)


@given(st.lists(st.lists(LINES, max_size=12), min_size=1, max_size=2))
@example([['a{ ="x"} 1']])
@settings(max_examples=150, deadline=None)
def test_whatever_files_contain_the_page_stays_valid(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]]
) -> None:
    directory = tmp_path_factory.mktemp("files")
    for number, lines in enumerate(files):
        write(directory, f"{number}.prom", "".join(f"{line}\n" for line in lines))
    text, openmetrics = pages(probe_of(directory))
    list(parse_text(text))
    list(parse_openmetrics(openmetrics))  # type: ignore[no-untyped-call]


def test_the_parser_is_imported_with_the_first_file_only(tmp_path: Path) -> None:
    code = (
        "import sys; from agent.sim.harness import Probe; from collectors.textfile import Textfile, TextfileOptions\n"
        f"probe = Probe(Textfile, TextfileOptions({str(tmp_path)!r})); probe.collect()\n"
        "assert 'prometheus_client' not in sys.modules\n"
        f"open({str(tmp_path / 'a.prom')!r}, 'w').write('a 1\\n'); assert probe.collect().values['a'] == 1\n"
        "assert 'prometheus_client' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
