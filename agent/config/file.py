"""Configuration text: YAML files and `--set` assignments read into trees, variables replaced, trees written as YAML.

YAML 1.1 with its traps taken out: dates, base-60 and octal numbers stay text, a duplicate key is refused, and aliases
cannot expand into more than `MAX_NODES` values. Everything wrong with a text is a `ConfigError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import yaml

from agent.config import redaction
from agent.config.tree import ConfigError, Node, Scalar, join

MAX_BYTES = 1 << 20
MAX_NODES = 20_000  # after aliases are expanded; the largest sensible configuration has some hundreds
MAX_DEPTH = 32

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_TRUE = ("true", "yes", "on")
_BOOL = re.compile(r"true|True|TRUE|yes|Yes|YES|on|On|ON|false|False|FALSE|no|No|NO|off|Off|OFF")
_NULL = re.compile(r"~|null|Null|NULL|")
# What a plain scalar may be besides text, with the first characters by which PyYAML finds the pattern.
_RESOLVERS = {
    "null": (_NULL, [*"~nN", ""]),
    "bool": (_BOOL, [*"tTyYoOfFnN"]),
    "int": (_INT, [*"-+0123456789"]),
    "float": (_FLOAT, [*"-+.0123456789"]),
    "merge": (re.compile("<<"), ["<"]),
}
_VARIABLE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_TOML_TABLE = re.compile(r"^[ \t]*\[\[?[A-Za-z][\w.\"-]*\]\]?[ \t\r]*(?:#.*)?$", re.MULTILINE)
_TOML_ASSIGNMENT = re.compile(r"^[ \t]*[\w.\"-]+[ \t]*=", re.MULTILINE)
_TOML = "this looks like TOML; configuration is YAML (`hpcwatch migrate telegraf FILE` converts a Telegraf file)"
_MAX_WIDTH = 1 << 30


class _Loader(yaml.SafeLoader):
    """Composes nodes; which plain scalars are not text is decided by `_RESOLVERS` alone."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the name and form that PyYAML looks for


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or `_Loader` would not read back as text."""


for _kind, (_regexp, _first) in _RESOLVERS.items():
    _full = re.compile(rf"(?:{_regexp.pattern})\Z")
    _Loader.add_implicit_resolver(_TAG + _kind, _full, _first)
    _Dumper.add_implicit_resolver(_TAG + _kind, _full, _first)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Only double quotes can write a line break as \\n: the other styles break the line.
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def read(path: str, environ: Mapping[str, str]) -> Node:
    """Read one file. Raises ConfigError when it cannot be read or is not one YAML document of at most 1 MiB."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path with a NUL is the user's mistake, not ours
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(path, f"cannot read the configuration file: {reason}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(path, f"larger than {MAX_BYTES} bytes; is this a configuration file?")
    return parse(_decode(path, data), path, environ)


def parse(text: str, name: str, environ: Mapping[str, str]) -> Node:
    """Parse YAML text; an empty text is a null. `name` is the file in origins and errors (ConfigError)."""
    root = _build(text, lambda line: f"{name}:{line}", environ)
    if root.content is not None and not isinstance(root.content, Mapping):
        expected = "expected sections such as `agent:` and `collectors:`, with `key: value` below them"
        raise ConfigError(root.origin, _TOML if _looks_like_toml(text) else expected)
    return root


def read_assignment(text: str, environ: Mapping[str, str]) -> Node:
    """Read `a.b=VALUE` (dotted path, YAML value) into a tree. Raises ConfigError."""
    path, equals, value = text.partition("=")
    path = path.strip()
    keys = path.split(".")
    # A mapping may hold a secret under any of its keys.
    shown = "{...}" if value.lstrip().startswith(("{", "[")) else redaction.show(keys[-1], value)
    origin = f"--set {path}={shown}" if equals else f"--set {text}"
    if not equals or not all(keys) or len(keys) > MAX_DEPTH:
        raise ConfigError(origin, "expected key=value with a dotted key, such as agent.interval=5s")
    node = _build(value, lambda _: origin, environ, path)
    for key in reversed(keys):
        node = Node({key: node}, origin)
    return node


def resolve(text: str) -> Scalar:
    """Return what unquoted YAML `text` stands for: a number, a boolean, or the text itself."""
    if _BOOL.fullmatch(text):
        return text.lower() in _TRUE
    try:
        return int(text) if _INT.fullmatch(text) else float(text) if _FLOAT.fullmatch(text) else text
    except ValueError:  # more digits than int() takes
        return text


def dump(tree: object, *, flow: bool = False) -> str:
    """Write plain values as YAML that `parse` reads back to the same values; `flow` gives it on one line."""
    text: str = yaml.dump(
        _escape(tree),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=_MAX_WIDTH if flow else 120,
    )
    return text.removesuffix("...\n").strip("\n") if flow else text


def _escape(tree: object) -> object:
    if isinstance(tree, Mapping):
        return {key: _escape(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_escape(value) for value in tree]
    return tree.replace("${", "$${") if isinstance(tree, str) else tree


def _decode(path: str, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(path, "this is UTF-16 text; save it as UTF-8")
    if b"\0" in data:
        raise ConfigError(path, "this is a binary file, not YAML text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}", f"byte 0x{data[error.start]:02x} is not UTF-8 text") from None


def _looks_like_toml(text: str) -> bool:
    return bool(_TOML_TABLE.search(text) and _TOML_ASSIGNMENT.search(text))


def _build(text: str, where: Callable[[int], str], environ: Mapping[str, str], path: str = "") -> Node:
    try:
        root = _Loader(text).get_single_node()
        return Node(None, where(1)) if root is None else _Builder(where, environ).build(root, path, 0)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"character U+{ord(text[error.position]):04X} is not allowed in YAML text"
        raise ConfigError(where(line), message) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = _TOML if _looks_like_toml(text) else f"not valid YAML: {_explain(error)}"
        raise ConfigError(where(mark.line + 1 if mark else 1), message) from None
    except yaml.YAMLError as error:
        raise ConfigError(where(1), f"not valid YAML: {error}") from None
    except RecursionError:  # PyYAML composes by recursion, before MAX_DEPTH can be counted
        raise ConfigError(where(1), f"nested deeper than {MAX_DEPTH} levels") from None


def _explain(error: yaml.MarkedYAMLError) -> str:
    """Say what is wrong and, for the mistakes people make, what to write instead."""
    problem = error.problem or "unexpected text"
    if "'\\t'" in problem:
        return "a tab where only spaces may stand; indent with spaces"
    if "single document" in (error.context or ""):
        return "a second document begins here; one file holds one document"
    context = f" {error.context}" if error.context else ""
    if error.context_mark and error.problem_mark and error.context_mark.line != error.problem_mark.line:
        context += f" that begins in line {error.context_mark.line + 1}"
    hints = (
        ("alias", "a value that begins with * must be quoted"),
        ("anchor", "a value that begins with & must be quoted"),
        ("flow", "brackets and braces must be closed, and values with special characters quoted"),
        ("mapping values", "quote a value that contains ': ', and check the indentation"),
        ("expected ':'", "a colon and a space are missing, or a quote or bracket is not closed"),
        ("cannot start any token", "quote a value that begins with a special character"),
    )
    hint = next((hint for word, hint in hints if word in problem + context), "")
    return problem + context + (f"; {hint}" if hint else "")


class _Builder:
    """Turns PyYAML's nodes into ours, counting every visit so that aliases cannot multiply without end."""

    def __init__(self, where: Callable[[int], str], environ: Mapping[str, str]) -> None:
        self._where = where
        self._environ = environ
        self._left = MAX_NODES

    def build(self, node: yaml.Node, path: str, depth: int) -> Node:
        """Convert `node`, which stands under the dotted `path`."""
        self._left -= 1
        if self._left < 0:
            raise self._error(node, path, f"more than {MAX_NODES} values once aliases are expanded")
        if depth > MAX_DEPTH:
            raise self._error(node, path, f"nested deeper than {MAX_DEPTH} levels")
        origin = self._origin(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = (self.build(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(node.value))
            return Node(tuple(items), origin)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(self._mapping(node, path, depth), origin)
        raise self._unsupported(node, path)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Node]:
        own: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                inherited = self._inherited(value_node, path, depth) | inherited
                continue
            key = self._key(key_node, path)
            below = join(path, key)
            if key in own:
                raise self._error(key_node, below, f"duplicate key, first written at {own[key].origin}")
            # The key's line, not the value's: a block scalar or an alias begins elsewhere.
            own[key] = replace(self.build(value_node, below, depth + 1), origin=self._origin(key_node))
        return inherited | own

    def _inherited(self, node: yaml.Node, path: str, depth: int) -> dict[str, Node]:
        """Return what `<<: *anchor` or `<<: [*first, *second]` brings; the first that has a key wins."""
        built = self.build(node, path, depth + 1)
        merged: dict[str, Node] = {}
        for source in built.content if isinstance(built.content, tuple) else (built,):
            if not isinstance(source.content, Mapping):
                raise self._error(node, path, "expected a mapping or a list of mappings after <<")
            merged = {**source.content, **merged}
        return merged

    def _key(self, node: yaml.Node, path: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, path, "a key must be plain text; quote values with braces, as in '{{ name }}'")
        return self._checked(node, path, node.value)

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Node:
        origin = self._origin(node)
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            text = self._expand(node, path)
            return Node(self._checked(node, path, text), origin, expanded=text != node.value)
        if kind == "null":
            return Node(None, origin)
        content = resolve(node.value) if kind in {"bool", "int", "float"} else node.value
        if isinstance(content, str):
            raise self._unsupported(node, path)
        return Node(content, origin)

    def _expand(self, node: yaml.ScalarNode, path: str) -> str:
        def substitute(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            variable = _NAME.fullmatch(match[1] or "")
            if variable is None:
                message = "expected ${NAME} or ${NAME:-default}, not nested; a literal ${ is written $${"
                raise self._error(node, path, message)
            name, default = variable.groups()
            value = self._environ.get(name)
            if not value and default is not None:
                return str(default)
            if value is None:
                message = f"environment variable {name} is not set; set it or write ${{{name}:-default}}"
                raise self._error(node, path, message)
            return value

        return _VARIABLE.sub(substitute, node.value)

    def _checked(self, node: yaml.Node, path: str, text: str) -> str:
        """Refuse what no file name, label or HTTP field can carry."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._error(node, path, "text that is not valid Unicode") from None
        if "\0" in text:
            raise self._error(node, path, "text with a NUL character")
        return text

    def _origin(self, node: yaml.Node) -> str:
        return self._where(node.start_mark.line + 1)

    def _error(self, node: yaml.Node, path: str, message: str) -> ConfigError:
        return ConfigError(self._origin(node), f"{path}: {message}" if path else message)

    def _unsupported(self, node: yaml.Node, path: str) -> ConfigError:
        tag = node.tag.replace(_TAG, "!!")
        return self._error(node, path, f"the YAML tag {tag} does not fit here; quote a value that begins with !")
