"""Looking up one GPU in NVML, by its address or by its index, and what it means when that fails."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from agent.hw import nvidia
from agent.hw.nvml import calls, session
from agent.hw.nvml.session import NvmlError, SessionEndedError
from collectors.gpu.board import UNSUPPORTED
from collectors.gpu.entry import device_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from agent.api import Out
    from agent.hw.nvml.session import Gpu, Session
    from collectors.gpu.entry import Entry

T = TypeVar("T")

FIRST_SHARE = 5  # times the timeout, for a first handle and a first read: the driver may have to start the GPU
UNKNOWN = "unknown"
# Of a look-up by address: NVML lists no GPU there, or does not look up by address.
NOT_LISTED = frozenset({session.INVALID_ARGUMENT, session.NOT_FOUND, session.FUNCTION_NOT_FOUND, session.GPU_NOT_FOUND})

_UUID = re.compile(r"[!#-&(-;=?-_a-~]{1,96}")  # printable ASCII; no blank, quote or angle bracket

_REASONS = {
    session.GPU_IS_LOST: "gpu_lost",
    session.NOT_FOUND: "gpu_lost",
    session.GPU_NOT_FOUND: "gpu_lost",
    session.RESET_REQUIRED: "reset_required",
    session.TIMEOUT: "timeout",
    session.NO_PERMISSION: "no_permission",
}


def reason_of(error: NvmlError) -> str:
    """Return the `reason` of `gpu_error` for what NVML answered."""
    return _REASONS.get(error.code, UNKNOWN)


def is_uuid(text: str) -> bool:
    """Say whether a text can be a UUID: what a driver answers in its place would make a GPU of its own."""
    return _UUID.fullmatch(text) is not None


class Sighting(NamedTuple):
    """A GPU that answered; `at` is its NVML index, None where that is not told."""

    gpu: Gpu
    uuid: str
    at: int | None


class Lookup:
    """Looks GPUs up in one session. `held`: UUIDs of those that this process reads, which answer without delay."""

    def __init__(self, nvml: Session, count: int, out: Out, *, held: Collection[str], timeout_s: float) -> None:
        self._nvml = nvml
        self._count = count
        self._out = out
        self._held = held
        self._first_limit_s = FIRST_SHARE * timeout_s

    def at_address(self, address: str, known: Entry | None) -> Sighting | NvmlError:
        """Look up the GPU at a PCI address, which touches no other. Raises SessionEndedError."""
        return self._find(partial(self._nvml.gpu_at, address), device_name(address), known)

    def at_index(self, index: int, known: Entry | None) -> Sighting | NvmlError:
        """Look up the GPU at an index. Raises SessionEndedError."""
        found = self._find(partial(self._nvml.gpu, index), device_name(str(index)), known)
        return found._replace(at=index) if isinstance(found, Sighting) else found

    def address_of(self, found: Sighting) -> str:
        """Return the PCI address of a GPU; empty where NVML does not tell it. Raises SessionEndedError."""
        told = _attempt(partial(found.gpu.ask, calls.PCI_BUS_ID))
        if isinstance(told, str):
            return nvidia.address(told) or ""
        if told.code not in UNSUPPORTED:
            self._out.failed("PCI address of a GPU", told)
        return ""

    def _find(self, find: Callable[[], Gpu], device: str, known: Entry | None) -> Sighting | NvmlError:
        is_awake = known is not None and (known.persistent or known.uuid in self._held)
        self._out.working_on(device, None if is_awake else self._first_limit_s)
        gpu = _attempt(find)
        if isinstance(gpu, NvmlError):
            return gpu
        uuid = _attempt(partial(gpu.ask, calls.UUID))
        if isinstance(uuid, NvmlError):
            is_listed = uuid.code in NOT_LISTED  # for there is a handle
            return NvmlError(uuid.call, session.UNKNOWN, uuid.text) if is_listed else uuid
        if not is_uuid(uuid):
            return refusal_of(f"no UUID but {len(uuid)} other characters" if uuid.strip() else "an empty UUID")
        index = _attempt(partial(gpu.ask, calls.INDEX))
        return Sighting(gpu, uuid, index if isinstance(index, int) and 0 <= index < self._count else None)


def refusal_of(detail: str) -> NvmlError:
    """Return the error for a GPU that cannot be told from others."""
    return NvmlError(calls.UUID.function, session.UNKNOWN, detail)


def _attempt(ask: Callable[[], T]) -> T | NvmlError:
    """Return the answer, or why there is none. Raises SessionEndedError: then the others would not answer either."""
    try:
        return ask()
    except SessionEndedError:
        raise
    except NvmlError as error:
        return error
