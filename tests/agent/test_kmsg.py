"""The kernel log's records: how they are found in whatever a device, a FIFO or a file gives."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hw import kmsg
from agent.hw.kmsg import MaskedError, Reader, Record, parse, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

PLENTY = 1 << 20


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    return path


def line(sequence: int, text: str = "hello", priority: int = 6) -> bytes:
    return f"{priority},{sequence},{sequence * 10},-;{text}\n".encode()


def numbers(reader: Reader, limit_bytes: int = PLENTY) -> list[int]:
    return [record.sequence for record in reader.read(limit_bytes)]


class Failing:
    """A device that answers as it is told: with bytes, or with an errno."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: bytes | int) -> None:
        self.answers = list(answers)
        monkeypatch.setattr("agent.hw.kmsg.os.read", self.read)

    def read(self, descriptor: int, size: int) -> bytes:
        answer = self.answers.pop(0) if self.answers else errno.EAGAIN
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer


# One record


@pytest.mark.parametrize(
    ("raw", "record"),
    [
        (b"6,339,5140900,-;NET: Registered", Record(6, 339, 5140900, b"NET: Registered")),
        (b"4,1,2,c;", Record(4, 1, 2, b"")),
        (b"30,1,2,-,caller=T1;a;b,c", Record(30, 1, 2, b"a;b,c")),
        (b"6,1,2;as Linux 3.5 wrote", Record(6, 1, 2, b"as Linux 3.5 wrote")),
        (b"6,18446744073709551615,2,-;x", Record(6, 2**64 - 1, 2, b"x")),
        (b"6,1,2,-;\x00\xff", Record(6, 1, 2, b"\x00\xff")),
    ],
)
def test_a_line_is_a_record(raw: bytes, record: Record) -> None:
    assert parse(raw) == record


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b";", b"x", b"6,1,2,-", b"6,1;x", b"-6,1,2,-;x", b"6,1.5,2,-;x", b" 6,1,2,-;x", b"6,,2,-;x"),
        *(b"6,\xb2,2,-;x", b"6," + b"9" * 21 + b",2,-;x", b"6,+1,2,-;x"),
    ],
)
def test_a_line_is_no_record(raw: bytes) -> None:
    assert parse(raw) is None


@given(st.binary(max_size=80))
def test_any_line_is_read_or_refused(raw: bytes) -> None:
    record = parse(raw)
    assert record is None or (record.sequence >= 0 and record.time_us >= 0)
    plain(raw)


def test_escapes_are_undone_and_what_is_no_text_survives() -> None:
    assert plain(rb"a\x0ab\x5cx41 \xc3\xa9") == "a\nb\\x41 é"
    assert plain(b"\\xff \\x00 \xfe \\xzz") == "\ufffd \0 \ufffd \\xzz"


# Files and FIFOs


def test_lines_of_properties_belong_to_no_record(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(line(1) + b" SUBSYSTEM=pci\n DEVICE=+pci:0001:00:00.0\n" + line(2))
    reader = Reader(str(path))
    assert numbers(reader) == [1, 2]
    assert reader.errors == 0


def test_garbage_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"\n\x00\xff\n" + line(1) + b"garbage;\n6,x,1,-;no\n" + line(2))
    reader = Reader(str(path))
    assert numbers(reader) == [1, 2]
    assert reader.errors == 3


def test_the_end_of_a_file_is_not_the_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(line(1))
    reader = Reader(str(path))
    assert numbers(reader) == [1]
    assert numbers(reader) == []
    with path.open("ab") as file:
        file.write(line(2) + line(3)[:5])
    assert numbers(reader) == [2]
    with path.open("ab") as file:
        file.write(line(3)[5:])
    assert numbers(reader) == [3]
    assert reader.errors == 0


