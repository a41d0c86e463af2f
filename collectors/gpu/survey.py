"""Who is there: the GPUs at the addresses that the system shows, and those that NVML lists beside them.

A GPU is known by its UUID. Its label is the NVML index at first sight and stays, though NVML's numbers close up when
another GPU vanishes. It is looked up by its address, which touches no other: a GPU to be left alone, for a process hung
on it, is not, and one that does not answer only now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.hw import nvidia
from agent.hw.nvml.session import INVALID_ARGUMENT, NvmlError
from collectors.gpu.entry import Entry, device_name
from collectors.gpu.lookup import NOT_LISTED, Lookup, Sighting, is_uuid, reason_of, refusal_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.api import Context, Out
    from agent.hw.nvml.session import Gpu
    from collectors.gpu.census import Census, Listing
    from collectors.gpu.memory import Memory
    from collectors.gpu.selection import Selection


class Survey:
    """One look at who is there. `handles`: by UUID, of those that were found.

    `first_wait_s`: the longest pause before a GPU that is not found is looked for the second time.
    """

    def __init__(
        self,
        ctx: Context,
        memory: Memory,
        selection: Selection,
        census: Census,
        out: Out,
        *,
        listing: Listing,
        first_wait_s: float,
    ) -> None:
        self.handles: dict[str, Gpu] = {}
        self._avoid = ctx.avoid
        self._now_s = ctx.clock.monotonic()
        self._slack_s = ctx.interval_s / 2
        self._first_wait_s = first_wait_s
        self._memory = memory
        self._selection = selection
        self._census = census
        self._out = out
        # The index that each would have if NVML listed all, which is what the configuration judges it by.
        self._ranks = {address: str(rank) for rank, address in enumerate(listing.addresses)}
        self._hidden = listing.hidden
        self._listed: set[str] = set()  # addresses of GPUs that NVML lists
        self._answered: set[str] = set()  # addresses of those that were found
        self._indices: set[int] = set()  # of those that were found
        self._refused: dict[str, NvmlError] = {}  # by address, of those that NVML lists and gives no handle of
        self._settled: set[Entry] = set()  # without a handle, for a reason that is known
        self._doubted: set[Entry] = set()  # told under another UUID, for the first time
        self._unseen = 0  # kept out by their index, and so not looked up
        self._kept_out: set[str] = set()  # UUIDs kept out by what was told

    def take(self, lookup: Lookup, count: int) -> None:
        """Look all up. Afterwards each GPU has a handle or the reason why not. Raises SessionEndedError."""
        known = {entry.address for entry in self._memory.entries if entry.address}
        for address in sorted(known.union(self._ranks), key=nvidia.order):
            self._visit(lookup, address)
        self._describe()
        if len(self._listed) < count:
            self._visit_by_index(lookup, count)
        self._label_by_rank(count)
        self._forget_uncounted(count)
        self._memory.excluded = self._unseen + len(self._kept_out)
        for entry in self._memory.entries:
            if entry.uuid not in self.handles and entry not in self._settled and not self._left_alone(entry):
                entry.is_listed = False
                self._fail(entry, "gpu_lost", f"NVML does not list it{' any more' if entry.alive else ''}")

    def take_without_nvml(self) -> None:
        """Take in the GPUs that the kernel module shows."""
        self._unseen = sum(map(self._is_kept_out, self._ranks))
        self._describe()
        if self._census.can_describe and self._ranks:
            self._memory.excluded = self._unseen + len(self._kept_out)

    # By address

    def _is_kept_out(self, address: str) -> bool:
        is_known = self._memory.by_address(address) is not None
        return not is_known and address in self._ranks and self._selection.refuses(self._ranks[address])

    def _visit(self, lookup: Lookup, address: str) -> None:
        entry = self._memory.by_address(address)
        if self._is_kept_out(address):
            self._unseen += 1
            self._listed.add(address)
        elif device_name(address) in self._avoid:
            self._listed.add(address)
        elif entry is not None and self._rests(entry):
            self._settled.add(entry)
            self._listed.update([address] if entry.is_listed else [])
        else:
            found = lookup.at_address(address, entry)
            if isinstance(found, Sighting) and self._is_repeated(found, entry):
                found = refusal_of(f"{found.uuid} is another GPU's")
            elif isinstance(found, Sighting) and entry is not None and self._is_doubtful(found, entry):
                found = _other_uuid(found, entry)
            if isinstance(found, Sighting):
                self._listed.add(address)
                self._meet(found, address)
            elif found.code not in NOT_LISTED:
                self._listed.add(address)
                self._refused[address] = found

    def _is_repeated(self, found: Sighting, at_address: Entry | None) -> bool:
        """Say whether the UUID is that of a GPU which was found already, or which the system shows elsewhere."""
        other = self._memory.by_uuid(found.uuid)
        is_elsewhere = other is not None and other is not at_address and other.address in self._ranks
        return found.uuid in self.handles or is_elsewhere

    def _is_doubtful(self, found: Sighting, at_address: Entry) -> bool:
        """Say whether a known GPU is told under a UUID that nobody has, and was not when it was looked up before.

        A GPU that was replaced tells its UUID again; a garbled one is told once.
        """
        if at_address.uuid in {"", found.uuid} or self._memory.by_uuid(found.uuid) is not None:
            at_address.other_uuid = ""
            return False
        if at_address.other_uuid != found.uuid:
            at_address.other_uuid = found.uuid
            self._doubted.add(at_address)
        return at_address in self._doubted

    def _meet(self, found: Sighting, address: str) -> None:
        """Take in a GPU that was found at an address, which is empty where nobody tells it."""
        self._answered.add(address)
        self._indices.update([] if found.at is None else [found.at])
        label = "" if found.at is None else str(found.at)
        entry, at_address = self._memory.by_uuid(found.uuid), self._memory.by_address(address)
        if self._selection.refuses((entry.label if entry is not None else "") or label, found.uuid):
            self._memory.entries = [other for other in self._memory.entries if other is not entry]
            self._kept_out.add(found.uuid)
            return
        if at_address is not None and at_address.uuid not in {"", found.uuid}:
            at_address.address = ""  # it was there, and is not any more
        elif at_address is not None and entry is None:
            entry, at_address.uuid = at_address, found.uuid
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

    def _visit_by_index(self, lookup: Lookup, count: int) -> None:
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
            if device_name(str(index)) in self._avoid:
                self._memory.entries.append(Entry(str(index), ""))
            elif entry is not None and self._rests(entry):
                self._settled.add(entry)
            else:
                found = lookup.at_index(index, entry)
                if isinstance(found, Sighting) and found.uuid in self.handles:
                    found = refusal_of(f"{found.uuid} is another GPU's")
                if isinstance(found, Sighting):
                    self._meet_by_index(found, lookup.address_of(found))
                else:
                    failing[index] = found
        self._take_in_failing(failing)

    def _meet_by_index(self, found: Sighting, address: str) -> None:
        self._listed.update([address] if address else [])
        at_address = self._memory.by_address(address)
        if at_address is not None and self._is_doubtful(found, at_address):
            self._refuse(at_address, _other_uuid(found, at_address))
        else:
            self._meet(found, address)

    def _take_in_failing(self, failing: Mapping[int, NvmlError]) -> None:
        """Take in the indices that NVML refuses, unless they are GPUs that are known: whose is not known then.

        Nor is one taken in that NVML alone counts: all that the system shows are known, or where it shows nothing,
        NVML itself says that there is no such index.
        """
        silent = [e for e in self._memory.entries if e.uuid not in self.handles and not self._left_alone(e)]
        whose = {
            entry.label: entry for entry in silent if not (entry.address and entry.uuid) and entry.label.isdecimal()
        }
        others = {index: error for index, error in failing.items() if str(index) not in whose}
        are_known = len(others) <= sum(bool(entry.address) for entry in silent)
        room = self._nameless_room()
        for index, error in failing.items():
            if index not in others:
                self._refuse(whose[str(index)], error)
            elif are_known or room == 0 or (room is None and error.code == INVALID_ARGUMENT):
                self._out.failed(device_name(str(index)), error)
            else:
                room = None if room is None else room - 1
                self._memory.entries.append(Entry(str(index), ""))
                self._refuse(self._memory.entries[-1], error)

    def _nameless_room(self) -> int | None:
        """Return how many GPUs of ours the system shows beside those that are known; None where it shows none."""
        shown = self._census.largest - self._hidden
        known = self._unseen + len(self._kept_out) + sum(not self._is_gone(entry) for entry in self._memory.entries)
        return max(shown - known, 0) if shown else None

    def _is_gone(self, entry: Entry) -> bool:
        shown = {*(self._census.pci or ()), *(self._census.driver or ())}
        return bool(shown) and bool(entry.address) and entry.uuid not in self.handles and entry.address not in shown

    def _forget_uncounted(self, count: int) -> None:
        """Forget GPUs of which no more than an index was ever known, and which NVML does not count any more."""
        counted = set(map(str, range(count)))
        for entry in list(self._memory.entries):
            if not (entry.uuid or entry.address or entry.label in counted or self._left_alone(entry)):
                self._memory.entries.remove(entry)

    # Without a handle

    def _describe(self) -> None:
        """Ask the kernel module who is at the addresses where NVML showed nobody."""
        unknown = []
        for address in sorted({*self._ranks, *self._refused}, key=nvidia.order):
            entry = self._memory.by_address(address)
            is_named = entry is not None and bool(entry.uuid)
            if not is_named and address not in self._answered and not self._is_kept_out(address):
                unknown.append(address)
        described = self._census.describe(self._out, unknown)
        told = {gpu.address: gpu.uuid for gpu in described if gpu.uuid is not None and is_uuid(gpu.uuid)}
        for address in unknown:
            self._take_in_unseen(address, told.get(address))
        for address, error in self._refused.items():
            entry = self._memory.by_address(address)
            if entry is not None:
                self._refuse(entry, error)

    def _take_in_unseen(self, address: str, uuid: str | None) -> None:
        if self._selection.refuses(self._ranks.get(address, ""), uuid or ""):
            self._kept_out.add(uuid or address)
            return
        entry, at_address = self._memory.by_uuid(uuid), self._memory.by_address(address)
        if entry is not None and entry.uuid in self.handles:
            entry, uuid = None, None  # NVML knows better who that is
        if entry is not None and entry is not at_address:
            entry.address = address
            if at_address is not None:
                self._memory.entries.remove(at_address)
        elif at_address is not None and uuid:
            at_address.uuid = uuid
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
            if entry is not None and not entry.label and index not in self._indices:
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


def _other_uuid(found: Sighting, known: Entry) -> NvmlError:
    return refusal_of(f"{found.uuid}, and not {known.uuid} as before")
