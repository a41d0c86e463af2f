"""Trees into frozen dataclasses, strictly: every key known, every value of its type and within its bounds.

A dataclass is a section: its fields are the keys. Types: bool, int, float, str, `Duration`, `Literal`, nested
dataclasses, `tuple[T, ...]`, `Mapping[str, T]`, and unions of these; a null means the default. What a type cannot say
stands in `field(metadata={...})`, which needs no import (so that plug-ins stay with the standard library):

    help      one line for people: `hpcwatch config init` and the documentation show it
    minimum, maximum   bounds of numbers (durations: seconds or a `Duration`), of list items and mapping values too
    path      True: text must be an absolute path
    secret    True: never shown; keys such as `token` or `connection_string` are secrets anyway
    check     a function of the value that raises ValueError with what was expected

What concerns several keys at once belongs into `__post_init__`, which raises ValueError.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union

import msgspec

from agent.api import Duration
from agent.config import redaction
from agent.config.file import resolve
from agent.config.tree import ConfigError, Node, Scalar, join

T = TypeVar("T")

SHORTEST = Duration(0.001)
LONGEST = Duration(10 * 365 * 86400)

# Names that annotations of Options use and that a type checker's `if TYPE_CHECKING:` may have hidden at run time.
_NAMES = {"Mapping": Mapping, "Duration": Duration, "Literal": Literal}
_SCALAR_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_MAX_SHOWN = 60


def decode(node: Node, cls: type[T], path: str, *, elsewhere: Collection[str] = ()) -> T:
    """Make a `cls` from the mapping under the dotted `path`; keys in `elsewhere` are known but not looked at.

    Raises ConfigError for the first mistake, and TypeError when a field's type is none that a key can have.
    """
    return _Decoder(node, path, {}).section(cls, elsewhere)


def entries(node: Node, path: str) -> Mapping[str, Node]:
    """Return the keys of a mapping undecoded; a null has none. Raises ConfigError for anything else."""
    return _Decoder(node, path, {}).entries()


def field_types(cls: type) -> dict[str, Any]:
    """Return the type of every key of a section."""
    hints = typing.get_type_hints(cls, localns=_NAMES)
    return {field.name: hints[field.name] for field in fields(cls)}


def fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the keys of a section in their order."""
    return [field for field in dataclasses.fields(cls) if field.init]


def unknown_key(node: Node, path: str, key: str, known: Collection[str], *, what: str = "key") -> ConfigError:
    """Make the error for a key that nobody knows, with the nearest that is known."""
    nearest = nearest_name(key, known)
    guess = f"did you mean {nearest}? " if nearest else ""
    listed = f"{'known' if what == 'key' else 'installed'}: {', '.join(known) or 'none'}"
    return ConfigError(node.origin, f"{_shorten(path)}: unknown {what}; {guess}{listed}")


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name that was probably meant; case, dashes and camel case aside."""
    plain = {_plain(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(_plain(name)[:_MAX_SHOWN], plain, n=1)
    return plain[found[0]] if found else None


def members(hint: Any) -> list[Any]:
    """Return the alternatives of a type: itself, unless it is a union."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [member for argument in typing.get_args(hint) for member in members(argument)]
    return [hint]


def sections(hint: Any) -> Iterator[type]:
    """Give the dataclasses that a value of this type holds, alone, in a list or in a mapping."""
    for member in members(hint):
        if _is_section(member):
            yield member
        elif typing.get_origin(member) in (tuple, Mapping):
            for argument in typing.get_args(member):
                yield from sections(argument)