@given(st.data())
def test_records_cut_anywhere_are_whole(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=20), max_size=8))
    raw = b"".join(line(number, text) for number, text in enumerate(texts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    reading, writing = os.pipe()
    reader = Reader(f"/dev/fd/{reading}")
    os.close(reading)
    try:
        got: list[Record] = []
        for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            os.write(writing, raw[start:end])
            got += reader.read(PLENTY)
        assert [(record.sequence, record.text.decode()) for record in got] == list(enumerate(texts))
        assert reader.errors == 0
    finally:
        os.close(writing)
        reader.close()


def test_a_file_that_was_truncated_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(line(100) + line(101))
    reader = Reader(str(path))
    assert numbers(reader) == [100, 101]
    path.write_bytes(line(1))
    assert numbers(reader) == [1]


def test_a_file_that_was_rewritten_longer_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(line(100) + b"6,101,")
    reader = Reader(str(path))
    assert numbers(reader) == [100]
    path.write_bytes(line(1) + line(2) + line(3))
    assert numbers(reader) == [1, 2, 3]
    path.write_bytes(line(1) + line(2) + line(3) + line(4))  # the same with more behind it
    assert numbers(reader) == [4]
    assert reader.errors == 0


def test_a_file_that_was_replaced_is_read_to_its_end_and_then_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(line(1))
    reader = Reader(str(path))
    assert numbers(reader) == [1]
    with path.open("ab") as file:
        file.write(line(2) + b"6,3")
    (tmp_path / "new").write_bytes(line(7))
    (tmp_path / "new").replace(path)
    assert numbers(reader) == [2, 7]
    path.unlink()
    assert numbers(reader) == []
    path.write_bytes(line(8))
    assert numbers(reader) == [8]
    assert reader.errors == 0


def test_a_fifo_without_a_writer_is_quiet_and_stays_usable_when_writers_come_and_go(fifo: Path) -> None:
    reader = Reader(str(fifo))
    assert numbers(reader) == []
    for number in range(3):
        descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, line(number))
        if number == 1:
            assert numbers(reader) == [1]
        os.close(descriptor)
        assert numbers(reader) == ([number] if number != 1 else [])


def write(fifo: Path, raw: bytes) -> None:
    descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    os.write(descriptor, raw)
    os.close(descriptor)


def test_a_writer_that_dies_in_mid_record_costs_its_record_and_not_the_next_writers(fifo: Path) -> None:
    reader = Reader(str(fifo))
    write(fifo, line(1) + b"6,2,20,-;half a rec")
    assert numbers(reader) == [1]
    write(fifo, line(3))
    assert numbers(reader) == [3]
    assert reader.errors == 1


def test_a_record_that_two_writers_write_together_is_whole(fifo: Path) -> None:
    reader = Reader(str(fifo))
    write(fifo, b"6,2,20,-;half a rec")
    assert numbers(reader) == []
    write(fifo, b"ord; ")
    assert numbers(reader) == []
    write(fifo, b"6,7\n")
    assert [record.text for record in reader.read(PLENTY)] == [b"half a record; 6,7"]
    assert reader.errors == 0


def test_a_fifo_that_was_replaced_is_read(fifo: Path) -> None:
    reader = Reader(str(fifo))
    fifo.unlink()
    os.mkfifo(fifo)
    assert numbers(reader) == []
    write(fifo, line(5))
    assert numbers(reader) == [5]


def test_a_line_without_end_is_given_up_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(line(1) + b"6,2,3,-;" + b"x" * 1_000_000 + b"\n" + line(4))
    reader = Reader(str(path))
    assert numbers(reader, 1 << 30) == [1, 4]
    assert reader.errors == 1
    assert len(reader._rest) == 0


def test_a_long_line_that_goes_on_with_the_next_read_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"x" * (kmsg.LINE_LIMIT_BYTES * 3))
    reader = Reader(str(path))
    assert numbers(reader, 1 << 30) == []
    with path.open("ab") as file:
        file.write(b"6,1,2,-;tail of it\n" + line(2))
    assert numbers(reader) == [2]
    assert reader.errors == 1


def test_one_call_reads_about_as_much_as_it_may_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"".join(line(number, "x" * 100) for number in range(10_000)))
    reader = Reader(str(path))
    first = numbers(reader, 100_000)
    assert 800 < len(first) < 2_000
    rest = first
    while more := numbers(reader, 100_000):
        rest += more
    assert rest == list(range(10_000))


