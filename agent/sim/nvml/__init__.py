"""A stand-in for the NVIDIA driver's library: the real binding calls it, and it answers from a state file.

    write(path, {"driver.version": "570.133.20", "gpu.count": 1, "gpu.0.uuid": "GPU-..."})
    install(path)                              # from here on pynvml in this process sees that one GPU

Which keys there are: table.py, fields.py. A key that is missing is NOT_SUPPORTED for what it feeds. Faults stand in the
state file, too, and hold from the next call on:

    gpu.N.absent = 1                 the driver enumerates it no more
    gpu.N.return.FUNCTION = CODE     the function fails with this nvmlReturn_t; `*`: every function with the handle
    gpu.N.hang_ms.FUNCTION = MS      it hangs so long first; `*`: every function with the handle, and the look-ups
    gpu.N.garbage.FUNCTION = K       every K-th call succeeds and gives nothing but ones
    init.return, init.hang_ms        the same for nvmlInit
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.sim.nvml.library import Library
from agent.sim.nvml.state import State, read, write

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Library", "State", "install", "read", "write"]


def install(path: Path) -> None:
    """Put the stand-in under the binding of this process, in place of the driver's library or an earlier stand-in."""
    import pynvml  # noqa: PLC0415 - its memory is paid where GPUs are simulated

    pynvml.nvmlLib = Library(path)
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - functions of another library would stay in use
