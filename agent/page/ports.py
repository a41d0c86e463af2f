"""The InfiniBand ports: one row each, with bars of their traffic, and what is wrong with each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.page.ages import with_age
from agent.page.markup import ABSENT, Grade, Html, Row, bar, join, mark, section, small, table
from agent.page.quantities import bit_rate, count, number, rate_of
from agent.page.readings import natural

if TYPE_CHECKING:
    from agent.api import Value
    from agent.page.readings import Labels, Readings
    from agent.page.traffic import Rates

COLUMNS = ("Port", "State", "Role", "Rate", "Receiving", "Sending", "Link downs", "Errors")
ROWS_MOST = 64
PHYSICAL = {1: "sleep", 2: "polling", 3: "disabled", 4: "training", 6: "error recovery", 7: "phy test"}
# What is added up as errors of the link: the metric, the kernel's file name, and a word.
ERRORS = (
    ("node_infiniband_symbol_error_total", "symbol_error", "symbol"),
    ("node_infiniband_port_errors_received_total", "port_rcv_errors", "receive"),
    ("node_infiniband_port_receive_remote_physical_errors_total", "port_rcv_remote_physical_errors", "remote"),
    ("node_infiniband_local_link_integrity_errors_total", "local_link_integrity_errors", "integrity"),
    ("node_infiniband_excessive_buffer_overrun_errors_total", "excessive_buffer_overrun_errors", "overrun"),
    ("node_infiniband_link_error_recovery_total", "link_error_recovery", "recovery"),
)


def by_port(readings: Readings) -> dict[tuple[str, str], Readings]:
    """Split by port, as (device, port), fabric first; a device that hangs is there once, with an empty port."""
    hanging = {labels.get("device", "") for labels, hangs in readings.of("infiniband_collect_stalled") if hangs}
    found = {}
    for key, port in readings.by(_identity).items():
        device, _, number_of = key.partition("\0")
        if (device in hanging) != bool(number_of):
            found[device, number_of] = port
    return dict(sorted(found.items(), key=lambda item: (not is_fabric(item[1]), *map(natural, item[0]))))


def name_of(key: tuple[str, str]) -> str:
    """Name a port; the usual number 1 is left out."""
    device, port = key
    return device if port in ("", "1") else f"{device}/{port}"


def trouble(port: Readings) -> tuple[Grade, str] | None:
    """Say what is wrong with a port's link."""
    if port.is_on("infiniband_collect_stalled"):
        return Grade.BAD, "does not answer"
    if port.value("infiniband_port_observable") == 0:
        return Grade.WARNING, "cannot be read"
    if port.value("infiniband_port_up") == 0:
        return Grade.BAD, "is down"
    rate, expected = _rates(port)
    if rate is not None and expected is not None and rate < expected:
        return Grade.WARNING, f"runs at {rate_of(rate, expected)}"
    return None


def is_fabric(port: Readings) -> bool:
    """Say whether the node's parallel work needs the port; an adapter that hangs tells no role and is taken for one."""
    return port.info("infiniband_device_info", "role") == "fabric" or port.is_on("infiniband_collect_stalled")


def port_section(readings: Readings, rates: Rates, age_s: float | None) -> Html:
    """Return the table; nothing on a node without ports. `age_s` of values that are too old, else None."""
    ports = by_port(readings)
    if not ports:
        return Html()
    rows = [_row(key, port, rates) for key, port in [*ports.items()][:ROWS_MOST]]
    return section("InfiniBand", table(with_age(_caption(readings, len(ports)), age_s), COLUMNS, rows, "ports"))


def _identity(name: str, labels: Labels) -> str | None:
    if not name.startswith(("infiniband_", "node_infiniband_")) or not labels.get("device"):
        return None
    return f"{labels['device']}\0{labels.get('port', '')}"


def _caption(readings: Readings, ports: int) -> str:
    up, expected = (readings.value("infiniband_fabric_ports", status=status) for status in ("up", "expected"))
    hidden = f", the first {ROWS_MOST} shown" if ports > ROWS_MOST else ""
    if up is None:
        return count(ports, "port") + hidden
    if expected is None:
        return f"{count(up, 'fabric port')} up{hidden}"
    return f"{number(up)} of {count(expected, 'fabric port')} up{hidden}"


def _row(key: tuple[str, str], port: Readings, rates: Rates) -> Row:
    role, netdev = (port.info("infiniband_device_info", label) for label in ("role", "netdev"))
    name = join(name_of(key), " ", small(netdev)) if netdev else name_of(key)
    moved = {} if port.value("infiniband_port_up") == 0 else rates
    received, sent = (_traffic(port, moved.get((*key, direction))) for direction in ("rx", "tx"))
    downs = _total(port, "node_infiniband_link_downed_total", "link_downed")
    cells = (name, _state(port), role or ABSENT, _rate(port), received, sent, downs or ABSENT, _errors(port))
    return Row(cells)


def _state(port: Readings) -> str:
    if port.is_on("infiniband_collect_stalled"):
        return mark(Grade.BAD, "hangs")
    if port.value("infiniband_port_observable") == 0:
        return mark(Grade.WARNING, "unreadable")
    up = port.value("infiniband_port_up")
    logical = ", ".join(port.active("infiniband_port_state", "state"))
    if up:
        return mark(Grade.OK, "up")
    physical = PHYSICAL.get(int(port.value("node_infiniband_physical_state_id") or 0), "")
    more = ", ".join(word for word in (logical, physical) if word not in ("", "down"))
    if up is None:
        return more or ABSENT
    word = mark(Grade.BAD if is_fabric(port) else Grade.WARNING, "down")
    return join(word, " ", small(more)) if more else word


def _rates(port: Readings) -> tuple[Value | None, Value | None]:
    rate = port.value("node_infiniband_rate_bytes_per_second")
    return rate, port.value("infiniband_link_rate_expected_bytes_per_second")


def _rate(port: Readings) -> str:
    rate, expected = _rates(port)
    if rate is None or expected is None or rate >= expected:
        return bit_rate(rate)
    return mark(Grade.WARNING, rate_of(rate, expected))


def _traffic(port: Readings, bytes_per_second: float | None) -> str:
    rate = port.value("node_infiniband_rate_bytes_per_second")
    shown = bit_rate(bytes_per_second)
    return shown if bytes_per_second is None or not rate else join(bar(bytes_per_second, rate), shown)


def _total(port: Readings, metric: str, file: str) -> str:
    """Give a counter; empty when absent. One that stands at its maximum says so."""
    total = port.value(metric)
    more = "\N{GREATER-THAN OR EQUAL TO} " if port.is_on("infiniband_counter_saturated", counter=file) else ""
    return "" if total is None else more + number(total)


def _errors(port: Readings) -> str:
    totals = [(value, file, word) for metric, file, word in ERRORS if (value := port.value(metric)) is not None]
    if port.is_on("infiniband_port_restricted"):
        return small("counters not readable here")
    if not totals:
        return ABSENT
    saturated = any(port.is_on("infiniband_counter_saturated", counter=file) for _, file, _ in totals)
    shown = ("\N{GREATER-THAN OR EQUAL TO} " if saturated else "") + number(sum(value for value, _, _ in totals))
    parts = ", ".join(f"{number(value)} {word}" for value, _, word in totals if value)
    return join(shown, " ", small(parts)) if parts else shown
