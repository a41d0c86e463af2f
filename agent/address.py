"""Addresses to listen on, as people write them."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9a-fA-F:.]+(?:%[\w.-]+)?)\]|(?P<host>[^\[\]:/\s]*)):(?P<port>[0-9]{1,5})", re.ASCII
)


class TcpAddress(NamedTuple):
    """Host and port to listen on. An empty host means every address, IPv6 and IPv4; port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        """As `parse_listen` reads it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> TcpAddress:
    """Read `HOST:PORT`, `[IPV6]:PORT` or `:PORT`. Raises ValueError with the accepted forms."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected an address such as 0.0.0.0:9753, [::1]:9753 or :9753, got {text[:60]!r}")
    if match["v6"]:
        ipaddress.IPv6Address(match["v6"])  # raises ValueError, too
    port = int(match["port"])
    if port > 65535:  # noqa: PLR2004 - TCP's
        raise ValueError(f"expected a port from 0 to 65535, got {port} in {text[:60]!r}")
    return TcpAddress(match["v6"] or match["host"] or "", port)
