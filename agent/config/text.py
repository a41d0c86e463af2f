"""Settings as text for people: the configuration in force, and a commented file of all defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.api import Collector, Duration
from agent.config import redaction
from agent.config.file import dump
from agent.config.schema import field_types, fields, sections
from agent.config.settings import AgentSettings, CollectorKeys, OutputKeys, PrometheusSettings, Settings

_HEADER = """\
# Configuration of hpcwatch. Every key is optional: what stands here commented out are the defaults.
# Files in conf.d beside this one are laid over it: mappings merge, lists and values replace, null restores the default.
# ${NAME} and ${NAME:-default} stand for environment variables. `hpcwatch config check` reads it without starting.
"""


def show(settings: Settings, collectors: Mapping[str, type[Collector]], outputs: Mapping[str, type]) -> str:
    """Write the configuration in force as YAML: every default filled in, durations as text, secrets masked.

    `collectors` are the classes and `outputs` the option classes by name; for those that are not given, what the
    files said is shown. Raises ConfigError for a mistake in a collector's or output's own keys.
    """
    agent = settings.agent
    tree: dict[str, Any] = {"agent": _plain(agent), "collectors": {}, "outputs": {}}
    for name, configured in settings.collectors.items():
        cls = collectors.get(name)
        own = _plain(settings.options(name, cls.Options)) if cls else _plain(configured.options)
        tree["collectors"][name] = {
            "enabled": "auto" if configured.enabled is None else configured.enabled,
            "interval": _plain(configured.interval or (cls and cls.interval) or agent.interval),
            "timeout": _plain(configured.timeout or (cls or Collector).timeout),
            **own,
        }
    tree["outputs"]["prometheus"] = _plain(settings.prometheus)
    for name, output in settings.outputs.items():
        options = outputs.get(name)
        own = _plain(settings.output_options(name, options)) if options else _plain(output.options)
        tree["outputs"][name] = {"enabled": output.enabled, **own}
    return dump(tree)


def default_text(collectors: Mapping[str, type[Collector]], outputs: Mapping[str, type]) -> str:
    """Write a file with every key commented out at its default, each explained; `#key` uncomments, `# text` explains.

    Loaded as it is, it configures nothing.
    """
    lines = [_HEADER.rstrip(), "", "agent:", *_commented(AgentSettings, 1), "", "collectors:"]
    for name, cls in collectors.items():
        pace = {"interval": cls.interval, "timeout": cls.timeout}
        lines += [f"  {name}:", *([f"    # Needs: {cls.needs}"] if cls.needs else [])]
        lines += [*_commented(CollectorKeys, 2, pace), *_commented(cls.Options, 2), ""]
    lines += ["outputs:", "  prometheus:", *_commented(PrometheusSettings, 2)]
    for name, options in outputs.items():
        lines += ["", f"  {name}:", *_commented(OutputKeys, 2), *_commented(options, 2)]
    return "\n".join(lines) + "\n"


def _commented(cls: type, depth: int, defaults: Mapping[str, object] | None = None) -> Iterator[str]:
    indent = "  " * depth
    for field in fields(cls):
        for line in _explanation(field, field_types(cls)[field.name], ""):
            yield f"{indent}# {line}"
        default = (defaults or {}).get(field.name, _default(field))
        yield f"{indent}#{dump({field.name: _plain(default)}, flow=True)[1:-1]}"


def _explanation(field: dataclasses.Field[Any], hint: Any, indent: str) -> Iterator[str]:
    """Give the help of a key and, indented, of the keys below it."""
    text = field.metadata.get("help", "")
    if text or indent:
        yield f"{indent}{field.name + ': ' if indent else ''}{text}".rstrip()
    for section in sections(hint):
        for below in fields(section):
            yield from _explanation(below, field_types(section)[below.name], indent + "  ")


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _plain(value: Any, key: str = "", *, secret: bool = False) -> Any:
    """Turn settings into what YAML can hold, with secrets masked."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name), field.name, secret=bool(field.metadata.get("secret")))
            for field in fields(type(value))
        }
    if isinstance(value, Mapping):
        return {name: _plain(item, name, secret=secret) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item, key, secret=secret) for item in value]
    if value not in (None, "", True, False) and (secret or redaction.is_secret(key)):
        return redaction.MASK
    return str(value) if isinstance(value, Duration) else redaction.mask(value) if isinstance(value, str) else value
