"""A journal of many segments reads like one file, whatever moment its writer or its tender died at."""

from __future__ import annotations

import gzip
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.control import journal as journal_module
from everstep.control import tending
from everstep.control.journal import Follower, Journal, JournalError, read
from everstep.control.reading import ended, late
from everstep.control.segments import Files
from everstep.core.events import Alert, Event, StepsSeen, Ticked

BYTES = 1000  # of a segment in these tests: some ten entries


def write(path: Path, count: int, event: Event | None = None) -> None:
    with Journal.open(path, "j", BYTES) as journal:
        for _ in range(count):
            journal.append(event or Ticked(), float(journal.last + 1), 2e9, 3)  # type: ignore[arg-type]
        assert "grows" not in journal.note


def numbers(path: Path) -> list[int]:
    return [entry.n for entry in read(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_a_full_file_becomes_a_segment_and_all_read_on(path: Path) -> None:
    grown: list[tuple[int, bool]] = []
    follower, seen = Follower(path), []
    with Journal.open(path, "j", BYTES, lambda closed: grown.append((journal.last, closed))) as journal:
        for n in range(1, 101):
            assert journal.append(Ticked(), 1.0, 2e9, 3).n == n
            if n % 7 == 0:
                seen += [entry.n for entry in follower.new()]
    files = Files(path)
    assert files.numbers() == list(range(1, len(files.numbers()) + 1)) and len(files.numbers()) > 5
    assert [ends(files, number)[1] for number in files.numbers()] == [n for n, closed in grown if closed]
    assert len(grown) > 3 * len(files.numbers())
    assert all(0.8 * BYTES < files.closed(number).stat().st_size <= BYTES for number in files.numbers())
    assert numbers(path) == list(range(1, 101))
    assert [*seen, *(entry.n for entry in follower.new())] == list(range(1, 101))
    assert [entry.n for entry in read(files.closed(2))] == list(range(*ends(files, 2)))
    write(path, 1)
    assert numbers(path)[-1] == 101


def ends(files: Files, number: int) -> tuple[int, int]:
    found = [entry.n for entry in tending.entries_of(files, number)]
    return found[0], found[-1] + 1


def test_a_line_longer_than_a_segment_has_one_of_its_own(path: Path) -> None:
    write(path, 3, Alert("k", "x" * 3 * BYTES))
    assert len(Files(path).numbers()) == 2 and numbers(path) == [1, 2, 3]


def between_two_names(files: Files) -> None:
    """The writer died behind the link."""
    os.link(files.path, files.closed(files.numbers()[-1] + 1))
    files.next.touch()


def before_the_first_line(files: Files) -> None:
    """The writer died behind the exchange."""
    os.rename(files.path, files.closed(files.numbers()[-1] + 1))
    files.path.touch()


def without_an_active_file(files: Files) -> None:
    """It died on a file system without links."""
    os.rename(files.path, files.closed(files.numbers()[-1] + 1))
    files.next.touch()


def in_a_draft(files: Files) -> None:
    """The tender died in the middle of a file."""
    files.next.write_bytes(b"{")
    for name in (files.packed(1), files.view(1), files.past):
        name.with_name(f"{name.name}.tmp").write_bytes(b"\x1f\x8b")


def before_the_old_one_went(files: Files) -> None:
    """It died between a packed segment and the end of the other one."""
    kept = files.closed(1).read_bytes()
    tending.pack(files, 1)
    files.closed(1).write_bytes(kept)


def behind_everything(files: Files) -> None:
    """The writer closed the active file, and that was tended, before it died."""
    before_the_first_line(files)
    for number in files.numbers():
        tending.pack(files, number)


@pytest.mark.parametrize(
    "death",
    [between_two_names, before_the_first_line, without_an_active_file, in_a_draft, before_the_old_one_went,
     behind_everything],
    ids=lambda death: death.__name__,
)  # fmt: skip
def test_whoever_died_left_a_whole_journal(path: Path, death: Callable[[Files], None]) -> None:
    write(path, 30)
    files, follower = Files(path), Follower(path)
    assert len(follower.new()) == 30
    death(files)
    assert numbers(path) == list(range(1, 31)), "as it was left"
    assert follower.new() == []
    write(path, 25)
    assert numbers(path) == list(range(1, 56)), "and as it goes on"
    assert [entry.n for entry in follower.new()] == list(range(31, 56))
    assert not files.next.exists()
    kept = [file.stat().st_ino for file in path.parent.glob("*.jsonl*") if file.stat().st_size]
    assert len(set(kept)) == len(kept)
    tending.tend(path)
    assert numbers(path) == list(range(1, 56))
    assert [each.suffix for each in path.parent.glob("*.jsonl*")].count(".gz") == len(files.numbers()) - 1


WRITER = """
import sys, threading
from pathlib import Path
from everstep.control.journal import Journal
from everstep.core.events import StepsSeen
journal = Journal.open(Path(sys.argv[1]), "j", 3000)
while True:
    print(journal.append(StepsSeen(1, journal._next, -1, 0.0), 8.0 * journal._next, 2e9, 1).n, flush=True)
"""


def test_writer_and_tender_are_killed_again_and_again(path: Path) -> None:
    """Only ticks that were compacted are gone; the newest entries are all there."""
    chance, told = random.Random(4), 0
    for _ in range(5):
        tend = [sys.executable, "-m", "everstep.control.tending", str(path)]
        with (
            subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer,
            subprocess.Popen(tend, stderr=subprocess.DEVNULL) as tender,
        ):
            assert writer.stdout is not None
            for _ in range(chance.randrange(50, 400)):
                writer.stdout.readline()
            for process in chance.sample([writer, tender], 2):
                process.send_signal(signal.SIGKILL)
            told = max([told, *(int(line) for line in writer.stdout if line.endswith("\n"))])
        found = numbers(path)
        assert found[-1] >= told and found == sorted(set(found))
        assert found[-20:] == list(range(found[-20], found[-1] + 1))
    tending.tend(path)
    packed = Files(path).numbers()[:-1]
    assert len(packed) > 3 and all(Files(path).packed(number).exists() for number in packed)
    found, files = numbers(path), Files(path)
    assert all(ends(files, a)[1] == ends(files, b)[0] for a, b in zip(packed, packed[1:], strict=False))
    assert found[0] == 1 and len(found) < found[-1]


def test_a_second_writer_waits_at_the_right_file(path: Path) -> None:
    """The first one closed the file that the second one had opened."""
    write(path, 5)
    with Journal.open(path, "j", BYTES) as first:
        code = (
            "import sys; from pathlib import Path; from everstep.control.journal import Journal\n"
            "Journal.open(Path(sys.argv[1]), 'j')"
        )
        for _ in range(40):
            first.append(Ticked(), 1.0, 2e9, 3)
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode and f"written by process {os.getpid()}:" in done.stderr


def test_a_writer_that_opened_a_file_just_closed_opens_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Journal.open(path, "j", BYTES)
    lock, locked = journal_module._lock, []

    def late(path: Path, fd: int) -> None:
        while not Files(path).numbers():
            first.append(Ticked(), 1.0, 2e9, 3)
        first.close()
        lock(path, fd)
        locked.append(fd)

    monkeypatch.setattr(journal_module, "_lock", late)
    with Journal.open(path, "j", BYTES) as second:
        second.append(Ticked(), 1.0, 2e9, 3)
    assert len(locked) == 2 and numbers(path) == list(range(1, second.last + 1)) and path.stat().st_size > 0
    assert Files(path).closed(1).read_bytes().count(b"\n") == second.last - path.read_bytes().count(b"\n")


def test_a_follower_goes_on_in_a_segment_that_was_packed_meanwhile(path: Path) -> None:
    follower = Follower(path)
    with Journal.open(path, "j", 6000) as journal:
        for n in range(1, 100):
            journal.append(StepsSeen(1, n, -1, 0.0), 4.0 * n, 2e9, 1)
            if n == 20:
                assert [entry.n for entry in follower.new()] == list(range(1, 21))
    tending.tend(path)
    stays = [n for n in numbers(path) if n > 20]
    assert [entry.n for entry in follower.new()] == stays
    assert stays[0] < ends(Files(path), 1)[1] - 2 and len(stays) < 75, "some of that segment were compacted, not all"


def test_who_waits_for_what_was_just_asked_reads_no_more_than_the_end(path: Path) -> None:
    write(path, 60)
    closed = Files(path).numbers()
    assert len(closed) > 3
    found = [entry.n for entry in Follower(path, late(path)).new()]
    assert found == numbers(path)[-len(found) :] and found[0] == ends(Files(path), closed[-1])[0]
    path.write_bytes(path.read_bytes() + b"damaged\n")
    assert ended(path) is None


def test_without_room_for_another_file_the_active_one_grows(path: Path) -> None:
    write(path, 5)
    with Journal.open(path, "j", BYTES) as journal:
        path.with_name("journal.jsonl.next").mkdir()  # as good as no room: it cannot be made
        for _ in range(20):
            journal.append(Ticked(), 1.0, 2e9, 3)
        assert "grows beyond 1000 bytes" in journal.note and path.stat().st_size > BYTES
        path.with_name("journal.jsonl.next").rmdir()
        for _ in range(20):
            journal.append(Ticked(), 1.0, 2e9, 3)
    assert numbers(path) == list(range(1, 46)) and Files(path).numbers()


def test_a_tender_without_room_leaves_all_as_it_was(path: Path) -> None:
    write(path, 60, StepsSeen(1, 1, -1, 0.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        for act in (tending.tend, lambda path: tending.pack(Files(path), 1)):
            with pytest.raises(OSError, match="File too large"):
                act(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert numbers(path) == list(range(1, 61))
    assert not list(path.parent.glob("*.tmp")) and not list(path.parent.glob("*.gz"))


@pytest.fixture
def packed(path: Path) -> Iterator[Files]:
    write(path, 100)
    tending.tend(path)
    yield Files(path)


def damaged(files: Files) -> None:
    lines = gzip.decompress(files.packed(2).read_bytes()).splitlines(keepends=True)
    files.packed(2).write_bytes(gzip.compress(b"".join([*lines[:2], b"nonsense\n", *lines[3:]])))


def test_whoever_looks_reads_over_damage_and_a_controller_does_not(packed: Files) -> None:
    kept = {path: path.read_bytes() for path in packed.path.parent.iterdir()}
    second = range(*ends(packed, 2))

    def cut() -> None:
        packed.packed(2).write_bytes(packed.packed(2).read_bytes()[:-30])

    def shorten() -> None:
        lines = gzip.decompress(packed.packed(2).read_bytes()).splitlines(keepends=True)
        packed.packed(2).write_bytes(gzip.compress(b"".join(lines[:-2])))

    cases: list[tuple[Callable[[], object], str]] = [
        (shorten, f"000003.jsonl.gz: entries {second[-2]} to {second[-1]} are missing"),
        (lambda: damaged(packed), "000002.jsonl.gz, line 3 is damaged"),
        (lambda: packed.packed(2).unlink(), "segments 2 to 2 are missing"),
        (lambda: packed.packed(1).unlink(), "what came before segment 2 is missing"),
        (cut, "000002.jsonl.gz is damaged or cut short behind line"),
    ]
    for damage, text in cases:
        damage()
        with pytest.raises(JournalError, match=text):
            numbers(packed.path)
        reading = read(packed.path, partial=True)
        found = [entry.n for entry in reading]
        assert text in " ".join(reading.damage) and found[-1] == 100 and len(found) > 80
        for path, data in kept.items():
            path.write_bytes(data)
    packed.path.unlink()
    assert numbers(packed.path)[-1] == ends(packed, packed.numbers()[-1])[1] - 1, "the newest entries are missing"
    alone = packed.path.with_name("elsewhere.jsonl.gz")
    shutil.copy(packed.packed(2), alone)
    assert [entry.n for entry in read(alone)] == list(second)
