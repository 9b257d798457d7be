"""Real sockets on loopback: who gets in, who is turned away with which words, and that nobody disturbs the others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.control import transport
from everstep.control.token import Side, prove
from everstep.control.transport import AddressInUse, Link, Server, backoff, connect, knock, listen
from everstep.core import wire
from everstep.core.errors import Unreachable, UsageError
from everstep.testing.echo import LOCAL, TOKEN, Echo, echo, hello, until, works


async def raw(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(LOCAL, port)


async def frames(reader: asyncio.StreamReader, num: int) -> list[wire.Message]:
    parser, found = wire.FrameReader("server"), list[wire.Message]()
    while len(found) < num:
        data = await reader.read(4096)
        assert data, "closed"
        found += parser.feed(data)
    return found


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


# The greeting -------------------------------------------------------------------------------------------


def test_asking_which_job_runs_there_takes_no_token() -> None:
    async def scenario() -> None:
        async with echo() as served:
            assert await knock(LOCAL, served.port) == "job"
            await works(served, "node6")
            assert not served.refused
            port = served.port
        with pytest.raises(Unreachable, match="connection refused"):
            await knock(LOCAL, port)

    asyncio.run(scenario())


def test_both_sides_learn_who_the_other_is() -> None:
    async def scenario() -> None:
        async with echo() as served:
            link = await served.connect("node5")
            assert (link.job, link.term) == ("job", 7)
            assert link.peer == f"controller ({LOCAL}:{served.port})"
            await works(served, "node6")
            assert served.links["node5"].peer.startswith(f"node5 ({LOCAL}:")
            for message in (wire.Query(), wire.NodeDied("a", "b", -9)):
                assert link.send(message)
                assert await anext(link) == message
            sock = link._transport.get_extra_info("socket")
            assert link.local_host == LOCAL
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            link.close()

    asyncio.run(scenario())


def test_a_client_that_does_not_know_the_job_is_told() -> None:
    async def scenario() -> None:
        async with echo() as served:
            link = await connect(LOCAL, served.port, TOKEN, hello(job=""))
            assert link.job == "job"
            link.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("token", "said", "why"),
    [
        (b"x" * 64, hello(), "the token is not the one of the job that runs here"),
        (TOKEN, hello(job="other"), "job job runs here, not other"),
        (TOKEN, wire.Hello("agent", "n", "i", "job", version=2, everstep_version="9"), "speaks wire version 2"),
    ],
)
def test_who_is_refused_and_told_why(token: bytes, said: wire.Hello, why: str) -> None:
    async def scenario() -> None:
        async with echo() as served:
            with pytest.raises(Unreachable, match=why) as raised:
                await connect(LOCAL, served.port, token, said)
            assert raised.value.refused and f"{LOCAL}:{served.port}" in str(raised.value)
            assert not served.links
            assert len(served.refused) == 1 and why in served.refused[0]
            await works(served, "node1")

    asyncio.run(scenario())


def test_a_replayed_proof_is_refused() -> None:
    async def scenario() -> None:
        async with echo() as served:
            said = wire.Hello("agent", "n", "i", "job", nonce=b"n" * 32)
            reader, writer = await raw(served.port)
            writer.write(wire.encode(said))
            (challenge,) = await frames(reader, 1)
            assert isinstance(challenge, wire.Challenge)
            proof = wire.encode(wire.Proof(prove(TOKEN, Side.CLIENT, said, challenge)))
            writer.write(proof)
            answers = await frames(reader, 2)
            assert isinstance(answers[1], wire.Welcome)
            await shut(writer)

            reader, writer = await raw(served.port)
            writer.write(wire.encode(said))
            (again,) = await frames(reader, 1)
            assert isinstance(again, wire.Challenge) and again.nonce != challenge.nonce
            writer.write(proof)
            (answer,) = await frames(reader, 1)
            assert isinstance(answer, wire.Refused) and await reader.read() == b""
            await shut(writer)

    asyncio.run(scenario())


def test_a_server_without_the_token_is_not_believed() -> None:
    """It sends the client's own proof back, and one made with another token."""

    async def scenario() -> None:
        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            (said,) = await frames(reader, 1)
            challenge = wire.Challenge(b"c" * 32, "job")
            writer.write(wire.encode(challenge))
            (proof,) = await frames(reader, 1)
            assert isinstance(said, wire.Hello) and isinstance(proof, wire.Proof)
            mac = proof.mac if reflect else prove(b"y" * 64, Side.SERVER, said, challenge)
            writer.write(wire.encode(wire.Proof(mac)) + wire.encode(wire.Welcome("job", 1)))
            await shut(writer)

        server = await asyncio.start_server(impostor, LOCAL, 0)
        for reflect in (True, False):  # noqa: B007 (read by the impostor)
            with pytest.raises(Unreachable, match="could not prove that it holds the job's token") as raised:
                await connect(LOCAL, server.sockets[0].getsockname()[1], TOKEN, hello())
            assert raised.value.refused
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())


