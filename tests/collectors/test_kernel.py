"""The kernel log: what its lines are counted as, and under whose name."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.api import Device, Event, NotPresent, Severity
from agent.sim.clock import FakeClock
from agent.sim.harness import MemoryState, Probe, Result
from collectors.kernel import Kernel, Options, metrics
from collectors.kernel.folding import STORMS_LIMIT, Folding
from collectors.kernel.ledger import Ledger
from collectors.kernel.lines import FallenOff, FallingOff, Killed, OomKill, Xid, read
from collectors.kernel.moments import Moment
from tests.agent.kit import hangs, recovers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agent.api import Value
    from collectors.kernel.lines import Fact

UPTIME_S = 10_000.0
WALL_S = 1_800_000_000.0
GPU0 = "0001:00:00.0"
GPU1 = "0002:00:00.0"
UUID0 = "GPU-00000000-1111-2222-3333-444444444444"
UUID1 = "GPU-11111111-1111-2222-3333-444444444444"
DEVICES = (Device("gpu", "0", UUID0, GPU0), Device("gpu", "1", UUID1, GPU1))


class Node:
    """A kernel log in a file, and what else the collector looks at."""

    def __init__(self, root: Path, devices: Sequence[Device] = DEVICES, boot_id: str = "boot-1") -> None:
        self.proc = root / "proc"
        self.kmsg = root / "kmsg"
        self.kmsg.write_bytes(b"")
        self.devices = devices
        self.clock = FakeClock(WALL_S)
        self.state = MemoryState()
        self.sequence = 0
        (self.proc / "sys/kernel/random").mkdir(parents=True)
        self.boot(boot_id)
        self.uptime(UPTIME_S)

    def boot(self, boot_id: str) -> None:
        (self.proc / "sys/kernel/random/boot_id").write_text(boot_id + "\n")

    def uptime(self, seconds: float) -> None:
        self.uptime_s = seconds
        (self.proc / "uptime").write_text(f"{seconds:.2f} 1.00\n")

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.uptime(self.uptime_s + seconds)

    def driver_gpu(self, address: str, uuid: str) -> Path:
        folder = self.proc / "driver/nvidia/gpus" / address
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA X\nGPU UUID: \t {uuid}\nDevice Minor: \t 0\n")
        return folder / "information"

    def log(self, *texts: str, priority: int = 3, at_s: float | None = None) -> None:
        """Have the kernel write these texts."""
        at_us = round((self.uptime_s if at_s is None else at_s) * 1e6)
        with self.kmsg.open("ab") as file:
            for text in texts:
                file.write(f"{priority},{self.sequence},{at_us},-;{text}\n".encode("utf-8", "surrogateescape"))
                self.sequence += 1

    def probe(self, xid_severity: Mapping[str, str] | None = None) -> Probe:
        return Probe(
            Kernel,
            Options(xid_severity or {}),  # type: ignore[arg-type] # tests give nonsense, too
            procfs=self.proc,
            kmsg=self.kmsg,
            clock=self.clock,
            state=self.state,
            devices=self.devices,
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def xid(address: str, code: int, rest: str = ", pid=17, name=python, something") -> str:
    return f"NVRM: Xid (PCI:{address.removesuffix('.0')}): {code}{rest}"


def series(result: Result, metric: str) -> dict[str, Value]:
    """Return a metric's series that are not 0, by their labels."""
    return {
        name.removeprefix(metric): value
        for name, value in result.values.items()
        if name.partition("{")[0] == metric and value
    }


def xids(result: Result) -> dict[str, Value]:
    return series(result, "gpu_xid_errors_total")


def label(gpu: str, uuid: str, code: int, severity: str) -> str:
    return f'{{gpu="{gpu}",uuid="{uuid}",xid="{code}",severity="{severity}"}}'


def records(result: Result) -> dict[str, Value]:
    return {
        r: result.values[f'kernel_log_records_total{{result="{r}"}}']
        for r in ("matched", "unmatched", "ignored", "error")
    }


def told(result: Result, kind: str) -> list[Event]:
    return [event for event in result.events if event.kind == kind]


# What is there


def test_a_node_without_a_kernel_log_has_nothing_to_collect(node: Node) -> None:
    node.kmsg.unlink()
    with pytest.raises(NotPresent, match=r"no kernel log .*/kmsg"):
        node.probe().open()


def test_a_log_hidden_by_the_container_runtime_is_nothing_to_collect(node: Node) -> None:
    node.kmsg.unlink()
    node.kmsg.symlink_to("/dev/null")
    with pytest.raises(NotPresent, match="is /dev/null"):
        node.probe().open()


@pytest.mark.parametrize("number", [1, 13])
def test_a_log_that_may_not_be_read_is_a_failure_that_says_what_is_needed(
    node: Node, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: str, _flags: int) -> int:
        raise PermissionError(number, os.strerror(number), path)

    probe = node.probe()
    needed = r"CAP_SYSLOG where kernel\.dmesg_restrict is set"
    with monkeypatch.context() as patch:
        patch.setattr("agent.hw.kmsg.os.open", refuse)
        with pytest.raises(PermissionError, match=needed) as caught:
            probe.open()
    assert caught.value.filename == str(node.kmsg)


def test_it_says_what_it_reads(node: Node) -> None:
    probe = node.probe()
    probe.open()
    assert probe.collector.found() == f"kernel log {node.kmsg}"


def test_an_empty_log_shows_zeros(node: Node) -> None:
    result = node.probe().collect()
    shown = {name: value for name, value in result.values.items() if not name.startswith("gpu_xid_errors_total")}
    assert shown == {
        'kernel_log_records_total{result="matched"}': 0,
        'kernel_log_records_total{result="unmatched"}': 0,
        'kernel_log_records_total{result="ignored"}': 0,
        'kernel_log_records_total{result="error"}': 0,
        "kernel_log_overruns_total": 0,
        'kernel_oom_kills_total{scope="memcg"}': 0,
        'kernel_oom_kills_total{scope="global"}': 0,
        "kernel_hung_tasks_total": 0,
        'kernel_stalls_total{kind="soft_lockup"}': 0,
        'kernel_stalls_total{kind="hard_lockup"}': 0,
        'kernel_stalls_total{kind="rcu"}': 0,
    }
    assert (result.failures, result.events) == ([], [])
    zeros = [name for name in result.values if name.startswith("gpu_xid_errors_total")]
    assert len(zeros) == 2 * 12
    assert f"gpu_xid_errors_total{label('1', UUID1, 79, 'critical')}" in zeros


