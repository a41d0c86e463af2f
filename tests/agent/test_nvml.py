"""Claims about NVML through the real binding: what is asked comes back as plain data or as `NvmlError`."""

from __future__ import annotations

import ctypes
import platform
from typing import TYPE_CHECKING, Any

import pytest

from agent.hw.nvml import calls, library, session
from agent.hw.nvml.session import NvmlError, Session
from tests.collectors.gpunode import GpuNode, untouched_binding
from tests.fakenvml import library as fakenvml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIELD_VALUES = "nvmlDeviceGetFieldValues"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GpuNode]:
    with untouched_binding():
        made = GpuNode(tmp_path, gpus=1)
        made.install()
        yield made


@pytest.fixture
def nvml(node: GpuNode) -> Session:
    opened = Session(None)
    opened.open()
    return opened


class Under:
    """A library that answers as the one below it, but for the functions that the test gives."""

    def __init__(self, below: Any, **functions: Any) -> None:
        self._below = below
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


# Finding the library


def test_a_given_library_is_there_or_it_is_not(tmp_path: Path) -> None:
    assert not library.installed(str(tmp_path / library.SONAME))
    (tmp_path / library.SONAME).touch()
    assert library.installed(str(tmp_path / library.SONAME))


def test_a_library_in_a_folder_of_the_loaders_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / library.SONAME).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":/nonexistent:{tmp_path}")
    assert library.installed(None)


@pytest.mark.parametrize(
    ("content", "found"), [(b"\0libnvidia-ml.so.1\0/usr/lib\0", True), (b"libnvidia-ml.so.12\0", False)]
)
def test_a_library_in_the_loaders_cache_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, *, found: bool
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(library, "_FOLDERS", ())
    monkeypatch.setattr(platform, "machine", lambda: "none")
    monkeypatch.setattr(library, "_CACHE", str(tmp_path / "cache"))
    assert not library.installed(None)
    (tmp_path / "cache").write_bytes(content)
    assert library.installed(None) is found


@pytest.mark.parametrize(
    ("target", "version"),
    [
        ("libnvidia-ml.so.570.133.20", "570.133.20"),
        ("libnvidia-ml.so.1", None),
        ("libnvidia-ml.so", None),
        ("570.133.20/libnvidia-ml.so.1", None),
    ],
)
def test_version_of_a_driver_is_in_the_name_of_the_file_behind_the_link(
    tmp_path: Path, target: str, version: str | None
) -> None:
    (tmp_path / "570.133.20").mkdir()
    (tmp_path / target).touch()
    (tmp_path / "link").symlink_to(target)
    assert library.version(str(tmp_path / "link")) == version


def test_a_file_that_replaces_another_has_another_identity_and_links_are_followed(tmp_path: Path) -> None:
    path, link = tmp_path / "lib.so.2", tmp_path / "lib.so"
    assert library.identity(str(path)) is None
    path.touch()
    link.symlink_to(path)
    before = library.identity(str(link))
    assert before == library.identity(str(path))
    beside = tmp_path / "new"
    beside.touch()
    beside.replace(path)
    assert library.identity(str(link)) != before


def test_a_given_library_is_the_one_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with untouched_binding():
        node = GpuNode(tmp_path, gpus=3)
        monkeypatch.setenv("FAKENVML_STATE", str(node.state_file))
        path = fakenvml.build(tmp_path / "lib", version="1.2.3")
        opened = Session(str(path))
        opened.open()
        assert opened.library_path() == str(path)
        assert opened.count() == 3
        assert opened.driver().version == "1.2.3"
        opened.close()
        with pytest.raises(NvmlError) as caught:
            opened.count()
        assert caught.value.code == session.UNINITIALIZED


def test_a_library_that_cannot_be_loaded_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("no library")
    with untouched_binding(), pytest.raises(NvmlError, match=r"broken\.so") as caught:
        Session(str(tmp_path / "broken.so")).open()
    assert (caught.value.call, caught.value.code) == ("dlopen", session.LIBRARY_NOT_FOUND)


def test_a_stand_in_is_used_as_it_is_and_has_no_path(nvml: Session) -> None:
    assert nvml.count() == 1
    assert nvml.library_path() is None


def test_the_path_of_a_library_without_that_function_is_not_known() -> None:
    assert library.path_of(ctypes.CDLL(None), "nvmlShutdown") is None
    assert "libc" in (library.path_of(ctypes.CDLL("libc.so.6"), "getpid") or "")


