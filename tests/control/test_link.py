"""Links over real sockets, with and without TLS: many at once, slow peers, and how they end."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess

import pytest

from everstep.control.transport import Link, connect
from everstep.core import wire
from everstep.core.errors import Unreachable
from everstep.testing.echo import TOKEN, echo, hello, until

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
            assert not flood.ended  # sending did not wait: the peer will never read
            while not flood.ended:
                lively.send(wire.Query())
                assert await asyncio.wait_for(anext(lively), 1) == wire.Query()
            assert "sleepy" in flood.ended and "read nothing for" in flood.ended
            assert loop.time() - began < 10
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
