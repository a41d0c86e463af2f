"""One HTTP exchange as the application sees it: what was asked, what is answered, and how much a client may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Headers(Protocol):
    """Request headers: one method, names in any case."""

    def get(self, name: str, /) -> str | None:
        """Return the first value of that header, None when the client did not send it."""


@dataclass(frozen=True)
class Request:
    """What a client asked for, already authenticated where the web configuration demands it.

    `path` is percent-decoded and has no query; `query` holds every value of every parameter. `trusted` clients may see
    what is not meant for everybody on the network: those of the control socket, those that proved who they are
    (password or client certificate), and those on this node that no proxy speaks for. `control` is true on the control
    socket only, where POST is possible; `body` is empty for every other method.
    """

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Headers
    trusted: bool
    control: bool = False
    body: bytes = b""


@dataclass(frozen=True)
class Response:
    """A whole answer. `headers` go out as they are, after the server's own (Date, Content-Type, Content-Length).

    Raises ValueError for a line break in a header, which would let the rest of it pass as another header or a body.
    """

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be a header."""
        for text in (self.content_type, *(text for pair in self.headers for text in pair)):
            if not text.isprintable() or not text.isascii():
                raise ValueError(f"not a header: {text!r} (printable ASCII only)")


class Application(Protocol):
    """What answers requests: routing and content negotiation are its business."""

    def answer(self, request: Request) -> Response:
        """Answer one request. Called by many threads at once. HEAD is asked as HEAD; its body is not sent.

        An exception becomes a 500 without details for the client and one log message with them.
        """


@dataclass(frozen=True)
class Limits:
    """How much one client may take from the others. Times are totals, however often a client sends a byte.

    `idle_timeout_s` lies above the usual scrape intervals, so that a scraper's connection outlives the pause between
    two scrapes. `head_timeout_s` covers the TLS handshake too. A client that does not take its answer within
    `write_timeout_s` loses the connection. `linger_s` is how long a refused client may still send, because closing
    on unread data would destroy the answer on its way (RFC 9112, section 9.6).
    """

    connections: int = 128
    request_line_bytes: int = 8 * 1024
    head_bytes: int = 16 * 1024
    body_bytes: int = 64 * 1024
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 150.0
    write_timeout_s: float = 10.0
    linger_s: float = 1.0
