"""Which configuration values are secrets, and how text that may hold one is shown."""

from __future__ import annotations

import re

MASK = "********"

_SECRET_WORDS = frozenset({"password", "passwd", "passphrase", "secret", "token", "key", "credential", "credentials"})
# Storage keys and shared access signatures travel inside connection strings and URL queries.
_ASSIGNED = re.compile(r"((?:key|token|secret|password|passwd|pwd|sig|signature)\s*=\s*)[^\s;&,]+", re.IGNORECASE)
# Greedy up to the last @: a password may hold a raw / or @, and hiding too much beats showing half of one.
_USER_PASSWORD = re.compile(r"(://[^\s:@/?#]*:)\S*@")
_USER_ONLY = re.compile(r"(://)[^\s:@/?#]+@")


def is_secret(key: str) -> bool:
    """Tell whether values under `key` are secrets: `token`, `api_key`, `connection_string`; not `token_file`."""
    words = re.split(r"[^a-z0-9]+", key.lower())
    return words[-1] in _SECRET_WORDS or words[-2:] == ["connection", "string"]


def mask(text: str) -> str:
    """Hide the secrets inside a text: user and password of a URL, and the value after `key=`, `token=`, `sig=`."""
    text = _USER_PASSWORD.sub(rf"\g<1>{MASK}@", text)
    text = _USER_ONLY.sub(rf"\g<1>{MASK}@", text)
    return _ASSIGNED.sub(rf"\g<1>{MASK}", text)


def show(key: str, text: str) -> str:
    """Give what may be shown of the value `text` under `key`."""
    return MASK if text and is_secret(key) else mask(text)
