"""`hpcwatch demo`: a simulated node that lives, watched by the agent as it is.

Nothing of the machine is read or written but a temporary folder, which goes at the end: no configuration file, no
/sys, no /proc.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from agent import __version__
from agent.config import Sources, load
from agent.daemon import Daemon
from agent.engine import Engine
from agent.registry import Plugin
from agent.sim import childsetup
from agent.sim.machines import MACHINES, UnknownSizeError, machine
from agent.sim.node import SimNode, UnknownScenarioError
from agent.sim.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agent.api import Collector
    from agent.config.settings import Settings
    from agent.sim.host import SimHost

TICK_S = 0.5
TOLD_S = 60.0  # of what is to come
# So that what happens is seen soon; the agent's own defaults are for nodes that stay for months.
_PACE = {
    "host": {"interval": "5s"},
    "infiniband": {"interval": "5s", "slow_interval": "5s"},
    "gpu": {"interval": "2s", "slow_interval": "10s"},
}
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FOLDER_TRIES = 5
_MEMORY = "/dev/shm"  # noqa: S108 - only a directory made safely below it is used

log = logging.getLogger("demo")


class RefusedError(ValueError):
    """What was asked for cannot be simulated. Says what can."""


@dataclass(frozen=True)
class Wishes:
    """What to simulate, where to serve it, and how many simulated seconds pass in one."""

    sku: str
    scenario: str
    listen: str
    speed: float


def run(
    wishes: Wishes, plugins: Mapping[str, Plugin], child_setup: Callable[[], None], say: Callable[[str], None]
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status. `say` prints.

    Raises RefusedError, and ListenError where the port cannot be had.
    """
    try:
        with _folder() as folder:
            return _run_in(folder, wishes, plugins, child_setup, say)
    except (UnknownSizeError, UnknownScenarioError) as mistake:
        raise RefusedError(str(mistake)) from mistake


def sizes_text() -> str:
    """Return the VM sizes that can be simulated, one a line."""
    width = max(map(len, MACHINES))
    return "".join(f"{name:<{width}}  {_devices(name)}\n" for name in MACHINES)


def scenarios_text() -> str:
    """Return the scenarios, one a line."""
    width = max(map(len, SCENARIOS))
    return "".join(f"{name:<{width}}  {scenario.text}\n" for name, scenario in SCENARIOS.items())


def _run_in(
    folder: Path,
    wishes: Wishes,
    plugins: Mapping[str, Plugin],
    child_setup: Callable[[], None],
    say: Callable[[str], None],
) -> int:
    zone = datetime.now().astimezone().tzinfo
    assert zone is not None  # noqa: S101 - astimezone() has set it
    node = SimNode(folder, wishes.sku, wishes.scenario, started_at_s=time.time(), seconds_per_s=wishes.speed, zone=zone)
    plugins = {name: _OnSimulatedHost.of(plugin, node.host) for name, plugin in plugins.items()}
    read_settings = partial(_settings, folder, node, wishes.listen, list(plugins))
    setup = partial(childsetup.set_up, child_setup, node.nvml_state)
    engine = Engine(read_settings(), plugins, child_setup=setup, node=f"simulated-{node.vm_size.name}")
    mover = _Mover(node, wishes.speed)

    def serving(host: str, port: int) -> None:
        mover.start()
        say(_announcement(node, wishes.speed, host, port))

    try:
        return Daemon(engine, read_settings, serving, reloads=False).run()
    finally:
        mover.stop()


