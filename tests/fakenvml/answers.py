"""Asks the driver's library through the real binding: reads steps as JSON on stdin, writes the answers to stdout.

A process of its own, because the binding keeps the library it once loaded. A step is a list:

- `[function, argument, ...]` calls it; an argument `"gpu:3"` is the handle that nvmlDeviceGetHandleByIndex(3) gave when
  it was first used. A function that only the library has, not the binding, is called as it is and gives its code.
- `["state", {key: value}]` replaces the state.
- `["signals"]` has a signal interrupt the process every 10 ms from now on.
- `["start", function, argument, ...]` calls in a thread, and goes on as soon as the call log has the call.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pynvml

from tests.fakenvml.library import write_state

_FIELD_OF_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_handles: dict[int, Any] = {}


def main() -> None:
    """Do the steps one after the other."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = [_answer(*step) for step in json.load(sys.stdin)]
    signal.setitimer(signal.ITIMER_REAL, 0)
    json.dump(answers, sys.stdout)


def _answer(verb: str, *arguments: Any) -> dict[str, Any]:
    begin_s = time.monotonic()
    try:
        answer = {"value": _do(verb, *arguments)}
    except pynvml.NVMLError as error:
        answer = {"error": error.value}
    return {**answer, "ms": (time.monotonic() - begin_s) * 1000}


def _do(verb: str, *arguments: Any) -> Any:
    if verb == "state":
        return write_state(Path(os.environ["FAKENVML_STATE"]), arguments[0])
    if verb == "signals":
        signal.signal(signal.SIGALRM, lambda _number, _frame: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        return None
    if verb == "start":
        return _start(*arguments)
    return _call(verb, *arguments)


def _call(function: str, *arguments: Any) -> Any:
    call = getattr(pynvml, function, None) or pynvml._nvmlGetFunctionPointer(function)
    return _plain(call(*(_handle(argument) for argument in arguments)))


def _start(function: str, *arguments: Any) -> None:
    handles = [_handle(argument) for argument in arguments]
    threading.Thread(target=_call, args=(function, *handles), daemon=True).start()
    tick = threading.Event()
    while f"{function} " not in Path(os.environ["FAKENVML_CALLS"]).read_text(encoding="utf-8"):
        tick.wait(0.005)


def _handle(argument: Any) -> Any:
    if not (isinstance(argument, str) and argument.startswith("gpu:")):
        return argument
    index = int(argument.removeprefix("gpu:"))
    if index not in _handles:
        _handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
    return _handles[index]


def _plain(value: Any) -> Any:
    """Make of what the binding returns what JSON can hold."""
    if isinstance(value, pynvml.c_nvmlFieldValue_t):
        read = getattr(value.value, _FIELD_OF_TYPE[value.valueType])
        return {"field": value.fieldId, "scope": value.scopeId, "code": value.nvmlReturn, "value": read}
    if isinstance(value, ctypes.Array):
        return [_plain(element) for element in value]
    if isinstance(value, ctypes.Structure):
        return {name: getattr(value, name) for name, *_ in value._fields_}
    if isinstance(value, ctypes._Pointer):
        return ctypes.cast(value, ctypes.c_void_p).value
    return value


if __name__ == "__main__":
    main()
