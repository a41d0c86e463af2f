"""How many GPUs the system shows without NVML, and what the kernel module calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.hw import nvidia

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.api import Context, Out

DRIVER_FILES = "driver/nvidia/gpus"  # what a hang in reading them is blamed on


class Census:
    """Counts by source. A source that cannot be read is absent and told, the others go on."""

    def __init__(self, ctx: Context) -> None:
        self.pci: list[str] | None = None
        self.driver: list[str] | None = None
        self.nodes: list[int] | None = None
        self._ctx = ctx
        self._bus = nvidia.PciBus(ctx.sys)

    @property
    def counts(self) -> dict[str, int]:
        """How many GPUs each source shows; a source that cannot tell is left out."""
        found = {"pci": self.pci, "proc": self.driver, "dev": self.nodes}
        return {source: len(gpus) for source, gpus in found.items() if gpus is not None}

    def take(self, failed: Callable[[str, OSError], None]) -> None:
        """Look anew. Lists names; waits for no GPU."""
        self.pci = self.driver = self.nodes = None
        try:
            self.pci = self._bus.gpus()
        except OSError as error:
            failed("PCI devices", error)
        try:
            self.driver = nvidia.driver_addresses(self._ctx.proc)
        except OSError as error:
            failed(DRIVER_FILES, error)
        try:
            self.nodes = nvidia.device_minors(self._ctx.dev)
        except OSError as error:
            failed("device nodes", error)

    def describe(self, out: Out, addresses: Sequence[str]) -> Sequence[nvidia.DriverGpu]:
        """Return what the kernel module tells of the GPUs at these addresses. May wait for a sick one."""
        if not addresses or DRIVER_FILES in self._ctx.avoid:
            return ()
        out.working_on(DRIVER_FILES)
        found = []
        for address in addresses:
            try:
                found.append(nvidia.driver_gpu(self._ctx.proc, address))
            except OSError as error:
                out.failed(f"{DRIVER_FILES}/{address}", error)
        return found
