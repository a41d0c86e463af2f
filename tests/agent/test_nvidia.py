"""Claims about what the system shows of NVIDIA GPUs without the driver's library."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from agent.hw import nvidia
from agent.hw.nvidia import DriverGpu, PciBus

if TYPE_CHECKING:
    from pathlib import Path

# As the modules of R535 and R570 write it, proprietary and open.
PROPRIETARY = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Mar  5 22:42:15 UTC 2024
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = """NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.133.20  Release Build  (dvs-builder@U22-I3)
GCC version:  gcc version 12.3.0
"""
INFORMATION = """Model: \t\t NVIDIA A100-SXM4-40GB
IRQ:   \t\t 289
GPU UUID: \t {uuid}
Video BIOS: \t 92.00.45.00.03
Bus Type: \t PCIe
DMA Size: \t 47 bits
Bus Location: \t 0001:00:00.0
Device Minor: \t {minor}
GPU Firmware: \t 570.133.20
GPU Excluded:\t No
"""
UUID = "GPU-5d2a2ab2-57c1-4a80-9e5d-000000000001"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_function(sys: Path, address: str, vendor: str, kind: str) -> None:
    write(sys / "bus/pci/devices" / address / "vendor", f"{vendor}\n")
    write(sys / "bus/pci/devices" / address / "class", f"{kind}\n")


def write_information(proc: Path, address: str, uuid: str = UUID, minor: str = "3") -> None:
    write(proc / "driver/nvidia/gpus" / address / "information", INFORMATION.format(uuid=uuid, minor=minor))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0001:00:00.0", "0001:00:00.0"),
        ("00000001:00:00.0", "0001:00:00.0"),
        ("0000460E:0A:1F.7", "460e:0a:1f.7"),
        ("00010000:81:00.0", "10000:81:00.0"),
        ("0001:3B:00", "0001:3b:00.0"),
        ("3b:00.1", "0000:3b:00.1"),
        (" 0001:00:00.0\n", "0001:00:00.0"),
        ("", None),
        ("mlx5_0", None),
        ("0001:00:00.8", None),
        ("0001:00:0.0", None),
        ("1:00:00.0", None),
        ("0001:00:00.0.0", None),
    ],
)
def test_an_address_is_the_same_whoever_wrote_it(text: str, address: str | None) -> None:
    assert nvidia.address(text) == address


def test_gpus_on_pci_are_nvidia_functions_that_are_vga_or_3d_controllers(tmp_path: Path) -> None:
    write_function(tmp_path, "0002:00:00.0", "0x10de", "0x030200")
    write_function(tmp_path, "0001:00:00.0", "0x10DE", "0x030000")
    write_function(tmp_path, "0001:00:00.1", "0x10de", "0x040300")  # its audio function
    write_function(tmp_path, "0005:00:00.0", "0x10de", "0x068000")  # NVSwitch
    write_function(tmp_path, "0000:00:08.0", "0x1414", "0x030000")  # Hyper-V's display
    (tmp_path / "bus/pci/devices/0009:00:00.0").mkdir()  # gone between listing and reading
    assert PciBus(tmp_path).gpus() == ["0001:00:00.0", "0002:00:00.0"]


def test_a_share_of_a_gpu_for_a_guest_is_not_a_gpu_of_the_host(tmp_path: Path) -> None:
    for function in range(3):
        write_function(tmp_path, f"0001:00:00.{function}", "0x10de", "0x030200")
    for function in (1, 2):
        (tmp_path / f"bus/pci/devices/0001:00:00.{function}/physfn").symlink_to("../0001:00:00.0")
    assert PciBus(tmp_path).gpus() == ["0001:00:00.0"]


def test_gpus_are_in_the_order_of_their_addresses_also_beyond_four_digits(tmp_path: Path) -> None:
    for address in ("10000:81:00.0", "0002:00:00.0", "ffff:00:00.0"):
        write_function(tmp_path, address, "0x10de", "0x030200")
        write_information(tmp_path, address)
    expected = ["0002:00:00.0", "ffff:00:00.0", "10000:81:00.0"]
    assert PciBus(tmp_path).gpus() == nvidia.driver_addresses(tmp_path) == expected


def test_a_gpu_that_leaves_or_joins_the_bus_is_noticed(tmp_path: Path) -> None:
    write_function(tmp_path, "0001:00:00.0", "0x10de", "0x030200")
    bus = PciBus(tmp_path)
    assert bus.gpus() == ["0001:00:00.0"]
    write_function(tmp_path, "0002:00:00.0", "0x10de", "0x030200")
    assert bus.gpus() == ["0001:00:00.0", "0002:00:00.0"]
    (tmp_path / "bus/pci/devices/0001:00:00.0").rename(tmp_path / "gone")
    assert bus.gpus() == ["0002:00:00.0"]


def test_a_function_is_read_once_and_not_again(tmp_path: Path) -> None:
    write_function(tmp_path, "0001:00:00.0", "0x10de", "0x030200")
    write_function(tmp_path, "0000:00:08.0", "0x1414", "0x030000")
    bus = PciBus(tmp_path)
    bus.gpus()
    for file in tmp_path.glob("bus/pci/devices/*/vendor"):
        file.unlink()
    assert bus.gpus() == ["0001:00:00.0"]


def test_no_pci_in_sysfs_is_not_the_same_as_no_gpu(tmp_path: Path) -> None:
    assert PciBus(tmp_path).gpus() is None
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    assert PciBus(tmp_path).gpus() == []


def test_a_function_that_cannot_be_read_is_the_callers_business(tmp_path: Path) -> None:
    write_function(tmp_path, "0001:00:00.0", "0x10de", "0x030200")
    (tmp_path / "bus/pci/devices/0001:00:00.0/vendor").unlink()
    (tmp_path / "bus/pci/devices/0001:00:00.0/vendor").mkdir()
    with pytest.raises(OSError, match=r".") as caught:
        PciBus(tmp_path).gpus()
    assert caught.value.errno == errno.EISDIR


def test_the_kernel_module_tells_uuid_minor_and_model(tmp_path: Path) -> None:
    write_information(tmp_path, "0002:00:00.0", minor="0")
    write_information(tmp_path, "0001:00:00.0")
    assert nvidia.driver_gpus(tmp_path) == [
        DriverGpu("0001:00:00.0", UUID, 3, "NVIDIA A100-SXM4-40GB"),
        DriverGpu("0002:00:00.0", UUID, 0, "NVIDIA A100-SXM4-40GB"),
    ]


def test_a_uuid_of_question_marks_is_not_known(tmp_path: Path) -> None:
    write_information(tmp_path, "0001:00:00.0", uuid="GPU-????????-????-????-????-????????????")
    assert nvidia.driver_gpu(tmp_path, "0001:00:00.0").uuid is None


def test_a_gpu_whose_information_is_damaged_or_gone_is_still_listed(tmp_path: Path) -> None:
    write(tmp_path / "driver/nvidia/gpus/0001:00:00.0/information", "Device Minor: x\n\n:\nModel\n")
    (tmp_path / "driver/nvidia/gpus/0002:00:00.0").mkdir()
    assert nvidia.driver_gpus(tmp_path) == [DriverGpu("0001:00:00.0"), DriverGpu("0002:00:00.0")]


def test_listing_addresses_reads_no_file(tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia/gpus/0000460E:0A:00.0/information").mkdir(parents=True)
    (tmp_path / "driver/nvidia/gpus/.stray").mkdir()
    assert nvidia.driver_addresses(tmp_path) == ["460e:0a:00.0"]


def test_a_gpu_is_found_under_the_name_the_module_gave_it(tmp_path: Path) -> None:
    write_information(tmp_path, "0000460E:0A:00.0")
    assert nvidia.driver_gpus(tmp_path) == [DriverGpu("460e:0a:00.0", UUID, 3, "NVIDIA A100-SXM4-40GB")]


def test_without_a_driver_there_is_nothing_and_no_error(tmp_path: Path) -> None:
    assert nvidia.driver_addresses(tmp_path) == []
    assert nvidia.driver_gpus(tmp_path) == []
    assert nvidia.device_minors(tmp_path / "none") == []
    assert nvidia.kernel_module_version(tmp_path) is None


def test_device_nodes_are_nvidia_and_digits_only(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia", "nvidia0p1", "xnvidia1", "null"):
        (tmp_path / name).touch()
    assert nvidia.device_minors(tmp_path) == [2, 10]


@pytest.mark.parametrize(("content", "version"), [(PROPRIETARY, "535.161.08"), (OPEN, "570.133.20")])
def test_the_version_of_the_kernel_module_is_read_whatever_its_kind(tmp_path: Path, content: str, version: str) -> None:
    write(tmp_path / "driver/nvidia/version", content)
    assert nvidia.kernel_module_version(tmp_path) == version


@pytest.mark.parametrize("content", ["", "NVRM version:\n", "GCC version: gcc 11.4.0\n", "NVRM version: x86_64\n"])
def test_a_version_file_without_a_version_tells_none(tmp_path: Path, content: str) -> None:
    write(tmp_path / "driver/nvidia/version", content)
    assert nvidia.kernel_module_version(tmp_path) is None
