"""A whole agent on a simulated ND96asr_v4 whose InfiniBand devices hang: what a scraper and an administrator see."""

from __future__ import annotations

import http.client
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.sim.infiniband import port_directory, write_nd96asr_v4
from tests.agent.kit import hangs, recovers, until
from tests.agent.running import Agent, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEVICES = [*(f"mlx5_ib{number}" for number in range(8)), "mlx5_an0"]
WORD_BYTES = 4  # of port_xmit_data
OF_INFINIBAND = re.compile(r'(?:node_)?infiniband_|hpcwatch_collector_up\{collector="infiniband"\}')
ANSWERS_WITHIN_S = 1.0
ENDS_WITHIN_S = 5.0
CYCLES = 15
HASTY = ("timeout=1s", "interval=200ms", "slow_interval=1s")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    write_nd96asr_v4(place.folder / "sys")
    return place


@pytest.fixture
def start(place: Place) -> Iterator[Callable[[], Watched]]:
    started: list[Watched] = []

    def begin() -> Watched:
        started.append(Watched(place))
        return started[-1]

    yield begin
    for watched in started:
        watched.agent.end()


def settings(*keys: str) -> list[str]:
    return [word for key in ("enabled=true", *keys) for word in ("--set", f"collectors.infiniband.{key}")]


def counter_file(place: Place, device: str, name: str = "port_xmit_data") -> Path:
    return port_directory(place.folder / "sys", device) / "counters" / name


def stalled(device: str) -> str:
    return f'infiniband_collect_stalled{{device="{device}"}}'


def of_port(metric: str, device: str) -> str:
    return f'{metric}{{device="{device}",port="1"}}'


class Watched:
    """A running agent, of which every look at its page must come at once and show the collector up."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.agent = Agent(place, *settings(*HASTY))
        self._written = 300_000_000_000_000  # as many digits as before

    def page(self) -> dict[str, float]:
        started_s = time.monotonic()
        values = self.agent.values()
        assert time.monotonic() - started_s < ANSWERS_WITHIN_S
        return values

    def look(self) -> dict[str, float]:
        values = self.page()
        assert values['hpcwatch_collector_up{collector="infiniband"}'] == 1
        return values

    def is_well(self) -> None:
        until(lambda: self.agent.get("/readyz")[0] == http.client.OK)
        until(lambda: all(self.look().get(of_port("infiniband_port_observable", device)) == 1 for device in DEVICES))

    def hang(self, names: Sequence[str]) -> None:
        """Have these devices hang; the agent meets it when it next looks for replaced files, after some seconds."""
        for name in names:
            hangs(counter_file(self.place, name))
        until(lambda: self.stalled() == set(names), timeout_s=20)

    def stalled(self) -> set[str]:
        page = self.look()
        return {device for device in DEVICES if page[stalled(device)] == 1}

    def see_cycle(self, device: str) -> None:
        """See a change of a device's counter on the page, so that at least one more cycle has passed."""
        self._written += 1
        with counter_file(self.place, device).open("r+") as file:  # in place: its descriptor is kept
            file.write(str(self._written))
        series = of_port("node_infiniband_port_data_transmitted_bytes_total", device)
        until(lambda: self.look().get(series) == self._written * WORD_BYTES, f"{device} shows its new value")

    def threads(self) -> int:
        status = Path(f"/proc/{self.agent.process.pid}/status").read_text()
        return int(status.partition("Threads:")[2].split()[0])

    def threads_over_cycles(self, device: str) -> list[int]:
        counts = []
        for _ in range(CYCLES):
            self.see_cycle(device)
            counts.append(self.threads())
        return counts

    def ends(self) -> None:
        started_s = time.monotonic()
        assert self.agent.stop(signal.SIGTERM, ENDS_WITHIN_S) == 0
        assert time.monotonic() - started_s < ENDS_WITHIN_S


@pytest.mark.parametrize("names", [["mlx5_ib3"], ["mlx5_ib0", "mlx5_ib5", "mlx5_an0"]], ids=["one", "three"])
def test_devices_that_hang_cost_the_node_their_own_values_only(
    place: Place, start: Callable[[], Watched], names: list[str]
) -> None:
    watched = start()
    watched.is_well()
    watched.hang(names)
    page = watched.look()
    for device in DEVICES:
        hung = device in names
        assert page[of_port("infiniband_port_observable", device)] == (0 if hung else 1)
        assert (of_port("infiniband_port_up", device) in page) is not hung, "what cannot be read is absent"
    for device in set(DEVICES) - set(names):
        watched.see_cycle(device)
    counts = watched.threads_over_cycles("mlx5_ib1")
    assert no_thread_is_added(counts), counts
    assert watched.stalled() == set(names)
    for name in names:
        recovers(counter_file(place, name), "7\n")
    until(lambda: watched.stalled() == set())
    watched.is_well()
    for name in names:
        watched.see_cycle(name)
    watched.ends()


@pytest.mark.parametrize("names", [["mlx5_ib3"], ["mlx5_ib0", "mlx5_ib5", "mlx5_an0"]], ids=["one", "three"])
def test_agent_starts_becomes_ready_and_ends_although_devices_hang(
    place: Place, start: Callable[[], Watched], names: list[str]
) -> None:
    for name in names:
        hangs(counter_file(place, name))
    watched = start()
    until(lambda: watched.agent.get("/readyz")[0] == http.client.OK)
    until(lambda: watched.stalled() == set(names))
    page = watched.look()
    assert all(page[of_port("infiniband_port_up", device)] == 1 for device in set(DEVICES) - set(names))
    counts = watched.threads_over_cycles("mlx5_ib1")
    assert no_thread_is_added(counts), counts
    watched.ends()


@pytest.mark.parametrize("names", [["mlx5_ib3"], ["mlx5_ib0", "mlx5_ib5", "mlx5_an0"]], ids=["one", "three"])
def test_single_look_at_a_node_with_hung_devices_ends_within_the_timeout(place: Place, names: list[str]) -> None:
    timeout_s = 5
    command = place.command("once", "--collector", "infiniband", *settings(f"timeout={timeout_s}s"))
    healthy = series_of(place.call(command).stdout)
    for name in names:
        hangs(counter_file(place, name))
    started_s = time.monotonic()
    result = place.call(command)
    assert time.monotonic() - started_s < timeout_s
    assert result.returncode == 0, result.stderr
    page = series_of(result.stdout)
    hung = {text for text in healthy if any(f'device="{name}"' in text for name in names)}
    assert page - hung == healthy - hung, "the other devices are complete"
    assert page & hung == {
        text for name in names for text in (stalled(name), of_port("infiniband_port_observable", name))
    }


def no_thread_is_added(counts: Sequence[int]) -> bool:
    # The least of some, because a request or a save has a thread of its own for a moment.
    return min(counts[-5:]) <= min(counts[:5]) + 1


def series_of(page: str) -> set[str]:
    texts = {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    return {text for text in texts if OF_INFINIBAND.match(text)}
