"""The PROCESS lane, the agent's side: a collector in a child process, because its calls may never return and may crash.

`Remote` stands in for the collector. It asks the child (`agent.worker`) for one run at a time and waits for each device
no longer than its deadline. A child that hangs or crashes on a device is replaced at once by one that leaves the device
alone; a child that cannot even be killed (a driver holds it) is abandoned, and while two such of one collector exist no
more are started. Programs that a child started end with it, and all of them end with the agent, however that ends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from agent.api import Collector, Device, Event, Kind, Metric, NotPresent, Series, Severity
from agent.child import Child, ChildEndedError, WorkerError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    from agent.api import Context, Out
    from agent.worker import Assignment

ABANDONED_LIMIT = 2
START_PATIENCE_S = 10.0  # for an interpreter to start, on a node whose every core is busy
AVOID_FIRST_S = 30.0
AVOID_LAST_S = 900.0
FORGIVEN_AFTER_S = 3600.0  # a device without a hang for this long counts as healthy again


class CollectorError(Exception):
    """The collector in the child raised; the child itself is well. The text says type and message."""


class Usage:
    """What the children of one collector used, how often one was replaced, and those that cannot be killed."""

    def __init__(self) -> None:
        self.restarts = 0
        self.resident_bytes: int | None = None
        self._abandoned: list[subprocess.Popen[bytes]] = []
        self._ended_cpu_s = 0.0
        self._cpu_s = 0.0

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all children so far; of one that was killed, as it last told."""
        return self._ended_cpu_s + self._cpu_s

    def note(self, cpu_s: float, resident_bytes: int | None) -> None:
        """Take what the present child tells of itself."""
        self._cpu_s, self.resident_bytes = cpu_s, resident_bytes

    def end(self) -> None:
        """Note that the present child is no more, or no more of use."""
        self._ended_cpu_s, self._cpu_s, self.resident_bytes = self.cpu_seconds, 0.0, None

    def abandon(self, process: subprocess.Popen[bytes]) -> None:
        """Remember a child that does not die."""
        self._abandoned = [*self._abandoned, process]

    def stuck_pids(self) -> list[int]:
        """Return the process numbers of the children that have not died yet."""
        self._abandoned = [process for process in self._abandoned if process.poll() is None]
        return [process.pid for process in self._abandoned]

    def stuck(self) -> int:
        """Return how many these are."""
        return len(self.stuck_pids())


# By collector, because a reload makes a new Remote but processes that cannot be killed are still there.
usage: dict[str, Usage] = {}


@dataclass
class _Grudge:
    """A device that a child hung on or crashed in, and until when (monotonic seconds) children leave it alone."""

    what: str  # hang, crash
    until_s: float
    count: int


