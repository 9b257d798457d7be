"""Framed streams: wherever a message broke off, both sides find the next one, and filling is never taken for data."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.comms import halves
from everstep.comms.halves import FRAME_BYTES, STAGE_BYTES, StreamEnded
from everstep.comms.stream import Connection, Stream
from everstep.comms.table import Peer, Table
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, Seat

MARK, OTHER = b"m" * 16, b"o" * 16
BIG = 5 * FRAME_BYTES + 17  # more than two socket buffers hold
NOBODY = memoryview(b"")


class Pair:
    """Two workers, role 0 and 1, and one stream between them which outlives the epochs."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        owned = [Connection(fileno=sock.detach()) for sock in (near, far)]
        self.ends = [Stream(owned[0], "w1", 0), Stream(owned[1], "w0", 0)]
        self.pool = ThreadPoolExecutor(4)
        self.enter(1)

    def enter(self, epoch: int) -> None:
        self.tables = [self.table(role, epoch) for role in (0, 1)]

    def table(self, role: int, epoch: int) -> Table:
        seats = tuple(Seat(f"w{i}", "n", f"h{i}", "127.0.0.1:1") for i in (0, 1))
        peers = [Peer(seats[other], None, {} if other == role else {0: self.ends[role]}) for other in (0, 1)]
        return Table(Formation(epoch, seats, abort=False, floor=0), role, peers)

    def send(self, role: int, data: bytes, number: int = 1, mark: bytes = MARK) -> Future[dict[int, bytes]]:
        return self.pool.submit(self.tables[role].exchange, 0, number, mark, {1 - role: memoryview(data)}, {})

    def receive(self, role: int, into: bytearray, number: int = 1, mark: bytes = MARK) -> Future[dict[int, bytes]]:
        return self.pool.submit(self.tables[role].exchange, 0, number, mark, {}, {1 - role: memoryview(into)})


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for table in made.tables:
        table.abort("the test is over")
    made.pool.shutdown()


