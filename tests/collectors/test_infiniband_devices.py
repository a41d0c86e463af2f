"""Devices that hang, vanish, come back or change; and how much work a cycle is."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.api import NotPresent, VmSize
from agent.sim.clock import FakeClock
from agent.sim.harness import Probe
from agent.sim.infiniband import COUNTER_FILES, HW_COUNTER_FILES, port_directory, write_hca, write_nd96asr_v4
from collectors.infiniband import InfiniBand, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.api import Value

LIMIT_S = 0.1  # of one device: a quarter of the timeout
STATES_AND_RATE = 3
PORT_FILES = len(COUNTER_FILES) + len(HW_COUNTER_FILES) + STATES_AND_RATE
OFTEN = 11  # of COUNTER_FILES


def series(name: str, device: str = "mlx5_ib0") -> str:
    return f'{name}{{device="{device}",port="1"}}'


def stalled(device: str) -> str:
    return f'infiniband_collect_stalled{{device="{device}"}}'


def of_device(values: dict[str, Value], device: str) -> set[str]:
    return {text for text in values if f'device="{device}"' in text}


def fabric(values: dict[str, Value]) -> list[Value | None]:
    return [values.get(f'infiniband_fabric_ports{{status="{status}"}}') for status in ("expected", "present", "up")]


def class_entry(root: Path, device: str = "mlx5_ib0") -> Path:
    return root / "class" / "infiniband" / device


def open_below(root: Path) -> int:
    """Count the descriptors that this process keeps on files of the tree, removed ones included."""
    found = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # another thread's, closed meanwhile
            found += str(link.readlink()).startswith(str(root))
    return found


class Pipe:
    """A FIFO in place of a file: opening it blocks as a driver's read would, until `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink()
        os.mkfifo(path)

    def release(self, text: str = "0\n") -> None:
        """Put a file where the FIFO was, and let the reader go on."""
        with tempfile.TemporaryDirectory(dir=self.path.parents[-4]) as elsewhere:
            fifo, plain = Path(elsewhere) / "fifo", Path(elsewhere) / "plain"
            fifo.hardlink_to(self.path)
            plain.write_text(text, encoding="utf-8")
            plain.replace(self.path)  # as a whole, and first: who goes on must find the file
            os.close(os.open(fifo, os.O_WRONLY))


@pytest.fixture
def hanging() -> Iterator[Callable[[Path], Pipe]]:
    """Give a function that makes a file hang; what still hangs is released at the end, so that no thread stays."""
    pipes: list[Pipe] = []

    def hang(path: Path) -> Pipe:
        pipes.append(Pipe(path))
        return pipes[-1]

    yield hang
    for pipe in pipes:
        if pipe.path.is_fifo():
            os.close(os.open(pipe.path, os.O_RDWR | os.O_NONBLOCK))  # a writer that comes and goes frees the reader


@pytest.fixture
def settled() -> Callable[[Callable[[], bool]], None]:
    """Give a function that waits until a condition holds, for threads that were just released."""

    def wait(condition: Callable[[], bool]) -> None:
        for _ in range(500):
            if condition():
                return
            threading.Event().wait(0.01)
        pytest.fail("what was released did not go on")

    return wait


def readers() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


