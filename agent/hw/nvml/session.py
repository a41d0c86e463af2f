"""A session with the driver: load, initialise, ask. All answers are plain Python, all failures are `NvmlError`.

The binding's own traps stay here: its errors cannot be compared with numbers, a missing symbol and a library that
cannot be loaded are errors like others, and a field's own return code has to be looked at.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from agent.hw.nvml import calls, library

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
GPU_NOT_FOUND = 28
UNKNOWN = 999

# What a session that worked answers once the driver is not the one that it began with.
SESSION_ENDED = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, VERSION_MISMATCH})

# nvmlReturn_t of nvml.h. The binding asks the library for these, which may be what fails.
_TEXTS = {
    UNINITIALIZED: "NVML is not initialised",
    INVALID_ARGUMENT: "invalid argument",
    NOT_SUPPORTED: "not supported",
    NO_PERMISSION: "no permission",
    NOT_FOUND: "not found",
    7: "insufficient size",
    8: "the power cables are not attached",
    DRIVER_NOT_LOADED: "the driver is not loaded",
    TIMEOUT: "timeout",
    11: "interrupt problem",
    LIBRARY_NOT_FOUND: "libnvidia-ml.so.1, which comes with the driver, cannot be loaded",
    FUNCTION_NOT_FOUND: "the library has no such function",
    14: "the infoROM is corrupted",
    GPU_IS_LOST: "the GPU is lost",
    RESET_REQUIRED: "the GPU needs a reset",
    17: "blocked by the operating system",
    VERSION_MISMATCH: "library and kernel module have different versions",
    19: "in use",
    20: "insufficient memory",
    21: "no data",
    22: "not supported with ECC on a virtual GPU",
    23: "insufficient resources",
    25: "another version of the argument is expected",
    26: "deprecated",
    27: "not ready",
    GPU_NOT_FOUND: "no GPU found",
    29: "invalid state",
    UNKNOWN: "unknown error",
}

_FIELD = struct.Struct("=IIqqIIQ")  # nvmlFieldValue_t: id, scope, timestamp, latency, type of the value, return, value
_VALUE = struct.Struct("=Q")
_TYPES = (  # nvmlValueType_t
    struct.Struct("=d"),
    struct.Struct("=I"),
    struct.Struct("@L"),
    struct.Struct("=Q"),
    struct.Struct("=q"),
    struct.Struct("=i"),
    struct.Struct("=H"),
)
_UNSIGNED_LONG_LONG = 3  # of these; the value as it stands


class NvmlError(Exception):
    """A call failed: which, its nvmlReturn_t, and that in words."""

    def __init__(self, call: str, code: int, detail: str = "") -> None:
        self.call = call
        self.code = code
        self.text = detail or _TEXTS.get(code, "not a code this agent knows")
        super().__init__(f"{call}: {self.text} ({code})")


class SessionEndedError(NvmlError):
    """The session is of no more use, whichever GPU was asked. Only from one that was told to `watch_its_end`."""


class Driver(NamedTuple):
    """Versions as the library tells them; empty where it does not."""

    version: str
    cuda_version: str
    nvml_version: str


class Session:
    """NVML in this process. A library that somebody put under the binding before is used as it is."""

    def __init__(self, path: str | None) -> None:
        self.watch_its_end = False  # True: the codes in SESSION_ENDED are about the session, not about a GPU
        self._binding = _import_binding()
        self._path = path

    def open(self) -> None:
        """Load the library (from the given path, else where the dynamic loader finds it) and initialise it.

        Raises NvmlError.
        """
        binding = self._binding
        if binding.nvmlLib is None and self._path is not None:
            try:
                binding.nvmlLib = ctypes.CDLL(self._path)
            except OSError as error:
                raise NvmlError("dlopen", LIBRARY_NOT_FOUND, str(error)) from error
        self.ask("nvmlInit")

    def close(self) -> None:
        """Shut NVML down; the library itself stays loaded. Raises NvmlError."""
        self.ask("nvmlShutdown")

    def driver(self) -> Driver:
        """Return what versions are running. Raises NvmlError only when the session is of no more use."""
        cuda = self._told("nvmlSystemGetCudaDriverVersion")  # _v2 asks libcuda, which compute nodes may lack
        return Driver(
            self._told("nvmlSystemGetDriverVersion"),
            f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}" if cuda else "",
            self._told("nvmlSystemGetNVMLVersion"),
        )

    def count(self) -> int:
        """Return how many GPUs NVML enumerates. Raises NvmlError."""
        return int(self.ask("nvmlDeviceGetCount"))

    def gpu(self, index: int) -> Gpu:
        """Return the GPU at this index. Raises NvmlError. May initialise the GPU, which takes seconds."""
        return Gpu(self, self.ask("nvmlDeviceGetHandleByIndex", index))

    def gpu_at(self, address: str) -> Gpu:
        """Return the GPU at this PCI address. Raises NvmlError. Touches no other, and may initialise this one."""
        return Gpu(self, self.ask("nvmlDeviceGetHandleByPciBusId", address))

    def library_path(self) -> str | None:
        """Return the path of the library's file; None for one that is not a file."""
        loaded = self._binding.nvmlLib
        return library.path_of(loaded, "nvmlShutdown") if isinstance(loaded, ctypes.CDLL) else None

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of the binding. Raises NvmlError, SessionEndedError where that is watched for."""
        called = getattr(self._binding, function, None)
        if called is None:  # the installed binding is older than the call
            raise NvmlError(function, FUNCTION_NOT_FOUND)
        try:
            return called(*arguments)
        except self._binding.NVMLError as error:
            raise self.error(function, int(error.value)) from None
        except UnicodeDecodeError as error:
            raise NvmlError(function, UNKNOWN, f"text that is not UTF-8: {error.object[:40]!r}") from None
        except Exception as error:
            raise _trouble(function, error) from error

    def error(self, call: str, code: int) -> NvmlError:
        """Return what to raise for a return code that is not success."""
        return (SessionEndedError if self.watch_its_end and code in SESSION_ENDED else NvmlError)(call, code)

    def field_values(self, handle: Any, fields: Sequence[tuple[int, int]]) -> FieldBatch:
        """Return a batch of fields (id, scope) of one GPU."""
        return FieldBatch(self, self._binding, handle, fields)

    def _told(self, function: str) -> str:
        try:
            return str(self.ask(function))
        except NvmlError as error:
            if error.code in SESSION_ENDED:
                raise
            return ""


class Gpu:
    """One GPU's handle. Valid as long as its session."""

    def __init__(self, session: Session, handle: Any) -> None:
        self._session = session
        self._handle = handle

    def ask(self, call: calls.Call[T]) -> T:
        """Ask one question. Raises NvmlError, also for an answer that is not what this question has."""
        answer = self._session.ask(call.function, self._handle, *call.arguments)
        try:
            return call.convert(answer)
        except Exception as error:
            raise _trouble(call.function, error) from error

    def fields(self, fields: Sequence[tuple[int, int]]) -> FieldBatch:
        """Return a batch that reads these fields (id, scope) in one call."""
        return self._session.field_values(self._handle, fields)


