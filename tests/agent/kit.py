"""Collectors that misbehave on demand, and how tests wait: on conditions, never for a time.

The collectors are importable in a worker process and by the agent's command line (`plug_in`). What they do is decided
by files that a test writes: a number is read, a FIFO hangs its reader until something is written into it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from agent.api import Collector, Device, Event, Kind, Lane, Metric, NotPresent, Out, Outdated, Severity
from agent.context import NodeContext, SystemClock
from agent.sim.harness import MemoryState

if TYPE_CHECKING:
    from agent.api import Clock, Context, Series, Value
    from agent.snapshot import Store

ROOT = Path(__file__).resolve().parents[2]
_tick = threading.Event()
_recovering: list[tuple[Path, str]] = []


def until(condition: Callable[[], object], what: str = "", timeout_s: float = 10.0) -> None:
    """Wait until the condition holds; fail when it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s in vain: {what or condition}"
        _let_readers_return()
        _tick.wait(0.005)


def gone(pid: int) -> bool:
    """Tell whether a process has ended; a zombie has."""
    return state_of(pid) in {"", "Z", "X"}


def state_of(pid: int) -> str:
    """Return the state of a process's main thread (proc_pid_stat(5)); empty when it is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def hangs(path: Path) -> None:
    """Make the file one whose reader hangs."""
    fifo = path.with_name(path.name + ".fifo")
    os.mkfifo(fifo)
    fifo.replace(path)


def answers(path: Path, text: str) -> None:
    """Make the file an ordinary one with this content."""
    plain = path.with_name(path.name + ".plain")
    plain.write_text(text)
    plain.replace(path)


def recovers(path: Path, text: str) -> None:
    """Make the file an ordinary one, and let a reader that hangs on the FIFO it was before return with the same."""
    fifo = Path(tempfile.mkdtemp(dir=path.parent.parent)) / "fifo"
    fifo.hardlink_to(path)
    answers(path, text)
    _recovering.append((fifo, text))
    _let_readers_return()


def _let_readers_return() -> None:
    """Write to every FIFO that recovers. A reader may have found one and not have come to wait for a writer yet."""
    for fifo, text in _recovering[:]:
        with contextlib.suppress(OSError):  # nobody reads now, or the folder went with its test
            descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, text.encode())
            os.close(descriptor)
            _recovering.remove((fifo, text))


def shown(store: Store, source: str) -> dict[str, Value]:
    """Return what a source has published: values by series text."""
    snapshot = store.latest()[1].get(source)
    if snapshot is None:
        return {}
    return {s.prefix.rstrip(): value for s, value in zip(snapshot.series, snapshot.values, strict=True)}


def plug_in(folder: Path, collectors: Mapping[str, str], name: str = "kit") -> Path:
    """Install collectors as a foreign distribution does: name -> `module:Class`. The folder goes on PYTHONPATH."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {target}" for entry, target in collectors.items()]
    (info / "entry_points.txt").write_text("[hpcwatch.collectors]\n" + "\n".join(lines) + "\n")
    return folder


def context(tmp_path: Path, clock: Clock | None = None) -> NodeContext:
    """Return what a collector gets, with every root in the test's folder."""
    return NodeContext(
        log=logging.getLogger("kit"),
        sys=tmp_path,
        proc=tmp_path,
        dev=tmp_path,
        kmsg=tmp_path / "kmsg",
        clock=clock or SystemClock(),
        state=MemoryState(),
        vm_size=None,
        interval_s=0.1,
        timeout_s=5.0,
        run_id="run",
    )


VALUE = Metric("kit_value", Kind.GAUGE, "A value.")