# Asking


def test_what_fails_says_which_call_which_code_and_what_that_means(node: GpuNode, nvml: Session) -> None:
    node.change({"gpu.0.return.nvmlDeviceGetName": 15, "gpu.0.return.nvmlDeviceGetSerial": 12345})
    gpu = nvml.gpu(0)
    with pytest.raises(NvmlError, match=r"^nvmlDeviceGetName: the GPU is lost \(15\)$"):
        gpu.ask(calls.NAME)
    with pytest.raises(NvmlError, match=r"12345") as caught:
        gpu.ask(calls.SERIAL)
    assert caught.value.code == 12345


def test_a_call_that_the_binding_lacks_is_one_that_the_library_lacks(nvml: Session) -> None:
    with pytest.raises(NvmlError) as caught:
        nvml.gpu(0).ask(calls.Call("nvmlDeviceGetSomethingOfTheFuture", int))
    assert caught.value.code == session.FUNCTION_NOT_FOUND


def test_text_that_is_no_utf_8_is_an_error_like_others(node: GpuNode, nvml: Session) -> None:
    node.change({"gpu.0.garbage.nvmlDeviceGetName": 1})
    with pytest.raises(NvmlError, match="UTF-8"):
        nvml.gpu(0).ask(calls.NAME)


@pytest.mark.parametrize("error", [TypeError("odd"), ctypes.ArgumentError(), AttributeError("inside"), ValueError()])
def test_whatever_the_binding_raises_is_an_error_of_that_call(
    nvml: Session, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object) -> None:
        raise error

    gpu = nvml.gpu(0)
    monkeypatch.setattr(nvml._binding, "nvmlDeviceGetTemperature", broken)
    with pytest.raises(NvmlError, match=type(error).__name__) as caught:
        gpu.ask(calls.TEMPERATURE)
    assert (caught.value.call, caught.value.code) == ("nvmlDeviceGetTemperature", session.UNKNOWN)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (calls.TEMPERATURE, None),
        (calls.TEMPERATURE, "hot"),
        (calls.NAME, None),
        (calls.NAME, b"A100"),
        (calls.PCI_BUS_ID, None),
        (calls.UTILIZATION, None),
        (calls.MEMORY_V2, None),
        (calls.MEMORY_V1, object()),
        (calls.ECC_MODE, [1]),
        (calls.REMAPPED_ROWS, [0, 0, 0]),
        (calls.REMAPPED_ROWS, [0, 0, 0, None]),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error_of_that_call(
    nvml: Session, monkeypatch: pytest.MonkeyPatch, call: calls.Call[Any], answer: object
) -> None:
    gpu = nvml.gpu(0)
    monkeypatch.setattr(nvml._binding, call.function, lambda *_: answer)
    with pytest.raises(NvmlError) as caught:
        gpu.ask(call)
    assert (caught.value.call, caught.value.code) == (call.function, session.UNKNOWN)


def test_the_question_for_a_link_is_the_same_each_time() -> None:
    assert calls.nvlink_state(3) is calls.nvlink_state(3)
    assert calls.nvlink_state(3).arguments == (3,)


def test_a_gpu_is_found_by_its_address(node: GpuNode, nvml: Session) -> None:
    assert nvml.gpu_at("0001:00:00.0").ask(calls.UUID) == node.uuid(0)
    with pytest.raises(NvmlError):
        nvml.gpu_at("0002:00:00.0")


def test_versions_that_cannot_be_had_are_empty(node: GpuNode, nvml: Session) -> None:
    assert nvml.driver() == ("570.133.20", "12.8", "12.570.133.20")
    node.change({"driver.cuda_version": None, "driver.nvml_version": None})
    assert nvml.driver() == ("570.133.20", "", "")


def test_plain_data_only_leaves_the_session(nvml: Session) -> None:
    gpu = nvml.gpu(0)
    for call in vars(calls).values():
        if isinstance(call, calls.Call):
            answer = gpu.ask(call)
            parts = answer if isinstance(answer, tuple) else (answer,)
            assert {type(part) for part in parts} <= {int, str, type(None)}, call.function


# Fields