def settled(work: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not work():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def blocked(thing: Future[dict[int, bytes]], side: Callable[[], object]) -> None:
    """Until a call is stuck: what it has moved does not change any more."""
    seen: list[object] = []

    def still() -> bool:
        seen.append(side())
        return len(seen) > 50 and len(set(map(repr, seen[-50:]))) == 1

    settled(still)
    assert not thing.done()


@pytest.mark.parametrize("size", [0, 1, STAGE_BYTES - 48, STAGE_BYTES, FRAME_BYTES, FRAME_BYTES + 1, BIG])
def test_both_ways_at_once(pair: Pair, size: int) -> None:
    data = [os.urandom(size), os.urandom(size)]
    into = [bytearray(size), bytearray(size)]

    def swap(role: int) -> dict[int, bytes]:
        return pair.tables[role].exchange(
            0, 1, MARK, {1 - role: memoryview(data[role])}, {1 - role: memoryview(into[role])}
        )

    marks = list(pair.pool.map(swap, (0, 1)))
    assert marks == [{1: MARK}, {0: MARK}]
    assert into == data[::-1]


def test_many_small_messages_in_order(pair: Pair) -> None:
    into = [bytearray(8) for _ in range(300)]
    for number in range(300):
        pair.send(0, number.to_bytes(8, "big"), number).result()
    for number in range(300):
        pair.receive(1, into[number], number).result()
    assert [int.from_bytes(data, "big") for data in into] == list(range(300))


def test_other_mark_or_length_is_told_and_thrown_away(pair: Pair) -> None:
    pair.send(0, b"12345", 1, OTHER).result()
    pair.send(0, b"123456", 2).result()
    pair.send(0, b"fine!", 3).result()
    into = [bytearray(5) for _ in range(3)]
    assert [pair.receive(1, into[i], i + 1).result() for i in range(3)] == [{0: OTHER}, {0: b""}, {0: MARK}]
    assert into == [bytes(5), bytes(5), b"fine!"]


@pytest.mark.parametrize("size", [3, BIG])
def test_a_message_that_comes_early_is_kept(pair: Pair, size: int) -> None:
    first, second = os.urandom(size), os.urandom(size)
    pair.pool.submit(lambda: (pair.send(0, second, 2).result(), pair.send(0, first, 1).result()))
    into = [bytearray(size), bytearray(size)]
    assert pair.receive(1, into[0], 1).result() == {0: MARK}
    assert pair.receive(1, into[1], 2).result() == {0: MARK}
    assert into == [first, second]


def test_two_threads_receive_from_one_peer(pair: Pair) -> None:
    into = [bytearray(5), bytearray(5)]
    waiting = [pair.receive(1, into[i], i) for i in (0, 1)]
    pair.send(0, b"later", 1).result()
    pair.send(0, b"first", 0).result()
    assert [work.result() for work in waiting] == [{0: MARK}, {0: MARK}]
    assert into == [b"first", b"later"]


def test_abort_wakes_a_blocked_send_and_the_stream_goes_on(pair: Pair) -> None:
    stuck = pair.send(0, bytes(range(256)) * (BIG // 256))
    blocked(stuck, lambda: len(pair.ends[0].sender._body))
    pair.tables[0].abort("a member died")
    with pytest.raises(EpochBroken, match="a member died"):
        stuck.result(4)
    assert 0 < pair.ends[0].sender._filling < FRAME_BYTES, "the abort came between two frames: nothing is shown"
    pair.enter(2)
    into = bytearray(BIG)
    data = os.urandom(BIG)
    arriving = pair.receive(1, into)
    pair.send(0, data).result()
    assert arriving.result() == {0: MARK} and into == data


def test_abort_wakes_a_blocked_receive_and_the_rest_is_drained(pair: Pair) -> None:
    into = bytearray(b"\xff" * BIG)
    sending = pair.send(0, bytes(BIG))
    arriving = pair.receive(1, into)
    settled(lambda: into[0] == 0)  # it has begun to come
    for table in pair.tables:
        table.abort("a member died")
    for work in (sending, arriving):
        with contextlib.suppress(EpochBroken):
            work.result(4)
    pair.enter(2)
    kept = bytes(into)
    fresh = bytearray(4)
    arriving = pair.receive(1, fresh)
    pair.send(0, b"next").result()
    assert arriving.result() == {0: MARK} and fresh == b"next"
    assert into == kept, "memory was written to after the call had ended"


def test_filling_is_never_taken_for_data(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side is not aborted yet when the filling comes: it must raise, not return with zeros."""
    monkeypatch.setattr(halves, "FRAME_BYTES", 1 << 30)  # so that the frame is the whole message
    stuck = pair.send(0, b"\x01" * BIG)
    blocked(stuck, lambda: len(pair.ends[0].sender._body))
    pair.tables[0].abort("a member died")
    assert isinstance(stuck.exception(1), EpochBroken)
    behind = pair.tables[1]
    pair.tables[0] = pair.table(0, 2)
    pair.send(0, b"next")
    arriving = pair.receive(1, bytearray(BIG))
    with pytest.raises(EpochBroken, match="a member gave a message up"):
        arriving.result(5)
    assert behind.broken
    pair.tables[1] = pair.table(1, 2)
    fresh = bytearray(4)
    assert pair.receive(1, fresh).result() == {0: MARK} and fresh == b"next"


def test_a_message_given_up_between_two_frames() -> None:
    near, far = socket.socketpair()
    with near, far:
        sender, receiver = halves.Sender(near, 0), halves.Receiver(far, 0)
        into = bytearray(200)
        near.sendall(halves._HEADER.pack(1, 1, MARK, 200, 100, 0) + bytes(100) + b"\x01")  # the first of two
        receiver.begin(1, 1, MARK, memoryview(into))
        assert receiver.pump() is None
        receiver.give_up()
        sender.begin(2, 1, MARK, memoryview(b"next"))
        sender.pump()
        fresh = bytearray(4)
        receiver.begin(2, 1, MARK, memoryview(fresh))
        assert receiver.pump() == MARK and fresh == b"next"


def test_what_came_early_is_forgotten_with_its_epoch() -> None:
    near, far = socket.socketpair()
    with near, far:
        sender, receiver = halves.Sender(near, 0), halves.Receiver(far, 0)
        for epoch in range(1, 50):
            for number in (1, 2):
                sender.begin(epoch, number, MARK, memoryview(bytes(1000)))
                assert sender.pump()
            receiver.begin(epoch, 2, MARK, memoryview(bytearray(1000)))
            assert receiver.pump() == MARK
            assert len(receiver._early) == 1


def test_who_meets_a_newer_epoch_raises_and_loses_nothing(pair: Pair) -> None:
    pair.tables[0] = pair.table(0, 2)
    pair.send(0, b"newer").result()
    into = bytearray(5)
    with pytest.raises(EpochBroken, match="epoch 1 is broken: a member is in epoch 2 already"):
        pair.receive(1, into).result(4)
    pair.tables[1] = pair.table(1, 2)
    assert pair.receive(1, into).result() == {0: MARK} and into == b"newer"


@pytest.mark.parametrize("sends", [True, False])
def test_a_dead_peer_breaks_the_epoch(pair: Pair, sends: bool) -> None:
    waiting = pair.send(0, bytes(BIG)) if sends else pair.receive(0, bytearray(8))
    time.sleep(0.02)
    pair.ends[1].end()
    with pytest.raises(EpochBroken, match="lost the link to w1"):
        waiting.result(4)
    assert pair.tables[0].broken and pair.ends[0].ended


def test_an_error_in_the_middle_breaks_the_epoch(pair: Pair) -> None:
    """A message is missing then: who caught the error must not go on with other messages of this epoch."""
    with pytest.raises((TypeError, ValueError)):
        pair.tables[0].exchange(0, 1, b"mark", {1: None}, {})  # type: ignore[dict-item]
    pair.enter(2)
    stuck = pair.receive(0, bytearray(8))
    pair.ends[0].receiver._channel = 5
    pair.send(1, b"12345678").result()
    with pytest.raises(AssertionError):
        stuck.result(4)
    with pytest.raises(EpochBroken, match="not our frames"):
        pair.receive(0, bytearray(8)).result(4)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), epochs=st.integers(1, 6))
def test_every_point_of_breaking_off(seed: int, epochs: int) -> None:
    """Each epoch: some messages, which either side gives up at any point; the sender may enter the next epoch first.

    What was received is what was sent, or nothing.
    """
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "FRAME_BYTES", rng.choice([700, 5000, 100_000]))
        patch.setattr(halves, "STAGE_BYTES", rng.choice([64, 100, 5000]))
        near, far = socket.socketpair()
        with near, far:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sender, receiver = halves.Sender(near, 0), halves.Receiver(far, 0)
            behind: Wanted | None = None
            for epoch in range(1, epochs + 1):
                behind = walk(rng, sender, receiver, epoch, behind, finish=epoch == epochs)


Wanted = tuple[bytes, bytearray]  # what was sent, and where it is to come


def walk(
    rng: random.Random,
    sender: halves.Sender,
    receiver: halves.Receiver,
    epoch: int,
    behind: Wanted | None,
    finish: bool,
) -> Wanted | None:
    """One epoch. Returns what the receiver still waits for when only the sender gave up."""
    for number in range(rng.randint(1, 4)):
        data = rng.randbytes(rng.choice([0, 1, 300, 700, 1400, 9000, 60_000]))
        into = bytearray(len(data))
        sender.begin(epoch, number, MARK, memoryview(data))
        if behind is not None:
            pump(rng, sender, receiver, behind, rng.choice([1, 5, 200]))
            receiver.give_up()
            behind = None
        receiver.begin(epoch, number, MARK, memoryview(into))
        out, came = pump(rng, sender, receiver, (data, into), 10**6 if finish else rng.choice([0, 1, 2, 5, 10**6]))
        sender.give_up()
        if not came and not finish and rng.random() < 0.5:
            return data, into
        receiver.give_up()
        if not (out and came):
            assert not finish
            return None
    return None


def pump(
    rng: random.Random, sender: halves.Sender, receiver: halves.Receiver, wanted: Wanted, turns: int
) -> tuple[bool, bool]:
    out = came = False
    for _ in range(turns):
        try:
            if rng.random() < 0.5:
                out = sender.pump()
            elif receiver.pump() is not None:
                came = True
                assert wanted[1] == wanted[0]
        except EpochBroken:
            break
        if out and came:
            break
    return out, came


def test_the_end_of_a_stream_is_told_in_each_half() -> None:
    near, far = socket.socketpair()
    far.close()
    with near:
        receiver, sender = halves.Receiver(near, 0), halves.Sender(near, 0)
        receiver.begin(1, 1, MARK, NOBODY)
        with pytest.raises(StreamEnded):
            receiver.pump()
        sender.begin(1, 1, MARK, NOBODY)
        with pytest.raises(StreamEnded):
            sender.pump()


def test_abort_while_another_thread_holds_the_stream(pair: Pair) -> None:
    waiting = [pair.receive(1, bytearray(1), number) for number in (1, 2, 3)]
    threading.Timer(0.05, pair.tables[1].abort, ["a member died"]).start()
    for work in waiting:
        with pytest.raises(EpochBroken):
            work.result(4)
