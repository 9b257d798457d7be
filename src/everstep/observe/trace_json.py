"""The JSON trace format of Chrome, which Perfetto reads too: a job's slices and its workers' records as events.

Process 1 is the job; each place of a worker is a process as well, in order of ranks, with a track for whole steps, one
for the thread that trains and one for each other thread. Times are microseconds since the job's submission. The format
wants slices of one track to lie in each other or apart: what overlaps otherwise gets a track beside it. To Perfetto a
thread's number means the same thread in all processes, and a process's number is that of its first thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from everstep.core import trace as form
from everstep.core.trace import Kind
from everstep.observe.trace import TRACKS, Slice
from everstep.observe.trace_files import Span, Window

JOB = 1  # its process; those of workers follow
TRACKS_EACH = 256  # numbers of threads for each process
FIRST_THREAD = 1 << 20  # processes have smaller numbers
JOB_LANES, LANES = 32, 4  # of a track; MOST_TRACKS of a worker times its lanes are TRACKS_EACH

THREADS = {form.STEPS_TRACK: "steps", form.MAIN_TRACK: "training"}
THREADS |= {number: name.removeprefix("everstep-") for name, number in form.THREADS.items()}
TITLES = {int(kind): kind.name.lower().replace("_", " ") for kind in Kind if kind < Kind.COLLECTIVE}
TITLES |= {int(kind): kind.name.lower() for kind in Kind if kind >= Kind.COLLECTIVE}
TITLES |= {
    Kind.AGREE: "vote or change of epoch",
    Kind.SUMS: "wait for sums",
    Kind.SUM: "sum of gradients",
    Kind.METRIC: "sum of a metric",
    Kind.COPY: "copy for a save",
    Kind.SERVE: "serve state",
    Kind.FETCH: "fetch state",
    Kind.RESTORE: "restore state",
    Kind.UNDONE: "step undone",
}
IN_BYTES = frozenset((Kind.SUM, *(kind for kind in Kind if kind >= Kind.COLLECTIVE)))

_encode = msgspec.json.encode


class Lanes:
    """Places slices, in the order of their begins, the longer first, so that no two of a lane overlap in part.

    most: lanes. nest: one may lie in another.
    """

    def __init__(self, most: int, nest: bool) -> None:
        self._most, self._nest = most, nest
        self._open: list[list[float]] = []  # ends of what is open, by lane

    def place(self, begin: float, end: float) -> int:
        """-1: there is no lane left. A thread's own spans need one; only threads that share a track need more."""
        for lane, ends in enumerate(self._open):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or (self._nest and end <= ends[-1]):
                ends.append(end)
                return lane
        if len(self._open) == self._most:
            return -1
        self._open.append([end])
        return len(self._open) - 1


# The job --------------------------------------------------------------------------------------------------


def job_events(
    job: str, slices: Iterable[Slice], steps: Iterable[tuple[float, int]], window: Window
) -> Iterator[bytes]:
    """`slices` in the order of their begins, the longer first."""
    yield from _named(JOB, f"job {job}", 0)
    lanes: dict[str, Lanes] = {}
    used: set[int] = set()
    for each in slices:
        if not window.holds(each.begin_s, each.end_s):
            continue
        track = TRACKS.index(each.track) * JOB_LANES
        moment = each.begin_s == each.end_s
        if not moment:
            lane = lanes.setdefault(each.track, Lanes(JOB_LANES, nest=False)).place(each.begin_s, each.end_s)
            if lane < 0:
                continue
            track += lane
        if track not in used:
            used.add(track)
            yield from _track(JOB, track, each.track)
        yield from _job_slice(each, _thread(JOB, track), moment)
    for at_s, step in steps:
        if window.holds(at_s, at_s):
            yield _encode({"ph": "C", "pid": JOB, "ts": _us(at_s), "name": "steps made", "args": {"steps": step}})


def _job_slice(each: Slice, thread: int, moment: bool) -> Iterator[bytes]:
    event: dict[str, Any] = {"pid": JOB, "tid": thread, "cat": "job", "ts": _us(each.begin_s), "name": each.name}
    event["args"] = dict(each.args)
    if moment:
        yield _encode({"ph": "i", "s": "t", **event})
        return
    end_us = _us(each.end_s)
    yield _encode({"ph": "X", "dur": end_us - event["ts"], **event})
    at_s = each.begin_s
    for name, seconds in each.parts:
        begin_us, end_part_us = _us(at_s), min(_us(at_s + seconds), end_us)
        at_s += seconds
        yield _encode({"ph": "X", **event, "ts": begin_us, "dur": end_part_us - begin_us, "name": name, "args": {}})


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


# Workers --------------------------------------------------------------------------------------------------


def worker_events(pid: int, name: str, spans: Iterable[Span]) -> Iterator[bytes]:
    """`spans`: of one place, in the order of their begins, the longer first."""
    yield from _named(pid, name, pid)
    lanes: dict[int, Lanes] = {}
    used: set[int] = set()
    for span in spans:
        kind = span.record.kind
        own = form.STEPS_TRACK if kind in form.ON_STEPS else span.record.track % form.MOST_TRACKS
        moment = kind in form.MOMENTS
        if own not in lanes:
            lanes[own] = Lanes(LANES, nest=True)
        lane = 0 if moment else lanes[own].place(span.begin_ns, span.end_ns)
        if lane < 0:
            continue
        track = own * LANES + lane
        if track not in used:
            used.add(track)
            yield from _track(pid, track, THREADS.get(own, f"thread {own}"))
        yield _worker_event(pid, _thread(pid, track), span, moment)


def _worker_event(pid: int, thread: int, span: Span, moment: bool) -> bytes:
    begin_ns, end_ns, record = span
    title = TITLES.get(record.kind, f"kind {record.kind}")
    args = f'"step":{record.step},"epoch":{record.epoch}'
    if record.kind == Kind.STEP:
        title = f"step {record.step}"
    elif record.kind == Kind.EPOCH:
        title = f"epoch {record.epoch}"
    elif record.kind == Kind.BEGAN:
        title, args = f"process {record.amount} began", f'"pid":{record.amount},"rank":{record.step}'
    elif record.kind == Kind.ENDED:
        title = f"ended in {TITLES.get(record.amount - 1, record.amount - 1)}" if record.amount else "ended"
    elif record.kind == Kind.LOST:
        title = f"{record.amount} records lost"
    elif record.kind in IN_BYTES and record.amount:
        args += f',"bytes":{record.amount}'
    begins = f'"ts":{begin_ns // 1000}.{begin_ns % 1000:03d}'
    if moment:
        head = f'{{"ph":"i","s":"t",{begins}'
    else:
        lasts_ns = end_ns - begin_ns
        head = f'{{"ph":"X",{begins},"dur":{lasts_ns // 1000}.{lasts_ns % 1000:03d}'
    return f'{head},"pid":{pid},"tid":{thread},"cat":"worker","name":"{title}","args":{{{args}}}}}'.encode()


# Names ----------------------------------------------------------------------------------------------------


def _named(pid: int, name: str, place: int) -> Iterator[bytes]:
    for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": place})):
        yield _encode({"ph": "M", "pid": pid, "name": what, "args": args})


def _track(pid: int, track: int, name: str) -> Iterator[bytes]:
    for what, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track})):
        yield _encode({"ph": "M", "pid": pid, "tid": _thread(pid, track), "name": what, "args": args})


def _thread(pid: int, track: int) -> int:
    return FIRST_THREAD + pid * TRACKS_EACH + track
