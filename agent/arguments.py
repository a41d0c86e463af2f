"""The command line's verbs and options. Wrong usage ends with status 64 and one clear line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import NoReturn

from agent import __version__, log

EXIT_USAGE = 64  # sysexits.h


def complain(text: str) -> None:
    """Write a line to standard error; where that cannot be, the exit status must do."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode("utf-8", "replace"))


class _Parser(argparse.ArgumentParser):
    """An argument parser that ends with status 64 and one clear line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is."""
        complain(f"{self.prog}: {message}; see `{self.prog} --help`")
        sys.exit(EXIT_USAGE)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; `verb` says which command was given."""
    whole = _Parser(
        prog="hpcwatch",
        description="Watches one HPC or AI node and shows what it finds on a Prometheus endpoint.",
        epilog="Exit status: 0 done, 1 failed, 64 wrong usage, 70 internal error, 78 bad configuration.",
    )
    whole.add_argument("--version", action="version", version=f"hpcwatch {__version__}")
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=_Parser)
    common = _common()
    _verb(verbs, "run", "run the agent in the foreground until SIGTERM or SIGINT", _common(log_level="info"))
    once = _verb(verbs, "once", "collect once and print what a scraper would see", common)
    once.add_argument("--format", choices=("text", "openmetrics", "json"), default="text", help="default: text")
    once.add_argument("--push", action="store_true", help="also send to the configured outputs")
    once.add_argument(
        "--collector", action="append", default=[], metavar="NAME", help="only this one, repeatable; on whatever is set"
    )
    _add_demo(verbs)
    collectors = _verb(verbs, "collectors", "list each collector, what it needs and what it found", common)
    collectors.add_argument("--json", action="store_true", help="as JSON")
    metrics = _verb(verbs, "metrics", "list every metric", [_logging()])
    metrics.add_argument("--format", choices=("table", "markdown", "json"), default="table", help="default: table")
    config = _verb(verbs, "config", "check the configuration, show it, or write a commented default", common)
    config.add_argument("action", choices=("check", "show", "init"), help="what to do; init and show print to stdout")
    return whole


def _add_demo(verbs: argparse._SubParsersAction[_Parser]) -> None:
    demo = _verb(verbs, "demo", "watch a simulated node until Ctrl-C; touches nothing of this one", [_logging()])
    demo.add_argument(
        "--sku", default="ND96asr_v4", metavar="SIZE", help="VM size, default: %(default)s; list: those there are"
    )
    demo.add_argument(
        "--scenario", default="day", metavar="NAME", help="what happens, default: %(default)s; list: those there are"
    )
    demo.add_argument(
        "--listen", type=_listen, default="127.0.0.1:9753", metavar="ADDR", help="default: %(default)s; port 0: any"
    )
    demo.add_argument(
        "--speed", type=_speed, default=1.0, metavar="X", help="simulated seconds in one, 0.1 to 100, default: 1"
    )


def _verb(
    verbs: argparse._SubParsersAction[_Parser],
    name: str,
    text: str,
    parents: list[_Parser],
) -> _Parser:
    return verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=parents)


def _logging(log_level: str = "warning") -> _Parser:
    group = _Parser(add_help=False)
    group.add_argument("--log-level", choices=log.LEVELS, default=log_level, help=f"default: {log_level}")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="default: text")
    group.add_argument("--version", action="version", version=f"hpcwatch {__version__}")
    return group


def _assignment(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, such as agent.interval=5s, got {text!r}")
    return text


def _listen(text: str) -> str:
    from agent.address import parse_listen  # noqa: PLC0415 - one verb's option

    try:
        parse_listen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.1 <= speed <= 100:  # noqa: PLR2004 - as the help says; nan is no speed either
        raise argparse.ArgumentTypeError(f"expected a number from 0.1 to 100, got {text!r}")
    return speed


def _common(log_level: str = "warning") -> list[_Parser]:
    group = _Parser(add_help=False)
    group.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="configuration, repeatable; default: /etc/hpcwatch/hpcwatch.yaml if there",
    )
    group.add_argument("--config-dir", metavar="DIR", help="default: /etc/hpcwatch/conf.d")
    group.add_argument("--sysfs", metavar="DIR", help="root of sysfs, default: /sys")
    group.add_argument("--procfs", metavar="DIR", help="root of procfs, default: /proc")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=_assignment,
        metavar="KEY=VALUE",
        help="one setting, such as agent.interval=5s",
    )
    return [group, _logging(log_level)]
