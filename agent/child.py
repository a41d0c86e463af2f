"""One child process of the PROCESS lane and its pipes, as the agent holds them (`agent.worker` is inside)."""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import select
import signal
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Any, cast

from agent.worker import HEAD, Assignment, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.api import Series

START_PATIENCE_S = 10.0  # for an interpreter to start, on a node whose every core is busy
KILL_PATIENCE_S = 0.5
FRAME_LIMIT = 64 << 20
SIGNALS_OF_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_BOOT = "import sys; sys.path[:] = {path!r}; from agent.worker import serve; serve({lifeline})"


class WorkerError(Exception):
    """The child died, hung, or could not be started. Says how."""


class ChildEndedError(WorkerError):
    """The child ended by itself. `by_signal_of_others`: as somebody ends a process, not as a fault of its own does."""

    def __init__(self, text: str, *, by_signal_of_others: bool) -> None:
        super().__init__(text)
        self.by_signal_of_others = by_signal_of_others


class OutdatedError(WorkerError):
    """The child says that it is of no more use (`agent.api.Outdated`)."""


class Child:
    """One child process and its pipes."""

    def __init__(self, assignment: Assignment, memory: Mapping[str, Any], avoid: Mapping[str, str]) -> None:
        order = pickle.dumps((assignment, memory, avoid))  # first, because it may fail
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
        self.starting = True
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        os.set_blocking(self._stdout.fileno(), False)
        self.send(order)

    def send(self, message: object) -> None:
        """Send one frame. A dead child shows when its answer is read."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(encode(message))

    def receive(self, deadline_s: float, monotonic: Callable[[], float]) -> tuple[Any, ...] | None:
        """Return the next frame; None when there is none by the deadline. Raises ChildEndedError."""
        while (frame := self._take_frame()) is None:
            if not self._poll.poll(max(0.0, deadline_s - monotonic()) * 1000):
                if monotonic() >= deadline_s:
                    return None
                continue
            data = os.read(self._stdout.fileno(), 1 << 20)
            if not data:
                raise self._end()
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

    @property
    def pid(self) -> int:
        """Its process number."""
        return self.process.pid

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

    def _end(self) -> ChildEndedError:
        try:
            status = self.process.wait(KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:  # stuck on its way out
            return ChildEndedError("its process ended: it closed its output", by_signal_of_others=False)
        how = f"killed by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exit status {status}"
        return ChildEndedError(f"its process ended: {how}", by_signal_of_others=-status in SIGNALS_OF_OTHERS)


class Run:
    """One run asked of a child: the device in hand, since when and for how long it may be, and how the run ended."""

    def __init__(self, child: Child, timeout_s: float, monotonic: Callable[[], float], *, rescan: bool) -> None:
        self.child = child
        self.device = ""
        self.limit_s = START_PATIENCE_S if child.starting else timeout_s
        self.memory: bytes | None = None  # what the collector wants remembered, as marshal data
        self.frame: tuple[Any, ...] | None = None  # that ended it
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._since_s = monotonic()
        child.send(("run", rescan))

    @property
    def overdue(self) -> bool:
        """True when it has not ended and the device in hand has had its time."""
        return self.frame is None and self._monotonic() >= self._since_s + self.limit_s

    @property
    def brings_points(self) -> bool:
        """True when it ended with values."""
        return self.frame is not None and self.frame[0] == "points"

    @property
    def trouble(self) -> WorkerError | None:
        """Why the child is of no more use; None while it may be, and when it answered."""
        if self.overdue:
            return WorkerError(f"no answer within {self.limit_s:g} s")
        if self.frame is not None and self.frame[0] == "outdated":
            return OutdatedError(str(self.frame[1]))
        return None

    def follow(self, working_on: Callable[[str, float], None]) -> None:
        """Follow it to its end, or to the deadline of a device. Raises ChildEndedError."""
        while self.frame is None and self._step(self._since_s + self.limit_s, working_on):
            pass

    def glance(self) -> None:
        """Follow it as far as it has come. Raises ChildEndedError."""
        while self.frame is None and self._step(self._monotonic(), lambda _device, _limit_s: None):
            pass

    def _step(self, deadline_s: float, working_on: Callable[[str, float], None]) -> bool:
        frame = self.child.receive(deadline_s, self._monotonic)
        if frame is None:
            return False
        kind, *rest = frame
        if kind == "on":
            self.device, limit_s = rest
            self._begin(limit_s or self._timeout_s)
            working_on(self.device, self.limit_s)
        elif kind == "ready":
            self.child.starting = False
            self._begin(self._timeout_s)
        elif kind == "state":
            self.memory = rest[0]
        else:
            self.frame = frame
        return True

    def _begin(self, limit_s: float) -> None:
        self.limit_s, self._since_s = limit_s, self._monotonic()