def test_fields_come_in_order_each_by_its_own_type_or_with_its_own_error(node: GpuNode, nvml: Session) -> None:
    values = {1: "d:-1.5", 2: "ui:4294967295", 3: "ul:7", 4: f"ull:{2**64 - 1}", 5: "sll:-7", 6: "si:-8", 7: "us:65535"}
    node.change({f"gpu.0.field.{id_}": text for id_, text in values.items()} | {"gpu.0.field.8": "ret:999"})
    node.change({"gpu.0.field.9.4": "ui:4", "gpu.0.field.9": "ui:0", "gpu.0.field.10": None})
    batch = nvml.gpu(0).fields([*((id_, 0) for id_ in values), (9, 4), (9, 0), (8, 0), (10, 0)])
    *found, refused, missing = batch.read()
    assert found == [-1.5, 2**32 - 1, 7, 2**64 - 1, -7, -8, 65535, 4, 0]
    assert isinstance(refused, NvmlError)
    assert isinstance(missing, NvmlError)
    assert (refused.code, missing.code) == (session.UNKNOWN, session.NOT_SUPPORTED)
    assert "field 8" in str(refused)
    node.change({"gpu.0.field.1": "d:2.5"})
    assert batch.read()[0] == 2.5


def test_a_field_that_the_library_leaves_as_it_was_does_not_show_its_last_value(
    nvml: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = nvml.gpu(0)
    batch = gpu.fields([(83, 0)])
    assert not isinstance(batch.read()[0], NvmlError)
    binding = nvml._binding
    monkeypatch.setattr(binding, "nvmlLib", Under(binding.nvmlLib, **{FIELD_VALUES: lambda *_: 0}))
    assert isinstance(batch.read()[0], NvmlError)


def test_a_type_of_value_that_is_not_known_is_an_error_and_no_number(
    nvml: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(_handle: Any, _count: Any, fields: Any) -> int:
        fields[0].valueType, fields[0].nvmlReturn, fields[0].value.ullVal = 9, 0, 5
        return 0

    binding = nvml._binding
    batch = nvml.gpu(0).fields([(83, 0)])
    monkeypatch.setattr(binding, "nvmlLib", Under(binding.nvmlLib, **{FIELD_VALUES: answer}))
    (found,) = batch.read()
    assert isinstance(found, NvmlError)
    assert "type 9" in str(found)


def test_what_a_short_value_leaves_of_the_union_is_not_part_of_it(
    nvml: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(_handle: Any, _count: Any, fields: Any) -> int:
        fields[0].value.ullVal, fields[0].valueType, fields[0].nvmlReturn = 2**64 - 1, 1, 0
        fields[0].value.uiVal = 5
        return 0

    binding = nvml._binding
    batch = nvml.gpu(0).fields([(82, 0)])
    monkeypatch.setattr(binding, "nvmlLib", Under(binding.nvmlLib, **{FIELD_VALUES: answer}))
    assert batch.read() == [5]


def test_a_batch_that_fails_as_a_whole_says_so(node: GpuNode, nvml: Session) -> None:
    batch = nvml.gpu(0).fields([(83, 0)])
    node.change({f"gpu.0.return.{FIELD_VALUES}": 16})
    with pytest.raises(NvmlError) as caught:
        batch.read()
    assert (caught.value.call, caught.value.code) == (FIELD_VALUES, session.RESET_REQUIRED)


def test_field_values_that_the_binding_cannot_ask_for_are_an_error(
    nvml: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ctypes.ArgumentError

    batch = nvml.gpu(0).fields([(83, 0)])
    monkeypatch.setattr(nvml._binding, "nvmlLib", Under(nvml._binding.nvmlLib, **{FIELD_VALUES: broken}))
    with pytest.raises(NvmlError, match="ArgumentError") as caught:
        batch.read()
    assert (caught.value.call, caught.value.code) == (FIELD_VALUES, session.UNKNOWN)


def test_a_library_without_field_values_says_so(nvml: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = nvml.gpu(0).fields([(83, 0)])
    monkeypatch.setattr(nvml._binding, "nvmlLib", object())
    with pytest.raises(NvmlError) as caught:
        batch.read()
    assert caught.value.code == session.FUNCTION_NOT_FOUND


@pytest.mark.usefixtures("node")
def test_a_session_of_no_more_use_is_not_taken_for_missing_versions(nvml: Session) -> None:
    nvml.close()
    with pytest.raises(NvmlError) as caught:
        nvml.driver()
    assert caught.value.code == session.UNINITIALIZED