# XIDs


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0002:00:00): 94, pid=1582259, name=nvc:[driver], Contained: a, b",
        "NVRM: Xid (PCI:0002:00:00): 94, pid='<unknown>', name=<unknown>, text",
        "NVRM: Xid (PCI:0002:00:00.0): 94, text",
        "NVRM: Xid (PCI:0002:00:00.4): 94, text",
        "NVRM: Xid (PCI:00000002:00:00): 94, text",
        "NVRM: Xid (0002:00:00): 94, text",
        "NVRM: NVRM: Xid (PCI:0002:00:00): 94, text",
        "NVRM: Xid (PCI:0002:00:00): 94",
        "NVRM: Xid (PCI:0002:00:00): 94, NVRM: Xid (PCI:0001:00:00): 79, in the text",
        "NVRM: Xid (PCI:0002:00:00): 94, \\x1b\\xff\x00\udcff",
        "NVRM: Xid (PCI:0002:00:00): 94, GPU has fallen off the bus, says another code",
        "NVRM: Xid (PCI:0002:00:00 what comes next): 94, text",
    ],
)
def test_the_shapes_of_an_xid(node: Node, line: str) -> None:
    node.log(line)
    result = node.probe().collect()
    assert xids(result) == {label("1", UUID1, 94, "error"): 1}
    assert series(result, "gpu_xid_last_timestamp_seconds") == {f'{{gpu="1",uuid="{UUID1}",xid="94"}}': WALL_S}
    [event] = result.events
    assert (event.kind, event.severity, event.component, event.device) == ("gpu_xid", Severity.ERROR, "gpu", "1")
    assert event.labels == {"xid": "94", "uuid": UUID1, "gpu": "1", "pci": GPU1}
    assert (event.source, event.time) == ("kernel", WALL_S)


@pytest.mark.parametrize(
    ("place", "instance"),
    [
        ("PCI:0002:00:00 GPU-I:05", {"gi": "5"}),
        ("PCI:0002:00:00 GPU-I:01 GPU-CI:02", {"gi": "1", "ci": "2"}),
        ("PCI:0002:00:00.0 GPU-I:00 GPU-CI:00", {"gi": "0", "ci": "0"}),
        ("PCI:0002:00:00 GPU-I:?", {}),
    ],
)
def test_an_xid_of_a_mig_instance_is_its_gpus_and_the_event_tells_which(
    node: Node, place: str, instance: dict[str, str]
) -> None:
    node.log(f"NVRM: Xid ({place}): 95, pid=7194, Uncontained GPU-I:09")
    result = node.probe().collect()
    assert xids(result) == {label("1", UUID1, 95, "critical"): 1}
    [event] = result.events
    assert event.labels == {"xid": "95", "uuid": UUID1, "gpu": "1", "pci": GPU1, **instance}


@pytest.mark.parametrize(
    "line",
    [
        " NVRM: Xid (PCI:0002:00:00): 94, indented",
        "x NVRM: Xid (PCI:0002:00:00): 94, quoted by somebody",
        "NVRM: Xid (PCI:0002:00:00) 94, no colon",
        "NVRM: Xid (PCI:0002:00): 94, no device",
        "NVRM: Xid (PCI:0002:00:00): , no code",
        "NVRM: Xid (PCI:0002:00:00): 12345, no such code",
        "NVRM: Xid (PCI:02:00:00): 94, a short domain",
        "NVRM: Xid (PCI:0002:00:00f): 94, a long device",
        "NVRM: Xid (PCI:0002:00:00 GPU-I:05: 94, no end",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.133.20",
        "nvidia: SXid",
        "Killed process by hand",
        "INFO: task blocked for more than a while",
        "oom-kill:nothing",
    ],
)
def test_lines_that_are_none(node: Node, line: str) -> None:
    node.log(line)
    result = node.probe().collect()
    assert xids(result) == {}
    assert records(result) == {"matched": 0, "unmatched": 1, "ignored": 0, "error": 0}


HOSTILE = 60_000