class FieldBatch:
    """Several fields of one GPU, read in one call into an array that is made once."""

    def __init__(self, session: Session, binding: Any, handle: Any, fields: Sequence[tuple[int, int]]) -> None:
        self._session = session
        self._binding = binding
        self._handle = handle
        self._array = (binding.c_nvmlFieldValue_t * len(fields))()
        if ctypes.sizeof(self._array) != _FIELD.size * len(fields):
            raise NvmlError(_FIELD_VALUES, FUNCTION_NOT_FOUND, "the binding has another layout of field values")
        self._bytes = memoryview(self._array).cast("B")
        # A field that the library leaves as it was must not show the value of the time before.
        self._blank = b"".join(_FIELD.pack(id_, scope, 0, 0, 0, UNKNOWN, 0) for id_, scope in fields)
        self._count = ctypes.c_int(len(fields))

    def read(self) -> list[int | float | NvmlError]:
        """Return each field's value, or how it failed, in order. Raises NvmlError when the call as a whole fails."""
        try:
            function = self._binding.nvmlLib.nvmlDeviceGetFieldValues
        except AttributeError:
            raise NvmlError(_FIELD_VALUES, FUNCTION_NOT_FOUND) from None
        ctypes.memmove(self._array, self._blank, len(self._blank))
        try:
            code = int(function(self._handle, self._count, self._array))
        except Exception as error:
            raise _trouble(_FIELD_VALUES, error) from error
        if code != 0:
            raise self._session.error(_FIELD_VALUES, code)
        return [
            _value(kind, raw) if code == 0 else self._session.error(f"{_FIELD_VALUES} field {id_}", code)
            for id_, _, _, _, kind, code, raw in _FIELD.iter_unpack(self._bytes)
        ]


_FIELD_VALUES = "nvmlDeviceGetFieldValues"


def _trouble(call: str, error: Exception) -> NvmlError:
    """Return what stands for whatever else the binding raises: it costs the value that was asked for, no more."""
    return NvmlError(call, UNKNOWN, f"{type(error).__name__}: {error}")


def _value(kind: int, raw: int) -> int | float | NvmlError:
    if kind == _UNSIGNED_LONG_LONG:
        return raw
    if kind >= len(_TYPES):
        return NvmlError(_FIELD_VALUES, UNKNOWN, f"a value of the unknown type {kind}")
    value: int | float = _TYPES[kind].unpack_from(_VALUE.pack(raw))[0]
    return value


def _import_binding() -> Any:
    """Import the binding, 5 MB that only a process that asks NVML shall pay.

    It imports `ctypes.util` and never uses it. Unless it is there already, an empty one is put in its place meanwhile,
    which saves the process a quarter of that: the real one brings half a dozen packages to find libraries by name.
    """
    unused = "ctypes.util"
    is_there = unused in sys.modules
    if not is_there:
        sys.modules[unused] = empty = ModuleType(unused)
        vars(empty)["find_library"] = None
    try:
        import pynvml  # noqa: PLC0415 - as above
    finally:
        if not is_there:
            del sys.modules[unused]
    return pynvml
