"""The PROCESS lane, the agent's side: a collector in a child process, because its calls may never return and may crash.

`Remote` stands in for the collector. It asks the child (`agent.worker`) for one run at a time and waits for each device
no longer than its deadline. A child that hangs or crashes on a device is replaced within the run by one that leaves the
device alone (`agent.quarantine`). Whether the device works again is found out beside the runs, by a second child: if
that answers it takes over, if not the others lost nothing. A child that cannot even be killed (a driver holds it) is
abandoned, and while two such of one collector exist no more are started. Programs that a child started end with it,
and all of them end with the agent, however that ends.
"""

from __future__ import annotations

import json
import marshal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from agent.api import Collector, Device, Event, Kind, Metric, NotPresent, Series, Severity
from agent.child import START_PATIENCE_S, Child, ChildEndedError, OutdatedError, Run, WorkerError
from agent.quarantine import Quarantine

if TYPE_CHECKING:
    from agent.api import Context, Out
    from agent.worker import Assignment

ABANDONED_LIMIT = 2
# Times the timeout: what devices that hang may cost one run before it fails, and takes the others' values with it.
# Enough for three GPUs: the process that follows the first hang gives the next one five timeouts, as at first contact.
HANG_BUDGET = 12


class CollectorError(Exception):
    """The collector in the child raised; the child itself is well. The text says type and message."""


