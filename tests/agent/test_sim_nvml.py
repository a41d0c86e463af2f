"""The stand-in for the driver's library, called by the real binding in this process, and compared with the C one."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from agent.sim import nvml
from tests.fakenvml import answers
from tests.fakenvml.library import ROOT, ask, build, functions, state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999
ALL_LINKS = 0xFFFFFFFF
ONES_32 = 2**32 - 1
ONES_64 = 2**64 - 1

Told = dict[str, str | int]

# Function and arguments behind the handle, what the state says of the GPU, and what the binding makes of it.
FACTS: list[tuple[str, tuple[int, ...], Told, Any]] = [
    ("Name", (), {"name": "NVIDIA A100 = fast"}, "NVIDIA A100 = fast"),
    ("UUID", (), {"uuid": "GPU-1"}, "GPU-1"),
    ("Serial", (), {"serial": "1560821000001"}, "1560821000001"),
    ("VbiosVersion", (), {"vbios": "92.00.45.00.03"}, "92.00.45.00.03"),
    ("InforomImageVersion", (), {"inforom": "G506.0200.00.04"}, "G506.0200.00.04"),
    ("BoardPartNumber", (), {"part_number": "692-2G506-0200-002"}, "692-2G506-0200-002"),
    ("Brand", (), {"brand": 14}, 14),
    ("Architecture", (), {"architecture": 7}, 7),
    ("MinorNumber", (), {"minor": "08"}, 8),
    ("NumaNodeId", (), {"numa_node": -1}, -1),
    ("CudaComputeCapability", (), {"cuda_capability": "8 6"}, [8, 6]),
    ("PersistenceMode", (), {"persistence_mode": 1}, 1),
    ("PerformanceState", (), {"performance_state": 2}, 2),
    ("ComputeMode", (), {"compute_mode": 3}, 3),
    ("VirtualizationMode", (), {"virtualization_mode": 2}, 2),
    ("MigMode", (), {"mig_mode": "1 0"}, [1, 0]),
    ("UtilizationRates", (), {"utilization": "97 45"}, {"gpu": 97, "memory": 45}),
    ("UtilizationRates", (), {"utilization": f"{ONES_32} 808334905"}, {"gpu": ONES_32, "memory": 808334905}),
    (
        "MemoryInfo",
        (),
        {"memory": "40000000000 6 4000 30000000000"},
        {"total": 4 * 10**10, "free": 4000, "used": 30000000006},
    ),
    (
        "MemoryInfo",
        (pynvml.nvmlMemory_v2,),
        {"memory": "40000000000 6 4000 30000000000"},
        {"version": pynvml.nvmlMemory_v2, "total": 4 * 10**10, "reserved": 6, "free": 4000, "used": 3 * 10**10},
    ),
    ("Temperature", (0,), {"temperature": 47}, 47),
    ("TemperatureV", (0,), {"temperature": -7}, -7),
    ("PowerUsage", (), {"power_mw": 311_000}, 311_000),
    ("EnforcedPowerLimit", (), {"power_limit_mw.enforced": 301_000}, 301_000),
    ("PowerManagementLimit", (), {"power_limit_mw.requested": 302_000}, 302_000),
    ("PowerManagementDefaultLimit", (), {"power_limit_mw.default": 303_000}, 303_000),
    (
        "PowerManagementLimitConstraints",
        (),
        {"power_limit_mw.min": 101_000, "power_limit_mw.max": 404_000},
        [101_000, 404_000],
    ),
    ("TotalEnergyConsumption", (), {"energy_mj": 2**40 + 7}, 2**40 + 7),
    *(
        (function, (domain,), Told({f"{key}.{name}": 1000 + domain}), 1000 + domain)
        for function, key in (("ClockInfo", "clock_mhz"), ("MaxClockInfo", "clock_max_mhz"))
        for domain, name in enumerate(("graphics", "sm", "mem", "video"))
    ),
    ("CurrentClocksEventReasons", (), {"event_reasons": "0x4000000044"}, 0x4000000044),
    ("CurrentClocksThrottleReasons", (), {"event_reasons": "0x44"}, 0x44),
    ("SupportedClocksEventReasons", (), {"event_reasons_supported": "0x1ff"}, 0x1FF),
    ("SupportedClocksThrottleReasons", (), {"event_reasons_supported": "0x1ff"}, 0x1FF),
    ("EccMode", (), {"ecc_mode": "1 0"}, [1, 0]),
    *(
        ("TotalEccErrors", (kind, life), Told({f"ecc_total.{kind_name}.{life_name}": 2**33 + kind}), 2**33 + kind)
        for kind, kind_name in enumerate(("corrected", "uncorrected"))
        for life, life_name in enumerate(("volatile", "aggregate"))
    ),
    ("RemappedRows", (), {"remapped_rows": "21 22 1 0"}, [21, 22, 1, 0]),
    ("CurrPcieLinkGeneration", (), {"pcie": "1 2 3 4"}, 1),
    ("CurrPcieLinkWidth", (), {"pcie": "1 2 3 4"}, 2),
    ("MaxPcieLinkGeneration", (), {"pcie": "1 2 3 4"}, 3),
    ("MaxPcieLinkWidth", (), {"pcie": "1 2 3 4"}, 4),
    ("PcieReplayCounter", (), {"pcie_replays": 31}, 31),
    ("PcieThroughput", (0,), {"pcie_throughput_kib": "51 52"}, 51),
    ("PcieThroughput", (1,), {"pcie_throughput_kib": "51 52"}, 52),
    ("NvLinkState", (0,), {"nvlink.0.state": 1}, 1),
    ("NvLinkState", (11,), {"nvlink.0.state": 1, "nvlink.11.state": 0}, 0),
    (
        "PciInfo",
        (),
        {"pci": "000b:1a:02.0", "pci_device_id": "0x20b010de", "pci_subsystem_id": "0x134f10de"},
        {
            "busIdLegacy": "000B:1A:02.0",
            "domain": 0xB,
            "bus": 0x1A,
            "device": 2,
            "pciDeviceId": 0x20B010DE,
            "pciSubSystemId": 0x134F10DE,
            "busId": "0000000B:1A:02.0",
        },
    ),
]


class Driver:
    """The binding upon the stand-in; `set` replaces the whole state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set({})
        nvml.install(path)
        pynvml.nvmlInit()

    def set(self, mapping: Mapping[str, str | int]) -> None:
        nvml.write(self.path, mapping)

    def gpus(self, *gpus: Mapping[str, str | int]) -> None:
        """Replace the state by that of these GPUs, whose keys go without `gpu.N.`."""
        keys = {f"gpu.{gpu}.{key}": value for gpu, told in enumerate(gpus) for key, value in told.items()}
        self.set({"gpu.count": len(gpus), **keys})


