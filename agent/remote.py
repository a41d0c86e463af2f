"""The PROCESS lane, the agent's side: a collector in a child process, because its calls may never return and may crash.

`Remote` stands in for the collector. It asks the child (`agent.worker`) for one run at a time and waits no longer than
the deadline. A child that hangs is killed and replaced at once by one that avoids the device it hung on; a child that
cannot even be killed (a driver holds it) is abandoned, and while two such of one collector exist no more are started.
Programs that a child started end with it, and all of them end with the agent, however that ends.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

from agent.api import Collector, Event, Kind, Metric, NotPresent, Series, Severity
from agent.worker import HEAD, Assignment, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.api import Context, Out

ABANDONED_LIMIT = 2
KILL_PATIENCE_S = 0.5
AVOID_FIRST_S = 30.0
AVOID_LAST_S = 900.0
FORGIVEN_AFTER_S = 3600.0  # a device without a hang for this long counts as healthy again
FRAME_LIMIT = 64 << 20
_BOOT = "import sys; sys.path[:] = {path!r}; from agent.worker import serve; serve({lifeline})"
# By collector, because a reload makes a new Remote but the processes that cannot be killed are still there.
_abandoned: dict[str, list[subprocess.Popen[bytes]]] = {}


class WorkerError(Exception):
    """The child died, hung, or could not be started. Says how."""


class CollectorError(Exception):
    """The collector in the child raised; the child itself is well. The text says type and message."""


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
            self._stdin.write(encode(message))

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
        if len(self._buffer) < HEAD.size:
            return None
        (length,) = HEAD.unpack_from(self._buffer)
        if length > FRAME_LIMIT:
            raise WorkerError(f"its process sent a frame of {length} bytes")
        end = HEAD.size + length
        if len(self._buffer) < end:
            return None
        frame = marshal.loads(bytes(self._buffer[HEAD.size : end]))  # noqa: S302 - from our own child
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
