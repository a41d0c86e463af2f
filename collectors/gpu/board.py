"""One GPU that NVML has a handle of: what it supports, reading it in two tiers, and dropping what cannot be true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from agent.hw.nvml import calls, session
from agent.hw.nvml.session import NvmlError
from collectors.gpu import metrics, readings
from collectors.gpu.plausibility import Plausibility
from collectors.gpu.readings import Field, ImplausibleError, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agent.api import Metric, Series, Value
    from agent.hw.nvml.calls import Call
    from agent.hw.nvml.session import FieldBatch, Gpu
    from collectors.gpu.readings import Key, Points

    Maker = Callable[..., Series]  # of a metric and its label values, `gpu` and `uuid` put in front

PROBE_AGAIN_S = 3600.0  # what was not supported may be after MIG or ECC were switched
# Answers that will be the same next time: invalid argument, not supported, no such function, versions of arguments.
UNSUPPORTED = frozenset({session.INVALID_ARGUMENT, session.NOT_SUPPORTED, session.FUNCTION_NOT_FOUND, 22, 25, 26})
DOWN = frozenset({session.GPU_IS_LOST, session.RESET_REQUIRED})
NO_ANSWER = frozenset({session.UNKNOWN, session.TIMEOUT})
LINKS_LIMIT = 256  # for a driver that never says that there are no more

_MASK_LIMIT = 1 << 63


class Answer(NamedTuple):
    """What one read found: `values[i]` belongs to `series[i]`; what failed, as (what, error)."""

    series: Sequence[Series]
    values: Sequence[Value]
    failures: Sequence[tuple[str, NvmlError]]


class _Tier:
    """The points of one tier as last read."""

    def __init__(self) -> None:
        self.series: list[Series] = []
        self.values: list[Value] = []
        self.failures: list[tuple[str, NvmlError]] = []


class _Fields:
    """The fields of one tier, as far as the GPU has them."""

    def __init__(self, gpu: Gpu, wanted: tuple[Field, ...]) -> None:
        self.wanted = wanted
        self._gpu = gpu
        self._asked: tuple[Field, ...] = ()
        self._batch: FieldBatch | None = None

    def read(self, lacking: Collection[object]) -> Sequence[tuple[Field, int | float | NvmlError]]:
        """Return each field's value or error. Raises NvmlError when the call as a whole failed."""
        asked = tuple(field for field in self.wanted if field not in lacking)
        if asked != self._asked:
            self._batch = self._gpu.fields([(field.id, field.scope) for field in asked]) if asked else None
            self._asked = asked
        return list(zip(asked, self._batch.read(), strict=True)) if self._batch else ()


