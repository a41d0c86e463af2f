"""Who is there: the GPUs at the addresses that the system shows, and those that NVML lists beside them.

A GPU is known by its UUID. Its label is the NVML index at first sight and stays, though NVML's numbers close up when
another GPU vanishes. It is looked up by its address, which touches no other: a GPU to be left alone, for a process hung
on it, is not, and one that does not answer only now and then.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from agent.hw import nvidia
from agent.hw.nvml import calls, session
from agent.hw.nvml.session import NvmlError, SessionEndedError
from collectors.gpu.board import UNSUPPORTED
from collectors.gpu.entry import Entry, device_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agent.api import Context, Out
    from agent.hw.nvml.session import Gpu, Session
    from collectors.gpu.census import Census, Listing
    from collectors.gpu.memory import Memory
    from collectors.gpu.selection import Selection

T = TypeVar("T")

FIRST_SHARE = 5  # times the timeout, for a first handle and a first read: the driver may have to start the GPU
UNKNOWN = "unknown"
_REASONS = {
    session.GPU_IS_LOST: "gpu_lost",
    session.NOT_FOUND: "gpu_lost",
    28: "gpu_lost",  # NVML_ERROR_GPU_NOT_FOUND
    session.RESET_REQUIRED: "reset_required",
    session.TIMEOUT: "timeout",
    session.NO_PERMISSION: "no_permission",
}
# Of a look-up by address: NVML lists no GPU there, or does not look up by address.
_NOT_LISTED = frozenset({session.INVALID_ARGUMENT, session.NOT_FOUND, session.FUNCTION_NOT_FOUND, 28})


def reason_of(error: NvmlError) -> str:
    """Return the `reason` of `gpu_error` for what NVML answered."""
    return _REASONS.get(error.code, UNKNOWN)


class _Sighting(NamedTuple):
    """A GPU that answered a look-up; `index` is None where NVML does not tell it."""

    gpu: Gpu
    uuid: str
    index: int | None


class Survey:
    """One look at who is there. `handles`: by UUID, of those that were found.

    `held`: UUIDs of the GPUs that this process reads, which answer without delay; `first_wait_s`: the longest pause
    before a GPU that is not found is looked for again.
    """

    def __init__(
        self,
        ctx: Context,
        memory: Memory,
        selection: Selection,
        census: Census,
        out: Out,
        *,
        held: Collection[str] = (),
        first_wait_s: float = 0.0,
    ) -> None:
        self.handles: dict[str, Gpu] = {}
        self._held = held
        self._avoid = ctx.avoid
        self._first_limit_s = FIRST_SHARE * ctx.timeout_s
        self._now_s = ctx.clock.monotonic()
        self._slack_s = ctx.interval_s / 2
        self._first_wait_s = first_wait_s
        self._memory = memory
        self._selection = selection
        self._census = census
        self._out = out
        self._listed: set[str] = set()  # addresses of GPUs that NVML lists
        self._indices: set[int] = set()  # of those that were found
        self._answered: set[str] = set()  # addresses of those that were found
        self._refused: dict[str, NvmlError] = {}  # by address, of those that NVML lists and gives no handle of
        self._settled: set[Entry] = set()  # without a handle, for a reason that is known
        self._unseen = 0  # kept out by their index, and so not looked up
        self._kept_out = 0  # by what the look-up told

    def take(self, nvml: Session, count: int, listing: Listing) -> None:
        """Look all up. Afterwards each GPU has a handle or the reason why not. Raises SessionEndedError."""
        known = {entry.address for entry in self._memory.entries if entry.address}
        for address in sorted(known.union(listing.addresses), key=nvidia.order):
            self._visit(nvml, count, address, self._rank(listing, address))
        if len(self._listed) < count:
            self._visit_by_index(nvml, count)
        self._describe(listing)
        self._label_by_rank(count)
        self._memory.excluded = self._unseen + self._kept_out
        for entry in self._memory.entries:
            if entry.uuid not in self.handles and entry not in self._settled and not self._left_alone(entry):
                entry.is_listed = False
                self._fail(entry, "gpu_lost", f"NVML does not list it{' any more' if entry.alive else ''}")

    def take_without_nvml(self, listing: Listing) -> None:
        """Take in the GPUs that the kernel module shows."""
        self._unseen = sum(self._is_kept_out(address, self._rank(listing, address)) for address in listing.addresses)
        self._describe(listing)
        if self._census.can_describe and listing.addresses:
            self._memory.excluded = self._unseen + self._kept_out

    # By address

    def _rank(self, listing: Listing, address: str) -> str:
        """Return the index that a GPU would have if NVML listed all; empty where the system does not show it."""
        return str(listing.addresses.index(address)) if address in listing.addresses else ""

    def _is_kept_out(self, address: str, rank: str) -> bool:
        return self._memory.by_address(address) is None and bool(rank) and self._selection.refuses(rank)

    def _visit(self, nvml: Session, count: int, address: str, rank: str) -> None:
        entry = self._memory.by_address(address)
        if self._is_kept_out(address, rank):
            self._unseen += 1
            self._listed.add(address)
        elif device_name(address) in self._avoid:
            self._listed.add(address)
        elif entry is not None and self._rests(entry):
            self._settled.add(entry)
            self._listed.update([address] if entry.is_listed else [])
        else:
            found = self._look_up(partial(nvml.gpu_at, address), device_name(address), count, entry)
            if isinstance(found, _Sighting):
                self._listed.add(address)
                self._meet(found, address)
            elif found.code not in _NOT_LISTED:
                self._listed.add(address)
                self._refused[address] = found

    def _look_up(self, find: Callable[[], Gpu], device: str, count: int, known: Entry | None) -> _Sighting | NvmlError:
        is_awake = known is not None and (known.persistent or known.uuid in self._held)
        self._out.working_on(device, None if is_awake else self._first_limit_s)
        gpu = _attempt(find)
        if isinstance(gpu, NvmlError):
            return gpu
        uuid = _attempt(partial(gpu.ask, calls.UUID))
        if isinstance(uuid, NvmlError):
            is_there = uuid.code in _NOT_LISTED  # as there is a handle
            return NvmlError(uuid.call, session.UNKNOWN, uuid.text) if is_there else uuid
        if not uuid.strip() or uuid in self.handles:
            detail = f"{uuid}, as of another GPU" if uuid.strip() else "an empty UUID"
            return NvmlError(calls.UUID.function, session.UNKNOWN, detail)
        index = _attempt(partial(gpu.ask, calls.INDEX))
        return _Sighting(gpu, uuid, index if isinstance(index, int) and 0 <= index < count else None)

    def _meet(self, found: _Sighting, address: str) -> None:
        """Take in a GPU that was found at an address, which is empty where nobody tells it."""
        self._answered.add(address)
        label = "" if found.index is None else str(found.index)
        if found.index is not None:
            self._indices.add(found.index)
        entry = self._memory.by_uuid(found.uuid)
        at_address = self._memory.by_address(address)
        if self._selection.refuses((entry.label if entry is not None else "") or label, found.uuid):
            self._memory.entries = [other for other in self._memory.entries if other.uuid != found.uuid]
            self._kept_out += 1
            return
        if at_address is not None and at_address.uuid not in {"", found.uuid}:
            at_address.address = ""  # it was there, and is not any more
        elif at_address is not None and entry is None:
            self._memory.name(at_address, found.uuid)
            entry = at_address
        elif at_address is not None and at_address is not entry:
            self._memory.entries.remove(at_address)  # has turned out to be this one
        if entry is None:
            entry = Entry("", found.uuid)
            self._memory.entries.append(entry)
        if not entry.label and label:
            self._memory.label(entry, label)
        entry.address = address or entry.address
        entry.is_listed = True
        self.handles[entry.uuid] = found.gpu
        self._memory.save()  # before the next GPU is touched, which may be the end of this process

    # By index

    def _visit_by_index(self, nvml: Session, count: int) -> None:
        """Look up the GPUs that NVML lists at no address that anybody told."""
        free = [index for index in range(count) if index not in self._indices]
        unwanted = {index for index in free if self._selection.refuses(str(index))}
        self._unseen = max(self._unseen, len(unwanted))
        left_alone = {entry.label for entry in self._memory.entries if self._left_alone(entry)}
        failing: dict[int, NvmlError] = {}
        for index in free:
            entry = self._memory.nameless(str(index))
            if index in unwanted or str(index) in left_alone:
                continue
            if entry is not None and self._rests(entry):
                self._settled.add(entry)
                continue
            if device_name(str(index)) in self._avoid:
                if entry is None:
                    self._memory.entries.append(Entry(str(index), ""))
                continue
            found = self._look_up(partial(nvml.gpu, index), device_name(str(index)), count, entry)
            if isinstance(found, _Sighting):
                self._meet(found._replace(index=index), self._address_of(found.gpu))
            else:
                failing[index] = found
        self._take_in(failing)

    def _address_of(self, gpu: Gpu) -> str:
        told = _attempt(partial(gpu.ask, calls.PCI_BUS_ID))
        if isinstance(told, str):
            return nvidia.address(told) or ""
        if told.code not in UNSUPPORTED:
            self._out.failed("PCI address of a GPU", told)
        return ""

    def _take_in(self, failing: dict[int, NvmlError]) -> None:
        """Take in the indices that NVML refuses, unless they are GPUs that are known: whose is not known then."""
        others = {}
        for index, error in failing.items():
            entries = (entry for entry in self._memory.entries if not entry.address and entry.label == str(index))
            entry = next((entry for entry in entries if entry.uuid not in self.handles), None)
            if entry is None:
                others[index] = error
            else:
                self._refuse(entry, error)
        missing = [entry for entry in self._memory.entries if entry.uuid not in self.handles and entry.address]
        missing = [entry for entry in missing if entry.address not in self._listed]
        for index, error in others.items():
            if len(others) <= len(missing):
                self._out.failed(device_name(str(index)), error)
            else:
                entry = Entry(str(index), "")
                self._memory.entries.append(entry)
                self._refuse(entry, error)

    # Without a handle

    def _describe(self, listing: Listing) -> None:
        """Ask the kernel module who is at the addresses where NVML showed nobody."""
        unknown = {
            address
            for address in {*listing.addresses, *self._refused}
            if address not in self._answered
            and not self._is_kept_out(address, self._rank(listing, address))
            and ((entry := self._memory.by_address(address)) is None or not entry.uuid)
        }
        told = {gpu.address: gpu.uuid for gpu in self._census.describe(self._out, sorted(unknown, key=nvidia.order))}
        for address in sorted(unknown, key=nvidia.order):
            self._take_in_unseen(address, told.get(address), self._rank(listing, address))
        for address, error in self._refused.items():
            entry = self._memory.by_address(address)
            if entry is not None:
                self._refuse(entry, error)

    def _take_in_unseen(self, address: str, uuid: str | None, rank: str) -> None:
        if self._selection.refuses(rank, uuid or ""):
            self._kept_out += 1
            return
        entry, at_address = self._memory.by_uuid(uuid), self._memory.by_address(address)
        if entry is not None and entry.uuid in self.handles:
            entry, uuid = None, None  # NVML knows better who that is
        if entry is not None and entry is not at_address:
            entry.address = address
            if at_address is not None:
                self._memory.entries.remove(at_address)
        elif at_address is not None and uuid:
            self._memory.name(at_address, uuid)
        elif at_address is None and (uuid or address in self._listed):
            self._memory.entries.append(Entry("", uuid or "", address))

    def _label_by_rank(self, count: int) -> None:
        """Give a GPU that NVML lists and nobody could ask for its index the one that its address has, if that is free.

        NVML lists GPUs in the order of their addresses; where it plainly does not, such a GPU goes without a label.
        """
        if len(self._listed) != count:
            return
        for index, address in enumerate(sorted(self._listed, key=nvidia.order)):
            entry = self._memory.by_address(address)
            if entry is None or entry.label or index in self._indices:
                continue
            alike = (other for other in self._memory.entries if other.address and other.label == str(index))
            if entry.uuid or all(other.uuid for other in alike):
                self._memory.label(entry, str(index))

    def _refuse(self, entry: Entry, error: NvmlError) -> None:
        entry.is_listed = True
        self._fail(entry, reason_of(error), str(error))

    def _fail(self, entry: Entry, reason: str, trouble: str) -> None:
        entry.fail(reason, trouble, self._now_s)
        entry.wait(self._now_s, self._first_wait_s)
        self._settled.add(entry)

    def _left_alone(self, entry: Entry) -> bool:
        return entry.device in self._avoid

    def _rests(self, entry: Entry) -> bool:
        return bool(entry.reason) and not entry.is_due(self._now_s + self._slack_s)


def _attempt(ask: Callable[[], T]) -> T | NvmlError:
    """Return the answer, or why there is none. Raises SessionEndedError: then the others would not answer either."""
    try:
        return ask()
    except SessionEndedError:
        raise
    except NvmlError as error:
        return error