def test_nothing_is_kept_open(tmp_path: Path, fifo: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "file").write_bytes(line(1))
    reader = Reader(str(tmp_path / "file"))
    numbers(reader)
    (tmp_path / "file").unlink()
    (tmp_path / "file").write_bytes(line(2))
    numbers(reader)
    reader.close()
    reader.close()
    Reader(str(fifo))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_reader_does_not_pass_to_programs_that_are_started(fifo: Path) -> None:
    reader = Reader(str(fifo))
    assert not os.get_inheritable(reader._descriptor)


# Devices


@pytest.fixture
def device(fifo: Path) -> Iterator[Reader]:
    reader = Reader(str(fifo))
    yield reader
    reader.close()


def test_records_that_were_overwritten_are_counted_and_reading_goes_on(
    monkeypatch: pytest.MonkeyPatch, device: Reader
) -> None:
    Failing(monkeypatch, line(1), errno.EPIPE, line(900), errno.EPIPE, line(2000))
    assert numbers(device) == [1, 900, 2000]
    assert device.overruns == 2


def test_a_record_that_does_not_fit_costs_itself(monkeypatch: pytest.MonkeyPatch, device: Reader) -> None:
    Failing(monkeypatch, line(1), errno.EINVAL, line(3))
    assert numbers(device) == [1, 3]
    assert device.errors == 1


def test_many_records_that_do_not_fit_cost_themselves(monkeypatch: pytest.MonkeyPatch, device: Reader) -> None:
    Failing(monkeypatch, *(answer for number in range(50) for answer in (line(number), errno.EINVAL)))
    assert numbers(device) == list(range(50))
    assert device.errors == 50


def test_a_device_that_only_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch, device: Reader) -> None:
    Failing(monkeypatch, *[errno.EINVAL] * 1000)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        numbers(device)
    assert caught.value.filename == device.path


def test_a_device_that_only_overruns_does_not_hold_a_call_up(monkeypatch: pytest.MonkeyPatch, device: Reader) -> None:
    failing = Failing(monkeypatch, *[errno.EPIPE] * 10_000)
    assert numbers(device, 1 << 20) == []
    assert len(failing.answers) > 8_000


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EIO, errno.EPERM])
def test_a_device_that_went_is_an_error(monkeypatch: pytest.MonkeyPatch, device: Reader, number: int) -> None:
    Failing(monkeypatch, line(1), number)
    got = device.read(PLENTY)
    assert next(got).sequence == 1
    with pytest.raises(OSError, match="kmsg") as caught:
        next(got)
    assert caught.value.errno == number


def test_the_null_device_is_no_log() -> None:
    with pytest.raises(MaskedError):
        Reader("/dev/null")


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Reader(str(tmp_path / "none"))
    reader = Reader(str(tmp_path))  # a directory
    with pytest.raises(IsADirectoryError):
        numbers(reader)


def test_what_a_source_is(tmp_path: Path, fifo: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    kinds = [
        (reader.is_device, reader.replays) for reader in map(Reader, (str(fifo), str(tmp_path / "file"), "/dev/zero"))
    ]
    assert kinds == [(False, False), (False, True), (True, True)]


def test_what_user_space_writes_into_the_real_log_has_another_facility() -> None:
    try:
        descriptor = os.open("/dev/kmsg", os.O_WRONLY | os.O_CLOEXEC)
        reader = Reader("/dev/kmsg")
    except OSError as error:
        pytest.skip(f"needs root and the kernel log: /dev/kmsg: {error.strerror}")
    for _ in reader.read(64 << 20):
        pass
    words = f"hpcwatch test {os.getpid()}"
    os.write(descriptor, f"<3>{words}\n".encode())
    os.close(descriptor)
    written = [record for record in reader.read(PLENTY) if words.encode() in record.text]
    assert [(record.priority >> 3, record.priority & 7) for record in written] == [(1, 3)]
    assert reader.is_device
    assert reader.errors == 0
