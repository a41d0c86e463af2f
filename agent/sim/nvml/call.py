"""One call that is about a GPU: what the state says of that GPU, and of this function's faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.sim.nvml.abi import NOT_SUPPORTED, UNKNOWN, Failure
from agent.sim.nvml.state import State, number_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Call:
    """The function, and the N of gpu.N."""

    function: str
    gpu: int
    state: State

    def has(self, key: str) -> bool:
        """Tell whether the state says this of the GPU."""
        return f"gpu.{self.gpu}.{key}" in self.state.values

    def number(self, key: str) -> int | None:
        """Return the number the state gives for this key of the GPU; None where there is none."""
        return self.state.number(f"gpu.{self.gpu}.{key}")

    def text(self, key: str) -> str:
        """Return what the state says for this key of the GPU. Raises Failure where it says nothing."""
        return text_of(self.state, f"gpu.{self.gpu}.{key}")

    def fault(self, kind: str) -> int:
        """Return the number that a fault has for this function, else that for every function; 0 where there is none."""
        number = self.number(f"{kind}.{self.function}")
        return (self.number(f"{kind}.*") or 0) if number is None else number


def text_of(state: State, key: str) -> str:
    """Return what the state says for a key. Raises Failure where it says nothing."""
    text = state.values.get(key)
    if text is None:
        raise Failure(NOT_SUPPORTED)
    return text


def sum_of(text: str, words: Sequence[int]) -> int:
    """Return the sum of some words of a text. Raises Failure where one is missing or no number."""
    found = text.split()
    try:
        return sum(number_of(found[word]) for word in words)
    except (IndexError, ValueError):
        raise Failure(UNKNOWN) from None
