"""Who is there: NVML's GPUs, by index, and those that only the kernel module shows.

A GPU is known by its UUID. Its label is the NVML index at first sight and stays, though NVML's numbers close up when
another GPU vanishes. A GPU to be left alone, for a process hung on it, is not looked up either.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from agent.hw import nvidia
from agent.hw.nvml import calls, session
from agent.hw.nvml.session import NvmlError
from collectors.gpu.board import UNSUPPORTED
from collectors.gpu.memory import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from agent.api import Context, Out
    from agent.hw.nvml.session import Gpu, Session
    from collectors.gpu.census import Census
    from collectors.gpu.memory import Memory
    from collectors.gpu.selection import Selection

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


def reason_of(error: NvmlError) -> str:
    """Return the `reason` of `gpu_error` for what NVML answered."""
    return _REASONS.get(error.code, UNKNOWN)


def device_name(label: str) -> str:
    """Return what a hang on the GPU of this label is blamed on."""
    return f"GPU {label}"


class Survey:
    """One look at who is there. `held`: the UUIDs whose handles this process has, which answer without delay.

    `fatal`: codes in a GPU's answer that concern the session and are raised as NvmlError.
    """

    def __init__(
        self,
        ctx: Context,
        memory: Memory,
        selection: Selection,
        out: Out,
        *,
        held: Collection[str] = (),
        fatal: Collection[int] = (),
    ) -> None:
        self.handles: dict[str, Gpu] = {}  # by UUID, of those that were found
        self._avoid: Mapping[str, str] = ctx.avoid
        self._first_limit_s = FIRST_SHARE * ctx.timeout_s
        self._memory = memory
        self._selection = selection
        self._out = out
        self._held = held
        self._fatal = fatal
        self._failing: dict[int, NvmlError] = {}

    def take(self, nvml: Session, count: int, census: Census) -> None:
        """List NVML's GPUs. Afterwards each entry has a handle or the reason why not."""
        for entry in self._memory.entries:
            entry.fail("", "")
        spared = self._spared(count)
        if spared is None:
            self._find_again(nvml)
        else:
            self._memory.excluded = sum(self._meet(nvml, index) for index in range(count) if index not in spared)
            self._memory.enumerated = count
        self.add_strangers(census)
        self._blame()
        self._name_the_nameless()
        for entry in self._missing():
            if not entry.reason:
                entry.index = None
                entry.fail("gpu_lost", "NVML does not list it any more" if entry.alive else "NVML does not list it")

    def add_strangers(self, census: Census) -> None:
        """Take in the GPUs that only the kernel module knows: without a label, for NVML never showed them.

        Whether the configuration wants them is judged by the index they would have if NVML showed all.
        """
        ranks = {address: str(rank) for rank, address in enumerate(census.driver or ())}
        known = {entry.address for entry in self._memory.entries}
        wanted = [at for at, rank in ranks.items() if at not in known and self._selection.may_want(rank)]
        refused = sum(not self._selection.may_want(rank) for rank in ranks.values())
        for gpu in census.describe(self._out, wanted):
            entry = self._by_uuid(gpu.uuid)
            if entry is not None:
                entry.address = gpu.address
            elif gpu.uuid is not None and self._selection.wants(ranks[gpu.address], gpu.uuid):
                self._memory.entries.append(Entry("", gpu.uuid, gpu.address))
            elif gpu.uuid is not None:
                refused += 1
        if self._memory.enumerated is None:  # NVML knows better
            self._memory.excluded = refused

    def _spared(self, count: int) -> set[int] | None:
        """Return the indices not to touch, of the GPUs to be left alone; None when NVML's numbers have changed."""
        labels = {name.removeprefix(device_name("")) for name in self._avoid if name.startswith(device_name(""))}
        if labels and self._memory.enumerated not in (None, count):
            return None
        indices = set()
        for label in labels:
            entry = next((entry for entry in self._memory.entries if entry.label == label), None)
            if entry is None and label.isdecimal() and int(label) < count:  # never met: called by its index
                entry = Entry(label, "", index=int(label))
                self._memory.entries.append(entry)
            if entry is not None and entry.index is not None:
                indices.add(entry.index)
        return indices

    def _meet(self, nvml: Session, index: int) -> bool:
        """Look up one index; True when the configuration excludes what is there."""
        there = next((entry for entry in self._memory.entries if entry.index == index), None)
        label = there.label if there is not None else str(index)
        if not self._selection.may_want(label):
            return True
        met = self._look_up(partial(nvml.gpu, index), label, there)
        if isinstance(met, NvmlError):
            self._failing[index] = met
            return False
        gpu, uuid = met
        entry = self._by_uuid(uuid)
        label = entry.label if entry is not None and entry.label else str(index)
        if not self._selection.wants(label, uuid):
            self._memory.entries = [other for other in self._memory.entries if other.uuid != uuid]
            return True
        if entry is None:
            entry = self._new(label, uuid)
        entry.label, entry.index = label, index
        self._hold(entry, gpu)
        return False

    def _find_again(self, nvml: Session) -> None:
        """Look up the known GPUs by their addresses, which touches no other."""
        for entry in self._memory.entries:
            if not entry.address or not entry.label or self._left_alone(entry):
                continue
            met = self._look_up(partial(nvml.gpu_at, entry.address), entry.label, entry)
            if isinstance(met, NvmlError):
                entry.fail(reason_of(met), str(met))
            elif met[1] == entry.uuid:
                self._hold(entry, met[0])

    def _look_up(self, find: Callable[[], Gpu], label: str, known: Entry | None) -> tuple[Gpu, str] | NvmlError:
        is_held = known is not None and known.uuid in self._held
        self._out.working_on(device_name(label), None if is_held else self._first_limit_s)
        try:
            gpu = find()
            return gpu, gpu.ask(calls.UUID)
        except NvmlError as error:
            if error.code in self._fatal:
                raise
            return error

    def _hold(self, entry: Entry, gpu: Gpu) -> None:
        self.handles[entry.uuid] = gpu
        if not entry.address:
            try:
                entry.address = nvidia.address(gpu.ask(calls.PCI_BUS_ID)) or ""
            except NvmlError as error:
                if error.code in self._fatal:
                    raise
                if error.code not in UNSUPPORTED:
                    self._out.failed(f"{device_name(entry.label)} PCI address", error)
        self._memory.save()  # before the next GPU is touched, which may be the end of this process

    def _new(self, label: str, uuid: str) -> Entry:
        """Make an entry; one of the same label that never told its UUID was this GPU."""
        entry = Entry(label, uuid)
        nameless = next((e for e in self._memory.entries if not e.uuid and e.label == label), None)
        if nameless is not None:
            self._memory.entries.remove(nameless)
            entry.alive = nameless.alive
        self._memory.entries.append(entry)
        return entry

    def _blame(self) -> None:
        """Find out whose the failing lookups are: NVML lists GPUs in the order in which it listed them before."""
        missing = [entry for entry in self._missing() if entry.label]
        for index, error in sorted(self._failing.items()):
            later = [entry for entry in missing if entry.index is not None and entry.index >= index]
            entry = min(later, key=lambda entry: entry.index or 0, default=None)
            if entry is None and len(missing) == 1:
                entry = missing[0]
            if entry is None:
                entry = self._new(str(index), "")
            else:
                missing.remove(entry)
            entry.index = index
            entry.fail(reason_of(error), str(error))

    def _name_the_nameless(self) -> None:
        """Take the UUIDs of GPUs that NVML lists and cannot reach from the kernel module, where it is plain whose."""
        nameless = sorted((e for e in self._memory.entries if not e.uuid), key=lambda entry: entry.index or 0)
        strangers = sorted((e for e in self._memory.entries if not e.label), key=lambda entry: entry.address)
        if len(nameless) == len(strangers):
            for entry, stranger in zip(nameless, strangers, strict=True):
                entry.uuid, entry.address = stranger.uuid, stranger.address
                self._memory.entries.remove(stranger)

    def _missing(self) -> list[Entry]:
        """Return the entries without a handle that are not left alone."""
        return [
            entry for entry in self._memory.entries if entry.uuid not in self.handles and not self._left_alone(entry)
        ]

    def _left_alone(self, entry: Entry) -> bool:
        return bool(entry.label) and device_name(entry.label) in self._avoid

    def _by_uuid(self, uuid: str | None) -> Entry | None:
        return next((entry for entry in self._memory.entries if uuid and entry.uuid == uuid), None)
