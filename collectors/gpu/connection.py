"""The connection with the driver: started with patience, given up when the driver was replaced under this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from agent.api import Outdated
from agent.hw import nvidia
from agent.hw.nvml import library, session
from agent.hw.nvml.session import Driver, NvmlError, Session

if TYPE_CHECKING:
    from agent.api import Context, Out
    from collectors.gpu.memory import Memory

NAME = "nvml"  # what a hang in the driver's start is blamed on
START_SHARE = 10  # times the timeout, for loading, initialising and counting
RETRY_FIRST_S = 1.0
RETRY_LAST_S = 60.0
GIVE_UP_AGAIN_S = 600.0  # if a new process did not help, another will not sooner
NO_DRIVER = Driver("", "", "")
# What a working session answers when the driver is not the one that it began with.
SESSION_ENDED = frozenset({session.UNINITIALIZED, session.DRIVER_NOT_LOADED, session.VERSION_MISMATCH})


class Connection:
    """NVML, as long as it can be had. `code` is how its last start, or the call that ended the session, came out.

    A process that loaded NVML keeps that library whatever becomes of its file, so a driver that was replaced needs a
    new process: `Outdated` is raised. What the new process finds when it starts is no reason to give it up as well.
    """

    def __init__(self, path: str | None, ctx: Context, memory: Memory) -> None:
        self.code: int | None = None  # None: nothing was tried
        self.error: NvmlError | None = None
        self.driver = NO_DRIVER
        self.module_version: str | None = None
        self._path = path
        self._ctx = ctx
        self._memory = memory
        self._session: Session | None = None
        self._library: tuple[str, library.Identity | None] | None = None
        self._first_version: str | None = None  # of the kernel module, when this process first tried
        self._retry_at_s = float("-inf")
        self._backoff_s = RETRY_FIRST_S

    @property
    def avoided(self) -> str:
        """What a process before did on NVML as a whole, so that it is left alone; empty when nothing."""
        return self._ctx.avoid.get(NAME, "")

    def fatal(self, now_s: float) -> frozenset[int]:
        """Return the codes in a GPU's answer that concern the session; none while giving up has led nowhere."""
        return SESSION_ENDED if self._may_give_up(now_s) else frozenset()

    def ensure(self, out: Out, now_s: float) -> tuple[Session, int] | None:
        """Return the session and how many GPUs NVML has; None while it cannot be had. Raises Outdated."""
        self._look_at_module(out)
        if self.avoided:
            return None
        if self.code is None:
            self._first_version = self.module_version
        self._require_same_driver()
        try:
            if self._session is None:
                return self._start(out) if now_s >= self._retry_at_s else None
            out.working_on(NAME)
            return self._session, self._session.count()
        except NvmlError as error:
            if self._session is not None and error.code in self.fatal(now_s):
                self.give_up(error, now_s)
            self._drop(error, now_s)
            return None

    def give_up(self, error: NvmlError, now_s: float) -> NoReturn:
        """Give this process up for what a working session answered. Raises Outdated."""
        self._memory.given_up_s = float(now_s)
        self._give_up(f"NVML worked and now does not: {error}")

    def close(self) -> None:
        """End the session."""
        ended, self._session = self._session, None
        if ended is not None:
            ended.close()

    def _start(self, out: Out) -> tuple[Session, int]:
        out.working_on(NAME, START_SHARE * self._ctx.timeout_s)
        started = Session(self._path)
        try:
            started.open()
        finally:
            path = started.library_path()
            self._library = None if path is None else (path, library.identity(path))
        driver, count = started.driver(), started.count()
        self._session, self.driver = started, driver
        self.code, self.error, self._backoff_s = 0, None, RETRY_FIRST_S
        return started, count

    def _drop(self, error: NvmlError, now_s: float) -> None:
        self._session, self.driver = None, NO_DRIVER
        self.code, self.error = error.code, error
        self._retry_at_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, RETRY_LAST_S)

    def _look_at_module(self, out: Out) -> None:
        try:
            self.module_version = nvidia.kernel_module_version(self._ctx.proc)
        except OSError as error:
            out.failed("kernel module version", error)

    def _require_same_driver(self) -> None:
        now, before = self.module_version, self._first_version
        if now is not None and now != before:
            self._give_up(f"the kernel module is now {now}, was {before or 'not loaded'}")
        if self._library is not None:
            path, loaded = self._library
            present = library.identity(path)
            if present is not None and present != loaded:  # gone: half-way through an upgrade
                self._give_up(f"{path} was replaced")

    def _may_give_up(self, now_s: float) -> bool:
        before_s = self._memory.given_up_s
        return before_s is None or now_s - before_s >= GIVE_UP_AGAIN_S

    def _give_up(self, text: str) -> NoReturn:
        # Not shut down: that would be one more call into what does not work any more.
        self._memory.save()
        raise Outdated(text)