class Work:
    """Counts what is asked of the kernel while it is entered: reads, opens, listings, and looks at files."""

    _active: list[Work] = []  # noqa: RUF012 - one list for the one hook, which cannot be removed
    _hooked = False

    def __init__(self) -> None:
        self.reads = self.stats = 0
        self.opened: list[str] = []
        self.listed: list[str] = []
        self._patch = pytest.MonkeyPatch()

    def begin(self) -> None:
        if not Work._hooked:
            sys.addaudithook(Work._note)
            Work._hooked = True
        true_pread, true_stat, true_lstat = os.pread, os.stat, os.lstat

        def pread(descriptor: int, size: int, start: int) -> bytes:
            self.reads += 1
            return true_pread(descriptor, size, start)

        def stat(path: str | int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
            self.stats += 1
            return true_stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

        def lstat(path: str) -> os.stat_result:
            self.stats += 1
            return true_lstat(path)

        self._patch.setattr(os, "pread", pread)
        self._patch.setattr(os, "stat", stat)
        self._patch.setattr(os, "lstat", lstat)
        Work._active.append(self)

    def end(self) -> None:
        Work._active.remove(self)
        self._patch.undo()

    @staticmethod
    def _note(event: str, arguments: tuple[object, ...]) -> None:
        for work in Work._active:
            if event == "open":
                work.opened.append(str(arguments[0]))
            elif event in {"os.listdir", "os.scandir"}:
                work.listed.append(str(arguments[0]))


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    work = Work()
    work.begin()
    try:
        yield work
    finally:
        work.end()


def test_device_that_hangs_from_the_start_costs_its_own_values_only(
    tmp_path: Path, hanging: Callable[[Path], Pipe], settled: Callable[[Callable[[], bool]], None]
) -> None:
    for index in range(3):
        write_hca(tmp_path, f"mlx5_ib{index}", pci=f"010{index}:00:00.0")
    pipe = hanging(port_directory(tmp_path, "mlx5_ib1") / "counters" / "link_downed")
    probe = Probe(InfiniBand, sysfs=tmp_path, timeout_s=4 * LIMIT_S, interval_s=15)
    for _ in range(3):
        result = probe.collect()
        observable = series("infiniband_port_observable", "mlx5_ib1")
        assert of_device(result.values, "mlx5_ib1") == {stalled("mlx5_ib1"), observable}
        assert result.values[observable] == 0
        assert fabric(result.values) == [3, 3, 2], "it is there, it only does not answer"
        assert [result.values[stalled(f"mlx5_ib{index}")] for index in range(3)] == [0, 1, 0]
        assert result.values[series("infiniband_port_up", "mlx5_ib0")] == 1
        assert result.values[series("infiniband_port_up", "mlx5_ib2")] == 1
        assert [what for what, _ in result.failures] == ["mlx5_ib1"]
    pipe.release("7\n")
    settled(lambda: probe.collect().values[stalled("mlx5_ib1")] == 0)
    values = probe.collect().values
    assert values[series("infiniband_port_observable", "mlx5_ib1")] == 1
    assert values[series("node_infiniband_link_downed_total", "mlx5_ib1")] == 7


def test_device_that_begins_to_hang_keeps_only_that_it_is_not_observable(
    tmp_path: Path, hanging: Callable[[Path], Pipe], settled: Callable[[Callable[[], bool]], None]
) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tmp_path, timeout_s=4 * LIMIT_S, interval_s=15, clock=clock)
    before = probe.collect()
    pipe = hanging(port_directory(tmp_path, "mlx5_ib1") / "counters" / "link_downed")
    probe.open()
    result = probe.collect()
    hung = of_device(result.values, "mlx5_ib1")
    assert hung == {stalled("mlx5_ib1"), series("infiniband_port_observable", "mlx5_ib1")}
    assert result.values[series("infiniband_port_observable", "mlx5_ib1")] == 0
    assert fabric(result.values) == [2, 2, 1]
    pipe.release()
    settled(lambda: probe.collect().values[stalled("mlx5_ib1")] == 0)
    clock.advance(60)
    assert probe.collect().values.keys() == before.values.keys()


def test_device_that_hangs_gets_no_second_reader(tmp_path: Path, hanging: Callable[[Path], Pipe]) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    hanging(port_directory(tmp_path, "mlx5_ib1") / "state")
    before = readers()
    probe = Probe(InfiniBand, sysfs=tmp_path, timeout_s=4 * LIMIT_S)
    for _ in range(5):
        probe.open()
        probe.collect()
    assert len(readers() - before) == 1  # the one that is stuck
    probe.collector.close()


def test_all_devices_hanging_leaves_the_collector_up_and_within_its_timeout(
    tmp_path: Path, hanging: Callable[[Path], Pipe]
) -> None:
    for index in range(4):
        write_hca(tmp_path, f"mlx5_ib{index}", pci=f"010{index}:00:00.0")
        hanging(port_directory(tmp_path, f"mlx5_ib{index}") / "link_layer")
    probe = Probe(InfiniBand, sysfs=tmp_path, timeout_s=4 * LIMIT_S, vm_size=VmSize("X", fabric_ports=4))
    begin_s = time.monotonic()
    probe.open()
    values = probe.collect().values
    assert time.monotonic() - begin_s < 12 * LIMIT_S  # three times the most that it should take
    assert [values[stalled(f"mlx5_ib{index}")] for index in range(4)] == [1, 1, 1, 1]
    assert fabric(values) == [4, 0, 0]


def test_descriptors_of_a_stuck_device_go_back_when_its_read_returns(
    tmp_path: Path, hanging: Callable[[Path], Pipe], settled: Callable[[Callable[[], bool]], None]
) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    pipe = hanging(port_directory(tmp_path, "mlx5_ib0") / "hw_counters" / "out_of_buffer")
    probe = Probe(InfiniBand, sysfs=tmp_path, timeout_s=4 * LIMIT_S)
    probe.collect()
    assert open_below(tmp_path) > 0
    probe.collector.close()
    del probe
    pipe.release()
    settled(lambda: open_below(tmp_path) == 0)