class Usage:
    """What the children of one collector used, how often one was replaced, and what they leave alone."""

    def __init__(self) -> None:
        self.restarts = 0
        self.resident_bytes: int | None = None
        self.quarantine = Quarantine()
        self._cpu_s = (0.0, 0.0)  # of those that ended, of the present one: replaced together, read by other threads

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all children so far; of one that was killed, as it last told."""
        return sum(self._cpu_s)

    def note(self, cpu_s: float, resident_bytes: int | None) -> None:
        """Take what the present child tells of itself."""
        self._cpu_s, self.resident_bytes = (self._cpu_s[0], cpu_s), resident_bytes

    def end(self) -> None:
        """Note that the present child is no more, or no more of use."""
        self._cpu_s, self.resident_bytes = (self.cpu_seconds, 0.0), None

    def stuck(self) -> int:
        """Return how many children hang and cannot be killed."""
        return len(self.quarantine.stuck())


# By collector, because a reload makes a new Remote.
usage: dict[str, Usage] = {}


@dataclass
class _Trial:
    """A child that reads a device from the quarantine, with all others, while the present child goes on without it."""

    device: str
    what: str  # was done on it: hang, crash
    avoid: dict[str, str]
    memory: dict[str, Any] | None  # that it began with
    run: Run


class Remote(Collector):
    """The agent's side of a collector in the PROCESS lane. Runs in a lane thread."""

    name: ClassVar[str] = ""

    def __init__(self, assignment: Assignment, ctx: Context) -> None:
        super().__init__(assignment.options, ctx)
        self.rescan_s = assignment.collector.rescan_s
        self._assignment = assignment
        self._metrics = {metric.name: metric for metric in assignment.collector.metrics}
        self._usage = usage.setdefault(assignment.collector.name, Usage())
        self._quarantine = self._usage.quarantine
        self._child: Child | None = None
        self._trial: _Trial | None = None
        self._memory: dict[str, Any] | None = None  # the collector's state, as JSON brings it back
        self._avoiding: dict[str, str] = {}
        self._killed_on: str | None = None  # the device in hand when a child was killed last
        self._found = ""
        self._seen = False
        self._rescan = True

    def open(self) -> None:
        """Have the child discover again at its next run. Raises NotPresent when there is plainly nothing for one."""
        if self._child is None:
            self._assignment.collector.look(self.options, self.ctx)
        self._rescan = True

    def found(self) -> str:
        """Say what the child's `open` found."""
        return self._found

    def seen(self) -> bool:
        """Say whether the child's last run saw its hardware."""
        return self._seen

    def collect(self, out: Out) -> None:
        """Ask the child for one run and pass it on. Raises what the collector raised, or WorkerError."""
        self._look_after_trial(out)
        lost_s = 0.0
        retried = False
        while True:
            run, trouble = self._ask(out)
            if trouble is None:
                self._rescan, self._killed_on = False, None
                self._replay(run, out)
                return
            is_fault_of_device = self._is_fault_of(run.device, trouble)
            if is_fault_of_device:
                self._confine(run, trouble)
            self._usage.restarts += 1
            self._end_child(run.device)
            if is_fault_of_device:
                lost_s += run.limit_s if run.overdue else 0.0
                if lost_s > HANG_BUDGET * self.ctx.timeout_s:
                    raise WorkerError(f"devices that hang took {lost_s:g} s of one run; the next goes on without them")
            elif retried or not isinstance(trouble, (ChildEndedError, OutdatedError)):
                raise WorkerError(f"{trouble} on {run.device}" if run.device else str(trouble)) from trouble
            else:
                retried = True
                self.ctx.log.info("process %d: %s; going on in a new one", run.child.pid, trouble)

    def close(self) -> None:
        """End the children. One that cannot be killed is remembered as abandoned."""
        self._end_child("")
        trial, self._trial = self._trial, None
        if trial is not None:
            self._kill(trial.run.child, trial.device)

    def _ask(self, out: Out) -> tuple[Run, WorkerError | None]:
        """Have the child run once; return the run and what became of it, None for an answer. Raises WorkerError."""
        run = Run(self._running_child(out), self.ctx.timeout_s, self.ctx.clock.monotonic, rescan=self._rescan)
        try:
            try:
                run.follow(out.working_on)
            finally:
                self._keep(run)
        except ChildEndedError as end:
            return run, end
        except BaseException:
            self.close()  # an answer that was not taken whole must not be taken for the next one's
            raise
        return run, run.trouble

    def _running_child(self, out: Out) -> Child:
        if self._child is None:
            self._refuse_too_many()
            out.working_on("", START_PATIENCE_S)
            self._avoiding = self._quarantine.avoid
            self._child = self._start(self._avoiding)
        return self._child

    def _start(self, avoid: dict[str, str]) -> Child:
        if self._memory is None:
            self._memory = self.ctx.state.load()
        return Child(self._assignment, self._memory, avoid)

    def _refuse_too_many(self) -> None:
        pids = self._quarantine.stuck()
        if len(pids) >= ABANDONED_LIMIT:
            listed = ", ".join(map(str, pids))
            raise WorkerError(f"processes {listed} hang in the kernel and cannot be killed; no more are started")

    def _is_fault_of(self, device: str, trouble: WorkerError) -> bool:
        """Say whether leaving a device alone would help."""
        if not device or device in self._avoiding or isinstance(trouble, OutdatedError):
            return False
        if isinstance(trouble, ChildEndedError) and trouble.by_signal_of_others:
            # The kernel may have killed it for memory that it took on this device; once is somebody's whim.
            again, self._killed_on = self._killed_on == device, device
            return again
        return True

    def _confine(self, run: Run, trouble: WorkerError) -> None:
        what = "crash" if isinstance(trouble, ChildEndedError) else "hang"
        news = self._quarantine.confine(run.device, what, self.ctx.clock.monotonic())
        log = self.ctx.log.warning if news else self.ctx.log.info
        log("%s: %s; process %d is replaced by one that leaves it alone", run.device, trouble, run.child.pid)

    def _look_after_trial(self, out: Out) -> None:
        """See how the trial fares, or begin one when a device's time has come."""
        trial = self._trial
        if trial is None:
            self._begin_trial()
            return
        try:
            trial.run.glance()
            trouble = trial.run.trouble
        except ChildEndedError as end:
            trouble = end
        if trouble is None and trial.run.frame is None:
            return
        self._trial = None
        now_s = self.ctx.clock.monotonic()
        if trouble is None and trial.run.brings_points:
            self._quarantine.release(trial.device, now_s)
            self._take_over(trial, out)
            self.ctx.log.info("%s: answers again", trial.device)
            return
        self._kill(trial.run.child, trial.device)
        self._quarantine.confine(trial.device, trial.what, now_s)
        self.ctx.log.info("%s: still %s", trial.device, trouble or trial.run.frame)

    def _begin_trial(self) -> None:
        device = self._quarantine.due(self.ctx.clock.monotonic())
        # One that gets stuck, too, must not use up what the present child's successor may need.
        if not device or self._child is None or len(self._quarantine.stuck()) >= ABANDONED_LIMIT:
            return
        avoid = self._quarantine.avoid
        what = avoid.pop(device)
        run = Run(self._start(avoid), self.ctx.timeout_s, self.ctx.clock.monotonic, rescan=True)
        self._trial = _Trial(device, what, avoid, self._memory, run)

    def _take_over(self, trial: _Trial, out: Out) -> None:
        """Go on with the child of a trial. Its events count; its values were read between two runs.

        Where the present child learned something meanwhile, a third one begins with that: the trial's would tell the
        same events again.
        """
        self._usage.restarts += 1
        self._end_child("")
        if trial.memory is not self._memory or trial.avoid != self._quarantine.avoid:
            self._kill(trial.run.child, "")
            return
        self._child, self._avoiding = trial.run.child, trial.avoid
        self._keep(trial.run)
        self._replay(trial.run, out, points=False)

    def _end_child(self, device: str) -> None:
        child, self._child, self._rescan = self._child, None, True
        self._usage.end()
        if child is not None:
            self._kill(child, device)

    def _kill(self, child: Child, device: str) -> None:
        if not child.kill():
            self._quarantine.abandon(child.process, device)

    def _keep(self, run: Run) -> None:
        if run.memory is not None:
            self._memory = json.loads(json.dumps(marshal.loads(run.memory)))  # noqa: S302 - from our own child
            self.ctx.state.save(self._memory)

    def _replay(self, run: Run, out: Out, *, points: bool = True) -> None:
        kind, *rest = run.frame or ("failed", "no answer")
        if kind == "absent":
            raise NotPresent(rest[0])
        if kind == "failed":
            raise CollectorError(rest[0])
        known, new, ids, values, failures, events, devices, self._found, self._seen, used = rest
        self._usage.note(*used)
        series = run.child.series
        try:
            series[known:] = [self._series(definition) for definition in new]
            for severity, fields in events:
                out.event(Event(severity=Severity(severity), **fields))
            if points:
                out.extend([series[i] for i in ids], values)
                for what, text in failures:
                    out.failed(what, text)
                for names in devices:
                    out.device(Device(*names))
        except BaseException:
            self.close()  # as in `_ask`
            raise

    def _series(self, definition: tuple[Any, ...]) -> Series:
        name, kind, help_text, unit, labels, suffix = definition
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Metric(name, Kind(kind), help_text, unit=unit)
        return self.ctx.sample(metric, dict(labels), suffix)
