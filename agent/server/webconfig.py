"""The web configuration file: TLS, passwords and headers, in the format of Prometheus' exporter-toolkit.

Format: https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md
Differences are listed in docs/web-config.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from agent.server.passwords import Passwords, is_hash

if TYPE_CHECKING:
    from agent.server.tls import Tls

log = logging.getLogger("http")

_HEADERS: Mapping[str, tuple[str, ...]] = {  # with the values allowed, none for any
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
_NOT_SUPPORTED = {
    "rate_limit": "answers are ready before they are asked for",
    "tls_server_config.cert": "use cert_file",
    "tls_server_config.key": "use key_file",
    "tls_server_config.client_ca": "use client_ca_file",
}
_SECTIONS = ("tls_server_config", "http_server_config", "basic_auth_users")
_Signature = tuple[int, int, int]


class WebConfigError(ValueError):
    """The file cannot be used. One line that names the file, the key and what was expected."""


@dataclass(frozen=True)
class WebSettings:
    """What one reading of the file gave. `tls` and `passwords` are None where not configured."""

    tls: Tls | None = None
    passwords: Passwords | None = None
    headers: tuple[tuple[str, str], ...] = ()


class WebConfig:
    """A web configuration file and what it says now.

    The file, and the certificates it names, may change at any time: `current` notices. Raises WebConfigError when the
    file is unusable at the start; later, the last usable settings stay in force and the log tells why.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._watched: tuple[tuple[Path, _Signature | None], ...] = ()
        self._problem = ""
        self._settings = self._read()

    @property
    def settings(self) -> WebSettings:
        """The settings as last read, without a look at the files."""
        return self._settings

    def current(self) -> WebSettings:
        """Return the settings, read again if a file has changed. Never raises; costs one stat per file."""
        if self._unchanged():
            return self._settings
        with self._lock:
            if not self._unchanged():
                try:
                    self._settings = self._read()
                except WebConfigError as error:
                    self._report(str(error))
                else:
                    self._report("")
            return self._settings

    def _unchanged(self) -> bool:
        return all(_sign(path) == signature for path, signature in self._watched)

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error("%s; the previous web configuration stays in force", problem)
        elif not problem:
            log.info("%s or its certificates changed and are in force", self._path)
        self._problem = problem

    def _read(self) -> WebSettings:
        # Signed before they are read: what changes meanwhile is read again.
        self._watched = ((self._path, _sign(self._path)), *self._watched[1:])
        try:
            content = yaml.load(self._path.read_bytes(), _Loader)  # noqa: S506 - a safe loader, stricter
        except OSError as error:
            raise WebConfigError(f"{self._path}: cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise WebConfigError(f"{self._path}: {_one_line(error)}") from error
        except (ValueError, RecursionError) as error:  # a date that is none; brackets without end
            raise WebConfigError(f"{self._path}: not usable: {error}") from error
        section = _Section(self._path, "", content, _SECTIONS)
        tls = self._read_tls(section)
        http = section.child("http_server_config", ("http2", "headers"))
        http.take("http2", bool, default=True)  # HTTP/1.1 is spoken here, which every HTTP/2 client can
        return WebSettings(tls, _read_passwords(section), _read_headers(http))

    def _read_tls(self, parent: _Section) -> Tls | None:
        if not parent.content.get("tls_server_config"):
            self._watched = self._watched[:1]
            return None
        from agent.server.tls import TlsError, TlsOptions, make_tls  # noqa: PLC0415 - ssl is large

        defaults = {field.name: field.default for field in fields(TlsOptions)}
        section = parent.child("tls_server_config", tuple(defaults))
        values: dict[str, Any] = {}
        for key in section.content:
            if key.endswith("_file"):
                # Relative to the file that names it, wherever the agent was started.
                values[key] = self._path.parent / section.take(key, str)
            elif isinstance(defaults[key], tuple):
                values[key] = section.take_list(key)
            else:
                values[key] = section.take(key, type(defaults[key]))
        options = TlsOptions(**values)
        self._watched = (*self._watched[:1], *((path, _sign(path)) for path in options.files))
        try:
            return make_tls(options)
        except TlsError as error:
            raise section.error(error.key, str(error)) from error


class _Section:
    """One mapping of the file: hands out checked values and says where the wrong ones are."""

    def __init__(self, path: Path, name: str, content: object, known: tuple[str, ...] | None) -> None:
        self._path = path
        self._name = name
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise self.error("", f"expected keys with values, got {type(content).__name__}")
        self.content: dict[str, Any] = content
        for key in content:
            if not isinstance(key, str):
                raise self.error("", f"expected text as key, got {key!r}")
            full = f"{name}.{key}" if name else key
            if full in _NOT_SUPPORTED:
                raise self.error(key, f"not supported: {_NOT_SUPPORTED[full]}")
            if known is not None and key not in known:
                raise self.error(key, f"unknown key; expected one of {', '.join(known)}")

    def error(self, key: str, text: str) -> WebConfigError:
        where = ".".join(filter(None, (self._name, key)))
        return WebConfigError(f"{self._path}: {where}: {text}" if where else f"{self._path}: {text}")

    def child(self, key: str, known: tuple[str, ...] | None) -> _Section:
        return _Section(self._path, f"{self._name}.{key}" if self._name else key, self.content.get(key), known)

    def take(self, key: str, kind: type, *, default: object = None) -> Any:
        value = self.content.get(key, default)
        if not isinstance(value, kind):
            raise self.error(key, f"expected {'true or false' if kind is bool else 'text'}, got {value!r:.60}")
        return value

    def take_list(self, key: str) -> tuple[str, ...]:
        value = self.content[key]
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(key, f"expected a list of texts, got {value!r:.60}")
        return tuple(value)


def _read_headers(http: _Section) -> tuple[tuple[str, str], ...]:
    section = http.child("headers", tuple(_HEADERS))
    pairs = []
    for name in section.content:
        value = section.take(name, str)
        allowed = _HEADERS[name]
        if allowed and value not in allowed:
            raise section.error(name, f"expected {' or '.join(allowed)}, got {value!r:.60}")
        if not value.isprintable() or not value.isascii():
            raise section.error(name, "expected printable ASCII characters on one line")
        if value:
            pairs.append((name, value))
    return tuple(pairs)


def _read_passwords(parent: _Section) -> Passwords | None:
    section = parent.child("basic_auth_users", None)
    for name in section.content:
        if ":" in name:
            raise section.error(name, "a user's name cannot have a colon in basic authentication")
        hashed = section.content[name]
        # The value is not shown: who puts a password here by mistake should not find it in the log.
        if not isinstance(hashed, str) or not is_hash(hashed):
            raise section.error(name, "expected a bcrypt hash such as `htpasswd -nBC 10 USER` makes ($2y$10$...)")
    return Passwords(section.content) if section.content else None


class _Loader(yaml.SafeLoader):
    """YAML's safe types; a key given twice is refused instead of half ignored."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key_node.value}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {text}" if mark is not None else text


def _sign(path: Path) -> _Signature | None:
    """Return what changes when a file is replaced or rewritten; None when it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
