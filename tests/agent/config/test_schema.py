"""Trees into dataclasses: what is accepted, what is refused, and how the refusal helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Duration
from agent.config.file import dump, parse
from agent.config.schema import decode, expected, nearest_name
from agent.config.tree import ConfigError


@dataclass(frozen=True)
class Flapping:
    count: int = field(default=3, metadata={"minimum": 1, "maximum": 100})
    window: Duration = field(default=Duration(3600))


@dataclass(frozen=True)
class Source:
    kind: Literal["syslog", "slurmd"]
    path: str
    from_beginning: bool = False


def check_even(value: int) -> None:
    if value % 2:
        raise ValueError("expected an even number")


@dataclass(frozen=True)
class Options:
    per_cpu: bool = False
    count: int = 1
    ratio: float = field(default=0.5, metadata={"minimum": 0, "maximum": 1})
    name: str = "x"
    slow_interval: Duration = field(default=Duration(60), metadata={"minimum": 1, "maximum": Duration(3600)})
    library: str | None = field(default=None, metadata={"path": True})
    globs: tuple[str, ...] = ("*",)
    paths: tuple[str, ...] = field(default=(), metadata={"path": True})
    ports: tuple[int, ...] = field(default=(), metadata={"minimum": 1})
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Flapping] = field(default_factory=dict)
    flapping: Flapping = field(default_factory=Flapping)
    sources: tuple[Source, ...] = ()
    settle: Literal["auto"] | Duration = "auto"
    expected_count: Literal["auto"] | int = "auto"
    slurm: Literal["auto"] | bool = "auto"
    even: int = field(default=2, metadata={"check": check_even})
    grace: Optional[Duration] = None  # noqa: UP045 - the older spelling of a union
    pin: str = field(default="", metadata={"secret": True})
    api_token: str = ""

    def __post_init__(self) -> None:
        if self.name == "bad" and self.per_cpu:
            raise ValueError("per_cpu goes with no bad name")


def decoded(text: str, **environ: str) -> Options:
    return decode(parse(text, "f.yaml", environ), Options, "c")


def mistake(text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        decoded(text, **environ)
    return str(caught.value)


def test_nothing_gives_the_defaults() -> None:
    assert decoded("") == Options()
    assert decoded("name: null\nglobs:\nflapping: {count: ~}\n") == Options()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("per_cpu: yes", "per_cpu", True),
        ("count: 7", "count", 7),
        ("ratio: 1", "ratio", 1.0),
        ("name: '7'", "name", "7"),
        ("slow_interval: 1.5m", "slow_interval", Duration(90)),
        ("library: /a b", "library", "/a b"),
        ("globs: []", "globs", ()),
        ("globs: [a, 'b*']", "globs", ("a", "b*")),
        ("labels: {a: b, gone: null}", "labels", {"a": "b"}),
        ("limits: {a: {count: 5}}", "limits", {"a": Flapping(count=5)}),
        ("flapping: {window: 10s}", "flapping", Flapping(window=Duration(10))),
        ("sources: [{kind: slurmd, path: /x}]", "sources", (Source("slurmd", "/x"),)),
        ("settle: auto", "settle", "auto"),
        ("settle: 5s", "settle", Duration(5)),
        ("expected_count: 8", "expected_count", 8),
        ("slurm: off", "slurm", False),
        ("grace: 3s", "grace", Duration(3)),
    ],
)
def test_a_value_of_the_right_type_is_taken(text: str, key: str, value: object) -> None:
    taken = getattr(decoded(text), key)
    assert taken == value
    assert type(taken) is type(value)


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ("per_cpu: 1", "c.per_cpu: expected true or false, got 1"),
        ("per_cpu: 'yes'", "c.per_cpu: expected true or false, got the text 'yes'; leave out the quotes"),
        ("count: 1.0", "c.count: expected a whole number, got 1.0"),
        ("count: true", "c.count: expected a whole number, got true"),
        ("count: '3'", "got the text '3'; leave out the quotes"),
        ("count: 010", "c.count: expected a whole number, got the text '010'"),
        ("count: [1]", "c.count: expected a whole number, got a list"),
        ("ratio: 1e999", "c.ratio: expected a number, got inf"),
        ("ratio: .nan", "c.ratio: expected a number, got the text '.nan'"),
        ("ratio: 1.5", "c.ratio: expected at least 0 and at most 1, got 1.5"),
        ("name: 7", "c.name: expected text, got 7; put it in quotes"),
        ("name: no", "c.name: expected text, got false; put it in quotes"),
        ("name: {a: b}", "c.name: expected text, got a mapping"),
        (
            "slow_interval: 10",
            "c.slow_interval: expected a duration such as 500ms, 10s, 5m or 4h, got 10; give it a unit",
        ),
        ("slow_interval: '10'", "got the text '10'; give it a unit: 10s"),
        ("slow_interval: 10 s", "expected a duration such as 500ms, 10s, 5m or 4h, got the text '10 s'"),
        ("slow_interval: -1s", "expected a duration such as"),
        ("slow_interval: 500ms", "c.slow_interval: expected at least 1s and at most 1h, got the text '500ms'"),
        ("slow_interval: 2h", "expected at least 1s and at most 1h, got the text '2h'"),
        ("grace: 0s", "c.grace: expected at least 1ms and at most 3650d, got the text '0s'"),
        (f"grace: {'9' * 400}d", "c.grace: expected "),
        ("grace: yes", "c.grace: expected a duration such as 500ms, 10s, 5m or 4h, got true"),
        ("library: lib.so", "c.library: expected an absolute path, got the text 'lib.so'"),
        ("globs: mlx5_*", "c.globs: expected a list of text, got the text 'mlx5_*'; write it in brackets: [...]"),
        ("globs: {a: b}", "c.globs: expected a list of text, got a mapping"),
        ("globs: [a, 7]", "c.globs[1]: expected text, got 7; put it in quotes"),
        ("globs: [~]", "c.globs[0]: expected text, got nothing"),
        ("paths: [/a, b]", "c.paths[1]: expected an absolute path, got the text 'b'"),
        ("ports: [1, 0]", "c.ports[1]: expected at least 1, got 0"),
        ("labels: {a: 7}", "c.labels.a: expected text, got 7; put it in quotes"),
        ("labels: [a]", "c.labels: expected a mapping (key: value), got a list"),
        ("labels: a:b", "got the text 'a:b'; is a space missing after the colon?"),
        ("limits: {a: {cuont: 5}}", "c.limits.a.cuont: unknown key; did you mean count? known: count, window"),
        ("flapping: 3", "c.flapping: expected a mapping (key: value), got 3"),
        ("flapping: {count: 0}", "c.flapping.count: expected at least 1 and at most 100, got 0"),
        ("sources: {kind: slurmd}", "c.sources: expected a list of mappings, got a mapping"),
        ("sources: [{kind: slurmd}]", "c.sources[0]: the key path is missing; expected text"),
        ("sources: [{kind: slurmd, path: ~}]", "c.sources[0]: the key path is missing"),
        (
            "sources: [{kind: sylog, path: /x}]",
            "c.sources[0].kind: expected syslog or slurmd, got the text 'sylog'; did",
        ),
        (
            "settle: Auto",
            "c.settle: expected auto or a duration such as 500ms, 10s, 5m or 4h, got the text 'Auto'; did you",
        ),
        ("expected_count: 1.5", "c.expected_count: expected auto or a whole number, got 1.5"),
        ("slurm: maybe", "c.slurm: expected auto or true or false, got the text 'maybe'"),
        ("even: 3", "c.even: expected an even number"),
        ("name: bad\nper_cpu: true", "c: per_cpu goes with no bad name"),
        ("Globs: []", "c.Globs: unknown key; did you mean globs?"),
        ("slow-interval: 5s", "c.slow-interval: unknown key; did you mean slow_interval?"),
        ("slowInterval: 5s", "c.slowInterval: unknown key; did you mean slow_interval?"),
        ("quux: 5s", "c.quux: unknown key; known: per_cpu, count"),
        ("quux: null", "c.quux: unknown key"),
    ],
)
def test_a_wrong_value_says_what_was_expected(text: str, expected_text: str) -> None:
    assert expected_text in mistake(text)


def test_the_mistake_names_the_line_of_its_own_key() -> None:
    text = "name: x\nflapping:\n  count: 3\n  window: 1\nports:\n- 7\n- x\n"
    assert mistake(text).startswith("f.yaml:7: c.ports[1]: ")
    assert mistake(text.replace("- x", "- 8")).startswith("f.yaml:4: c.flapping.window: ")


def test_a_number_out_of_a_variable_is_a_number_where_one_is_wanted() -> None:
    text = "{count: '${N}', name: '${N}', ratio: '${R}', per_cpu: '${B}', slurm: '${B}', settle: '${D}'}"
    options = decoded(text, N="12", R="0.25", B="yes", D="5s")
    assert (options.count, options.name, options.ratio) == (12, "12", 0.25)
    assert (options.per_cpu, options.slurm, options.settle) == (True, True, Duration(5))
    assert "c.count: expected a whole number, got the text 'many'" in mistake("count: ${N}", N="many")
    assert "c.ratio: expected at least 0" in mistake("ratio: ${N}", N="-1")


@pytest.mark.parametrize("text", ["pin: [hunter2]", "pin: hunter2", "api_token: 4711", "pin: 4711", "count: '${api}'"])
def test_a_secret_is_never_repeated(text: str) -> None:
    try:
        decoded(text.replace("pin: hunter2", "pin: {a: hunter2}"), api="http://u:hunter2@h/")
    except ConfigError as error:
        assert "hunter2" not in str(error)  # noqa: PT017 - not each of them is a mistake
        assert "4711" not in str(error)  # noqa: PT017


def test_a_long_value_is_cut() -> None:
    assert len(mistake(f"count: {'x' * 5000}")) < 300
    assert len(mistake(f"{'k' * 100}: 1")) < 500


def test_keys_known_elsewhere_are_suggested_and_not_looked_at() -> None:
    tree = parse("enabled: 17\nname: y\n", "f.yaml", {})
    assert decode(tree, Options, "c", elsewhere=("enabled",)).name == "y"
    with pytest.raises(ConfigError, match="did you mean enabled\\? known: enabled, per_cpu"):
        decode(parse("enable: true", "f.yaml", {}), Options, "c", elsewhere=("enabled",))


@dataclass(frozen=True)
class Unsupported:
    when: complex = 0j


def test_a_field_type_that_no_key_can_have_is_the_programmers_mistake() -> None:
    with pytest.raises(TypeError, match="complex"):
        decode(parse("when: 3", "f.yaml", {}), Unsupported, "c")


def test_types_are_told_in_words() -> None:
    assert expected(tuple[Source, ...]) == "a list of mappings"
    assert expected(Mapping[str, str] | None) == "a mapping (key: value)"
    assert expected(Literal["a", "b"]) == "a or b"


def test_a_far_name_is_not_suggested() -> None:
    assert nearest_name("zzz", ["interval", "timeout"]) is None
    assert nearest_name("", []) is None


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["5s", "auto", "/x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["kind", "path", "count", "window", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*Options.__dataclass_fields__, "other"]), values, max_size=5))
def test_any_tree_decodes_or_gives_one_line(tree: dict[str, Any]) -> None:
    try:
        options = decode(parse(dump(tree), "f.yaml", {}), Options, "c")
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - decoding is the other good outcome
        return
    assert isinstance(options, Options)
    assert all(isinstance(glob, str) for glob in options.globs)
