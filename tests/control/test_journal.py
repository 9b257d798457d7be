"""The journal keeps every line it returned from, through SIGKILL, torn tails and full disks."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.control.journal import Follower, Journal, JournalError, inputs, read
from everstep.core.events import Alert, ControllerStarted, JobEnded, JobSubmitted, StageChanged, Ticked
from everstep.core.types import JobSpec

SOME = (JobSubmitted(JobSpec("j")), ControllerStarted(1), StageChanged("a", "b"), Ticked(), Alert("x", "é\n\u2028"))


def write(path: Path, *events: object) -> None:
    with Journal.open(path, "j") as journal:
        for event in events:
            journal.append(event, 1.5, 2e9, 3)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_what_is_written_is_read_and_numbered_on(path: Path) -> None:
    with Journal.open(path, "j") as journal:
        written = [journal.append(event, 1.5, 2e9, 3) for event in SOME]
        assert not journal.note
    with Journal.open(path, "j") as journal:
        written.append(journal.append(JobEnded(0, "done"), 2.5, 2e9, 4))
    reading = read(path)
    assert list(reading) == written
    assert [entry.n for entry in written] == [1, 2, 3, 4, 5, 6]
    assert (reading.unknown, reading.torn_bytes) == (0, 0)
    assert len(path.read_bytes().splitlines()) == 6


def test_only_inputs_are_replayed(path: Path) -> None:
    write(path, *SOME)
    assert [entry.event for entry in inputs(path)] == [SOME[0], SOME[1], SOME[3]]


def test_torn_at_every_byte_of_the_last_line(path: Path) -> None:
    write(path, *SOME)
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        reading = read(path)
        assert [entry.n for entry in reading] == [1, 2, 3, 4]
        assert reading.torn_bytes == cut - start
        side = path.with_name("journal.jsonl.torn")
        with Journal.open(path, "j") as journal:
            assert bool(journal.note) == (cut > start)
            assert journal.append(Ticked(), 1.0, 2.0, 3).n == 5
        if cut > start:
            assert side.read_bytes() == whole[start:cut] + b"\n"
            assert str(side) in journal.note and f"{cut - start} bytes" in journal.note
            side.unlink()
        assert [entry.n for entry in read(path)] == [1, 2, 3, 4, 5]


def test_the_very_first_line_may_be_torn(path: Path) -> None:
    path.write_bytes(b'{"n":1,"t')
    with Journal.open(path, "j") as journal:
        assert journal.append(Ticked(), 1.0, 2.0, 0).n == 1
    assert [entry.n for entry in read(path)] == [1]


def test_last_lines_longer_than_one_look(path: Path) -> None:
    write(path, Alert("k", "x" * 300_000), Alert("k", "y" * 300_000))
    with open(path, "ab") as file:
        file.write(b"z" * 200_000)
    with Journal.open(path, "j") as journal:
        assert "200000 bytes" in journal.note
        assert journal.append(Ticked(), 1.0, 2.0, 0).n == 3


def test_unknown_events_are_skipped_and_counted_but_still_numbered(path: Path) -> None:
    write(path, Ticked())
    with open(path, "ab") as file:
        file.write(b'{"n":2,"t_s":1,"wall_s":2,"job":"j","epoch":0,"event":{"type":"MoonRose","phase":3}}\n')
    write(path, Ticked())
    reading = read(path)
    assert [entry.n for entry in reading] == [1, 3]
    assert reading.unknown == 1
    assert [entry.n for entry in Follower(path).new()] == [1, 3]


@pytest.mark.parametrize("damage", [b"nonsense\n", b'{"n":2,"t_s":1,"wall_s":2,"job":"j","epoch":0,"event":'
                                    b'{"type":"NodeGone"}}\n', b"\0\0\0\0\n"])  # fmt: skip
def test_a_damaged_line_is_an_error_with_its_number(path: Path, damage: bytes) -> None:
    write(path, Ticked())
    good = path.read_bytes()
    path.write_bytes(good + damage + good)
    with pytest.raises(JournalError, match="line 2 is damaged"):
        list(read(path))
    follower = Follower(path)
    with pytest.raises(JournalError, match="line 2 is damaged"):
        follower.new()


def test_a_damaged_last_line_is_not_written_after(path: Path) -> None:
    path.write_bytes(b"nonsense\n")
    with pytest.raises(JournalError, match="its last line is damaged"):
        Journal.open(path, "j")


def test_a_journal_of_another_job_is_refused(path: Path) -> None:
    write(path, Ticked())
    with pytest.raises(JournalError, match="is of job j, not k"):
        Journal.open(path, "k")
    write(path, Ticked())  # and the refusal left no lock


def test_the_second_writer_is_told_who_is_the_first(path: Path) -> None:
    body = (
        "import sys; from pathlib import Path; from everstep.control.journal import Journal\n"
        "journal = Journal.open(Path(sys.argv[1]), 'j'); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", body, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(JournalError, match=f"written by process {other.pid}:"):
            Journal.open(path, "j")
        other.kill()
        other.wait()
        write(path, Ticked())  # its death frees the journal at once


def test_a_killed_writer_loses_nothing_it_returned_from(path: Path) -> None:
    body = (
        "import sys; from pathlib import Path; from everstep.control.journal import Journal\n"
        "from everstep.core.events import Alert\n"
        "journal = Journal.open(Path(sys.argv[1]), 'j')\n"
        "while True: print(journal.append(Alert('k', 'x' * 20000), 1.0, 2.0, 0).n, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", body, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(200):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        told = [200, *(int(line) for line in writer.stdout if line.endswith("\n"))][-1]
    numbers = [entry.n for entry in read(path)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= told
    with Journal.open(path, "j") as journal:
        assert journal.append(Ticked(), 1.0, 2.0, 0).n == len(numbers) + 1


def test_a_file_size_limit_leaves_no_torn_line(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal.open(path, "j") as journal:
        journal.append(Ticked(), 1.0, 2.0, 0)
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))  # the kernel takes 40 bytes, then refuses
        try:
            with pytest.raises(JournalError, match=r"no room .*File too large.* \d+ bytes needed, \d+ free"):
                journal.append(Ticked(), 1.0, 2.0, 0)
            assert path.read_bytes() == before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert journal.append(Ticked(), 1.0, 2.0, 0).n == 2
    assert [entry.n for entry in read(path)] == [1, 2]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    if libc.mount(b"everstep-test", str(disk).encode(), b"tmpfs", 0, b"size=64k"):
        pytest.skip(f"no right to mount a file system: {os.strerror(ctypes.get_errno())}")
    yield disk
    assert libc.umount2(str(disk).encode(), 2) == 0


def test_a_full_disk_is_told_and_leaves_no_torn_line(tiny_disk: Path) -> None:
    path = tiny_disk / "journal.jsonl"
    other = tiny_disk / "other"
    other.write_bytes(b"x" * 16384)
    with Journal.open(path, "j") as journal:
        with pytest.raises(JournalError, match=r"no room .*No space left.* \d+ bytes needed, \d+ free") as raised:
            for _ in range(100):
                journal.append(Alert("k", "x" * 5000), 1.0, 2.0, 0)
        assert str(path) in str(raised.value)
        count = len(list(read(path)))
        assert read(path).torn_bytes == 0 and path.read_bytes().endswith(b"\n") and count > 5
        other.unlink()
        assert journal.append(Alert("k", "x" * 5000), 1.0, 2.0, 0).n == count + 1
    assert len(list(read(path))) == count + 1


def test_a_follower_sees_each_line_once_it_is_whole(path: Path) -> None:
    follower = Follower(path)
    assert follower.new() == []
    write(path, *SOME)
    assert [entry.n for entry in follower.new()] == [1, 2, 3, 4, 5]
    whole = path.read_bytes()
    write(path, Ticked())
    line = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + line[:20])
    assert follower.new() == []
    path.write_bytes(whole + line)
    assert [entry.n for entry in follower.new()] == [6]
    assert follower.new() == []


def test_a_journal_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot open journal .*No such file"):
        Journal.open(tmp_path / "nowhere" / "journal.jsonl", "j")


def test_reading_without_a_journal(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read(path))
