"""`hpcwatch run`: the engine behind its sockets, and the main thread's loop of signals, deadlines and connections."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from agent import __version__
from agent.address import parse_listen
from agent.config.tree import ConfigError
from agent.hw.process import give_memory_back
from agent.notify import Notifier
from agent.server import Server
from agent.server.webconfig import WebConfig
from agent.snapshot import describe
from agent.web import WebApp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from agent.config.settings import Settings
    from agent.engine import Engine

RELOAD_PATIENCE_S = 30.0

log = logging.getLogger("agent")


class ListenError(Exception):
    """The HTTP port cannot be had. Says which and why."""


class Daemon:
    """Serves one engine until SIGTERM or SIGINT. `read_settings` reads the configuration again for SIGHUP.

    `on_serving` is called once with the address and the port as soon as there are answers. `reloads` False: there is no
    configuration to change, and SIGHUP, as when a terminal is closed, ends it.
    The main thread never touches hardware and never waits for anything but its selector.
    """

    def __init__(
        self,
        engine: Engine,
        read_settings: Callable[[], Settings],
        on_serving: Callable[[str, int], None] = lambda _host, _port: None,
        *,
        reloads: bool = True,
    ) -> None:
        self._engine = engine
        self._read_settings = read_settings
        self._on_serving = on_serving
        self._reloads = reloads
        self._at_start = _fixed_at_start(engine.settings)
        self._notifier = Notifier()
        self._selector = selectors.DefaultSelector()
        self._servers: list[Server] = []
        self._wake_in, self._wake_out = socket.socketpair()
        self._stop = ""  # the signal that ends it
        self._reload_wanted = False
        self._reload_lock = threading.Lock()
        self._reloading_since_s: float | None = None
        self._watchdog_at_s = 0.0
        self._frozen = False

    def run(self) -> int:
        """Serve; return the exit status. Raises ListenError when the port is taken, WebConfigError for a web config."""
        self._take_signals()  # first: who sees the port may send one at once
        try:
            host, port = self._listen()
            self._engine.start()
            self._on_serving(host, port)
            self._notifier.ready(f"serving on {self._engine.settings.prometheus.listen}")
            while not self._stop:
                self._turn()
        finally:
            self._shut_down()
        return 0

    def _listen(self) -> tuple[str, int]:
        prometheus, agent = self._engine.settings.prometheus, self._engine.settings.agent
        web = WebConfig(Path(prometheus.web_config)) if prometheus.web_config else None
        app = WebApp(self._engine, self._reload)
        try:
            http = Server(parse_listen(prometheus.listen), app, web=web)
        except OSError as error:
            raise ListenError(error.strerror or str(error)) from error
        self._serve(http)
        host, port = http.address
        log.info("hpcwatch %s serves http://%s:%d/metrics", __version__, f"[{host}]" if ":" in host else host, port)
        try:
            self._serve(Server(Path(agent.socket), app))
        except OSError as error:  # commands cannot reach the agent then; monitoring goes on
            log.warning("control socket: %s; going on without it", describe(error))
        return host, port

    def _serve(self, server: Server) -> None:
        self._servers.append(server)
        self._selector.register(server, selectors.EVENT_READ, server.accept)

    def _take_signals(self) -> None:
        self._wake_in.setblocking(False)  # noqa: FBT003 - its only argument
        self._wake_out.setblocking(False)  # noqa: FBT003 - its only argument
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain)
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload if self._reloads else self._on_stop)

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        self._stop = self._stop or signal.Signals(number).name  # told later: a signal handler must not log

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self._reload_wanted = True

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def _turn(self) -> None:
        """Wait for the next thing to do, and do it."""
        now_s = self._engine.clock.monotonic()
        if self._reload_wanted and self._reloading_since_s is None:
            self._start_reload(now_s)
        wait_s = min(self._engine.check() - now_s, self._watch_reload(now_s))
        if (watchdog_s := self._notifier.watchdog_s) is not None:
            if now_s >= self._watchdog_at_s and self._engine.progressing:
                self._notifier.alive()
                self._watchdog_at_s = now_s + watchdog_s
            # While no sign of life may be given, look again at this pace.
            wait_s = min(wait_s, max(watchdog_s / 2, self._watchdog_at_s - now_s))
        if not self._frozen and self._engine.first_round_done:
            gc.collect()
            give_memory_back()
            gc.freeze()  # what exists now lives as long as the agent; later collections need not look at it
            self._frozen = True
        for key, _ in self._selector.select(max(0.0, wait_s)):
            key.data()

    def _start_reload(self, now_s: float) -> None:
        """Reload in a thread of its own: files and plug-ins may lie on a mount that hangs."""
        self._reload_wanted, self._reloading_since_s = False, now_s  # first: the thread may end at once
        try:
            threading.Thread(target=self._reload_aside, name="reload", daemon=True).start()
        except RuntimeError:  # no more threads: still wanted at the next turn
            self._reload_wanted, self._reloading_since_s = True, None

    def _reload_aside(self) -> None:
        try:
            self._reload()
        finally:
            self._reloading_since_s = None  # before the wake-up, so that a reload wanted meanwhile begins
            self._wake()

    def _watch_reload(self, now_s: float) -> float:
        """Tell once of a reload that hangs; return in how many seconds to look again."""
        since_s = self._reloading_since_s
        if since_s is None:
            return float("inf")
        left_s = since_s + RELOAD_PATIENCE_S - now_s
        if left_s <= 0 and self._engine.reload_ok:
            self._engine.note_reload(ok=False)
            log.error(
                "the reload has not returned within %g s; the configuration before is in force", RELOAD_PATIENCE_S
            )
        return left_s if left_s > 0 else RELOAD_PATIENCE_S

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"r")

    def _reload(self) -> str:
        """Read the configuration again; return what is wrong with it, or an empty text. Any thread may call."""
        if not self._reload_lock.acquire(timeout=RELOAD_PATIENCE_S):
            log.error("configuration not reloaded: the reload before has not returned")
            self._engine.note_reload(ok=False)
            return "the reload before has not returned"
        try:
            return self._reload_alone()
        finally:
            self._reload_lock.release()
            self._wake()  # the main thread must learn of new deadlines

    def _reload_alone(self) -> str:
        self._notifier.reloading()
        before = self._engine.settings
        try:
            settings = self._read_settings()
            self._engine.reload(settings)
        except ConfigError as mistake:
            self._engine.note_reload(ok=False)
            log.error("configuration not reloaded, the one before stays in force: %s", mistake)  # noqa: TRY400
            self._notifier.ready("serving with the configuration before the last reload")
            return str(mistake)
        except Exception as error:
            self._engine.note_reload(ok=False)
            log.exception("internal error while reloading, please report it: %s", error)  # noqa: TRY401
            self._notifier.ready("serving, but the last reload failed")
            return describe(error)
        self._engine.note_reload(ok=True)
        log.info("configuration reloaded")
        waiting = [key for key, value in _fixed_at_start(settings).items() if value != self._at_start[key]]
        if waiting:
            log.warning("takes effect at the next restart: %s", ", ".join(waiting))
        self._notifier.ready(f"serving on {before.prometheus.listen}")
        return ""

    def _shut_down(self) -> None:
        if self._stop:
            log.info("%s received, stopping", self._stop)
        self._notifier.stopping()
        signal.set_wakeup_fd(-1)
        for server in self._servers:
            server.close()
        self._engine.stop()
        for handler in logging.getLogger().handlers:
            handler.flush()


def _fixed_at_start(settings: Settings) -> dict[str, object]:
    """Return what a reload cannot change, by key: sockets are open, events carry their labels."""
    agent, prometheus = settings.agent, settings.prometheus
    of_agent = {f"agent.{key}": getattr(agent, key) for key in ("socket", "state_dir", "labels")}
    return of_agent | {f"outputs.prometheus.{key}": value for key, value in vars(prometheus).items()}


def leave(status: int) -> NoReturn:
    """End the process without waiting for threads that hang in the kernel. Never returns."""
    os._exit(status)
