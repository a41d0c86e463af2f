"""HTTP/1.1 on one connection, from its first byte to its end, in a thread of its own.

The standard library parses requests (`BaseHTTPRequestHandler.parse_request`). What is added around it: a head is taken
whole, within limits of size and total time, before anything looks at it; an answer leaves in one write, because a
second one would wait for the client's delayed acknowledgement (40 ms); nothing about the program leaks into answers.
"""

from __future__ import annotations

import contextlib
import functools
import io
import ipaddress
import logging
import re
import socket
import struct
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, NoReturn, cast
from urllib.parse import parse_qs, unquote

from agent.server.exchange import Application, Limits, Request, Response
from agent.server.links import Link, LinkTable, Phase

if TYPE_CHECKING:
    import ssl

    from agent.server.webconfig import WebConfig, WebSettings

log = logging.getLogger("http")

_HEAD_END = re.compile(rb"\n\r?\n")
_RECEIVE_BYTES = 8 * 1024
_LINGER_BYTES = 1024 * 1024
_MAX_PARAMETERS = 64
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_HOST_NAME = socket.gethostname().lower()


class _Refused(Exception):  # noqa: N818 - an outcome, not an error of ours
    """The request is answered with this status and nothing else, and the connection ends."""

    def __init__(self, status: HTTPStatus, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(status)
        self.response = Response(status, f"{status.phrase}\n".encode(), headers=headers)


class Conversation(BaseHTTPRequestHandler):
    """Everything said on one connection. `run` returns when it is over; it never raises."""

    protocol_version = "HTTP/1.1"

    def __init__(  # the base class would hold the whole conversation in here, and wants a socketserver
        self, link: Link, table: LinkTable, app: Application, *, limits: Limits, web: WebConfig | None, control: bool
    ) -> None:
        self.link = link
        self.table = table
        self.app = app
        self.limits = limits
        self.web = web
        self.control = control
        self.methods = ("GET", "HEAD", "POST") if control else ("GET", "HEAD")
        self.settings: WebSettings | None = None
        self.buffer = bytearray()
        self.proven = control  # the client has shown who it is
        self.encrypted = False
        self.unread = False  # the client may still be sending something nobody will read
        self.first_deadline_s: float | None = time.monotonic() + limits.head_timeout_s
        self.command = ""
        self.request_version = self.protocol_version

    def run(self) -> None:
        """Talk until either side ends it, then close the socket."""
        try:
            if self._encrypt():
                self._talk()
        except TimeoutError:
            # The client does not take its answer. Without this the kernel would keep the rest for it, for minutes.
            with contextlib.suppress(OSError):
                self.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        except OSError:
            pass  # the client is gone, which is its right
        except Exception:
            log.exception("a connection ended by an error of the agent's own")
        finally:
            self.table.drop(self.link)
            self._close()

    def _encrypt(self) -> bool:
        """Shake hands where TLS is configured; False when evicted meanwhile. Raises OSError for a client not let in."""
        self.settings = self.web.current() if self.web is not None else None
        tls = self.settings.tls if self.settings is not None else None
        if tls is None:
            return True
        sock = tls.context.wrap_socket(self.link.sock, server_side=True, do_handshake_on_connect=False)
        self.encrypted = True
        if not (self.table.swap(self.link, sock) and self.table.move(self.link, Phase.READING)):
            return False
        sock.settimeout(self.limits.head_timeout_s)
        sock.do_handshake()
        self.proven = tls.identify(sock)
        return True

    def _talk(self) -> None:
        self.close_connection = False
        while not self.close_connection:
            try:
                head = self._receive_head()
                if head is None:
                    return
                self._parse(head)
                request = self._read_request()
                response = self.app.answer(request)
            except _Refused as refused:
                self.close_connection = True
                self._send(refused.response)
                self._linger()
                return
            self._send(response)
            if self.close_connection and (self.unread or self.buffer):
                self._linger()

    # Receiving

    def _receive_head(self) -> bytes | None:
        """Take one request's head off the connection; None when the client has no more to ask or was too slow."""
        buffer = self.buffer
        self.command = ""
        deadline_s, self.first_deadline_s = self.first_deadline_s, None
        if not buffer:
            if not self.table.move(self.link, Phase.IDLE):
                return None
            if not self._receive(deadline_s or time.monotonic() + self.limits.idle_timeout_s):
                return None
        deadline_s = deadline_s or time.monotonic() + self.limits.head_timeout_s
        while True:
            if buffer.startswith((b"\r", b"\n")):  # empty lines before a request are allowed (RFC 9112, section 2.2)
                del buffer[: len(buffer) - len(buffer.lstrip(b"\r\n"))]
            end = _HEAD_END.search(buffer)
            self._check_size(end.end() if end else len(buffer))
            if end:
                break
            if not self.table.move(self.link, Phase.READING):
                return None
            if not self._receive(deadline_s):
                if buffer and time.monotonic() >= deadline_s:
                    raise _Refused(HTTPStatus.REQUEST_TIMEOUT)
                return None
        head = bytes(buffer[: end.end()])
        del buffer[: end.end()]
        return head if self.table.move(self.link, Phase.ANSWERING) else None

    def _check_size(self, head_bytes: int) -> None:
        line_bytes = self.buffer.find(b"\n", 0, head_bytes)
        if (head_bytes if line_bytes < 0 else line_bytes) > self.limits.request_line_bytes:
            raise _Refused(HTTPStatus.REQUEST_URI_TOO_LONG)
        if head_bytes > self.limits.head_bytes:
            raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _receive(self, deadline_s: float) -> bool:
        """Add what the client sends to the buffer. False at the deadline (monotonic) and when the client is done."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        self.link.sock.settimeout(left_s)
        try:
            received = self.link.sock.recv(_RECEIVE_BYTES)
        except TimeoutError:
            return False
        self.buffer += received
        return bool(received)

    def _receive_body(self) -> bytes:
        length = (self.headers.get("Content-Length") or "").strip()
        if self.headers.get("Transfer-Encoding") is not None:
            raise _Refused(HTTPStatus.NOT_IMPLEMENTED)
        if not length:
            return b""  # RFC 9112, 6.3: neither header is no body; `curl -X POST` sends none
        if not (length.isascii() and length.isdigit()):
            raise _Refused(HTTPStatus.BAD_REQUEST)
        if len(length) > len(str(self.limits.body_bytes)) or int(length) > self.limits.body_bytes:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        size = int(length)
        if len(self.buffer) < size and (self.headers.get("Expect") or "").lower() == "100-continue":
            self.link.sock.settimeout(self.limits.write_timeout_s)
            self.link.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        deadline_s = time.monotonic() + self.limits.head_timeout_s
        while len(self.buffer) < size:
            if not self._receive(deadline_s):
                raise _Refused(HTTPStatus.REQUEST_TIMEOUT)
        body = bytes(self.buffer[:size])
        del self.buffer[:size]
        return body

    # Understanding

    def _parse(self, head: bytes) -> None:
        line, _, rest = head.partition(b"\n")
        self.raw_requestline = line + b"\n"
        self.rfile = io.BytesIO(rest)
        if not self.parse_request() or self.request_version == "HTTP/0.9":
            raise _Refused(HTTPStatus.BAD_REQUEST)
        if self.headers.get("Host") is None and self.request_version != "HTTP/1.0":
            raise _Refused(HTTPStatus.BAD_REQUEST)  # RFC 9112, section 3.2

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> NoReturn:
        """Turn what `parse_request` objects to into our own answer, which repeats nothing the client sent."""
        del message, explain
        raise _Refused(HTTPStatus(code))

    def handle_expect_100(self) -> bool:
        """Wait with `100 Continue` until the body is wanted: most requests with one are refused."""
        return True

    def _read_request(self) -> Request:
        authenticated = self._authenticate()
        if self.command not in self.methods:
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, (("Allow", ", ".join(self.methods)),))
        body = b""
        if self.command == "POST":
            body = self._receive_body()
        elif self.headers.get("Transfer-Encoding") is not None or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = self.unread = True  # a body nobody asked for must not be read as a next request
        target, _, query = self.path.partition("?")
        if target[:7].lower() == "http://" or target[:8].lower() == "https://":  # as proxies are asked
            target = "/" + target.split("/", 3)[3] if target.count("/") > 2 else "/"  # noqa: PLR2004 - past the host
        try:
            parameters = parse_qs(query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS) if query else {}
        except ValueError:
            raise _Refused(HTTPStatus.BAD_REQUEST) from None
        trusted = self.proven or authenticated or (self.link.local and self._speaks_for_itself())
        return Request(self.command, unquote(target), parameters, self.headers, trusted, self.control, body)

    def _authenticate(self) -> bool:
        """True when the client knows a password, False when none is needed."""
        self.settings = self.web.current() if self.web is not None else None
        passwords = self.settings.passwords if self.settings is not None else None
        if passwords is None:
            return False
        verdict = passwords.check(self.headers.get("Authorization"))
        if verdict is None:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, (("Retry-After", "1"),))
        if not verdict:
            raise _Refused(HTTPStatus.UNAUTHORIZED, (("WWW-Authenticate", 'Basic realm="hpcwatch"'),))
        return True

    def _speaks_for_itself(self) -> bool:
        """Tell whether a client on this node asks on its own behalf.

        A proxy on the node speaks for others. So does a browser here that a foreign page sends to its own name for
        127.0.0.1 (DNS rebinding), and the Host header shows that name.
        """
        if any(self.headers.get(name) is not None for name in _FORWARDED):
            return False
        return _names_this_node(self.headers.get("Host") or "localhost")

    # Answering

    def _send(self, response: Response) -> None:
        """Send head and body at once, within the write deadline. Raises TimeoutError, OSError."""
        head = self._head(response)
        body = b"" if self.command == "HEAD" else response.body
        sock = self.link.sock
        deadline_s = time.monotonic() + self.limits.write_timeout_s
        sock.settimeout(self.limits.write_timeout_s)
        if self.encrypted:
            sock.sendall(head + body)  # one TLS record stream; encrypting copies anyway
            return
        sent = sock.sendmsg((head, body))
        if sent < len(head) + len(body):
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
            sock.sendall(memoryview(head + body)[sent:])

    def _head(self, response: Response) -> bytes:
        try:
            phrase = HTTPStatus(response.status).phrase
        except ValueError:
            phrase = ""
        lines = [
            f"HTTP/1.1 {response.status:d} {phrase}\r\nServer: hpcwatch\r\nDate: {self.date_time_string()}\r\n",
            f"Content-Type: {response.content_type}\r\nContent-Length: {len(response.body)}\r\n",
        ]
        lines += [f"{name}: {value}\r\n" for name, value in response.headers]
        if self.settings is not None:
            lines += [f"{name}: {value}\r\n" for name, value in self.settings.headers]
        if self.close_connection:
            lines.append("Connection: close\r\n")
        elif self.request_version == "HTTP/1.0":
            lines.append("Connection: keep-alive\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("ascii")

    # Ending

    def _linger(self) -> None:
        """Take what a refused client still sends, for a while: closing at once would destroy the answer."""
        if not self.table.move(self.link, Phase.READING):
            return
        sock, plain = self.link.sock, socket.socket
        self._say_goodbye()
        plain.shutdown(sock, socket.SHUT_WR)
        deadline_s = time.monotonic() + self.limits.linger_s
        left = _LINGER_BYTES
        while left > 0 and (left_s := deadline_s - time.monotonic()) > 0:
            sock.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                received = len(plain.recv(sock, _RECEIVE_BYTES))
                if not received:
                    return
                left -= received

    def _close(self) -> None:
        self._say_goodbye()
        with contextlib.suppress(OSError):
            self.link.sock.close()

    def _say_goodbye(self) -> None:
        """Tell a TLS client that this is the end and no cut; its own goodbye is not waited for."""
        if self.encrypted:
            sock = cast("ssl.SSLSocket", self.link.sock)
            with contextlib.suppress(OSError, ValueError):
                sock.settimeout(0)
                sock.unwrap()


@functools.lru_cache(maxsize=64)  # a scraper sends the same one every time
def _names_this_node(host_header: str) -> bool:
    host = host_header.strip().lower()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if host in {"localhost", _HOST_NAME, _HOST_NAME.partition(".")[0]}:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
