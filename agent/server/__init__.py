"""The HTTP server: one listening socket, a thread for each connection, no thread and no wake-up without one.

    server = Server(parse_listen("0.0.0.0:9753"), app)
    selector.register(server, selectors.EVENT_READ, server.accept)

The caller's loop selects on the server and calls `accept` when it is readable.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from agent.address import TcpAddress, parse_listen
from agent.server.conversation import Conversation
from agent.server.exchange import Application, Limits, Request, Response
from agent.server.links import LinkTable
from agent.server.listen import open_tcp, open_unix

if TYPE_CHECKING:
    from agent.server.webconfig import WebConfig

__all__ = ["Application", "Limits", "Request", "Response", "Server", "TcpAddress", "parse_listen"]

log = logging.getLogger("http")

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nServer: hpcwatch\r\nRetry-After: 1\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_MAX_REMEMBERED_FAILURES = 32
TOLD_AGAIN_S = 60.0


class Server:
    """One listening socket and the connections made to it.

    `listen` is a TCP address, or the path of a unix socket: the control socket, whose clients are trusted and may POST;
    `web` does not apply to it. Raises OSError, with the address in its text, when it cannot listen (EADDRINUSE).
    """

    def __init__(
        self,
        listen: TcpAddress | Path,
        app: Application,
        *,
        limits: Limits | None = None,
        web: WebConfig | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._app = _Guarded(app)
        self._links = LinkTable(self._limits.connections)
        self._path = listen if isinstance(listen, Path) else None
        self._web = web if self._path is None else None
        self._listener = open_tcp(listen) if isinstance(listen, TcpAddress) else open_unix(listen)
        self._inode = _inode(self._path)
        self._spare = _open_spare()
        self._shed_at_s = self._starved_at_s = float("-inf")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port as bound, the real port where 0 was asked. Raises ValueError for a unix socket."""
        if self._path is not None:
            raise ValueError(f"{self._path} is a unix socket and has no port")
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        return len(self._links)

    def fileno(self) -> int:
        """Descriptor for the caller's selector: readable when a connection waits for `accept`."""
        return self._listener.fileno()

    def accept(self) -> None:
        """Take one waiting connection and hand it to a thread. Never blocks; never raises for what a client does."""
        try:
            sock, peer = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._shed(error)
            return  # else: the client gave up before its turn
        link = self._links.admit(sock, local=self._path is None and _is_loopback(peer[0]))
        if link is None:
            self._turn_away(sock)
            return
        conversation = Conversation(
            link, self._links, self._app, limits=self._limits, web=self._web, control=self._path is not None
        )
        try:
            threading.Thread(target=conversation.run, name="http", daemon=True).start()
        except RuntimeError as error:
            self._tell_starved(error)
            self._links.drop(link)
            self._turn_away(sock)

    def close(self) -> None:
        """Stop listening, remove the unix socket and end every connection, answers under way included. Idempotent.

        Returns at once: the threads notice by themselves and are daemons.
        """
        # A successor may have put its own socket there meanwhile.
        if self._path is not None and self._inode is not None and _inode(self._path) == self._inode:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._inode = None
        self._listener.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        self._links.evict_all()

    def _turn_away(self, sock: socket.socket) -> None:
        """Say that the server is full (nothing, where that would take a handshake) and close."""
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)  # noqa: FBT003 - its only argument
            if self._web is None or self._web.settings.tls is None:
                sock.send(_BUSY)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(self._limits.head_bytes)  # unread data would make the close destroy the answer

    def _tell_starved(self, error: RuntimeError) -> None:
        if time.monotonic() - self._starved_at_s > TOLD_AGAIN_S:
            self._starved_at_s = time.monotonic()
            log.error("connections wait for a thread and are turned away: %s; see TasksMax and the pids limit", error)

    def _shed(self, error: OSError) -> None:
        """Free descriptors. Left in the queue, the connection would keep the caller's selector awake all the time."""
        if time.monotonic() - self._shed_at_s > TOLD_AGAIN_S:
            self._shed_at_s = time.monotonic()
            log.error("cannot accept a connection: %s; raise LimitNOFILE or close descriptors elsewhere", error)
        self._links.evict_idlest()
        if self._spare is not None:
            os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = _open_spare()


class _Guarded:
    """The application behind a wall: an exception becomes a 500, and one log message until it changes or goes away."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._failures: dict[str, tuple[type[Exception], str]] = {}

    def answer(self, request: Request) -> Response:
        try:
            response = self._app.answer(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other clients must not notice
            self._tell(request.path, error)
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal error, see the agent's log\n")
        if self._failures and self._failures.pop(request.path, None) is not None:
            log.info("%s is answered again", request.path)
        return response

    def _tell(self, path: str, error: Exception) -> None:
        # By place, not by text: a message that holds a time or an address would be new each time.
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
        failure = (type(error), place)
        if self._failures.get(path) == failure:
            return
        if len(self._failures) >= _MAX_REMEMBERED_FAILURES:
            self._failures.clear()
        self._failures[path] = failure
        log.error("%s failed, answered 500", path, exc_info=error)


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.removeprefix("::ffff:").startswith("127.")


def _inode(path: Path | None) -> tuple[int, int] | None:
    if path is None:
        return None
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _open_spare() -> int | None:
    """Hold a descriptor back for the day when there are no more: see `Server._shed`."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
