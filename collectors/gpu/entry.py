"""One GPU of this run: by what it is known, how it is, and when it is looked for again."""

from __future__ import annotations

from dataclasses import dataclass, field

LOOK_AGAIN_FIRST_S = 15.0  # for a GPU that does not answer, and twice as long each time
LOOK_AGAIN_LAST_S = 600.0
LOST = frozenset({"gpu_lost", "reset_required"})  # reasons which the session's age may be behind


@dataclass(eq=False)  # there is one of each GPU, so identity is equality
class Entry:
    """What is kept of a GPU, and below what this process knows.

    `label` is its NVML index at first sight, empty when NVML never showed it; `uuid` and `address` are empty where
    nobody tells. `alive` is what people were told last (None: nothing yet), `told_as` what the GPU was called then.
    `persistent`: its persistence mode was on, so that it answers without a start. `invalid` counts dropped answers by
    metric. `reason` (of `gpu_error`) and `trouble` say why it does not answer; empty when it does.
    """

    label: str
    uuid: str
    address: str = ""
    alive: bool | None = None
    told_as: str = ""
    persistent: bool = False
    invalid: dict[str, int] = field(default_factory=dict)

    reason: str = ""
    trouble: str = ""
    is_listed: bool = False  # by NVML, when it was looked up last
    other_uuid: str = ""  # what NVML told last in place of its UUID, and was not believed
    lost_since_s: float | None = None
    look_at_s: float = float("-inf")
    wait_s: float = 0.0

    @property
    def name(self) -> str:
        """What it is called: the label, else the UUID; empty when nobody could tell it from another."""
        return self.label or self.uuid

    @property
    def id(self) -> str:
        """What it is known by, on this boot: the UUID wherever that is known."""
        return self.uuid or self.address or self.label

    @property
    def device(self) -> str:
        """What a hang or crash on it is blamed on. Not the label, which two GPUs of a run can have."""
        return device_name(self.address or self.uuid or self.label)

    def fail(self, reason: str, trouble: str, now_s: float) -> None:
        """Note why it does not answer."""
        if reason not in LOST:
            self.lost_since_s = None
        elif self.lost_since_s is None:
            self.lost_since_s = now_s
        self.reason, self.trouble = reason, trouble

    def answer(self) -> None:
        """Note that it answers."""
        self.reason = self.trouble = ""
        self.lost_since_s = None
        self.look_at_once()

    def look_at_once(self) -> None:
        """Have it looked for at the next opportunity, and with short pauses from then on."""
        self.look_at_s, self.wait_s = float("-inf"), 0.0

    def is_due(self, now_s: float) -> bool:
        """Say whether it is to be looked for."""
        return bool(self.reason) and now_s >= self.look_at_s

    def wait(self, now_s: float, first_s: float) -> None:
        """Have it looked for after a pause, longer than the one before."""
        self.wait_s = min(self.wait_s * 2, LOOK_AGAIN_LAST_S) if self.wait_s else min(LOOK_AGAIN_FIRST_S, first_s)
        self.look_at_s = now_s + self.wait_s


def device_name(of: str) -> str:
    """Return what a hang on a GPU is blamed on, by its address, else its UUID, else its NVML index."""
    return f"GPU {of}"
