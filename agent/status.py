"""The collectors' states as plain rows: for the API, the status page and `hpcwatch collectors`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.engine import Engine


def collector_rows(engine: Engine, *, with_reason: bool = True) -> list[dict[str, Any]]:
    """Return one row per installed collector. `reason` may hold text from the system: left out on request."""
    now = engine.clock.wall()
    rows = []
    for name, (spec, job) in engine.collectors.items():
        age = "" if job.last_success_at is None else f"{max(0.0, now - job.last_success_at):.0f} s"
        rows.append(
            {
                "name": name,
                "state": job.state.value,
                "enabled": job.enabled,
                "needs": spec.collector.needs,
                "found": job.found if job.up else "",
                "reason": job.reason if with_reason else "",
                "series": job.points,
                "errors": job.errors,
                "age": age,
            }
        )
    rows += [
        {**_OFF, "name": name, "reason": reason if with_reason else ""} for name, reason in engine.disabled.items()
    ]
    return sorted(rows, key=lambda row: str(row["name"]))


_OFF: dict[str, Any] = {
    "state": "off",
    "enabled": False,
    "needs": "",
    "found": "",
    "reason": "",
    "series": 0,
    "errors": 0,
    "age": "",
}
