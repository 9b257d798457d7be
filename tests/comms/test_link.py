"""The handshake, against real sockets: who is not right gets a clear reason or silence, and the listener goes on."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from everstep.comms import link
from everstep.comms.fabric import Fabric
from everstep.comms.link import LinkError
from everstep.core.formation import Formation, Seat
from everstep.core.proof import prove

TOKEN = b"0123456789abcdef" * 4
HOST = "this host"


@pytest.fixture
def make() -> Iterator[Callable[..., Fabric]]:
    made: list[Fabric] = []

    def fabric(worker: str, token: bytes = TOKEN, host: str = HOST, shared_memory: bool = True) -> Fabric:
        made.append(Fabric(worker, host, token, shared_memory=shared_memory))
        return made[-1]

    yield fabric
    for one in made:
        one.close()


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Only where a side says nothing: what is said may take its time on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "HANDSHAKE_S", 0.3)
        yield


def seat(fabric: Fabric, worker: str = "", endpoint: str = "", host: str = HOST) -> Seat:
    return Seat(worker or fabric.worker, "n", host, endpoint or fabric.endpoint)


def together(seats: list[Seat], epoch: int = 1) -> Formation:
    return Formation(epoch, tuple(seats), abort=False, floor=0)


def connect(fabric: Fabric) -> socket.socket:
    host, port = fabric.endpoint.split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def listener_lives(make: Callable[..., Fabric], fabric: Fabric) -> None:
    """A proper worker still gets its link, at once."""
    other = make("a9", shared_memory=False)
    begin = time.monotonic()
    other.prepare(together([seat(other), seat(fabric)]))
    assert time.monotonic() - begin < 4  # nobody has to wait until a stranger is given up


def accepted_one(fabric: Fabric) -> None:
    """The dialer may know a moment earlier."""
    deadline = time.monotonic() + 5
    while fabric.counts.accepted < 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert fabric.counts.accepted == 1


def eof(sock: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(4096):
            data += part
    return data


def frame(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "big") + data


def hello(version: int = link.VERSION, worker: str = "a", peer: str = "b", epoch: int = 1) -> link.Hello:
    return link.Hello(version, worker, peer, HOST, epoch, 0, False, False, b"n" * 32, "127.0.0.1:1")


def take(sock: socket.socket) -> bytes:
    return sock.recv(int.from_bytes(sock.recv(4), "big"))


def prove_to(sock: socket.socket, said: link.Hello) -> None:
    """A dialer's part by hand, up to its proof."""
    sock.sendall(frame(said))
    parts = msgspec.msgpack.encode(said), take(sock)
    sock.sendall(frame(link.Proof(prove(TOKEN, link.DIALER, parts))))


# What the dialer is told ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "worker", "why"),
    [
        (b"x" * 64, "b", "the token is not the one of the job that runs there"),
        (TOKEN, "b#1", "worker b listens there"),
    ],
)
def test_refusals(make: Callable[..., Fabric], token: bytes, worker: str, why: str) -> None:
    dialer, fabric = make("a", token), make("b")
    with pytest.raises(LinkError, match=f"no link to worker {worker}: 127.0.0.1:[0-9]+: {why}") as caught:
        dialer.prepare(together([seat(dialer), seat(fabric, worker)]))
    assert caught.value.worker == worker
    assert fabric.counts.accepted == 0
    listener_lives(make, fabric)


