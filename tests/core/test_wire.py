"""Messages survive the wire however the bytes are cut, and bytes that are no message are refused by name."""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core import wire
from everstep.core.checkup import Arrived, Complaint, Examined, GroupSeen, Place, Reading, RingAsked, RingDone
from everstep.core.dealing import Dealing, Stream
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.sampled import Function, Sampled, Stack
from everstep.core.types import (
    Action,
    Activity,
    Directive,
    EpochPlan,
    Exit,
    ExitCause,
    Member,
    NodeProgress,
    NodeReport,
    Phase,
    StacksAsked,
    StacksTaken,
    WorkerProgress,
    WorkerReport,
)

text = st.text(max_size=20)
count = st.integers(0, 2**40)
seconds = st.floats(0, 1e9)
small = st.integers(0, 1000)
functions = st.lists(st.builds(Function, text, text, small, text), max_size=2).map(tuple)
stacks = st.lists(st.builds(Stack, text, st.lists(small, max_size=3).map(tuple), small, count), max_size=2).map(tuple)
sampled = st.builds(Sampled, functions, stacks, small, seconds, seconds, seconds)
exits = st.builds(Exit, st.sampled_from(ExitCause), seconds, st.none() | small, st.none() | small, text)
seats = st.lists(st.builds(Seat, text, text, text, text), max_size=3).map(tuple)
formations = st.builds(Formation, count, seats, st.booleans(), count, st.lists(small, max_size=3).map(tuple))
streams = st.builds(Stream, count, count, text, st.booleans(), st.booleans())
dealings = st.builds(Dealing, count, small, count, st.lists(streams, max_size=2).map(tuple))
sessions = st.builds(
    SessionReport, text, st.sampled_from(Stage), count, count, count, text, text, st.booleans(), seconds,
    dealt=st.lists(dealings, max_size=3).map(tuple),
)  # fmt: skip
worker_reports = st.builds(
    WorkerReport, small, small, st.booleans(), st.none() | exits, life=small, session=st.none() | sessions
)
members = st.builds(Member, text, text, text, small, small, small)
plans = st.builds(EpochPlan, count, st.tuples(members, members), small, text, small, small)
ring_places = st.builds(Place, text, text, small)
readings = st.lists(st.builds(Reading, text, seconds, text, text), max_size=3).map(tuple)
progress = st.builds(WorkerProgress, small, small, count, count, st.sampled_from(Phase), seconds, seconds, seconds)
TALK = {
    wire.Query: st.builds(wire.Query),
    wire.Reply: st.builds(wire.Reply, st.dictionaries(text, st.none() | count | text | st.lists(small, max_size=3))),
    wire.StopRequest: st.builds(wire.StopRequest, text, small, seconds),
    wire.DrainRequest: st.builds(wire.DrainRequest, text, st.booleans()),
    wire.SaveRequest: st.builds(wire.SaveRequest),
    wire.LookRequest: st.builds(
        wire.LookRequest, st.sampled_from(["stacks", "profile"]), st.lists(text, max_size=3).map(tuple), seconds,
        st.booleans(),
    ),
    wire.NodeDied: st.builds(wire.NodeDied, text, text, st.integers(-64, 255)),
    wire.Bye: st.builds(wire.Bye, text),
    NodeReport: st.builds(
        NodeReport, text, text, count, seconds, small, text, small, count, st.sampled_from(Activity),
        st.lists(worker_reports, max_size=3).map(tuple), st.dictionaries(text, text, max_size=2),
    ),
    NodeProgress: st.builds(NodeProgress, text, text, count, seconds, st.lists(progress, max_size=3).map(tuple)),
    Directive: st.builds(
        Directive, small, count, st.sampled_from(Action), count, st.none() | plans, text, seconds,
        formation=st.none() | formations, lives=st.lists(small, max_size=3).map(tuple),
        leave=st.booleans(), vacant=st.lists(small, max_size=3).map(tuple),
    ),
    StacksAsked: st.builds(
        StacksAsked, text, count, st.lists(small, max_size=4).map(tuple), look=count, seconds=seconds
    ),
    StacksTaken: st.builds(
        StacksTaken, text, text, count, st.dictionaries(small, text, max_size=3), look=count,
        sampled=st.dictionaries(small, sampled, max_size=2),
    ),
    Formation: formations,
    SessionReport: sessions,
    Arrived: st.builds(Arrived, ring_places, readings),
    RingAsked: st.builds(RingAsked, count, st.tuples(ring_places, ring_places), seconds),
    RingDone: st.builds(RingDone, count, seconds, small, text),
    Examined: st.builds(
        Examined, st.dictionaries(text, readings, max_size=2),
        st.dictionaries(text, st.tuples(st.builds(Complaint, text, text)), max_size=2),
        st.tuples(st.builds(GroupSeen, st.tuples(text), seconds, st.booleans())), st.tuples(st.tuples(text, text)),
    ),
}  # fmt: skip
GREETING = {
    wire.Hello: st.builds(
        wire.Hello, st.sampled_from(["agent", "cli", "launcher"]), text, text, text, nonce=st.binary()
    ),
    wire.Challenge: st.builds(wire.Challenge, st.binary(max_size=64), text),
    wire.Proof: st.builds(wire.Proof, st.binary(max_size=64)),
    wire.Welcome: st.builds(wire.Welcome, text, count),
    wire.Refused: st.builds(wire.Refused, text),
}


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def test_every_message_type_is_generated_here() -> None:
    assert set(TALK) == set(wire.Talk.__args__)
    assert set(GREETING) == set(wire.Greeting.__args__)