# Why nobody answers -------------------------------------------------------------------------------------


def test_what_is_said_when_nobody_listens_or_the_name_is_wrong() -> None:
    async def scenario() -> None:
        with listen(LOCAL, 0) as free:
            port = free.getsockname()[1]
        with pytest.raises(Unreachable, match=f"no controller at {LOCAL}:{port}: connection refused") as raised:
            await connect(LOCAL, port, TOKEN, hello())
        assert not raised.value.refused
        with pytest.raises(Unreachable, match="the name cannot be resolved"):
            await connect("no-such-host.invalid", 1, TOKEN, hello(), 20.0)

    asyncio.run(scenario())


def test_what_is_said_when_the_connection_cannot_be_made_in_time() -> None:
    async def scenario() -> None:
        with socket.socket() as listener, contextlib.ExitStack() as stack:
            listener.bind((LOCAL, 0))
            listener.listen(0)
            for _ in range(4):  # the queue of connections nobody accepts is full: the kernel drops the next one
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            with pytest.raises(Unreachable, match="no answer within 0.3 s") as raised:
                await connect(LOCAL, listener.getsockname()[1], TOKEN, hello(), 0.3)
            assert not raised.value.refused

    asyncio.run(scenario())


def test_what_is_said_of_a_silent_a_closing_and_a_foreign_server() -> None:
    async def scenario() -> None:
        async def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shut(writer)

        async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await shut(writer)

        with listen(LOCAL, 0) as silent:
            with pytest.raises(Unreachable, match="took the connection, then said nothing for 0.2 s") as raised:
                await connect(LOCAL, silent.getsockname()[1], TOKEN, hello(), 0.2)
            assert not raised.value.refused
        for behaviour, text, refused in ((close, "closed the connection|reset", False), (web, "HTTP", True)):
            server = await asyncio.start_server(behaviour, LOCAL, 0)
            with pytest.raises(Unreachable, match=text) as raised:
                await connect(LOCAL, server.sockets[0].getsockname()[1], TOKEN, hello())
            assert raised.value.refused is refused
            server.close()
            await server.wait_closed()

    asyncio.run(scenario())


def test_waits_between_tries() -> None:
    assert list(islice(backoff(), 8)) == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


# Listening ----------------------------------------------------------------------------------------------


def test_a_clash_names_the_address() -> None:
    with listen(LOCAL, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"{LOCAL}:{port} is in use"):
            listen(LOCAL, port)
    with listen(LOCAL, port):
        pass


def test_other_reasons_are_told_apart() -> None:
    with pytest.raises(UsageError, match="cannot listen on 192.0.2.1:0: it is no address of this machine") as raised:
        listen("192.0.2.1", 0)
    assert not isinstance(raised.value, AddressInUse)
    with pytest.raises(UsageError, match="cannot be resolved"):
        listen("no-such-host.invalid", 0)


def test_a_restarted_server_takes_over_the_same_socket() -> None:
    async def scenario() -> None:
        listener = listen(LOCAL, 0)
        port = listener.getsockname()[1]
        for term in (1, 2):
            served = Echo.__new__(Echo)
            served.links, served.port = {}, port
            server = Server(listener.dup(), TOKEN, "job", served.serve, term=term)
            await server.start()
            link = await served.connect()
            assert link.term == term
            await server.close()
            assert [m async for m in link] == [] and "closed" in link.ended
            with pytest.raises(Unreachable, match="took the connection"):  # never refused: the socket still listens
                await served.connect(timeout_s=0.05)
        listener.close()

    asyncio.run(scenario())


