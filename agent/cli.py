"""The commands, and their exit statuses (sysexits.h: 64 usage, 70 internal, 78 configuration)."""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from agent import log
from agent.arguments import EXIT_USAGE, complain, parser
from agent.config.tree import ConfigError
from agent.hw.process import share_one_heap
from agent.registry import RegistryError, installed, refuse_strangers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from agent.config.settings import Settings
    from agent.registry import Plugin

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERNAL = 70
EXIT_CONFIG = 78

logger = logging.getLogger("hpcwatch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. Never a traceback for the user's mistake."""
    options = parser().parse_args(arguments)
    command = _COMMANDS[options.verb]
    if command in {_run, _demo}:
        _end_early_on_signals()
        share_one_heap()
    setup = partial(log.setup, options.log_level, options.log_format)
    setup()
    try:
        refuse_strangers()
        status = command(_Invocation(options, setup))
    except (ConfigError, RegistryError) as mistake:
        complain(f"hpcwatch: {mistake}")
        return EXIT_CONFIG
    except _OutputError as error:
        return _without_output(error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        logger.exception("internal error, please report it with the lines below: %s", error)  # noqa: TRY401
        return EXIT_INTERNAL
    return int(status)


class _OutputError(Exception):
    """What a command prints could not be written. The cause is the OSError."""


def _print(text: str | bytes) -> None:
    """Write all of it to standard output. Raises _OutputError."""
    try:
        with os.fdopen(1, "wb", closefd=False) as output:
            output.write(text.encode("utf-8", "replace") if isinstance(text, str) else text)
    except OSError as error:
        raise _OutputError from error


def _without_output(error: _OutputError) -> int:
    """Say why nothing more could be printed; `hpcwatch metrics | head` is no failure."""
    cause = error.__cause__
    if isinstance(cause, BrokenPipeError):
        return EXIT_OK
    complain(f"hpcwatch: cannot write to standard output: {getattr(cause, 'strerror', cause)}")
    return EXIT_FAILED


class _Invocation:
    """What every command starts from: its options, the installed collectors, and how to read the configuration."""

    def __init__(self, options: argparse.Namespace, child_setup: Callable[[], None]) -> None:
        self.options = options
        self.child_setup = child_setup
        self.plugins: Mapping[str, Plugin] = installed()

    def settings(self) -> Settings:
        """Read the configuration. Raises ConfigError."""
        from agent.config import DEFAULT_DIRECTORY, Sources, load  # noqa: PLC0415 - yaml and msgspec, when needed

        options = self.options
        sources = Sources(
            files=options.config,
            directory=options.config_dir or DEFAULT_DIRECTORY,
            sets=options.set,
            sysfs=options.sysfs,
            procfs=options.procfs,
        )
        return load(sources, collector_names=list(self.plugins), output_names=[])


def _end_early_on_signals() -> None:
    """Be ready for a service manager from the start; the daemon takes the signals over when it serves."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: os._exit(EXIT_OK))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is about to be read is not to be read again


def _run(call: _Invocation) -> int:
    from agent.daemon import Daemon, ListenError, leave  # noqa: PLC0415 - sockets and servers, when needed
    from agent.engine import Engine  # noqa: PLC0415
    from agent.server.webconfig import WebConfigError  # noqa: PLC0415

    engine = Engine(call.settings(), call.plugins, child_setup=call.child_setup)
    try:
        status = Daemon(engine, call.settings).run()
    except WebConfigError as mistake:
        raise ConfigError("outputs.prometheus.web_config", str(mistake)) from mistake
    except ListenError as mistake:
        logger.error("%s; outputs.prometheus.listen sets another address", mistake)  # noqa: TRY400
        return EXIT_FAILED
    return leave(status)


def _demo(call: _Invocation) -> int:
    from agent.daemon import ListenError, leave  # noqa: PLC0415 - sockets and servers, when needed
    from agent.sim import demo  # noqa: PLC0415

    options = call.options
    if "list" in {options.sku, options.scenario}:
        _print(demo.sizes_text() if options.sku == "list" else demo.scenarios_text())
        return EXIT_OK
    wishes = demo.Wishes(options.sku, options.scenario, options.listen, options.speed)
    try:
        status = demo.run(wishes, call.plugins, call.child_setup, _print)
    except demo.RefusedError as mistake:
        complain(f"hpcwatch demo: {mistake}")
        return EXIT_USAGE
    except ListenError as mistake:
        complain(f"hpcwatch demo: cannot serve on {options.listen}: {mistake}; --listen sets another address")
        return EXIT_FAILED
    return leave(status)


def _once(call: _Invocation) -> int:
    from agent.engine import Engine  # noqa: PLC0415 - yaml and msgspec, when needed
    from agent.reports import snapshot_json  # noqa: PLC0415

    only = call.options.collector
    unknown = sorted(set(only) - set(call.plugins))
    if unknown:
        complain(f"hpcwatch once: no collector {', '.join(unknown)}; installed: {', '.join(call.plugins)}")
        return EXIT_USAGE
    if call.options.push:
        logger.warning("--push: no output that sends is configured")
    engine = Engine(call.settings(), call.plugins, child_setup=call.child_setup, look_once=True, only=only)
    engine.start()
    engine.wait_for_first_round()
    form = call.options.format
    page = snapshot_json(engine) if form == "json" else engine.exposition.page(openmetrics=form == "openmetrics")
    _print(page)
    failed = any(job.enabled and not job.up for _, job in engine.collectors.values())
    engine.stop()
    return EXIT_FAILED if failed else EXIT_OK


def _collectors(call: _Invocation) -> int:
    from agent.engine import Engine  # noqa: PLC0415 - yaml and msgspec, when needed
    from agent.reports import collectors_json, collectors_table  # noqa: PLC0415
    from agent.status import collector_rows  # noqa: PLC0415

    logging.getLogger().setLevel(logging.CRITICAL)  # the table tells what failed
    engine = Engine(call.settings(), call.plugins, child_setup=call.child_setup, look_once=True)
    engine.start()
    engine.wait_for_first_round()
    rows = collector_rows(engine)
    engine.stop()
    _print(collectors_json(rows) if call.options.json else collectors_table(rows))
    return EXIT_OK


def _metrics(call: _Invocation) -> int:
    from agent.reports import declared_metrics, metrics_text  # noqa: PLC0415 - imports every collector

    _print(metrics_text(declared_metrics(call.plugins), call.options.format))
    return EXIT_OK


def _config(call: _Invocation) -> int:
    from agent.advice import advise  # noqa: PLC0415 - yaml, when needed
    from agent.config.text import default_text, show  # noqa: PLC0415 - yaml and msgspec, when needed
    from agent.reports import usable_collectors  # noqa: PLC0415

    classes = usable_collectors(call.plugins)
    if call.options.action == "init":
        _print(default_text(classes, {}))
        return EXIT_OK
    settings = call.settings()
    text = show(settings, classes, {})  # checks every collector's own keys, too
    for line in advise(settings):
        logger.warning("%s", line)
    if settings.prometheus.web_config:
        _check_web_config(settings.prometheus.web_config)
    _print(text if call.options.action == "show" else "configuration is valid\n")
    return EXIT_OK


def _check_web_config(path: str) -> None:
    from pathlib import Path  # noqa: PLC0415

    from agent.server.webconfig import WebConfig, WebConfigError  # noqa: PLC0415 - ssl and bcrypt, when needed

    try:
        WebConfig(Path(path))
    except WebConfigError as mistake:
        raise ConfigError("outputs.prometheus.web_config", str(mistake)) from mistake


_COMMANDS: Mapping[str, Callable[[_Invocation], int]] = {
    "run": _run,
    "once": _once,
    "demo": _demo,
    "collectors": _collectors,
    "metrics": _metrics,
    "config": _config,
}

if __name__ == "__main__":
    sys.exit(main())
