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

KILL_PATIENCE_S = 0.5
FRAME_LIMIT = 64 << 20
FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_BOOT = "import sys; sys.path[:] = {path!r}; from agent.worker import serve; serve({lifeline})"


class WorkerError(Exception):
    """The child died, hung, or could not be started. Says how."""


class ChildEndedError(WorkerError):
    """The child ended by itself. `crashed`: by a signal that a fault in its own code raises."""

    def __init__(self, text: str, *, crashed: bool) -> None:
        super().__init__(text)
        self.crashed = crashed


class Child:
    """One child process and its pipes."""

    def __init__(self, assignment: Assignment, memory: str, avoid: Mapping[str, str]) -> None:
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
        """Return the next frame; None when the deadline passed. Raises WorkerError when the child is gone."""
        while (frame := self._take_frame()) is None:
            left_s = deadline_s - monotonic()
            if left_s <= 0:
                return None
            if not self._poll.poll(left_s * 1000):
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
            return ChildEndedError("its process ended: it closed its output", crashed=False)
        how = f"killed by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exit status {status}"
        return ChildEndedError(f"its process ended: {how}", crashed=-status in FAULTS)
