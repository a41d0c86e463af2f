"""Configuration text: what YAML may say, how variables are replaced, how a mistake is told."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config.file import MAX_BYTES, dump, parse, read, read_assignment
from agent.config.tree import ConfigError, Node, merge

NO_VARIABLES: dict[str, str] = {}


def plain(text: str, **environ: str) -> object:
    return parse(text, "f.yaml", environ).plain()


def mistake(text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml", environ)
    return str(caught.value)


# --- values


def test_scalars_get_their_types() -> None:
    assert plain("a: {b: true, c: off, d: 3, e: 1.5, f: 1e3, g: text, h: -7}") == {
        "a": {"b": True, "c": False, "d": 3, "e": 1.5, "f": 1000.0, "g": "text", "h": -7}
    }


@pytest.mark.parametrize("text", ["010", "2024-01-31", "12:30:45", "0x1F", "1_000", ".inf", ".nan", "=", "y", "n"])
def test_what_yaml_would_surprisingly_convert_stays_text(text: str) -> None:
    assert plain(f"a: {text}") == {"a": text}


def test_keys_are_their_text_even_where_yaml_sees_a_boolean_or_number() -> None:
    assert plain("{on: a, 7: b, no: c}") == {"on": "a", "7": "b", "no": "c"}


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "---\n...\n", "null", "\ufeff"[:0]])
def test_empty_text_is_a_null(text: str) -> None:
    assert parse(text, "f.yaml", NO_VARIABLES).content is None


def test_windows_line_ends_are_fine() -> None:
    assert plain("agent:\r\n  interval: 10s\r\n") == {"agent": {"interval": "10s"}}


def test_every_key_knows_its_line() -> None:
    tree = parse("agent:\n  interval: 10s\n\n  labels:\n    rack: |\n      text\n", "f.yaml", NO_VARIABLES)
    assert isinstance(tree.content, dict)
    agent = tree.content["agent"].content
    assert isinstance(agent, dict)
    labels = agent["labels"].content
    assert isinstance(labels, dict)
    assert [node.origin for node in (agent["interval"], agent["labels"], labels["rack"])] == [
        "f.yaml:2",
        "f.yaml:4",
        "f.yaml:5",
    ]


def test_list_items_know_their_lines() -> None:
    tree = parse("a:\n- x\n- y\n", "f.yaml", NO_VARIABLES)
    assert isinstance(tree.content, dict)
    items = tree.content["a"].content
    assert isinstance(items, tuple)
    assert [item.origin for item in items] == ["f.yaml:2", "f.yaml:3"]


# --- aliases


def test_anchors_and_merge_keys_work_and_own_keys_win() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {y: 3, <<: *a}\nc: {<<: [{x: 9}, *a]}\n"
    assert plain(text) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 9, "y": 2}}


def test_a_merge_key_needs_a_mapping() -> None:
    assert mistake("a: {<<: 3}").startswith("f.yaml:1: a: expected a mapping or a list of mappings after <<")


def test_aliases_cannot_expand_without_end() -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    assert "more than 20000 values" in mistake("a0: &a0 [x]\n" + levels)


@pytest.mark.parametrize(
    "text", ["a: &a [*a]", "a: &a {b: *a}", "a: &a {<<: *a}", "[" * 10_000, f"a: {'[' * 50}{']' * 50}"]
)
def test_endless_nesting_is_refused(text: str) -> None:
    assert "nested deeper than 32 levels" in mistake(text)


# --- mistakes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n  b: 1\n  b: 2\n", "f.yaml:3: a.b: duplicate key, first written at f.yaml:2"),
        ('1: a\n"1": b\n', "f.yaml:2: 1: duplicate key"),
        ("a:\n\tb: 1\n", "f.yaml:2: not valid YAML: a tab where only spaces may stand"),
        ("a: {}\n---\nb: {}\n", "f.yaml:2: not valid YAML: a second document begins here"),
        ("a: b: c\n", "f.yaml:1: not valid YAML: mapping values are not allowed here; quote a value"),
        ("a:\n  'b\n", "f.yaml:3: not valid YAML: found unexpected end of stream while scanning a quoted scalar"),
        ("a: [1, 2\nb: 3\n", "f.yaml:2: not valid YAML"),
        ("include: [*_total]\n", "f.yaml:1: not valid YAML: found undefined alias"),
        ("include: [*ib*]\n", "a value that begins with * must be quoted"),
        ("exclude: [!mlx5_0]\n", "brackets and braces must be closed, and values with special characters quoted"),
        ("exclude: !mlx5_0\n", "f.yaml:1: exclude: the YAML tag !mlx5_0 does not fit here"),
        ("a: !!binary aGk=\n", "f.yaml:1: a: the YAML tag !!binary does not fit here"),
        ("a: !!python/object:os.system x\n", "f.yaml:1: a: the YAML tag !!python/object:os.system does not fit"),
        ("a: !!int x\n", "f.yaml:1: a: the YAML tag !!int does not fit"),
        ("a: !!set {x}\n", "f.yaml:1: a: the YAML tag !!set does not fit"),
        ("a: {{ name }}\n", "f.yaml:1: a: a key must be plain text"),
        ("- a\n- b\n", "f.yaml:1: expected sections such as `agent:`"),
        ("interval = 10s\n", "f.yaml:1: expected sections such as `agent:`"),
        ('[agent]\n  interval = "10s"\n', "f.yaml:2: this looks like TOML"),
        ('# x\n[[inputs.infiniband]]\n  a = "b"\n', "this looks like TOML"),
        ("a: b\n\x01", "f.yaml:2: character U+0001 is not allowed"),
        ('a: "\\ud800"\n', "f.yaml:1: a: text that is not valid Unicode"),
        ('a: "\\0"\n', "f.yaml:1: a: text with a NUL character"),
        ("%YAML 3.0\n---\na: b\n", "f.yaml:1: not valid YAML"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_its_place(text: str, expected: str) -> None:
    message = mistake(text)
    assert expected in message
    assert "\n" not in message


def test_a_message_stays_one_line_whatever_the_key_holds() -> None:
    assert mistake('"a\\nb\\e": {x: 1, x: 2}').startswith("f.yaml:1: a\\nb\\x1b.x: duplicate key")


# --- files


def unreadable(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(str(path), NO_VARIABLES)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfagent: {}\n")
    assert read(str(path), NO_VARIABLES).plain() == {"agent": {}}
    path.write_bytes(b"\xef\xbb\xbf[agent]\ninterval = 5\n")
    assert "this looks like TOML" in unreadable(path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("agent: {}".encode("utf-16"), "this is UTF-16 text; save it as UTF-8"),
        (b"\x7fELF\x02\x01\x00", "this is a binary file"),
        (b"a: b\nc: \xe4\n", ":2: byte 0xe4 is not UTF-8 text"),
        (b"#" * (MAX_BYTES + 1), "larger than 1048576 bytes"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(data)
    assert expected in unreadable(path)


def test_an_unreadable_file_says_why(tmp_path: Path) -> None:
    assert "cannot read the configuration file: No such file" in unreadable(tmp_path / "none.yaml")
    assert "cannot read the configuration file: Is a directory" in unreadable(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot read the configuration file: Too many levels" in unreadable(tmp_path / "loop")


def test_a_path_with_a_nul_is_no_traceback() -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        read("a\0b", NO_VARIABLES)


# --- variables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${A}", "x"),
        ("pre-${A}-${B}", "pre-x-y"),
        ("${A:-d}", "x"),
        ("${NONE:-d}", "d"),
        ("${NONE:-}", ""),
        ("${EMPTY}", ""),
        ("${EMPTY:-d}", "d"),
        ("${NONE:-http://h:80/}", "http://h:80/"),
        ("$${A}", "${A}"),
        ("$A costs $5", "$A costs $5"),
        ("${REFERS}", "${A}"),
    ],
)
def test_variables_are_replaced_in_text(text: str, expected: str) -> None:
    environ = {"A": "x", "B": "y", "EMPTY": "", "REFERS": "${A}"}
    assert parse(f"k: '{text}'", "f.yaml", environ).plain() == {"k": expected}


def test_variables_in_keys_and_comments_are_left_alone() -> None:
    assert plain("'${A}': b  # ${MISSING}\n", A="x") == {"${A}": "b"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${NONE}", "environment variable NONE is not set; set it or write ${NONE:-default}"),
        ("${1A}", "expected ${NAME} or ${NAME:-default}"),
        ("${}", "expected ${NAME} or ${NAME:-default}"),
        ("${A", "a literal ${ is written $${"),
        ("${A:-${B}}", "not nested"),
        ("${A-d}", "expected ${NAME} or ${NAME:-default}"),
    ],
)
def test_a_variable_that_cannot_be_replaced_is_an_error(text: str, expected: str) -> None:
    message = mistake(f"a:\n  b: '{text}'")
    assert message.startswith("f.yaml:2: a.b: ")
    assert expected in message


def test_a_variable_cannot_bring_what_text_cannot_hold() -> None:
    assert "not valid Unicode" in mistake("a: ${X}", X="\udcff")


# --- assignments


def test_an_assignment_is_a_dotted_path_and_a_yaml_value() -> None:
    tree = read_assignment("collectors.infiniband.device_include=[mlx5_*, '${X}']", {"X": "y"})
    assert tree.plain() == {"collectors": {"infiniband": {"device_include": ["mlx5_*", "y"]}}}


def test_an_assignment_may_hold_an_equals_sign_or_nothing() -> None:
    assert read_assignment("a.b=c=d", NO_VARIABLES).plain() == {"a": {"b": "c=d"}}
    assert read_assignment("a.b=", NO_VARIABLES).plain() == {"a": {}}


@pytest.mark.parametrize("text", ["a.b", "", "=x", "a..b=1", ".a=1", "a.=1", ".".join("a" * 40) + "=1"])
def test_an_assignment_without_a_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set .*expected key=value"):
        read_assignment(text, NO_VARIABLES)


def test_mistakes_in_an_assignment_name_it() -> None:
    with pytest.raises(ConfigError, match=r"^--set a\.b='x: not valid YAML"):
        read_assignment("a.b='x", NO_VARIABLES)
    with pytest.raises(ConfigError, match=r"^--set a\.b=\$\{NONE\}: a\.b: environment variable NONE"):
        read_assignment("a.b=${NONE}", NO_VARIABLES)


@pytest.mark.parametrize("text", ["a.token=hunter2'", "a={token: hunter2", "a.url=${X}http://u:hunter2@h/"])
def test_secrets_in_an_assignment_are_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_assignment(text + ": '", NO_VARIABLES)
    assert "hunter2" not in str(caught.value)


# --- merging

scalars = st.none() | st.booleans() | st.integers() | st.text(string.ascii_letters, max_size=3)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
mappings = st.dictionaries(st.sampled_from("abcd"), trees, max_size=4)


def node_of(value: object, origin: str = "here") -> Node:
    if isinstance(value, dict):
        return Node({key: node_of(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list):
        return Node(tuple(node_of(item, origin) for item in value), origin)
    assert value is None or isinstance(value, (bool, int, str))
    return Node(value, origin)


def merged(*values: object) -> object:
    tree = Node({}, "base")
    for value in values:
        tree = merge(tree, node_of(value))
    return tree.plain()


def reference(below: object, above: object) -> object:
    """Give RFC 7386's merge patch, which says the same in other words: null removes, mappings merge, else replace."""
    if not isinstance(above, dict):
        return above
    result = dict(below) if isinstance(below, dict) else {}
    for key, value in above.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = reference(result.get(key), value)
    return result


