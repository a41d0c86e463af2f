"""Files in the Prometheus text format 0.0.4, as other programs leave them in a directory.

Finds them without opening what could block, reads them within limits, and parses them with prometheus-client's parser.
That parser is laxer than the format and than what a scraper accepts afterwards, so what it lets through is checked
here. The package is imported with the first file that is parsed.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TextIO, cast

if TYPE_CHECKING:
    from prometheus_client.samples import Sample as ParsedSample

SUFFIX = ".prom"
LINE_LIMIT_CHARS = 16384  # the parser's time grows with the square of a line's length

_KINDS = ("counter", "gauge", "histogram", "summary", "untyped")
METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_PARTS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
_SAMPLE_LINE = re.compile(r"^[^\S\n]*[^\s#]", re.MULTILINE)
_INTEGER_LIMIT = 2**64  # 64-bit counters stay exact; no program counts further


class PromFileError(ValueError):
    """A file's content cannot be used as a whole. Names the line or the series, what is wrong, and the way out."""


class Entry(NamedTuple):
    """One `*.prom` name in a directory. `stamp` is (mtime_ns, size, inode), None when `problem` says why not."""

    name: str
    path: str
    stamp: tuple[int, int, int] | None
    problem: str = ""


class Sample(NamedTuple):
    """One value: `suffix` is what its name adds to the family's; `le` and `quantile` are in canonical form."""

    suffix: str
    labels: tuple[tuple[str, str], ...]
    value: int | float


@dataclass
class Family:
    """One metric of a file. `kind` is the type that the file declares, untyped without; `help` may be empty."""

    name: str
    kind: str
    help: str = ""
    samples: list[Sample] = field(default_factory=list)


def scan(directory: str) -> list[Entry]:
    """List the `*.prom` names in a directory, sorted. Opens no file, so a FIFO or device cannot block it.

    A file that vanishes meanwhile is left out. Raises OSError when the directory cannot be listed.
    """
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if entry.name.endswith(SUFFIX))
    found = (_look(name, os.path.join(directory, name)) for name in names)
    return [entry for entry in found if entry is not None]


def _look(name: str, path: str) -> Entry | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return Entry(name, path, None, "symbolic link to nothing") if os.path.islink(path) else None
    except OSError as error:
        return Entry(name, path, None, error.strerror or str(error))
    if not stat.S_ISREG(status.st_mode):
        return Entry(name, path, None, "not a regular file")
    return Entry(name, path, (status.st_mtime_ns, status.st_size, status.st_ino))


def read(path: str, max_bytes: int) -> str:
    """Return a file's text. Raises OSError, and PromFileError for what is too large, not regular or not UTF-8.

    A last line without its end is refused: it may be half a number of a file that is just being written.
    """
    # Between the look and this the name may have become a FIFO: opened this way, it does not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PromFileError("not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise PromFileError(f"larger than {max_bytes} bytes")
    if content and not content.endswith(b"\n"):
        raise PromFileError("the last line has no end; write to another name and rename, so that no half is read")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PromFileError(f"line {line}: not UTF-8: byte 0x{content[error.start]:02x}") from error


def count_samples(text: str) -> int:
    """Return how many lines are neither empty nor comments: what `parse` holds against its limit, without parsing."""
    return sum(1 for _ in _SAMPLE_LINE.finditer(text))


def parse(text: str, max_series: int) -> list[Family]:
    """Return the families of a text that have samples, in its order. Raises PromFileError.

    Left out are the `_created` gauges that prometheus-client writes beside its counters, histograms and summaries: in
    OpenMetrics their names belong to those, and a page with both is invalid.
    """
    from prometheus_client.parser import text_fd_to_metric_families  # noqa: PLC0415 - 12 MiB, for those who have files

    lines = _Lines(text, max_series)
    families: dict[str, Family] = {}
    try:
        for parsed in text_fd_to_metric_families(cast("TextIO", lines)):
            for sample in parsed.samples:
                _place(sample, lines.kinds, families)
            if parsed.name in families and parsed.documentation:
                families[parsed.name].help = parsed.documentation
    except PromFileError:
        raise
    except Exception as error:  # garbage makes the parser raise more than ValueError, IndexError for one
        reason = " ".join(str(error).split())[:120] or "cannot be parsed"
        raise PromFileError(f"line {lines.number}: {reason}") from error
    for family in families.values():
        _check(family)
    return [family for family in families.values() if not _is_created(family, families)]


def canonical_bound(text: str) -> str | None:
    """Give a value of `le` or `quantile` the one spelling that OpenMetrics knows: 1.0, 0.25, 1e-05, +Inf.

    None when it is no number.
    """
    try:
        bound = float(text)
    except ValueError:
        return None
    if math.isinf(bound):
        return "+Inf" if bound > 0 else "-Inf"
    return None if math.isnan(bound) else repr(bound)


