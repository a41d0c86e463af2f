from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from agent.sim.harness import Probe, Result
from agent.sim.host import GIB, SimHost, SimMount
from collectors.host import Host, Options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


STALLING_TIMEOUT_S = 1.0  # a mount counts as stalled after a quarter of it: short, and enough for a busy machine


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimHost]:
    made = SimHost(tmp_path, cpus=1)
    yield made
    made.released.set()


def probe(node: SimHost, *, timeout_s: float = 5.0, **options: Any) -> Probe:
    node.write()
    simulated = node.answering(Host)
    return Probe(simulated, Options(**options), sysfs=node.sys, procfs=node.proc, timeout_s=timeout_s)


def by_mountpoint(result: Result, metric: str) -> dict[str, Any]:
    """Values of one metric by mount point."""
    return {
        series.partition('mountpoint="')[2].partition('"')[0]: value
        for series, value in result.values.items()
        if series.startswith(f"host_filesystem_{metric}{{")
    }


def add_line(node: SimHost, line: bytes) -> None:
    with (node.proc / "self/mountinfo").open("ab") as table:
        table.write(line)


def test_space_is_in_bytes_and_labelled_like_the_mount(node: SimHost) -> None:
    node.mounts = {"/scratch": SimMount("/dev/md0", "xfs", 8192 * 4096, 2048 * 4096)}
    result = probe(node).collect()
    labels = '{mountpoint="/scratch",device="/dev/md0",fstype="xfs"}'
    assert result.values["host_filesystem_size_bytes" + labels] == 8192 * 4096
    assert result.values["host_filesystem_free_bytes" + labels] == 2048 * 4096
    assert result.values["host_filesystem_available_bytes" + labels] == 2048 * 4096
    assert result.values["host_filesystem_files" + labels] == 512
    assert result.values["host_filesystem_files_free" + labels] == 256
    assert result.values["host_filesystem_read_only" + labels] == 0
    assert result.values["host_filesystem_stalled" + labels] == 0


def test_real_directory_agrees_with_the_kernel(node: SimHost, tmp_path: Path) -> None:
    node.mounts = {str(tmp_path): SimMount()}
    node.write()
    result = Probe(Host, sysfs=node.sys, procfs=node.proc).collect()
    space = os.statvfs(tmp_path)
    assert by_mountpoint(result, "size_bytes") == {str(tmp_path): space.f_blocks * space.f_frsize}


def test_mount_that_never_answers_is_stalled_and_costs_no_other(node: SimHost) -> None:
    node.mounts = {"/a": SimMount(), "/nfs": SimMount("server:/x", "nfs4", stalled=True), "/z": SimMount("/dev/sdz")}
    run = probe(node, timeout_s=STALLING_TIMEOUT_S)
    for _ in range(2):  # the call that hangs is still out in the second run
        result = run.collect()
        assert by_mountpoint(result, "stalled") == {"/a": 0, "/nfs": 1, "/z": 0}
        assert set(by_mountpoint(result, "size_bytes")) == {"/a", "/z"}
        assert [what for what, _ in result.failures] == ["/nfs"]


def test_mount_that_answers_again_is_shown_again(node: SimHost) -> None:
    node.mounts = {"/nfs": SimMount("server:/x", "nfs4", stalled=True)}
    before = set(threading.enumerate())
    run = probe(node, timeout_s=STALLING_TIMEOUT_S)
    assert by_mountpoint(run.collect(), "stalled") == {"/nfs": 1}
    stuck = set(threading.enumerate()) - before
    node.mounts["/nfs"].stalled = False
    node.released.set()
    for thread in stuck:
        thread.join(10)
    result = run.collect()
    assert by_mountpoint(result, "stalled") == {"/nfs": 0}
    assert set(by_mountpoint(result, "size_bytes")) == {"/nfs"}


def test_stalled_mount_that_is_unmounted_vanishes(node: SimHost) -> None:
    node.mounts = {"/a": SimMount(), "/nfs": SimMount("server:/x", "nfs4", stalled=True)}
    run = probe(node, timeout_s=STALLING_TIMEOUT_S)
    run.collect()
    del node.mounts["/nfs"]
    node.write()
    result = run.collect()
    assert by_mountpoint(result, "stalled") == {"/a": 0}
    assert result.failures == []


def test_new_mount_is_shown_and_a_gone_one_vanishes_without_a_rescan(node: SimHost) -> None:
    run = probe(node)
    run.collect()
    node.mounts = {"/": node.mounts["/"], "/new": SimMount("/dev/sdc", size_bytes=GIB, free_bytes=0)}
    node.write()
    assert set(by_mountpoint(run.collect(), "size_bytes")) == {"/", "/new"}


def test_path_with_a_space_is_asked_and_shown_as_it_is(node: SimHost) -> None:
    node.mounts = {"/my disk": SimMount()}
    assert set(by_mountpoint(probe(node).collect(), "size_bytes")) == {"/my disk"}


