"""What a collector's own process does first where the node is simulated. Sent there, so it imports little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.sim import nvml

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def set_up(usual: Callable[[], None], nvml_state: Path) -> None:
    """Do the usual, then have NVML's calls answered from the state file."""
    usual()
    nvml.install(nvml_state)