@pytest.mark.parametrize(
    ("head", "repeated"),
    [
        ("oom-kill:constraint=X,", "task_memcg=,task=,pid=1,"),
        ("oom-kill:constraint=X,task_memcg=,task=", ",pid=1,uid=1 "),
        ("oom-kill:constraint=", "x"),
        ("", "NVRM: "),
        ("NVRM:", " "),
        ("NVRM: fallen off the bu", "NVRM: "),
        ("NVRM: fallen off the bus ", "0001:00:00:"),
        ("NVRM: Xid (PCI:0001:00:00 ", "GPU-I:"),
        ("NVRM: Xid (PCI:0001:00:00): 145", ", A Fatal "),
        ("NVRM: Xid (PCI:0001:00:00): 145, ", "A "),
        ("NVRM: Xid (PCI:0001:00:00): 145", ", "),
        ("NVRM: Xid (PCI:0001:00:00): 145,", " "),
        ("NVRM: Xid (PCI:0001:00:00): 145, ", "A"),
        ("nvidia-nvswitch2: SXid (PCI:0001:00:00", ": SXid ("),
        ("nvidia-nvswitch2: SXid (PCI:0001:00:00.0): 1,", " "),
        ("Out of memory", " Killed process 1 ("),
        ("Killed process 1 (", ") Killed process"),
        ("INFO: task ", ":1 blocked for more than 1"),
        ("INFO: task x:1 blocked for more than ", "1"),
        ("INFO: ", "x detected stall"),
        ("watchdog: BUG: soft lockup - CPU#", "1"),
        ("", "\\x0a"),
    ],
)
def test_a_line_made_to_be_slow_is_not(head: str, repeated: str) -> None:
    line = (head + repeated * (HOSTILE // len(repeated))).encode()
    began_s = time.process_time()
    read(line + b" oom-kill: for more than NVRM" if not head else line)
    assert time.process_time() - began_s < 0.5


def test_addresses_are_the_same_in_any_spelling(tmp_path: Path) -> None:
    node = Node(tmp_path, [Device("gpu", "3", UUID0, "0000460E:0A:1F.0")])
    node.log("NVRM: Xid (PCI:460e:0a:1f): 31, x", "NVRM: Xid (PCI:0000460E:0A:1F): 31, x")
    assert xids(node.probe().collect()) == {label("3", UUID0, 31, "warning"): 2}


def test_every_xid_counts_and_is_told(node: Node) -> None:
    probe = node.probe()
    node.log(xid(GPU0, 31), xid(GPU0, 31), xid(GPU1, 31), xid(GPU0, 48))
    probe.collect()
    node.advance(1)
    node.log(xid(GPU0, 31))
    result = probe.collect()
    assert xids(result) == {
        label("0", UUID0, 31, "warning"): 3,
        label("1", UUID1, 31, "warning"): 1,
        label("0", UUID0, 48, "critical"): 1,
    }
    assert [event.time for event in result.events] == [WALL_S + 1]
    assert series(result, "gpu_xid_last_timestamp_seconds")[f'{{gpu="0",uuid="{UUID0}",xid="31"}}'] == WALL_S + 1


def test_what_codes_mean_is_shown_for_those_that_came(node: Node) -> None:
    node.log(xid(GPU0, 63), xid(GPU0, 999), xid(GPU1, 63))
    result = node.probe().collect()
    assert series(result, "gpu_xid_info") == {
        '{xid="63",name="memory row remapping or page retirement recorded",severity="info",action="reset"}': 1,
        '{xid="999",name="not in the table",severity="warning",action="inspect"}': 1,
    }


def test_an_unknown_code_is_counted_like_any_other(node: Node) -> None:
    node.log(xid(GPU0, 999))
    result = node.probe().collect()
    assert xids(result) == {label("0", UUID0, 999, "warning"): 1}
    assert result.events[0].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("rest", "severity"),
    [
        (", RLW_REMAP Fatal XC0 i0 Link 07 (0x00000001 0x00000002)", "critical"),
        (", RLW_REMAP Nonfatal XC0 i0 Link 07 (0x00000001 0x00000002)", "warning"),
        (", RLW_REMAP Non-fatal XC0", "warning"),
        (", RLW_REMAP XC0 i0 Link -1", "error"),
        (", NETIR_LINK_EVT  Fatal   XC0 i0 Link -1 (0x004505c6 0x0)", "critical"),
        (", pid=4711, name=fatal.py, RLW_REMAP Nonfatal XC0 i0 Link 3 (0x1)", "warning"),
        (", pid=4711, name=nonfatal, RLW_REMAP Fatal XC0 i0 Link 3 (0x1)", "critical"),
        (", pid=4711, name=x, A Fatal XC0, RLW_REMAP Nonfatal XC0 i0 Link 3 (0x1)", "warning"),
        (", pid=4711, name=a Fatal b, RLW_REMAP XC0 i0 Link 3 (0x1)", "error"),
        (", pid=4711, name=x, a Fatal b, RLW_REMAP XC0 i0 Link 3 (0x1)", "error"),
    ],
)
def test_the_word_in_the_line_decides_for_nvlink_5(node: Node, rest: str, severity: str) -> None:
    node.log(xid(GPU0, 145, rest))
    result = node.probe().collect()
    assert xids(result) == {label("0", UUID0, 145, severity): 1}
    assert result.events[0].severity.value == severity


def test_the_word_decides_what_is_to_be_done(node: Node) -> None:
    words = ("MSE Nonfatal XC0", "MSE Fatal XC0", "MSE XC0")
    node.log(*(xid(GPU0, code, f", {word} i0 Link 3 (0x1)") for code in (149, 150) for word in words))
    result = node.probe().collect()
    assert len(xids(result)) == 5
    down, watchdog = "NVLink 5 link down or poor signal", "NVLink 5 firmware watchdog"
    assert list(series(result, "gpu_xid_info")) == [
        f'{{xid="149",name="{down}",severity="error",action="link"}}',
        f'{{xid="149",name="{down}",severity="critical",action="reset"}}',
        f'{{xid="149",name="{down}",severity="warning",action="link"}}',
        f'{{xid="150",name="{watchdog}",severity="critical",action="reset"}}',
        f'{{xid="150",name="{watchdog}",severity="warning",action="link"}}',
    ]


def test_a_severity_that_the_site_decides_has_one_meaning(node: Node) -> None:
    node.log(*(xid(GPU0, 145, f", RLW {word} XC0 i0") for word in ("Fatal", "Nonfatal")))
    result = node.probe({"145": "info"}).collect()
    assert list(series(result, "gpu_xid_info")) == [
        '{xid="145",name="NVLink 5 RLW unit error",severity="info",action="link"}'
    ]


def test_the_word_decides_for_no_other_code(node: Node) -> None:
    node.log(xid(GPU0, 63, ", RLW_REMAP Fatal XC0 i0"), xid(GPU0, 63))
    assert xids(node.probe().collect()) == {label("0", UUID0, 63, "info"): 2}


def test_the_site_has_the_last_word_on_severities(node: Node) -> None:
    words = (", RLW Fatal XC0", ", RLW Nonfatal XC0", ", RLW XC0")
    node.log(xid(GPU0, 63), *(xid(GPU0, 145, word) for word in words))
    result = node.probe({"63": "critical", "145": "info", "79": "warning"}).collect()
    assert xids(result) == {label("0", UUID0, 63, "critical"): 1, label("0", UUID0, 145, "info"): 3}
    assert [event.severity.value for event in result.events] == ["critical", "info", "info", "info"]
    assert f"gpu_xid_errors_total{label('0', UUID0, 79, 'warning')}" in result.values
    assert f"gpu_xid_errors_total{label('0', UUID0, 79, 'critical')}" not in result.values


@pytest.mark.parametrize("code", ["", "x", "-1", "12345", "6 3"])
def test_a_severity_for_what_is_no_xid_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="xid_severity: expected XIDs such as '63'"):
        Options({code: "info"})


def test_a_message_is_bounded_and_has_no_control_characters(node: Node) -> None:
    node.log(xid(GPU0, 31, ", a\\x0ab\\x00c\x1b\t" + "x" * 1000))
    [event] = node.probe().collect().events
    assert event.message.startswith("NVRM: Xid (PCI:0001:00:00): 31, a b c x")
    assert len(event.message) == 500


def test_what_user_space_wrote_is_ignored(node: Node) -> None:
    node.log(xid(GPU0, 79), "GPU has fallen off the bus", priority=8 + 3)
    node.log(xid(GPU0, 79), priority=(3 << 3) + 1)
    result = node.probe().collect()
    assert xids(result) == {}
    assert result.events == []
    assert records(result) == {"matched": 0, "unmatched": 0, "ignored": 3, "error": 0}


def test_an_xid_of_any_level_counts(node: Node) -> None:
    for level in range(8):
        node.log(xid(GPU0, 31), priority=level)
    assert xids(node.probe().collect()) == {label("0", UUID0, 31, "warning"): 8}


def test_garbage_between_costs_itself(node: Node) -> None:
    node.log(xid(GPU0, 31))
    with node.kmsg.open("ab") as file:
        file.write(b"\xff\x00garbage\n6,x,y,-;NVRM: Xid (PCI:0001:00:00): 79, x\n\n SUBSYSTEM=pci\n")
    node.log(xid(GPU0, 31), "unrelated")
    result = node.probe().collect()
    assert xids(result) == {label("0", UUID0, 31, "warning"): 2}
    assert records(result) == {"matched": 2, "unmatched": 1, "ignored": 0, "error": 2}


def test_more_addresses_and_codes_than_any_node_has_stay_bounded(node: Node) -> None:
    node.log(*(xid(f"{number:04x}:00:00.0", code) for number in range(3, 403) for code in range(200, 210)))
    result = node.probe().collect()
    shown = xids(result)
    assert sum(shown.values()) == 4000
    assert shown[label("", "", 0, "warning").replace('xid="0"', 'xid="other"')] == 2000
    assert len(shown) == 2001


# Fallen off the bus


