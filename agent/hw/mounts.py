"""What is mounted here, from /proc/self/mountinfo (proc_pid_mountinfo(5)).

The process's own table, because its paths are the ones that statfs(2) will resolve: in a container or in a service
with a private view, the table of process 1 speaks of other places under the same names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from agent.hw.procfs import FormatError, text

if TYPE_CHECKING:
    from collections.abc import Iterable

# File systems without storage behind them: they have no size, and asking autofs would mount things.
PSEUDO_TYPES = frozenset((
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs",
    "fuse.gvfsd-fuse", "fuse.lxcfs", "fuse.portal", "fusectl", "hugetlbfs", "mqueue", "nfsd", "nsfs", "proc", "pstore",
    "ramfs", "resctrl", "rootfs", "rpc_pipefs", "securityfs", "selinuxfs", "smackfs", "sysfs", "tracefs", "xenfs",
))  # fmt: skip
# Where containers, sandboxes and sessions keep mounts by the dozen, which repeat what is seen elsewhere. Globs.
CLUTTER = (
    "/proc/*",
    "/run/containerd/*",
    "/run/credentials/*",
    "/run/netns/*",
    "/run/user/*",
    "/snap/*",
    "/sys/*",
    "/var/lib/containerd/*",
    "/var/lib/containers/*",
    "/var/lib/docker/*",
    "/var/lib/kubelet/*",
)

_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")  # space, tab, newline, backslash and # are written so
_BEFORE_SEPARATOR = 6  # id, parent, device, root, mount point, options; then optional fields
_BEHIND_SEPARATOR = 3  # type, source, options of the file system


class Mount(NamedTuple):
    """One mount. `point` is for people, `path` for the kernel.

    `read_only` is the file system's own state, which an I/O error changes; a read-only view of it does not count.
    """

    device: str  # major:minor
    root: str  # the directory of the file system that is seen at `point`
    point: str
    path: bytes
    fstype: str
    source: str
    read_only: bool


def parse_mountinfo(content: bytes) -> dict[str, Mount | FormatError]:
    """Return what is seen at each mount point: of mounts on top of each other the last. Errors stand for bad lines."""
    found: dict[str, Mount | FormatError] = {}
    for place, line in enumerate(content.splitlines(), 1):
        try:
            mount = _parse_line(line)
        except FormatError as error:
            found[f"line {place}"] = error
        else:
            found[mount.point] = mount
    return found


def without_repeats(mounts: Iterable[Mount]) -> list[Mount]:
    """Leave out mounts that show a part of a file system that another one shows whole: bind mounts."""
    kept: dict[tuple[str, str], list[str]] = {}
    chosen: set[str] = set()
    ordered = sorted(mounts, key=lambda mount: len(mount.root))
    for mount in ordered:
        roots = kept.setdefault((mount.device, mount.source), [])
        if not any(mount.root == root or mount.root.startswith(root.rstrip("/") + "/") for root in roots):
            roots.append(mount.root)
            chosen.add(mount.point)
    return sorted((mount for mount in ordered if mount.point in chosen), key=lambda mount: mount.point)


def _parse_line(line: bytes) -> Mount:
    before, dash, behind = line.partition(b" - ")
    view, system = before.split(b" "), behind.split(b" ")
    if not dash or len(view) < _BEFORE_SEPARATOR or len(system) < _BEHIND_SEPARATOR or not view[4].startswith(b"/"):
        raise FormatError(f"not a line of mountinfo: {text(line[:120])!r}")
    path = _unescape(view[4])
    return Mount(
        device=text(view[2]),
        root=text(_unescape(view[3])),
        point=text(path),
        path=path,
        fstype=text(system[0]),
        source=text(_unescape(system[1])),
        read_only=b"ro" in system[2].split(b","),
    )


def _unescape(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field)
