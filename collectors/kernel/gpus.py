"""What the GPU at a PCI address is called: index and UUID, from whoever knows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.hw.bulkhead import Bulkhead
from agent.hw.nvidia import DriverGpu, address, driver_addresses, driver_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.api import Context, Device

LOOK_LIMIT_S = 1.0  # for the driver to tell of one GPU
LOOK_AGAIN_S = 60.0
_GPUS_LIMIT = 256  # no node has as many, a damaged log may


class Names(NamedTuple):
    """`gpu` and `uuid` as the labels are; `gpu` is the address of a GPU whose index nobody knows."""

    gpu: str
    uuid: str
    number: str  # the index alone, empty when nobody knows it


class Gpus:
    """Names by address. `version` changes when a name may have changed, `unsaved` is set when what is kept has.

    The gpu collector is right by definition. Without it a GPU's index is its place among the addresses that the driver
    lists, for NVML numbers them in PCI order. What was known once on a boot stays: neither an address nor a UUID
    becomes another GPU's, and a GPU that leaves the driver's list (lost, or the driver unloaded) must not take the
    names of the others with it.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._bulkhead: Bulkhead[DriverGpu] = Bulkhead(
            f"{ctx.proc}/driver/nvidia/gpus", LOOK_LIMIT_S, ctx.clock.monotonic
        )
        self._looked_s = float("-inf")
        self._ranks: dict[str, str] = {}  # of the addresses that the driver ever listed, in their order
        self._uuids: dict[str, str] = {}  # by address, whoever told
        self._told: Sequence[Device] = ()
        self._by_address: Mapping[str, Device] = {}
        self._by_uuid: Mapping[str, Device] = {}
        self.version = 0
        self.unsaved = False

    def look(self) -> list[tuple[str, Exception | str]]:
        """Ask the driver which GPUs there are, and for the UUIDs that nobody knows; return what failed.

        A sick GPU may take LOOK_LIMIT_S in all.
        """
        self._looked_s = self._ctx.clock.monotonic()
        proc = self._ctx.proc
        try:
            found = driver_addresses(proc)
        except OSError as error:
            return [(f"{proc}/driver/nvidia/gpus", error)]
        self._list(map(slot, found))
        outcomes = self._bulkhead.run(
            {at: partial(driver_gpu, proc, at) for at in found if slot(at) not in self._uuids}
        )
        failed: list[tuple[str, Exception | str]] = []
        for at, outcome in outcomes.items():
            if not isinstance(outcome, DriverGpu):
                failed.append((f"GPU {at}", outcome if isinstance(outcome, Exception) else outcome.reason))
            elif outcome.uuid:
                self.learn(slot(at), outcome.uuid)
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
            for at, device in self._by_address.items():
                if device.uuid:
                    self.learn(at, device.uuid)

    def learn(self, at: str, uuid: str) -> None:
        """Take over a GPU's UUID."""
        if self._uuids.get(at) != uuid and (at in self._uuids or len(self._uuids) < _GPUS_LIMIT):
            self._uuids[at] = uuid
            self._change()

    def knows(self, at: str) -> bool:
        """Say whether anybody listed a GPU at this address."""
        return at in self._ranks or at in self._by_address

    def names(self, at: str) -> Names:
        """Return what the GPU at an address is called."""
        uuid = self._uuids.get(at, "")
        device = self._by_address.get(at) or self._by_uuid.get(uuid)
        if device is not None:
            return Names(device.name or at, device.uuid or uuid, device.name)
        number = "" if self._told else self._ranks.get(at, "")
        return Names(number or at, uuid, number)

    def all(self) -> list[Names]:
        """Return every GPU: those that the gpu collector tells of; if none, those that the driver ever listed."""
        if self._told:
            return [
                self.names(slot(device.address)) if device.address else Names(device.name, device.uuid, device.name)
                for device in self._told
            ]
        return [self.names(at) for at in self._ranks]

    def to_json(self) -> dict[str, Any]:
        """Return what is to be kept as long as the machine is up, as JSON types."""
        return {"listed": list(self._ranks), "uuids": self._uuids}

    def restore(self, content: Any) -> None:
        """Take back what `to_json` gave. Raises LookupError, TypeError, AttributeError for anything else."""
        listed = [address(at) for at in content["listed"]]
        uuids = {address(at): str(uuid) for at, uuid in content["uuids"].items()}
        self._list(at for at in listed if at is not None)
        for at, uuid in uuids.items():
            if at is not None:
                self.learn(at, uuid)
        self.unsaved = False

    def close(self) -> None:
        """Let the thread end that asks the driver."""
        self._bulkhead.close()

    def _list(self, found: Iterable[str]) -> None:
        added = [at for at in found if at not in self._ranks]
        if added:
            ordered = sorted([*self._ranks, *added], key=_place)
            self._ranks = {at: str(rank) for rank, at in enumerate(ordered)}
            self._change()

    def _change(self) -> None:
        self.version += 1
        self.unsaved = True


def slot(at: str) -> str:
    """Return an address with function 0: a GPU's lines have its function, another one, or none."""
    place = address(at)
    return at if place is None else f"{place[:-1]}0"


def _place(at: str) -> list[int]:
    return [int(part, 16) for part in at[:-2].split(":")]