LOST = label("0", UUID0, 79, "critical")
SINGLE = "NVRM: GPU 0001:00:00.0: GPU has fallen off the bus."
THREE = (
    "NVRM: The NVIDIA GPU 0001:00:00.0",
    "NVRM: (PCI ID: 10de:20b0) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


@pytest.mark.parametrize(
    "lines",
    [
        (SINGLE,),
        ("NVRM: GPU at PCI:0001:00:00 has fallen off the bus",),
        ("NVRM: GPU at PCI:0001:00:00: GPU has fallen off the bus",),
        THREE,
        ("NVRM: The NVIDIA GPU 0001:00:00.0 (PCI ID: 10de:20b0)", "NVRM: installed in this system has", THREE[2]),
        ("\\x0a".join(THREE),),
        (THREE[0], "something else", THREE[1], "something else", THREE[2]),
        (*THREE, SINGLE, SINGLE),
    ],
)
def test_a_gpu_that_has_fallen_off_the_bus_without_an_xid_is_one_79(node: Node, lines: tuple[str, ...]) -> None:
    node.log(*lines)
    result = node.probe().collect()
    assert xids(result) == {LOST: 1}
    [event] = result.events
    assert event.labels == {"xid": "79", "uuid": UUID0, "gpu": "0", "pci": GPU0}
    assert (event.severity, event.device) == (Severity.CRITICAL, "0")


def test_three_lines_of_two_gpus_interleaved_are_two_losses(node: Node) -> None:
    other = THREE[0].replace(GPU0, GPU1)
    node.log(THREE[0], other, THREE[1], THREE[1], THREE[2], THREE[2])
    assert xids(node.probe().collect()) == {LOST: 1, label("1", UUID1, 79, "critical"): 1}


@pytest.mark.parametrize(
    ("first", "then", "after_s", "total"),
    [
        (xid(GPU0, 79), SINGLE, 290, 1),
        (xid(GPU0, 79), SINGLE, 310, 2),
        (SINGLE, xid(GPU0, 79), 290, 1),
        (SINGLE, xid(GPU0, 79), 310, 2),
        (SINGLE, SINGLE, 290, 1),
        (SINGLE, SINGLE, 310, 2),
        (xid(GPU0, 79), xid(GPU0, 79), 1, 2),
        (xid(GPU1, 79), SINGLE, 1, 2),
        (xid(GPU0, 79), THREE[2], 1, 1),
    ],
)
def test_a_loss_told_twice_is_one_loss_for_five_minutes(
    node: Node, first: str, then: str, after_s: float, total: int
) -> None:
    probe = node.probe()
    node.log(first)
    probe.collect()
    node.advance(after_s)
    node.log(then)
    assert sum(xids(probe.collect()).values()) == total


def test_lines_about_a_loss_do_not_hide_that_it_is_another(node: Node) -> None:
    node.log(xid(GPU0, 79), SINGLE, xid(GPU0, 79))
    assert xids(node.probe().collect()) == {LOST: 2}


def test_a_loss_told_twice_at_times_that_cannot_be_is_one(node: Node) -> None:
    node.log(SINGLE, at_s=1e9)
    node.log(xid(GPU0, 79), at_s=2e9)
    assert xids(node.probe().collect()) == {LOST: 1}


def test_of_two_xids_after_a_line_only_the_first_is_the_same_loss(node: Node) -> None:
    node.log(SINGLE, xid(GPU0, 79), xid(GPU0, 79))
    assert xids(node.probe().collect()) == {LOST: 2}


def test_a_loss_told_before_and_after_a_restart_is_one(node: Node) -> None:
    node.log(THREE[0])
    node.probe().collect()
    node.log(THREE[1], THREE[2])
    assert xids(node.probe().collect()) == {LOST: 1}
    node.log(xid(GPU0, 79))
    assert xids(node.probe().collect()) == {LOST: 1}


def test_a_loss_that_does_not_say_which_gpu_is_counted(node: Node) -> None:
    node.log(THREE[2])
    assert xids(node.probe().collect()) == {label("", "", 79, "critical"): 1}


# Whose GPU it is


def test_what_the_gpu_collector_tells_is_right_and_the_driver_is_not_asked_for_the_index(node: Node) -> None:
    node.devices = [Device("gpu", "5", UUID0, GPU0), Device("infiniband", "0", UUID1, GPU1)]
    node.driver_gpu(GPU0, UUID0)
    node.driver_gpu(GPU1, UUID1)
    node.log(xid(GPU0, 31), xid(GPU1, 31))
    assert xids(node.probe().collect()) == {
        label("5", UUID0, 31, "warning"): 1,
        label(GPU1, UUID1, 31, "warning"): 1,
    }


def test_the_driver_tells_the_uuid_that_the_gpu_collector_does_not_know(node: Node) -> None:
    node.devices = [Device("gpu", "2", "", GPU0)]
    node.driver_gpu(GPU0, UUID0)
    node.log(xid(GPU0, 31))
    result = node.probe().collect()
    assert xids(result) == {label("2", UUID0, 31, "warning"): 1}
    assert f"gpu_xid_errors_total{label('2', UUID0, 79, 'critical')}" in result.values


def test_without_the_gpu_collector_the_driver_tells_and_the_order_of_addresses_numbers(node: Node) -> None:
    node.devices = []
    for address, uuid in (("10000:00:00.0", "GPU-c"), ("f000:00:00.0", "GPU-b"), (GPU0, UUID0)):
        node.driver_gpu(address, uuid)
    node.log(xid(GPU0, 31), xid("f000:00:00.0", 31), xid("10000:00:00.0", 31))
    result = node.probe().collect()
    assert xids(result) == {
        label("0", UUID0, 31, "warning"): 1,
        label("1", "GPU-b", 31, "warning"): 1,
        label("2", "GPU-c", 31, "warning"): 1,
    }
    assert f"gpu_xid_errors_total{label('2', 'GPU-c', 79, 'critical')}" in result.values
    assert result.events[0].device == "0"


def test_a_gpu_that_nobody_knows_is_called_by_its_address(node: Node) -> None:
    node.devices = []
    node.log(xid(GPU0, 31), xid(GPU1, 31))
    result = node.probe().collect()
    assert xids(result) == {label(GPU0, "", 31, "warning"): 1, label(GPU1, "", 31, "warning"): 1}
    assert [event.labels for event in result.events] == [{"xid": "31", "pci": GPU0}, {"xid": "31", "pci": GPU1}]
    assert [event.device for event in result.events] == [GPU0, GPU1]


def test_totals_move_to_the_right_name_when_it_becomes_known(node: Node) -> None:
    node.devices = []
    node.log(xid(GPU0, 31), xid(GPU0, 31))
    probe = node.probe()
    assert xids(probe.collect()) == {label(GPU0, "", 31, "warning"): 2}
    node.driver_gpu("0000:00:00.0", "GPU-other")
    node.driver_gpu(GPU0, UUID0)
    probe.open()
    assert xids(probe.collect()) == {label("1", UUID0, 31, "warning"): 2}
    probe.context.inventory.put("gpu", DEVICES)
    result = probe.collect()
    assert xids(result) == {label("0", UUID0, 31, "warning"): 2}
    assert list(series(result, "gpu_xid_last_timestamp_seconds")) == [f'{{gpu="0",uuid="{UUID0}",xid="31"}}']


def test_the_kernel_log_itself_may_tell_a_uuid(node: Node) -> None:
    node.devices = [Device("gpu", "4", UUID0)]  # without an address
    node.log(f"NVRM: GPU at PCI:0001:00:00: {UUID0}", "NVRM: GPU Board Serial Number: 123", xid(GPU0, 31))
    assert xids(node.probe().collect()) == {label("4", UUID0, 31, "warning"): 1}
    assert xids(node.probe().collect()) == {label("4", UUID0, 31, "warning"): 1}, "after a restart"


def test_a_driver_that_is_loaded_later_is_asked_when_its_gpu_speaks_but_once_a_minute(node: Node) -> None:
    node.devices = []
    probe = node.probe()
    probe.collect()
    node.driver_gpu(GPU0, UUID0)
    node.log(xid(GPU0, 31))
    assert xids(probe.collect()) == {label(GPU0, "", 31, "warning"): 1}
    node.advance(61)
    node.log(xid(GPU0, 31))
    assert xids(probe.collect()) == {label("0", UUID0, 31, "warning"): 2}


def test_a_driver_that_hangs_costs_names_and_not_the_count(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.kernel.gpus.LOOK_LIMIT_S", 0.1)
    node.devices = []
    hanging = node.driver_gpu(GPU0, UUID0)
    node.driver_gpu(GPU1, UUID1)
    hangs(hanging)
    node.log(xid(GPU0, 79), xid(GPU1, 79))
    probe = node.probe()
    result = probe.collect()
    assert xids(result) == {label("0", "", 79, "critical"): 1, label("1", UUID1, 79, "critical"): 1}
    assert [what for what, _ in result.failures] == [f"GPU {GPU0}"]
    recovers(hanging, f"GPU UUID: \t {UUID0}\n")


def test_a_driver_that_fails_costs_names_and_not_the_count(node: Node) -> None:
    node.devices = []
    break_driver(node.driver_gpu(GPU0, UUID0))
    node.driver_gpu(GPU1, UUID1)
    node.log(xid(GPU0, 79), xid(GPU1, 79))
    result = node.probe().collect()
    assert xids(result) == {label("0", "", 79, "critical"): 1, label("1", UUID1, 79, "critical"): 1}
    assert [what for what, _ in result.failures] == [f"GPU {GPU0}"]


def test_a_gpu_that_leaves_the_drivers_list_keeps_its_name_and_the_others_theirs(node: Node) -> None:
    node.devices = []
    for number in range(4):
        node.driver_gpu(f"000{number}:00:00.0", f"GPU-{number}")
    node.log(xid(GPU0, 79), xid(GPU1, 48))
    probe = node.probe()
    first = probe.collect()
    assert set(xids(first)) == {label("1", "GPU-1", 79, "critical"), label("2", "GPU-2", 48, "critical")}
    shutil.rmtree(node.proc / "driver/nvidia/gpus" / GPU0)
    probe.open()
    assert probe.collect().values == first.values
    shutil.rmtree(node.proc / "driver")
    probe.open()
    assert probe.collect().values == first.values
    node.driver_gpu("0000:80:00.0", "GPU-new")
    probe.open()
    assert set(xids(probe.collect())) == {label("2", "GPU-1", 79, "critical"), label("3", "GPU-2", 48, "critical")}


def test_two_addresses_of_one_name_are_added_up(node: Node) -> None:
    node.devices = [Device("gpu", "0", UUID0, GPU0), Device("gpu", "0", UUID0, GPU1)]
    node.log(xid(GPU0, 31))
    node.log(xid(GPU1, 31), at_s=UPTIME_S - 50)
    result = node.probe().collect()
    assert xids(result) == {label("0", UUID0, 31, "warning"): 2}
    assert list(series(result, "gpu_xid_last_timestamp_seconds").values()) == [WALL_S]


def test_the_function_of_an_address_does_not_matter(tmp_path: Path) -> None:
    node = Node(tmp_path, [Device("gpu", "3", UUID0, "0001:00:00.4")])
    node.log(xid(GPU0, 31))
    assert xids(node.probe().collect()) == {label("3", UUID0, 31, "warning"): 1}


def break_driver(information: Path) -> None:
    """Have the driver fail when it is asked for this GPU."""
    information.unlink()
    information.mkdir()


def test_the_driver_is_asked_about_a_gpu_until_its_uuid_is_known_and_never_again(node: Node) -> None:
    node.devices = []
    information = node.driver_gpu(GPU0, "GPU-????????-????")
    node.log(xid(GPU0, 31))
    probe = node.probe()
    assert xids(probe.collect()) == {label("0", "", 31, "warning"): 1}
    node.driver_gpu(GPU0, UUID0)
    probe.open()
    assert xids(probe.collect()) == {label("0", UUID0, 31, "warning"): 1}
    break_driver(information)
    probe.open()
    result = probe.collect()
    assert (result.failures, xids(result)) == ([], {label("0", UUID0, 31, "warning"): 1})
    again = node.probe()
    again.open()
    assert again.collect().failures == []


@pytest.mark.parametrize("by", ["gpu collector", "kernel log"])
def test_the_driver_is_not_asked_for_what_others_have_told(node: Node, by: str) -> None:
    if by == "kernel log":
        node.devices = []
    probe = node.probe()
    node.log(f"NVRM: GPU at PCI:0002:00:00: {UUID1}" if by == "kernel log" else "other")
    if by == "kernel log":
        probe.collect()
    break_driver(node.driver_gpu(GPU1, UUID1))
    node.advance(100)
    node.log(xid("0009:00:00.0", 31))
    assert probe.collect().failures == []
    break_driver(node.driver_gpu("0003:00:00.0", "GPU-x"))
    node.advance(100)
    node.log(xid("0009:00:00.0", 31))
    assert [what for what, _ in probe.collect().failures] == ["GPU 0003:00:00.0"]


def test_the_drivers_gpus_are_listed_once_however_many_there_are(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [gpu_at(number) for number in range(1, 31)]
    for number, address in enumerate(addresses):
        node.driver_gpu(address, f"GPU-{number}")
    for address in addresses[20:]:
        (node.proc / "driver/nvidia/gpus" / address / "information").unlink()
    listed: list[str] = []
    scandir = os.scandir

    def listing(path: str) -> Iterator[os.DirEntry[str]]:
        listed.append(str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listing)
    node.devices = []
    node.probe().collect()
    assert listed == [str(node.proc / "driver/nvidia/gpus")]
    uuids = node.state.content["gpus"]["uuids"]
    assert uuids == {address: f"GPU-{number}" for number, address in enumerate(addresses[:20])}


def test_a_gpu_told_without_a_name_is_called_by_its_address(tmp_path: Path) -> None:
    node = Node(tmp_path, [Device("gpu", "", UUID0, GPU0)])
    node.log(xid(GPU0, 31))
    result = node.probe().collect()
    assert xids(result) == {label(GPU0, UUID0, 31, "warning"): 1}
    assert result.events[0].device == GPU0


# SXIDs


def sxid(rest: str) -> str:
    return f"nvidia-nvswitch2: SXid (PCI:0000:c3:00.0): {rest}"


@pytest.mark.parametrize(
    ("line", "code", "severity"),
    [
        (sxid("20034, Fatal, Link 30 LTSSM Fault Up"), 20034, "critical"),
        (sxid("20034, Non-fatal, Link 30 LTSSM Fault Up"), 20034, "warning"),
        (sxid("22013, Non-fatal, Link 63 Minion Link DLREQ interrupt"), 22013, "info"),
        (sxid("22013, Fatal, Link 63"), 22013, "critical"),
        (sxid("11012, Link 01 ingress"), 11012, "info"),
        (sxid("12999, Link 01 egress"), 12999, "warning"),
        (sxid("99999"), 99999, "warning"),
        (sxid("20009, Link 30 not fatal, Fatal"), 20009, "warning"),
        (sxid("20012, Link 30 Fatal"), 20012, "error"),
    ],
)
def test_the_shapes_and_severities_of_an_sxid(node: Node, line: str, code: int, severity: str) -> None:
    node.log(line)
    result = node.probe().collect()
    labels = f'{{switch="2",pci="0000:c3:00.0",sxid="{code}"'
    assert series(result, "nvswitch_sxid_errors_total") == {f'{labels},severity="{severity}"}}': 1}
    assert series(result, "nvswitch_sxid_last_timestamp_seconds") == {labels + "}": WALL_S}
    [event] = result.events
    assert (event.kind, event.severity.value, event.device) == ("nvswitch_sxid", severity, "nvswitch2")
    assert event.labels == {"sxid": str(code), "switch": "2", "pci": "0000:c3:00.0"}


def test_what_follows_an_sxid_is_not_another(node: Node) -> None:
    node.log(
        sxid("22013, Non-fatal, Link 63 Minion Link DLREQ interrupt"),
        sxid("22013, Severity 0 Engine instance 63 Sub-engine instance 00"),
        sxid("22013, Data {0x80000000, 0x00000000, 0x00000000}"),
    )
    result = node.probe().collect()
    assert sum(series(result, "nvswitch_sxid_errors_total").values()) == 1
    assert len(result.events) == 1
    assert records(result)["matched"] == 3


# Memory, tasks, processors


OOM = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm_nd-0001/uid_0/job_4,"
    "task_memcg=/slurm_nd-0001/uid_0/job_4/step_0/task_0,task=python3,pid=17898,uid=0"
)
KILLED = (
    "Memory cgroup out of memory: Killed process 17898 (python3) total-vm:323772kB, anon-rss:46208kB, file-rss:6544kB, "
    "shmem-rss:0kB, UID:0 pgtables:156kB oom_score_adj:0"
)


def test_a_process_killed_in_its_cgroup_is_one_kill_and_names_its_job(node: Node) -> None:
    node.log("python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0", OOM, "between", KILLED)
    result = node.probe().collect()
    assert series(result, "kernel_oom_kills_total") == {'{scope="memcg"}': 1}
    [event] = result.events
    assert (event.kind, event.component, event.severity) == ("kernel_oom_kill", "kernel", Severity.WARNING)
    assert event.labels == {
        "pid": "17898",
        "task": "python3",
        "cgroup": "/slurm_nd-0001/uid_0/job_4/step_0/task_0",
        "job_id": "4",
        "scope": "memcg",
    }


@pytest.mark.parametrize(
    ("line", "scope"),
    [
        (KILLED, "memcg"),
        (OOM.replace(",task_memcg", ",task=1,pid=2,task_memcg"), "memcg"),
        ("Out of memory: Killed process 17898 (python3) total-vm:1kB", "global"),
        ("Out of memory (oom_kill_allocating_task): Killed process 17898 (python3) total-vm:1kB", "global"),
        ("Killed process 17898 (python3) total-vm:1kB, anon-rss:1kB", "global"),
        (
            OOM.replace("CONSTRAINT_MEMCG", "CONSTRAINT_NONE").replace(",oom_memcg=/slurm_nd-0001/uid_0/job_4", ""),
            "global",
        ),
    ],
)
def test_the_shapes_of_a_kill(node: Node, line: str, scope: str) -> None:
    node.log(line)
    result = node.probe().collect()
    assert series(result, "kernel_oom_kills_total") == {f'{{scope="{scope}"}}': 1}
    assert result.events[0].labels["pid"] == "17898"
    assert result.events[0].labels["task"] == "python3"


def test_kills_of_two_processes_interleaved_are_two(node: Node) -> None:
    node.log(OOM, OOM.replace("17898", "17899"), KILLED.replace("17898", "17899"), KILLED)
    assert series(node.probe().collect(), "kernel_oom_kills_total") == {'{scope="memcg"}': 2}


def test_a_process_id_that_is_used_again_is_another_kill(node: Node) -> None:
    probe = node.probe()
    node.log(OOM, KILLED)
    probe.collect()
    node.log(KILLED)
    node.advance(100)
    node.log(OOM)
    probe.collect()
    node.advance(100)
    node.log(KILLED)
    assert series(probe.collect(), "kernel_oom_kills_total") == {'{scope="memcg"}': 4}


def test_a_kill_told_before_and_after_a_restart_is_one(node: Node) -> None:
    node.log(OOM)
    node.probe().collect()
    node.log(KILLED)
    assert series(node.probe().collect(), "kernel_oom_kills_total") == {'{scope="memcg"}': 1}


class Watched(float):
    """A time since boot that counts how often another one is held against it."""

    compared = 0

    def __sub__(self, other: float) -> float:
        Watched.compared += 1
        return float(self) - other


def gpu_at(number: int) -> str:
    return f"{number:04x}:00:00.0"


@pytest.mark.parametrize(
    "fact",
    [
        lambda number: OomKill("global", str(number), "x", ""),
        lambda number: Killed("global", str(number), "x"),
        lambda number: Xid(gpu_at(number), 79),
        lambda number: FallenOff(gpu_at(number)),
        lambda number: FallingOff(gpu_at(number)),
    ],
    ids=["oom-kill", "killed", "xid", "fallen", "falling"],
)
@pytest.mark.parametrize("step_s", [0.0, 0.005, 1.0])
def test_what_a_line_costs_does_not_depend_on_how_many_others_there_were(
    fact: Callable[[int], Fact], step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "compared", 0)
    ledger = Ledger()
    for number in range(5000):
        ledger.take(fact(number), Moment(WALL_S, Watched(number * step_s), 0.0))
    assert Watched.compared <= 5 * 5000


def test_processes_and_gpus_without_number_are_counted_and_only_the_latest_kept(node: Node) -> None:
    node.log(*(OOM.replace("17898", str(number)) for number in range(3000)))
    node.log(*(xid(gpu_at(number), 79) for number in range(3000)))
    node.log(*(f"NVRM: The NVIDIA GPU {gpu_at(number)}" for number in range(3000)))
    result = node.probe().collect()
    assert series(result, "kernel_oom_kills_total") == {'{scope="memcg"}': 3000}
    assert sum(xids(result).values()) == 3000
    kept = node.state.content["ledger"]
    latest = range(1000, 3000)
    assert list(kept["dying"]) == [str(number) for number in latest]
    assert [address for address, *_ in kept["lost"]] == [gpu_at(number) for number in latest]
    assert [address for address, *_ in kept["falling"]] == [gpu_at(number) for number in latest]


def test_a_name_that_comes_again_is_among_the_latest(node: Node) -> None:
    numbers = [0, *range(1, 2000), 0, 2000]
    node.log(*(OOM.replace("17898", str(number)) for number in numbers))
    node.log(KILLED.replace("17898", "0"))
    result = node.probe().collect()
    assert series(result, "kernel_oom_kills_total") == {'{scope="memcg"}': len(numbers)}


def test_what_is_too_old_to_have_a_second_line_is_not_kept(node: Node) -> None:
    node.log(OOM, THREE[0], at_s=100)
    node.log(OOM.replace("17898", "2"), THREE[0].replace(GPU0, GPU1), at_s=200)
    node.probe().collect()
    kept = node.state.content["ledger"]
    assert (kept["dying"], kept["falling"]) == ({"2": 200.0}, [[GPU1, 200.0]])


def test_a_line_with_another_time_does_not_make_an_old_one_new(node: Node) -> None:
    node.log(OOM, at_s=100)
    node.log(OOM.replace("17898", "2"), at_s=190)
    node.log(OOM.replace("17898", "3"), at_s=131)
    node.log(OOM.replace("17898", "4"), at_s=189)
    node.log(KILLED.replace("17898", "3"), at_s=249)
    node.log(KILLED.replace("17898", "4"), at_s=100)
    assert series(node.probe().collect(), "kernel_oom_kills_total") == {'{scope="memcg"}': 6}


def test_a_task_of_any_name_is_told(node: Node) -> None:
    node.log(
        OOM.replace("task=python3,", "task=a,b=c,uid=1,pid=2,"),
        "INFO: task kworker/u:1+x y:123 blocked for more than 120 seconds.",
    )
    node.log("Memory cgroup out of memory: Killed process 9 ((sd-pam)) total-vm:1kB, anon-rss:1kB")
    kill, hung, pam = node.probe().collect().events
    assert pam.labels["task"] == "(sd-pam)"
    assert (kill.labels["task"], kill.labels["pid"]) == ("a,b=c,uid=1,pid=2", "17898")
    assert (hung.labels["task"], hung.labels["pid"]) == ("kworker/u:1+x y", "123")


@pytest.mark.parametrize("how", ["blocked", "blocked in I/O wait"])
def test_a_hung_task_is_counted_and_told(node: Node, how: str) -> None:
    node.log(f"INFO: task python3:4711 {how} for more than 120 seconds.", "      Tainted: P  O  6.8.0 #1")
    result = node.probe().collect()
    assert result.values["kernel_hung_tasks_total"] == 1
    [event] = result.events
    assert (event.kind, event.labels) == ("kernel_hung_task", {"pid": "4711", "task": "python3"})


@pytest.mark.parametrize(
    ("line", "kind", "labels"),
    [
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:4711]", "soft_lockup", {"cpu": "3"}),
        ("NMI watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [x:1]", "soft_lockup", {"cpu": "3"}),
        ("BUG: soft lockup - CPU#3 stuck for 22s! [x:1]", "soft_lockup", {"cpu": "3"}),
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 12", "hard_lockup", {"cpu": "12"}),
        ("watchdog: Watchdog detected hard LOCKUP on cpu 12", "hard_lockup", {"cpu": "12"}),
        ("rcu: INFO: rcu_sched self-detected stall on CPU", "rcu", {}),
        ("INFO: rcu_preempt detected stalls on CPUs/tasks:", "rcu", {}),
        ("rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 3-... }", "rcu", {}),
    ],
)
def test_the_shapes_of_a_stall(node: Node, line: str, kind: str, labels: dict[str, str]) -> None:
    node.log(line)
    result = node.probe().collect()
    assert series(result, "kernel_stalls_total") == {f'{{kind="{kind}"}}': 1}
    assert [(event.kind, event.labels) for event in result.events] == [("kernel_stall", {"kind": kind, **labels})]


# Times


def test_a_fact_has_the_time_at_which_the_kernel_wrote_it(node: Node) -> None:
    node.log(xid(GPU0, 31), at_s=UPTIME_S - 3600)
    result = node.probe().collect()
    assert result.events[0].time == WALL_S - 3600
    assert series(result, "gpu_xid_last_timestamp_seconds") == {f'{{gpu="0",uuid="{UUID0}",xid="31"}}': WALL_S - 3600}


def last(result: Result) -> list[Value]:
    return list(series(result, "gpu_xid_last_timestamp_seconds").values())


def test_a_clock_that_was_wrong_and_is_set_right_is_right_for_what_came_before(node: Node) -> None:
    node.clock.jump(8 * 3600)
    node.log(xid(GPU0, 48))
    probe = node.probe()
    assert last(probe.collect()) == [WALL_S + 8 * 3600]
    node.advance(300)
    node.clock.jump(-8 * 3600)
    assert last(probe.collect()) == [WALL_S]
    node.advance(300)
    node.log(xid(GPU0, 48))
    assert last(probe.collect()) == [WALL_S + 600]
    node.clock.jump(3600)
    assert last(probe.collect()) == [WALL_S + 600 + 3600]


def test_a_clock_that_is_adjusted_a_little_moves_no_time_until_it_is_a_second(node: Node) -> None:
    node.log(xid(GPU0, 48))
    probe = node.probe()
    probe.collect()
    node.advance(100)
    for _ in range(3):
        node.clock.jump(0.3)
        assert last(probe.collect()) == [WALL_S]
    node.clock.jump(0.3)
    assert last(probe.collect()) == [pytest.approx(WALL_S + 1.2)]


def test_no_time_is_in_the_future(node: Node) -> None:
    node.log(xid(GPU0, 48))
    probe = node.probe()
    probe.collect()
    node.clock.jump(-0.5)
    assert last(probe.collect()) == [WALL_S - 0.5]
    node.advance(10)
    assert last(probe.collect()) == [WALL_S]


def test_a_time_stays_though_the_uptime_cannot_be_read_any_more(node: Node) -> None:
    node.log(xid(GPU0, 48), at_s=UPTIME_S - 60)
    probe = node.probe()
    assert last(probe.collect()) == [WALL_S - 60]
    (node.proc / "uptime").unlink()
    node.clock.advance(100)
    assert last(probe.collect()) == [WALL_S - 60]


@pytest.mark.parametrize("at_s", [UPTIME_S + 3, 1e12])
def test_a_time_that_cannot_be_is_the_time_of_reading(node: Node, at_s: float) -> None:
    node.log(xid(GPU0, 31), at_s=at_s)
    assert node.probe().collect().events[0].time == WALL_S


def test_a_record_written_while_it_is_read_is_not_in_the_future(node: Node) -> None:
    node.log(xid(GPU0, 31), at_s=UPTIME_S + 1)
    assert node.probe().collect().events[0].time == WALL_S


@pytest.mark.parametrize("content", [None, "", "nan 1", "x", "inf 1", "-1 1", "1e300 1", "1e18 1", "10000000001 1"])
def test_without_an_uptime_the_time_is_that_of_reading(node: Node, content: str | None) -> None:
    if content is None:
        (node.proc / "uptime").unlink()
    else:
        (node.proc / "uptime").write_text(content)
    node.log(xid(GPU0, 31), at_s=5)
    assert node.probe().collect().events[0].time == WALL_S


# Storms


def test_a_storm_is_counted_whole_and_told_in_few_events(node: Node) -> None:
    probe = node.probe()
    events: list[Event] = []
    for second in range(300):
        node.log(*[xid(GPU0, 95)] * 20, xid(GPU1, 95) if second == 30 else "other")
        result = probe.collect()
        events += result.events
        node.advance(1)
    assert xids(result) == {label("0", UUID0, 95, "critical"): 6000, label("1", UUID1, 95, "critical"): 1}
    mine = [event for event in events if event.labels["gpu"] == "0"]
    assert len(mine) == 10 + 4
    assert ["count" in event.labels for event in mine] == [False] * 10 + [True] * 4
    counts = [int(event.labels["count"]) for event in mine[10:]]
    assert [event.time for event in mine[10:]] == [WALL_S + 60, WALL_S + 120, WALL_S + 180, WALL_S + 240]
    node.advance(60)
    [last] = probe.collect().events
    assert 10 + sum(counts) + int(last.labels["count"]) == 6000
    assert last.time == WALL_S + 299
    assert len(events) - len(mine) == 1, "another GPU's event is not held back"
    assert len({event.key for event in [*events, last]}) == len(events) + 1


@pytest.mark.parametrize(
    ("mild", "bad"),
    [
        (xid(GPU0, 145, ", RLW Nonfatal XC0 i0 Link 3"), xid(GPU0, 145, ", RLW Fatal XC0 i0 Link 3")),
        (
            "nvidia-nvswitch2: SXid (PCI:0000:c3:00.0): 22013, Non-fatal, Link 63",
            "nvidia-nvswitch2: SXid (PCI:0000:c3:00.0): 22013, Fatal, Link 63",
        ),
        ("Memory cgroup out of memory: Killed process 1 (x) total", "Out of memory: Killed process 1 (x) total"),
    ],
)
def test_what_is_worse_than_the_storm_it_comes_in_is_told(node: Node, mild: str, bad: str) -> None:
    node.log(*[mild] * 12, bad, *[mild] * 5)
    events = node.probe().collect().events
    worst = [event for event in events if event.severity is not events[0].severity]
    assert (len(events), len(worst)) == (11, 1)
    assert "count" not in worst[0].labels


def test_after_ten_quiet_minutes_facts_are_told_alone_again(node: Node) -> None:
    probe = node.probe()
    node.log(*[xid(GPU0, 95)] * 15)
    assert len(probe.collect().events) == 10
    node.advance(599)
    assert [event.labels["count"] for event in probe.collect().events] == ["5"]
    node.advance(1)
    node.log(*[xid(GPU0, 95)] * 3)
    assert [event.labels.get("count") for event in probe.collect().events] == [None, None, None]


def test_storms_that_are_over_are_forgotten() -> None:
    folding = Folding()
    event = Event("kind", Severity.INFO, "kernel", "message")
    for number in range(100):
        folding.take(str(number), 0.0, lambda: event)
    assert folding.due(599.0) == []
    assert len(folding._storms) == 100
    assert folding.due(600.0) == []
    assert folding._storms == {}


def test_of_storms_without_number_the_one_that_was_quiet_longest_is_over_and_nothing_it_held_is_lost() -> None:
    folding = Folding()
    event = Event("kind", Severity.INFO, "kernel", "message")
    events: list[Event] = []
    for number in range(3000):
        for _ in range(12):
            events += folding.take(str(number), number / 100, lambda: event)
        events += folding.take("lasting", number / 100, lambda: event)
        assert len(folding._storms) <= STORMS_LIMIT
    assert len(folding._storms) == STORMS_LIMIT
    lasting = folding._storms["lasting"]
    assert (lasting.given, lasting.held) == (10, 2990)
    events += folding.end()
    assert sum(int(event.labels.get("count", "1")) for event in events) == 3000 * 13
    assert len(events) == 3000 * 11 + 11


def test_a_storm_read_late_is_told_by_the_times_of_its_records(node: Node) -> None:
    for second in range(120):
        node.log(xid(GPU0, 95), at_s=second)
    node.log(xid(GPU0, 95), at_s=5000)
    events = node.probe().collect().events
    counts = [event.labels.get("count") for event in events]
    assert counts == [None] * 10 + ["60", "50", None]
    assert [event.time for event in events[10:]] == [WALL_S - UPTIME_S + t for t in (69, 119, 5000)]


def test_a_great_storm_does_not_hold_a_run_up(node: Node) -> None:
    block = "".join(f"4,{number},{number},-;{xid(GPU0, 95)} {'x' * 50}\n" for number in range(200_000))
    node.kmsg.write_text(block)
    probe = node.probe()
    totals = [0]
    while (total := int(sum(xids(probe.collect()).values()))) > totals[-1]:
        assert total - totals[-1] < 100_000
        totals.append(total)
    assert totals[-1] == 200_000
    assert len(totals) > 3


def test_every_metric_is_declared(node: Node) -> None:
    node.log(xid(GPU0, 31), sxid("20034, Fatal"), OOM, "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [x:1]")
    shown = {name.partition("{")[0] for name in node.probe().collect().values}
    assert shown == {metric.name for metric in metrics.METRICS}