@given(mappings, mappings, mappings)
def test_merging_is_a_merge_patch_applied_in_order(first: object, second: object, third: object) -> None:
    expected: object = {}
    for value in (first, second, third):
        expected = reference(expected, value)
    assert merged(first, second, third) == expected


@given(mappings)
def test_merging_with_nothing_or_with_itself_changes_nothing(value: object) -> None:
    assert merged(value) == merged(value, {}) == merged(value, value)


def test_lists_and_scalars_replace_and_null_removes() -> None:
    assert merged({"a": [1, 2], "b": {"c": 1, "d": 2}, "e": 1}, {"a": [3], "b": {"d": None}, "e": None}) == {
        "a": [3],
        "b": {"c": 1},
    }


def test_a_value_keeps_the_place_of_the_file_that_said_it() -> None:
    tree = merge(node_of({"a": {"b": 1, "c": 2}}, "first"), node_of({"a": {"c": 3}}, "second"))
    assert isinstance(tree.content, dict)
    a = tree.content["a"].content
    assert isinstance(a, dict)
    assert (a["b"].origin, a["c"].origin) == ("first", "second")


# --- writing

writable = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
    | st.sampled_from(["1e6", "010", "yes", "null", "~", "2024-01-31", "${A}", "$${", "<<", "1_0", "-", "=", ".5", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters, min_size=1), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(string.ascii_letters, min_size=1), writable), st.booleans())