@pytest.fixture
def binding() -> Iterator[None]:
    """Leave the binding as it was found: other tests put other libraries under it."""
    kept = pynvml.nvmlLib, pynvml._nvmlLib_refcount, dict(pynvml._nvmlGetFunctionPointer_cache)
    yield
    pynvml.nvmlLib, pynvml._nvmlLib_refcount, functions = kept
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml._nvmlGetFunctionPointer_cache.update(functions)
    answers._handles.clear()


@pytest.fixture
def driver(tmp_path: Path, binding: None) -> Driver:
    return Driver(tmp_path / "nvml.state")


def plain(value: Any) -> Any:
    """Make structs comparable."""
    if isinstance(value, ctypes.Structure):
        return {name: getattr(value, name) for name, *_ in value._fields_}
    return list(value) if isinstance(value, tuple) else value


def asked(function: str, handle: Any, *arguments: Any) -> Any:
    return plain(getattr(pynvml, f"nvmlDeviceGet{function}")(handle, *arguments))


def code_of(call: Callable[[], object]) -> int:
    with pytest.raises(pynvml.NVMLError) as raised:
        call()
    return int(raised.value.value)


def handle_of(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


# ---- Facts ----


@pytest.mark.parametrize(("function", "arguments", "told", "expected"), FACTS)
def test_each_function_tells_what_the_state_says_of_that_gpu(
    driver: Driver, function: str, arguments: tuple[int, ...], told: Told, expected: Any
) -> None:
    driver.gpus({}, told, {})
    assert asked(function, handle_of(1), *arguments) == expected
    for other in (0, 2):
        assert code_of(partial(asked, function, handle_of(other), *arguments)) == NOT_SUPPORTED


def test_the_system_tells_its_versions(driver: Driver) -> None:
    functions = ("DriverVersion", "NVMLVersion", "CudaDriverVersion", "CudaDriverVersion_v2")
    calls = [getattr(pynvml, f"nvmlSystemGet{name}") for name in functions]
    assert [code_of(call) for call in calls] == [NOT_SUPPORTED] * 4
    assert code_of(pynvml.nvmlDeviceGetCount) == NOT_SUPPORTED
    versions: Told = {"driver.version": "570.133.20", "driver.nvml_version": "12.570.133.20"}
    driver.set(versions | {"driver.cuda_version": 12080, "gpu.count": 0})
    assert [call() for call in calls] == ["570.133.20", "12.570.133.20", 12080, 12080]
    assert pynvml.nvmlDeviceGetCount() == 0


def test_handles_are_found_by_index_uuid_and_address(driver: Driver) -> None:
    driver.gpus({"uuid": "GPU-a"}, {"uuid": "GPU-b", "pci": "000b:00:00.0"})
    for handle in (
        handle_of(1),
        pynvml.nvmlDeviceGetHandleByUUID("GPU-b"),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000000B:00:00.0"),
        pynvml.nvmlDeviceGetHandleByPciBusId("000b:00:00.0"),
    ):
        assert (asked("UUID", handle), asked("Index", handle)) == ("GPU-b", 1)
    assert code_of(lambda: handle_of(2)) == INVALID_ARGUMENT
    assert code_of(lambda: pynvml.nvmlDeviceGetHandleByUUID("GPU-c")) == NOT_FOUND
    for nowhere in ("0002:00:00.0", "nowhere"):
        assert code_of(partial(pynvml.nvmlDeviceGetHandleByPciBusId, nowhere)) == NOT_FOUND


def test_field_values_have_their_own_type_scope_and_code(driver: Driver) -> None:
    fields: Told = {
        "field.1": "d:0.25",
        "field.2": f"ui:{ONES_32}",
        "field.3": f"ul:{2**63}",
        "field.4": f"ull:{ONES_64}",
        "field.5": "sll:-5000000000",
        "field.6": "si:-6",
        "field.7": "us:65535",
        "field.8": "ret:15",
        "field.9": "ui:90",
        "field.9.1": "ui:91",
        f"field.9.{ALL_LINKS}": "ui:99",
        "field.10.1": "ui:101",
    }
    driver.gpus({}, fields)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, (9, 1), (9, ALL_LINKS), (9, 2), 10]
    values = pynvml.nvmlDeviceGetFieldValues(handle_of(1), ids)
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    good = [0.25, ONES_32, 2**63, ONES_64, -5_000_000_000, -6, 65535]
    assert [getattr(value.value, members[value.valueType]) for value in values[:7]] == good
    assert [value.valueType for value in values[:7]] == list(range(7))
    assert [value.value.uiVal for value in values[8:11]] == [90, 91, 99]
    assert [value.nvmlReturn for value in values] == [0] * 7 + [15, 0, 0, 0, NOT_SUPPORTED, NOT_SUPPORTED]
    assert [(value.fieldId, value.scopeId) for value in values[9:11]] == [(9, 1), (9, ALL_LINKS)]
    assert abs(values[0].timestamp / 1e6 - time.time()) < 60