class Board:
    """One GPU. `make` makes its series, `drop` is told the metric of each answer that cannot be true.

    A call that the GPU does not support is not repeated for an hour; the others are.
    """

    def __init__(
        self, gpu: Gpu, address: str, make: Maker, drop: Callable[[Metric], None], *, slow_interval_s: float
    ) -> None:
        self._address = address
        self._gpu = gpu
        self._make = make
        self._drop = drop
        self._slow_interval_s = slow_interval_s
        self._plausibility = Plausibility()
        self._lacks: dict[Call[Any] | Field, str] = {}
        self._handles: dict[Key, Series] = {}
        self._identity: dict[str, str] = {}
        self._info: tuple[tuple[str, ...], Series] | None = None
        self._fast = _Tier()
        self._slow = _Tier()
        self._tier = self._fast  # the one being read
        self._fast_fields = _Fields(gpu, readings.FAST_FIELDS)
        self._slow_fields = _Fields(gpu, readings.SLOW_FIELDS)
        self._links: int | None = None  # how many there are, once the driver said so
        self._event_mask: int | None = None
        self._events = Reading("clock event reasons", (calls.EVENT_REASONS, calls.THROTTLE_REASONS), self._reasons)
        self._mask = Reading(
            "supported clock event reasons",
            (calls.EVENT_REASONS_SUPPORTED, calls.THROTTLE_REASONS_SUPPORTED),
            self._note_mask,
        )
        self._slow_due_s = float("-inf")
        self._probe_due_s = float("-inf")
        self._fatal: Collection[int] = ()

    def read(self, now_s: float, *, slack_s: float, fatal: Collection[int]) -> Answer:
        """Read what is due, up to `slack_s` early.

        Raises NvmlError when the GPU is lost, needs a reset or gives no answer at all, and for the codes in `fatal`.
        """
        self._fatal = fatal
        if now_s >= self._probe_due_s:
            self._lacks.clear()
            self._links = None
            self._probe_due_s = now_s + PROBE_AGAIN_S
        self._tier = self._fast = _Tier()
        self._prove_alive()
        if now_s >= self._slow_due_s - slack_s:
            self._read_slow()  # first: the fast tier is judged by limits that stand here
            self._slow_due_s = now_s + self._slow_interval_s
        self._tier = fast = self._fast
        self._read_fields(self._fast_fields)
        for reading in readings.FAST:
            self._read(reading)
        self._read(self._events)
        slow = self._slow
        return Answer(fast.series + slow.series, fast.values + slow.values, fast.failures + slow.failures)

    def lacking(self) -> list[str]:
        """Return the names of what the GPU does not support by any call."""
        lacking = {name for asked, name in self._lacks.items() if isinstance(asked, Field)}
        every = (readings.TEMPERATURE, readings.UTILIZATION, *readings.FAST, *readings.SLOW, self._events, self._mask)
        for reading in every:
            refused = all(call in self._lacks for call in reading.calls)
            if reading.instead_of is None or reading.instead_of in self._lacks:
                (lacking.add if refused else lacking.discard)(reading.name)
        lacking.update(name for name, (call, _) in readings.IDENTITY.items() if call in self._lacks)
        return sorted(lacking)

    def _prove_alive(self) -> None:
        """Read the two that every GPU answers somehow. Raises NvmlError when it does not."""
        errors = [self._read(reading) for reading in (readings.TEMPERATURE, readings.UTILIZATION)]
        silent = [error for error in errors if error is not None and error.code in NO_ANSWER]
        if len(silent) == len(errors):
            raise silent[0]

    def _read_slow(self) -> None:
        self._tier = self._slow = _Tier()
        self._read_identity()
        for reading in readings.SLOW:
            if reading.instead_of is None:
                self._read(reading)
        self._read_fields(self._slow_fields)
        for reading in readings.SLOW:
            if reading.instead_of is not None:
                self._read(reading)
        self._read(self._mask)
        self._read_links()

    def _read(self, reading: Reading) -> NvmlError | None:
        """Ask, and add the points; return how it failed. What is not supported is no failure, and is returned too."""
        if reading.instead_of is not None and reading.instead_of not in self._lacks:
            return None
        refusal = NvmlError(reading.name, session.NOT_SUPPORTED)
        for call in reading.calls:
            if call in self._lacks:
                continue
            try:
                answer = self._gpu.ask(call)
            except NvmlError as error:
                if not self._bear(error, call, reading.name):
                    return error
                refusal = error
            else:
                self._add(reading.points, answer)
                return None
        return refusal

    def _read_fields(self, fields: _Fields) -> None:
        try:
            found = fields.read(self._lacks)
        except NvmlError as error:
            if self._bear(error, None, "field values"):
                self._lacks.update({field: field.name for field in fields.wanted})
            return
        for field, value in found:
            if isinstance(value, NvmlError):
                self._bear(value, field, field.name)
            else:
                self._add(field.points, value)

    def _read_links(self) -> None:
        """Ask link after link until the driver says that there are no more."""
        active = 0
        for link in range(LINKS_LIMIT if self._links is None else self._links):
            try:
                state = self._gpu.ask(calls.nvlink_state(link))
            except NvmlError as error:
                if not self._bear(error, None, f"NVLink {link}"):
                    return  # how many are active is not known then
                self._links = link
                break
            if state not in (0, 1):
                self._drop(metrics.NVLINK_ACTIVE)
                return
            active += state
        if self._links:
            counts = (((metrics.NVLINK_LINKS, ()), self._links), ((metrics.NVLINK_ACTIVE, ()), active))
            self._add(lambda _: counts, None)

    def _read_identity(self) -> None:
        for name, (call, show) in readings.IDENTITY.items():
            if call in self._lacks:
                continue
            try:
                self._identity[name] = show(self._gpu.ask(call))
            except NvmlError as error:
                self._bear(error, call, name)  # what it was before still holds
        known = {"pci_bus_id": self._address, **self._identity}
        labels = tuple(known.get(label, "") for label in metrics.INFO.labels[2:])
        if self._info is None or self._info[0] != labels:
            self._info = labels, self._make(metrics.INFO, *labels)
        self._tier.series.append(self._info[1])
        self._tier.values.append(1)

    def _bear(self, error: NvmlError, asked: Call[Any] | Field | None, name: str) -> bool:
        """Note a failure; True when the GPU does not support what was asked. Raises what ends the read."""
        if error.code in DOWN or error.code in self._fatal:
            raise error
        if error.code not in UNSUPPORTED:
            self._tier.failures.append((name, error))
            return False
        if asked is not None:
            self._lacks[asked] = name
        return True

    def _add(self, points: Callable[[Any], Points], answer: Any) -> None:
        try:
            found = points(answer)
        except ImplausibleError as error:
            self._drop(error.metric)
            return
        for key, value in found:
            if self._plausibility.admits(key, value):
                self._tier.series.append(self._handle(key))
                self._tier.values.append(value)
            else:
                self._drop(key[0])

    def _handle(self, key: Key) -> Series:
        series = self._handles.get(key)
        if series is None:
            series = self._handles[key] = self._make(key[0], *key[1])
        return series

    def _note_mask(self, mask: int) -> Points:
        if not 0 <= mask < _MASK_LIMIT:
            raise ImplausibleError(metrics.CLOCK_EVENT)
        self._event_mask = mask
        return ()

    def _reasons(self, active: int) -> Points:
        """Give every reason that the GPU can have; all known ones where it does not tell which."""
        known = (1 << len(readings.EVENT_REASONS)) - 1
        if not 0 <= active < _MASK_LIMIT:
            raise ImplausibleError(metrics.CLOCK_EVENT)
        mask = known | active if self._event_mask is None else self._event_mask
        return [
            ((metrics.CLOCK_EVENT, (reason_of(bit),)), active >> bit & 1)
            for bit in range(mask.bit_length())
            if mask >> bit & 1
        ]


def reason_of(bit: int) -> str:
    """Return the name of one bit of the clock event reasons."""
    return readings.EVENT_REASONS[bit] if bit < len(readings.EVENT_REASONS) else f"bit_{bit}"
