"""How a link comes to be: a server which lets nobody in without the job's token, and a client which asks for it too.

The greeting is Hello, Challenge, Proof, then Proof and Welcome. An unproven connection has five seconds, may send two
short frames, and is one of a limited number: the oldest goes when there are more. TLS, where wanted, is an ordinary
ssl.SSLContext around all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec

from everstep.control.link import STALL_S, Link, Refusal
from everstep.control.token import Side, prove, proves
from everstep.core import wire
from everstep.core.errors import Unreachable, UsageError
from everstep.core.proof import new_nonce

__all__ = ["AddressInUse", "Link", "Server", "backoff", "connect", "knock", "listen", "shown"]

GREETING_S = 5.0
MAX_UNPROVEN = 1024  # and at most a quarter of the descriptors this process may have
BACKLOG = 1024
FLUSH_S = 1.0  # a closing server gives its peers this long to take what was sent

T = TypeVar("T")
OnLink = Callable[[Link, wire.Hello], Awaitable[None]]


class AddressInUse(UsageError):
    """Another socket listens at this address already."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket, to be handed to whoever serves it. Port 0: any free one.

    Raises AddressInUse, or another UsageError that names the address and what is wrong with it.
    """
    where = shown(host, port)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(
            f"cannot listen on {where}: the name {host!r} cannot be resolved ({error.strerror})"
        ) from error
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, kind, proto))
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError as error:
            raise _cannot_listen(where, error) from error
        undo.pop_all()
    return sock


def _cannot_listen(where: str, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(f"{where} is in use by another program: choose another port, or 0 for any free one")
    why = {
        errno.EADDRNOTAVAIL: "it is no address of this machine",
        errno.EACCES: "this user may not use the port; those above 1023 are free to all",
    }.get(error.errno or 0, error.strerror)
    return UsageError(f"cannot listen on {where}: {why}")


def backoff(first_s: float = 0.05, most_s: float = 1.0) -> Iterator[float]:
    """Seconds to wait before each try: none, then `first_s`, doubled until `most_s`, for ever."""
    yield 0.0
    while True:
        yield first_s
        first_s = min(2 * first_s, most_s)


# Server -------------------------------------------------------------------------------------------------


class Server:
    """Serves a socket that listens already. `on_link(link, hello)` runs for each proven client, for its whole life.

    One client cannot disturb another: each has its own task. An error in `on_link` closes that link and goes to the
    event loop's exception handler. `on_refused` is told about clients turned away.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        job: str,
        on_link: OnLink,
        *,
        term: int = 0,
        tls: ssl.SSLContext | None = None,
        on_refused: Callable[[str], None] = lambda why: None,
        greeting_s: float = GREETING_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._listener, self._token, self._job, self._term = listener, token, job, term
        self._on_link, self._on_refused = on_link, on_refused
        self._tls, self._greeting_s, self._stall_s = tls, greeting_s, stall_s
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], Link] = {}
        self._unproven: dict[Link, None] = {}  # in order of arrival
        self._max_unproven = min(MAX_UNPROVEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Link(self._accept, self._stall_s),
            sock=self._listener,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=self._greeting_s if self._tls else None,
        )

    async def close(self) -> None:
        """Stop listening, end all links; what was sent to them still goes out if they read it in time."""
        if self._server is not None:
            self._server.close()
        tasks = dict(self._tasks)
        for task, link in tasks.items():
            link.close()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                for link in tasks.values():
                    await link.drained()

    def _accept(self, link: Link) -> None:
        if len(self._unproven) >= self._max_unproven:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.abort("too many connections without proof")
        self._unproven[link] = None
        task = asyncio.get_running_loop().create_task(self._serve(link))
        self._tasks[task] = link
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        link = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"everstep: serving {link.peer} failed", "exception": error, "task": task}
            )

    async def _serve(self, link: Link) -> None:
        try:
            hello = await self._admit(link)
            if hello is not None:
                await self._on_link(link, hello)
        finally:
            link.close()

    async def _admit(self, link: Link) -> wire.Hello | None:
        """Greet a client; None when it was turned away. Lateness is no refusal: the client may try again."""
        try:
            async with asyncio.timeout(self._greeting_s):
                return await self._greet(link)
        except TimeoutError:
            link.abort(f"no proof within {self._greeting_s:g} s")
        except ConnectionError:
            return None  # gone again: a port scan, or a client that gave up
        except (Refusal, wire.WireError) as error:
            link.refuse(str(error))
            self._on_refused(f"{link.peer}: {error}")
        finally:
            self._unproven.pop(link, None)
        return None

    async def _greet(self, link: Link) -> wire.Hello:
        hello = await link.expect(wire.Hello)
        challenge = wire.Challenge(new_nonce(), self._job)
        link.send(challenge)
        proof = await link.expect(wire.Proof)
        if not proves(proof.mac, self._token, Side.CLIENT, hello, challenge):
            raise Refusal("the token is not the one of the job that runs here")
        if hello.job not in ("", self._job):
            raise Refusal(f"job {self._job} runs here, not {hello.job}")
        link.send(wire.Proof(prove(self._token, Side.SERVER, hello, challenge)))
        link.send(wire.Welcome(self._job, self._term))
        link.job, link.term = self._job, self._term
        link.trust(hello.node or hello.role)
        return hello


