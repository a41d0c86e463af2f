"""Reading kernel files: kept descriptors, dead ones, and too few of them."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agent.hw.sysfs import FileGroup, directory_identity, entries, link_name, read_text


def write(directory: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [str(directory / name) for name in texts]


def open_below(folder: Path) -> int:
    """Count this process's descriptors of files in a folder; others come and go with garbage collection."""
    targets = [os.path.realpath(descriptor) for descriptor in Path("/proc/self/fd").iterdir()]
    return sum(target.startswith(str(folder)) for target in targets)


def test_text_is_stripped_and_undecodable_bytes_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "node_desc").write_bytes(b" host\xff1 \n")
    assert read_text(str(tmp_path / "node_desc")) == "host\ufffd1"


def test_missing_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_text(str(tmp_path / "fw_ver"))


def test_missing_directory_and_file_in_its_place_have_no_entries(tmp_path: Path) -> None:
    write(tmp_path, file="1")
    assert entries(str(tmp_path / "nowhere")) == {}
    assert entries(str(tmp_path / "file")) == {}


def test_replaced_file_has_another_entry(tmp_path: Path) -> None:
    write(tmp_path, counter="1")
    before = entries(str(tmp_path))
    write(tmp_path, new="2")
    (tmp_path / "new").rename(tmp_path / "counter")
    assert entries(str(tmp_path)).keys() == before.keys()
    assert entries(str(tmp_path)) != before


def test_link_name_is_where_the_link_leads(tmp_path: Path) -> None:
    function = tmp_path / "0101:00:00.0"
    (function / "infiniband").mkdir(parents=True)
    (function / "infiniband" / "device").symlink_to("..")
    assert link_name(str(function / "infiniband" / "device")) == "0101:00:00.0"
    assert link_name(str(function)) == ""
    assert link_name(str(tmp_path / "nowhere")) == ""


def test_directory_identity_follows_links_and_is_none_for_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    write(tmp_path, file="1")
    status = (tmp_path / "real").stat()
    assert directory_identity(str(tmp_path / "link")) == (status.st_dev, status.st_ino)
    assert directory_identity(str(tmp_path / "dangling")) is None
    assert directory_identity(str(tmp_path / "file")) is None


def test_group_reads_fresh_contents_in_order(tmp_path: Path) -> None:
    group = FileGroup(write(tmp_path, b="1\n", a="2\n"))
    assert group.read() == ([b"1\n", b"2\n"], {})
    write(tmp_path, b="3\n")
    assert group.read() == ([b"3\n", b"2\n"], {})


def test_unopenable_file_fails_alone_and_comes_back(tmp_path: Path) -> None:
    paths = write(tmp_path, a="1", c="3")
    group = FileGroup([paths[0], str(tmp_path / "b"), paths[1]])
    contents, errors = group.read()
    assert contents == [b"1", b"", b"3"]
    assert {position: error.errno for position, error in errors.items()} == {1: errno.ENOENT}
    assert str(errors[1].filename) == str(tmp_path / "b")
    write(tmp_path, b="2")
    assert group.read() == ([b"1", b"2", b"3"], {})


def test_directory_in_place_of_a_file_fails_alone(tmp_path: Path) -> None:
    paths = write(tmp_path, a="1", c="3")
    (tmp_path / "b").mkdir()
    contents, errors = FileGroup([paths[0], str(tmp_path / "b"), paths[1]]).read()
    assert contents == [b"1", b"", b"3"]
    assert errors[1].errno == errno.EISDIR


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EIO])
def test_dead_descriptor_is_opened_again_once(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = FileGroup(write(tmp_path, a="1", b="2", c="3"))
    dead = group._kept[1]
    pread = os.pread
    asked: list[int] = []

    def read_or_die(descriptor: int, size: int, start: int) -> bytes:
        asked.append(descriptor)
        if len(asked) == 2:  # the kept one of b; its successor may get the same number
            assert descriptor == dead
            raise OSError(number, os.strerror(number))
        return pread(descriptor, size, start)

    monkeypatch.setattr(os, "pread", read_or_die)
    assert not group.reopened
    assert group.read() == ([b"1", b"2", b"3"], {})
    assert group.reopened
    assert len(asked) == 4
    assert group.read() == ([b"1", b"2", b"3"], {})
    assert len(asked) == 7


def test_refusing_file_is_asked_once_and_neighbours_are_not_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FileGroup(write(tmp_path, a="1", b="2", c="3"))
    refusing = group._kept[1]
    pread = os.pread
    asked: list[int] = []

    def read_or_refuse(descriptor: int, size: int, start: int) -> bytes:
        asked.append(descriptor)
        if descriptor == refusing:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pread(descriptor, size, start)

    monkeypatch.setattr(os, "pread", read_or_refuse)
    contents, errors = group.read()
    assert contents == [b"1", b"", b"3"]
    assert errors[1].errno == errno.EINVAL
    assert asked == group._kept


def test_chosen_files_alone_are_read(tmp_path: Path) -> None:
    group = FileGroup(write(tmp_path, a="1", b="2", c="3"))
    group.choose([0, 2])
    assert group.read() == ([b"1", b"3"], {})
    group.choose([0, 1, 2])
    assert group.read() == ([b"1", b"2", b"3"], {})


def test_long_content_is_cut(tmp_path: Path) -> None:
    contents, _ = FileGroup(write(tmp_path, a="x" * 10_000)).read()
    assert contents == [b"x" * 256]


def test_descriptors_go_back_on_close_and_when_nobody_holds_the_group(tmp_path: Path) -> None:
    paths = write(tmp_path, a="1", b="2")
    group = FileGroup(paths)
    other = FileGroup(paths)
    assert open_below(tmp_path) == 4
    group.close()
    group.close()
    assert open_below(tmp_path) == 2
    del other
    assert open_below(tmp_path) == 0


def run_with_descriptor_limit(soft: int, hard: int, script: str) -> str:
    """Run a script in a process of its own, because a lowered hard limit cannot be raised again."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("hard", [80, 40])
def test_no_value_is_lost_when_descriptors_run_out(tmp_path: Path, hard: int) -> None:
    for index in range(100):
        write(tmp_path, **{f"c{index:02}": f"{index}\n"})
    output = run_with_descriptor_limit(
        hard,
        hard,
        f"""
        import os
        from agent.hw.sysfs import FileGroup
        group = FileGroup([f"{tmp_path}/c{{i:02}}" for i in range(100)])
        for _ in range(2):
            contents, errors = group.read()
            print(not errors, contents == [b"%d\\n" % i for i in range(100)], len(os.listdir("/proc/self/fd")) < 20)
        """,
    )
    assert output.splitlines() == ["True True True"] * 2


def test_soft_limit_is_raised_when_files_need_it(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 1024:
        pytest.skip(f"the hard limit of open files here is {hard}")
    write(tmp_path, counter="1")
    output = run_with_descriptor_limit(
        80,
        hard,
        f"""
        import os, resource
        from agent.hw.sysfs import FileGroup
        groups = [FileGroup(["{tmp_path}/counter"] * 100)]
        print(len(os.listdir("/proc/self/fd")) > 100, resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 80)
        """,
    )
    assert output == "True True"
