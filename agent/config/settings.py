"""The settings in force, as frozen dataclasses: each field is a configuration key, with its default and explanation.

Frozen dataclasses with `metadata` as agent/config/schema.py describes; a collector's own keys are its `Options`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from agent.address import parse_listen
from agent.api import Duration
from agent.config.schema import decode
from agent.config.tree import Node

T = TypeVar("T")

BUILT_IN = "built-in default"

_PACE = {"minimum": Duration(0.1), "maximum": Duration(86400)}
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
# Labels that series, events and pushed dimensions carry themselves; a site's label under one of these names would
# replace a measured fact.
# fmt: off
RESERVED_LABELS = frozenset({
    "cause", "check", "collector", "component", "count", "counter", "device", "direction", "duration_seconds",
    "errno", "event", "gpu", "host", "job_id", "kind", "le", "lifetime", "link", "location", "metric", "mig_uuid",
    "node", "output", "partition", "pid", "policy", "port", "quantile", "reason", "result", "role", "scheduler",
    "scope", "sensor", "severity", "source", "sources", "state", "status", "type", "user", "uuid", "workload",
    "workload_container", "workload_namespace", "workload_pod", "xid",
})
# fmt: on


def check_not_empty(text: str) -> None:
    """Refuse an empty text. Raises ValueError."""
    if not text.strip():
        raise ValueError("expected a text that is not empty")


@dataclass(frozen=True)
class AgentSettings:
    """What concerns the agent as a whole."""

    interval: Duration = field(
        default=Duration(10),
        metadata={"help": "Time between two collections, for collectors that set none of their own.", **_PACE},
    )
    labels: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"help": "Labels put on events, such as {cluster: blue}; never on /metrics."},
    )
    state_dir: str = field(
        default="/var/lib/hpcwatch",
        metadata={"help": "Where what must survive a restart is kept.", "path": True},
    )
    socket: str = field(
        default="/run/hpcwatch/agent.sock",
        metadata={"help": "Unix socket with the same answers as the port, and POST /control/reload.", "path": True},
    )
    sysfs: str = field(default="/sys", metadata={"help": "Root of sysfs; another path in a container.", "path": True})
    procfs: str = field(default="/proc", metadata={"help": "Root of procfs.", "path": True})
    devfs: str = field(default="/dev", metadata={"help": "Root of the device files.", "path": True})
    kmsg: str = field(
        default="/dev/kmsg",
        metadata={
            "help": "Kernel log: the device, a FIFO, or a file of records in its format.",
            "path": True,
        },
    )
    sku: str = field(
        default="auto",
        metadata={
            "help": "VM size, such as Standard_ND96asr_v4: what should be there. auto: not known, nothing is expected.",
            "check": check_not_empty,
        },
    )


@dataclass(frozen=True)
class CollectorKeys:
    """What every collector has besides its own keys."""

    enabled: Literal["auto"] | bool = field(
        default="auto",
        metadata={"help": "auto: on when the hardware is there, was there before, or the VM size expects it."},
    )
    interval: Duration | None = field(
        default=None, metadata={"help": "Time between two collections; null is agent.interval.", **_PACE}
    )
    timeout: Duration | None = field(
        default=None,
        metadata={"help": "When the agent gives up on one collection (gpu: on one GPU); may exceed interval.", **_PACE},
    )


@dataclass(frozen=True)
class OutputKeys:
    """What every output that sends has besides its own keys."""

    enabled: bool = field(default=False, metadata={"help": "Whether anything is sent there."})


COLLECTOR_KEYS = ("enabled", "interval", "timeout")
OUTPUT_KEYS = ("enabled",)


@dataclass(frozen=True)
class Names:
    """Which families of names are on the exposition."""

    node_infiniband: bool = field(
        default=True,
        metadata={"help": "node_exporter's InfiniBand names; false where a node_exporter runs too."},
    )


@dataclass(frozen=True)
class PrometheusSettings:
    """The HTTP port."""

    listen: str = field(
        default="0.0.0.0:9753",
        metadata={"help": "Address and port of /metrics and the status page.", "check": parse_listen},
    )
    web_config: str | None = field(
        default=None,
        metadata={"help": "TLS and passwords: a web-config.yml as Prometheus exporters use it.", "path": True},
    )
    compat: tuple[Literal["dcgm", "telegraf"], ...] = field(
        default=(),
        metadata={"help": "Metric names of other agents to give as well: dcgm, telegraf. Without effect yet."},
    )
    names: Names = field(default_factory=Names, metadata={"help": "Families of names that can be switched off."})


@dataclass(frozen=True)
class CollectorSettings:
    """One collector's keys. `interval` and `timeout` are None where the collector's own default holds."""

    name: str
    enabled: bool | None = None  # None: auto
    mentioned: bool = False
    interval: Duration | None = None
    timeout: Duration | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    node: Node = field(default=Node(None, BUILT_IN), repr=False, compare=False)


@dataclass(frozen=True)
class OutputSettings:
    """One sending output's keys."""

    name: str
    enabled: bool = False
    mentioned: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    node: Node = field(default=Node(None, BUILT_IN), repr=False, compare=False)


@dataclass(frozen=True)
class Settings:
    """All that was configured, defaults filled in. Every installed collector and output has an entry."""

    agent: AgentSettings = field(default_factory=AgentSettings)
    collectors: Mapping[str, CollectorSettings] = field(default_factory=dict)
    prometheus: PrometheusSettings = field(default_factory=PrometheusSettings)
    outputs: Mapping[str, OutputSettings] = field(default_factory=dict)
    later: tuple[str, ...] = ()  # mentioned, and not part of this version

    def options(self, name: str, cls: type[T]) -> T:
        """Return the collector's own keys as its `Options`. Raises ConfigError for the first mistake."""
        return decode(self.collectors[name].node, cls, f"collectors.{name}", elsewhere=COLLECTOR_KEYS)

    def output_options(self, name: str, cls: type[T]) -> T:
        """Return the output's own keys as its `Options`. Raises ConfigError for the first mistake."""
        return decode(self.outputs[name].node, cls, f"outputs.{name}", elsewhere=OUTPUT_KEYS)