class Scripted(Collector):
    """Does what the test says: `on_open` and `on_collect` are called, and may raise."""

    name = "scripted"
    metrics = (VALUE,)

    def __init__(
        self,
        ctx: NodeContext,
        on_collect: Callable[[Out, Series], object] = lambda out, series: out.add(series, 1),
        on_open: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(None, ctx)
        self.on_collect = on_collect
        self.on_open = on_open
        self.opened = self.closed = 0

    def open(self) -> None:
        self.opened += 1
        self.on_open()
        self.series = self.ctx.series(VALUE)

    def collect(self, out: Out) -> None:
        self.on_collect(out, self.series)

    def close(self) -> None:
        self.closed += 1


@dataclass(frozen=True)
class FileOptions:
    """Where the number is, and where to note what happens."""

    path: str = ""
    diary: str = ""  # a file to which `open` and `close` are appended
    scale: int = 1


class Reading(Collector):
    """Reads one number from a file. SHARED; the subclasses run in the other lanes."""

    name: ClassVar[str] = "kit_shared"
    metrics = (Metric("kit_shared_value", Kind.GAUGE, "The number in the file."),)
    Options = FileOptions
    needs = "a file"

    def open(self) -> None:
        """Note that it was opened; without a file the hardware is absent."""
        self._note("open")
        if not Path(self.options.path).exists():
            raise NotPresent(f"no file {self.options.path}")
        self._value = self.ctx.series(self.metrics[0])

    def collect(self, out: Out) -> None:
        """Read the number. `boom` raises, `exit` exits, `part` is a device that fails."""
        text = Path(self.options.path).read_text(encoding="ascii").strip()
        if text == "boom":
            raise ValueError("boom")
        if text == "exit":
            sys.exit("a library that exits")
        if text == "part":
            out.failed("left half", "it broke")
            text = "50"
        out.add(self._value, int(text) * self.options.scale)

    def found(self) -> str:
        """Say where."""
        return f"a number in {Path(self.options.path).name}"

    def close(self) -> None:
        """Note that it was closed."""
        self._note("close")

    def _note(self, what: str) -> None:
        if self.options.diary:
            with Path(self.options.diary).open("a", encoding="ascii") as diary:
                diary.write(f"{self.name} {what}\n")


class ThreadReading(Reading):
    """The same in a thread of its own."""

    name = "kit_thread"
    metrics = (Metric("kit_thread_value", Kind.GAUGE, "The number in the file."),)
    lane = Lane.THREAD


class ProcessReading(Reading):
    """The same in a process of its own."""

    name = "kit_process"
    metrics = (Metric("kit_process_value", Kind.GAUGE, "The number in the file."),)
    lane = Lane.PROCESS


class Steady(Reading):
    """One more in the SHARED lane, to see that it goes on."""

    name = "kit_steady"
    metrics = (Metric("kit_steady_value", Kind.GAUGE, "The number in the file."),)


PR_SET_PTRACER = 0x59616D61  # prctl(2); where only parents may trace, this lets the test hold its child
DEVICE = Metric("kit_device_value", Kind.GAUGE, "The number of a device.", ("device",), unit="bytes")
RUNS = Metric("kit_runs_total", Kind.COUNTER, "Runs of this instance.", ("pid",))


@dataclass(frozen=True)
class FolderOptions:
    """One file per device."""

    folder: str = ""
    limits_s: Mapping[str, float] = field(default_factory=dict)


class Devices(Collector):
    """Reads every file of a folder in a process of its own: numbers, FIFOs that hang, or words that make trouble."""

    name = "kit_devices"
    metrics = (DEVICE, RUNS)
    lane = Lane.PROCESS
    Options = FolderOptions

    def open(self) -> None:
        """Find the devices."""
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1))
        self._runs = 0
        self._names = sorted(path.name for path in Path(self.options.folder).iterdir())
        if not self._names:
            raise NotPresent(f"no device in {self.options.folder}")
        self._series: dict[str, Series] = {name: self.ctx.series(DEVICE, name) for name in self._names}
        self._runs_series = self.ctx.series(RUNS, str(os.getpid()))

    @classmethod
    def look(cls, options: FolderOptions, ctx: Context) -> None:
        """Find a file `nothing` where the folder should be."""
        if Path(options.folder).is_file():
            raise NotPresent("plainly nothing")

    def collect(self, out: Out) -> None:
        """Read every device that no predecessor hung on."""
        self._runs += 1
        out.add(self._runs_series, self._runs)
        for name in self._names:
            if name in self.ctx.avoid:
                out.failed(name, f"avoided: {self.ctx.avoid[name]}")
                continue
            out.working_on(name, self.options.limits_s.get(name))
            self._read(name, out)
            out.device(Device("kit", name, uuid=f"uuid-{name}"))

    def found(self) -> str:
        """Say how many; fails when it lost them."""
        if not self._names:
            raise LookupError("they were here a moment ago")
        return f"{len(self._names)} devices"

    def _read(self, name: str, out: Out) -> None:
        text = (Path(self.options.folder) / name).read_text(encoding="utf-8").strip()
        if text in TROUBLE:
            TROUBLE[text](name, out)
        elif text == "chatter":
            print("a library that prints", flush=True)  # noqa: T201 - the point of it
            os.write(1, b"\0" * 100_000)
            out.add(self._series[name], len(sys.stdin.read()))
        elif text == "log":
            self.ctx.log.warning("spoken in the child")
        elif text.endswith(" once"):
            answers(Path(self.options.folder) / name, "0")
            TROUBLE[text.removesuffix(" once")](name, out)
        elif text.startswith("remember "):
            self.ctx.state.save({"word": text.removeprefix("remember ")})
        elif text == "recall":
            out.add(self._series[name], len(self.ctx.state.load().get("word", "")))
        elif text == "lost":
            self._names = []
        elif text.startswith("many"):
            label = text.removeprefix("many")
            for number in range(20_000 - len(self._names) - 1):
                out.add(self.ctx.series(DEVICE, f"{label}-{number}-" + "x" * 100), number)
        else:
            out.add(self._series[name], float(text) if "." in text else int(text))


def _abort(_device: str, _out: Out) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def _end(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), number)


def _outdated(_device: str, _out: Out) -> None:
    raise Outdated("another driver")


def _fail(device: str, _out: Out) -> None:
    raise OSError(5, "Input/output error", device)


def _event(device: str) -> Event:
    return Event(
        kind="gpu_xid",
        severity=Severity.CRITICAL,
        component="gpu",
        message="fell off the bus \u2026 \U0001f525",
        device=device,
        labels={"xid": "79", "gpu": "0"},
        source="/dev/kmsg",
        time=1_800_000_000.125,
        key="kmsg-1234",
    )


TROUBLE: dict[str, Callable[[str, Out], object]] = {
    "abort": _abort,
    "killed": lambda _device, _out: _end(signal.SIGKILL),
    "trap": lambda _device, _out: _end(signal.SIGTRAP),
    "leave": lambda _device, _out: os._exit(1),
    "outdated": _outdated,
    "exit": lambda _device, _out: sys.exit(3),
    "raise": _fail,
    "sleep in C": lambda _device, _out: ctypes.CDLL(None).sleep(60),
    "part": lambda device, out: out.failed(device, "it broke"),
    "event": lambda device, out: out.event(_event(device)),
}
