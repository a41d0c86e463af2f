"""`hpcwatch demo` as a user starts it: in a process of its own."""

from __future__ import annotations

import http.client
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import pynvml
import pytest

from agent.sim import childsetup, nvml
from agent.sim.machines import MACHINES
from agent.sim.scenarios import SCENARIOS
from tests.agent.kit import ROOT, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FLAPPED = 'node_infiniband_link_downed_total{device="mlx5_ib3",port="1"}'
_set_up = False


class Demo:
    """One demonstration; its temporary folder is made below `folder`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder / "temporary"
        self.folder.mkdir()
        self.output, self.errors = folder / "output", folder / "errors"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command(*arguments), stdout=output, stderr=errors, cwd=folder, env=environment(self.folder)
            )

    @property
    def said(self) -> str:
        """What it printed so far, as soon as it is all there."""
        until(lambda: self.output.read_text().endswith("Ctrl-C ends it.\n"), "the demo serves", timeout_s=20)
        return self.output.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Ask the address that it printed."""
        match = re.search(r"status page +http://(127\.0\.0\.1:\d+)/\n", self.said)
        assert match, self.said
        connection = http.client.HTTPConnection(match[1], timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def value(self, series: str) -> float | None:
        """Return one value of /metrics; None when the series is absent."""
        lines = dict(line.rsplit(" ", 1) for line in self.get("/metrics")[1].splitlines() if line[:1] != "#")
        return float(lines[series]) if series in lines else None

    def stop(self, number: int) -> int:
        """Send a signal; return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(10)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agent", "demo", *arguments]


def environment(temporary: Path) -> dict[str, str]:
    strange = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM"}
    kept = {name: value for name, value in os.environ.items() if name not in strange}
    return {**kept, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}


def call(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    started: list[Demo] = []

    def begin(*arguments: str) -> Demo:
        started.append(Demo(tmp_path, "--listen", "127.0.0.1:0", *arguments))
        return started[-1]

    yield begin
    for demo in started:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.wait(10)


def test_the_demo_serves_the_page_and_the_metrics_of_a_whole_node(start: Callable[..., Demo]) -> None:
    demo = start()
    until(lambda: demo.get("/readyz")[0] == 200, "the first collection")
    status, page = demo.get("/")
    assert (status, "mlx5_ib3" in page, "NVIDIA A100" in page) == (200, True, True)
    assert "ND96asr_v4" in page
    assert demo.value('gpu_count{source="nvml"}') == 8
    assert demo.value('infiniband_fabric_ports{status="up"}') == 8
    assert demo.value('infiniband_fabric_ports{status="expected"}') == 8
    assert (
        demo.value('host_filesystem_size_bytes{mountpoint="/mnt/nvme",device="/dev/nvme0n1",fstype="xfs"}')
        == 3840 << 30
    )


def test_time_passes_and_what_was_told_happens(start: Callable[..., Demo]) -> None:
    demo = start("--speed", "10")
    assert "   1.5 s  the link of mlx5_ib3 goes down\n" in demo.said
    assert "   6.5 s  job 4712 starts\n" in demo.said  # all of the first minute
    until(lambda: demo.value(FLAPPED) == 1, "the link flaps")


def test_a_fast_node_logs_at_the_local_time_of_the_wall(start: Callable[..., Demo]) -> None:
    demo = start("--scenario", "healthy", "--speed", "10")
    assert "Ctrl-C" in demo.said
    log = next(demo.folder.iterdir()) / "slurm" / "slurmd.log"
    until(lambda: "Launching batch" in log.read_text(), "the job starts")
    stamp = datetime.fromisoformat(log.read_text().splitlines()[-1][1:24])  # without a zone, it is the local one's
    assert abs(log.stat().st_mtime - stamp.timestamp()) < 2


def test_the_demo_says_what_it_is_and_what_will_happen(start: Callable[..., Demo]) -> None:
    said = start("--sku", "standard_hb176RS_v4", "--scenario", "link_flap").said
    assert "a simulated HB176rs_v4: 1 InfiniBand port at 400 Gb/s\n" in said
    assert re.search(r"metrics +http://127\.0\.0\.1:\d+/metrics\n", said)
    told = [line.split(" s  ") for line in said.splitlines() if " s  " in line]
    assert [(float(time), text) for time, text in told] == [
        (2, "job 4711 starts"),
        (10, "the link of mlx5_ib0 goes down"),
        (22, "the link of mlx5_ib0 is back"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_cleanly_and_takes_its_folder_along(start: Callable[..., Demo], number: int) -> None:
    demo = start()
    demo.get("/metrics")
    assert len(list(demo.folder.iterdir())) == 1
    assert demo.stop(number) == 0
    assert list(demo.folder.iterdir()) == []
    assert demo.errors.read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_node_is_made_leaves_nothing_behind(start: Callable[..., Demo], number: int) -> None:
    demo = start()
    until(lambda: list(demo.folder.iterdir()), "the demo makes its folder")
    assert demo.stop(number) == 0
    assert list(demo.folder.iterdir()) == []
    assert demo.errors.read_text() == ""


def test_an_adapter_that_hangs_does_not_hold_up_the_end(start: Callable[..., Demo]) -> None:
    demo = start("--scenario", "hca_hang", "--speed", "2.5")
    stalled = 'infiniband_collect_stalled{device="mlx5_ib4"}'
    until(lambda: demo.value(stalled) == 1, "the adapter hangs", timeout_s=30)
    assert demo.stop(signal.SIGINT) == 0
    assert list(demo.folder.iterdir()) == []


def test_a_taken_port_is_one_clear_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = call(tmp_path, "--listen", address)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(rf"hpcwatch demo: cannot serve on {address}: .*in use.*--listen.*\n", ended.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "names"), [("--scenario", SCENARIOS), ("--sku", MACHINES)])
def test_list_tells_each_name_on_a_line(tmp_path: Path, option: str, names: dict[str, object]) -> None:
    ended = call(tmp_path, option, "list")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [line.split(maxsplit=1) for line in ended.stdout.splitlines()]
    assert [name for name, _ in lines] == list(names)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--sku", "ND97"), r"'ND97'.*ND96asr_v4.*HB176rs_v4"),
        (("--scenario", "week"), r"'week'.*day.*link_flap"),
        (("--sku", "HB176rs_v4", "--scenario", "xid"), r"'xid' needs GPUs.*HB176rs_v4"),
        (("--speed", "0"), r"0\.1 to 100.*'0'"),
        (("--speed", "nan"), r"0\.1 to 100.*'nan'"),
        (("--listen", "9753"), r"address such as.*'9753'"),
    ],
)
def test_what_cannot_be_shown_is_a_usage_error_with_what_can(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    ended = call(tmp_path, *arguments)
    assert (ended.returncode, ended.stdout) == (64, "")
    assert re.search(told, ended.stderr)
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def note_set_up() -> None:
    global _set_up  # noqa: PLW0603 - what a worker process would do first leaves its mark here
    _set_up = True


@pytest.mark.usefixtures("binding")
def test_a_worker_process_gets_the_simulated_library(tmp_path: Path) -> None:
    path = tmp_path / "nvml.state"
    nvml.write(path, {"driver.version": "570.133.20", "gpu.count": "0"})
    sent = pickle.dumps(partial(childsetup.set_up, note_set_up, path))
    pickle.loads(sent)()  # noqa: S301 - our own
    assert _set_up
    pynvml.nvmlInit()
    assert pynvml.nvmlSystemGetDriverVersion() == "570.133.20"
    pynvml.nvmlShutdown()