class _Mover:
    """The thread that lets simulated time pass, once it is started."""

    def __init__(self, node: SimNode, speed: float) -> None:
        self._node = node
        self._speed = speed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulation", daemon=True)

    def start(self) -> None:
        """Let time pass from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Let no more time pass."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        start_s = time.monotonic()
        failing = False
        while not self._ended.wait(TICK_S):
            try:
                self._node.at((time.monotonic() - start_s) * self._speed)
            except OSError as error:  # a full disk, which may have room again
                if not failing:
                    log.error("the simulated node cannot be written: %s", error)  # noqa: TRY400
                failing = True
            else:
                failing = False


@dataclass(frozen=True)
class _OnSimulatedHost(Plugin):
    """The host collector; the node answers the system calls that no root directory leads elsewhere."""

    host: SimHost

    @classmethod
    def of(cls, plugin: Plugin, host: SimHost) -> Plugin:
        """Return the plugin as it is to be used."""
        if not (plugin.builtin and plugin.name == "host"):
            return plugin
        return cls(plugin.name, plugin.distribution, plugin.entry, host)

    def load(self) -> type[Collector]:
        return self.host.answering(super().load())


def _settings(folder: Path, node: SimNode, listen: str, collectors: list[str]) -> Settings:
    """Make the settings of this demonstration; no file of the machine has a part in them. Raises ConfigError."""
    keys: dict[str, object] = {
        "agent.sysfs": node.sys,
        "agent.procfs": node.proc,
        "agent.devfs": node.dev,
        "agent.kmsg": node.kmsg,
        "agent.state_dir": folder / "state",
        "agent.socket": folder / "agent.sock",
        "agent.sku": node.vm_size.name,
        "outputs.prometheus.listen": listen,
        "collectors.textfile.directory": folder / "textfile",
    }
    for name in _PACE.keys() & set(collectors):
        keys |= {f"collectors.{name}.{key}": value for key, value in _PACE[name].items()}
    nowhere = str(folder / "nowhere")
    sources = Sources(
        directory=nowhere,
        default_file=nowhere,
        sets=[f"{key}={json.dumps(str(value))}" for key, value in keys.items()],  # JSON is YAML
        environ={},
    )
    return load(sources, collector_names=collectors, output_names=[])


def _announcement(node: SimNode, speed: float, host: str, port: int) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104 - read
    story = SCENARIOS[node.scenario.name].actions(node)
    lines = [
        f"hpcwatch {__version__} watches a simulated {node.vm_size.name}: {_devices(node.vm_size.name)}",
        "",
        f"  status page  http://{name}:{port}/",
        f"  metrics      http://{name}:{port}/metrics",
        "",
        f"Scenario {node.scenario.name}: {node.scenario.text}.",
        *(f"{a.at_s / speed:6g} s  {a.text}" for a in takewhile(lambda a: a.at_s / speed <= TOLD_S, story)),
        "",
        "Ctrl-C ends it.",
    ]
    return "".join(f"{line}\n" for line in lines)


def _devices(size: str) -> str:
    promise, made_of = machine(size)
    devices = []
    if made_of.gpu is not None:
        devices.append(f"{promise.gpu_count} x {made_of.gpu.name}")
    if promise.fabric_ports:
        ports = "InfiniBand port" if promise.fabric_ports == 1 else "InfiniBand ports"
        devices.append(f"{promise.fabric_ports} {ports} at {(promise.fabric_rate_bps or 0) // 10**9} Gb/s")
    return ", ".join(devices)


@contextmanager
def _folder() -> Iterator[Path]:
    """Make the node's folder, which goes with whatever ends the demo: the daemon takes the signals over later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        # In memory where that is possible and not decided otherwise: hundreds of files change every second.
        memory = None if "TMPDIR" in os.environ or not os.access(_MEMORY, os.W_OK) else _MEMORY
        folder = Path(tempfile.mkdtemp(prefix="hpcwatch-demo-", dir=memory))
        for number in _ENDING:
            signal.signal(number, lambda _number, _frame: _leave(folder))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield folder
    finally:
        _remove(folder)


def _leave(folder: Path) -> NoReturn:
    # Not by an exception: whatever is being imported or made just now may catch it.
    _remove(folder)
    os._exit(0)


def _remove(folder: Path) -> None:
    for number in _ENDING:  # whoever is impatient must not leave half of it behind
        signal.signal(number, signal.SIG_IGN)
    for _ in range(_FOLDER_TRIES):  # what still ends may write once more
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
