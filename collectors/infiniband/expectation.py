"""How many fabric ports this node should have, so that a missing one shows as missing and not as silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.hw.sysfs import read_text

if TYPE_CHECKING:
    from agent.api import Context


class Expectation:
    """The VM size's promise, and the most ports seen at once since this boot, kept across restarts of the agent."""

    def __init__(self, ctx: Context) -> None:
        self._state = ctx.state
        self._promised = ctx.vm_size.fabric_ports if ctx.vm_size is not None else None
        self._boot_id = _boot_id(ctx)
        content = ctx.state.load()
        seen = content.get("fabric_ports")
        known = bool(self._boot_id) and content.get("boot_id") == self._boot_id
        self._seen = seen if known and isinstance(seen, int) else 0

    def saw(self, ports: int) -> None:
        """Remember that this many fabric ports were there at once."""
        if ports > self._seen:
            self._seen = ports
            self._state.save({"boot_id": self._boot_id, "fabric_ports": ports})

    def ports(self, excluded: int) -> int | None:
        """Return how many ports should be there; None when nothing tells.

        `excluded`: devices that the configuration keeps out, which the VM size's number includes.
        """
        if self._promised is None:
            return self._seen or None
        return max(self._promised - excluded, self._seen)


def _boot_id(ctx: Context) -> str:
    """Return this boot's id; empty when it cannot be read, and then nothing is taken over from before."""
    try:
        return read_text(f"{ctx.proc}/sys/kernel/random/boot_id")
    except OSError:
        return ""