@pytest.mark.parametrize("given", [lambda array: array, ctypes.byref, ctypes.pointer])
def test_a_prepared_array_of_fields_is_filled_again_and_again(driver: Driver, given: Callable[[Any], Any]) -> None:
    array = (pynvml.c_nvmlFieldValue_t * 2)()
    array[0].fieldId, array[1].fieldId = 82, 83
    driver.gpus({"field.82": "ui:52", "field.83": "ull:7"})
    function, handle = pynvml.nvmlLib.nvmlDeviceGetFieldValues, handle_of(0)
    assert function(handle, 2, given(array)) == 0
    assert [value.value.ullVal for value in array] == [52, 7]
    driver.gpus({"field.82": "ui:53"})
    assert function(handle, ctypes.c_int(2), given(array)) == 0
    assert [value.nvmlReturn for value in array] == [0, NOT_SUPPORTED]
    assert [value.value.ullVal for value in array] == [53, 0], "nothing may be left of an earlier answer"


def test_only_the_given_number_of_fields_is_touched(driver: Driver) -> None:
    array = (pynvml.c_nvmlFieldValue_t * 2)()
    driver.gpus({"field.0": "ui:52"})
    assert pynvml.nvmlLib.nvmlDeviceGetFieldValues(handle_of(0), 1, array) == 0
    assert [value.value.uiVal for value in array] == [52, 0]
    assert array[1].timestamp == 0


