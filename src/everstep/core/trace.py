"""What a worker's trace is made of: spans of time, each a record of fixed size, in memory and in its file.

A worker writes records into the ring at the end of its page (core.page): the agent copies them from there to the file
of the worker's place, `logs/NODE/trace/LOCAL_RANK.trace`. A file is a header, which is a JSON object filled up with
spaces, and records; half of what is kept lies in `LOCAL_RANK.trace.old`. Times are nanoseconds of the node's monotonic
clock.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec

# begin, end, amount, step, epoch, kind, track, two bytes of nothing, stamp: which record it is, counted from 1
RECORD = struct.Struct("=QQQIIBB2xI")
STAMP = struct.Struct("=I")
KIND_AT = 32
STAMP_AT = RECORD.size - STAMP.size  # it is written last: whoever finds it finds the rest
STAMPS = 1 << 32
RECORDS = 8192  # in memory: the agent looks every second
OPEN = struct.Struct("=QQ")  # behind the records: what the thread that trains is in, plus one, and since when; or 0
OPEN_AT = RECORDS * RECORD.size
RING_BYTES = OPEN_AT + OPEN.size
HEADER_BYTES = 512
FOLDER, SUFFIX, OLD = "trace", ".trace", ".trace.old"


class Kind(enum.IntEnum):
    """What a span is. Numbers stay as they are: files of older runs hold them. Below COLLECTIVE: everything else."""

    BEGAN = 0  # a moment: a process took this place. step: its rank, amount: its pid
    STEP = 1  # from one step's end to the next one's
    START = 2  # of the process, up to its first step
    EVAL = 3
    DATA = 4  # until a batch was there
    FORWARD = 5  # from the batch, or what was seen last, to the backward
    BACKWARD = 6
    UPDATE = 7  # from the backward to the end of the optimizer's step
    SAVE = 8
    LOAD = 9
    AGREE = 10  # votes, and changes of epoch
    SUMS = 11  # the rest of the gradients' sums, which the backward did not hide
    SUM = 12  # gradients summed over the members. amount: bytes
    BUFFERS = 13
    METRIC = 14  # Session.sum
    COPY = 15  # of the state, for a save
    SERVE = 16  # the state sent to a newcomer
    FETCH = 17  # the state received from a member
    RESTORE = 18  # the state taken from where it is kept
    UNDONE = 19  # a moment: the step under way begins again
    EPOCH = 20  # a moment: this worker went over to the epoch
    WAIT = 21  # for an operation of torch.distributed, or for whatever else the others do
    ENDED = 22  # a moment: the process of this place is gone. amount: what it was in then, plus one; or 0
    LOST = 23  # a moment: the agent came too late for this many records (amount)
    COLLECTIVE = 64  # one that has no number of its own
    ALL_GATHER = 65
    ALL_GATHER_COALESCED = 66
    ALL_GATHER_INTO_TENSOR = 67
    ALL_GATHER_OBJECT = 68
    ALL_GATHER_SINGLE = 69
    ALL_REDUCE = 70
    ALL_REDUCE_COALESCED = 71
    ALL_TO_ALL = 72
    ALL_TO_ALL_SINGLE = 73
    BARRIER = 74
    BATCH_ISEND_IRECV = 75
    BROADCAST = 76
    BROADCAST_OBJECT_LIST = 77
    GATHER = 78
    GATHER_OBJECT = 79
    MONITORED_BARRIER = 80
    RECV = 81
    REDUCE = 82
    REDUCE_SCATTER = 83
    REDUCE_SCATTER_SINGLE = 84
    REDUCE_SCATTER_TENSOR = 85
    SCATTER = 86
    SCATTER_OBJECT_LIST = 87
    SEND = 88


NUMBERS = frozenset(Kind)
MOMENTS = frozenset((Kind.BEGAN, Kind.UNDONE, Kind.EPOCH, Kind.ENDED, Kind.LOST))
STEPS_TRACK, MAIN_TRACK, FIRST_OTHER = 0, 1, 8  # numbers between: threads of ours
MOST_TRACKS = 64  # threads beyond share the last one
THREADS = {"everstep-reduce": 2, "everstep-snapshot": 3, "everstep-serve": 4}
ON_STEPS = frozenset((Kind.STEP, Kind.START, Kind.EVAL))  # these have a track of their own, whatever the thread


class Record(NamedTuple):
    """One span, or moment (begin = end). `step`: the one under way, counted from 1. `epoch` 0: not known there."""

    begin_ns: int
    end_ns: int
    amount: int
    step: int
    epoch: int
    kind: int
    track: int
    stamp: int


class Header(msgspec.Struct, frozen=True):
    """What a file begins with. `boot`: of the machine's kernel; files with the same one have one clock."""

    node: str
    local_rank: int
    incarnation: str  # of the agent that wrote it
    boot: str
    wall_ns: int  # since 1970, at mono_ns
    mono_ns: int
    rank: int = -1  # of the last process that is in it; -1: of none
    record_bytes: int = RECORD.size
    version: int = 1


def pack_header(header: Header) -> bytes:
    text = msgspec.json.encode(header)
    assert len(text) < HEADER_BYTES
    return text.ljust(HEADER_BYTES - 1) + b"\n"


def unpack_header(data: bytes) -> Header:
    """Raises ValueError for what is no header, or of a version that is not known here."""
    try:
        header = msgspec.json.decode(data[:HEADER_BYTES], type=Header)
    except msgspec.DecodeError as error:
        raise ValueError(f"no header of a trace: {error}") from error
    if header.version != 1 or header.record_bytes != RECORD.size:
        raise ValueError(f"a trace of version {header.version} with records of {header.record_bytes} bytes")
    return header


def collective(name: str) -> Kind:
    """By the name of torch.distributed's function."""
    return Kind.__members__.get(name.upper(), Kind.COLLECTIVE)
