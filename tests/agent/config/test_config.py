"""Where configuration comes from, which of it wins, and what is refused."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.api import Duration
from agent.config import Sources, load
from agent.config.settings import AgentSettings, Names, PrometheusSettings, Settings
from agent.config.tree import ConfigError

COLLECTORS = ("host", "infiniband", "gpu")
OUTPUTS = ("remote_write",)


@dataclass(frozen=True)
class Options:
    slow_interval: Duration = field(default=Duration(60))
    device_include: tuple[str, ...] = ()


def loaded(
    directory: Path,
    *texts: str,
    fragments: Mapping[str, str] | None = None,
    default: str | None = None,
    sets: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
    sysfs: str | None = None,
    procfs: str | None = None,
) -> Settings:
    """Load configuration files of these texts, conf.d with these fragments, and whatever else is given."""
    files = []
    for number, text in enumerate(texts):
        path = directory / f"{number}.yaml"
        path.write_text(text)
        files.append(str(path))
    for name, text in (fragments or {}).items():
        (directory / "conf.d").mkdir(exist_ok=True)
        (directory / "conf.d" / name).write_text(text)
    if default is not None:
        (directory / "default.yaml").write_text(default)
    sources = Sources(
        files=files,
        directory=str(directory / "conf.d"),
        sets=sets,
        sysfs=sysfs,
        procfs=procfs,
        default_file=str(directory / "default.yaml"),
        environ=environ or {},
    )
    return load(sources, collector_names=COLLECTORS, output_names=OUTPUTS)


def mistake(
    directory: Path, *texts: str, sets: tuple[str, ...] = (), fragments: Mapping[str, str] | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(directory, *texts, sets=sets, fragments=fragments)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- sources


def test_no_configuration_at_all_gives_the_defaults(tmp_path: Path) -> None:
    settings = loaded(tmp_path)
    assert settings.agent == AgentSettings()
    assert settings.agent.interval == Duration(10)
    assert settings.prometheus == PrometheusSettings(
        listen="0.0.0.0:9753", compat=(), names=Names(node_infiniband=True)
    )
    assert list(settings.collectors) == list(COLLECTORS)
    assert not any(collector.mentioned for collector in settings.collectors.values())
    assert settings.outputs["remote_write"].enabled is False


def test_the_default_file_is_read_if_there_and_only_without_others(tmp_path: Path) -> None:
    assert loaded(tmp_path, default="agent: {sku: a}").agent.sku == "a"
    assert loaded(tmp_path, "agent: {interval: 1s}", default="agent: {sku: a}").agent == AgentSettings(
        interval=Duration(1)
    )


def test_a_default_file_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").symlink_to("gone.yaml")
    assert "default.yaml: cannot read the configuration file" in mistake(tmp_path)


def test_later_sources_win(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        "agent: {interval: 1s, sku: first, kmsg: /first, state_dir: /first, socket: /first, sysfs: /first}",
        "agent: {sku: second, kmsg: /second, state_dir: /second, socket: /second, sysfs: /second}",
        fragments={
            "10.yaml": "agent: {kmsg: /ten, state_dir: /ten, socket: /ten, sysfs: /ten}",
            "20.yml": "agent: {state_dir: /twenty, socket: /twenty, sysfs: /twenty}",
        },
        sets=("agent.socket=/set", "agent.sysfs=/set"),
        sysfs="/option",
    )
    agent = settings.agent
    assert agent.interval == Duration(1)
    assert (agent.sku, agent.kmsg, agent.state_dir) == ("second", "/ten", "/twenty")
    assert (agent.socket, agent.sysfs) == ("/set", "/option")


def test_only_yaml_files_of_the_directory_count(tmp_path: Path) -> None:
    bad = "no: [yaml"
    names = ("a.yaml~", "a.yaml.bak", ".a.yaml", "a.yaml.swp", "README", "a.conf", "a.yaml.dpkg-old")
    fragments = {**dict.fromkeys(names, bad), "b.yml": "agent: {sku: b}"}
    assert loaded(tmp_path, fragments=fragments).agent.sku == "b"


def test_an_empty_file_removes_nothing(tmp_path: Path) -> None:
    assert loaded(tmp_path, "agent: {sku: a}", "# nothing\n", "").agent.sku == "a"


def test_null_brings_the_default_back(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        "agent: {sku: a, interval: 1s, labels: {rack: r1, row: r2}}\ncollectors: {gpu: {enabled: true}}",
        "agent: {sku: null, labels: {rack: null}}\ncollectors: {gpu: null}",
    )
    assert settings.agent == AgentSettings(interval=Duration(1), labels={"row": "r2"})
    assert settings.collectors["gpu"].enabled is None
    assert not settings.collectors["gpu"].mentioned


def test_sections_without_keys_are_fine(tmp_path: Path) -> None:
    text = "agent:\ncollectors:\n  gpu:\noutputs:\n  prometheus:\n  remote_write:\n"
    assert loaded(tmp_path, text) == loaded(tmp_path)


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    sources = Sources(files=[str(tmp_path / "none.yaml")], directory=str(tmp_path), environ={})
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read the configuration file: No such file"):
        load(sources, collector_names=COLLECTORS, output_names=OUTPUTS)


def test_the_directory_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "conf.d").write_text("")
    assert "conf.d: cannot list the configuration directory: Not a directory" in mistake(tmp_path)


def test_a_directory_named_like_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "conf.d" / "x.yaml").mkdir(parents=True)
    assert "x.yaml: cannot read the configuration file: Is a directory" in mistake(tmp_path)


def test_path_options_are_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent = loaded(tmp_path, sysfs="sys", procfs="/other/proc").agent
    assert (agent.sysfs, agent.procfs) == (str(tmp_path / "sys"), "/other/proc")


def test_variables_come_from_the_environment(tmp_path: Path) -> None:
    text = "agent: {labels: {rack: '${RACK}'}, interval: '${EVERY:-7s}'}"
    agent = loaded(tmp_path, text, environ={"RACK": "r 1"}).agent
    assert (agent.labels, agent.interval) == ({"rack": "r 1"}, Duration(7))


def test_the_environment_is_not_shown() -> None:
    assert "hunter2" not in repr(Sources(environ={"PASSWORD": "hunter2"}))
    assert Sources().environ is os.environ


# --- collectors


def test_common_keys_are_split_from_the_collectors_own(tmp_path: Path) -> None:
    text = (
        "collectors: {infiniband: {enabled: off, interval: 15s, timeout: 500ms, slow_interval: 5m, more: [1, {a: b}]}}"
    )
    settings = loaded(tmp_path, text).collectors["infiniband"]
    assert (settings.enabled, settings.mentioned) == (False, True)
    assert (settings.interval, settings.timeout) == (Duration(15), Duration(0.5))
    assert settings.options == {"slow_interval": "5m", "more": [1, {"a": "b"}]}


@pytest.mark.parametrize(("text", "enabled"), [("auto", None), ("true", True), ("'${E:-no}'", False), ("null", None)])
def test_enabled_is_auto_true_or_false(tmp_path: Path, text: str, enabled: bool | None) -> None:  # noqa: FBT001
    assert loaded(tmp_path, f"collectors: {{gpu: {{enabled: {text}}}}}").collectors["gpu"].enabled is enabled


def test_own_keys_become_the_collectors_options(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "collectors: {infiniband: {interval: 1s, slow_interval: 5m, device_include: [mlx5_*]}}")
    assert settings.options("infiniband", Options) == Options(Duration(300), ("mlx5_*",))
    assert settings.options("gpu", Options) == Options()


def test_a_mistake_in_own_keys_names_file_line_and_neighbour(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "collectors:\n  infiniband:\n    slow_intervall: 5m\n")
    with pytest.raises(ConfigError) as caught:
        settings.options("infiniband", Options)
    assert str(caught.value) == (
        f"{tmp_path}/0.yaml:3: collectors.infiniband.slow_intervall: unknown key; did you mean slow_interval? "
        "known: enabled, interval, timeout, slow_interval, device_include"
    )


def test_a_mistake_names_the_file_that_made_it(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        "collectors: {infiniband: {slow_interval: 1m}}",
        fragments={"9.yaml": "\n\ncollectors: {infiniband: {device_include: x}}"},
    )
    with pytest.raises(ConfigError, match=r"/conf\.d/9\.yaml:3: collectors\.infiniband\.device_include: expected"):
        settings.options("infiniband", Options)


# --- outputs


def test_outputs_are_split_the_same_way(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "outputs: {remote_write: {enabled: true, slow_interval: 2m}}")
    output = settings.outputs["remote_write"]
    assert (output.enabled, output.mentioned, output.options) == (True, True, {"slow_interval": "2m"})
    assert settings.output_options("remote_write", Options) == Options(Duration(120))


@pytest.mark.parametrize("address", ["0.0.0.0:9753", "[::]:9753", ":9753", "localhost:0", "[fe80::1%eth0]:80"])
def test_an_address_to_listen_on_is_taken(tmp_path: Path, address: str) -> None:
    assert loaded(tmp_path, f"outputs: {{prometheus: {{listen: '{address}'}}}}").prometheus.listen == address


@pytest.mark.parametrize(
    "address",
    [
        "9753",
        "host",
        "host:",
        "host:x",
        "host:65536",
        "host:00000080",
        "::1:80",
        "[::1]",
        "http://h:80",
        "[h]:80",
        "h:-1",
        "a b:1",
        "[::1:80",
    ],
)
def test_an_impossible_address_is_refused(tmp_path: Path, address: str) -> None:
    message = mistake(tmp_path, f"outputs:\n  prometheus:\n    listen: '{address}'")
    assert "0.yaml:3: outputs.prometheus.listen: " in message


@pytest.mark.parametrize("what", ["collectors: {gpu_later: {}}", "collectors: {azure: {enabled: true}}"])
def test_what_this_version_does_not_have_cannot_be_switched_on(tmp_path: Path, what: str) -> None:
    assert "0.yaml:1: collectors." in mistake(tmp_path, what)


def test_what_later_versions_have_may_stand_there_switched_off(tmp_path: Path) -> None:
    (tmp_path / "later.yaml").write_text(
        "collectors: {azure: {enabled: false, imds: x}, logs: {enabled: auto}}\n"
        "outputs: {azure_monitor: {enabled: false, connection_string: null}}\n"
    )
    sources = Sources(files=[str(tmp_path / "later.yaml")], directory="/nonexistent")
    settings = load(sources, collector_names=["host"], output_names=[])
    assert settings.later == ("collectors.azure", "collectors.logs", "outputs.azure_monitor")
    assert list(settings.collectors) == ["host"]


# --- labels


def test_labels_are_text_and_empty_ones_are_absent(tmp_path: Path) -> None:
    labels = loaded(tmp_path, "agent: {labels: {cluster: blue, rack: '12', row: '', job: j}}").agent.labels
    assert labels == {"cluster": "blue", "rack": "12", "job": "j"}


# --- mistakes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("agnet: {}", ":1: agnet: unknown key; did you mean agent? known: agent, collectors, outputs"),
        ("\ngpu: {}", ":2: gpu: unknown key; did you mean collectors.gpu?"),
        ("prometheus: {}", "prometheus: unknown key; did you mean outputs.prometheus?"),
        ("agent: {intervall: 5s}", "agent.intervall: unknown key; did you mean interval? known: interval, labels"),
        ("agent: [a]", "agent: expected a mapping (key: value), got a list"),
        (
            "agent:\n  interval:5s",
            "agent: expected a mapping (key: value), got the text 'interval:5s'; is a space missing",
        ),
        ("agent: {interval: 50ms}", "agent.interval: expected at least 100ms and at most 1d, got the text '50ms'"),
        ("agent: {interval: 25h}", "agent.interval: expected at least 100ms and at most 1d, got the text '25h'"),
        ("agent: {state_dir: lib}", "agent.state_dir: expected an absolute path, got the text 'lib'"),
        ("agent: {sku: ''}", "agent.sku: expected a text that is not empty"),
        ("agent: {labels: {rack: 12}}", "agent.labels.rack: expected text, got 12; put it in quotes"),
        ("agent: {labels: {a-b: c}}", "agent.labels.a-b: expected a label name of letters"),
        ("agent: {labels: {__a: c}}", "agent.labels.__a: expected a label name"),
        ("agent: {labels: {ä: c}}", "expected a label name"),
        ("agent: {labels: {uuid: c}}", "agent.labels.uuid: this label is set by hpcwatch itself"),
        ("collectors: {infinband: {}}", "unknown collector; did you mean infiniband? installed: host, infiniband, gpu"),
        ("collectors: {gpu: false}", "collectors.gpu: expected a mapping (key: value); did you mean {enabled: false}?"),
        ("collectors: {gpu: [x]}", "collectors.gpu: expected a mapping (key: value), got a list"),
        ("collectors: gpu", "collectors: expected a mapping (key: value), got the text 'gpu'"),
        ("collectors: {gpu: {enabled: maybe}}", "collectors.gpu.enabled: expected auto or true or false"),
        ("collectors: {gpu: {interval: 0s}}", "collectors.gpu.interval: expected at least 100ms and at most 1d"),
        ("collectors: {gpu: {timeout: 2d}}", "collectors.gpu.timeout: expected at least 100ms and at most 1d"),
        ("collectors: {gpu: {timeout: 5}}", "collectors.gpu.timeout: expected a duration such as"),
        ("outputs: {promtheus: {}}", "unknown output; did you mean prometheus? installed: prometheus, remote_write"),
        ("outputs: {remote_write: {enabled: auto}}", "outputs.remote_write.enabled: expected true or false"),
        ("outputs: {prometheus: {compat: dcgm}}", "outputs.prometheus.compat: expected a list of"),
        (
            "outputs: {prometheus: {compat: [dcgn]}}",
            "compat[0]: expected dcgm or telegraf, got the text 'dcgn'; did you",
        ),
        ("outputs: {prometheus: {names: {node_infinband: false}}}", "did you mean node_infiniband?"),
        ("outputs: {prometheus: {web_config: web.yml}}", "outputs.prometheus.web_config: expected an absolute path"),
    ],
)
def test_a_mistake_is_refused_with_its_key_and_what_was_expected(tmp_path: Path, text: str, expected: str) -> None:
    message = mistake(tmp_path, text)
    assert message.startswith(f"{tmp_path}/0.yaml:")
    assert expected in message


def test_a_mistake_on_the_command_line_names_the_option(tmp_path: Path) -> None:
    message = mistake(tmp_path, sets=("agent.intervall=5s",))
    assert message.startswith("--set agent.intervall=5s: agent.intervall: unknown key; did you mean interval?")
    assert mistake(tmp_path, sets=("agent=5",)).startswith("--set agent=5: agent: expected a mapping")


def test_settings_can_go_to_a_worker_process(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "agent: {labels: {rack: r}}\ncollectors: {gpu: {enabled: true, x: [1]}}")
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301 - our own bytes
