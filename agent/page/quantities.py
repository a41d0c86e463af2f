"""Numbers as people read them. Every function takes None for absent and gives a dash, never a zero."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from agent.page.markup import ABSENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.api import Value

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_BITS = ("b/s", "kb/s", "Mb/s", "Gb/s", "Tb/s", "Pb/s")
_CALENDAR_DAYS = 300  # beyond, the year is part of the date


def number(value: Value | None, unit: str = "") -> str:
    """Give a whole number, with its unit: `45 °C`."""
    return ABSENT if value is None else f"{value:,.0f}{unit}" if abs(value) < 1e15 else f"{value:.2g}{unit}"  # noqa: PLR2004 - no longer readable


def percent(ratio: Value | None) -> str:
    """Give a ratio of 0 to 1 in percent."""
    return ABSENT if ratio is None else number(100 * ratio, " %")


def memory(size_bytes: Value | None) -> str:
    """Give bytes in the largest binary unit that leaves a whole part: `39.5 GiB`, `886 GiB`."""
    return ABSENT if size_bytes is None else _scaled(size_bytes, 1024, _BINARY)


def memory_of(used_bytes: Value | None, total_bytes: Value | None) -> str:
    """Give a part and its whole in the unit of the whole: `31.2 / 40.0 GiB`."""
    if used_bytes is None or total_bytes is None:
        return memory(used_bytes)
    power = _power(total_bytes, 1024, _BINARY)
    used, total = used_bytes / 1024**power, total_bytes / 1024**power
    digits = 0 if total >= 100 else 1  # noqa: PLR2004 - three digits tell enough
    return f"{used:.{digits}f} / {total:.{digits}f} {_BINARY[power]}"


def rate_of(rate: Value, whole: Value) -> str:
    """Give a data rate and what it should be, in bytes per second, as bits: `100 of 200 Gb/s`."""
    (given, unit), (wanted, wanted_unit) = bit_rate(rate).split(), bit_rate(whole).split()
    return f"{given} of {wanted} {unit}" if unit == wanted_unit else f"{given} {unit} of {wanted} {wanted_unit}"


def bit_rate(bytes_per_second: Value | None) -> str:
    """Give a data rate in bits per second, as links are named: `200 Gb/s`."""
    return ABSENT if bytes_per_second is None else _scaled(8 * bytes_per_second, 1000, _BITS)


def span(seconds: float) -> str:
    """Give a time span by its largest unit: `45 s`, `12 min`, `3 h`, `5 d`. A negative one is none: `0 s`."""
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= 2 * unit_s:
            return number(seconds // unit_s, f" {unit}")
    return f"{max(0.0, seconds):.0f} s"


def ago(time_s: Value, now_s: float) -> str:
    """Say how long ago a wall time was."""
    return f"{span(now_s - time_s)} ago"


def clock(time_s: Value, now_s: float) -> str:
    """Give a wall time in UTC, with the date when it is not today's."""
    time, now = _utc(time_s), _utc(now_s)
    if time is None or now is None:
        return ABSENT
    if time.date() == now.date():
        return f"{time:%H:%M:%S}"
    return f"{time:%m-%d %H:%M:%S}" if abs((now - time).days) < _CALENDAR_DAYS else f"{time:%Y-%m-%d %H:%M}"


def rfc3339(time_s: Value) -> str:
    """Give a wall time for programs; empty when no calendar has it."""
    time = _utc(time_s)
    return "" if time is None else f"{time:%Y-%m-%dT%H:%M:%SZ}"


def count(number_of: Value, noun: str) -> str:
    """Give a number of things: `1 GPU`, `8 GPUs`."""
    return number(number_of, f" {noun}" if number_of == 1 else f" {noun}s")


def listed(names: Sequence[str], most: int = 8) -> str:
    """Give names one after the other, of many the first: `0, 1, 2 and 5 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _utc(time_s: Value) -> datetime | None:
    try:
        return datetime.fromtimestamp(time_s, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None


def _power(value: Value, base: int, units: Sequence[str]) -> int:
    power = 0
    while power + 1 < len(units) and abs(value) >= base ** (power + 1):
        power += 1
    return power


def _digits(value: Value) -> int:
    return 0 if abs(value) >= 100 or value == int(value) else 1  # noqa: PLR2004 - three digits tell enough


def _scaled(value: Value, base: int, units: Sequence[str]) -> str:
    power = _power(value, base, units)
    scaled = value / base**power
    return f"{scaled:,.{_digits(scaled)}f} {units[power]}"
