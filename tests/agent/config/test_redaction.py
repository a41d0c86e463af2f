"""What is a secret, and that nothing of it is shown."""

from __future__ import annotations

import pytest

from agent.config.redaction import MASK, is_secret, mask, show


@pytest.mark.parametrize("key", ["token", "password", "connection_string", "api_key", "client-secret", "Key", "passwd"])
def test_secrets_are_known_by_their_key(key: str) -> None:
    assert is_secret(key)
    assert show(key, "hunter2") == MASK


@pytest.mark.parametrize("key", ["token_file", "password_file", "url", "keys_dir", "username", "monkey", "string", ""])
def test_paths_and_plain_values_are_shown(key: str) -> None:
    assert not is_secret(key)
    assert show(key, "/etc/hpcwatch/x") == "/etc/hpcwatch/x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:hunter2@h:1/p", f"https://user:{MASK}@h:1/p"),
        ("https://user:hunt/er@2@h/p", f"https://user:{MASK}@h/p"),
        ("https://hunter2@h/p", f"https://{MASK}@h/p"),
        ("https://h/p?sv=1&sig=hunter2&x=y", f"https://h/p?sv=1&sig={MASK}&x=y"),
        ("InstrumentationKey=hunter2;Endpoint=https://h/", f"InstrumentationKey={MASK};Endpoint=https://h/"),
        ("http://169.254.169.254", "http://169.254.169.254"),
        ("user@host", "user@host"),
    ],
)
def test_secrets_inside_text_are_masked(text: str, shown: str) -> None:
    assert mask(text) == shown


def test_an_empty_secret_is_shown_as_empty() -> None:
    assert show("token", "") == ""
