"""One GPU that NVML has a handle of: whether it answers, reading it in two tiers, and dropping what cannot be true."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from agent.hw.nvml import calls, session
from agent.hw.nvml.session import NvmlError, SessionEndedError
from collectors.gpu import metrics, readings
from collectors.gpu.clockevents import ClockEvents
from collectors.gpu.fields import Fields
from collectors.gpu.identity import IDENTITY
from collectors.gpu.plausibility import ImplausibleError, Plausibility
from collectors.gpu.readings import Field, Reading
from collectors.gpu.support import Support

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from agent.api import Metric, Series, Value
    from agent.hw.nvml.session import Gpu
    from collectors.gpu.readings import Key, Points
    from collectors.gpu.support import Question

    Maker = Callable[..., Series]  # of a metric and its label values, `gpu` and `uuid` put in front

# Answers that will be the same next time: invalid argument, not supported, no such function, versions of arguments.
UNSUPPORTED = frozenset({session.INVALID_ARGUMENT, session.NOT_SUPPORTED, session.FUNCTION_NOT_FOUND, 22, 25, 26})
DOWN = frozenset({session.GPU_IS_LOST, session.RESET_REQUIRED})

_HEEDED = frozenset({readings.RECOVERY_FIELD, readings.LINKS_FIELD})  # fields whose value decides what is done
_OF_UTILIZATION = frozenset({metrics.UTILIZATION, metrics.MEMORY_UTILIZATION})


class Answer:
    """What was read: `values[i]` belongs to `series[i]`; what failed in this read, as (what, error)."""

    def __init__(self) -> None:
        self.series: list[Series] = []
        self.values: list[Value] = []
        self.failures: list[tuple[str, NvmlError]] = []

    def leave_out(self, left_out: Collection[Metric]) -> None:
        """Take out the values of some metrics."""
        kept = [series.metric not in left_out for series in self.series]
        self.series, self.values = list(compress(self.series, kept)), list(compress(self.values, kept))


class Board:
    """One GPU. `make` makes its series, `drop` is told the metric of each answer that cannot be true.

    What the GPU does not support is not asked for a while (`Support`). `persistent` says whether the driver keeps the
    GPU initialised while nobody uses it; None: not known.
    """

    def __init__(
        self, gpu: Gpu, address: str, make: Maker, drop: Callable[[Metric], None], *, slow_interval_s: float
    ) -> None:
        self.persistent: bool | None = None
        self._address = address
        self._gpu = gpu
        self._make = make
        self._drop = drop
        self._slow_interval_s = slow_interval_s
        self._plausibility = Plausibility()
        self._support = Support()
        self._events = ClockEvents()
        self._handles: dict[Key, Series] = {}
        self._identity: dict[str, str] = {}
        self._info: tuple[tuple[str, ...], Series] | None = None
        self._fast_fields = Fields(gpu, self._support, readings.FAST_FIELDS)
        self._slow_fields = Fields(gpu, self._support, readings.SLOW_FIELDS)
        self._mig_mode = Reading("MIG mode", (calls.MIG_MODE,), self._note_mig_mode)
        self._persistence_mode = Reading("persistence mode", (calls.PERSISTENCE_MODE,), self._points_of_persistence)
        self._slow = Answer()
        self._start_anew()

    def read(self, now_s: float, *, slack_s: float) -> Answer:
        """Read what is due, up to `slack_s` early.

        Raises NvmlError when the GPU is lost, needs a reset or gives no answer at all, and SessionEndedError.
        """
        try:
            return self._read_due(now_s, slack_s)
        except NvmlError:
            self._start_anew()
            raise

    def lacking(self) -> list[str]:
        """Return the names of what the GPU does not support by any call."""
        lacks = self._support.lacking
        names = {field.name for field in (*readings.FAST_FIELDS, *readings.SLOW_FIELDS) if field in lacks}
        for reading in (*readings.FAST_STAND_INS, *readings.SLOW_STAND_INS):
            if not all(call in lacks for call in reading.calls):
                names -= {field.name for field in reading.instead_of}
        if calls.nvlink_state(0) not in lacks:
            names.discard(readings.LINKS_FIELD.name)
        own = (self._mig_mode, self._persistence_mode, self._events.active, self._events.supported)
        for reading in (*readings.WITNESSES, *readings.FAST, *readings.SLOW, *own):
            if all(call in lacks for call in reading.calls):
                names.add(reading.name)
        return sorted(names | {name for name, (call, _) in IDENTITY.items() if call in lacks})

    def _start_anew(self) -> None:
        """Take nothing over from what was read before: the GPU may have been reset since."""
        self._is_new = True
        self._mig: int | None = None
        self._heeded: dict[Field, Value] = {}
        self._reread_all()

    def _reread_all(self) -> None:
        """Have the slow tier read next, and everything asked that the GPU did not support."""
        self._support.forget()
        self._slow_due_s = float("-inf")

    def _read_due(self, now_s: float, slack_s: float) -> Answer:
        self._support.review(now_s, slack_s=slack_s)
        answer = Answer()
        self._prove_alive(answer)
        if now_s >= self._slow_due_s - slack_s:
            self._read_slow(now_s, answer)  # first: the fast tier is judged by limits that stand here
        if self._is_new and self.persistent is False:  # the driver has just started it, which kept its memory busy
            answer.leave_out(_OF_UTILIZATION)
        self._is_new = False
        action = self._heeded.get(readings.RECOVERY_FIELD)
        self._read_fast(answer)
        if action is not None and action != self._heeded.get(readings.RECOVERY_FIELD):
            self._reread_all()
            self._read_slow(now_s, answer)
        answer.series += self._slow.series
        answer.values += self._slow.values
        return answer

    def _prove_alive(self, answer: Answer) -> None:
        """Read what every GPU answers some of. Raises NvmlError when it answers none: a refusal is no sign of life."""
        errors = [error for reading in readings.WITNESSES if (error := self._read(reading, answer)) is not None]
        if len(errors) == len(readings.WITNESSES):
            raise next((error for error in errors if error.code not in UNSUPPORTED), errors[0])

    def _read_fast(self, answer: Answer) -> None:
        self._read_fields(self._fast_fields, answer)
        for reading in readings.FAST:
            self._read(reading, answer)
        for reading in readings.FAST_STAND_INS:
            self._stand_in(reading, answer)
        self._read(self._events.active, answer)

    def _read_slow(self, now_s: float, answer: Answer) -> None:
        """Read the slow tier, which stays as it is until the next time; only its failures are of this read alone."""
        slow = Answer()
        self._read(self._mig_mode, slow)  # first: a change has everything asked again
        self._read_identity(slow)
        for reading in (*readings.SLOW, self._persistence_mode):
            self._read(reading, slow)
        self._heeded.pop(readings.LINKS_FIELD, None)
        self._read_fields(self._slow_fields, slow)
        for reading in readings.SLOW_STAND_INS:
            self._stand_in(reading, slow)
        self._read(self._events.supported, slow)
        self._read_links(slow)
        self._slow = slow
        self._slow_due_s = now_s + self._slow_interval_s
        answer.failures += slow.failures

    def _read(self, reading: Reading, answer: Answer) -> NvmlError | None:
        """Ask, and add the points; return how it failed. What is not supported is no failure, and is returned too."""
        refusal: NvmlError | None = None
        for call in reading.calls:
            if call in self._support.lacking:
                continue
            try:
                found = self._gpu.ask(call)
            except NvmlError as error:
                if not self._bear(error, call, reading.name, answer):
                    return error
                refusal = error
            else:
                if call in self._support.doubted:
                    self._support.confirm(call)
                self._add(reading.points, found, answer)
                return None
        return refusal or NvmlError(reading.name, session.NOT_SUPPORTED)

    def _stand_in(self, reading: Reading, answer: Answer) -> None:
        """Read what the GPU lacks of the fields that this can replace."""
        lacks = [field in self._support.lacking for field in reading.instead_of]
        if any(lacks):
            self._read(replace(reading, points=lambda found: [*compress(reading.points(found), lacks)]), answer)

    def _read_fields(self, fields: Fields, answer: Answer) -> None:
        try:
            found = fields.read()
        except NvmlError as error:
            if self._bear(error, None, "field values", answer):
                for field in fields.wanted:
                    self._support.refuse(field)
            return
        for field, value in found:
            if isinstance(value, NvmlError):
                self._bear(value, field, field.name, answer)
                continue
            if field in self._support.doubted:
                self._support.confirm(field)
            if self._add(field.points, value, answer) and field in _HEEDED:
                self._heeded[field] = value

    def _read_links(self, answer: Answer) -> None:
        """Ask link after link, as many as the driver tells of, else until it refuses one; show them if all answered."""
        told = self._heeded.get(readings.LINKS_FIELD)
        states: list[int] = []
        while len(states) < (readings.LINKS_LIMIT if told is None else told):
            call = calls.nvlink_state(len(states))
            if call in self._support.lacking:
                break
            try:
                states.append(self._gpu.ask(call))
            except NvmlError as error:
                if self._bear(error, call, f"NVLink {len(states)}", answer):
                    break
                return
            self._support.confirm(call)
        if not set(states) <= {0, 1}:
            self._drop(metrics.NVLINK_ACTIVE)
        elif states and told in (None, len(states)):
            counts = ((metrics.NVLINK_LINKS, ()), len(states)), ((metrics.NVLINK_ACTIVE, ()), sum(states))
            self._add(lambda _: counts, None, answer)

    def _read_identity(self, answer: Answer) -> None:
        for name, (call, show) in IDENTITY.items():
            if call in self._support.lacking:
                continue
            try:
                shown = show(self._gpu.ask(call))
            except NvmlError as error:
                self._bear(error, call, name, answer)
            except ImplausibleError as error:
                self._drop(error.metric)
            else:
                self._support.confirm(call)
                if shown:  # else what it was before still holds, as after a failure
                    self._identity[name] = shown
        known = {"pci_bus_id": self._address, **self._identity}
        labels = tuple(known.get(label, "") for label in metrics.INFO.labels[2:])
        if self._info is None or self._info[0] != labels:
            self._info = labels, self._make(metrics.INFO, *labels)
        answer.series.append(self._info[1])
        answer.values.append(1)

    def _bear(self, error: NvmlError, asked: Question | None, name: str, answer: Answer) -> bool:
        """Note a failure; True when the GPU does not support what was asked. Raises what ends the read."""
        if error.code in DOWN or isinstance(error, SessionEndedError):
            raise error
        if error.code not in UNSUPPORTED:
            answer.failures.append((name, error))
            return False
        if asked is not None:
            self._support.refuse(asked)
        return True

    def _add(self, points: Callable[[Any], Points], found: Any, answer: Answer) -> bool:
        """Add what can be true of the points; False when the answer as a whole cannot be."""
        try:
            made = points(found)
        except ImplausibleError as error:
            self._drop(error.metric)
            return False
        for key, value in made:
            if not self._plausibility.admits(key, value):
                self._drop(key[0])
                continue
            series = self._handles.get(key)
            if series is None:
                series = self._handles[key] = self._make(key[0], *key[1])
            answer.series.append(series)
            answer.values.append(value)
        return True

    def _note_mig_mode(self, mode: tuple[int, int]) -> Points:
        """Have everything asked anew when MIG was switched on or off: it takes away much and gives it back."""
        if self._mig not in (None, mode[0]):
            self._support.forget()
        self._mig = mode[0]
        return ()

    def _points_of_persistence(self, mode: int) -> Points:
        self.persistent = {0: False, 1: True}.get(mode)
        return (((metrics.PERSISTENCE_MODE, ()), mode),)