def test_another_version(make: Callable[..., Fabric], monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = make("b")
    with connect(fabric) as sock:
        sock.sendall(frame(hello(version=link.VERSION + 1)))
        assert f"its links have version {link.VERSION}, ours {link.VERSION + 1}".encode() in eof(sock)
    listener_lives(make, fabric)


def test_nobody_listens(make: Callable[..., Fabric]) -> None:
    dialer = make("a")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(LinkError, match="Connection refused"):
        dialer.prepare(together([seat(dialer), Seat("b", "n", HOST, f"127.0.0.1:{port}")]))


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [("no.such.host.invalid:1", "the name cannot be resolved"), ("no endpoint", "expected HOST or HOST:PORT")],
)
def test_an_endpoint_that_is_none(make: Callable[..., Fabric], endpoint: str, why: str) -> None:
    dialer = make("a")
    with pytest.raises(LinkError, match=why):
        dialer.prepare(together([seat(dialer), Seat("b", "n", HOST, endpoint)]))


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (None, "no answer within 0.3 s"),
        (b"", "it closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what it sent is no message"),
        (b"\0\0\0\x05\xc1\xc1\xc1\xc1\xc1", "what it sent is no message"),
        (frame(link.Ready()), "it sent Ready where Challenge was due"),
        (
            frame(link.Challenge("b", b"n")) + frame(link.Proof(b"0" * 32)),
            "could not prove that it holds the job's token",
        ),
    ],
)
def test_a_stranger_listens(make: Callable[..., Fabric], says: bytes | None, why: str) -> None:
    dialer = make("a")
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def serve() -> None:
            sock, _ = stranger.accept()
            with sock, contextlib.suppress(ConnectionResetError):
                sock.recv(4096)
                if says != b"":
                    sock.sendall(says or b"")
                    eof(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(LinkError, match=why), impatient() if says is None else contextlib.nullcontext():
            dialer.prepare(together([seat(dialer), Seat("b", "n", HOST, f"127.0.0.1:{stranger.getsockname()[1]}")]))
        assert time.monotonic() - begin < 4
        thread.join()


def test_own_proof_sent_back_is_none(make: Callable[..., Fabric]) -> None:
    """The roles of the sides are in the proofs: who knows no token cannot have one made for it."""
    dialer = make("a")
    with socket.create_server(("127.0.0.1", 0)) as mirror:

        def serve() -> None:
            sock, _ = mirror.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(frame(link.Challenge("b", b"n" * 32)))
                sock.sendall(sock.recv(4096))
                sock.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(LinkError, match="could not prove"):
            dialer.prepare(together([seat(dialer), Seat("b", "n", HOST, f"127.0.0.1:{mirror.getsockname()[1]}")]))
        thread.join()


# What the listener bears ---------------------------------------------------------------------------------


def test_a_dialer_that_looks_for_another_worker(make: Callable[..., Fabric]) -> None:
    """A worker that ended may have left its port to us."""
    fabric = make("b")
    with connect(fabric) as sock:
        prove_to(sock, hello(peer="b#1"))
        assert b"worker b listens there" in eof(sock)
    listener_lives(make, fabric)
    accepted_one(fabric)


def test_a_listener_with_the_token_but_another_name(make: Callable[..., Fabric]) -> None:
    dialer = make("a")
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            sock, _ = other.accept()
            with sock:
                said = take(sock)
                asked = msgspec.msgpack.encode(link.Challenge("b#1", b"n" * 32))
                sock.sendall(len(asked).to_bytes(4, "big") + asked)
                take(sock)
                sock.sendall(frame(link.Proof(prove(TOKEN, link.LISTENER, (said, asked)))) + frame(link.Welcome()))
                eof(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(LinkError, match="worker b#1 listens there"):
            dialer.prepare(together([seat(dialer), Seat("b", "n", HOST, f"127.0.0.1:{other.getsockname()[1]}")]))
        thread.join()


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff" * 5000,
        b"\0\0\0\0",
        b"\0\0\0\x03\x93\x93\x93",
        frame(hello())[:20],
        frame({"type": "Hello", "version": "one"}),
        frame(link.Ready()),
        frame(hello()) + frame(link.Proof(b"0" * 32)),
        frame(hello()) + frame(hello()),
    ],
)
@pytest.mark.parametrize("end", ["close", "reset", "silence"])
def test_garbage(make: Callable[..., Fabric], says: bytes, end: str) -> None:
    fabric = make("b")
    with impatient() if end == "silence" else contextlib.nullcontext(), connect(fabric) as sock:
        sock.sendall(says)
        if end == "silence":
            begin = time.monotonic()
            eof(sock)
            assert time.monotonic() - begin < 4, "a stranger could keep a connection"
        elif end == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    listener_lives(make, fabric)


def test_silent_strangers_do_not_keep_others_out(make: Callable[..., Fabric]) -> None:
    fabric = make("b")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(fabric))
        listener_lives(make, fabric)


def test_a_dialer_that_ends_after_its_proof(make: Callable[..., Fabric]) -> None:
    """Half a link is none: the other side knows nothing of it, and the next dial works."""
    fabric = make("b", shared_memory=False)
    with connect(fabric) as sock:
        prove_to(sock, hello())
        assert sock.recv(4096)
    listener_lives(make, fabric)
    accepted_one(fabric)


def test_a_worker_of_an_epoch_that_is_over_is_refused(make: Callable[..., Fabric]) -> None:
    one, two, late = make("b", shared_memory=False), make("c", shared_memory=False), make("a", shared_memory=False)
    now = together([seat(one), seat(two)], epoch=5)
    threads = [threading.Thread(target=fabric.prepare, args=(now,)) for fabric in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.switch(now)
    with pytest.raises(LinkError, match="epoch 5 has no worker a"):
        late.prepare(together([seat(late), seat(one)], epoch=5))
    late.prepare(together([seat(late), seat(one)], epoch=6))
