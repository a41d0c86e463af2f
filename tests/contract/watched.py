"""An agent on a node with eight simulated GPUs and a kernel log, watched from outside while things break."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.agent.kit import gone, until
from tests.agent.running import QUIET, Agent, Place
from tests.collectors.gpunode import GpuNode, labels_of
from tests.fakenvml import library

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

GPUS = tuple("01234567")
UPTIME_S = 10_000.0
VERSION = "570.133.20"
ANSWERS_WITHIN_S = 1.0
ENDS_WITHIN_S = 5.0
# The timeout is long for a process that waits for a processor, and short for a test that waits for the timeout.
HASTY_GPU: Mapping[str, object] = {"interval": "100ms", "slow_interval": "300ms", "timeout": "1s"}


class Site:
    """A folder with the node's trees, the driver's library and state, and the agent's configuration."""

    def __init__(self, folder: Path, gpus: int = len(GPUS)) -> None:
        folder.mkdir(exist_ok=True)
        self.place = Place(folder)
        self.node = GpuNode(folder, gpus)
        self.library = folder / "lib" / library.SONAME
        self.calls = folder / "calls"
        self.kmsg = folder / "kmsg"
        self.kmsg.touch()
        self.node.plug_in()
        (self.place.folder / "proc/uptime").write_text(f"{UPTIME_S:.2f} 1.00\n")
        self.environment = {"FAKENVML_STATE": str(self.node.state_file), "FAKENVML_CALLS": str(self.calls)}
        self.place.quiet.write_text(QUIET.replace("textfile:", "kernel: {enabled: false}, textfile:"))
        self.configure()

    def install(self, version: str = VERSION) -> None:
        """Install a driver: its library behind the link to it, and what its kernel module shows."""
        self.link(version)
        self.node.load_module(version)

    def link(self, version: str) -> None:
        """Install the library of a version only, or another one in its place."""
        built = library.build(self.place.folder / version, version=version)
        self.library.parent.mkdir(exist_ok=True)
        beside = self.library.with_name("link")
        beside.symlink_to(built)
        beside.replace(self.library)

    def configure(
        self,
        gpu: Mapping[str, object] | None = None,
        kernel: Mapping[str, object] | None = None,
        agent: Mapping[str, object] | None = None,
    ) -> None:
        """Write the configuration: what tests need, and these keys."""
        roots = {"devfs": str(self.node.dev), "kmsg": str(self.kmsg)}
        own = {"gpu": {**HASTY_GPU, "nvml_library": str(self.library), **(gpu or {})}}
        if kernel is not None:
            own["kernel"] = {"enabled": True, **kernel}
        self.place.config.write_text(json.dumps({"agent": {**roots, **(agent or {})}, "collectors": own}))


class Watched:
    """A running agent, of which every look at its page must come at once."""

    def __init__(self, site: Site, *arguments: str) -> None:
        self.site = site
        (site.place.folder / "log").unlink(missing_ok=True)  # of an agent before this one
        self.agent = Agent(site.place, *arguments, environment=site.environment)
        self._degrees = 30

    def page(self) -> dict[str, float]:
        """Return what /metrics shows, as soon as it is served."""
        until(lambda: self.agent.port, "it serves")
        started_s = time.monotonic()
        values = self.agent.values()
        took_s = time.monotonic() - started_s
        assert took_s < ANSWERS_WITHIN_S, f"the page took {took_s:.2f} s"
        return values

    def look(self) -> dict[str, float]:
        """Return what /metrics shows while the GPUs' collector must be up."""
        values = self.page()
        assert values.get('hpcwatch_collector_up{collector="gpu"}') == 1, self.agent.log
        return values

    def is_ready(self) -> None:
        """Wait until the first collection is done."""
        until(lambda: self.agent.get("/readyz")[0] == http.client.OK, "the agent is ready")

    def is_well(self, gpus: Iterable[str] = GPUS) -> None:
        """Wait until all these GPUs and no others are up."""
        expected = dict.fromkeys(gpus, 1.0)
        self.is_ready()
        until(lambda: by_gpu(self.page(), "gpu_up") == expected, "all GPUs are up", timeout_s=20)

    def meets(self, reasons: Mapping[str, str], timeout_s: float = 20.0) -> dict[str, float]:
        """Wait until these GPUs are down for these reasons, and no others; return the page then."""
        until(lambda: down(self.look()) == reasons, f"GPUs are down: {dict(reasons)}", timeout_s)
        page = self.look()
        assert {gpu for gpu, up in by_gpu(page, "gpu_up").items() if up == 0} == set(reasons)
        return page

    def sees_changes(self, gpus: Iterable[str]) -> None:
        """Change what these GPUs answer and wait until the page shows all of it."""
        self._degrees = 30 + (self._degrees - 30 + 1) % 50
        wanted = dict.fromkeys(gpus, float(self._degrees))
        self.site.node.change({f"gpu.{gpu}.temperature": self._degrees for gpu in wanted})

        def shown() -> bool:
            return wanted.items() <= by_gpu(self.look(), "gpu_temperature_celsius", sensor="gpu").items()

        until(shown, f"GPUs {', '.join(wanted)} show {self._degrees} degrees")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds, oldest first."""
        events = json.loads(self.agent.get("/api/v1/events?limit=2000")[1])["events"]
        return [event for event in events if event["kind"] in kinds]

    def told(self) -> list[tuple[str, str]]:
        """Return which GPUs were told to be lost and recovered, in order."""
        return [(event["kind"], event["device"]) for event in self.events("gpu_lost", "gpu_recovered")]

    def processes(self) -> list[int]:
        """Return the process numbers of its children that have not ended."""
        found = []
        for task in Path(f"/proc/{self.agent.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(word) for word in (task / "children").read_text().split()]
        return [pid for pid in found if not gone(pid)]

    def problems(self) -> list[str]:
        """Return the lines of its log that tell an error or a traceback."""
        return [line for line in self.agent.log.splitlines() if " ERROR " in line or "Traceback" in line]

    def ends(self, number: int = signal.SIGTERM) -> None:
        """End it; it must do so in time and leave no process."""
        pids = self.processes()
        started_s = time.monotonic()
        expected = 0 if number == signal.SIGTERM else -number
        assert self.agent.stop(number, ENDS_WITHIN_S) == expected
        until(lambda: all(map(gone, pids)), "its processes are gone", ENDS_WITHIN_S)
        assert time.monotonic() - started_s < ENDS_WITHIN_S


def select(page: Mapping[str, float], name: str, /, **labels: str) -> dict[str, float]:
    """Return the series of this name that have these labels."""
    return {
        series: value
        for series, value in page.items()
        if series.partition("{")[0] == name and labels.items() <= labels_of(series).items()
    }


def by_gpu(page: Mapping[str, float], name: str, /, **labels: str) -> dict[str, float]:
    """Return the values of this name by the label `gpu`."""
    return {labels_of(series)["gpu"]: value for series, value in select(page, name, **labels).items()}


def down(page: Mapping[str, float]) -> dict[str, str]:
    """Return why GPUs are down, by the label `gpu`."""
    return {labels_of(series)["gpu"]: labels_of(series)["reason"] for series in select(page, "gpu_error")}


def series_of(page: Iterable[str], gpus: Collection[str]) -> set[str]:
    """Return the series of these GPUs."""
    return {text for text in page if text.startswith("gpu_") and labels_of(text).get("gpu") in gpus}
