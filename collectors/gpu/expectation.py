"""How many GPUs this node should have, so that a missing one shows as missing and not as silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.api import VmSize
    from collectors.gpu.memory import Memory
    from collectors.gpu.selection import Selection


class Expectation:
    """The configuration's number, else the larger of the VM size's promise and what was there at once on this boot."""

    def __init__(
        self, configured: Literal["auto"] | int, vm_size: VmSize | None, memory: Memory, selection: Selection
    ) -> None:
        self._configured = None if configured == "auto" else configured
        self._promised = vm_size.gpu_count if vm_size is not None else None
        self._memory = memory
        self._selection = selection

    @property
    def promised(self) -> int:
        """How many GPUs configuration or VM size promise; 0 where neither does."""
        return (self._promised or 0) if self._configured is None else self._configured

    def saw(self, gpus: Sequence[tuple[str, str]]) -> None:
        """Remember the GPUs that are there now, as (index, UUID), unless more were there before."""
        if len(gpus) >= len(self._wanted()) and len(gpus) > 0:  # equal: under better known names, perhaps
            known = sum(bool(uuid) for _, uuid in gpus)
            if len(gpus) > len(self._wanted()) or known >= sum(bool(uuid) for _, uuid in self._memory.seen):
                self._memory.seen = list(gpus)

    def count(self) -> int | None:
        """Return how many GPUs there should be, without those kept out; None when nothing tells."""
        if self._configured is not None:
            return self._configured
        seen = len(self._wanted())
        if self._promised is None:
            return seen or None
        return max(self._promised - self._memory.excluded, seen)

    def _wanted(self) -> Sequence[tuple[str, str]]:
        unnamed = not self._selection.include
        return [
            (index, uuid)
            for index, uuid in self._memory.seen
            if (self._selection.wants(index, uuid) if index or uuid else unnamed)
        ]
