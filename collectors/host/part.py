"""What the host collector is made of: parts, each with its own source, so that one that fails costs only itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.hw import procfs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.api import Context, Metric, Out


class Part:
    """`source` names the part in failures: the file below /proc that it reads.

    `open` and `collect` raise OSError or `procfs.FormatError` when the whole source failed; the other parts go on.
    """

    source = ""

    def open(self) -> None:
        """Discover devices. Repeatable."""

    def collect(self, out: Out) -> None:
        """Read everything once."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what was taken."""


class Columns(Part):
    """A file of one line whose words are values: which word is which metric."""

    def __init__(self, ctx: Context, source: str, metrics: Mapping[int, Metric]) -> None:
        self.source = source
        self._path = f"{ctx.proc}/{source}"
        self._series = [ctx.series(metric) for metric in metrics.values()]
        self._places = list(metrics)
        self._words = max(metrics) + 1

    def collect(self, out: Out) -> None:
        # "1/90" in loadavg is two numbers: threads running, threads in all.
        words = procfs.read(self._path).replace(b"/", b" ").split()
        if len(words) < self._words:
            raise procfs.FormatError(f"expected {self._words} words, found {len(words)}")
        out.extend(self._series, [procfs.number(words[place]) for place in self._places])


class Keys(Part):
    """A file with a key and a number on each line. A key that the kernel does not have is an absent series.

    `metrics`: by key (the colon included, where the file has one), the metric and the factor to its base unit.
    """

    def __init__(self, ctx: Context, source: str, metrics: Mapping[str, tuple[Metric, int]]) -> None:
        self.source = source
        self._path = f"{ctx.proc}/{source}"
        self._rows = [
            (b"\n" + key.encode() + b" ", ctx.series(metric), factor) for key, (metric, factor) in metrics.items()
        ]

    def collect(self, out: Out) -> None:
        self.pick(b"\n" + procfs.read(self._path), out)

    def pick(self, content: bytes, out: Out) -> None:
        """Add what is found in `content`, which begins with a newline."""
        found = False
        for key, series, factor in self._rows:
            try:
                value = procfs.lookup(content, key)
            except procfs.FormatError as error:
                out.failed(f"{self.source} {key.decode().strip()}", error)
                found = True
                continue
            if value is not None:
                out.add(series, value * factor)
                found = True
        if not found:
            raise procfs.FormatError(f"none of the {len(self._rows)} expected keys is in it")
