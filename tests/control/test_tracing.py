"""The agent's copy of traces: what is read of a ring that is written to, and files of bounded size."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.control.tracing import Place, PlaceFile, Ring
from everstep.core import trace as form
from everstep.core.page import Page
from everstep.core.trace import RECORD, RECORDS, RING_BYTES, Header, Kind, Record
from everstep.observe.trace_files import TraceFile, Window, places

LATE_NS = 10**18
HEADER = Header("node0", 0, "inc", "boot", 0, 0)


class Writer:
    """Writes into the ring of a page what a worker would."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.number = 0

    def write(self, count: int = 1, kind: Kind = Kind.SUM) -> None:
        for _ in range(count):
            self.put(self.number, kind)
            self.number += 1

    def put(self, number: int, kind: Kind = Kind.SUM) -> None:
        at = number % RECORDS * RECORD.size
        RECORD.pack_into(self.page.ring, at, number, number, number, 7, 1, kind, 1, number + 1)


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create("tracing", RING_BYTES)
    yield page
    page.close()


@pytest.fixture
def writer(page: Page) -> Writer:
    return Writer(page)


@pytest.fixture
def ring(page: Page) -> Iterator[Ring]:
    ring = Ring(page.fd)
    yield ring
    ring.close()


def numbers(ring: Ring, over: bool = False) -> list[int]:
    return [Record(*RECORD.unpack(record)).amount for record in ring.new(LATE_NS, over)]


def test_each_record_is_read_once(writer: Writer, ring: Ring) -> None:
    seen = []
    for count in (0, 1, 5, RECORDS, 3, RECORDS - 1):
        writer.write(count)
        seen += numbers(ring)
    assert seen == list(range(writer.number)) and ring.lost == 0


def test_a_reader_that_comes_too_late_says_how_many_are_lost(writer: Writer, ring: Ring) -> None:
    writer.write(10)
    assert numbers(ring) == list(range(10))
    writer.write(3 * RECORDS + 100)
    seen = numbers(ring)
    assert seen == list(range(seen[0], writer.number)) and len(seen) >= RECORDS // 2
    assert ring.lost == seen[0] - 10
    writer.write(2)
    assert numbers(ring) == [writer.number - 2, writer.number - 1]


def test_a_record_whose_thread_died_in_the_middle_is_skipped(writer: Writer, ring: Ring) -> None:
    writer.write(5)
    writer.number += 1  # number 5 is never written
    writer.write(3)
    assert numbers(ring) == [0, 1, 2, 3, 4], "it may still come"
    assert numbers(ring) == [6, 7, 8] and ring.lost == 1
    writer.number += 1
    writer.write(1)
    assert numbers(ring, over=True) == [10]


def test_a_record_that_comes_late_is_not_skipped(writer: Writer, ring: Ring) -> None:
    writer.number += 1
    writer.write(2)
    assert numbers(ring) == []
    writer.put(0)
    assert numbers(ring) == [0, 1, 2] and ring.lost == 0


def test_what_just_ended_is_left_for_the_next_look(writer: Writer, ring: Ring) -> None:
    writer.write(2)
    assert [*ring.new(1000)] == [] and len(ring.new(2 * 10**6)) == 2


def test_files_stay_below_their_size_and_keep_the_newest(tmp_path: Path, page: Page, writer: Writer) -> None:
    size = 100 * RECORD.size + 2 * form.HEADER_BYTES
    place = Place(PlaceFile(tmp_path / "node0/trace/0.trace", size, HEADER))
    place.ring = Ring(page.fd)
    writer.write(1, Kind.BEGAN)
    chance = random.Random(1)
    for _ in range(60):
        writer.write(chance.randrange(20))
        place.copy()
        files = list((tmp_path / "node0/trace").iterdir())
        assert sum(file.stat().st_size for file in files) <= size
    writer.write(2 * RECORDS)
    place.copy(over=True)
    with places(tmp_path) as ((found,), wrong):
        assert wrong == [] and found.rank == 7, "who it is stays known"
        spans = [span.record for span in found.spans(Window()) if span.record.kind == Kind.SUM]
    newest = [each.amount for each in spans]
    assert newest == list(range(newest[0], writer.number)) and len(newest) >= 40
    place.file.close()


def test_the_end_tells_what_it_was_in(tmp_path: Path, page: Page, writer: Writer) -> None:
    place = Place(PlaceFile(tmp_path / "0.trace", 1 << 20, HEADER))
    place.ring = Ring(page.fd)
    writer.write(3)
    form.OPEN.pack_into(page.ring, form.OPEN_AT, Kind.ALL_REDUCE + 1, 2)
    place.copy(over=True)
    place.file.close()
    with contextlib.closing(TraceFile(tmp_path / "0.trace")) as file:
        *_, reduce, ended = (file.record(number) for number in range(file.num_records))
    assert (reduce.kind, reduce.begin_ns, reduce.step) == (Kind.ALL_REDUCE, 2, 7) and reduce.end_ns > 2
    assert (ended.kind, ended.amount) == (Kind.ENDED, Kind.ALL_REDUCE + 1)


def test_a_full_disk_costs_the_trace_and_what_is_there_stays_readable(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    if libc.mount(b"everstep-test", str(disk).encode(), b"tmpfs", 0, b"size=64k"):
        pytest.skip(f"no mount: {os.strerror(ctypes.get_errno())}")
    try:
        file = PlaceFile(disk / "node0/trace/0.trace", 48 << 10, HEADER)
        counter = itertools.count(1)
        assert _write(file, counter, 1000), "one half is full, the other not"
        (disk / "other").write_bytes(bytes(16 << 10))
        failed = [n for n in range(100) if not _write(file, counter, 20)]
        assert failed, "the disk is full before the other half is"
        (disk / "other").unlink()
        assert _write(file, counter, 20)
        with places(disk) as ((found,), wrong):
            ends = [span.end_ns for span in found.spans(Window())]
        assert wrong == [] and ends == sorted(set(ends)) and ends[-1] == next(counter) - 1
        file.close()
    finally:
        libc.umount2(str(disk).encode(), 2)


def _write(file: PlaceFile, counter: Iterator[int], count: int) -> bool:
    """Whether it had room."""
    times = [next(counter) for _ in range(count)]
    try:
        file.write([RECORD.pack(t, t, 0, 1, 1, Kind.SUM, 1, 0) for t in times])
    except OSError:
        return False
    return True
