"""Files of a simulated sysfs, procfs or devfs: made, linked and changed as readers of the real ones expect it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def make(directory: Path, files: Mapping[str, str]) -> None:
    """Make a directory with these files, each text ended by a newline as the kernel ends it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(f"{text}\n", encoding="utf-8")


def link(link: Path, target: Path) -> None:
    """Make a relative link, so that the tree can be moved."""
    link.parent.mkdir(parents=True, exist_ok=True)
    # As the kernel writes it: up to a directory above both, and down to the target's own name.
    shared = next(parent for parent in (link.parent, *link.parent.parents) if target.parent.is_relative_to(parent))
    up = Path(*[".."] * len(link.parent.relative_to(shared).parts))
    link.symlink_to(up / target.relative_to(shared))


def replace(path: Path, text: str) -> None:
    """Give the file this content as a whole: readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def rewrite(path: Path, text: str) -> None:
    """Give the file this line as content in place, as an attribute changes: who holds it open reads the new text.

    Raises FileNotFoundError: an attribute is made with its device.
    """
    content = f"{text}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        # The size never changes together with the text, and blank lines fill up: between two calls there is the old
        # text or the new one, where a reader would take the beginning of a number for the number.
        size = os.fstat(descriptor).st_size
        os.pwrite(descriptor, b"\n" * (len(content) - size), size)
        os.pwrite(descriptor, content.ljust(size, b"\n"), 0)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)
