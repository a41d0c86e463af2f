"""How many GPUs the system shows without NVML, which of them are ours, and what the kernel module calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agent.hw import nvidia

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.api import Context, Out

DRIVER_FILES = "driver/nvidia/gpus"  # what a hang in reading them is blamed on


class Listing(NamedTuple):
    """Addresses that the system shows, in NVML's order, and how many it shows beside them that are given to others."""

    addresses: Sequence[str]
    hidden: int


class Census:
    """What each source shows. One that cannot be read is absent and told, the others go on."""

    def __init__(self, ctx: Context) -> None:
        self.pci: list[str] | None = None
        self.driver: list[str] | None = None
        self.nodes: list[int] | None = None
        self._failed: set[str] = set()
        self._ctx = ctx
        self._bus = nvidia.PciBus(ctx.sys)

    @property
    def is_empty(self) -> bool:
        """Whether no source shows a GPU."""
        return not (self.pci or self.driver or self.nodes)

    @property
    def can_describe(self) -> bool:
        """Whether the kernel module may be asked: no process hung on that."""
        return DRIVER_FILES not in self._ctx.avoid

    @property
    def largest(self) -> int:
        """How many GPUs the source with the most of them shows."""
        return max(len(gpus or ()) for gpus in (self.pci, self.driver, self.nodes))

    def counts(self, nvml: int | None, *, is_up: bool) -> dict[str, int]:
        """Return how many GPUs each source shows, NVML among them; a source that cannot tell is left out.

        A directory that does not exist shows 0 GPUs, but for a container: there NVML is up and has some.
        """
        found = {"nvml": nvml, "pci": self.pci, "proc": self.driver, "dev": self.nodes}
        counts = {
            source: gpus if isinstance(gpus, int) else len(gpus) for source, gpus in found.items() if gpus is not None
        }
        if not is_up or nvml == 0:
            counts |= {source: 0 for source in ("proc", "dev") if source not in counts and source not in self._failed}
        return counts if nvml is None else {"nvml": nvml, **counts}

    def take(self, failed: Callable[[str, OSError], None]) -> None:
        """Look anew. Lists names; waits for no GPU."""
        self.pci = self.driver = self.nodes = None
        self._failed.clear()
        try:
            self.pci = self._bus.gpus()
        except OSError as error:
            failed("PCI devices", error)
        try:
            self.driver = nvidia.driver_addresses(self._ctx.proc)
            if not self.driver and not (self._ctx.proc / DRIVER_FILES).is_dir():
                self.driver = None
        except OSError as error:
            self._failed.add("proc")
            failed(DRIVER_FILES, error)
        try:
            self.nodes = nvidia.device_minors(self._ctx.dev)
            if not self.nodes and not self._ctx.dev.is_dir():
                self.nodes = None
        except OSError as error:
            self._failed.add("dev")
            failed("device nodes", error)

    def listing(self, out: Out, *, nvml: int | None, promised: int) -> Listing:
        """Return where GPUs of ours are: not those without a device node, unless NVML lists fewer than were promised.

        A container is given the device nodes of its own GPUs, and may see the kernel module's files of all.
        """
        addresses, nodes = self.driver or self.pci or [], self.nodes or []
        is_short = promised > (len(nodes) if nvml is None else nvml)
        if not self.driver or not nodes or len(self.driver) <= len(nodes) or is_short:
            return Listing(addresses, 0)
        foreign = {gpu.address for gpu in self.describe(out, addresses) if gpu.minor not in {None, *nodes}}
        return Listing([address for address in addresses if address not in foreign], len(foreign))

    def describe(self, out: Out, addresses: Sequence[str]) -> Sequence[nvidia.DriverGpu]:
        """Return what the kernel module tells of its GPUs at these addresses. May wait for a sick one."""
        asked = [address for address in addresses if address in (self.driver or ())]
        if not asked or not self.can_describe:
            return ()
        out.working_on(DRIVER_FILES)
        found = []
        for address in asked:
            try:
                found.append(nvidia.driver_gpu(self._ctx.proc, address))
            except OSError as error:
                out.failed(f"{DRIVER_FILES}/{address}", error)
        return found
