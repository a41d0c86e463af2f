"""A server under test with the loop that the agent's main thread is for it, and a client that hides no byte."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.address import TcpAddress
from agent.server import Server
from agent.server.exchange import Application, Limits, Request, Response
from agent.server.webconfig import WebConfig

PATIENCE_S = 10.0
ANY_PORT = TcpAddress("127.0.0.1", 0)
GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Pages:
    """An application: `/metrics`, an echo of whatever else, `/fail`, and `/hold`, which waits to be released."""

    def __init__(self, body: bytes = b"up 1\n") -> None:
        self.body = body
        self.requests: list[Request] = []
        self.held = threading.Semaphore(0)
        self.release = threading.Event()
        self.error: Callable[[], Exception] | None = None

    def answer(self, request: Request) -> Response:
        self.requests.append(request)
        if request.path == "/hold":
            self.held.release()
            self.release.wait(PATIENCE_S)
        if request.path == "/fail" and self.error is not None:
            raise self.error()
        if request.path == "/metrics":
            return Response(200, self.body, "text/plain; version=0.0.4", (("Vary", "Accept"),))
        return Response(200, request.path.encode() + b" " + request.body)


@contextlib.contextmanager
def serving(
    app: Application,
    listen: TcpAddress | Path = ANY_PORT,
    *,
    limits: Limits | None = None,
    web: WebConfig | None = None,
) -> Iterator[Server]:
    server = Server(listen, app, limits=limits, web=web)
    ours, theirs = socket.socketpair()

    def loop() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            selector.register(theirs, selectors.EVENT_READ)
            while all(key.fileobj is not theirs for key, _ in selector.select()):
                server.accept()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield server
    finally:
        ours.close()
        thread.join()
        theirs.close()
        server.close()
        if isinstance(app, Pages):
            app.release.set()
        for other in threading.enumerate():
            if other.name == "http":
                other.join(PATIENCE_S)


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """One connection. Everything waits `PATIENCE_S` at most, so that a test fails rather than hangs."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""

    def __enter__(self) -> Client:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, data: bytes = GET) -> Answer:
        self.send(data)
        return self.read(head_only=data.startswith(b"HEAD"))

    def read(self, *, head_only: bool = False) -> Answer:
        while b"\r\n\r\n" not in self.buffer:
            self._more()
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        status, *lines = head.decode("ascii").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = 0 if head_only else int(headers.get("content-length", 0))
        while len(self.buffer) < size:
            self._more()
        body, self.buffer = self.buffer[:size], self.buffer[size:]
        return Answer(int(status.split(" ")[1]), headers, body)

    def is_ended(self) -> bool:
        """Wait for the server to end the connection; False when it sends something instead."""
        try:
            return not self.buffer and self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _more(self) -> None:
        received = self.sock.recv(1 << 16)
        if not received:
            raise EOFError(f"the connection ended after {self.buffer!r:.200}")
        self.buffer += received


def connect(server: Server) -> Client:
    return Client(socket.create_connection(server.address, PATIENCE_S))


def connect_unix(path: Path) -> Client:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return Client(sock)


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds; False when it does not within `PATIENCE_S`."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return True
        pause.wait(0.005)
    return False