def test_a_text_ends_where_it_ends(driver: Driver) -> None:
    driver.gpus({"name": "A100"})
    buffer = ctypes.create_string_buffer(b"x" * 8)
    assert pynvml.nvmlLib.nvmlDeviceGetName(handle_of(0), buffer, 5) == 0
    assert buffer.raw == b"A100\0xxx\0"


def test_links_end_where_the_state_names_no_more(driver: Driver) -> None:
    driver.gpus({"nvlink.0.state": 1, "nvlink.1.state": 0}, {})
    assert [asked("NvLinkState", handle_of(0), link) for link in (0, 1)] == [1, 0]
    assert code_of(lambda: asked("NvLinkState", handle_of(0), 2)) == INVALID_ARGUMENT
    assert code_of(lambda: asked("NvLinkState", handle_of(1), 0)) == NOT_SUPPORTED


def test_arguments_are_checked(driver: Driver) -> None:
    driver.set(state(1))
    handle = handle_of(0)
    for function, arguments in (
        *(("Temperature", (1,)), ("TemperatureV", (1,)), ("ClockInfo", (4,)), ("MaxClockInfo", (-1,))),
        *(("TotalEccErrors", (2, 0)), ("TotalEccErrors", (0, 2)), ("PcieThroughput", (2,)), ("FieldValues", ([],))),
    ):
        assert code_of(partial(asked, function, handle, *arguments)) == INVALID_ARGUMENT, function
    assert code_of(lambda: asked("MemoryInfo", handle, 0x03000028)) == ARGUMENT_VERSION_MISMATCH
    reading = pynvml.c_nvmlTemperature_v1_t(pynvml.nvmlTemperature_v1 + 1)
    assert pynvml.nvmlLib.nvmlDeviceGetTemperatureV(handle, ctypes.byref(reading)) == ARGUMENT_VERSION_MISMATCH
    assert code_of(lambda: asked("Name", None)) == INVALID_ARGUMENT
    assert pynvml.nvmlLib.nvmlDeviceGetPowerUsage(handle, None) == INVALID_ARGUMENT
    assert pynvml.nvmlLib.nvmlDeviceGetSerial(handle, ctypes.create_string_buffer(8), 8) == INSUFFICIENT_SIZE


def test_a_state_that_makes_no_sense_is_an_unknown_error(driver: Driver) -> None:
    fields = {"field.1": "ui:many", "field.2": "5", "field.3": "int:5", "field.4": "d:x"}
    driver.gpus({"power_mw": "many", "pcie": "4", "pci": "there", "brand": "", **fields})
    for function in ("PowerUsage", "CurrPcieLinkWidth", "PciInfo", "Brand"):
        assert code_of(partial(asked, function, handle_of(0))) == UNKNOWN, function
    values = pynvml.nvmlDeviceGetFieldValues(handle_of(0), [1, 2, 3, 4])
    assert [value.nvmlReturn for value in values] == [UNKNOWN] * 4


def test_a_function_it_does_not_have_is_not_found(driver: Driver) -> None:
    driver.gpus({})
    assert code_of(lambda: pynvml.nvmlDeviceGetFanSpeed(handle_of(0))) == FUNCTION_NOT_FOUND
    assert not hasattr(pynvml.nvmlLib, "nvmlDeviceGetWeather")


def test_errors_have_the_names_the_driver_gives_them(driver: Driver) -> None:
    assert [pynvml.nvmlErrorString(code) for code in (0, GPU_IS_LOST, 30, UNKNOWN, -1)] == [
        *("Success", "GPU is lost", "Reset Type Not Supported", "Unknown Error", "Unknown Error"),
    ]


# ---- Initialisation ----


