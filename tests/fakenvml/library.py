"""Builds the stand-in for the driver's library, writes the state it answers from, and asks it in another process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import need

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOURCES = Path(__file__).parent
ROOT = SOURCES.parents[1]
SONAME = "libnvidia-ml.so.1"
ALL_LINKS = 0xFFFFFFFF
"""The scope of an NVLink field that is about all links of a GPU."""
_PCI_DOMAINS = (0x1, 0x2, 0x3, 0x4, 0xB, 0xC, 0xD, 0xE)
_MIB = 1 << 20


@cache
def functions() -> frozenset[str]:
    """Return the names of all functions of the driver's library that the stand-in has."""
    source = (SOURCES / "nvml.c").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^(?:\S.*[ *]|[A-Z_]+\()(nvml[A-Z]\w+)[(,]", source, re.MULTILINE))


def build(directory: Path, *, without: Sequence[str] = (), version: str | None = None) -> Path:
    """Put the library into the directory, which is made where it is missing, and return its path.

    `without` names functions that this library does not have, as an older driver's; `version` is the driver version it
    says it is of, whatever the state says. A library that is there is replaced, not overwritten: a process that uses it
    keeps it. Skips the test where there is no compiler. Raises ValueError for a function that the stand-in never has.
    """
    unknown = set(without) - functions()
    if unknown:
        raise ValueError(f"the stand-in has no {', '.join(sorted(unknown))} that could be left out")
    compiled = _compiled(need("cc", "gcc libc6-dev"), frozenset(without), version)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SONAME
    beside = directory / f".{SONAME}.new"
    beside.write_bytes(compiled)
    beside.replace(path)
    return path


@cache
def _compiled(compiler: str, without: frozenset[str], version: str | None) -> bytes:
    # A function that is left out keeps its code under another name: whoever looks it up finds nothing.
    defines = [f"-D{name}=left_out_{name}" for name in sorted(without)]
    if version is not None:
        defines.append(f'-DVERSION="{version}"')
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / SONAME
        flags = ["-std=c11", "-O1", "-Wall", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{SONAME}"]
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        done = subprocess.run(
            [compiler, *flags, *defines, "-o", str(path), *sources],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, f"{compiler} cannot build the stand-in for {SONAME}: {done.stderr}"
        return path.read_bytes()


def write_state(path: Path, mapping: Mapping[str, str | int]) -> None:
    """Write the state so that a reader sees the old one or the new one, never a part."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text("".join(f"{key} = {value}\n" for key, value in mapping.items()), encoding="utf-8")
    beside.replace(path)


def state(gpus: int = 8, /, **changes: str | int | None) -> dict[str, str | int]:
    """Return the state of a healthy, busy ND96asr_v4 (A100-SXM4-40GB); a change to None takes the key out.

    Raises ValueError for a change of what can be no key, as `gpus=2` would be.
    """
    if wrong := [key for key in changes if "." not in key]:
        raise ValueError(f"no key of the state file: {', '.join(wrong)}")
    found: dict[str, str | int] = {
        "driver.version": "570.133.20",
        "driver.nvml_version": "12.570.133.20",
        "driver.cuda_version": 12080,
        "gpu.count": gpus,
    }
    for gpu in range(gpus):
        found |= {f"gpu.{gpu}.{key}": value for key, value in (_identity(gpu) | _condition(gpu)).items()}
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = value
    return found


def _identity(gpu: int) -> dict[str, str | int]:
    """What of a GPU does not change."""
    return {
        "uuid": f"GPU-{gpu:08x}-57c1-4a80-9e5d-00000000a100",
        "name": "NVIDIA A100-SXM4-40GB",
        "serial": f"156082100{gpu:04d}",
        "vbios": "92.00.45.00.03",
        "inforom": "G506.0200.00.04",
        "part_number": "692-2G506-0200-002",
        "brand": 14,
        "architecture": 7,
        "minor": gpu,
        "numa_node": gpu // 2,
        "cuda_capability": "8 0",
        "pci": f"{_PCI_DOMAINS[gpu % 8] + 0x10 * (gpu // 8):04X}:00:00.0",
        "pci_device_id": 0x20B010DE,
        "pci_subsystem_id": 0x134F10DE,
        "persistence_mode": 1,
        "compute_mode": 0,
        "mig_mode": "0 0",
        "virtualization_mode": 1,
        "power_limit_mw.enforced": 400_000,
        "power_limit_mw.requested": 400_000,
        "power_limit_mw.default": 400_000,
        "power_limit_mw.min": 100_000,
        "power_limit_mw.max": 400_000,
        "clock_max_mhz.graphics": 1410,
        "clock_max_mhz.sm": 1410,
        "clock_max_mhz.mem": 1215,
        "clock_max_mhz.video": 1290,
        "event_reasons_supported": "0x1ff",
        "ecc_mode": "1 1",
        "pcie": "4 16 4 16",
        **{f"nvlink.{link}.state": 1 for link in range(12)},
        "field.91": "ui:12",
    }


def _condition(gpu: int) -> dict[str, str | int]:
    """What of a GPU changes with its work and its faults."""
    total, reserved, used = 40960 * _MIB, 634 * _MIB, 30208 * _MIB
    power_mw, energy_mj = 315_000 + 1000 * gpu, 86_400_000_000 + 1_000_000 * gpu
    moved_kib = 5_000_000_000 + 1_000_000 * gpu
    return {
        "performance_state": 0,
        "utilization": "97 45",
        "memory": f"{total} {reserved} {total - reserved - used} {used}",
        "temperature": 45 + gpu,
        "power_mw": power_mw,
        "energy_mj": energy_mj,
        "clock_mhz.graphics": 1395,
        "clock_mhz.sm": 1395,
        "clock_mhz.mem": 1215,
        "clock_mhz.video": 1275,
        "event_reasons": "0x4",
        **{
            f"ecc_total.{kind}.{life}": 0 for kind in ("corrected", "uncorrected") for life in ("volatile", "aggregate")
        },
        "remapped_rows": "0 0 0 0",
        "pcie_replays": 0,
        "pcie_throughput_kib": "120000 340000",
        **{f"field.{field}": "ull:0" for field in (3, 4, 5, 6)},  # ECC errors
        "field.74": "ull:120000000000",  # time throttled by power
        **{f"field.{field}": "ull:0" for field in (75, 76, 77, 78, 79)},
        "field.82": f"ui:{52 + gpu}",
        "field.83": f"ull:{energy_mj}",
        "field.94": "ui:0",
        **{f"field.{field}": "ui:0" for field in (142, 143, 144, 145)},  # row remaps
        "field.185": f"ui:{power_mw}",
        "field.186": f"ui:{power_mw}",
        "field.230": "ui:0",
        **{f"field.{field}.{ALL_LINKS}": f"ull:{moved_kib * (field - 137)}" for field in (138, 139, 140, 141)},
    }


def environment(library: Path, state_file: Path, calls: Path | None = None) -> dict[str, str]:
    """Return this process's environment, changed so that the binding finds the library and that its state."""
    changed = {"LD_LIBRARY_PATH": str(library.parent), "FAKENVML_STATE": str(state_file), "PYTHONPATH": str(ROOT)}
    if calls is not None:
        changed["FAKENVML_CALLS"] = str(calls)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FAKENVML_")}
    return {**kept, **changed}


def start(
    library: Path, state_file: Path, steps: Sequence[Sequence[object]], calls: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Do the steps (tests/fakenvml/answers.py) in a process of its own; return what became of it."""
    return subprocess.run(
        [sys.executable, "-m", "tests.fakenvml.answers"],
        input=json.dumps(list(steps)),
        env=environment(library, state_file, calls),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def ask(
    library: Path, state_file: Path, *steps: Sequence[object], calls: Path | None = None, init: bool = True
) -> list[dict[str, Any]]:
    """Return the real binding's answer to each step, `{"value": ...}` or `{"error": code}`, with `ms`, its time.

    `init` calls nvmlInit before the first step; its answer is not among those returned.
    """
    first: list[Sequence[object]] = [("nvmlInit",)] if init else []
    done = start(library, state_file, [*first, *steps], calls)
    assert done.returncode == 0, f"the process that asks {library} ended with {done.returncode}: {done.stderr}"
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers[len(first) :]
