"""The connection with the driver: started with patience, given up when the driver was replaced under this process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn

from agent.api import Outdated
from agent.hw import nvidia
from agent.hw.nvml import library
from agent.hw.nvml.session import Driver, NvmlError, Session, SessionEndedError

if TYPE_CHECKING:
    from agent.api import Context, Out
    from collectors.gpu.memory import Memory

NAME = "nvml"  # what a hang in the driver's start is blamed on
VERSION_FILE = "driver/nvidia/version"  # and one in reading this
START_SHARE = 10  # times the timeout, for loading, initialising and counting
RETRY_FIRST_S = 1.0
RETRY_LAST_S = 60.0
GIVE_UP_AGAIN_S = 600.0  # if a new process did not help, another will not sooner
FAILED_COUNTS_LIMIT = 3  # in a row; a session that fails to count longer is given up
NO_DRIVER = Driver("", "", "")


class Connection:
    """NVML, as long as it can be had. `code` is how its last start, or the call that ended the session, came out.

    `count` is how many GPUs NVML lists; None where it did not tell this time. A process that loaded NVML keeps that
    library whatever becomes of its file, so a driver that was replaced needs a new process: `Outdated` is raised. What
    the new process finds when it starts is no reason to give it up as well.
    """

    def __init__(self, path: str | None, ctx: Context, memory: Memory) -> None:
        self.code: int | None = None  # None: nothing was tried
        self.error: NvmlError | None = None
        self.count: int | None = None
        self.driver = NO_DRIVER
        self.module_version: str | None = None
        self._path = path
        self._ctx = ctx
        self._memory = memory
        self._session: Session | None = None
        self._former: Session | None = None  # of no more use, and not shut down yet
        self._last_count = 0
        self._failed_counts = 0
        self._library: tuple[str, library.Identity | None] | None = None
        self._first_version: str | None = None  # of the kernel module, when this process first tried
        self._retry_at_s = float("-inf")
        self._backoff_s = RETRY_FIRST_S

    @property
    def avoided(self) -> str:
        """What a process before did on NVML as a whole, so that it is left alone; empty when nothing."""
        return self._ctx.avoid.get(NAME, "")

    def ensure(self, out: Out, now_s: float) -> tuple[Session, int] | None:
        """Return the session and how many GPUs NVML listed last; None while it cannot be had.

        Raises Outdated, and SessionEndedError.
        """
        self.count = None
        self._look_at_module(out)
        if self.avoided:
            return None
        if self.code is None:
            self._first_version = self.module_version
        self._require_same_driver()
        if self._session is None:
            return self._start(out, now_s) if now_s >= self._retry_at_s else None
        self._session.watch_its_end = _is_over(self._memory.given_up_s, now_s)
        return self._recount(self._session, out, now_s)

    def give_up(self, error: SessionEndedError, now_s: float) -> NoReturn:
        """Give this process up for what a working session answered. Raises Outdated."""
        self._memory.given_up_s = float(now_s)
        self._give_up(f"NVML worked and now does not: {error}")

    def renew(self, lost: str, now_s: float) -> None:
        """Give this process up for a GPU that stays lost to it. Raises Outdated, unless that was tried lately."""
        if _is_over(self._memory.renewed_s, now_s):
            self._memory.renewed_s = float(now_s)
            self._give_up(f"{lost}; the system shows it, and NVML may find it in a new process")

    def close(self) -> None:
        """End the session. Raises NvmlError."""
        ended, self._session = self._session, None
        if ended is not None:
            ended.close()

    def _start(self, out: Out, now_s: float) -> tuple[Session, int] | None:
        out.working_on(NAME, START_SHARE * self._ctx.timeout_s)
        if self._former is not None:  # or its memory and files would stay for good
            with contextlib.suppress(NvmlError):
                self._former.close()
            self._former = None
        try:
            started = self._open()
            self.driver, self.count = started.driver(), started.count()
        except NvmlError as error:
            self._drop(error, now_s)
            return None
        self.code, self.error, self._backoff_s = 0, None, RETRY_FIRST_S
        self._last_count, self._failed_counts = self.count, 0
        started.watch_its_end = _is_over(self._memory.given_up_s, now_s)
        return started, self.count

    def _open(self) -> Session:
        opened = Session(self._path)
        try:
            opened.open()
        finally:
            path = opened.library_path()
            self._library = None if path is None else (path, library.identity(path))
        self._session = opened
        return opened

    def _recount(self, nvml: Session, out: Out, now_s: float) -> tuple[Session, int] | None:
        out.working_on(NAME)
        try:
            self.count = self._last_count = nvml.count()
        except SessionEndedError:
            raise
        except NvmlError as error:
            self._failed_counts += 1
            if self._failed_counts > FAILED_COUNTS_LIMIT:
                self._drop(error, now_s)
                return None
            out.failed("NVML", error)
        else:
            self._failed_counts = 0
        return nvml, self._last_count

    def _drop(self, error: NvmlError, now_s: float) -> None:
        self._former, self._session, self.driver = self._session, None, NO_DRIVER
        self.code, self.error = error.code, error
        self._retry_at_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, RETRY_LAST_S)

    def _look_at_module(self, out: Out) -> None:
        if VERSION_FILE in self._ctx.avoid:
            out.failed("kernel module version", f"a process did not survive reading {VERSION_FILE}; it is left alone")
            return
        out.working_on(VERSION_FILE)
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
            # Gone: half-way through an upgrade.
            if present is not None and present != loaded and not self._waits_for_module(path):
                self._give_up(f"{path} was replaced")

    def _waits_for_module(self, path: str) -> bool:
        """Say whether a new library would not work with the kernel module that is loaded, while the old one does.

        So it is between an upgrade of the packages and the reboot, or reload of the module, that completes it.
        """
        version = library.version(path)
        is_other = version is not None and self.module_version is not None and version != self.module_version
        return is_other and self._session is not None

    def _give_up(self, text: str) -> NoReturn:
        # Not shut down: that would be one more call into what does not work any more.
        self._memory.save(whole=True)
        raise Outdated(text)


def _is_over(before_s: float | None, now_s: float) -> bool:
    """Say whether a process may be given up again."""
    return before_s is None or now_s - before_s >= GIVE_UP_AGAIN_S