def test_nothing_answers_before_init_and_after_as_many_shutdowns(driver: Driver) -> None:
    driver.gpus({"power_mw": 1})
    handle = handle_of(0)
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 1
    pynvml.nvmlShutdown()
    for call in (
        pynvml.nvmlShutdown,
        pynvml.nvmlDeviceGetCount,
        pynvml.nvmlSystemGetDriverVersion,
        partial(handle_of, 0),
        partial(asked, "PowerUsage", handle),
    ):
        assert code_of(call) == UNINITIALIZED, call


def test_init_fails_as_the_state_says(driver: Driver) -> None:
    pynvml.nvmlShutdown()
    for code in (4, DRIVER_NOT_LOADED, 18, UNKNOWN):
        driver.set({"init.return": code})
        assert code_of(pynvml.nvmlInit) == code
        assert code_of(pynvml.nvmlDeviceGetCount) == UNINITIALIZED
    driver.gpus({})
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 1


@pytest.mark.usefixtures("binding")
def test_without_a_state_file_no_driver_is_loaded(tmp_path: Path) -> None:
    nvml.install(tmp_path / "none")
    assert code_of(pynvml.nvmlInit) == DRIVER_NOT_LOADED


def test_a_state_file_that_vanishes_takes_the_facts_with_it(driver: Driver) -> None:
    driver.gpus({"power_mw": 1})
    handle = handle_of(0)
    driver.path.unlink()
    assert code_of(lambda: asked("PowerUsage", handle)) == NOT_SUPPORTED
    driver.gpus({"power_mw": 2})
    assert asked("PowerUsage", handle) == 2


def test_install_takes_the_place_of_an_earlier_library(driver: Driver, tmp_path: Path) -> None:
    driver.set({"driver.version": "1"})
    assert pynvml.nvmlSystemGetDriverVersion() == "1"
    other = tmp_path / "other"
    nvml.write(other, {"driver.version": "2"})
    nvml.install(other)
    pynvml.nvmlInit()
    assert pynvml.nvmlSystemGetDriverVersion() == "2"


def test_install_travels_to_another_process(tmp_path: Path) -> None:
    path = tmp_path / "nvml.state"
    nvml.write(path, {"gpu.count": 3})
    program = (
        "import pickle, sys; pickle.load(sys.stdin.buffer)(); "
        "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(partial(nvml.install, path)),
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=50,
    )
    assert (done.stdout, done.stderr) == (b"3\n", b"")


# ---- Faults ----


def test_a_lost_gpu_fails_in_every_call_with_its_handle(driver: Driver) -> None:
    told: Told = {"power_mw": 1, "uuid": "GPU-a", "field.82": "ui:1"}
    driver.gpus(told, told | {"return.*": GPU_IS_LOST})
    well, lost = handle_of(0), handle_of(1)
    for function, arguments, _, _ in [*FACTS, ("Index", (), {}, 0), ("FieldValues", ([82],), {}, 0)]:
        assert code_of(partial(asked, function, lost, *arguments)) == GPU_IS_LOST, function
    assert (asked("PowerUsage", well), pynvml.nvmlDeviceGetCount()) == (1, 2)


def test_one_function_fails_or_is_spared(driver: Driver) -> None:
    told: Told = {"power_mw": 1, "uuid": "GPU-a"}
    driver.gpus(
        told | {"return.nvmlDeviceGetPowerUsage": UNKNOWN},
        told | {"return.*": GPU_IS_LOST, "return.nvmlDeviceGetUUID": 0},
    )
    assert code_of(lambda: asked("PowerUsage", handle_of(0))) == UNKNOWN
    assert asked("UUID", handle_of(0)) == asked("UUID", handle_of(1)) == "GPU-a"
    assert code_of(lambda: asked("PowerUsage", handle_of(1))) == GPU_IS_LOST


def test_a_look_up_fails_for_one_gpu_only(driver: Driver) -> None:
    driver.gpus({}, {"uuid": "GPU-b", "return.nvmlDeviceGetHandleByIndex_v2": UNKNOWN})
    handle_of(0)
    assert code_of(lambda: handle_of(1)) == UNKNOWN
    assert asked("Index", pynvml.nvmlDeviceGetHandleByUUID("GPU-b")) == 1


