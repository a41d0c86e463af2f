"""The library as the binding finds it: every function, written into the caller's memory as the C library does it.

So structs and field values are real, and so is what the binding makes of them.
"""

from __future__ import annotations

import ctypes
import re
import struct
import time
from collections import defaultdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from agent.sim.nvml import fields
from agent.sim.nvml.abi import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    SUCCESS,
    UNINITIALIZED,
    UNKNOWN,
    Failure,
    address,
    check_version,
    error_name,
    fail,
    integer,
    pointer,
    put,
    put_text,
    string,
)
from agent.sim.nvml.call import Call, sum_of, text_of
from agent.sim.nvml.state import MAX_GPUS, State, StateFile
from agent.sim.nvml.table import QUERIES, SYSTEM_NUMBERS, SYSTEM_TEXTS, TEXTS, UINT, Output, Query

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

MAX_NVLINKS = 36
PCIE_THROUGHPUT_MS = 20  # the driver counts so long before it answers
_FIRST_HANDLE = 0x1000  # handles are opaque: gpu.N keeps its own, whatever becomes of the others
_NO_STATE = State({})
_PCI_ADDRESS = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)")
_PCI_INFO = struct.Struct("=16s5I32s")  # nvmlPciInfo_t: short bus id, domain, bus, device, ids, bus id
_TEMPERATURE_VERSION = 0x0100000C


class Function:
    """A function of the library, called as ctypes calls it. `restype` may be set as that of any foreign function."""

    restype: Any = ctypes.c_int

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def __call__(self, *arguments: Any) -> Any:
        """Return the nvmlReturn_t, or what else the function gives."""
        try:
            result = self._answer(*arguments)
        except Failure as failure:
            return failure.code
        return SUCCESS if result is None else result


