"""The stand-in for the driver's library, asked by the real binding: facts, absence, and each fault."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.fakenvml.library import ALL_LINKS, ask, build, functions, start, state, write_state

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
Step = list[Any]
"""A call of the binding: its name and its arguments (tests/fakenvml/answers.py)."""

ONES_32 = 2**32 - 1
ONES_64 = 2**64 - 1
HANGS_FOR_EVER_MS = 600_000  # longer than any test: who waits for it fails

# Every number another one, so that none can be taken for its neighbour.
DISTINCT: dict[str, str | int] = {
    "gpu.1.brand": 14,
    "gpu.1.minor": 5,
    "gpu.1.numa_node": -1,
    "gpu.1.cuda_capability": "8 6",
    "gpu.1.persistence_mode": 1,
    "gpu.1.performance_state": 2,
    "gpu.1.compute_mode": 3,
    "gpu.1.mig_mode": "1 0",
    "gpu.1.virtualization_mode": 2,
    "gpu.1.memory": "40000000000 600000000 9400000000 30000000000",
    "gpu.1.temperature": 47,
    "gpu.1.power_mw": 311_000,
    "gpu.1.power_limit_mw.enforced": 301_000,
    "gpu.1.power_limit_mw.requested": 302_000,
    "gpu.1.power_limit_mw.default": 303_000,
    "gpu.1.power_limit_mw.min": 101_000,
    "gpu.1.power_limit_mw.max": 404_000,
    "gpu.1.energy_mj": 2**40 + 7,
    "gpu.1.clock_mhz.graphics": 1001,
    "gpu.1.clock_mhz.sm": 1002,
    "gpu.1.clock_mhz.mem": 1003,
    "gpu.1.clock_mhz.video": 1004,
    "gpu.1.clock_max_mhz.graphics": 1101,
    "gpu.1.clock_max_mhz.sm": 1102,
    "gpu.1.clock_max_mhz.mem": 1103,
    "gpu.1.clock_max_mhz.video": 1104,
    "gpu.1.event_reasons": "0x44",
    "gpu.1.event_reasons_supported": "0x1ff",
    "gpu.1.ecc_mode": "1 0",
    "gpu.1.ecc_total.corrected.volatile": 11,
    "gpu.1.ecc_total.corrected.aggregate": 2**33,
    "gpu.1.ecc_total.uncorrected.volatile": 13,
    "gpu.1.ecc_total.uncorrected.aggregate": 14,
    "gpu.1.remapped_rows": "21 22 1 0",
    "gpu.1.pcie": "1 2 3 4",
    "gpu.1.pcie_replays": 31,
    "gpu.1.pcie_throughput_kib": "51 52",
    "gpu.1.nvlink.1.state": 0,
}
SYSTEM: list[tuple[Step, Any]] = [
    (["nvmlSystemGetDriverVersion"], "570.133.20"),
    (["nvmlSystemGetNVMLVersion"], "12.570.133.20"),
    (["nvmlSystemGetCudaDriverVersion"], 12080),
    (["nvmlSystemGetCudaDriverVersion_v2"], 12080),
    (["nvmlDeviceGetCount"], 8),
]
# What is asked of the GPU with index 1, and what DISTINCT makes of it.
GPU: list[tuple[Step, Any]] = [
    (["nvmlDeviceGetName"], "NVIDIA A100-SXM4-40GB"),
    (["nvmlDeviceGetUUID"], "GPU-00000001-57c1-4a80-9e5d-00000000a100"),
    (["nvmlDeviceGetSerial"], "1560821000001"),
    (["nvmlDeviceGetVbiosVersion"], "92.00.45.00.03"),
    (["nvmlDeviceGetInforomImageVersion"], "G506.0200.00.04"),
    (["nvmlDeviceGetBoardPartNumber"], "692-2G506-0200-002"),
    (["nvmlDeviceGetBrand"], 14),
    (["nvmlDeviceGetArchitecture"], 7),
    (["nvmlDeviceGetMinorNumber"], 5),
    (["nvmlDeviceGetNumaNodeId"], -1),
    (["nvmlDeviceGetCudaComputeCapability"], [8, 6]),
    (["nvmlDeviceGetPersistenceMode"], 1),
    (["nvmlDeviceGetPerformanceState"], 2),
    (["nvmlDeviceGetComputeMode"], 3),
    (["nvmlDeviceGetMigMode"], [1, 0]),
    (["nvmlDeviceGetVirtualizationMode"], 2),
    (["nvmlDeviceGetUtilizationRates"], {"gpu": 97, "memory": 45}),
    (["nvmlDeviceGetMemoryInfo"], {"total": 40_000_000_000, "free": 9_400_000_000, "used": 30_600_000_000}),
    (
        ["nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2],
        {
            "version": pynvml.nvmlMemory_v2,
            "total": 40_000_000_000,
            "reserved": 600_000_000,
            "free": 9_400_000_000,
            "used": 30_000_000_000,
        },
    ),
    (["nvmlDeviceGetTemperature", 0], 47),
    (["nvmlDeviceGetTemperatureV", 0], 47),
    (["nvmlDeviceGetPowerUsage"], 311_000),
    (["nvmlDeviceGetEnforcedPowerLimit"], 301_000),
    (["nvmlDeviceGetPowerManagementLimit"], 302_000),
    (["nvmlDeviceGetPowerManagementDefaultLimit"], 303_000),
    (["nvmlDeviceGetPowerManagementLimitConstraints"], [101_000, 404_000]),
    (["nvmlDeviceGetTotalEnergyConsumption"], 2**40 + 7),
    *((["nvmlDeviceGetClockInfo", domain], 1001 + domain) for domain in range(4)),
    *((["nvmlDeviceGetMaxClockInfo", domain], 1101 + domain) for domain in range(4)),
    (["nvmlDeviceGetCurrentClocksEventReasons"], 0x44),
    (["nvmlDeviceGetCurrentClocksThrottleReasons"], 0x44),
    (["nvmlDeviceGetSupportedClocksEventReasons"], 0x1FF),
    (["nvmlDeviceGetSupportedClocksThrottleReasons"], 0x1FF),
    (["nvmlDeviceGetEccMode"], [1, 0]),
    (["nvmlDeviceGetTotalEccErrors", 0, 0], 11),
    (["nvmlDeviceGetTotalEccErrors", 0, 1], 2**33),
    (["nvmlDeviceGetTotalEccErrors", 1, 0], 13),
    (["nvmlDeviceGetTotalEccErrors", 1, 1], 14),
    (["nvmlDeviceGetRemappedRows"], [21, 22, 1, 0]),
    (["nvmlDeviceGetCurrPcieLinkGeneration"], 1),
    (["nvmlDeviceGetCurrPcieLinkWidth"], 2),
    (["nvmlDeviceGetMaxPcieLinkGeneration"], 3),
    (["nvmlDeviceGetMaxPcieLinkWidth"], 4),
    (["nvmlDeviceGetPcieReplayCounter"], 31),
    (["nvmlDeviceGetPcieThroughput", 0], 51),
    (["nvmlDeviceGetPcieThroughput", 1], 52),
    (["nvmlDeviceGetNvLinkState", 0], 1),
    (["nvmlDeviceGetNvLinkState", 1], 0),
    (
        ["nvmlDeviceGetPciInfo"],
        {
            "busIdLegacy": "0002:00:00.0",
            "domain": 2,
            "bus": 0,
            "device": 0,
            "pciDeviceId": 0x20B010DE,
            "pciSubSystemId": 0x134F10DE,
            "busId": "00000002:00:00.0",
        },
    ),
]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return build(tmp_path / "lib")


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    write_state(path, state(**DISTINCT))
    return path


def of_gpu(index: int, call: Step) -> Step:
    return [call[0], f"gpu:{index}", *call[1:]]


def outcomes(answers: list[dict[str, Any]]) -> list[Any]:
    """Values where there are any, `error CODE` elsewhere."""
    return [answer["value"] if "value" in answer else f"error {answer['error']}" for answer in answers]


def error(code: int) -> str:
    return f"error {code}"


# ---- Facts ----


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("c_nvmlFieldValue_t", 40),
        ("c_nvmlMemory_v2_t", 40),
        ("c_nvmlMemory_t", 24),
        ("c_nvmlUtilization_t", 8),
        ("c_nvmlTemperature_v1_t", 12),
        ("nvmlPciInfo_t", 68),
        ("c_nvmlDevice_t", ctypes.sizeof(ctypes.c_void_p)),
    ],
)
def test_structs_have_the_size_that_the_binding_gives_them(library: Path, name: str, size: int) -> None:
    size_of = ctypes.CDLL(str(library)).fakenvml_size
    size_of.restype = ctypes.c_size_t
    assert size_of(name.encode()) == ctypes.sizeof(getattr(pynvml, name)) == size


def test_every_function_gives_what_the_state_says(library: Path, state_file: Path, tmp_path: Path) -> None:
    steps: list[Step] = [call for call, _ in SYSTEM] + [of_gpu(1, call) for call, _ in GPU]
    rest: list[tuple[Step, Any]] = [
        (["nvmlDeviceGetIndex", "gpu:6"], 6),
        (["nvmlErrorString", GPU_IS_LOST], "GPU is lost"),
        (["nvmlErrorString", 12345], "Unknown Error"),
        (["nvmlInit_v2"], 0),
        (["nvmlShutdown"], None),
    ]
    handles: list[Step] = [
        ["nvmlDeviceGetHandleByIndex", 3],
        ["nvmlDeviceGetHandleByUUID", "GPU-00000003-57c1-4a80-9e5d-00000000a100"],
        ["nvmlDeviceGetHandleByPciBusId", "00000004:00:00.0"],
        ["nvmlDeviceGetHandleByPciBusId", "0004:00:00.0"],
        ["nvmlDeviceGetHandleByIndex", 4],
    ]
    fields = ["nvmlDeviceGetFieldValues", "gpu:0", [82]]
    answers = outcomes(
        ask(library, state_file, *steps, *handles, fields, *(call for call, _ in rest), calls=tmp_path / "calls")
    )
    for (call, expected), answer in zip([*SYSTEM, *GPU], answers, strict=False):
        assert answer == expected, call
    by_index, by_uuid, by_long_id, by_short_id, other = answers[len(steps) : len(steps) + len(handles)]
    assert by_index == by_uuid == by_long_id == by_short_id != other
    assert answers[-len(rest) :] == [expected for _, expected in rest]
    called = {line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()}
    assert called == functions(), "a function that no test asks may say anything"


def test_field_values_are_of_the_type_and_scope_asked_for(library: Path, state_file: Path) -> None:
    fields: dict[str, str | int] = {
        "gpu.1.field.1": "d:0.25",
        "gpu.1.field.2": f"ui:{ONES_32}",
        "gpu.1.field.3": f"ul:{2**63}",
        "gpu.1.field.4": f"ull:{ONES_64}",
        "gpu.1.field.5": "sll:-5000000000",
        "gpu.1.field.6": "si:-6",
        "gpu.1.field.7": "us:65535",
        "gpu.1.field.8": "ret:15",
        "gpu.1.field.9": "ui:90",
        "gpu.1.field.9.1": "ui:91",
        f"gpu.1.field.9.{ALL_LINKS}": "ui:99",
        "gpu.1.field.10.1": "ui:101",
    }
    write_state(state_file, state(**fields))
    asked = [1, 2, 3, 4, 5, 6, 7, 8, 9, [9, 1], [9, ALL_LINKS], [9, 2], 10]
    (answer,) = outcomes(ask(library, state_file, ["nvmlDeviceGetFieldValues", "gpu:1", asked]))
    good = [0.25, ONES_32, 2**63, ONES_64, -5_000_000_000, -6, 65535, None, 90, 91, 99]
    for field, expected in zip(answer[: len(good)], good, strict=True):
        assert (field["code"], field["value"]) == ((GPU_IS_LOST, 0) if expected is None else (0, expected)), field
    assert [field["code"] for field in answer[len(good) :]] == [NOT_SUPPORTED, NOT_SUPPORTED]
    assert [(field["field"], field["scope"]) for field in answer[8:11]] == [(9, 0), (9, 1), (9, ALL_LINKS)]


def test_what_is_missing_from_the_state_is_not_supported(library: Path, state_file: Path) -> None:
    write_state(state_file, {"gpu.count": 2})
    steps: list[Step] = [*(call for call, _ in SYSTEM[:-1]), *(of_gpu(1, call) for call, _ in GPU)]
    *answers, index, fields = outcomes(
        ask(library, state_file, *steps, ["nvmlDeviceGetIndex", "gpu:1"], ["nvmlDeviceGetFieldValues", "gpu:1", [82]])
    )
    assert dict(zip(map(str, steps), answers, strict=True)) == dict.fromkeys(map(str, steps), error(NOT_SUPPORTED))
    assert (index, fields[0]["code"]) == (1, NOT_SUPPORTED)
    write_state(state_file, {})
    assert outcomes(ask(library, state_file, ["nvmlDeviceGetCount"])) == [error(NOT_SUPPORTED)]


def test_arguments_are_checked_as_the_driver_does(library: Path, state_file: Path) -> None:
    bad: list[tuple[Step, int]] = [
        (["nvmlDeviceGetHandleByIndex", 8], INVALID_ARGUMENT),
        (["nvmlDeviceGetHandleByUUID", "GPU-of-another-node"], NOT_FOUND),
        (["nvmlDeviceGetHandleByPciBusId", "0009:00:00.0"], NOT_FOUND),
        (["nvmlDeviceGetHandleByPciBusId", "nowhere"], NOT_FOUND),
        (["nvmlDeviceGetName", None], INVALID_ARGUMENT),
        (["nvmlDeviceGetTemperature", "gpu:0", 1], INVALID_ARGUMENT),
        (["nvmlDeviceGetTemperatureV", "gpu:0", 1], INVALID_ARGUMENT),
        (["nvmlDeviceGetMemoryInfo", "gpu:0", 0x03000028], ARGUMENT_VERSION_MISMATCH),
        (["nvmlDeviceGetClockInfo", "gpu:0", 4], INVALID_ARGUMENT),
        (["nvmlDeviceGetTotalEccErrors", "gpu:0", 2, 0], INVALID_ARGUMENT),
        (["nvmlDeviceGetTotalEccErrors", "gpu:0", 0, 2], INVALID_ARGUMENT),
        (["nvmlDeviceGetNvLinkState", "gpu:0", 12], INVALID_ARGUMENT),
        (["nvmlDeviceGetPcieThroughput", "gpu:0", 2], INVALID_ARGUMENT),
        (["nvmlDeviceGetFieldValues", "gpu:0", []], INVALID_ARGUMENT),
    ]
    assert outcomes(ask(library, state_file, *(call for call, _ in bad))) == [error(code) for _, code in bad]


def test_a_state_that_makes_no_sense_is_an_unknown_error(library: Path, state_file: Path) -> None:
    wrong = {"gpu.0.power_mw": "many", "gpu.0.pcie": "4", "gpu.0.serial": "9" * 30, "gpu.0.pci": "there"}
    wrong |= {"gpu.0.field.1": "ui:many", "gpu.0.field.2": "5", "gpu.0.field.3": "int:5"}
    write_state(state_file, state(**wrong))
    power, width, serial, pci, fields = outcomes(
        ask(
            library,
            state_file,
            ["nvmlDeviceGetPowerUsage", "gpu:0"],
            ["nvmlDeviceGetCurrPcieLinkWidth", "gpu:0"],
            ["nvmlDeviceGetSerial", "gpu:0"],
            ["nvmlDeviceGetPciInfo", "gpu:0"],
            ["nvmlDeviceGetFieldValues", "gpu:0", [1, 2, 3]],
        )
    )
    assert (power, width, pci) == (error(UNKNOWN), error(UNKNOWN), error(UNKNOWN))
    assert [field["code"] for field in fields] == [UNKNOWN] * 3
    assert serial == error(INSUFFICIENT_SIZE)


def test_the_state_may_have_comments_and_keys_nobody_knows(library: Path, state_file: Path) -> None:
    text = "# gpu.count = 5\n\n  gpu.count=2  \nno key\nweather = wet\ngpu.0.name = A = B\ngpu.0.minor = 08\n"
    state_file.write_text(text + "gpu.1.minor = 1\ngpu.1.minor = 2\n")
    steps: list[Step] = [["nvmlDeviceGetCount"], ["nvmlDeviceGetName", "gpu:0"]]
    steps += [["nvmlDeviceGetMinorNumber", "gpu:0"], ["nvmlDeviceGetMinorNumber", "gpu:1"]]
    assert outcomes(ask(library, state_file, *steps)) == [2, "A = B", 8, 2]


def test_a_change_of_the_state_shows_at_the_next_call(library: Path, state_file: Path) -> None:
    power = ["nvmlDeviceGetPowerUsage", "gpu:0"]
    answers = ask(
        library,
        state_file,
        power,
        ["state", state(**{"gpu.0.power_mw": 61_000})],
        power,
        ["state", state(**{"gpu.0.power_mw": None})],
        power,
    )
    assert outcomes(answers)[::2] == [315_000, 61_000, error(NOT_SUPPORTED)]


def test_another_file_is_seen_by_its_time_its_size_and_its_inode(
    library: Path, state_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKENVML_STATE", str(state_file))
    loaded = ctypes.CDLL(str(library))

    def count() -> int:
        found = ctypes.c_uint()
        assert loaded.nvmlDeviceGetCount_v2(ctypes.byref(found)) == 0
        return found.value

    other = state_file.with_name("other")
    state_file.write_text("gpu.count = 1")
    os.utime(state_file, ns=(0, 0))
    assert loaded.nvmlInit_v2() == 0
    assert count() == 1
    other.write_text("gpu.count = 2")
    os.utime(other, ns=(0, 0))
    other.replace(state_file)
    assert count() == 2, "another inode"
    state_file.write_text("gpu.count = 3")
    os.utime(state_file, ns=(0, 1))
    assert count() == 3, "another nanosecond"
    state_file.write_text("gpu.count = 14")
    os.utime(state_file, ns=(0, 1))
    assert count() == 14, "another size"


# ---- Initialisation ----


def test_nothing_answers_before_init_and_after_as_many_shutdowns(library: Path, state_file: Path) -> None:
    count = ["nvmlDeviceGetCount"]
    index = ["nvmlDeviceGetHandleByIndex", 0]
    name = ["nvmlDeviceGetName", "gpu:0"]
    alive: list[Step] = [["nvmlInit"], ["nvmlInit"], ["nvmlShutdown"], count, name]
    answers = outcomes(
        ask(library, state_file, count, *alive, ["nvmlShutdown"], count, index, name, ["nvmlShutdown"], init=False)
    )
    dead = error(UNINITIALIZED)
    assert answers == [dead, None, None, None, 8, "NVIDIA A100-SXM4-40GB", None, dead, dead, dead, dead]


@pytest.mark.parametrize("code", [4, DRIVER_NOT_LOADED, 18, UNKNOWN])
def test_init_fails_as_the_state_says(library: Path, state_file: Path, code: int) -> None:
    write_state(state_file, state(**{"init.return": code}))
    steps: list[Step] = [["nvmlInit"], ["nvmlDeviceGetCount"], ["state", state()], ["nvmlInit"], ["nvmlDeviceGetCount"]]
    assert outcomes(ask(library, state_file, *steps, init=False)) == [
        *(error(code), error(UNINITIALIZED)),
        *(None, None, 8),
    ]


def test_without_a_state_file_no_driver_is_loaded(library: Path, tmp_path: Path) -> None:
    assert outcomes(ask(library, tmp_path / "none", ["nvmlInit"], init=False)) == [error(DRIVER_NOT_LOADED)]


def test_init_may_hang(library: Path, state_file: Path) -> None:
    write_state(state_file, state(**{"init.hang_ms": 150}))
    (answer,) = ask(library, state_file, ["nvmlInit"], init=False)
    assert answer["ms"] >= 150


def test_no_library_is_what_the_binding_says_it_is(state_file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty" / "libnvidia-ml.so.1"
    assert outcomes(ask(empty, state_file, ["nvmlInit"], init=False)) == [error(12)]


# ---- Faults ----


def test_a_function_fails_for_one_gpu_only(library: Path, state_file: Path) -> None:
    write_state(state_file, state(**{"gpu.1.return.nvmlDeviceGetPowerUsage": UNKNOWN}))
    steps: list[Step] = [["nvmlDeviceGetPowerUsage", f"gpu:{gpu}"] for gpu in (0, 1, 2)]
    answers = outcomes(ask(library, state_file, *steps, ["nvmlDeviceGetName", "gpu:1"]))
    assert answers == [315_000, error(UNKNOWN), 317_000, "NVIDIA A100-SXM4-40GB"]


def test_a_lost_gpu_fails_in_every_call_with_its_handle(library: Path, state_file: Path) -> None:
    write_state(state_file, state(**{"gpu.1.return.*": GPU_IS_LOST}))
    steps = [of_gpu(1, call) for call, _ in GPU] + [["nvmlDeviceGetIndex", "gpu:1"]]
    steps += [["nvmlDeviceGetFieldValues", "gpu:1", [82]], ["nvmlDeviceGetNvLinkState", "gpu:1", 40]]
    answers = outcomes(ask(library, state_file, *steps, ["nvmlDeviceGetIndex", "gpu:2"], ["nvmlDeviceGetCount"]))
    assert answers[: len(steps)] == [error(GPU_IS_LOST)] * len(steps)
    assert answers[len(steps) :] == [2, 8]


def test_one_function_may_answer_where_all_others_fail(library: Path, state_file: Path) -> None:
    write_state(state_file, state(**{"gpu.0.return.*": GPU_IS_LOST, "gpu.0.return.nvmlDeviceGetUUID": 0}))
    uuid, name = outcomes(ask(library, state_file, ["nvmlDeviceGetUUID", "gpu:0"], ["nvmlDeviceGetName", "gpu:0"]))
    assert (uuid, name) == ("GPU-00000000-57c1-4a80-9e5d-00000000a100", error(GPU_IS_LOST))


def test_a_look_up_fails_for_one_gpu_only(library: Path, state_file: Path) -> None:
    write_state(state_file, state(**{"gpu.1.return.nvmlDeviceGetHandleByIndex_v2": GPU_IS_LOST}))
    steps: list[Step] = [["nvmlDeviceGetName", f"gpu:{gpu}"] for gpu in (0, 1)]
    by_uuid = ["nvmlDeviceGetHandleByUUID", "GPU-00000001-57c1-4a80-9e5d-00000000a100"]
    first, second, third = outcomes(ask(library, state_file, *steps, by_uuid))
    assert (first, second) == ("NVIDIA A100-SXM4-40GB", error(GPU_IS_LOST))
    assert isinstance(third, int)


def test_indices_close_up_where_a_gpu_is_absent(library: Path, state_file: Path) -> None:
    write_state(state_file, state(**{"gpu.1.absent": 1}))
    answers = outcomes(
        ask(
            library,
            state_file,
            ["nvmlDeviceGetCount"],
            ["nvmlDeviceGetUUID", "gpu:1"],
            ["nvmlDeviceGetIndex", "gpu:1"],
            ["nvmlDeviceGetUUID", "gpu:6"],
            ["nvmlDeviceGetHandleByIndex", 7],
            ["nvmlDeviceGetHandleByUUID", "GPU-00000001-57c1-4a80-9e5d-00000000a100"],
            ["nvmlDeviceGetHandleByPciBusId", "0002:00:00.0"],
        )
    )
    assert answers == [
        *(7, "GPU-00000002-57c1-4a80-9e5d-00000000a100", 1, "GPU-00000007-57c1-4a80-9e5d-00000000a100"),
        *(error(INVALID_ARGUMENT), error(NOT_FOUND), error(NOT_FOUND)),
    ]


def test_a_handle_outlives_the_gpu_and_says_that_it_is_lost(library: Path, state_file: Path) -> None:
    name = ["nvmlDeviceGetName", "gpu:1"]
    later = ["nvmlDeviceGetUUID", "gpu:2"]
    answers = outcomes(ask(library, state_file, name, later, ["state", state(**{"gpu.1.absent": 1})], name, later))
    assert answers[3:] == [error(GPU_IS_LOST), "GPU-00000002-57c1-4a80-9e5d-00000000a100"]


def test_a_hang_ends_with_its_time_and_not_with_a_signal(library: Path, state_file: Path) -> None:
    write_state(state_file, state(**{"gpu.0.hang_ms.nvmlDeviceGetPowerUsage": 200}))
    _, answer = ask(library, state_file, ["signals"], ["nvmlDeviceGetPowerUsage", "gpu:0"])
    assert answer["value"] == 315_000
    assert answer["ms"] >= 200


def test_a_gpu_that_hangs_in_every_call_hangs_in_its_look_up(library: Path, state_file: Path) -> None:
    write_state(state_file, state(**{"gpu.0.hang_ms.*": 100, "gpu.0.hang_ms.nvmlDeviceGetName": 150}))
    answers = ask(
        library,
        state_file,
        ["nvmlDeviceGetHandleByIndex", 0],
        ["nvmlDeviceGetHandleByUUID", "GPU-00000000-57c1-4a80-9e5d-00000000a100"],
        ["nvmlDeviceGetPowerUsage", "gpu:0"],
        ["nvmlDeviceGetName", "gpu:0"],
    )
    least_ms = (100, 100, 200, 150)
    assert all(answer["ms"] >= least for answer, least in zip(answers, least_ms, strict=True))


def test_a_hang_holds_up_neither_other_threads_nor_other_gpus(library: Path, state_file: Path, tmp_path: Path) -> None:
    write_state(state_file, state(**{"gpu.1.hang_ms.nvmlDeviceGetPowerUsage": HANGS_FOR_EVER_MS}))
    steps: list[Step] = [["start", "nvmlDeviceGetPowerUsage", "gpu:1"], ["nvmlDeviceGetPowerUsage", "gpu:0"]]
    answers = ask(library, state_file, *steps, ["nvmlDeviceGetName", "gpu:1"], calls=tmp_path / "calls")
    assert outcomes(answers)[1:] == [315_000, "NVIDIA A100-SXM4-40GB"]


def test_pcie_throughput_takes_20_ms(library: Path, state_file: Path) -> None:
    (answer,) = ask(library, state_file, ["nvmlDeviceGetPcieThroughput", "gpu:0", 0])
    assert answer["ms"] >= 20


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetHandleByIndex_v2"])
def test_a_crash_takes_the_process_with_it(library: Path, state_file: Path, function: str) -> None:
    write_state(state_file, state(**{f"gpu.1.crash.{function}": 1}))
    steps: list[Step] = [["nvmlInit"], ["nvmlDeviceGetPowerUsage", "gpu:0"]]
    assert start(library, state_file, steps).returncode == 0
    done = start(library, state_file, [*steps, ["nvmlDeviceGetPowerUsage", "gpu:1"]])
    assert done.returncode == -signal.SIGSEGV


def test_every_kth_call_gives_garbage(library: Path, state_file: Path) -> None:
    power = ["nvmlDeviceGetPowerUsage", "gpu:0"]
    changes: dict[str, str | int | None] = {"gpu.0.garbage.nvmlDeviceGetPowerUsage": 3}
    write_state(state_file, state(**changes))
    steps: list[Step] = [power, ["state", state(**changes, **{"weather.now": "wet"})], power, power, power]
    answers = outcomes(ask(library, state_file, *steps, ["nvmlDeviceGetName", "gpu:0"], power, power))
    del answers[1]
    assert answers == [315_000, 315_000, ONES_32, 315_000, "NVIDIA A100-SXM4-40GB", 315_000, ONES_32]


def test_garbage_is_all_ones_in_every_output(library: Path, state_file: Path) -> None:
    write_state(state_file, {"gpu.count": 1, "gpu.0.garbage.*": 1})
    answers = outcomes(
        ask(
            library,
            state_file,
            ["nvmlDeviceGetUtilizationRates", "gpu:0"],
            ["nvmlDeviceGetMemoryInfo", "gpu:0"],
            ["nvmlDeviceGetMemoryInfo", "gpu:0", pynvml.nvmlMemory_v2],
            ["nvmlDeviceGetTemperatureV", "gpu:0", 0],
            ["nvmlDeviceGetRemappedRows", "gpu:0"],
            ["nvmlDeviceGetIndex", "gpu:0"],
            ["nvmlDeviceGetFieldValues", "gpu:0", [83]],
        )
    )
    memory = dict.fromkeys(("total", "free", "used"), ONES_64)
    version_2 = {**memory, "reserved": ONES_64, "version": pynvml.nvmlMemory_v2}
    assert answers[:6] == [{"gpu": ONES_32, "memory": ONES_32}, memory, version_2, -1, [ONES_32] * 4, ONES_32]
    ((field,),) = answers[6:]
    assert (field["field"], field["scope"], field["code"], field["value"]) == (83, 0, 0, ONES_64)


# ---- The call log, and other builds ----


def test_the_log_has_each_call_when_it_begins(library: Path, state_file: Path, tmp_path: Path) -> None:
    write_state(state_file, state(**{"gpu.0.absent": 1, "gpu.2.hang_ms.nvmlDeviceGetName": 100}))
    steps: list[Step] = [["nvmlDeviceGetCount"], ["nvmlDeviceGetName", "gpu:1"], ["nvmlDeviceGetUUID", "gpu:1"]]
    ask(library, state_file, *steps, calls=tmp_path / "calls")
    lines = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [line[:2] for line in lines] == [
        ["nvmlInitWithFlags", "-"],
        ["nvmlDeviceGetCount_v2", "-"],
        ["nvmlDeviceGetHandleByIndex_v2", "2"],
        ["nvmlDeviceGetName", "2"],
        ["nvmlDeviceGetUUID", "2"],
    ]
    assert len({thread for _, _, thread, _ in lines}) == 1
    begins_us = [int(line[3]) for line in lines]
    assert begins_us == sorted(begins_us)
    assert begins_us[4] - begins_us[3] >= 100_000


def test_a_library_may_lack_functions(state_file: Path, tmp_path: Path) -> None:
    old = build(tmp_path / "old", without=("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons"))
    steps: list[Step] = [
        ["nvmlDeviceGetMemoryInfo", "gpu:0", pynvml.nvmlMemory_v2],
        ["nvmlDeviceGetCurrentClocksEventReasons", "gpu:0"],
        ["nvmlDeviceGetCurrentClocksThrottleReasons", "gpu:0"],
    ]
    assert outcomes(ask(old, state_file, *steps)) == [error(FUNCTION_NOT_FOUND), error(FUNCTION_NOT_FOUND), 4]


def test_a_function_that_never_was_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nvmlDeviceGetWeather"):
        build(tmp_path, without=("nvmlDeviceGetName", "nvmlDeviceGetWeather"))


def test_a_library_that_is_rebuilt_leaves_the_one_in_use_alone(tmp_path: Path) -> None:
    path = build(tmp_path / "lib")
    before = path.read_bytes()
    with path.open("rb") as user:
        build(tmp_path / "lib", version="580.82.07")
        assert user.read() == before != path.read_bytes()
    assert list(path.parent.iterdir()) == [path]


def test_a_library_may_be_of_another_driver_version(state_file: Path, tmp_path: Path) -> None:
    for version in ("550.90.07", "580.82.07"):
        library = build(tmp_path / "lib", version=version)
        assert outcomes(ask(library, state_file, ["nvmlSystemGetDriverVersion"])) == [version]


def test_state_is_replaced_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(path, {"gpu.count": 1})
    with path.open() as reader:
        write_state(path, {"gpu.count": 2})
        assert reader.read() == "gpu.count = 1\n"
    assert path.read_text() == "gpu.count = 2\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_change_to_none_takes_a_key_out_of_the_state() -> None:
    changed = state(2, **{"gpu.0.energy_mj": None, "gpu.1.name": "other", "gpu.7.name": None})
    assert set(state(2)) - set(changed) == {"gpu.0.energy_mj"}
    assert changed["gpu.1.name"] == "other"


def test_a_change_of_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="gpus"):
        state(gpus=2)
