"""From configuration and installed plug-ins to a plan: which collectors shall run, how, and which are off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.api import Collector, Lane, Metric, NoOptions
from agent.config.tree import ConfigError
from agent.registry import PluginError, conflicting_metric
from agent.snapshot import describe

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from agent.config.settings import CollectorSettings, Settings
    from agent.registry import Plugin

RESERVED_PREFIX = "hpcwatch_"


@dataclass(frozen=True)
class Spec:
    """One collector as it shall run. Two equal specs mean that a running one need not be touched by a reload."""

    name: str
    collector: type[Collector]
    options: object
    interval_s: float
    timeout_s: float
    required: bool
    broken: str = ""  # why it cannot run; then it is listed as failed

    @property
    def lane(self) -> Lane:
        """Where it runs."""
        return self.collector.lane


@dataclass(frozen=True)
class Plan:
    """All specs, and the collectors that are installed but off, each with the reason."""

    specs: Mapping[str, Spec]
    off: Mapping[str, str] = field(default_factory=dict)


def plan(
    settings: Settings, plugins: Mapping[str, Plugin], own_metrics: Iterable[Metric], only: Collection[str] = ()
) -> Plan:
    """Decide what runs; `only` limits it to these names, whatever the configuration says of them.

    Imports the collectors that are on. Raises ConfigError for wrong options. A plug-in that cannot be used becomes a
    spec with a reason.
    """
    specs: dict[str, Spec] = {}
    off: dict[str, str] = {}
    declared: list[tuple[str, Metric]] = [("hpcwatch itself", metric) for metric in own_metrics]
    for name, plugin in sorted(plugins.items(), key=lambda item: (not item[1].builtin, item[0])):
        chosen = settings.collectors[name]
        if name not in only if only else not _wanted(chosen, plugin):
            off[name] = _why_off(chosen, plugin)
            continue
        spec = _spec(settings, chosen, plugin, declared)
        specs[name] = spec
        declared += [(name, metric) for metric in spec.collector.metrics]
    return Plan(specs, off)


def _wanted(chosen: CollectorSettings, plugin: Plugin) -> bool:
    if chosen.enabled is None:
        return plugin.builtin or chosen.mentioned
    return chosen.enabled


def _why_off(chosen: CollectorSettings, plugin: Plugin) -> str:
    if chosen.enabled is False:
        return f"collectors.{plugin.name}.enabled is false"
    if not plugin.builtin:
        return f"a plug-in of {plugin.distribution}: on when the configuration mentions collectors.{plugin.name}"
    return "not asked for"


def _spec(
    settings: Settings, chosen: CollectorSettings, plugin: Plugin, declared: Iterable[tuple[str, Metric]]
) -> Spec:
    options: object
    try:
        collector, broken = _usable(plugin, declared), ""
        options = _options(settings, plugin, collector)
    except PluginError as error:
        collector, broken, options = _Broken, str(error), NoOptions()
    interval = chosen.interval or collector.interval or settings.agent.interval
    timeout = chosen.timeout or collector.timeout
    required = bool(chosen.enabled) or bool(broken)
    return Spec(plugin.name, collector, options, float(interval), float(timeout), required, broken)


def _usable(plugin: Plugin, declared: Iterable[tuple[str, Metric]]) -> type[Collector]:
    collector = plugin.load()
    metrics = collector.metrics
    if not plugin.builtin and any(metric.name.startswith(RESERVED_PREFIX) for metric in metrics):
        raise PluginError(f"collector {plugin.name}: metric names that begin with {RESERVED_PREFIX} are reserved")
    conflict = conflicting_metric(metrics, declared)
    if conflict:
        raise PluginError(f"collector {plugin.name} of {plugin.distribution}: {conflict}")
    return collector


def _options(settings: Settings, plugin: Plugin, collector: type[Collector]) -> object:
    try:
        return settings.options(plugin.name, collector.Options)
    except ConfigError:  # the user's mistake; any other is the plug-in's
        raise
    except Exception as error:  # the annotations of a foreign class may be no types of keys
        raise PluginError(f"collector {plugin.name} of {plugin.distribution}: Options: {describe(error)}") from error


class _Broken(Collector):
    """Stands in for a plug-in that cannot be used; its spec's `broken` says why."""

    name = ""
    metrics = ()
