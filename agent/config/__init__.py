"""Where configuration comes from, and how it becomes settings: files, `--set` and path options merged and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.config import file
from agent.config.schema import decode, entries, unknown_key
from agent.config.settings import (
    BUILT_IN,
    COLLECTOR_KEYS,
    LABEL_NAME,
    OUTPUT_KEYS,
    RESERVED_LABELS,
    AgentSettings,
    CollectorKeys,
    CollectorSettings,
    OutputKeys,
    OutputSettings,
    PrometheusSettings,
    Settings,
)
from agent.config.tree import ConfigError, Node, join, merge

DEFAULT_FILE = "/etc/hpcwatch/hpcwatch.yaml"
DEFAULT_DIRECTORY = "/etc/hpcwatch/conf.d"

_SECTIONS = ("agent", "collectors", "outputs")


@dataclass(frozen=True)
class Sources:
    """Where configuration comes from, in the order in which later ones win.

    `files` given by name must exist; without any, `default_file` is read if it is there. Then `*.yaml` and `*.yml` of
    `directory` by name, then `sets` (`a.b=value`), then the path options.
    """

    files: Sequence[str] = ()
    directory: str = DEFAULT_DIRECTORY
    sets: Sequence[str] = ()
    sysfs: str | None = None
    procfs: str | None = None
    default_file: str = DEFAULT_FILE
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)  # it holds secrets


# What this version does not have and later ones will: a configuration for both may name it, unless it wants it on.
LATER = {
    "collectors": ("azure", "link_flap", "logs", "workload"),
    "outputs": ("azure_custom_metrics", "azure_logs", "azure_monitor", "remote_write"),
}


def load(sources: Sources, *, collector_names: Sequence[str], output_names: Sequence[str]) -> Settings:
    """Read and check everything but the collectors' and outputs' own keys (`Settings.options`).

    `output_names` are the outputs installed besides `prometheus`. Raises ConfigError, whose text is one line.
    """
    sections = _sections(_read(sources), collector_names, output_names)
    outputs = _named(sections["outputs"], "outputs", "output", ["prometheus", *output_names])
    collectors = _named(sections["collectors"], "collectors", "collector", collector_names)
    prometheus = outputs.pop("prometheus")
    return Settings(
        agent=_agent(sections["agent"]),
        collectors={name: _collector(name, node) for name, node in collectors.items()},
        prometheus=decode(prometheus, PrometheusSettings, "outputs.prometheus"),
        outputs={name: _output(name, node) for name, node in outputs.items()},
        later=tuple(
            f"{section}.{name}"
            for section, installed in (("collectors", collector_names), ("outputs", output_names))
            for name in entries(sections[section], section)
            if name in LATER[section] and name not in installed
        ),
    )


def _read(sources: Sources) -> Node:
    tree = Node({}, BUILT_IN)
    for path in [*(sources.files or _default_files(sources.default_file)), *_fragments(sources.directory)]:
        tree = _lay(tree, file.read(path, sources.environ))
    for assignment in sources.sets:
        tree = _lay(tree, file.read_assignment(assignment, sources.environ))
    for key, root in (("sysfs", sources.sysfs), ("procfs", sources.procfs)):
        if root is not None:
            origin = f"--{key} {root}"
            value = Node(str(Path(root).absolute()), origin)
            tree = _lay(tree, Node({"agent": Node({key: value}, origin)}, origin))
    return tree


def _lay(tree: Node, above: Node) -> Node:
    # An empty file is a null, and must not remove what the files before it said.
    return tree if above.content is None else merge(tree, above)


def _default_files(path: str) -> list[str]:
    try:
        Path(path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        pass  # it may be there: reading it says what is wrong
    return [path]


def _fragments(directory: str) -> list[str]:
    """List the files of conf.d by name; editors' hidden and backup files are no configuration."""
    try:
        paths = sorted(Path(directory).iterdir())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(directory, f"cannot list the configuration directory: {reason}") from None
    return [str(path) for path in paths if path.suffix in {".yaml", ".yml"} and not path.name.startswith(".")]


def _sections(tree: Node, collector_names: Sequence[str], output_names: Sequence[str]) -> dict[str, Node]:
    content = entries(tree, "")
    for key, node in content.items():
        if key in _SECTIONS:
            continue
        for section, names in (("collectors", collector_names), ("outputs", ["prometheus", *output_names])):
            if key in names:
                raise ConfigError(node.origin, f"{key}: unknown key; did you mean {section}.{key}?")
        raise unknown_key(node, key, key, _SECTIONS)
    return {key: content.get(key, Node(None, BUILT_IN)) for key in _SECTIONS}


def _named(section: Node, path: str, what: str, installed: Sequence[str]) -> dict[str, Node]:
    """Return the mapping under every installed name; a null under those that are not mentioned."""
    mentioned = entries(section, path)
    for name, node in mentioned.items():
        if name in LATER[path] and name not in installed:
            _refuse_if_wanted(node, join(path, name))
            continue
        if name not in installed:
            raise unknown_key(node, join(path, name), name, installed, what=what)
        if isinstance(node.content, bool):
            meant = f"{{enabled: {str(node.content).lower()}}}"
            raise ConfigError(
                node.origin, f"{join(path, name)}: expected a mapping (key: value); did you mean {meant}?"
            )
        entries(node, join(path, name))
    return {name: mentioned.get(name, Node(None, BUILT_IN)) for name in installed}


def _refuse_if_wanted(node: Node, path: str) -> None:
    enabled = entries(node, path).get("enabled", Node(None, BUILT_IN))
    if enabled.content is True:
        raise ConfigError(enabled.origin, f"{join(path, 'enabled')}: this version of hpcwatch does not have it")


def _agent(section: Node) -> AgentSettings:
    settings = decode(section, AgentSettings, "agent")
    labels = entries(section, "agent").get("labels", Node(None, BUILT_IN))
    for name, node in entries(labels, "agent.labels").items():
        reason = ""
        if not LABEL_NAME.fullmatch(name):
            reason = "expected a label name of letters, digits and _, not beginning with a digit or __"
        elif name in RESERVED_LABELS:
            reason = "this label is set by hpcwatch itself; choose another name"
        if reason:
            raise ConfigError(node.origin, f"{join('agent.labels', name)}: {reason}")
    # To Prometheus an empty label and no label are the same.
    return replace(settings, labels={name: value for name, value in settings.labels.items() if value})


def _collector(name: str, node: Node) -> CollectorSettings:
    keys = decode(_only(node, COLLECTOR_KEYS), CollectorKeys, f"collectors.{name}")
    return CollectorSettings(
        name=name,
        enabled=None if keys.enabled == "auto" else keys.enabled,
        mentioned=node.content is not None,
        interval=keys.interval,
        timeout=keys.timeout,
        options=_own(node, COLLECTOR_KEYS),
        node=node,
    )


def _output(name: str, node: Node) -> OutputSettings:
    keys = decode(_only(node, OUTPUT_KEYS), OutputKeys, f"outputs.{name}")
    own = _own(node, OUTPUT_KEYS)
    return OutputSettings(name, enabled=keys.enabled, mentioned=node.content is not None, options=own, node=node)


def _only(node: Node, keys: Sequence[str]) -> Node:
    content = node.content if isinstance(node.content, Mapping) else {}
    return Node({key: content[key] for key in keys if key in content}, node.origin)


def _own(node: Node, common: Sequence[str]) -> dict[str, object]:
    content = node.content if isinstance(node.content, Mapping) else {}
    return {key: value.plain() for key, value in content.items() if key not in common and value.content is not None}