def test_vanished_device_is_missing_at_the_next_look(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    probe = Probe(InfiniBand, sysfs=tmp_path)
    probe.collect()
    assert open_below(tmp_path) == 2 * PORT_FILES
    class_entry(tmp_path).unlink()
    probe.open()
    values = probe.collect().values
    assert of_device(values, "mlx5_ib0") == set()
    assert fabric(values) == [2, 1, 1]
    assert open_below(tmp_path) == PORT_FILES


def test_device_whose_descriptors_die_is_missing_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = write_hca(tmp_path, "mlx5_ib0")
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    probe = Probe(InfiniBand, sysfs=tmp_path)
    probe.collect()
    remove_device(device, class_entry(tmp_path), monkeypatch)
    result = probe.collect()
    assert of_device(result.values, "mlx5_ib0") == set()
    assert fabric(result.values) == [2, 1, 1]
    assert [what for what, _ in result.failures] == ["mlx5_ib0"]
    assert probe.collect().failures == []


def remove_device(device: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a device as the kernel does: its files go, and descriptors kept on them give ENODEV for ever."""
    inodes = {path.stat().st_ino for path in device.rglob("*") if path.is_file()}
    dead = {
        int(link.name) for link in Path("/proc/self/fd").iterdir() if link.exists() and link.stat().st_ino in inodes
    }
    entry.unlink()
    shutil.rmtree(device)
    true_open, true_pread = os.open, os.pread

    def open_anew(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = true_open(path, flags, mode, dir_fd=dir_fd)
        dead.discard(descriptor)
        return descriptor

    def pread(descriptor: int, size: int, start: int) -> bytes:
        if descriptor in dead:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return true_pread(descriptor, size, start)

    monkeypatch.setattr(os, "open", open_anew)
    monkeypatch.setattr(os, "pread", pread)


def test_device_that_came_back_under_its_name_is_read_anew_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = write_hca(tmp_path, "mlx5_ib0")
    probe = Probe(InfiniBand, sysfs=tmp_path)
    before = probe.collect()
    remove_device(device, class_entry(tmp_path), monkeypatch)
    shutil.rmtree(tmp_path / "devices")
    write_hca(tmp_path, "mlx5_ib0", counters={"symbol_error": "7"})
    result = probe.collect()
    assert result.values.keys() == before.values.keys()
    assert result.values[series("node_infiniband_symbol_error_total")] == 7
    assert result.failures == []


def test_another_device_under_the_same_name_begins_with_totals_of_its_own(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0", counters={"symbol_error": "x"})
    probe = Probe(InfiniBand, sysfs=tmp_path)
    errors = 'infiniband_read_errors_total{device="mlx5_ib0",port="1",errno="parse"}'
    assert probe.collect().values[errors] == 1
    class_entry(tmp_path).unlink()
    write_hca(tmp_path, "mlx5_ib0", pci="0199:00:00.0", node_guid="0015:5dff:fe34:ffff")
    probe.open()
    values = probe.collect().values
    assert errors not in values
    assert [text for text in values if 'node_guid="0015:5dff:fe34:ffff"' in text]


def test_last_device_that_vanished_is_missing_if_fabric_and_absent_if_not(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    probe = Probe(InfiniBand, sysfs=tmp_path)
    probe.collect()
    class_entry(tmp_path).unlink()
    probe.open()
    assert fabric(probe.collect().values) == [1, 0, 0]
    other = Probe(InfiniBand, Options(device_exclude=("mlx5_ib*",)), sysfs=tmp_path)
    with pytest.raises(NotPresent):
        other.open()


def test_new_device_appears_at_the_next_look(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    probe = Probe(InfiniBand, sysfs=tmp_path)
    probe.collect()
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    probe.open()
    values = probe.collect().values
    assert values[series("node_infiniband_symbol_error_total", "mlx5_ib1")] == 0
    assert fabric(values) == [2, 2, 2]


def test_replaced_and_added_and_removed_files_are_noticed_at_the_next_look(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    probe = Probe(InfiniBand, sysfs=tmp_path)
    probe.collect()
    port = port_directory(tmp_path, "mlx5_ib0")
    (port / "new").write_text("9\n", encoding="utf-8")
    (port / "new").rename(port / "counters" / "symbol_error")
    (port / "hw_counters" / "rx_icrc_encapsulated").write_text("4\n", encoding="utf-8")
    (port / "counters" / "link_downed").unlink()
    probe.open()
    result = probe.collect()
    assert result.values[series("node_infiniband_symbol_error_total")] == 9
    assert result.values[series("node_infiniband_rx_icrc_encapsulated_errors_total")] == 4
    assert series("node_infiniband_link_downed_total") not in result.values
    assert result.failures == []


def test_failure_of_a_file_that_was_removed_is_forgotten(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0", counters={"symbol_error": "x"})
    probe = Probe(InfiniBand, sysfs=tmp_path)
    assert len(probe.collect().failures) == 1
    (port_directory(tmp_path, "mlx5_ib0") / "counters" / "symbol_error").unlink()
    probe.open()
    assert probe.collect().failures == []


def test_failures_of_a_port_that_went_are_forgotten(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx4_0", ports=2, counters={"symbol_error": "x"})
    probe = Probe(InfiniBand, sysfs=tmp_path)
    assert len(probe.collect().failures) == 2
    shutil.rmtree(port_directory(tmp_path, "mlx4_0", 2))
    probe.open()
    result = probe.collect()
    assert [what for what, _ in result.failures] == ["mlx4_0/ports/1/counters/symbol_error"]
    assert 'infiniband_port_up{device="mlx4_0",port="2"}' not in result.values


def test_looking_again_keeps_the_descriptors_of_unchanged_devices(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    probe = Probe(InfiniBand, sysfs=tmp_path)
    probe.collect()
    with counted() as work:
        probe.open()
    kept = [path for path in work.opened if "counters" in path or path.endswith(("state", "rate"))]
    assert kept == []


def test_close_gives_all_descriptors_back(tmp_path: Path, settled: Callable[[Callable[[], bool]], None]) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    probe = Probe(InfiniBand, sysfs=tmp_path)
    probe.collect()
    assert open_below(tmp_path) == PORT_FILES
    probe.collector.close()
    settled(lambda: open_below(tmp_path) == 0)


def test_hundred_rounds_of_coming_and_going_leak_no_descriptor(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    device = class_entry(tmp_path).readlink()
    probe = Probe(InfiniBand, sysfs=tmp_path)
    probe.collect()
    for _ in range(100):
        class_entry(tmp_path).unlink()
        probe.open()
        class_entry(tmp_path).symlink_to(device)
        probe.open()
        probe.collect()
    assert open_below(tmp_path) == PORT_FILES


def test_a_cycle_reads_each_due_file_once_and_does_nothing_else(tmp_path: Path) -> None:
    write_nd96asr_v4(tmp_path)
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tmp_path, clock=clock, interval_s=15)
    probe.collect()  # looks what there is
    reads = []
    for _ in range(8):
        clock.advance(15)
        with counted() as work:
            probe.collect()
        reads.append(work.reads)
        assert (work.opened, work.listed, work.stats) == ([], [], 0)
    full, fast = 9 * PORT_FILES, 9 * (OFTEN + 2)
    assert reads == [fast, fast, fast, full, fast, fast, fast, full]


def test_a_cycle_without_changes_hands_over_the_same_series_in_the_same_order(tmp_path: Path) -> None:
    write_nd96asr_v4(tmp_path)
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tmp_path, clock=clock, interval_s=15)
    first = probe.collect().values
    for index in range(8):
        clock.advance(15)
        counters = port_directory(tmp_path, f"mlx5_ib{index}") / "counters"
        (counters / "port_xmit_data").write_text(f"{index + 100}\n", encoding="utf-8")
        (counters / "symbol_error").write_text(f"{index}\n", encoding="utf-8")
        assert list(probe.collect().values) == list(first)


def test_resting_files_are_not_read(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0", counters={"link_downed": "x", "port_xmit_wait": "y"})
    clock = FakeClock()
    probe = Probe(InfiniBand, sysfs=tmp_path, clock=clock, interval_s=15)
    for _ in range(3):
        probe.collect()
        clock.advance(15)
    with counted() as work:
        probe.collect()
    assert (work.reads, work.opened) == (OFTEN + 2 - 2, [])


def test_excluded_device_is_not_opened_listed_or_looked_at(tmp_path: Path) -> None:
    write_hca(tmp_path, "mlx5_ib0")
    write_hca(tmp_path, "mlx5_ib1", pci="0102:00:00.0")
    probe = Probe(InfiniBand, Options(device_exclude=("mlx5_ib1",)), sysfs=tmp_path)
    with counted() as work:
        probe.collect()
    assert not [path for path in work.opened + work.listed if "mlx5_ib1" in path]