class Remote(Collector):
    """The agent's side of a collector in the PROCESS lane. Runs in a lane thread."""

    name: ClassVar[str] = ""

    def __init__(self, assignment: Assignment, ctx: Context) -> None:
        super().__init__(assignment.options, ctx)
        self.rescan_s = assignment.collector.rescan_s
        self._assignment = assignment
        self._metrics = {metric.name: metric for metric in assignment.collector.metrics}
        self._usage = usage.setdefault(assignment.collector.name, Usage())
        self._child: Child | None = None
        self._memory: str | None = None  # the collector's state, as JSON
        self._grudges: dict[str, _Grudge] = {}
        self._avoiding: Mapping[str, str] = {}
        self._found = ""
        self._rescan = True

    def open(self) -> None:
        """Have the child discover again at its next run. Raises NotPresent when there is plainly nothing for one."""
        if self._child is None:
            self._assignment.collector.look(self.options, self.ctx)
        self._rescan = True

    def found(self) -> str:
        """Say what the child's `open` found."""
        return self._found

    def collect(self, out: Out) -> None:
        """Ask the child for one run and pass it on. Raises what the collector raised, or WorkerError."""
        outdated = False
        while True:
            child = self._running_child(out)
            child.send(("run", self._rescan))
            frame, device, trouble = self._await(child, out)
            if frame is not None and frame[0] != "outdated":
                self._rescan = False
                self._replay(child, frame, out)
                return
            self._replace()
            if frame is None:
                self._blame(device, "crash" if isinstance(trouble, ChildEndedError) else "hang")
                out.failed(device, f"{trouble}, process replaced")
            elif outdated:
                raise WorkerError(f"a new process was no better: {frame[1]}")
            else:
                outdated = True
                self.ctx.log.info("going on in a new process: %s", frame[1])

    def close(self) -> None:
        """End the child. One that cannot be killed is remembered as abandoned."""
        child, self._child, self._rescan = self._child, None, True
        self._usage.end()
        if child is not None and not child.kill():
            self._usage.abandon(child.process)

    def _replace(self) -> None:
        self._usage.restarts += 1
        self.close()

    def _running_child(self, out: Out) -> Child:
        now_s = self.ctx.clock.monotonic()
        avoid = {device: grudge.what for device, grudge in self._grudges.items() if now_s < grudge.until_s}
        if self._child is not None and avoid != self._avoiding:
            self.close()  # time to try a device again that an earlier child hung on
        if self._child is None:
            self._refuse_too_many()
            if self._memory is None:
                self._memory = json.dumps(self.ctx.state.load())
            out.working_on("", START_PATIENCE_S)
            self._child, self._avoiding = Child(self._assignment, self._memory, avoid), avoid
        return self._child

    def _refuse_too_many(self) -> None:
        pids = self._usage.stuck_pids()
        if len(pids) >= ABANDONED_LIMIT:
            listed = ", ".join(map(str, pids))
            raise WorkerError(f"processes {listed} hang in the kernel and cannot be killed; no more are started")

    def _await(self, child: Child, out: Out) -> tuple[tuple[Any, ...] | None, str, Exception | None]:
        """Wait for the end of a run: the frame that ends it; or None, the device to blame, and what is wrong with it.

        Raises WorkerError, and the child is gone, when no device can be blamed that was not blamed before.
        """
        device = ""
        try:
            monotonic = self.ctx.clock.monotonic
            limit_s = START_PATIENCE_S if child.starting else self.ctx.timeout_s
            while (frame := child.receive(monotonic() + limit_s, monotonic)) is not None:
                kind, *rest = frame
                if kind == "on":
                    device, limit_s = rest[0], rest[1] or self.ctx.timeout_s
                    out.working_on(device, limit_s)
                elif kind == "ready":
                    child.starting, limit_s = False, self.ctx.timeout_s
                elif kind == "state":
                    self._keep(rest[0])
                else:
                    return frame, device, None
            trouble: WorkerError = WorkerError(f"no answer within {limit_s:g} s")
        except ChildEndedError as end:
            if not end.crashed:
                device = ""  # somebody killed it
            trouble = end
        except BaseException:
            self.close()  # an answer that was not taken whole must not be taken for the next one's
            raise
        if not device or device in self._avoiding:
            self._replace()
            raise WorkerError(f"{trouble} on {device}" if device else str(trouble))
        return None, device, trouble

    def _keep(self, memory: str) -> None:
        self._memory = memory
        self.ctx.state.save(json.loads(memory))

    def _blame(self, device: str, what: str) -> None:
        now_s = self.ctx.clock.monotonic()
        before = self._grudges.get(device)
        count = 1 if before is None or now_s - before.until_s >= FORGIVEN_AFTER_S else before.count + 1
        self._grudges[device] = _Grudge(what, now_s + min(AVOID_FIRST_S * 2 ** (count - 1), AVOID_LAST_S), count)

    def _replay(self, child: Child, frame: tuple[Any, ...], out: Out) -> None:
        kind, *rest = frame
        if kind == "absent":
            raise NotPresent(rest[0])
        if kind == "failed":
            raise CollectorError(rest[0])
        known, new, ids, values, failures, events, devices, self._found, used = rest
        self._usage.note(*used)
        try:
            child.series[known:] = [self._series(definition) for definition in new]
            out.extend([child.series[i] for i in ids], values)
            for what, text in failures:
                out.failed(what, text)
            for severity, fields in events:
                out.event(Event(severity=Severity(severity), **fields))
            for fields in devices:
                out.device(Device(*fields))
        except BaseException:
            self.close()  # as in `_await`
            raise

    def _series(self, definition: tuple[Any, ...]) -> Series:
        name, kind, help_text, unit, labels, suffix = definition
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Metric(name, Kind(kind), help_text, unit=unit)
        return self.ctx.sample(metric, dict(labels), suffix)
