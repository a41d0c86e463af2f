from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hw.mounts import Mount, parse_mountinfo, without_repeats
from agent.hw.procfs import FormatError


def only(line: bytes) -> Mount:
    (mount,) = parse_mountinfo(line).values()
    assert isinstance(mount, Mount)
    return mount


def mount(point: str, root: str = "/", device: str = "8:1", source: str = "/dev/sda1") -> Mount:
    return Mount(device, root, point, point.encode(), "ext4", source, read_only=False)


def points(*mounts: Mount) -> list[str]:
    return [kept.point for kept in without_repeats(mounts)]


def test_line_with_optional_fields_is_understood() -> None:
    found = only(b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue\n")
    assert found == Mount("98:0", "/mnt1", "/mnt2", b"/mnt2", "ext3", "/dev/root", read_only=False)


def test_line_without_optional_fields_is_understood() -> None:
    assert only(b"27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n").point == "/"


def test_escapes_of_spaces_and_backslashes_are_undone() -> None:
    found = only(b"27 1 254:0 / /my\\040disk\\134n\\0409 rw - ext4 /dev/a\\011b rw\n")
    assert found.point == "/my disk\\n 9"
    assert found.path == b"/my disk\\n 9"
    assert found.source == "/dev/a\tb"


def test_path_that_is_no_utf8_keeps_its_bytes_for_the_kernel() -> None:
    found = only(b"27 1 254:0 / /d\xff rw - ext4 /dev/sda rw\n")
    assert found.path == b"/d\xff"
    assert found.point == "/d\\xff"


def test_read_only_view_of_a_writable_file_system_is_not_read_only() -> None:
    assert not only(b"27 1 254:0 / /usr ro,relatime - ext4 /dev/vda rw\n").read_only
    assert only(b"27 1 254:0 / /usr rw,relatime - ext4 /dev/vda ro,errors=remount-ro\n").read_only


def test_last_mount_on_a_point_is_the_one_seen() -> None:
    found = parse_mountinfo(b"1 0 0:5 / /data rw - autofs a rw\n2 1 0:9 / /data rw - nfs4 server:/data rw\n")
    assert [(mount.point, mount.fstype) for mount in found.values() if isinstance(mount, Mount)] == [("/data", "nfs4")]


def test_bad_line_costs_only_itself_and_is_named() -> None:
    found = parse_mountinfo(b"garbage\n27 1 254:0 / / rw - ext4 /dev/vda rw\n")
    assert isinstance(found["line 1"], FormatError)
    assert isinstance(found["/"], Mount)


def test_bind_mount_of_a_part_is_left_out() -> None:
    assert points(mount("/var/lib/x", root="/var/lib/x"), mount("/"), mount("/again")) == ["/"]


def test_directory_with_a_similar_name_is_no_part() -> None:
    assert points(mount("/a", root="/home"), mount("/b", root="/homes"), mount("/c", root="/home/me")) == ["/a", "/b"]


def test_exports_of_one_server_are_no_repeats() -> None:
    home = mount("/home", device="0:50", source="server:/home")
    data = mount("/data", device="0:50", source="server:/data")
    assert points(home, data) == ["/data", "/home"]


def test_same_source_on_other_devices_is_no_repeat() -> None:
    assert points(mount("/run", device="0:20", source="tmpfs"), mount("/tmp", device="0:21", source="tmpfs")) == [  # noqa: S108 - no file is made there
        "/run",
        "/tmp",  # noqa: S108 - as above
    ]


LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [b"27 1 8:1 ", b"/ ", b"/a\\040b ", b"/\\777 ", b"rw ", b"- ", b"ext4 ", b"ro ", b"\n", b" - "]
        ),
        st.binary(max_size=6),
    ),
    max_size=40,
).map(b"".join)


@pytest.mark.filterwarnings("error")
@given(LINES)
def test_any_bytes_give_mounts_or_format_errors(content: bytes) -> None:
    found = parse_mountinfo(content)
    kept = [mount for mount in found.values() if isinstance(mount, Mount)]
    assert all(mount.path.startswith(b"/") for mount in kept)
    chosen = without_repeats(kept)
    assert len({mount.point for mount in chosen}) == len(chosen)
    assert bool(chosen) == bool(kept)