def expected(hint: Any) -> str:
    """Say in words what a value of this type looks like."""
    return " or ".join(dict.fromkeys(_words(member) for member in members(hint) if member is not types.NoneType))


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _shorten(text: str) -> str:
    return text if len(text) <= 2 * _MAX_SHOWN else text[:_MAX_SHOWN] + "..." + text[-_MAX_SHOWN:]


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _words(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if hint is Duration:
        return "a duration such as 500ms, 10s, 5m or 4h"
    if hint in _SCALAR_WORDS:
        return _SCALAR_WORDS[hint]
    if origin is Literal:
        return " or ".join(str(value) for value in typing.get_args(hint))
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return f"a list of {'mappings' if _is_section(item) else expected(item).removeprefix('a ')}"
    if origin is Mapping or _is_section(hint):
        return "a mapping (key: value)"
    raise TypeError(f"{hint!r} is not a type that a configuration key can have")


class _Decoder:
    """One value: where it stands, and what its field's metadata asks of it."""

    def __init__(self, node: Node, path: str, metadata: Mapping[str, Any]) -> None:
        self._node = node
        self._path = path
        self._metadata = metadata

    def entries(self) -> Mapping[str, Node]:
        """Return a mapping's keys; a null has none."""
        if isinstance(self._node.content, Mapping):
            return self._node.content
        if self._node.content is None:
            return {}
        raise self._mismatch(Mapping[str, Any])

    def section(self, cls: type[T], elsewhere: Collection[str] = ()) -> T:
        """Decode a mapping into a dataclass; a null is an empty mapping."""
        content = self.entries()
        hints = field_types(cls)
        known = [*elsewhere, *(name for name in hints if name not in elsewhere)]
        for key, node in content.items():
            if key not in known:
                raise unknown_key(node, join(self._path, key), key, known)
        values = {}
        for field in fields(cls):
            given = content.get(field.name)
            if given is not None and given.content is not None and field.name not in elsewhere:
                below = _Decoder(given, join(self._path, field.name), field.metadata)
                values[field.name] = below.checked(hints[field.name])
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise self._error(f"the key {field.name} is missing; expected {expected(hints[field.name])}")
        try:
            return cls(**values)
        except ValueError as error:
            raise self._error(str(error)) from None

    def checked(self, hint: Any) -> Any:
        """Decode one value and apply the field's own check to the whole of it."""
        value = self.value(hint)
        if "check" in self._metadata:
            try:
                self._metadata["check"](value)
            except ValueError as error:
                raise self._error(str(error)) from None
        return value

    def value(self, hint: Any) -> Any:
        """Decode one value of any type."""
        content = self._node.content
        alternatives = members(hint)
        if isinstance(content, Mapping):
            return self._mapping(content, hint, alternatives)
        if isinstance(content, tuple):
            item = next((typing.get_args(a)[0] for a in alternatives if typing.get_origin(a) is tuple), None)
            if item is None:
                raise self._mismatch(hint)
            return tuple(
                _Decoder(node, f"{self._path}[{index}]", self._metadata).value(item)
                for index, node in enumerate(content)
            )
        return self._scalar(content, hint, alternatives)

    def _mapping(self, content: Mapping[str, Node], hint: Any, alternatives: list[Any]) -> Any:
        for alternative in alternatives:
            if _is_section(alternative):
                return self.section(alternative)
            if typing.get_origin(alternative) is Mapping:
                item = typing.get_args(alternative)[1]
                return {
                    key: _Decoder(node, join(self._path, key), self._metadata).value(item)
                    for key, node in content.items()
                    if node.content is not None
                }
        raise self._mismatch(hint)

    def _scalar(self, content: Scalar, hint: Any, alternatives: list[Any]) -> Any:
        # msgspec refuses unions of Duration with other types, so durations are parsed here.
        simple = [a for a in alternatives if a in _SCALAR_WORDS or a is types.NoneType or _is_literal(a)]
        accepted: Any = Union[tuple(simple)] if simple else None  # noqa: UP007 - its members are known only now
        candidates = [content]
        if self._node.expanded and isinstance(content, str):
            candidates.append(resolve(content))
        for candidate in candidates:
            if accepted is not None:
                try:
                    return self._bounded(msgspec.convert(candidate, accepted, strict=True), hint)
                except msgspec.ValidationError:
                    pass
            if Duration in alternatives and isinstance(candidate, str):
                try:
                    return self._bounded(Duration.parse(candidate), hint)
                except ValueError:
                    pass
        raise self._mismatch(hint)

    def _bounded(self, value: Any, hint: Any) -> Any:
        """Return `value`, or raise when it is outside the field's bounds."""
        if isinstance(value, str) and self._metadata.get("path") and not value.startswith("/"):
            raise self._error(f"expected an absolute path, got {self._shown()}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        if not math.isfinite(value):
            raise self._mismatch(hint)
        is_duration = isinstance(value, Duration)
        low = self._metadata.get("minimum", SHORTEST if is_duration else None)
        high = self._metadata.get("maximum", LONGEST if is_duration else None)
        if (low is None or value >= low) and (high is None or value <= high):
            return value
        low, high = (Duration(b) if is_duration and b is not None else b for b in (low, high))
        bounds = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
        raise self._error(f"expected {' and '.join(bounds)}, got {self._shown()}")

    def _mismatch(self, hint: Any) -> ConfigError:
        return self._error(f"expected {expected(hint)}, got {self._shown()}{self._hint(members(hint))}")

    def _hint(self, alternatives: list[Any]) -> str:
        """Say how to write what was probably meant."""
        content = self._node.content
        if isinstance(content, str):
            hint = _text_hint(content, alternatives)
        elif isinstance(content, (int, float)):
            unit = Duration in alternatives and not isinstance(content, bool)
            hint = f"give it a unit: {self._shown()}s" if unit else "put it in quotes" if str in alternatives else ""
        else:
            hint = ""
        return f"; {hint}" if hint else ""

    def _shown(self) -> str:
        content = self._node.content
        if isinstance(content, (Mapping, tuple)):
            return "a mapping" if isinstance(content, Mapping) else "a list"
        if content is None or isinstance(content, bool):
            return {None: "nothing", True: "true", False: "false"}[content]
        key = self._path.rpartition(".")[2].partition("[")[0]
        text = redaction.MASK if self._metadata.get("secret") else redaction.show(key, str(content))
        return f"the text {_shorten(text)!r}" if isinstance(content, str) else text

    def _error(self, message: str) -> ConfigError:
        return ConfigError(self._node.origin, f"{_shorten(self._path)}: {message}" if self._path else message)


def _is_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is Literal


def _text_hint(content: str, alternatives: list[Any]) -> str:
    meaning = resolve(content)
    literals = [value for a in alternatives if _is_literal(a) for value in typing.get_args(a) if isinstance(value, str)]
    if any(typing.get_origin(a) is tuple for a in alternatives):
        return "write it in brackets: [...]"
    if isinstance(meaning, tuple(a for a in alternatives if a in {bool, int, float})):
        return "leave out the quotes"
    if Duration in alternatives and isinstance(meaning, int):
        return f"give it a unit: {meaning}s"
    if ":" in content and any(_is_section(a) or typing.get_origin(a) is Mapping for a in alternatives):
        return "is a space missing after the colon?"
    nearest = nearest_name(content, literals)
    return f"did you mean {nearest}?" if nearest else ""
