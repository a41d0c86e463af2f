"""Basic authentication against bcrypt hashes, as the exporter-toolkit's `basic_auth_users` holds them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
import threading
from collections.abc import Mapping

_HASH = re.compile(r"\$2[aby]\$(?:0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}", re.ASCII)
_BCRYPT_BYTES = 72  # what bcrypt looks at; tools that make hashes cut longer passwords off here
_MAX_CHECKS = 8
_MAX_REMEMBERED = 64


def is_hash(text: str) -> bool:
    """Tell whether this is a bcrypt hash."""
    return _HASH.fullmatch(text) is not None


class Passwords:
    """Who may come in. bcrypt is slow by design, so a success is remembered, as a keyed hash and never as a password.

    Failures are not remembered: they would fill the memory with what attackers send. They cost the same whether the
    user exists or not, and one is computed at a time, so guessing takes one core at most.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        import bcrypt  # noqa: PLC0415 - only who configures passwords pays for it

        self._bcrypt_check = bcrypt.checkpw
        self._users = {name.encode(): hashed.encode() for name, hashed in users.items()}
        self._decoy = next(iter(self._users.values()))
        self._key = secrets.token_bytes(32)
        self._known: set[bytes] = set()
        self._room = threading.BoundedSemaphore(_MAX_CHECKS)
        self._one_at_a_time = threading.Lock()

    def check(self, authorization: str | None) -> bool | None:
        """Check an Authorization header. None when too many checks are waiting already: ask again later."""
        scheme, _, encoded = (authorization or "").strip().partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        if not colon:
            return False
        password = password[:_BCRYPT_BYTES]
        fingerprint = hashlib.blake2b(
            len(name).to_bytes(4, "big") + name + password, key=self._key, digest_size=32
        ).digest()
        if fingerprint in self._known:
            return True
        if not self._room.acquire(blocking=False):
            return None
        try:
            with self._one_at_a_time:
                return self._verify(name, password, fingerprint)
        finally:
            self._room.release()

    def _verify(self, name: bytes, password: bytes, fingerprint: bytes) -> bool:
        if fingerprint in self._known:  # settled while this thread waited
            return True
        hashed = self._users.get(name)
        try:
            matches = self._bcrypt_check(password, hashed or self._decoy)
        except ValueError:  # a NUL byte, which older bcrypt modules refuse
            return False
        if hashed is None or not matches:
            return False
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        self._known.add(fingerprint)
        return True