# Hostile and broken clients -----------------------------------------------------------------------------


def test_fuzzed_bytes_never_disturb_the_others() -> None:
    loop = asyncio.new_event_loop()
    served = Echo()
    loop.run_until_complete(served.server.start())
    witness = loop.run_until_complete(served.connect("witness"))
    valid = wire.encode(hello())

    async def attack(data: bytes) -> None:
        reader, writer = await raw(served.port)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await reader.read(4096):
                    pass
        await shut(writer)
        witness.send(wire.StopRequest(data.hex()))
        assert await anext(witness) == wire.StopRequest(data.hex())

    body = st.binary(max_size=300)
    framed = body.map(lambda data: struct.pack("!I", len(data)) + data)
    mutated = st.tuples(st.integers(0, len(valid) - 1), st.integers(0, 255)).map(
        lambda change: valid[: change[0]] + bytes([change[1]]) + valid[change[0] + 1 :]
    )

    @settings(max_examples=200, deadline=None)
    @given(st.one_of(body, framed, mutated, framed.map(lambda data: valid + data)))
    def fuzz(data: bytes) -> None:
        loop.run_until_complete(attack(data))

    fuzz()
    witness.close()
    loop.run_until_complete(served.server.close())
    assert set(served.links) == {"witness"}
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_connections_reset_at_once_do_no_harm() -> None:
    async def scenario() -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with echo() as served:
            for data in (b"", wire.encode(hello())) * 20:
                with socket.create_connection((LOCAL, served.port)) as sock:
                    sock.sendall(data)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await works(served, "node1")
        assert not reported and not served.refused

    asyncio.run(scenario())


def test_a_huge_frame_is_refused_by_its_header() -> None:
    async def scenario() -> None:
        async with echo() as served:
            reader, writer = await raw(served.port)
            writer.write(struct.pack("!I", 4096))
            (answer,) = await frames(reader, 1)
            assert isinstance(answer, wire.Refused) and "4,096 bytes, the limit is 1,024" in answer.why
            assert await reader.read() == b""
            await shut(writer)

            link = await served.connect()
            link._transport.write(struct.pack("!I", (16 << 20) + 1))
            assert [m async for m in link] == []
            assert "announced a frame of 16,777,217 bytes" in link.ended
            assert "announced" in served.links["node0"].ended
            await works(served, "node1")

    asyncio.run(scenario())


def test_a_long_frame_passes_once_proven() -> None:
    async def scenario() -> None:
        async with echo() as served:
            link = await served.connect()
            for size in (10 << 20, 16 << 20):
                message = wire.StopRequest("x" * (size - 64))
                link.send(message)
                assert await anext(link) == message
            link.close()

    asyncio.run(scenario())


def test_an_unproven_connection_has_little_time() -> None:
    async def scenario() -> None:
        async with echo(greeting_s=0.2) as served:
            reader, writer = await raw(served.port)
            closed = asyncio.create_task(reader.read())
            for byte in wire.encode(hello()):
                writer.write(bytes([byte]))
                await asyncio.wait([closed], timeout=0.02)
                if closed.done():
                    break
            with contextlib.suppress(ConnectionError):
                assert await closed == b""
            await shut(writer)
            await works(served, "node1")

    asyncio.run(scenario())


def test_many_unproven_connections_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_UNPROVEN", 20)

    async def scenario() -> None:
        async with echo() as served:
            loris = [await raw(served.port) for _ in range(100)]
            for node in range(5):
                await works(served, f"node{node}")
            assert len(served.server._unproven) <= 20
            for reader, _ in loris[:50]:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 2) == b""
            for _, writer in loris:
                await shut(writer)

    asyncio.run(scenario())


def test_an_error_while_serving_one_closes_that_link_and_is_reported() -> None:
    async def scenario() -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        async with echo() as served:
            usual = served.server._on_link

            async def fail(link: Link, said: wire.Hello) -> None:
                if said.node == "bad":
                    raise ZeroDivisionError
                await usual(link, said)

            served.server._on_link = fail
            link = await served.connect("bad")
            assert [m async for m in link] == []
            await until(lambda: reported)
            assert isinstance(reported[0]["exception"], ZeroDivisionError)
            await works(served, "good")

    asyncio.run(scenario())
