"""Real sockets on loopback: who gets in, who is turned away with which words, and that nobody disturbs the others."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.control import transport
from everstep.control.token import Side, create_token, prove, proves, read_token
from everstep.control.transport import AddressInUse, Link, Server, backoff, connect, listen
from everstep.core import wire
from everstep.core.errors import Unreachable, UsageError

TOKEN = b"0123456789abcdef" * 4
LOCAL = "127.0.0.1"


def hello(node: str = "node0", job: str = "job") -> wire.Hello:
    return wire.Hello("agent", node, "inc", job)


class Echo:
    """A server that sends everything back, and remembers whom it met."""

    def __init__(self, **options: Any) -> None:
        self.listener = listen(LOCAL, 0)
        self.port: int = self.listener.getsockname()[1]
        self.links: dict[str, Link] = {}
        self.refused: list[str] = []
        self.server = Server(self.listener, TOKEN, "job", self.serve, term=7, on_refused=self.refused.append, **options)

    async def serve(self, link: Link, hello: wire.Hello) -> None:
        self.links[hello.node] = link
        async for message in link:
            link.send(message)

    def connect(self, node: str = "node0", **options: Any) -> Coroutine[Any, Any, Link]:
        return connect(LOCAL, self.port, TOKEN, hello(node), **options)


@contextlib.asynccontextmanager
async def echo(**options: Any) -> AsyncIterator[Echo]:
    served = Echo(**options)
    await served.server.start()
    try:
        yield served
    finally:
        await served.server.close()


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


async def works(served: Echo, node: str) -> None:
    """A client can come in and is answered."""
    link = await served.connect(node)
    link.send(wire.StopRequest(node))
    assert await anext(link) == wire.StopRequest(node)
    link.close()


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


def test_the_token_never_travels() -> None:
    said, challenge = hello(), wire.Challenge(b"n" * 32, "job")
    mac = prove(TOKEN, Side.CLIENT, said, challenge)
    assert TOKEN not in mac and len(mac) == 32
    assert proves(mac, TOKEN, Side.CLIENT, said, challenge)
    others = [
        (b"x" * 64, Side.CLIENT, said, challenge),
        (TOKEN, Side.SERVER, said, challenge),
        (TOKEN, Side.CLIENT, hello("node00"), challenge),
        (TOKEN, Side.CLIENT, said, wire.Challenge(b"m" * 32, "job")),
        (TOKEN, Side.CLIENT, said, wire.Challenge(b"n" * 32, "other")),
    ]
    assert not any(proves(mac, *other) for other in others)


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


# Traffic ------------------------------------------------------------------------------------------------


def test_200_links_at_once() -> None:
    async def scenario() -> None:
        async with echo() as served:
            links = await asyncio.gather(*(served.connect(f"node{k}", timeout_s=20) for k in range(200)))
            for turn in range(3):
                for k, link in enumerate(links):
                    link.send(wire.NodeDied(f"node{k}", "", turn))
                answers = await asyncio.gather(*(anext(link) for link in links))
                assert answers == [wire.NodeDied(f"node{k}", "", turn) for k in range(200)]
            assert len(served.links) == 200
            for link in links:
                link.close()
            await until(lambda: all(link.ended for link in served.links.values()))

    asyncio.run(scenario())


@pytest.mark.parametrize("secure", [False, True])
def test_a_peer_that_does_not_read_is_dropped_and_delays_nobody(secure: bool, contexts: Contexts) -> None:
    server_tls, client_tls = contexts if secure else (None, None)

    async def scenario() -> None:
        async with echo(stall_s=0.5, tls=server_tls) as served:
            host = "localhost"
            sleepy = await connect(host, served.port, TOKEN, hello("sleepy"), tls=client_tls)
            lively = await connect(host, served.port, TOKEN, hello("lively"), tls=client_tls)
            await until(lambda: len(served.links) == 2)
            sleepy._transport.pause_reading()
            flood = served.links["sleepy"]
            loop = asyncio.get_running_loop()
            began = loop.time()
            for _ in range(20):
                flood.send(wire.Bye("x" * (1 << 20)))
            assert loop.time() - began < 0.4  # sending did not wait
            while not flood.ended:
                lively.send(wire.Query())
                assert await asyncio.wait_for(anext(lively), 1) == wire.Query()
            assert "sleepy" in flood.ended and "read nothing for 0.5 s" in flood.ended
            assert loop.time() - began < 3
            assert not flood.send(wire.Query())
            await flood.drained()
            sleepy.abort("over")
            lively.close()

    asyncio.run(scenario())


def test_a_slow_peer_that_reads_keeps_its_link() -> None:
    async def scenario() -> None:
        async with echo(stall_s=0.3) as served:
            slow = await served.connect("slow")
            await until(lambda: served.links)
            link = served.links["slow"]
            slow._transport.pause_reading()
            for _ in range(24):
                link.send(wire.StopRequest("x" * (1 << 20)))
            sending = asyncio.create_task(link.drained())
            began, received = asyncio.get_running_loop().time(), 0
            while received < 24:
                slow._transport.resume_reading()
                await anext(slow)
                received += 1
                slow._transport.pause_reading()
                await asyncio.sleep(0.05)
            await sending
            assert asyncio.get_running_loop().time() - began > 1.0 and not link.ended
            slow.close()

    asyncio.run(scenario())


def test_more_unsent_than_is_bearable_ends_the_link_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.control.link.MAX_UNSENT", 8 << 20)

    async def scenario() -> None:
        async with echo() as served:
            sleepy = await served.connect("sleepy")
            await until(lambda: served.links)
            sleepy._transport.pause_reading()
            sent = 0
            while served.links["sleepy"].send(wire.StopRequest("x" * (1 << 20))):
                sent += 1
                assert sent < 64
            assert "unread" in served.links["sleepy"].ended
            sleepy.abort("over")

    asyncio.run(scenario())


def test_what_was_sent_before_closing_still_arrives() -> None:
    async def scenario() -> None:
        got: list[wire.Message] = []

        async def collect(link: Link, _: wire.Hello) -> None:
            async for message in link:
                got.append(message)

        async with echo() as served:
            served.server._on_link = collect
            link = await served.connect()
            for status in range(500):
                link.send(wire.NodeDied("x" * 20_000, "", status))
            await link.drained()
            link.close("done")
            await until(lambda: len(got) == 500)
            assert [m.status for m in got if isinstance(m, wire.NodeDied)] == list(range(500))

    asyncio.run(scenario())


def test_bye_tells_why() -> None:
    async def scenario() -> None:
        async with echo() as served:
            link = await served.connect()
            await until(lambda: served.links)
            served.links["node0"].close("replaced by a newer agent")
            assert [m async for m in link] == []
            assert link.ended.endswith("said: replaced by a newer agent")

    asyncio.run(scenario())


# TLS ----------------------------------------------------------------------------------------------------

Contexts = tuple[ssl.SSLContext | None, ssl.SSLContext | None]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    """Contexts of a server and a client which trusts its self-made certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)


