"""The fields of one GPU and tier, read in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.hw.nvml.session import FieldBatch, Gpu, NvmlError
    from collectors.gpu.readings import Field
    from collectors.gpu.support import Support


class Fields:
    """Of the `wanted` fields, those that the GPU does not lack."""

    def __init__(self, gpu: Gpu, support: Support, wanted: tuple[Field, ...]) -> None:
        self.wanted = wanted
        self._gpu = gpu
        self._support = support
        self._changes = -1
        self._asked: tuple[Field, ...] = ()
        self._batch: FieldBatch | None = None

    def read(self) -> Sequence[tuple[Field, int | float | NvmlError]]:
        """Return each field's value or error. Raises NvmlError when the call as a whole failed."""
        if self._changes != self._support.changes:
            asked = tuple(field for field in self.wanted if field not in self._support.lacking)
            if asked != self._asked:
                self._batch = self._gpu.fields([(field.id, field.scope) for field in asked]) if asked else None
                self._asked = asked
            self._changes = self._support.changes
        return list(zip(self._asked, self._batch.read(), strict=True)) if self._batch else ()
