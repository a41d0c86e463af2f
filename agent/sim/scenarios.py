"""What happens on a simulated node, and when: actions in the order of their time, made as the node gets there.

A scenario is a function of the node, so that it names its devices; it may go on for ever. Add one by adding to
SCENARIOS.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.sim.node import SimNode

FIRST_JOB = 4711
_ROUND_S = 180.0  # of the jobs after the first, one each
_ROUNDS_PER_INCIDENT = 3


@dataclass(frozen=True)
class Action:
    """What is done to the node `at_s` seconds after its start; `text` tells people."""

    at_s: float
    text: str
    do: Callable[[], object]


Actions = Iterator[Action]


@dataclass(frozen=True)
class Scenario:
    """A story and what it needs. Without `gpu_driver` the node has its GPUs on PCI only."""

    name: str
    text: str
    actions: Callable[[SimNode], Actions]
    needs_gpus: bool = False
    needs_fabric: bool = False
    gpu_driver: bool = True

    def lacks(self, node: SimNode) -> str:
        """Say what the story needs and the node does not have; empty when it can be told."""
        if self.needs_gpus and not node.gpus:
            return "GPUs"
        return "InfiniBand ports" if self.needs_fabric and not node.ports else ""


def _start(node: SimNode, at_s: float, job: int = FIRST_JOB) -> Action:
    return Action(at_s, f"job {job} starts", lambda: node.start_job(job))


def _end(node: SimNode, at_s: float, job: int = FIRST_JOB, exit_code: int = 0) -> Action:
    how = f"fails with exit code {exit_code}" if exit_code else "ends"
    return Action(at_s, f"job {job} {how}", lambda: node.end_job(exit_code))


def _flap(node: SimNode, at_s: float, seconds: float, number: int = 3) -> Actions:
    port = node.ports[number % len(node.ports)]
    yield Action(at_s, f"the link of {port.device} goes down", lambda: node.lose_link(port))
    yield Action(at_s + seconds, f"the link of {port.device} is back", lambda: node.regain_link(port))


def _page_fault(node: SimNode, at_s: float, number: int = 1) -> Action:
    gpu = node.gpus[number % len(node.gpus)]
    return Action(at_s, f"XID 31 on GPU {gpu.number}: the job touched no memory of its own", lambda: node.fault(gpu))


def _memory_error(node: SimNode, at_s: float, number: int = 5) -> Action:
    gpu = node.gpus[number % len(node.gpus)]
    text = f"XID 94 on GPU {gpu.number}: an uncorrectable memory error, contained"
    return Action(at_s, text, lambda: node.strike_memory(gpu))


def _reset(node: SimNode, at_s: float, number: int = 5) -> Action:
    gpu = node.gpus[number % len(node.gpus)]
    return Action(at_s, f"GPU {gpu.number} is reset", gpu.reset)


def _healthy(node: SimNode) -> Actions:
    for number in itertools.count():
        yield _start(node, 5 + number * _ROUND_S, FIRST_JOB + number)
        yield _end(node, 150 + number * _ROUND_S, FIRST_JOB + number)


def _link_flap(node: SimNode) -> Actions:
    yield _start(node, 2)
    yield from _flap(node, 10, 12)


def _gpu_lost(node: SimNode) -> Actions:
    gpu = node.gpus[2 % len(node.gpus)]
    yield _start(node, 2)
    yield Action(20, f"GPU {gpu.number} falls off the bus (XID 79)", lambda: node.lose_gpu(gpu))
    yield _end(node, 40, exit_code=1)


def _xid(node: SimNode) -> Actions:
    yield _start(node, 2)
    yield _page_fault(node, 10)
    yield _end(node, 14, exit_code=1)
    if node.gpus[0].model.fraction:  # its host keeps errors of the memory from it
        return
    yield _start(node, 20, FIRST_JOB + 1)
    yield _memory_error(node, 30)
    yield _end(node, 36, FIRST_JOB + 1, exit_code=1)
    yield _reset(node, 120)


def _hca_hang(node: SimNode) -> Actions:
    port = node.ports[min(4, len(node.ports) - 1)]
    yield _start(node, 2)
    yield Action(10, f"reads of {port.device} do not return, for a minute", lambda: node.hang_adapter(port))
    yield Action(70, f"reads of {port.device} return again", port.release)


def _counter_reset(node: SimNode) -> Actions:
    port = node.ports[min(2, len(node.ports) - 1)]
    yield _start(node, 2)
    yield Action(20, f"the adapter {port.device} is reset: its counters start at 0", lambda: node.reset_adapter(port))
    if node.gpus:
        yield _end(node, 24)
        yield Action(26, "the GPU driver is loaded anew: what it counts starts at 0", node.reload_driver)


def _no_gpu_driver(node: SimNode) -> Actions:
    yield Action(0, "the GPUs are on the PCI bus, and no driver is loaded", lambda: None)
    if node.ports:
        yield from _flap(node, 30, 8)


def _day(node: SimNode) -> Actions:
    yield _start(node, 5)
    if node.ports:
        yield from _flap(node, 15, 9)
    struck = bool(node.gpus) and not node.gpus[0].model.fraction
    if struck:
        yield _memory_error(node, 32)
    elif node.gpus:
        yield _page_fault(node, 32)
    yield _end(node, 50, exit_code=1 if node.gpus else 0)
    if struck:
        yield _reset(node, 58)
    for number in itertools.count():
        yield from _round(node, number)


def _round(node: SimNode, number: int) -> Actions:
    """One further job, and sometimes an incident that it survives or fails of."""
    start_s, job = 60 + number * _ROUND_S, FIRST_JOB + 1 + number
    yield _start(node, start_s + 5, job)
    incident, rest = divmod(number, _ROUNDS_PER_INCIDENT)
    failed = False
    if rest == _ROUNDS_PER_INCIDENT - 1:
        failed = bool(node.gpus) and (incident % 2 == 1 or not node.ports)
        if failed:
            yield _page_fault(node, start_s + 100, number)
        elif node.ports:
            yield from _flap(node, start_s + 60, 6, number)
    yield _end(node, start_s + (110 if failed else 150), job, exit_code=int(failed))


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("day", "a job starts, a link flaps, an XID strikes, the job fails; then further jobs", _day),
        Scenario("healthy", "one job after the other, and nothing goes wrong", _healthy),
        Scenario("link_flap", "a port goes down under a job and is back after 12 s", _link_flap, needs_fabric=True),
        Scenario("gpu_lost", "a GPU falls off the bus and stays away", _gpu_lost, needs_gpus=True),
        Scenario("xid", "a job's fault (XID 31), then an error of the memory (XID 94)", _xid, needs_gpus=True),
        Scenario("hca_hang", "reads of an adapter do not return for a minute", _hca_hang, needs_fabric=True),
        Scenario(
            "counter_reset", "an adapter and the GPU driver start counting at 0", _counter_reset, needs_fabric=True
        ),
        Scenario("no_gpu_driver", "GPUs without a driver", _no_gpu_driver, needs_gpus=True, gpu_driver=False),
    )
}
