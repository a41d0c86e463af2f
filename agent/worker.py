"""The PROCESS lane, the child's side: one request, one run of the collector, one answer (the other is `agent.remote`).

Frames on the two pipes are marshal data behind a four-byte length: both ends are the same interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import pickle
import select
import signal
import struct
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from agent.api import Collector, Event, NotPresent, Outdated, Series
from agent.context import NodeContext
from agent.hw.process import OwnProcess
from agent.snapshot import Batch, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KNOWN_SLACK = 1000  # series that the child may remember beyond twice those it shows
HEAD = struct.Struct("<I")


@dataclass(frozen=True)
class Assignment:
    """What the child needs to build its collector; pickled, so all of it must be importable there."""

    collector: type[Collector]
    options: object
    context: Mapping[str, Any]  # the arguments of NodeContext, without `state` and `avoid`
    child_setup: Callable[[], None]  # what a child does first: its log, and whatever else its caller wants of it


class _ChildOut(Batch):
    """The child's `Out`: tells the parent at once which device is in hand, so that a hang can be blamed."""

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._send = send

    def working_on(self, device: str, limit_s: float | None = None) -> None:
        super().working_on(device, limit_s)
        self._send(("on", device, limit_s))


class _ChildState:
    """The child's `State`: kept by the parent, which outlives it and makes JSON of it."""

    def __init__(self, content: Mapping[str, Any], send: Callable[[tuple[Any, ...]], None]) -> None:
        self._content = marshal.dumps(dict(content))
        self._send = send

    def load(self) -> dict[str, Any]:
        content: dict[str, Any] = marshal.loads(self._content)  # noqa: S302 - our own
        return content

    def save(self, content: Mapping[str, Any]) -> None:
        self._content = marshal.dumps(dict(content))
        self._send(("state", self._content))


class _Server:
    """The child's loop: one request, one run, one answer."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests = requests
        self._answers = answers
        self._collector: Collector | None = None
        self._opened = False
        self._known: dict[Series, int] = {}
        self._process = OwnProcess()

    def run(self) -> None:
        order = self._receive()
        while (request := self._receive()) is not None:
            try:
                answer = encode(self._collect(order, rescan=request[1]))
            except NotPresent as absence:
                answer = self._forget(("absent", str(absence)))
            except Outdated as reason:
                answer = self._forget(("outdated", str(reason)))
            except BaseException as error:  # noqa: BLE001 - told to the parent, which counts and logs it
                answer = self._forget(("failed", describe(error)))
            self._send(answer)

    def _forget(self, message: tuple[Any, ...]) -> bytes:
        """Make the answer of a run that ended badly: open again, and define every series again."""
        self._opened = False
        self._known.clear()
        return encode(message)

    def _collect(self, order: bytes, *, rescan: bool) -> tuple[Any, ...]:
        if self._collector is None:
            assignment, memory, avoid = pickle.loads(order)  # noqa: S301 - from our own parent
            assignment.child_setup()
            context = NodeContext(**assignment.context, state=_ChildState(memory, self._tell), avoid=avoid)
            self._collector = assignment.collector(assignment.options, context)
            self._tell(("ready",))
        collector = self._collector
        out = _ChildOut(self._tell)
        if rescan or not self._opened:
            self._opened = False
            collector.open()
            self._opened = True
        collector.collect(out)
        snapshot = out.finish(collector.name, 0.0)
        if len(self._known) > 2 * len(snapshot.series) + KNOWN_SLACK:
            self._known.clear()  # most of them are gone; both sides forget them
        known = len(self._known)
        new = [series for series in dict.fromkeys(snapshot.series) if series not in self._known]
        self._known.update({series: known + index for index, series in enumerate(new)})
        return (
            "points",
            known,
            [_definition(series) for series in new],
            [self._known[series] for series in snapshot.series],
            list(snapshot.values),
            [(str(what), text) for what, text in out.failures],
            [_flat(event) for event in out.events],
            [(device.component, device.name, device.uuid, device.address) for device in out.devices],
            str(collector.found()),
            bool(collector.seen()),
            (self._process.cpu_seconds(), self._process.resident_bytes()),
        )

    def _receive(self) -> Any:
        head = _read_exactly(self._requests, HEAD.size)
        if head is None:
            return None
        body = _read_exactly(self._requests, HEAD.unpack(head)[0])
        return None if body is None else marshal.loads(body)  # noqa: S302 - from our own parent

    def _tell(self, message: tuple[Any, ...]) -> None:
        self._send(encode(message))

    def _send(self, frame: bytes) -> None:
        self._answers.write(frame)
        self._answers.flush()


def encode(message: object) -> bytes:
    """Make a frame. Raises ValueError for what is no plain data."""
    data = marshal.dumps(message)  # type: ignore[arg-type] # what it refuses raises
    return HEAD.pack(len(data)) + data


def _definition(series: Series) -> tuple[Any, ...]:
    metric = series.metric
    return metric.name, metric.kind.value, metric.help, metric.unit, series.labels, series.suffix


def _flat(event: Event) -> tuple[str, dict[str, Any]]:
    fields = {name: value for name, value in vars(event).items() if name != "severity"}
    return event.severity.value, {**fields, "labels": dict(event.labels)}


def _read_exactly(stream: IO[bytes], count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = stream.read(count - len(data))
        if not part:
            return None
        data += part
    return data


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group when the parent is gone, that is, when the lifeline's other end closes.

    Not a thread, which cannot run while a library hangs with the interpreter's lock held; not PR_SET_PDEATHSIG, which
    already fires when the parent's thread ends that started this process (prctl(2)). Nothing is ever written into the
    pipe, so its only signal is that of its end (fcntl(2): F_SETOWN, F_SETSIG, O_ASYNC).
    """
    fcntl.fcntl(lifeline, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)  # no events asked for: only the hang-up shows
    if poll.poll(0):  # the parent ended before the kernel was asked
        os._exit(0)


def _leave_to_parent(number: int) -> None:
    """Let a signal do nothing here. By a handler: programs started from here would inherit that it is ignored."""
    signal.signal(number, lambda _number, _frame: None)
    signal.siginterrupt(number, False)  # noqa: FBT003 - its only form; a driver's call goes on instead of failing


def serve(lifeline: int) -> None:
    """Run the child: requests on standard input, answers on what was standard output, until the lifeline ends."""
    _end_with_parent(lifeline)
    # Both are the parent's to handle; a service manager sends SIGTERM to the whole group.
    _leave_to_parent(signal.SIGINT)
    _leave_to_parent(signal.SIGTERM)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not break the frames
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor one that reads
    with contextlib.suppress(BrokenPipeError):
        _Server(requests, answers).run()
