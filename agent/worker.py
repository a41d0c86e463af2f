"""The PROCESS lane: a collector in a child process, because its calls may never return and may crash.

`Remote` stands in for the collector in the agent. It asks the child for one run at a time and waits no longer than the
deadline. A child that hangs is killed and replaced at once by one that avoids the device it hung on; a child that
cannot even be killed (a driver holds it) is abandoned, and while two such exist no more are started.

Frames on the two pipes are marshal data behind a four-byte length: both ends are the same interpreter.
"""

from __future__ import annotations

import marshal
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

from agent.api import Collector, Event, Kind, Metric, NotPresent, Series, Severity
from agent.context import NodeContext
from agent.snapshot import Batch, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.api import Context, Out

ABANDONED_LIMIT = 2
KILL_PATIENCE_S = 0.5
AVOID_FIRST_S = 30.0
AVOID_LAST_S = 900.0
FRAME_LIMIT = 64 << 20
_HEAD = struct.Struct("<I")
_BOOT = "import sys; sys.path[:] = {path!r}; from agent.worker import serve; serve()"


class WorkerError(Exception):
    """The child died, or could not be started. Says how."""


@dataclass(frozen=True)
class Assignment:
    """What the child needs to build its collector; pickled, so all of it must be importable there."""

    collector: type[Collector]
    options: object
    context: Mapping[str, Any]  # the arguments of NodeContext, without `avoid`
    log_setup: Callable[[], None]


