"""What the VM size table promises, and what a site's own files may change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent import sizes
from agent.api import VmSize

MIB = 1024**2
GIB = 1024**3
GBPS = 10**9


def site_file(directory: Path, text: str, name: str = "sizes.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def known(name: str, *extra: Path) -> VmSize:
    size = sizes.load(name, extra)
    assert size is not None
    return size


def test_eight_a100_with_eight_hdr_ports() -> None:
    assert sizes.load("ND96asr_v4") == VmSize(
        name="ND96asr_v4",
        gpu_model="A100",
        gpu_count=8,
        gpu_memory_bytes=40 * GIB,
        fabric_ports=8,
        fabric_rate_bps=200 * GBPS,
        nvlinks_per_gpu=12,
    )


@pytest.mark.parametrize("text", ["Standard_ND96asr_v4", "standard_nd96asr_v4", "ND96ASR_V4", "  nd96asr_v4\n"])
def test_case_and_the_standard_prefix_do_not_matter(text: str) -> None:
    assert sizes.load(text) == sizes.load("ND96asr_v4")


@pytest.mark.parametrize("text", ["", "Standard_", "ND96asr_v5", "ND96", "HB120-17rs_v3", "auto", "Standard_D4s_v5"])
def test_an_unknown_size_promises_nothing(text: str) -> None:
    assert sizes.load(text) is None


@pytest.mark.parametrize(
    ("name", "count", "memory_mib", "ports", "rate_gbps"),
    [
        ("ND40rs_v2", 8, 32768, 1, 100),
        ("ND96amsr_A100_v4", 8, 81920, 8, 200),
        ("ND96isr_H100_v5", 8, 81559, 8, 400),
        ("ND96is_H100_v5", 8, 81559, 0, 0),
        ("ND96isr_H200_v5", 8, 143771, 8, 400),
        ("ND96isrf_H200_v5", 8, 143771, 8, 400),
        ("ND96is_H200_v5", 8, 143771, 0, 0),
        ("ND128isr_NDR_GB200_v6", 4, 189471, 4, 400),
        ("ND128isr_GB300_v6", 4, 284208, 4, 800),
        ("ND128isrG5_GB300_v6", 4, 284208, 4, 800),
        ("NC24ads_A100_v4", 1, 81920, 0, 0),
        ("NC48ads_A100_v4", 2, 81920, 0, 0),
        ("NC96ads_A100_v4", 4, 81920, 0, 0),
        ("NC40ads_H100_v5", 1, 95830, 0, 0),
        ("NC80adis_H100_v5", 2, 95830, 0, 0),
        ("HC44rs", 0, 0, 1, 100),
        ("HB120rs_v2", 0, 0, 1, 200),
        ("HB120rs_v3", 0, 0, 1, 200),
        ("HB176rs_v4", 0, 0, 1, 400),
        ("HX176rs", 0, 0, 1, 400),
        ("HB368rs_v5", 0, 0, 4, 200),
    ],
)
def test_devices_of_a_size(name: str, count: int, memory_mib: int, ports: int, rate_gbps: int) -> None:
    size = known(name)
    assert (size.gpu_count, size.gpu_memory_bytes) == (count, memory_mib * MIB)
    assert (size.fabric_ports, size.fabric_rate_bps) == (ports, rate_gbps * GBPS)


@pytest.mark.parametrize(
    ("parent", "constrained"),
    [
        ("HC44rs", ["HC44-16rs", "HC44-32rs"]),
        ("HB120rs_v2", [f"HB120-{cores}rs_v2" for cores in (16, 32, 64, 96)]),
        ("HB120rs_v3", [f"HB120-{cores}rs_v3" for cores in (16, 32, 64, 96)]),
        ("HB176rs_v4", [f"HB176-{cores}rs_v4" for cores in (24, 48, 96, 144)]),
        ("HX176rs", [f"HX176-{cores}rs" for cores in (24, 48, 96, 144)]),
        ("HB368rs_v5", [f"HB368-{cores}rs_v5" for cores in (48, 96, 144, 192, 240, 288, 336)]),
    ],
)
def test_constrained_cores_keep_the_parents_network(parent: str, constrained: list[str]) -> None:
    for name in constrained:
        size = known(name)
        assert size.name == name
        assert (size.fabric_ports, size.fabric_rate_bps) == (known(parent).fabric_ports, known(parent).fabric_rate_bps)


@pytest.mark.parametrize(
    ("name", "count", "memory_gib"),
    [
        ("NC36ds_xl_RTXPro6000_v6", 1, 24),
        ("NC24lds_xl_RTXPro6000_v6", 1, 24),
        ("NC36lds_xl_RTXPro6000_v6", 1, 24),
        ("NC72ds_xl_RTXPro6000_v6", 1, 48),
        ("NC72lds_xl_RTXPro6000_v6", 1, 48),
        ("NC144ds_xl_RTXPro6000_v6", 1, 96),
        ("NC144lds_xl_RTXPro6000_v6", 1, 96),
        ("NC288ds_xl_RTXPro6000_v6", 2, 96),
        ("NC288lds_xl_RTXPro6000_v6", 2, 96),
        ("NC324ds_xl_RTXPro6000_v6", 2, 96),
        ("NC324lds_xl_RTXPro6000_v6", 2, 96),
        ("NC128ds_xl_RTXPRO6000BSE_v6", 1, 96),
        ("NC256lds_xl_RTXPRO6000BSE_v6", 2, 96),
        ("NC320ds_xl_RTXPRO6000BSE_v6", 2, 96),
    ],
)
def test_a_fraction_of_a_gpu_is_one_device_without_fabric(name: str, count: int, memory_gib: int) -> None:
    size = known(f"Standard_{name}")
    assert (size.gpu_count, size.gpu_memory_bytes) == (count, memory_gib * GIB)
    assert (size.fabric_ports, size.nvlinks_per_gpu) == (0, 0)


@pytest.mark.parametrize(("name", "model"), [("ND96asr_MI200_v4", "MI250"), ("ND96isr_MI300X_v5", "MI300X")])
def test_amd_gpus_are_no_expectation_on_nvml_but_their_fabric_is_expected(name: str, model: str) -> None:
    size = known(name)
    assert (size.gpu_model, size.gpu_count, size.gpu_memory_bytes) == (model, None, None)
    assert size.fabric_ports == 8


def test_what_is_in_doubt_is_not_expected() -> None:
    assert known("NC24rs_v3").fabric_ports is None
    assert known("NC24rs_v3").fabric_rate_bps is None
    assert known("NC48ads_A100_v4").nvlinks_per_gpu is None


def test_every_known_name_is_found_under_itself() -> None:
    names = sizes.names()
    assert len(names) > 60
    assert names == sorted(names)
    assert [known(name).name for name in names] == names


def test_every_gpu_size_names_its_model_and_every_port_its_rate() -> None:
    for name in sizes.names():
        size = known(name)
        assert bool(size.gpu_model) != (size.gpu_count == 0), name
        assert bool(size.fabric_rate_bps) == bool(size.fabric_ports), name


def test_a_site_adds_a_size(tmp_path: Path) -> None:
    path = site_file(tmp_path, "- sizes: [Standard_Own1]\n  gpu_model: L40S\n  gpu_count: 3\n  gpu_memory: 46068 MiB\n")
    assert sizes.load("own1", [path]) == VmSize("Own1", "L40S", 3, 46068 * MIB)
    assert "Own1" in sizes.names([path])
    assert sizes.load("own1") is None


def test_a_site_states_only_what_differs_and_null_removes_an_expectation(tmp_path: Path) -> None:
    path = site_file(tmp_path, "- sizes: [nd96asr_v4]\n  fabric_ports: 7\n  nvlinks_per_gpu: null\n")
    size = known("ND96asr_v4", path)
    assert (size.fabric_ports, size.nvlinks_per_gpu, size.gpu_count) == (7, None, 8)
    assert known("ND96asr_v4").fabric_ports == 8


def test_the_last_site_file_wins(tmp_path: Path) -> None:
    first = site_file(tmp_path, "- {sizes: [X], fabric_ports: 1, gpu_count: 0}\n", "1.yaml")
    second = site_file(tmp_path, "- {sizes: [x], fabric_ports: 2}\n", "2.yaml")
    size = known("X", first, second)
    assert (size.fabric_ports, size.gpu_count) == (2, 0)


def test_a_site_file_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    assert sizes.load("HC44rs", [tmp_path / "none.yaml"]) == sizes.load("HC44rs")


def test_a_changed_site_file_is_read_again(tmp_path: Path) -> None:
    path = site_file(tmp_path, "- {sizes: [X], fabric_ports: 1}\n")
    assert known("X", path).fabric_ports == 1
    site_file(tmp_path, "- {sizes: [X], fabric_ports: 2}\n")
    assert known("X", path).fabric_ports == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sizes: [X]\n", "expected a list of groups, each with `sizes`, got dict"),
        ("", "expected a list of groups, each with `sizes`, got nothing"),
        ("- X\n", "group 1: expected a map with the key `sizes`, got str"),
        ("- {gpu_count: 1}\n", "group 1: `sizes` must be a list of size names, got None"),
        ("- {sizes: [1]}\n", "group 1: `sizes` must be a list of size names, got [1]"),
        ("- {sizes: [X], gpus: 1}\n", "group 1 (X): unknown key 'gpus'; known are sizes, gpu_memory"),
        ("- {sizes: [X], gpu_count: -1}\n", "group 1 (X): gpu_count must be a whole number, 0 or more, got -1"),
        ("- {sizes: [X], gpu_count: true}\n", "gpu_count must be a whole number, 0 or more, got True"),
        ("- {sizes: [X], gpu_memory: 80 GB}\n", "gpu_memory must be text such as `81559 MiB` or `24 GiB`, got '80 GB'"),
        ("- {sizes: [X], gpu_vendor: intel}\n", "gpu_vendor must be one of nvidia, amd, got 'intel'"),
        ("- {sizes: [X], gpu_model: 5}\n", "gpu_model must be text, got 5"),
        ("- sizes: [X]\n- sizes: [x]\n", "group 2: size x is there twice"),
        ("- sizes: [X\n", "not valid YAML"),
        ("- sizes: \x00\n", "not valid YAML"),
    ],
)
def test_a_bad_site_file_is_refused_in_one_line_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    path = site_file(tmp_path, text)
    with pytest.raises(sizes.SizeTableError) as caught:
        sizes.load("HC44rs", [path])
    assert str(caught.value).startswith(f"{path}: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_site_file_says_why(tmp_path: Path) -> None:
    with pytest.raises(sizes.SizeTableError, match="cannot be read: Is a directory"):
        sizes.load("HC44rs", [tmp_path])


def test_nothing_is_imported_or_read_before_a_size_is_asked_for() -> None:
    code = (
        "import sys; from agent import sizes;"
        "assert 'yaml' not in sys.modules;"
        "assert sizes._own_table.cache_info().misses == 0;"
        "sizes.load('HC44rs'); sizes.load('HB120rs_v3');"
        "assert sizes._own_table.cache_info().misses == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