# Client -------------------------------------------------------------------------------------------------


async def connect(
    host: str,
    port: int,
    token: bytes,
    hello: wire.Hello,
    timeout_s: float = 5.0,
    *,
    tls: ssl.SSLContext | None = None,
    stall_s: float = STALL_S,
) -> Link:
    """A proven link to the controller at `host:port`; `link.job` and `link.term` say which one it is.

    Raises Unreachable, whose text says what went wrong and whose `refused` says whether that can change by itself.
    """

    async def introduce(link: Link) -> Link:
        await _introduce(link, token, hello)
        return link

    return await _greeted(host, port, introduce, timeout_s, tls, stall_s)


async def knock(host: str, port: int, timeout_s: float = 5.0, *, tls: ssl.SSLContext | None = None) -> str:
    """The job whose controller answers there, as it says itself: to ask for that takes no token.

    Raises Unreachable, as `connect` does.
    """

    async def ask(link: Link) -> str:
        link.send(wire.Hello(role="launcher", node="", incarnation="", job="", nonce=new_nonce()))
        job = (await link.expect(wire.Challenge)).job
        link.close()
        return job

    return await _greeted(host, port, ask, timeout_s, tls, STALL_S)


async def _greeted(
    host: str,
    port: int,
    greet: Callable[[Link], Awaitable[T]],
    timeout_s: float,
    tls: ssl.SSLContext | None,
    stall_s: float,
) -> T:
    """What the greeting of a new link gives. The link is ended when it fails."""
    link: Link | None = None
    try:
        async with asyncio.timeout(timeout_s):
            sock = await _dial(host, port, timeout_s)
            loop = asyncio.get_running_loop()
            name = host if tls else None
            _, link = await loop.create_connection(
                lambda: Link(None, stall_s), sock=sock, ssl=tls, server_hostname=name
            )
            given = await greet(link)
            link = None
            return given
    except (OSError, Refusal, wire.WireError) as error:
        raise _unreachable(shown(host, port), error, link is not None, timeout_s) from error
    finally:
        if link is not None:
            link.abort("the greeting failed")


async def _introduce(link: Link, token: bytes, hello: wire.Hello) -> None:
    hello = msgspec.structs.replace(hello, nonce=new_nonce())
    link.send(hello)
    challenge = await link.expect(wire.Challenge)
    link.send(wire.Proof(prove(token, Side.CLIENT, hello, challenge)))
    proof = await link.expect(wire.Proof)
    if not proves(proof.mac, token, Side.SERVER, hello, challenge):
        raise Refusal("it could not prove that it holds the job's token")
    welcome = await link.expect(wire.Welcome)
    link.job, link.term = welcome.job, welcome.term
    link.trust("controller")


async def _dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connected socket to the first address of the name that answers. Raises OSError with its errno."""
    addresses = await _resolve(host, port)
    last: OSError = socket.gaierror(socket.EAI_NONAME, "it has no address")
    for family, kind, proto, _, address in addresses:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(family, kind, proto))
            sock.setblocking(False)
            try:
                async with asyncio.timeout(timeout_s / len(addresses)):
                    await asyncio.get_running_loop().sock_connect(sock, address)
                # A port of the ephemeral range that nobody listens on can be connected to itself.
                if sock.getsockname() == sock.getpeername():
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
            except OSError as error:
                last = error
                continue
            undo.pop_all()
            return sock
    raise last


async def _resolve(host: str, port: int) -> list[tuple[Any, ...]]:
    """Addresses of a host. A number needs no resolver, and so no thread to wait for one."""
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except socket.gaierror:
        return list(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))


def _unreachable(where: str, error: Exception, connected: bool, timeout_s: float) -> Unreachable:
    match error:
        case Refusal() | wire.WireError():
            return Unreachable(f"the controller at {where} cannot be joined: {error}", refused=True)
        case ssl.SSLError():
            return Unreachable(f"no TLS connection to {where}: {error.reason or error}", refused=True)
        case TimeoutError() if connected:
            why = f"it took the connection, then said nothing for {timeout_s:g} s: is it stopped, or another program?"
        case TimeoutError():
            why = f"no answer within {timeout_s:g} s: the host is down, or a firewall drops the packets"
        case ConnectionError() if connected:
            why = f"it closed the connection during the greeting ({error})"
        case ConnectionRefusedError():
            why = "connection refused: nothing listens there"
        case socket.gaierror():
            why = f"the name cannot be resolved ({error.strerror})"
        case _:
            why = str(getattr(error, "strerror", None) or error)
    return Unreachable(f"no controller at {where}: {why}")


def shown(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