def test_indices_close_up_where_a_gpu_is_absent(driver: Driver) -> None:
    gpus: list[Told] = [{"uuid": f"GPU-{gpu}", "pci": f"000{gpu}:00:00.0"} for gpu in range(3)]
    driver.gpus(*gpus)
    handles = [handle_of(index) for index in range(3)]
    gpus[1]["absent"] = 1
    driver.gpus(*gpus)
    assert pynvml.nvmlDeviceGetCount() == 2
    assert [asked("UUID", handle_of(index)) for index in range(2)] == ["GPU-0", "GPU-2"]
    assert [asked("Index", handles[gpu]) for gpu in (0, 2)] == [0, 1], "a handle stays with its GPU"
    assert code_of(lambda: handle_of(2)) == INVALID_ARGUMENT
    assert code_of(lambda: pynvml.nvmlDeviceGetHandleByUUID("GPU-1")) == NOT_FOUND
    assert code_of(lambda: pynvml.nvmlDeviceGetHandleByPciBusId("0001:00:00.0")) == NOT_FOUND
    assert code_of(lambda: asked("UUID", handles[1])) == GPU_IS_LOST


def test_calls_hang_as_long_as_the_state_says(driver: Driver) -> None:
    told: Told = {"power_mw": 1, "uuid": "GPU-a", "name": "A100"}
    driver.gpus(
        told | {"hang_ms.nvmlDeviceGetPowerUsage": 60}, told | {"hang_ms.*": 60, "hang_ms.nvmlDeviceGetName": 0}
    )
    hanging: list[Callable[[], object]] = [
        lambda: asked("PowerUsage", handle_of(0)),
        lambda: handle_of(1),
        lambda: pynvml.nvmlDeviceGetHandleByPciBusId("0002:00:00.0"),
    ]
    driver.set({**nvml.read(driver.path).values, "gpu.1.pci": "0002:00:00.0"})
    for call in hanging:
        begin_s = time.monotonic()
        call()
        assert time.monotonic() - begin_s >= 0.06
    driver.gpus({"pcie_throughput_kib": "1 2"})
    handle, begin_s = handle_of(0), time.monotonic()
    asked("PcieThroughput", handle, 0)
    assert time.monotonic() - begin_s >= 0.02, "as long as the driver counts"
    pynvml.nvmlShutdown()
    driver.set({"init.hang_ms": 60})
    begin_s = time.monotonic()
    pynvml.nvmlInit()
    assert time.monotonic() - begin_s >= 0.06


def test_a_hang_leaves_other_threads_and_other_calls_alone(driver: Driver) -> None:
    for_ever_ms = 600_000
    driver.gpus({"power_mw": 1}, {"hang_ms.nvmlDeviceGetName": for_ever_ms, "power_mw": 2})
    well, stuck = handle_of(0), handle_of(1)
    threading.Thread(target=asked, args=("Name", stuck), daemon=True).start()
    assert (asked("PowerUsage", well), asked("PowerUsage", stuck)) == (1, 2)


def test_no_signal_ends_a_hang(driver: Driver) -> None:
    driver.gpus({"power_mw": 1, "hang_ms.nvmlDeviceGetPowerUsage": 100})
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _frame: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    begin_s = time.monotonic()
    try:
        assert asked("PowerUsage", handle_of(0)) == 1
    finally:
        took_s = time.monotonic() - begin_s
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert took_s >= 0.1


def test_a_gpu_that_vanishes_during_a_hang_is_lost_after_it(driver: Driver) -> None:
    driver.gpus({"power_mw": 1, "hang_ms.nvmlDeviceGetPowerUsage": 300})
    handle = handle_of(0)
    codes: list[int] = []
    caller = threading.Thread(target=lambda: codes.append(code_of(lambda: asked("PowerUsage", handle))))
    caller.start()
    driver.gpus({"power_mw": 1, "absent": 1})
    caller.join()
    assert codes == [GPU_IS_LOST]


