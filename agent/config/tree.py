"""Configuration values as trees that remember where each was written, how trees merge, and how a mistake is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_MAX_MESSAGE = 1000

Scalar = str | int | float | bool | None


class ConfigError(Exception):
    """A mistake in the configuration. `str()` is one line: where it stands, the key, what was expected."""

    def __init__(self, where: str, message: str) -> None:
        text = f"{where}: {message[:_MAX_MESSAGE]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


@dataclass(frozen=True)
class Node:
    """A value with the place it was written at (`file:line`, or the command-line option).

    A null is kept, so that it can remove what an earlier file said. `expanded` marks text that came out of a
    variable: such text stands for a number or a boolean where one is wanted.
    """

    content: Mapping[str, Node] | tuple[Node, ...] | Scalar
    origin: str
    expanded: bool = False

    def plain(self) -> object:
        """Return the value without positions; nulls inside a mapping are left out."""
        if isinstance(self.content, Mapping):
            return {key: node.plain() for key, node in self.content.items() if node.content is not None}
        if isinstance(self.content, tuple):
            return [node.plain() for node in self.content]
        return self.content


def merge(below: Node, above: Node) -> Node:
    """Lay `above` over `below`: mappings merge key by key, anything else (a null too) replaces."""
    if not isinstance(below.content, Mapping) or not isinstance(above.content, Mapping):
        return above
    merged = dict(below.content)
    for key, node in above.content.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, above.origin)


def join(path: str, key: str) -> str:
    """Give the dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else key
