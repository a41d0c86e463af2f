"""Every configuration key of every collector explains itself."""

from __future__ import annotations

import dataclasses

from agent.registry import installed
from agent.reports import usable_collectors


def test_every_option_is_explained_in_a_sentence() -> None:
    for name, collector in usable_collectors(installed()).items():
        for field in dataclasses.fields(collector.Options):
            text = field.metadata.get("help", "")
            assert text[:1].isupper(), (name, field.name)
            assert text.endswith("."), (name, field.name)


def test_every_collector_says_what_it_needs() -> None:
    assert all(collector.needs for collector in usable_collectors(installed()).values())
