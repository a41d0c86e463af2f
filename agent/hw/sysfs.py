"""Small kernel files: read once as text, or kept open and read in groups.

Reading a kept descriptor at offset 0 makes the kernel produce the value afresh (fs/kernfs, seq_file) and costs a fifth
of opening the file anew. After its device is gone a kept descriptor gives ENODEV for ever, even when a device of the
same name came back: such a descriptor is opened again, once. Nothing here is non-blocking: whoever reads a device that
may hang does so in `agent.hw.bulkhead`.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import stat
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TEXT_LIMIT = 4096  # sysfs never gives more than a page for an attribute
VALUE_LIMIT = 256  # of a file in a group: a number or a few words, and small enough for Python's own allocator
DESCRIPTORS_WANTED = 8192
DESCRIPTORS_RESERVED = 64  # left to the rest of the process: sockets, logs, files opened for a moment

_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_NOT_KEPT = -1
_REOPEN = frozenset({errno.EBADF, errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.EIO, errno.ESTALE})
_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_LIMITS = itertools.repeat(VALUE_LIMIT)
_STARTS = itertools.repeat(0)
_NO_ERRORS: Mapping[int, OSError] = MappingProxyType({})


def read_text(path: str) -> str:
    """Return the stripped content of a small file; bytes that are no UTF-8 are replaced. Raises OSError."""
    descriptor = os.open(path, _FLAGS)
    try:
        return os.read(descriptor, TEXT_LIMIT).decode("utf-8", "replace").strip()
    finally:
        os.close(descriptor)


def entries(directory: str) -> dict[str, int]:
    """Return name and inode of what is in a directory; empty when there is no such directory. Raises OSError.

    An entry that was replaced by another of the same name has another inode, so two listings tell whether descriptors
    that were opened in between still read what the names stand for.
    """
    try:
        with os.scandir(directory) as found:
            return {entry.name: entry.inode() for entry in found}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def link_name(path: str) -> str:
    """Return the name of what a symbolic link leads to, a driver's say; empty when there is no link."""
    try:
        name = os.path.basename(os.readlink(path))
    except OSError:
        return ""
    # The kernel's links end in a name, and reading one is a tenth of resolving it; another file system's may not.
    return os.path.basename(os.path.realpath(path)) if name in {"", ".", ".."} else name


def directory_identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a directory, links followed; None when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISDIR(status.st_mode) else None


class FileGroup:
    """Files that are read together, in order, kept open as far as descriptors last.

    A file that cannot be opened or kept is opened at every read instead, and its error is that read's. Making a group
    opens its files, so it may hang where a read may. Descriptors go back on `close`, or when nobody holds the group any
    more: then even a thread that is stuck in a read keeps them until it returns.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.reopened = False  # set when a dead descriptor was opened again: another device may have the name now
        self._paths = list(paths)
        self._kept = [_NOT_KEPT] * len(self._paths)
        self._chosen = list(range(len(self._paths)))
        self._descriptors: list[int] = []
        for index, path in enumerate(self._paths):
            self._kept[index] = _open_to_keep(path)
        self.choose(self._chosen)

    def choose(self, indices: Sequence[int]) -> None:
        """Read only these files from now on, by their position in the constructor's list."""
        self._chosen = list(indices)
        self._descriptors = [self._kept[index] for index in self._chosen]

    def read(self) -> tuple[list[bytes], Mapping[int, OSError]]:
        """Read each chosen file once: contents in order, and errors by position, where the content is then empty.

        Of a content the first VALUE_LIMIT bytes are returned.
        """
        contents: list[bytes] = []
        try:
            # The whole group in one C loop: what was read before an error is in the list.
            contents.extend(map(os.pread, self._descriptors, _LIMITS, _STARTS))
        except OSError as error:
            return contents, self._read_past(contents, error)
        return contents, _NO_ERRORS

    def close(self) -> None:
        """Give the descriptors back. Never while another thread reads."""
        for index, descriptor in enumerate(self._kept):
            if descriptor != _NOT_KEPT:
                self._kept[index] = _NOT_KEPT
                os.close(descriptor)
        self.choose(self._chosen)

    def __del__(self) -> None:
        """Give back what is still open."""
        self.close()

    def _read_past(self, contents: list[bytes], error: OSError) -> dict[int, OSError]:
        """Go on where an error stopped, to the end; return the errors that remain, by position."""
        errors: dict[int, OSError] = {}
        stopped_by: OSError | None = error
        while stopped_by is not None:
            position = len(contents)
            try:
                contents.append(self._read_again(position, stopped_by))
            except OSError as final:
                # A fresh one: the frames in a caught exception's traceback would keep the descriptors.
                errors[position] = OSError(final.errno, final.strerror, self._paths[self._chosen[position]])
                contents.append(b"")
            try:
                stopped_by = None
                contents.extend(map(os.pread, self._descriptors[len(contents) :], _LIMITS, _STARTS))
            except OSError as another:
                stopped_by = another
        return errors

    def _read_again(self, position: int, error: OSError) -> bytes:
        """Read a file whose descriptor is missing or dead through a new one. Raises OSError."""
        index = self._chosen[position]
        if error.errno not in _REOPEN:
            raise OSError(error.errno, error.strerror)  # raising `error` again would tie it to our frame
        was_kept = self._forget(index, position)
        descriptor = os.open(self._paths[index], _FLAGS)
        try:
            content = os.pread(descriptor, VALUE_LIMIT, 0)
        except OSError:
            os.close(descriptor)
            raise
        self.reopened |= was_kept
        if _may_keep(descriptor):
            self._kept[index] = self._descriptors[position] = descriptor
        else:
            os.close(descriptor)
        return content

    def _forget(self, index: int, position: int) -> bool:
        descriptor = self._kept[index]
        self._kept[index] = self._descriptors[position] = _NOT_KEPT
        if descriptor != _NOT_KEPT:
            os.close(descriptor)
        return descriptor != _NOT_KEPT


def _open_to_keep(path: str) -> int:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno not in _OUT_OF_DESCRIPTORS or not _may_keep(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
            return _NOT_KEPT
        return _open_to_keep(path)
    if _may_keep(descriptor):
        return descriptor
    os.close(descriptor)
    return _NOT_KEPT


def _may_keep(descriptor: int) -> bool:
    """Say whether a descriptor of this number leaves the reserve; raises the soft limit first where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or descriptor < soft - DESCRIPTORS_RESERVED:
        return True
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if wanted <= soft:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return False
    return descriptor < wanted - DESCRIPTORS_RESERVED