def test_pseudo_file_systems_are_never_asked(node: SimHost) -> None:
    node.mounts = {"/": SimMount()}
    run = probe(node)
    # Neither is a mount of the simulation: asking it would be a KeyError.
    add_line(node, b"90 1 0:90 / /auto rw - autofs systemd-1 rw\n91 1 0:91 / /run/user/0 rw - tmpfs tmpfs rw\n")
    result = run.collect()
    assert set(by_mountpoint(result, "size_bytes")) == {"/"}
    assert result.failures == []


def test_bind_mount_is_not_counted_again(node: SimHost) -> None:
    node.mounts = {"/": SimMount()}
    run = probe(node)
    add_line(node, b"90 1 259:1 /var/lib/app /srv/app rw - ext4 /dev/root rw\n")
    assert set(by_mountpoint(run.collect(), "size_bytes")) == {"/"}


def test_excluded_mount_points_and_types_are_left_out(node: SimHost) -> None:
    node.mounts = {"/": SimMount(), "/scratch/a/b": SimMount("/dev/sdb"), "/shared": SimMount("fs", "lustre")}
    run = probe(node, mountpoint_exclude=("/scratch/*",), fstype_exclude=("lus*",))
    assert set(by_mountpoint(run.collect(), "size_bytes")) == {"/"}


def test_read_only_file_system_is_told(node: SimHost) -> None:
    run = probe(node)
    assert by_mountpoint(run.collect(), "read_only") == {"/": 0, "/mnt/nvme": 0}
    node.mounts["/"].read_only = True  # the kernel remounted it after an I/O error
    node.write()
    assert by_mountpoint(run.collect(), "read_only") == {"/": 1, "/mnt/nvme": 0}


def test_bad_line_costs_no_mount(node: SimHost) -> None:
    run = probe(node)
    add_line(node, b"nonsense\n")
    result = run.collect()
    assert set(by_mountpoint(result, "size_bytes")) == {"/", "/mnt/nvme"}
    assert [what for what, _ in result.failures] == ["self/mountinfo line 4"]


def answering(node: SimHost, answers: dict[str, os.statvfs_result | OSError]) -> Result:
    class Answering(Host):
        @staticmethod
        def statvfs(path: bytes) -> os.statvfs_result:
            answer = answers[os.fsdecode(path)]
            if isinstance(answer, OSError):
                raise answer
            return answer

        read_clock = staticmethod(node.read_clock)

    node.write()
    return Probe(Answering, sysfs=node.sys, procfs=node.proc).collect()


def space(*, blocks: int = 100, free: int = 50, available: int = 40, files: int = 10, unused: int = 5) -> Any:
    # f_bsize differs from f_frsize, in which blocks are counted.
    return os.statvfs_result((1 << 20, 4096, blocks, free, available, files, unused, unused, 0, 255))


def test_blocks_are_counted_in_fragments(node: SimHost) -> None:
    node.mounts = {"/": SimMount()}
    result = answering(node, {"/": space()})
    assert by_mountpoint(result, "size_bytes") == {"/": 100 * 4096}
    assert by_mountpoint(result, "free_bytes") == {"/": 50 * 4096}
    assert by_mountpoint(result, "available_bytes") == {"/": 40 * 4096}


def test_stale_handle_costs_only_its_mount(node: SimHost) -> None:
    node.mounts = {"/": SimMount(), "/nfs": SimMount("server:/x", "nfs4")}
    result = answering(node, {"/": space(), "/nfs": OSError(errno.ESTALE, "Stale file handle")})
    assert set(by_mountpoint(result, "size_bytes")) == {"/"}
    assert [what for what, _ in result.failures] == ["/nfs"]


def test_users_private_fuse_mount_is_no_failure(node: SimHost) -> None:
    node.mounts = {"/home/u/m": SimMount("sshfs", "fuse.sshfs"), "/d": SimMount()}
    refused = PermissionError(errno.EACCES, "Permission denied")
    result = answering(node, {"/home/u/m": refused, "/d": refused})
    assert [what for what, _ in result.failures] == ["/d"]
    assert by_mountpoint(result, "size_bytes") == {}


def test_file_system_without_a_limit_of_files_has_no_such_series(node: SimHost) -> None:
    node.mounts = {"/": SimMount("/dev/sda", "btrfs")}
    result = answering(node, {"/": space(files=0, unused=0)})
    assert by_mountpoint(result, "size_bytes") == {"/": 100 * 4096}
    assert by_mountpoint(result, "files") == by_mountpoint(result, "files_free") == {}


def test_file_system_without_blocks_is_left_out(node: SimHost) -> None:
    node.mounts = {"/": SimMount("x", "newfs")}
    result = answering(node, {"/": space(blocks=0, free=0, available=0)})
    assert not any(series.startswith("host_filesystem") for series in result.values)


@pytest.mark.parametrize("odd", [{"free": 101}, {"available": 1 << 63}, {"unused": 11}], ids=str)
def test_more_free_than_there_is_is_absent_and_told(node: SimHost, odd: dict[str, int]) -> None:
    node.mounts = {"/": SimMount()}
    result = answering(node, {"/": space(**odd)})
    assert by_mountpoint(result, "size_bytes") == by_mountpoint(result, "free_bytes") == {}
    assert [what for what, _ in result.failures] == ["/"]
