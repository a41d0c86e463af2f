"""The PROCESS lane: a collector in a child process, because its calls may never return and may crash.

`Remote` stands in for the collector in the agent. It asks the child for one run at a time and waits no longer than the
deadline. A child that hangs is killed and replaced at once by one that avoids the device it hung on; a child that
cannot even be killed (a driver holds it) is abandoned, and while two such of one collector exist no more are started.
Programs that a child started end with it, and all of them end with the agent, however that ends.

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
import subprocess
import sys
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
FORGIVEN_AFTER_S = 3600.0  # a device without a hang for this long counts as healthy again
KNOWN_SLACK = 1000  # series that the child may remember beyond twice those it shows
FRAME_LIMIT = 64 << 20
_HEAD = struct.Struct("<I")
_BOOT = "import sys; sys.path[:] = {path!r}; from agent.worker import serve; serve({lifeline})"
# By collector, because a reload makes a new Remote but the processes that cannot be killed are still there.
_abandoned: dict[str, list[subprocess.Popen[bytes]]] = {}


class WorkerError(Exception):
    """The child died, hung, or could not be started. Says how."""


class CollectorError(Exception):
    """The collector in the child raised; the child itself is well. The text says type and message."""


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
        order = pickle.dumps((assignment, avoid))  # first, because it may fail
        theirs, self._lifeline = os.pipe()
        command = [sys.executable, "-c", _BOOT.format(path=sys.path, lifeline=theirs)]
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=(theirs,),
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(theirs)
        self._stdin = cast("IO[bytes]", self.process.stdin)
        self._stdout = cast("IO[bytes]", self.process.stdout)
        self._buffer = bytearray()
        self.series: list[Series] = []
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        os.set_blocking(self._stdout.fileno(), False)
        self.send(order)

    def send(self, message: object) -> None:
        """Send one frame. A dead child shows when its answer is read."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(_encode(message))

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
                raise WorkerError(f"its process ended: {self._exit_text()}")
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
        frame = marshal.loads(bytes(self._buffer[_HEAD.size : end]))  # noqa: S302 - from our own child
        del self._buffer[:end]
        return cast("tuple[Any, ...]", frame)

    def kill(self) -> bool:
        """Kill it and what it started; False when it does not die, which the caller must remember."""
        # It leads a process group of its own, which may outlive it. Refused when only a set-user-ID program is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self._lifeline)
        self._stdin.close()
        self._stdout.close()
        try:
            self.process.wait(KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _exit_text(self) -> str:
        try:
            status = self.process.wait(KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:  # stuck on its way out
            return "it closed its output"
        if status < 0:
            return f"killed by signal {-status} ({signal.strsignal(-status)})"
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
        self.rescan_s = assignment.collector.rescan_s
        self._assignment = assignment
        self._metrics = {metric.name: metric for metric in assignment.collector.metrics}
        self._child: _Child | None = None
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
                if frame is not None:
                    self._rescan = False
                    self._replay(child, frame, out)
                    return
            except (NotPresent, CollectorError):
                raise
            except BaseException:
                self.close()  # an answer that was not taken whole must not be taken for the next one's
                raise
            self.close()
            self._blame(device)
            out.failed(device or "worker", f"no answer within {self.ctx.timeout_s:g} s, process replaced")
            if not device or attempt == 2:  # noqa: PLR2004 - the second and last
                raise WorkerError(f"no answer within {self.ctx.timeout_s:g} s" + (f" on {device}" if device else ""))

    def close(self) -> None:
        """End the child. One that cannot be killed is remembered as abandoned."""
        child, self._child, self._rescan = self._child, None, True
        if child is not None and not child.kill():
            _abandoned.setdefault(self._assignment.collector.name, []).append(child.process)

    def _running_child(self) -> _Child:
        now_s = self.ctx.clock.monotonic()
        avoid = frozenset(device for device, hang in self._hangs.items() if now_s < hang.until_s)
        if self._child is not None and avoid != self._avoiding:
            self.close()  # time to try a device again that an earlier child hung on
        if self._child is None:
            self._refuse_too_many()
            self._child, self._avoiding = _Child(self._assignment, avoid), avoid
        return self._child

    def _refuse_too_many(self) -> None:
        name = self._assignment.collector.name
        stuck = _abandoned[name] = [process for process in _abandoned.get(name, ()) if process.poll() is None]
        if len(stuck) >= ABANDONED_LIMIT:
            pids = ", ".join(str(process.pid) for process in stuck)
            raise WorkerError(f"processes {pids} hang in the kernel and cannot be killed; no more are started")

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

    def _blame(self, device: str) -> None:
        if not device:
            return
        now_s = self.ctx.clock.monotonic()
        before = self._hangs.get(device)
        count = 1 if before is None or now_s - before.until_s >= FORGIVEN_AFTER_S else before.count + 1
        self._hangs[device] = _Hang(now_s + min(AVOID_FIRST_S * 2 ** (count - 1), AVOID_LAST_S), count)

    def _replay(self, child: _Child, frame: tuple[Any, ...], out: Out) -> None:
        kind, *rest = frame
        if kind == "absent":
            raise NotPresent(rest[0])
        if kind == "failed":
            raise CollectorError(rest[0])
        known, new, ids, values, failures, events, self._found = rest
        child.series[known:] = [self._series(definition) for definition in new]
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
        self._collector: Collector | None = None
        self._opened = False
        self._known: dict[Series, int] = {}

    def run(self) -> None:
        order = self._receive()
        while (request := self._receive()) is not None:
            try:
                answer = _encode(self._collect(order, rescan=request[1]))
            except NotPresent as absence:
                answer = self._forget(("absent", str(absence)))
            except BaseException as error:  # noqa: BLE001 - told to the parent, which counts and logs it
                answer = self._forget(("failed", describe(error)))
            self._send(answer)

    def _forget(self, message: tuple[Any, ...]) -> bytes:
        """Make the answer of a run that ended badly: open again, and define every series again."""
        self._opened = False
        self._known.clear()
        return _encode(message)

    def _collect(self, order: bytes, *, rescan: bool) -> tuple[Any, ...]:
        if self._collector is None:
            assignment, avoid = pickle.loads(order)  # noqa: S301 - from our own parent
            assignment.log_setup()
            self._collector = assignment.collector(assignment.options, NodeContext(**assignment.context, avoid=avoid))
        collector = self._collector
        out = _ChildOut(lambda message: self._send(_encode(message)))
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
            str(collector.found()),
        )

    def _receive(self) -> Any:
        head = _read_exactly(self._requests, _HEAD.size)
        if head is None:
            return None
        body = _read_exactly(self._requests, _HEAD.unpack(head)[0])
        return None if body is None else marshal.loads(body)  # noqa: S302 - from our own parent

    def _send(self, frame: bytes) -> None:
        self._answers.write(frame)
        self._answers.flush()


def _encode(message: object) -> bytes:
    """Make a frame. Raises ValueError for what is no plain data."""
    data = marshal.dumps(message)  # type: ignore[arg-type] # what it refuses raises
    return _HEAD.pack(len(data)) + data


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
