"""What one GPU does not have, as far as it said so, and when to ask it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias

    from agent.hw.nvml.calls import Call
    from collectors.gpu.readings import Field

    Question: TypeAlias = Call[Any] | Field

# After the first refusal, the second, and so on: one may be of a moment, as while MIG or ECC are switched.
ASK_AGAIN_S = (60.0, 300.0, 900.0, 3600.0)


class Support:
    """The questions that a GPU refused and that are not put to it for now.

    `lacking` has them, each with the time from which it is put again, by the clock of `review`; `doubted` has those
    that were taken out of it since and not answered yet.
    """

    def __init__(self) -> None:
        self.lacking: dict[Question, float] = {}
        self.doubted: set[Question] = set()
        self.changes = 0  # grows whenever `lacking` changes
        self._refusals: dict[Question, int] = {}  # in a row
        self._now_s = float("-inf")
        self._due_s = float("inf")  # of the first of them

    def review(self, now_s: float, *, slack_s: float) -> None:
        """Take out what is due within the slack."""
        self._now_s = now_s
        if now_s < self._due_s - slack_s:
            return
        for question in [question for question, due_s in self.lacking.items() if now_s >= due_s - slack_s]:
            del self.lacking[question]
            self.doubted.add(question)
        self._due_s = min(self.lacking.values(), default=float("inf"))
        self.changes += 1

    def refuse(self, question: Question) -> None:
        """Note that the GPU does not have this."""
        refusals = self._refusals.get(question, 0)
        self._refusals[question] = refusals + 1
        due_s = self._now_s + ASK_AGAIN_S[min(refusals, len(ASK_AGAIN_S) - 1)]
        self.lacking[question] = due_s
        self.doubted.discard(question)
        self._due_s = min(self._due_s, due_s)
        self.changes += 1

    def confirm(self, question: Question) -> None:
        """Note that the GPU does have this after all: a refusal before was of a moment."""
        self.doubted.discard(question)
        self._refusals.pop(question, None)

    def forget(self) -> None:
        """Have everything asked again."""
        self.lacking.clear()
        self.doubted.clear()
        self._refusals.clear()
        self._due_s = float("inf")
        self.changes += 1
