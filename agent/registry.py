"""Which collectors are installed, found by the entry-point group `hpcwatch.collectors`. Imports only what is asked for.

Built-in and foreign collectors come through the same table. A plug-in that cannot be used is kept with its reason, so
that it can be shown; it never stops the agent. What would make the agent itself untrustworthy does: another
distribution that brings packages named `agent` or `collectors`, or two plug-ins of one name.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, is_dataclass
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import TYPE_CHECKING

from agent.api import API_VERSION, Collector, Lane, Metric
from agent.snapshot import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.metadata import Distribution

DISTRIBUTION = "hpcwatch"
GROUP = "hpcwatch.collectors"
OUR_PACKAGES = ("agent", "collectors")

log = logging.getLogger("hpcwatch")


class RegistryError(Exception):
    """The installation itself is unsound. Names both parties and says what to remove."""


class PluginError(Exception):
    """One plug-in cannot be used. Says why; the others can."""


@dataclass(frozen=True)
class Plugin:
    """One installed collector, not yet imported."""

    name: str
    distribution: str
    entry: EntryPoint

    @property
    def builtin(self) -> bool:
        """True for those that come with the agent; others run only when the configuration mentions them."""
        return self.distribution == DISTRIBUTION

    def load(self) -> type[Collector]:
        """Import the collector. Raises PluginError, whatever the import did."""
        try:
            loaded = self.entry.load()
        except BaseException as error:  # a foreign module may raise anything, even SystemExit
            raise PluginError(f"{self._where}: import failed: {describe(error)}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, Collector)):
            raise PluginError(f"{self._where}: {loaded!r} is not a subclass of agent.api.Collector")
        flaw = _flaw(loaded, self.name)
        if flaw:
            raise PluginError(f"{self._where}: {flaw}")
        return loaded

    @property
    def _where(self) -> str:
        return f"collector {self.name} of {self.distribution} ({self.entry.value})"


def _flaw(loaded: type[Collector], name: str) -> str:  # noqa: PLR0911 - a list of checks, each with its answer
    """Say which class attribute the agent cannot work with; empty when there is none."""
    metrics = getattr(loaded, "metrics", None)
    if not isinstance(loaded.api, int) or loaded.api > API_VERSION:
        return f"needs plug-in API {loaded.api!r}, this agent has {API_VERSION}: upgrade it"
    if getattr(loaded, "name", None) != name:
        return f"the class calls itself {getattr(loaded, 'name', None)!r}; both names must be the same"
    if not (isinstance(metrics, (tuple, list)) and all(isinstance(metric, Metric) for metric in metrics)):
        return "metrics must be a sequence of agent.api.Metric"
    if not isinstance(loaded.lane, Lane):
        return f"lane must be an agent.api.Lane, not {loaded.lane!r}"
    if not (isinstance(loaded.timeout, (int, float)) and isinstance(loaded.interval, (int, float, type(None)))):
        return "interval and timeout must be an agent.api.Duration"
    if not is_dataclass(loaded.Options):
        return "Options must be a dataclass"
    return ""


def installed(found: Iterable[Distribution] | None = None) -> dict[str, Plugin]:
    """Return every installed collector by name. Raises RegistryError when two distributions bring the same name."""
    plugins: dict[str, Plugin] = {}
    seen: set[str] = set()
    for distribution in distributions() if found is None else found:
        owner = _name(distribution)
        if owner in seen:  # the first on the path wins, as it does for import
            continue
        seen.add(owner)
        for entry in _entries(distribution, owner):
            other = plugins.get(entry.name)
            if other is not None:
                raise RegistryError(
                    f"two collectors are called {entry.name!r}, one of {other.distribution}, one of {owner}: "
                    f"uninstall one of them"
                )
            plugins[entry.name] = Plugin(entry.name, owner, entry)
    return dict(sorted(plugins.items()))


def _name(distribution: Distribution) -> str:
    try:
        return distribution.metadata["Name"] or ""
    except Exception:  # noqa: BLE001 - damaged metadata of whatever else is installed must not stop the agent
        return ""


def _entries(distribution: Distribution, owner: str) -> Sequence[EntryPoint]:
    try:
        return [entry for entry in distribution.entry_points if entry.group == GROUP]
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("the entry points of distribution %s are damaged, ignored: %s", owner, describe(error))
        return []


def _record(distribution: Distribution) -> str:
    try:
        return distribution.read_text("RECORD") or ""
    except Exception:  # noqa: BLE001 - as above
        return ""


def refuse_strangers(path: Sequence[str] | None = None, found: Iterable[Distribution] | None = None) -> None:
    """Raise RegistryError when anything but us provides a package `agent` or `collectors`.

    The names are generic; in a foreign environment another distribution may bring them, and a mixture of two
    packages would fail in ways nobody can explain.
    """
    home = Path(__file__).resolve().parent.parent
    for place in sys.path if path is None else path:
        for package in OUR_PACKAGES:
            stranger = Path(place) / package
            if (stranger / "__init__.py").is_file() and stranger.resolve().parent != home:
                raise RegistryError(
                    f"another package {package!r} is in {stranger.parent}, ours is in {home}: "
                    f"{DISTRIBUTION} needs a virtual environment of its own"
                )
    for distribution in distributions() if found is None else found:
        owner = _name(distribution)
        if owner == DISTRIBUTION:
            continue
        record = "\n" + _record(distribution)  # searched, not parsed: a fraction of the time
        taken = [package for package in OUR_PACKAGES if f"\n{package}/" in record]
        if taken:
            raise RegistryError(
                f"the distribution {owner} also provides {' and '.join(taken)}: "
                f"{DISTRIBUTION} needs a virtual environment of its own"
            )


def conflicting_metric(metrics: Iterable[Metric], others: Iterable[tuple[str, Metric]]) -> str | None:
    """Say which metric is declared differently by an earlier collector (name, metric), None when there is none."""
    known = {metric.name: (owner, metric) for owner, metric in others}
    for metric in metrics:
        owner, other = known.get(metric.name, ("", metric))
        mine = (metric.kind, metric.help, metric.labels, metric.unit)
        if (other.kind, other.help, other.labels, other.unit) != mine:
            return f"metric {metric.name} is declared differently by collector {owner}"
    return None