def test_every_kth_call_gives_garbage(driver: Driver) -> None:
    told: Told = {"power_mw": 7, "name": "A100", "garbage.nvmlDeviceGetPowerUsage": 3}
    driver.gpus(told, told)
    first, second = handle_of(0), handle_of(1)
    assert [asked("PowerUsage", first) for _ in range(2)] == [7, 7]
    assert asked("PowerUsage", second) == 7, "calls are counted for each GPU by itself"
    driver.gpus(told | {"energy_mj": 1}, told)
    assert [asked("PowerUsage", first) for _ in range(4)] == [ONES_32, 7, 7, ONES_32]
    assert asked("Name", first) == "A100"


def test_garbage_is_all_ones_in_every_output(driver: Driver) -> None:
    driver.gpus({"garbage.*": 1})
    handle = handle_of(0)
    memory = dict.fromkeys(("total", "reserved", "free", "used"), ONES_64)
    assert asked("UtilizationRates", handle) == {"gpu": ONES_32, "memory": ONES_32}
    assert asked("MemoryInfo", handle, pynvml.nvmlMemory_v2) == {**memory, "version": pynvml.nvmlMemory_v2}
    assert asked("TotalEnergyConsumption", handle) == ONES_64
    assert asked("TemperatureV", handle, 0) == -1
    assert asked("RemappedRows", handle) == [ONES_32] * 4
    assert asked("Index", handle) == ONES_32
    (field,) = pynvml.nvmlDeviceGetFieldValues(handle, [83])
    assert (field.fieldId, field.nvmlReturn, field.valueType) == (83, 0, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
    assert field.value.ullVal == ONES_64
    for function in ("Name", "PciInfo"):
        with pytest.raises(UnicodeDecodeError):
            asked(function, handle)["busId"]


# ---- The state file ----


def test_a_change_of_the_state_shows_at_the_next_call(driver: Driver) -> None:
    driver.gpus({"power_mw": 1})
    handle = handle_of(0)
    for power_mw in range(1, 10):  # same size, and inode numbers that are used again
        driver.gpus({"power_mw": power_mw})
        assert asked("PowerUsage", handle) == power_mw


def test_an_unchanged_state_is_not_read_again(driver: Driver) -> None:
    driver.gpus({"power_mw": 1})
    assert asked("PowerUsage", handle_of(0)) == 1
    stamp = driver.path.stat()
    driver.path.write_text(driver.path.read_text().replace("1\n", "2\n"))
    os.utime(driver.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert asked("PowerUsage", handle_of(0)) == 1
    os.utime(driver.path)
    assert asked("PowerUsage", handle_of(0)) == 2


def test_the_state_may_have_comments_and_keys_nobody_knows(tmp_path: Path) -> None:
    path = tmp_path / "nvml.state"
    path.write_text("# gpu.count = 5\n\n  gpu.count=2  \nno key\nweather = wet\ngpu.0.name = A = B\ngpu.0.name = C\n")
    read = nvml.read(path)
    assert (read.values, read.gpus) == ({"gpu.count": "2", "weather": "wet", "gpu.0.name": "C"}, (0, 1))
    assert (read.number("gpu.count"), read.number("weather"), read.number("gpu.1.minor")) == (2, None, None)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nvml.state"
    content = state(8) | {"gpu.3.absent": 1, "gpu.4.name": "Größe"}
    nvml.write(path, content)
    read = nvml.read(path)
    assert read.values == {key: str(value) for key, value in content.items()}
    assert read.gpus == (0, 1, 2, 4, 5, 6, 7)


def test_the_state_is_replaced_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "nvml.state"
    nvml.write(path, {"gpu.count": 1})
    with path.open() as reader:
        nvml.write(path, {"gpu.count": 2})
        assert reader.read() == "gpu.count = 1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_no_two_states_have_the_same_stamp(tmp_path: Path) -> None:
    path = tmp_path / "nvml.state"
    stamps = set()
    for _ in range(50):  # many within one tick of the clock that stamps files
        nvml.write(path, {"gpu.count": 1})
        stamps.add(path.stat().st_mtime_ns)
    assert len(stamps) == 50


def test_no_state_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        nvml.read(tmp_path / "none")


# ---- The stand-in and the C library ----

TWO = state(2)
STATES: dict[str, Told] = {
    "healthy": TWO,
    "each number its own": TWO | {f"gpu.1.{key}": value for _, _, told, _ in FACTS for key, value in told.items()},
    "nothing known": {"gpu.count": 2},
    "no GPUs known": {},
    "one lost": TWO | {"gpu.0.return.*": GPU_IS_LOST, "gpu.0.return.nvmlDeviceGetUUID": 0},
    "a failing look-up": TWO | {"gpu.1.return.nvmlDeviceGetHandleByIndex_v2": UNKNOWN},
    "one absent": TWO | {"gpu.0.absent": 1},
    "fewer than there were": TWO | {"gpu.count": 1},
    "garbage": TWO | {f"gpu.1.garbage.nvmlDeviceGet{name}": 2 for name in ("PowerUsage", "FieldValues", "Index")},
    "no sense": TWO
    | {"gpu.0.power_mw": "many", "gpu.0.pcie": "4", "gpu.0.serial": "9" * 30, "gpu.0.pci": "x", "gpu.0.name": ""}
    | {"gpu.1.field.74": "ui:many", "gpu.1.field.75": "5", "gpu.1.field.82": "int:5", "gpu.1.absent": "no"},
    "odd numbers": TWO
    | {"gpu.0.power_mw": "0x10", "gpu.0.minor": "010", "gpu.0.temperature": "-3", "gpu.0.energy_mj": ONES_64}
    | {"gpu.0.pci_device_id": ONES_64, "gpu.1.pci": "12345678:9a:1f.7"}
    | {"gpu.1.field.82": "si:-3", "gpu.1.field.83": "d:1.5", "gpu.1.field.94": "us:65537", "gpu.1.field.230": "ret:9"},
}


def every_call() -> Iterator[list[Any]]:
    """Yield every function of every GPU as a step of tests/fakenvml/answers.py, with right and with wrong arguments."""
    yield from ([f"nvmlSystemGet{name}"] for name in ("DriverVersion", "NVMLVersion", "CudaDriverVersion"))
    yield from (["nvmlSystemGetCudaDriverVersion_v2"], ["nvmlDeviceGetCount"])
    yield from (["nvmlErrorString", code] for code in (*range(33), UNKNOWN))
    fields = [*range(3, 7), *range(74, 80), 82, 83, 91, 94, *range(142, 146), 185, 186, [186, 1], 230]
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        *(("ClockInfo", (4,)), ("Temperature", (1,)), ("TemperatureV", (1,)), ("NvLinkState", (12,))),
        *(("TotalEccErrors", (2, 0)), ("MemoryInfo", (0x03000028,)), ("FieldValues", ([],))),
    ]
    for gpu in ("gpu:0", "gpu:1"):
        facts: list[tuple[str, tuple[Any, ...]]] = [(function, arguments) for function, arguments, _, _ in FACTS]
        facts += [("FieldValues", (fields + [[field, ALL_LINKS] for field in range(138, 142)],)), ("Index", ())] * 2
        for function, arguments in [*facts, *wrong]:
            yield [f"nvmlDeviceGet{function}", gpu, *arguments]
    yield from (["nvmlDeviceGetHandleByIndex", index] for index in range(3))
    yield from (["nvmlDeviceGetHandleByUUID", TWO[f"gpu.{gpu}.uuid"]] for gpu in range(2))
    yield from (["nvmlDeviceGetHandleByPciBusId", TWO[f"gpu.{gpu}.pci"]] for gpu in range(2))


def comparable(step: list[Any], answer: dict[str, Any]) -> tuple[str, str]:
    told = {key: value for key, value in answer.items() if key != "ms"}
    if "Handle" in step[0] and "value" in told:
        told["value"] = "a handle"  # each library has its own
    return str(step), json.dumps(told)  # as text, since garbage may be a NaN


def test_both_libraries_have_the_same_functions(tmp_path: Path) -> None:
    for name in functions():
        assert hasattr(nvml.Library(tmp_path), name), name
    assert set(nvml.Library(tmp_path)._functions) == functions()


@pytest.mark.parametrize("name", STATES)
def test_both_libraries_answer_the_same(driver: Driver, tmp_path: Path, name: str) -> None:
    library = build(tmp_path / "lib")
    driver.set(STATES[name])
    steps = list(every_call())
    of_c = ask(library, driver.path, *steps)
    here = [answers._answer(*step) for step in steps]
    assert list(map(comparable, steps, here)) == list(map(comparable, steps, of_c))