class _Lines:
    """The lines of a text as the parser wants them; knows the current line's number and the types declared so far."""

    def __init__(self, text: str, max_series: int) -> None:
        self.number = 0
        self.kinds: dict[str, str] = {}
        self._text = text
        self._max_series = max_series

    def __iter__(self) -> Iterator[str]:
        samples = 0
        for number, line in enumerate(self._text.split("\n"), 1):
            self.number = number
            bare = line.strip()
            if len(bare) > LINE_LIMIT_CHARS:
                raise PromFileError(f"line {self.number}: longer than {LINE_LIMIT_CHARS} characters")
            if bare.startswith("#"):
                yield self._declared(bare)
                continue
            samples += bool(bare)
            if samples > self._max_series:
                raise PromFileError(f"line {self.number}: more than {self._max_series} series")
            yield line

    def _declared(self, line: str) -> str:
        """Note a TYPE line. Counters go on as gauges: the parser would add _total to their names."""
        parts = line.split(None, 3)
        if len(parts) != len(("#", "TYPE", "name", "type")) or parts[:2] != ["#", "TYPE"]:
            return line
        name, kind = parts[2], parts[3]
        if kind not in _KINDS:
            raise PromFileError(f"line {self.number}: {name} has the type {kind!r}; known are {', '.join(_KINDS)}")
        if name in self.kinds:
            raise PromFileError(f"line {self.number}: second TYPE line for {name}")
        self.kinds[name] = kind
        return f"# TYPE {name} gauge" if kind == "counter" else line


def _place(parsed: ParsedSample, kinds: dict[str, str], families: dict[str, Family]) -> None:
    """Put one sample into its family, also where the file interleaves families."""
    name, suffix = _owner(parsed.name, kinds)
    labels = tuple(parsed.labels.items())
    if parsed.timestamp is not None:
        raise PromFileError(
            f"{parsed.name}{_text(labels)} has a timestamp: the value would stay for ever; leave it out"
        )
    if name not in families:
        families[name] = Family(name, kinds.get(name, "untyped"))
    families[name].samples.append(Sample(suffix, labels, _number(parsed.value)))


def _owner(sample_name: str, kinds: dict[str, str]) -> tuple[str, str]:
    if sample_name not in kinds:
        for suffix in _PARTS["histogram"]:
            name = sample_name.removesuffix(suffix)
            if name != sample_name and suffix in _PARTS.get(kinds.get(name, ""), ()):
                return name, suffix
    return sample_name, ""


def _number(value: float) -> int | float:
    if isinstance(value, int) and not -_INTEGER_LIMIT < value < _INTEGER_LIMIT:
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return value


def _check(family: Family) -> None:
    if not METRIC_NAME.fullmatch(family.name):
        raise PromFileError(f"{family.name!r} is not a metric name of the classic form [a-zA-Z_:][a-zA-Z0-9_:]*")
    for sample in family.samples:
        for label, _ in sample.labels:
            if not LABEL_NAME.fullmatch(label):
                raise PromFileError(f"{family.name}: {label!r} is not a label name, or one that Prometheus reserves")
    if family.kind == "summary":
        family.samples = [_with_canonical(family, s, "quantile") if not s.suffix else s for s in family.samples]
        _sort(family, "quantile")
    if family.kind == "histogram":
        family.samples = [_with_canonical(family, s, "le") if s.suffix == "_bucket" else s for s in family.samples]
        _sort(family, "le")
        _check_buckets(family)


def _with_canonical(family: Family, sample: Sample, label: str) -> Sample:
    labels = dict(sample.labels)
    bound = canonical_bound(labels.get(label, ""))
    if bound is None:
        wrong = f"{family.name}{sample.suffix}{_text(sample.labels)}"
        raise PromFileError(f"{wrong} is part of a {family.kind} but has no number as label {label}")
    return sample._replace(labels=tuple({**labels, label: bound}.items()))


def _sort(family: Family, label: str) -> None:
    """Bring together what belongs to one set of labels: bounds ascending, then _sum and _count (OpenMetrics)."""
    groups: dict[frozenset[tuple[str, str]], list[Sample]] = {}
    for sample in family.samples:
        groups.setdefault(_without(sample, label), []).append(sample)
    for group in groups.values():
        group.sort(key=lambda sample: (sample.suffix in _PARTS["summary"], float(dict(sample.labels).get(label, 0))))
    family.samples = [sample for group in groups.values() for sample in group]


def _check_buckets(family: Family) -> None:
    """Refuse a histogram that a scraper could not use: no buckets' end, or counts that fall."""
    last: dict[frozenset[tuple[str, str]], Sample] = {}
    for sample in family.samples:
        if not sample.suffix:
            raise PromFileError(f"{family.name} is a histogram: a sample of that bare name is no part of one")
        if sample.suffix != "_bucket":
            continue
        before = last.get(_without(sample, "le"))
        if before is not None and sample.value < before.value:
            raise PromFileError(f"{family.name}_bucket{_text(sample.labels)} is less than the bucket below it")
        last[_without(sample, "le")] = sample
    for sample in family.samples:
        top = last.get(_without(sample, "le"))
        if top is None or dict(top.labels)["le"] != "+Inf":
            raise PromFileError(f'{family.name}{sample.suffix}{_text(sample.labels)} has no bucket with le="+Inf"')


def _without(sample: Sample, label: str) -> frozenset[tuple[str, str]]:
    return frozenset(pair for pair in sample.labels if pair[0] != label)


def _is_created(family: Family, families: dict[str, Family]) -> bool:
    base = family.name.removesuffix("_created")
    if base == family.name or family.kind != "gauge":
        return False
    owner = families.get(base)
    return f"{base}_total" in families or (owner is not None and owner.kind in _PARTS)


def _text(labels: tuple[tuple[str, str], ...]) -> str:
    return "{" + ",".join(f"{name}={value!r}" for name, value in labels) + "}" if labels else ""
