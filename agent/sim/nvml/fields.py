"""Field values: the facts of nvmlDeviceGetFieldValues, each with an id, a scope, a type and a return code of its own.

gpu.0.field.82 = ui:52                     TYPE:VALUE, or ret:CODE
gpu.0.field.138.4294967295 = ull:5000      of the scope with this number; without it, of scope 0
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

from agent.sim.nvml.abi import NOT_SUPPORTED, SUCCESS, UNKNOWN
from agent.sim.nvml.state import number_of

if TYPE_CHECKING:
    from agent.sim.nvml.call import Call


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t of nvml.h; `value` is a union of all types."""

    _fields_ = (
        ("field", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("timestamp_us", ctypes.c_int64),
        ("latency_us", ctypes.c_int64),
        ("type", ctypes.c_uint32),
        ("code", ctypes.c_int32),
        ("value", ctypes.c_uint64),
    )


_SIZE = ctypes.sizeof(_FieldValue)
_VALUE_OFFSET = _SIZE - ctypes.sizeof(ctypes.c_uint64)
_TYPES: dict[str, tuple[int, Any]] = {  # by the name in a state file: nvmlValueType_t, and what it is in memory
    "d": (0, ctypes.c_double),
    "ui": (1, ctypes.c_uint),
    "ul": (2, ctypes.c_ulong),
    "ull": (3, ctypes.c_ulonglong),
    "sll": (4, ctypes.c_longlong),
    "si": (5, ctypes.c_int),
    "us": (6, ctypes.c_ushort),
}


def fill(call: Call, array: int, length: int, *, garbage: bool) -> None:
    """Fill in the array at this address, in which the caller has put ids and scopes."""
    for where in range(array, array + length * _SIZE, _SIZE):
        field = _FieldValue.from_address(where)
        field.timestamp_us = time.time_ns() // 1000
        field.latency_us = 0
        field.value = -1 if garbage else 0
        key = f"field.{field.field}.{field.scope}" if field.scope else f"field.{field.field}"
        if garbage:
            field.type, field.code = _TYPES["ull"][0], SUCCESS
        elif call.has(key):
            _fill_one(field, where, call.text(key))
        else:
            field.code = NOT_SUPPORTED


def _fill_one(field: _FieldValue, where: int, text: str) -> None:
    kind, _, value = text.partition(":")
    try:
        if kind == "ret":
            field.code = number_of(value.strip())
            return
        type_id, ctype = _TYPES[kind]
        number = float(value) if ctype is ctypes.c_double else number_of(value.strip())
    except (KeyError, ValueError):
        field.code = UNKNOWN
        return
    ctype.from_address(where + _VALUE_OFFSET).value = number
    field.type, field.code = type_id, SUCCESS
