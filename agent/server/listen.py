"""Listening sockets: TCP and unix."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import socket
import stat
from pathlib import Path

from agent.address import TcpAddress

GROUP = "hpcwatch"
_BACKLOG = 1024  # the kernel cuts it to net.core.somaxconn


def open_tcp(address: TcpAddress) -> socket.socket:
    """Open a non-blocking listening socket. `[::]` and an empty host take IPv4 clients too.

    Raises OSError (EADDRINUSE: another program has the port), with the address in its text.
    """
    try:
        return _bind_tcp(address)
    except UnicodeError as error:  # a host name that is none, such as one that begins with a dot
        raise OSError(errno.EINVAL, f"cannot listen on {address}: {error}") from error
    except OSError as error:
        if not address.host and error.errno in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
            return open_tcp(TcpAddress("0.0.0.0", address.port))  # noqa: S104 - a node without IPv6, asked for all
        text = error.strerror or str(error)
        raise OSError(error.errno, f"cannot listen on {address}: {text}") from error


def _bind_tcp(address: TcpAddress) -> socket.socket:
    family, kind, protocol, _, target = socket.getaddrinfo(
        address.host or "::", address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must not wait for TIME_WAIT
        # Accepted sockets inherit this on Linux: one system call less for each.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(target)
        sock.listen(_BACKLOG)
        sock.setblocking(False)  # noqa: FBT003 - its only argument
    except BaseException:
        sock.close()
        raise
    return sock


def open_unix(path: Path) -> socket.socket:
    """Open a non-blocking listening socket at `path`, for root and the group hpcwatch (0660).

    Makes the parent folder. Takes the place of a socket nobody listens on any more. Raises OSError: EADDRINUSE when
    another agent answers there, EEXIST when the path is something else than a socket, with the path in its text.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(path)
        return _bind_unix(path)
    except OSError as error:
        text = error.strerror or str(error)
        raise OSError(error.errno, f"cannot listen on {path}: {text}") from error


def _remove_dead(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # noqa: FBT003 - its only argument
        result = probe.connect_ex(str(path))
    # EAGAIN: its backlog is full, so somebody does listen.
    if result in {0, errno.EAGAIN}:
        raise OSError(errno.EADDRINUSE, "another agent answers there")
    if result != errno.ECONNREFUSED:
        raise OSError(result, os.strerror(result))
    path.unlink(missing_ok=True)


def _bind_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        # Before listen: until then nobody can connect, whatever the umask made of the mode.
        with contextlib.suppress(KeyError, PermissionError):
            os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
        path.chmod(0o660)
        sock.listen(_BACKLOG)
        sock.setblocking(False)  # noqa: FBT003 - its only argument
    except BaseException:
        sock.close()
        raise
    return sock