class _Child:
    """One child process and its pipes."""

    def __init__(self, assignment: Assignment, avoid: frozenset[str]) -> None:
        command = [sys.executable, "-c", _BOOT.format(path=sys.path)]
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._stdin = cast("IO[bytes]", self.process.stdin)
        self._stdout = cast("IO[bytes]", self.process.stdout)
        self._buffer = b""
        self.series: list[Series] = []
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        os.set_blocking(self._stdout.fileno(), False)
        self.send(pickle.dumps((assignment, avoid)))

    def send(self, message: object) -> None:
        """Send one frame. A dead child shows when its answer is read."""
        data = marshal.dumps(message)
        try:
            self._stdin.write(_HEAD.pack(len(data)) + data)
        except BrokenPipeError:
            pass

    def receive(self, deadline_s: float, monotonic: Callable[[], float]) -> tuple[Any, ...] | None:
        """Return the next frame; None when the deadline passed. Raises WorkerError when the child is gone."""
        while (frame := self._take_frame()) is None:
            left_s = deadline_s - monotonic()
            if left_s <= 0:
                return None
            if not self._poll.poll(left_s * 1000):
                continue
            data = os.read(self._stdout.fileno(), 1 << 20)
            if not data:
                raise WorkerError(f"its process ended: {_exit_text(self.process.wait())}")
            self._buffer += data
        return frame

    def _take_frame(self) -> tuple[Any, ...] | None:
        if len(self._buffer) < _HEAD.size:
            return None
        (length,) = _HEAD.unpack_from(self._buffer)
        if length > FRAME_LIMIT:
            raise WorkerError(f"its process sent a frame of {length} bytes")
        end = _HEAD.size + length
        if len(self._buffer) < end:
            return None
        frame = marshal.loads(self._buffer[_HEAD.size : end])  # noqa: S302 - from our own child
        self._buffer = self._buffer[end:]
        return cast("tuple[Any, ...]", frame)

    def kill(self) -> bool:
        """Kill it; False when it does not die, which the caller must remember."""
        self.process.kill()
        self._stdin.close()
        self._stdout.close()
        try:
            self.process.wait(KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def _exit_text(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


@dataclass
class _Hang:
    """A device that a child hung on, and until when (monotonic seconds) children leave it alone."""

    until_s: float
    count: int


class Remote(Collector):
    """The agent's side of a collector in the PROCESS lane. Runs in a lane thread; blocks at most two deadlines."""

    name: ClassVar[str] = ""

    def __init__(self, assignment: Assignment, ctx: Context) -> None:
        super().__init__(assignment.options, ctx)
        self._assignment = assignment
        self._metrics = {metric.name: metric for metric in assignment.collector.metrics}
        self._child: _Child | None = None
        self._abandoned: list[_Child] = []
        self._hangs: dict[str, _Hang] = {}
        self._avoiding: frozenset[str] = frozenset()
        self._found = ""
        self._rescan = True

    def open(self) -> None:
        """Have the child discover again at its next run."""
        self._rescan = True

    def found(self) -> str:
        """Say what the child's `open` found."""
        return self._found

    def collect(self, out: Out) -> None:
        """Ask the child for one run and pass it on. Raises what the collector raised, or WorkerError."""
        for attempt in (1, 2):
            child = self._running_child()
            child.send(("run", self._rescan))
            try:
                frame, device = self._await(child, out)
            except WorkerError:
                self._child = None
                self._rescan = True
                child.kill()
                raise
            if frame is not None:
                self._rescan = False
                self._replay(child, frame, out)
                return
            self._replace_hung(device)
            out.failed(device or "worker", f"no answer within {self.ctx.timeout_s:g} s, process replaced")
            if not device or attempt == 2:  # noqa: PLR2004 - the second and last
                raise WorkerError(f"no answer within {self.ctx.timeout_s:g} s" + (f" on {device}" if device else ""))

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _running_child(self) -> _Child:
        now_s = self.ctx.clock.monotonic()
        avoid = frozenset(device for device, hang in self._hangs.items() if now_s < hang.until_s)
        if self._child is not None and avoid != self._avoiding:
            self.close()  # time to try a device again that an earlier child hung on
        if self._child is None:
            self._abandoned = [child for child in self._abandoned if child.process.poll() is None]
            if len(self._abandoned) >= ABANDONED_LIMIT:
                pids = ", ".join(str(child.process.pid) for child in self._abandoned)
                raise WorkerError(f"processes {pids} hang in the kernel and cannot be killed; no more are started")
            self._child, self._avoiding, self._rescan = _Child(self._assignment, avoid), avoid, True
        return self._child

    def _await(self, child: _Child, out: Out) -> tuple[tuple[Any, ...] | None, str]:
        """Return the frame that ends the run, None at the deadline; and the device last worked on."""
        deadline_s = self.ctx.clock.monotonic() + self.ctx.timeout_s
        device = ""
        while (frame := child.receive(deadline_s, self.ctx.clock.monotonic)) is not None:
            if frame[0] != "on":
                return frame, device
            device = frame[1]
            out.working_on(device)
        return None, device

    def _replace_hung(self, device: str) -> None:
        child, self._child = self._child, None
        if child is not None and not child.kill():
            self._abandoned.append(child)
        if device:
            count = self._hangs[device].count + 1 if device in self._hangs else 1
            wait_s = min(AVOID_FIRST_S * 2 ** (count - 1), AVOID_LAST_S)
            self._hangs[device] = _Hang(self.ctx.clock.monotonic() + wait_s, count)

    def _replay(self, child: _Child, frame: tuple[Any, ...], out: Out) -> None:
        kind, *rest = frame
        if kind == "absent":
            raise NotPresent(rest[0])
        if kind == "failed":
            raise WorkerError(rest[0])
        new, ids, values, failures, events, self._found = rest
        child.series += [self._series(definition) for definition in new]
        out.extend([child.series[i] for i in ids], values)
        for what, text in failures:
            out.failed(what, text)
        for severity, fields in events:
            out.event(Event(severity=Severity(severity), **fields))

    def _series(self, definition: tuple[Any, ...]) -> Series:
        name, kind, help_text, unit, labels, suffix = definition
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Metric(name, Kind(kind), help_text, unit=unit)
        return self.ctx.sample(metric, dict(labels), suffix)


class _ChildOut(Batch):
    """The child's `Out`: tells the parent at once which device is in hand, so that a hang can be blamed."""

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._send = send

    def working_on(self, device: str) -> None:
        super().working_on(device)
        self._send(("on", device))


class _Server:
    """The child's loop: one request, one run, one answer."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests = requests
        self._answers = answers
        self._known: dict[Series, int] = {}

    def run(self) -> None:
        assignment, avoid = pickle.loads(self._receive())  # noqa: S301 - from our own parent
        assignment.log_setup()
        context = NodeContext(**assignment.context, avoid=avoid)
        collector = assignment.collector(assignment.options, context)
        opened = False
        while (request := self._receive()) is not None:
            rescan = request[1] or not opened
            opened = self._answer(collector, rescan=rescan)

    def _answer(self, collector: Collector, *, rescan: bool) -> bool:
        out = _ChildOut(self._send)
        try:
            if rescan:
                collector.open()
            collector.collect(out)
        except NotPresent as absence:
            self._send(("absent", str(absence)))
            return False
        except Exception as error:  # noqa: BLE001 - told to the parent, which counts and logs it
            self._send(("failed", describe(error)))
            return False
        snapshot = out.finish(collector.name, 0.0)
        new = [series for series in snapshot.series if series not in self._known]
        for series in new:
            self._known.setdefault(series, len(self._known))
        self._send((
            "points",
            [_definition(series) for series in dict.fromkeys(new)],
            [self._known[series] for series in snapshot.series],
            list(snapshot.values),
            out.failures,
            [_flat(event) for event in out.events],
            collector.found(),
        ))
        return True

    def _receive(self) -> Any:
        head = _read_exactly(self._requests, _HEAD.size)
        if head is None:
            return None
        body = _read_exactly(self._requests, _HEAD.unpack(head)[0])
        return None if body is None else marshal.loads(body)  # noqa: S302 - from our own parent

    def _send(self, message: tuple[Any, ...]) -> None:
        data = marshal.dumps(message)
        self._answers.write(_HEAD.pack(len(data)) + data)
        self._answers.flush()


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


def _end_with_parent(requests: IO[bytes]) -> None:
    """End this process when the parent is gone, even while the main thread hangs in a driver."""
    poll = select.poll()
    poll.register(requests, 0)  # no events asked for: only the hang-up wakes it
    poll.poll()
    os._exit(0)


def serve() -> None:
    """Run the child: requests on standard input, answers on what was standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the parent's to handle
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not break the frames
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
    try:
        _Server(requests, answers).run()
    except BrokenPipeError:
        pass
