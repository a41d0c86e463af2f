"""The GPUs: one row each, with bars, and what is wrong with each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.page.ages import with_age
from agent.page.markup import ABSENT, Grade, Html, Row, bar, join, mark, section, small, table, tag
from agent.page.quantities import count, memory_of, number, percent
from agent.page.readings import natural
from agent.page.xids import xids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.page.readings import Labels, Readings

COLUMNS = ("GPU", "State", "Utilisation", "Memory", "Temperature", "Power", "Health")
ROWS_MOST = 64
NOTES_MOST = 8
# Any of these there: what is wrong with the GPU would show.
HEALTH = {"gpu_row_remap_failure", "gpu_ecc_errors_all_total", "gpu_clock_event_active", "gpu_recovery_action"}
SHORT_UUID = 12  # characters: enough to tell the GPUs of one node apart
# Reasons of lower clocks that are no part of normal work, in words.
SLOWED = {
    "hw_slowdown": "slowed by hardware",
    "hw_thermal": "slowed by heat",
    "sw_thermal": "slowed by heat",
    "hw_power_brake": "power brake",
}
XID_PREFIX = "gpu_xid_"


def by_gpu(readings: Readings) -> dict[str, Readings]:
    """Split by GPU, by uuid where known, in order of the index; what is named in the kernel log only is left out."""
    found = {key: gpu for key, gpu in readings.by(identity).items() if not _is_hearsay(gpu)}
    return dict(sorted(found.items(), key=lambda item: (natural(name_of(item[1])), item[0])))


def identity(name: str, labels: Labels) -> str | None:
    """Return what tells a GPU from others; None for a series of no GPU. XIDs of a GPU not known have the empty one."""
    if not name.startswith("gpu_"):
        return None
    return labels.get("uuid") or labels.get("gpu") or ("" if name.startswith(XID_PREFIX) else None)


def name_of(gpu: Readings) -> str:
    """Name a GPU by its index, or the beginning of its uuid where it never had one."""
    labels = _labels(gpu)
    return labels.get("gpu") or labels.get("uuid", "")[:SHORT_UUID]


def reasons(gpu: Readings) -> str:
    """Say why a GPU does not answer; empty when nothing tells."""
    return ", ".join(gpu.active("gpu_error", "reason")).replace("_", " ")


def troubles(gpu: Readings) -> Iterator[tuple[Grade, str]]:
    """Say what is wrong with a GPU that answers, worst first, its XIDs aside."""
    if gpu.is_on("gpu_row_remap_failure"):
        yield Grade.BAD, "row remapping failed"
    for action in gpu.active("gpu_recovery_action", "action"):
        if action != "none":
            yield Grade.BAD, f"driver asks for {action.replace('_', ' ')}"
    if gpu.is_on("gpu_row_remap_pending"):
        yield Grade.WARNING, "row remap needs a reset"
    uncorrected = gpu.value("gpu_ecc_errors_all_total", type="uncorrected", lifetime="volatile")
    if uncorrected:
        yield Grade.WARNING, f"ECC: {number(uncorrected)} uncorrected"
    active = gpu.active("gpu_clock_event_active", "reason")
    for words in dict.fromkeys(SLOWED[reason] for reason in active if reason in SLOWED):
        yield Grade.WARNING, words
    # Links without a partner are normal where none has one, as on a board without bridge.
    linked, links = gpu.value("gpu_nvlink_active_links"), gpu.value("gpu_nvlink_links")
    if linked and links and linked < links:
        yield Grade.WARNING, f"NVLink {number(linked)} of {number(links)}"


def gpu_section(readings: Readings, now_s: float, age_s: float | None) -> Html:
    """Return the table; nothing on a node without GPUs. `age_s` of values that are too old, else None."""
    gpus = by_gpu(readings)
    if not gpus:
        return Html()
    models = {model for gpu in gpus.values() if (model := gpu.info("gpu_info", "name"))}
    shown = [*gpus.values()][:ROWS_MOST]
    rows = [_row(gpu, now_s, with_model=len(models) > 1) for gpu in shown]
    return section("GPUs", table(with_age(_caption(gpus, models), age_s), COLUMNS, rows, "gpus"))


def _is_hearsay(gpu: Readings) -> bool:
    return all(name.startswith(XID_PREFIX) for name in gpu.names())


def _labels(gpu: Readings) -> Labels:
    return next(iter(labels for name in gpu.names() for labels, _ in gpu.of(name)), {})


def _caption(gpus: dict[str, Readings], models: set[str]) -> str:
    model = f" \N{MULTIPLICATION SIGN} {models.pop()}" if len(models) == 1 else ""
    down = sum(gpu.value("gpu_up") == 0 for gpu in gpus.values())
    hidden = f", the first {ROWS_MOST} shown" if len(gpus) > ROWS_MOST else ""
    return (
        f"{len(gpus)}{model}{f', {down} down' if down else ''}{hidden}" if model else count(len(gpus), "GPU") + hidden
    )


def _row(gpu: Readings, now_s: float, *, with_model: bool) -> Row:
    model = gpu.info("gpu_info", "name")
    name = tag("span", name_of(gpu), title=_labels(gpu).get("uuid", ""))
    if with_model and model:
        name = join(name, " ", small(model))
    cells = (name, _state(gpu), _utilisation(gpu), _memory(gpu), _temperature(gpu), _power(gpu), _health(gpu, now_s))
    return Row(cells)


def _state(gpu: Readings) -> str:
    up = gpu.value("gpu_up")
    if up is None:
        return ABSENT
    if up:
        return mark(Grade.OK, "up")
    why = reasons(gpu)
    return join(mark(Grade.BAD, "down"), " ", small(why)) if why else mark(Grade.BAD, "down")


def _utilisation(gpu: Readings) -> str:
    ratio = gpu.value("gpu_utilization_ratio")
    return ABSENT if ratio is None else join(bar(ratio, 1), percent(ratio))


def _memory(gpu: Readings) -> str:
    used, total = gpu.value("gpu_memory_used_bytes"), gpu.value("gpu_memory_total_bytes")
    shown = memory_of(used, total)
    return shown if used is None or total is None else join(bar(used, total), shown)


def _temperature(gpu: Readings) -> str:
    memory = gpu.value("gpu_temperature_celsius", sensor="memory")
    shown = number(gpu.value("gpu_temperature_celsius", sensor="gpu"), " \N{DEGREE SIGN}C")
    return shown if memory is None else join(shown, " ", small(f"memory {number(memory)}"))


def _power(gpu: Readings) -> str:
    used, limit = gpu.value("gpu_power_watts", scope="gpu"), gpu.value("gpu_power_limit_watts", kind="enforced")
    if used is None or limit is None:
        return number(used, " W")
    return join(bar(used, limit), f"{number(used)} / {number(limit)} W")


def _health(gpu: Readings, now_s: float) -> str:
    notes = [mark(grade, words) for grade, words in troubles(gpu)]
    graded = [(xid.grade(now_s), xid.shown(now_s)) for xid in xids(gpu)]
    for wanted in (Grade.BAD, Grade.WARNING, Grade.NONE):  # of very many the worst stay
        notes += [mark(grade, shown) if grade.value else small(shown) for grade, shown in graded if grade is wanted]
    corrected = gpu.value("gpu_ecc_errors_all_total", type="corrected", lifetime="volatile")
    if corrected:
        notes.append(small(f"ECC: {number(corrected)} corrected"))
    width, most = gpu.value("gpu_pcie_link_width"), gpu.value("gpu_pcie_link_max_width")
    if width and most and width < most:
        notes.append(small(f"PCIe x{number(width)} of x{number(most)}"))
    if notes:
        return join(*notes[:NOTES_MOST], between=" ")
    return small("nothing found") if HEALTH.intersection(gpu.names()) else ABSENT
