"""The agent's part in traces: copies what workers write down in memory to a file for each place of the node.

So a worker that is killed leaves its last moments, a disk that is slow or full holds no worker up, and who kills the
agent loses a second. All of it in one thread, which nothing else waits for. A place keeps its files through all lives
of its worker; of `size` bytes for each place the oldest half goes when they are full.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path

from msgspec.structs import replace

from everstep.control.crew import Worker
from everstep.control.prepare import AgentOptions
from everstep.core import identity
from everstep.core import trace as form
from everstep.core.page import SIZE
from everstep.core.trace import RECORD, RECORDS, STAMP, STAMP_AT, STAMPS, Header, Kind, Record

EVERY_S = 1.0
FRESH_NS = 1_000_000  # what ended this late may not be whole yet, as another processor sees it
LOOKED_AHEAD = 16  # records behind one that is missing: its thread is about to write it, or died in the middle
END_S = 2.0  # for the last look, when the agent ends


class Ring:
    """Reads the ring of one worker, which goes on writing."""

    def __init__(self, page: int) -> None:
        """`page`: descriptor of its page; it may be closed afterwards."""
        self._memory = mmap.mmap(page, SIZE + form.RING_BYTES, prot=mmap.PROT_READ)
        self._ring = memoryview(self._memory)[SIZE:]
        self._next = 0  # number of the record that is wanted, from 0
        self._missing = -1
        self.lost = 0

    def new(self, now_ns: int, over: bool = False) -> list[bytes]:
        """Records since the last call. `over`: nobody writes any more."""
        found: list[tuple[int, bytes]] = []  # with their numbers
        while len(found) < RECORDS:
            at = self._next % RECORDS * RECORD.size
            record = bytes(self._ring[at : at + RECORD.size])
            fields = Record(*RECORD.unpack(record))
            ahead = (fields.stamp - self._next - 1) % STAMPS
            if not ahead and fields.stamp:
                if not over and now_ns - fields.end_ns < FRESH_NS:
                    break
                found.append((self._next, record))
                self._next += 1
            elif not self._skip(fields.stamp, ahead, over):
                break
        return self._intact(found)

    def _skip(self, stamp: int, ahead: int, over: bool) -> bool:
        """The record that is wanted is not there. Whether to go on with another one."""
        if stamp and ahead < STAMPS // 2:  # it was overwritten: go on where there is time to read
            gone = ahead - RECORDS + RECORDS // 4
            self._next += gone
            self.lost += gone
            return True
        if not self._written_behind():
            return False
        if self._missing != self._next and not over:
            self._missing = self._next  # its thread may be about to write it: until the next look
            return False
        self._next += 1
        self.lost += 1
        return True

    def _written_behind(self) -> bool:
        for number in range(self._next + 1, self._next + LOOKED_AHEAD):
            (stamp,) = STAMP.unpack_from(self._ring, number % RECORDS * RECORD.size + STAMP_AT)
            if stamp and stamp == (number + 1) % STAMPS:
                return True
        return False

    def _intact(self, found: list[tuple[int, bytes]]) -> list[bytes]:
        """What was overwritten while it was read is left out: the first ones."""
        for place, (number, record) in enumerate(found):
            at = number % RECORDS * RECORD.size + STAMP_AT
            if self._ring[at : at + STAMP.size] == record[STAMP_AT:]:
                self.lost += place
                return [record for _, record in found[place:]]
        self.lost += len(found)
        return []

    def inside(self) -> tuple[int, int]:
        """What the thread that trains is in, plus one, and since when; zeros: in nothing that is told."""
        kind, since_ns = form.OPEN.unpack_from(self._ring, form.OPEN_AT)
        return kind, since_ns

    def close(self) -> None:
        self._ring.release()
        self._memory.close()


class PlaceFile:
    """The files of one place. Raises OSError."""

    def __init__(self, path: Path, size: int, header: Header) -> None:
        self._path, self._header = path, header
        self._half = max(size // 2, form.HEADER_BYTES + 2 * RECORD.size)
        self._began = b""  # who the worker is: at the head of each file
        self._end = -1
        self._fd = -1

    def write(self, records: list[bytes]) -> None:
        while records:
            room = (self._half - self._end) // RECORD.size if self._fd >= 0 else 0
            if not room:
                self._renew()
                continue
            part, records = records[:room], records[room:]
            self._append(b"".join(part))
            began = next((each for each in reversed(part) if each[form.KIND_AT] == Kind.BEGAN), None)
            if began is not None:
                self._began = began
                self._header = replace(self._header, rank=Record(*RECORD.unpack(began)).step)
                os.pwrite(self._fd, form.pack_header(self._header), 0)

    def _append(self, data: bytes) -> None:
        """Whole records, or none: what was written in part is overwritten."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], self._end + done)
        self._end += done

    def _renew(self) -> None:
        """Half of what is kept is full: the other half begins. If that cannot be, both stay as they are."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".new")
        self._fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._end = 0
        try:
            self._append(form.pack_header(self._header) + self._began)
            if self._path.exists():
                self._path.replace(self._path.with_name(self._path.name.removesuffix(form.SUFFIX) + form.OLD))
            fresh.replace(self._path)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Place:
    """One place of the node: its file, and the ring of who is there now."""

    def __init__(self, file: PlaceFile) -> None:
        self.file = file
        self.ring: Ring | None = None
        self._last = Record(0, 0, 0, 0, 0, Kind.BEGAN, form.MAIN_TRACK, 0)

    def copy(self, over: bool = False) -> None:
        """Raises OSError, and what could not be written is gone."""
        if self.ring is None:
            return
        ring, now_ns = self.ring, time.monotonic_ns()
        records = ring.new(now_ns, over)
        if records:
            self._last = Record(*RECORD.unpack(records[-1]))
        if ring.lost:
            records.append(self._told(Kind.LOST, now_ns, now_ns, ring.lost))
            ring.lost = 0
        if over:
            kind, since_ns = ring.inside()
            if kind:
                records.append(self._told(Kind(kind - 1), since_ns, now_ns))
            records.append(self._told(Kind.ENDED, now_ns, now_ns, kind))
            ring.close()
            self.ring = None
        if records:
            self.file.write(records)

    def _told(self, kind: Kind, began_ns: int, ended_ns: int, amount: int = 0) -> bytes:
        last = self._last
        return RECORD.pack(began_ns, ended_ns, amount, last.step, last.epoch, kind, form.MAIN_TRACK, 0)


class Tracer:
    """`size`: bytes for each place; 0: no traces. For the agent's event loop, which it never makes wait for a disk."""

    def __init__(self, options: AgentOptions, size: int) -> None:
        self._folder = Path(options.log_dir) / form.FOLDER
        self._node, self._incarnation, self._size = options.node, options.incarnation, size
        self._places: dict[int, Place] = {}
        self._asked: deque[tuple[int, Ring | None]] = deque()  # who is in a place from now on, or that nobody is
        self._changed = threading.Condition()
        self._closing = False
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="everstep-trace", daemon=True)

    def follow(self, *workers: Worker) -> None:
        """They begin, each in its place."""
        for worker in workers:
            if self._size and worker.page is not None:
                try:
                    self._ask(worker.local_rank, Ring(worker.page.fd))
                except OSError as error:
                    self._complain(error)

    def over(self, local_rank: int) -> None:
        """The worker of this place is gone."""
        if self._size:
            self._ask(local_rank, None)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(END_S)

    def _ask(self, local_rank: int, ring: Ring | None) -> None:
        with self._changed:
            self._asked.append((local_rank, ring))
            self._changed.notify()
        if self._thread.ident is None:
            self._thread.start()

    # The thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closing, EVERY_S)
                asked, closing = list(self._asked), self._closing
                self._asked.clear()
            for local_rank, ring in asked:
                self._change(local_rank, ring)
            for place in self._places.values():
                self._copy(place, over=closing)
            if closing:
                return

    def _change(self, local_rank: int, ring: Ring | None) -> None:
        place = self._places.get(local_rank)
        if place is None:
            place = self._places[local_rank] = Place(self._file(local_rank))
        self._copy(place, over=True)
        place.ring = ring

    def _file(self, local_rank: int) -> PlaceFile:
        header = Header(
            self._node, local_rank, self._incarnation, identity.host(), time.time_ns(), time.monotonic_ns()
        )  # fmt: skip
        return PlaceFile(self._folder / f"{local_rank}{form.SUFFIX}", self._size, header)

    def _copy(self, place: Place, over: bool = False) -> None:
        try:
            place.copy(over)
        except OSError as error:  # a full disk costs the trace some records
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            print(f"everstep: {self._folder}: {error.strerror}: the trace has a gap", file=sys.stderr)