def test_tls_around_everything(contexts: Contexts) -> None:
    async def scenario() -> None:
        async with echo(tls=contexts[0]) as served:
            link = await connect("localhost", served.port, TOKEN, hello(), tls=contexts[1])
            message = wire.StopRequest("x" * 1_000_000)
            link.send(message)
            assert await anext(link) == message
            link.close()
            strangers = ssl.create_default_context()
            with pytest.raises(Unreachable, match="no TLS connection to .*VERIFY_FAILED"):
                await connect("localhost", served.port, TOKEN, hello(), tls=strangers)
            with pytest.raises(Unreachable):
                await connect("localhost", served.port, TOKEN, hello())

    asyncio.run(scenario())


def test_tls_to_a_server_without(contexts: Contexts) -> None:
    async def scenario() -> None:
        async with echo() as served:
            with pytest.raises(Unreachable, match="no TLS connection to"):
                await connect("localhost", served.port, TOKEN, hello(), tls=contexts[1])
            assert "TLS" in served.refused[0]

    asyncio.run(scenario())


# Token files --------------------------------------------------------------------------------------------


def test_token_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = create_token(path)
    assert read_token(path) == token and len(bytes.fromhex(token.decode())) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="exists already"):
        create_token(path)
    with pytest.raises(UsageError, match="cannot create token file .*No such file"):
        create_token(tmp_path / "nowhere" / "token")
    assert create_token(tmp_path / "other") != token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_token_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    create_token(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod 600 {path}"):
        read_token(path)


def test_missing_short_and_wrong_token_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_token(tmp_path / "none")
    with pytest.raises(UsageError, match="Is a directory"):
        read_token(tmp_path)
    path = tmp_path / "token"
    path.touch(0o600)
    path.chmod(0o600)
    for content in ("", "  \n", "a" * 31 + "\n", "a" * 5000):
        path.write_text(content)
        with pytest.raises(UsageError, match="a token has 32 to 4096"):
            read_token(path)
    path.write_text("a" * 32 + "\n")
    assert read_token(path) == b"a" * 32
