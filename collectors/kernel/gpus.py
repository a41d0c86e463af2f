"""What the GPU at a PCI address is called: index and UUID, from whoever knows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from agent.hw.bulkhead import Bulkhead
from agent.hw.nvidia import DriverGpu, address, driver_addresses, driver_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.api import Context, Device

LOOK_LIMIT_S = 1.0  # for the driver to tell of one GPU
LOOK_AGAIN_S = 60.0


class Names(NamedTuple):
    """`gpu` and `uuid` as the labels are; `gpu` is the address of a GPU whose index nobody knows."""

    gpu: str
    uuid: str
    number: str  # the index alone, empty when nobody knows it


class Gpus:
    """Names by address. `version` changes when a name may have changed.

    The gpu collector is right by definition. Without it a GPU's index is its place among the addresses that the driver
    lists, for NVML numbers them in PCI order.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._bulkhead: Bulkhead[DriverGpu] = Bulkhead(
            f"{ctx.proc}/driver/nvidia/gpus", LOOK_LIMIT_S, ctx.clock.monotonic
        )
        self._looked_s = float("-inf")
        self._driver: dict[str, str] = {}  # UUIDs by address, empty where not known
        self._told: Sequence[Device] = ()
        self._by_address: Mapping[str, Device] = {}
        self._by_uuid: Mapping[str, Device] = {}
        self.version = 0

    def look(self) -> list[tuple[str, Exception | str]]:
        """Ask the driver which GPUs there are; return what failed. A sick one may take LOOK_LIMIT_S in all."""
        self._looked_s = self._ctx.clock.monotonic()
        proc = self._ctx.proc
        try:
            found = driver_addresses(proc)
        except OSError as error:
            return [(f"{proc}/driver/nvidia/gpus", error)]
        outcomes = self._bulkhead.run({at: partial(driver_gpu, proc, at) for at in found})
        failed: list[tuple[str, Exception | str]] = []
        driver: dict[str, str] = {}
        for at, outcome in outcomes.items():
            known = self._driver.get(slot(at), "")
            if isinstance(outcome, DriverGpu):
                driver[slot(at)] = outcome.uuid or known
            else:
                driver[slot(at)] = known
                failed.append((f"GPU {at}", outcome if isinstance(outcome, Exception) else outcome.reason))
        if driver != self._driver:
            self._driver = driver
            self.version += 1
        return failed

    def looked_long_ago(self) -> bool:
        """Say whether it is time to ask the driver again for an address that nobody knows."""
        return self._ctx.clock.monotonic() - self._looked_s >= LOOK_AGAIN_S

    def hear(self) -> None:
        """Take over what the gpu collector tells."""
        told = self._ctx.devices("gpu")
        if told != self._told:
            self._told = told
            self._by_address = {slot(device.address): device for device in told if device.address}
            self._by_uuid = {device.uuid: device for device in told if device.uuid}
            self.version += 1

    def knows(self, at: str) -> bool:
        """Say whether anybody listed a GPU at this address."""
        return at in self._driver or at in self._by_address

    def names(self, at: str, heard_uuid: str = "") -> Names:
        """Return what the GPU at an address is called. `heard_uuid`: what the kernel log told of it."""
        uuid = self._driver.get(at) or heard_uuid
        device = self._by_address.get(at) or self._by_uuid.get(uuid)
        if device is not None:
            return Names(device.name, device.uuid or uuid, device.name)
        number = "" if self._told else self._rank(at)
        return Names(number or at, uuid, number)

    def all(self) -> list[Names]:
        """Return every GPU: those that the gpu collector tells of; if none, those that the driver lists."""
        if self._told:
            return [
                self.names(slot(device.address)) if device.address else Names(device.name, device.uuid, device.name)
                for device in self._told
            ]
        return [self.names(at) for at in self._driver]

    def close(self) -> None:
        """Let the thread end that asks the driver."""
        self._bulkhead.close()

    def _rank(self, at: str) -> str:
        ordered = sorted(self._driver, key=lambda other: [int(part, 16) for part in other[:-2].split(":")])
        return str(ordered.index(at)) if at in self._driver else ""


def slot(at: str) -> str:
    """Return an address with function 0: a GPU's lines have its function, another one, or none."""
    place = address(at)
    return at if place is None else f"{place[:-1]}0"
