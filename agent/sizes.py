"""What VM sizes promise: looks a size up in `agent/data/vm_sizes.yaml` and in a site's own files."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.api import VmSize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TABLE = Path(__file__).parent / "data" / "vm_sizes.yaml"
_PREFIX = "standard_"
_MEMORY = re.compile(r"(\d+) (MiB|GiB)")
_UNIT_BYTES = {"MiB": 1024**2, "GiB": 1024**3}
_BPS_PER_GBPS = 10**9
_VENDORS = ("nvidia", "amd")
_TEXTS = ("gpu_vendor", "gpu_model", "source")
_COUNTS = ("gpu_count", "nvlinks_per_gpu", "fabric_ports", "fabric_rate_gbps")
_KEYS = ("sizes", "gpu_memory", *_TEXTS, *_COUNTS)

_Facts = dict[str, Any]  # the keys of one group but `sizes`, as the file states them, plus `name`


class SizeTableError(ValueError):
    """A file of VM sizes cannot be used. One line: file, place in it, what was found, what was expected."""


def load(name: str, extra: Iterable[Path] = ()) -> VmSize | None:
    """Return what a size promises; None for a size that no table has: no guess is made from its name.

    Case does not matter and `Standard_` may be there or not. `extra` are files of the site, merged in their order over
    the agent's own table; one that does not exist is skipped, so that a default path can be given always. GPUs that are
    not NVIDIA's give `gpu_model` only: count and memory are expectations on NVML, which never sees them. Raises
    SizeTableError for a file that cannot be used.
    """
    facts = _table(tuple(extra)).get(_normal(name))
    return None if facts is None else _promise(facts)


def names(extra: Iterable[Path] = ()) -> list[str]:
    """Return the names of all known sizes, sorted, without `Standard_`. Raises SizeTableError as `load` does."""
    return sorted(facts["name"] for facts in _table(tuple(extra)).values())


def _table(extra: tuple[Path, ...]) -> Mapping[str, _Facts]:
    table = _own_table()
    for path in extra:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise SizeTableError(f"{path}: cannot be read: {error.strerror}") from error
        table = _merge(table, _parse(path, content))
    return table


@functools.cache  # the package's file cannot change while the agent runs; a site's file can, and is read each time
def _own_table() -> Mapping[str, _Facts]:
    return _parse(_TABLE, _TABLE.read_bytes())


def _normal(name: str) -> str:
    return name.strip().casefold().removeprefix(_PREFIX)


def _merge(below: Mapping[str, _Facts], above: Mapping[str, _Facts]) -> Mapping[str, _Facts]:
    return {**below, **{key: {**below.get(key, {}), **facts} for key, facts in above.items()}}


def _promise(facts: _Facts) -> VmSize:
    count = facts.get("gpu_count")
    memory_bytes = _memory_bytes(facts.get("gpu_memory"))
    rate_gbps = facts.get("fabric_rate_gbps")
    if facts.get("gpu_vendor") not in (None, "nvidia"):
        count = memory_bytes = None
    nvlinks = 0 if count == 0 else facts.get("nvlinks_per_gpu")
    return VmSize(
        name=facts["name"],
        gpu_model=facts.get("gpu_model") or "",
        gpu_count=count,
        gpu_memory_bytes=0 if count == 0 else memory_bytes,
        fabric_ports=facts.get("fabric_ports"),
        fabric_rate_bps=0 if facts.get("fabric_ports") == 0 else rate_gbps and rate_gbps * _BPS_PER_GBPS,
        nvlinks_per_gpu=nvlinks,
    )


def _memory_bytes(text: str | None) -> int | None:
    match = _MEMORY.fullmatch(text or "")
    return int(match[1]) * _UNIT_BYTES[match[2]] if match else None


def _parse(path: Path, content: bytes) -> dict[str, _Facts]:
    import yaml  # noqa: PLC0415 - only nodes with a known size need it here

    try:
        # The C loader is the same safe subset, ten times faster; PyYAML is sometimes built without it.
        groups = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SizeTableError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(groups, list):
        raise SizeTableError(f"{path}: expected a list of groups, each with `sizes`, got {_kind(groups)}")
    table: dict[str, _Facts] = {}
    for number, group in enumerate(groups, 1):
        where = f"{path}: group {number}"
        for name, facts in _sizes_of(group, where):
            if _normal(name) in table:
                raise SizeTableError(f"{where}: size {name} is there twice; put all its facts into one group")
            table[_normal(name)] = facts
    return table


def _sizes_of(group: object, where: str) -> list[tuple[str, _Facts]]:
    """Check one group and return (name, facts) for each of its sizes."""
    if not isinstance(group, dict):
        raise SizeTableError(f"{where}: expected a map with the key `sizes`, got {_kind(group)}")
    sizes = group.get("sizes")
    if not isinstance(sizes, list) or not sizes or not all(isinstance(name, str) and name for name in sizes):
        raise SizeTableError(f"{where}: `sizes` must be a list of size names, got {sizes!r}")
    where = f"{where} ({sizes[0]})"
    for key, value in group.items():
        if key not in _KEYS:
            raise SizeTableError(f"{where}: unknown key {key!r}; known are {', '.join(_KEYS)}")
        expected = _expected(key, value)
        if expected:
            raise SizeTableError(f"{where}: {key} must be {expected}, got {value!r}")
    facts = {key: value for key, value in group.items() if key != "sizes"}
    return [(name, {**facts, "name": name.strip()[_prefix_length(name.strip()) :]}) for name in sizes]


def _prefix_length(name: str) -> int:
    return len(_PREFIX) if name.casefold().startswith(_PREFIX) else 0


def _expected(key: str, value: object) -> str:
    """Say what a value should have been; empty when it is right. Null is always right: nothing is expected."""
    if value is None or key == "sizes":
        return ""
    if key in _COUNTS:
        right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return "" if right else "a whole number, 0 or more"
    if key == "gpu_memory":
        return "" if isinstance(value, str) and _MEMORY.fullmatch(value) else "text such as `81559 MiB` or `24 GiB`"
    if key == "gpu_vendor":
        return "" if value in _VENDORS else f"one of {', '.join(_VENDORS)}"
    return "" if isinstance(value, str) else "text"


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
