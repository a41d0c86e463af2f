"""The configuration as text: in force with secrets masked, and the commented default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from agent.api import Collector, Duration
from agent.config import Sources, load
from agent.config.schema import fields
from agent.config.settings import AgentSettings, CollectorKeys, PrometheusSettings, Settings
from agent.config.text import default_text, show
from agent.config.tree import ConfigError

DOCUMENTATION = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


@dataclass(frozen=True)
class Flapping:
    count: int = field(default=3, metadata={"help": "Episodes within the window.", "minimum": 1})
    window: Duration = field(default=Duration(3600), metadata={"help": "How far back episodes count."})


@dataclass(frozen=True)
class Auth:
    token: str | None = None
    token_file: str | None = None


@dataclass(frozen=True)
class File:
    path: str = field(metadata={"help": "What to read."})


@dataclass(frozen=True)
class LinkOptions:
    settle: Literal["auto"] | Duration = field(default="auto", metadata={"help": "How long signals may be late."})
    flapping: Flapping = field(default_factory=Flapping, metadata={"help": "When a link is called flapping."})
    devices: tuple[str, ...] = field(default=("mlx5_*",), metadata={"help": "Globs of device names."})
    files: tuple[File, ...] = ()
    auth: Auth = field(default_factory=Auth)
    url: str = "http://h/"
    pin: str = field(default="", metadata={"secret": True})
    headers: Mapping[str, str] = field(default_factory=dict)


class Link(Collector):
    name = "link"
    metrics = ()
    needs = "an RDMA device"
    Options = LinkOptions
    interval = Duration(15)


class Plain(Collector):
    name = "plain"
    metrics = ()


@dataclass(frozen=True)
class SendOptions:
    connection_string: str | None = field(default=None, metadata={"help": "Where to."})


CLASSES: Mapping[str, type[Collector]] = {"link": Link, "plain": Plain}
OUTPUTS: Mapping[str, type] = {"send": SendOptions}


def loaded(directory: Path, text: str) -> Settings:
    path = directory / "c.yaml"
    path.write_text(text)
    sources = Sources(files=[str(path)], directory=str(directory / "none"), environ={})
    return load(sources, collector_names=list(CLASSES), output_names=list(OUTPUTS))


def shown(directory: Path, text: str) -> str:
    return show(loaded(directory, text), CLASSES, OUTPUTS)


# --- in force


def test_every_default_is_filled_in(tmp_path: Path) -> None:
    tree = yaml.safe_load(shown(tmp_path, "agent: {interval: 7s}\ncollectors: {plain: {enabled: off}}"))
    assert list(tree) == ["agent", "collectors", "outputs"]
    assert list(tree["agent"]) == [f.name for f in fields(AgentSettings)]
    assert tree["agent"]["interval"] == "7s"
    assert tree["collectors"]["plain"] == {"enabled": False, "interval": "7s", "timeout": "5s"}
    assert tree["collectors"]["link"] == {
        "enabled": "auto",
        "interval": "15s",
        "timeout": "5s",
        "settle": "auto",
        "flapping": {"count": 3, "window": "1h"},
        "devices": ["mlx5_*"],
        "files": [],
        "auth": {"token": None, "token_file": None},
        "url": "http://h/",
        "pin": "",
        "headers": {},
    }
    assert list(tree["outputs"]["prometheus"]) == [f.name for f in fields(PrometheusSettings)]
    assert tree["outputs"]["send"] == {"enabled": False, "connection_string": None}


def test_what_is_shown_loads_to_the_same_settings(tmp_path: Path) -> None:
    text = """
        agent: {interval: 1.5s, labels: {rack: '12', price: '$${X}'}, sku: '010'}
        collectors: {link: {timeout: 500ms, settle: 2s, devices: ['*', 'yes'], flapping: {count: 7}}}
        outputs: {prometheus: {compat: [dcgm], names: {node_infiniband: false}}}
    """
    first = loaded(tmp_path, text)
    second = loaded(tmp_path, show(first, CLASSES, OUTPUTS))
    assert second.agent == first.agent
    assert second.prometheus == first.prometheus
    assert second.options("link", LinkOptions) == first.options("link", LinkOptions)
    assert second.agent.labels["price"] == "${X}"


def test_secrets_are_masked_and_paths_are_shown(tmp_path: Path) -> None:
    text = """
        agent: {labels: {site_token: hunter2}}
        collectors:
          link:
            auth: {token: hunter2, token_file: /etc/hpcwatch/token}
            url: https://user:hunter2@h/
            pin: hunter2
            headers: {api_key: hunter2, x: 'https://h/?sig=hunter2'}
        outputs: {send: {connection_string: InstrumentationKey=hunter2}}
    """
    result = shown(tmp_path, text)
    assert "hunter2" not in result
    assert "/etc/hpcwatch/token" in result
    # Without the classes the same secrets are recognised by their keys.
    assert "hunter2" not in show(loaded(tmp_path, text.replace("pin: hunter2", "pin: x")), {}, {})


def test_what_the_files_say_is_shown_for_a_collector_that_cannot_be_imported(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "collectors: {plain: {anything: [1]}}")
    tree = yaml.safe_load(show(settings, {}, {}))
    assert tree["collectors"]["plain"]["anything"] == [1]


def test_a_mistake_in_own_keys_is_not_shown_as_if_in_force(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collectors\.plain\.anything: unknown key"):
        shown(tmp_path, "collectors: {plain: {anything: [1]}}")


# --- the commented default

UNCOMMENT = re.compile(r"^( *)#(?=\S)", re.MULTILINE)


def test_the_default_file_configures_nothing(tmp_path: Path) -> None:
    assert loaded(tmp_path, default_text(CLASSES, OUTPUTS)) == loaded(tmp_path, "")


def test_the_default_file_uncommented_says_the_defaults(tmp_path: Path) -> None:
    text = UNCOMMENT.sub(r"\1", default_text(CLASSES, OUTPUTS))
    everything = loaded(tmp_path, text)
    nothing = loaded(tmp_path, "")
    assert everything.agent == nothing.agent
    assert everything.prometheus == nothing.prometheus
    assert everything.options("link", LinkOptions) == LinkOptions()
    assert everything.collectors["link"].enabled is None
    assert everything.collectors["link"].interval == Link.interval
    assert show(everything, CLASSES, OUTPUTS) == show(nothing, CLASSES, OUTPUTS)


def test_each_single_key_can_be_uncommented_alone(tmp_path: Path) -> None:
    text = default_text(CLASSES, OUTPUTS)
    places = list(UNCOMMENT.finditer(text))
    assert len(places) > 20
    for place in places:
        alone = text[: place.start()] + place[1] + text[place.end() :]
        settings = loaded(tmp_path, alone)
        assert settings.options("link", LinkOptions) == LinkOptions()
        assert settings.agent == AgentSettings()


def test_every_key_is_there_and_explained() -> None:
    text = default_text(CLASSES, OUTPUTS)
    for cls in (AgentSettings, PrometheusSettings, CollectorKeys, Flapping, File):
        for key in fields(cls):
            assert key.metadata["help"] in text
            assert re.search(rf"\b{key.name}: ", text)
    assert "#flapping: {count: 3, window: 1h}" in text
    assert "# Needs: an RDMA device" in text


def test_no_line_is_too_long_to_read() -> None:
    assert max(map(len, default_text(CLASSES, OUTPUTS).splitlines())) <= 120


# --- the documentation


def test_the_documentation_names_every_key() -> None:
    text = DOCUMENTATION.read_text()
    for cls in (AgentSettings, PrometheusSettings, CollectorKeys):
        for key in fields(cls):
            assert f"`{key.name}`" in text, key.name


def test_the_examples_of_the_documentation_load(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert examples
    for number, example in enumerate(examples):
        path = tmp_path / f"{number}.yaml"
        path.write_text(example)
        sources = Sources(files=[str(path)], directory=str(tmp_path / "none"), environ={"RACK": "r1"})
        load(sources, collector_names=["host", "infiniband", "textfile"], output_names=[])
