from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from agent.sim import tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Who reads while a file changes must find one of these, as the kernel would show them.
LONG, SHORT = "938220114700123", "0"


@pytest.fixture
def attribute(tmp_path: Path) -> Path:
    tree.make(tmp_path / "counters", {"port_xmit_data": LONG})
    return tmp_path / "counters" / "port_xmit_data"


@pytest.mark.parametrize("text", [SHORT, LONG, LONG + "9", "4: ACTIVE"])
def test_a_rewritten_attribute_holds_the_new_line_and_nothing_of_the_old(attribute: Path, text: str) -> None:
    tree.rewrite(attribute, text)
    assert attribute.read_text() == f"{text}\n"


def test_who_holds_an_attribute_open_reads_the_new_text(attribute: Path) -> None:
    descriptor = os.open(attribute, os.O_RDONLY)
    try:
        tree.rewrite(attribute, "17")
        assert os.pread(descriptor, 64, 0) == b"17\n"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("old", "new"), [(LONG, SHORT), (SHORT, LONG), ("4: ACTIVE", "1: DOWN")])
def test_a_reader_in_between_sees_the_old_text_or_the_new_one(
    attribute: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """An adapter that is reset counts from 0: in a torn text, the 0 would have the end of the old number behind it."""
    tree.rewrite(attribute, old)
    seen = [(len(old) + 1, old)]

    def watched(call: Callable[..., object]) -> Callable[..., object]:
        def watch(descriptor: int, *arguments: object) -> object:
            outcome = call(descriptor, *arguments)
            seen.append((os.fstat(descriptor).st_size, attribute.read_text().rstrip("\n")))
            return outcome

        return watch

    for name in ("pwrite", "ftruncate"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    tree.rewrite(attribute, new)
    assert {text for _, text in seen} == {old, new}
    for (size, text), (next_size, next_text) in pairwise(seen):
        assert size == next_size or text == next_text


def test_an_attribute_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tree.rewrite(tmp_path / "state", "4: ACTIVE")
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_file_leaves_no_draft(tmp_path: Path) -> None:
    tree.replace(tmp_path / "new" / "stat", "cpu 1\n")
    tree.replace(tmp_path / "new" / "stat", "cpu 2\n")
    assert [(path.name, path.read_text()) for path in (tmp_path / "new").iterdir()] == [("stat", "cpu 2\n")]
