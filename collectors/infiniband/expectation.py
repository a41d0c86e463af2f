"""How many fabric ports this node should have, so that a missing one shows as missing and not as silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.hw.sysfs import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from agent.api import Context

_DEVICE_PORTS_LIMIT = 256  # no adapter has as many; what is kept on disk may be damaged


class Expectation:
    """The VM size's promise, and the devices that were there at once on this boot, kept across restarts of the agent.

    `is_wanted` says of a device's name whether the configuration lets it be read: what is kept out is not expected.
    """

    def __init__(self, ctx: Context, is_wanted: Callable[[str], bool]) -> None:
        self._state = ctx.state
        self._is_wanted = is_wanted
        self._promised = ctx.vm_size.fabric_ports if ctx.vm_size is not None else None
        self._boot_id = _boot_id(ctx)
        content = ctx.state.load()
        devices = content.get("fabric_ports")
        known = bool(self._boot_id) and content.get("boot_id") == self._boot_id
        kept = devices if known and isinstance(devices, dict) else {}
        self._seen: dict[str, int] = {name: n for name, n in kept.items() if isinstance(name, str) and _is_count(n)}

    def saw(self, fabric: Mapping[str, int], others: Collection[str]) -> None:
        """Remember the fabric ports that are there now, by device, unless more were there before.

        `others`: devices that are there and are no fabric, whatever they were before.
        """
        seen = {name: n for name, n in self._seen.items() if name not in others and self._is_wanted(name)}
        if sum(fabric.values()) >= sum(seen.values()):  # equal: under new names, perhaps
            seen = dict(fabric)
        if seen != self._seen:
            self._seen = seen
            self._state.save({"boot_id": self._boot_id, "fabric_ports": seen})

    def ports(self, excluded: int) -> int | None:
        """Return how many ports should be there; None when nothing tells.

        `excluded`: devices that the configuration keeps out, which the VM size's number includes.
        """
        seen = sum(n for name, n in self._seen.items() if self._is_wanted(name))
        if self._promised is None:
            return seen or None
        return max(self._promised - excluded, seen)


def _is_count(kept: object) -> bool:
    # The type itself: true is an int to isinstance.
    return type(kept) is int and 0 < kept <= _DEVICE_PORTS_LIMIT


def _boot_id(ctx: Context) -> str:
    """Return this boot's id; empty when it cannot be read, and then nothing is taken over from before."""
    try:
        return read_text(f"{ctx.proc}/sys/kernel/random/boot_id")
    except OSError:
        return ""