def test_what_is_written_reads_back_the_same(tree: dict[str, object], flow: bool) -> None:  # noqa: FBT001
    text = dump(tree, flow=flow)
    assert parse(text, "f.yaml", NO_VARIABLES).plain() == tree
    if flow:
        assert "\n" not in text


@given(st.dictionaries(st.text(string.ascii_letters, min_size=1), st.text(string.printable, max_size=8)))
def test_other_yaml_readers_see_the_same_text(tree: dict[str, str]) -> None:
    expected = {key: value.replace("${", "$${") for key, value in tree.items()}
    assert yaml.safe_load(dump(tree)) == expected


# --- never a traceback


def outcome(read_text: Callable[[str], Node], text: str) -> str:
    """Say what came of it: whatever is no ConfigError fails the test."""
    try:
        read_text(text)
    except ConfigError as error:
        return str(error)
    return "loaded"


# fmt: off
fragments = st.sampled_from([
    "a", "agent", "interval", ":", ": ", "- ", "\n", "\n  ", "\t", "[", "]", "{", "}", "*", "&x ", "*x", "!", "!!", "'",
    '"', "|", ">", "#", "%", "@", "`", "<<", "?", ",", "---", "...", "${", "${A}", "\r", "\x85", "\ufeff", "\0", "=",
    "!!int ", "!!float ", "!!bool ", "!!null ", "!!str ", "!!map ", "!!timestamp ", "1", "9" * 5000, ".", "e", "~",
    "\\x", '"\\ud800"', '"\\0"', "\u2028", "[[x]]", "\x07",
])
# fmt: on


@settings(max_examples=400)
@given(st.lists(fragments, max_size=25).map("".join) | st.text(max_size=40))
def test_any_text_loads_or_gives_one_line(text: str) -> None:
    for read_text in (
        lambda text: parse(text, "f.yaml", {"A": "1"}),
        lambda text: read_assignment("a.b=" + text, {"A": "1"}),
    ):
        assert len(outcome(read_text, text).splitlines()) == 1


@given(st.binary(max_size=60))
def test_any_bytes_load_or_give_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    assert len(outcome(lambda name: read(name, NO_VARIABLES), str(path)).splitlines()) == 1