class Library:
    """Stands for the loaded library: its attributes are the functions, AttributeError where the driver has none."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path)
        self._initialisations = 0
        self._garbage_calls: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(partial(count, 1))
        self._functions = {"nvmlErrorString": Function(_error_string)}
        self._functions |= {name: Function(partial(answer, name)) for name, answer in self._special().items()}
        self._add(SYSTEM_TEXTS, self._system_text)
        self._add(SYSTEM_NUMBERS, self._system_number)
        self._add(TEXTS, self._text)
        self._add(QUERIES, self._numbers)

    def _special(self) -> dict[str, Callable[..., None]]:
        return {
            "nvmlInitWithFlags": self._init,
            "nvmlInit_v2": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlDeviceGetCount_v2": self._count,
            "nvmlDeviceGetHandleByIndex_v2": self._handle_by_index,
            "nvmlDeviceGetHandleByUUID": self._handle_by_uuid,
            "nvmlDeviceGetHandleByPciBusId_v2": self._handle_by_address,
            "nvmlDeviceGetIndex": self._index,
            "nvmlDeviceGetPciInfo_v3": self._pci_info,
            "nvmlDeviceGetTemperatureV": self._temperature_v,
            "nvmlDeviceGetNvLinkState": self._nvlink_state,
            "nvmlDeviceGetPcieThroughput": self._pcie_throughput,
            "nvmlDeviceGetFieldValues": self._field_values,
        }

    def _add(self, table: Mapping[str, Any], answer: Callable[..., None]) -> None:
        self._functions |= {name: Function(partial(answer, name, told)) for name, told in table.items()}

    def __getattr__(self, name: str) -> Function:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(f"the simulated NVML library has no {name}") from None

    # What happens in every call before it answers.

    def _state(self) -> State:
        state = self._file.current()
        return _NO_STATE if state is None else state

    def _initialised(self) -> State:
        if self._initialisations == 0:
            raise Failure(UNINITIALIZED)
        return self._state()

    def _enter(self, function: str, handle: Any) -> Call:
        """Begin a call with a handle: it hangs, then fails, before its other arguments are looked at."""
        state = self._initialised()
        gpu = address(handle) - _FIRST_HANDLE
        if not 0 <= gpu < MAX_GPUS:
            raise Failure(INVALID_ARGUMENT)
        call = self._hang(Call(function, gpu, state))
        if call.number("absent"):
            raise Failure(GPU_IS_LOST)
        fail(call.fault("return"))
        return call

    def _hang(self, call: Call) -> Call:
        """Return the call with the state that holds afterwards."""
        duration_ms = call.fault("hang_ms")
        if duration_ms <= 0:
            return call
        time.sleep(duration_ms / 1000)
        return Call(call.function, call.gpu, self._state())

    def _garbage(self, call: Call) -> bool:
        every = call.fault("garbage")
        return every > 0 and next(self._garbage_calls[call.function, call.gpu]) % every == 0

    # The library and the driver.

    def _init(self, _function: str, _flags: Any = 0) -> None:
        time.sleep((self._state().number("init.hang_ms") or 0) / 1000)
        state = self._file.current()
        if state is None:
            raise Failure(DRIVER_NOT_LOADED)
        fail(state.number("init.return") or SUCCESS)
        self._initialisations += 1

    def _shutdown(self, _function: str) -> None:
        self._initialised()
        self._initialisations -= 1

    def _system_text(self, _function: str, key: str, buffer: Any, length: Any) -> None:
        put_text(text_of(self._initialised(), key), buffer, length)

    def _system_number(self, _function: str, key: str, target: Any) -> None:
        put(target, UINT, sum_of(text_of(self._initialised(), key), (0,)))

    # Which GPUs there are.

    def _count(self, _function: str, target: Any) -> None:
        state = self._initialised()
        text_of(state, "gpu.count")
        put(target, UINT, len(state.gpus))

    def _handle_by_index(self, function: str, index: Any, target: Any) -> None:
        state = self._initialised()
        number = integer(index)
        self._look_up(function, state, state.gpus[number : number + 1], INVALID_ARGUMENT, target)

    def _handle_by_uuid(self, function: str, uuid: Any, target: Any) -> None:
        state = self._initialised()
        wanted = string(uuid)
        found = [gpu for gpu in state.gpus if state.values.get(f"gpu.{gpu}.uuid") == wanted]
        self._look_up(function, state, found, NOT_FOUND, target)

    def _handle_by_address(self, function: str, bus_id: Any, target: Any) -> None:
        state = self._initialised()
        wanted = _pci_address(string(bus_id))
        found = [gpu for gpu in state.gpus if wanted and _pci_address(state.values.get(f"gpu.{gpu}.pci", "")) == wanted]
        self._look_up(function, state, found, NOT_FOUND, target)

    def _look_up(self, function: str, state: State, found: Sequence[int], not_found: int, target: Any) -> None:
        """Give the handle. `return.*` leaves look-ups alone: a GPU may be found whose every call then fails."""
        if not found:
            raise Failure(not_found)
        call = self._hang(Call(function, found[0], state))
        fail(call.number(f"return.{function}") or SUCCESS)
        put(target, ctypes.c_void_p, _FIRST_HANDLE + call.gpu)

    # The GPU's facts.

    def _text(self, function: str, key: str, handle: Any, buffer: Any, length: Any) -> None:
        call = self._enter(function, handle)
        if self._garbage(call):
            ctypes.memset(pointer(buffer), 0xFF, integer(length))
        else:
            put_text(call.text(key), buffer, length)

    def _numbers(self, function: str, query: Query, handle: Any, *arguments: Any) -> None:
        call = self._enter(function, handle)
        names = _chosen(query, arguments)
        targets = arguments[len(query.choices) :]
        if query.version:
            check_version(targets[0], query.version)
        self._answer(call, query.outputs, targets, names)

    def _answer(self, call: Call, outputs: Sequence[Output], targets: Sequence[Any], names: Sequence[str] = ()) -> None:
        if self._garbage(call):
            numbers = [-1] * len(outputs)
        else:
            numbers = [sum_of(call.text(output.key.format(*names)), output.words) for output in outputs]
        for number, output in zip(numbers, outputs, strict=True):
            put(targets[output.pointer], output.ctype, number, output.offset)

    def _temperature_v(self, function: str, handle: Any, target: Any) -> None:
        """nvmlTemperature_v1_t: version, sensor, temperature."""
        call = self._enter(function, handle)
        check_version(target, _TEMPERATURE_VERSION)
        if UINT.from_address(pointer(target) + 4).value != 0:
            raise Failure(INVALID_ARGUMENT)
        self._answer(call, (Output("temperature", offset=8),), (target,))

    def _nvlink_state(self, function: str, handle: Any, link: Any, target: Any) -> None:
        call = self._enter(function, handle)
        key = f"nvlink.{integer(link)}.state"
        if not call.has(key):
            others = any(call.has(f"nvlink.{other}.state") for other in range(MAX_NVLINKS))
            raise Failure(INVALID_ARGUMENT if others else NOT_SUPPORTED)
        self._answer(call, (Output(key),), (target,))

    def _pcie_throughput(self, function: str, handle: Any, direction: Any, target: Any) -> None:
        """Words: sent, received; KiB/s."""
        call = self._enter(function, handle)
        word = integer(direction)
        if word not in {0, 1}:
            raise Failure(INVALID_ARGUMENT)
        time.sleep(PCIE_THROUGHPUT_MS / 1000)
        self._answer(call, (Output("pcie_throughput_kib", (word,)),), (target,))

    def _index(self, function: str, handle: Any, target: Any) -> None:
        call = self._enter(function, handle)
        before = sum(not call.state.number(f"gpu.{other}.absent") for other in range(call.gpu))
        put(target, UINT, -1 if self._garbage(call) else before)

    def _pci_info(self, function: str, handle: Any, target: Any) -> None:
        call = self._enter(function, handle)
        if self._garbage(call):
            ctypes.memset(pointer(target), 0xFF, _PCI_INFO.size)
            return
        place = _pci_address(call.text("pci"))
        if place is None:
            raise Failure(UNKNOWN)
        domain, bus, device = place
        legacy = f"{domain & 0xFFFF:04X}:{bus:02X}:{device:02X}.0"
        bus_id = f"{domain:08X}:{bus:02X}:{device:02X}.0"
        ids = [call.number(key) or 0 for key in ("pci_device_id", "pci_subsystem_id")]
        words = (number & 0xFFFFFFFF for number in (*place, *ids))
        info = _PCI_INFO.pack(legacy.encode(), *words, bus_id.encode())
        ctypes.memmove(pointer(target), info, len(info))

    def _field_values(self, function: str, handle: Any, length: Any, array: Any) -> None:
        call = self._enter(function, handle)
        if integer(length) <= 0:
            raise Failure(INVALID_ARGUMENT)
        fields.fill(call, pointer(array), integer(length), garbage=self._garbage(call))


def _error_string(code: Any) -> bytes:
    return error_name(integer(code))


def _chosen(query: Query, arguments: Sequence[Any]) -> list[str]:
    """Return what each choosing argument names."""
    names = []
    for choice, argument in zip(query.choices, arguments, strict=False):
        number = integer(argument)
        if not 0 <= number < len(choice):
            raise Failure(INVALID_ARGUMENT)
        names.append(choice[number])
    return names


def _pci_address(text: str) -> tuple[int, ...] | None:
    """Return domain, bus and device; None for what is no PCI address."""
    found = _PCI_ADDRESS.match(text)
    return tuple(int(part, 16) for part in found.groups()) if found else None