@given(st.lists(st.one_of(*TALK.values()), max_size=6), st.data())
def test_messages_survive_however_the_stream_is_cut(messages: list[wire.Message], data: st.DataObject) -> None:
    stream = b"".join(wire.encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = wire.FrameReader("node0", trusted=True)
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == messages


@given(st.one_of(*GREETING.values()))
def test_the_greeting_survives_byte_by_byte(message: wire.Message) -> None:
    reader = wire.FrameReader("node0")
    received = [m for byte in wire.encode(message) for m in reader.feed(bytes([byte]))]
    assert received == [message]


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_messages_or_a_wire_error(data: bytes, trusted: bool) -> None:
    reader = wire.FrameReader("10.0.0.9:1", trusted)
    try:
        reader.feed(frame(data))
    except wire.WireError as error:
        assert "10.0.0.9:1" in str(error)


@pytest.mark.parametrize(("trusted", "depth"), [(False, 900), (True, 1_000_000)])
def test_deeply_nested_bytes_are_refused(trusted: bool, depth: int) -> None:
    body = b"\x82\xa4type\xa5Reply\xa7payload\x81\xa1a" + b"\x91" * depth + b"\xc0"
    with pytest.raises(wire.WireError, match="no message"):
        wire.FrameReader("x", trusted).feed(frame(body))


@pytest.mark.parametrize(("trusted", "limit"), [(False, wire.MAX_GREETING), (True, wire.MAX_FRAME)])
def test_a_frame_over_the_limit_is_refused_by_its_header_alone(trusted: bool, limit: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError, match=r"node7 announced a frame of [\d,]+ bytes, the limit is"):
            wire.FrameReader("node7", trusted).feed(struct.pack("!I", limit + 1))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert wire.FrameReader("node7", trusted).feed(struct.pack("!I", limit)) == []


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(wire.WireError, match="Bye of 16,"):
        wire.encode(wire.Bye("x" * wire.MAX_FRAME))


def test_an_unknown_type_is_refused_with_its_name() -> None:
    body = msgspec.msgpack.encode({"type": "LaunchMissiles"})
    with pytest.raises(wire.WireError, match="node3 sent .* no message of wire version 1: .*LaunchMissiles"):
        wire.FrameReader("node3", trusted=True).feed(frame(body))


def test_before_the_proof_only_the_greeting_exists() -> None:
    with pytest.raises(wire.WireError, match="Query"):
        wire.FrameReader("x").feed(wire.encode(wire.Query()))
    with pytest.raises(wire.WireError, match="Hello"):
        wire.FrameReader("x", trusted=True).feed(wire.encode(wire.Hello("cli", "", "", "")))


def test_the_message_after_the_greeting_may_come_in_the_same_bytes() -> None:
    reader = wire.FrameReader("controller")
    reader.push(wire.encode(wire.Welcome("job", 1)) + wire.encode(wire.Query()))
    assert reader.pop() == wire.Welcome("job", 1)
    reader.trust()
    assert reader.pop() == wire.Query()
    assert reader.pop() is None


def test_another_wire_version_is_told_with_both_versions() -> None:
    hello = wire.Hello("agent", "n", "i", "j", version=wire.VERSION + 1, everstep_version="9.9")
    with pytest.raises(wire.WireError, match=r"version 2 \(everstep 9.9\), this side version 1 .*install the same"):
        wire.FrameReader("n").feed(wire.encode(hello))


def test_fields_a_newer_version_added_are_ignored() -> None:
    body = msgspec.msgpack.encode({"type": "Bye", "why": "done", "mood": [1, {"a": 2}]})
    assert wire.FrameReader("n", trusted=True).feed(frame(body)) == [wire.Bye("done")]


@pytest.mark.parametrize(("head", "hint"), [(b"GET / HTTP/1.1\r\n\r\n", "HTTP"), (b"\x16\x03\x01\x02\x00\x01", "TLS")])
def test_other_protocols_are_recognised(head: bytes, hint: str) -> None:
    with pytest.raises(wire.WireError, match=f"looks like {hint}"):
        wire.FrameReader("n").feed(head)
