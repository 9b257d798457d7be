"""All links of one worker, and the thread that owns them: it listens, dials, shakes hands, and keeps what came of it.

All but a few methods run in that thread, one asyncio loop, whoever computes meanwhile. A link is a board that is mapped
here (same host), or a stream for channel 0; further channels to a remote worker get a stream of their own when first
used. Of two workers the one with the smaller name dials; the other, when it has waited for a while, calls: a connection
that only asks to be dialed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from everstep.comms import delta, door, forks, link
from everstep.comms.board import Board
from everstep.comms.link import Hello, LinkError, Ready, Settled, Welcome, Wire
from everstep.comms.stream import Connection, Stream, farewell, over
from everstep.core.formation import Formation, Seat

CONCURRENT = 32  # handshakes this worker dials at the same time
MAX_UNPROVEN = 1024  # connections in their handshake; and at most a quarter of the descriptors a process may have
BACKLOG = 1024
CALL_AFTER_S = 0.5
RETRY_ACCEPT_S = 0.1  # when there are no descriptors left

T = TypeVar("T")
Key = tuple[str, int]  # worker, channel


class Own(NamedTuple):
    """What this worker tells others, and what it expects of them."""

    worker: str
    host: str
    token: bytes
    shared_memory: bool
    board: Board


class Counts:
    """What was done so far."""

    def __init__(self) -> None:
        self.dialed = self.accepted = 0  # links and channels, not calls
        self.refused = 0


class Links:
    """`streams` and `boards` are what there is; changed by the loop's thread only."""

    def __init__(self, own: Own, bind: str, say: Callable[[str], None], on_child: Callable[[], None]) -> None:
        self.own = own
        self.counts = Counts()
        self.streams: dict[Key, Stream] = {}
        self.boards: dict[str, Board] = {}
        self._say = say
        self._epochs: dict[str, int] = {}  # worker -> newest epoch its link is wanted for
        self._formation = Formation(0, (), abort=False, floor=0)
        self._dials: dict[Key, asyncio.Task[None]] = {}
        self._arrivals: dict[Key, asyncio.Future[None]] = {}
        self._greetings: dict[asyncio.Task[None], None] = {}  # with who dials us, in order of arrival
        self._max_unproven = min(MAX_UNPROVEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._on_child = on_child
        self.sockets = forks.Sockets(self._in_child)
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listener = self.sockets.new(lambda: socket.create_server((bind, 0), family=family, backlog=BACKLOG))
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.endpoint = f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="everstep-links", daemon=True)

    # For other threads --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def ask(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have the loop's thread do it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, work: Callable[[], None]) -> None:
        """As `ask`, for what does not wait; also from a signal handler."""
        self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        """End all links and the thread, once the others have all that was sent to them."""
        self.ask(self._end_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        listening = self._loop.create_task(self._listen())
        self._loop.run_forever()
        assert listening.done()

    def _in_child(self) -> None:
        """In a forked child: its sockets are closed already."""
        self._on_child()
        for board in (self.own.board, *self.boards.values()):
            board.disown()

    async def _end_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        await farewell(self.streams.values())
        for worker in {*self.boards, *(worker for worker, _ in self.streams)}:
            self._drop(worker)

    # What the fabric asks -----------------------------------------------------------------------------------

    async def prepare(self, formation: Formation, timeout_s: float) -> None:
        """Open the missing links, and only these. Raises LinkError for the first that fails."""
        self._drop_ended(list(self.streams))
        for seat in formation.seats:
            self._epochs[seat.worker] = max(formation.epoch, self._epochs.get(seat.worker, 0))
        have = {*self.boards, *(worker for worker, channel in self.streams if channel == 0)}
        limit = asyncio.Semaphore(CONCURRENT)

        async def one(seat: Seat) -> None:
            async with limit if delta.dials(self.own.worker, seat.worker) else contextlib.nullcontext():
                await self.open(seat, 0, formation.epoch, timeout_s)

        tasks = [asyncio.ensure_future(one(seat)) for seat in delta.missing(self.own.worker, have, formation)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def take(self, formation: Formation) -> dict[str, Board | dict[int, Stream]]:
        """How each other worker of a prepared formation is reached; ends the links to those who left."""
        have = {*self.boards, *(worker for worker, channel in self.streams if channel == 0)}
        for seat in delta.missing(self.own.worker, have, formation):
            raise LinkError(seat.worker, f"formation {formation.epoch} was not prepared")
        self._formation = formation
        for seat in formation.seats:
            self._epochs[seat.worker] = max(formation.epoch, self._epochs.get(seat.worker, 0))
        for worker in delta.leaving(self._epochs, formation):
            self._drop(worker)
        found: dict[str, Board | dict[int, Stream]] = dict(self.boards)
        for (worker, channel), stream in self.streams.items():
            channels = found.setdefault(worker, {})
            assert isinstance(channels, dict), "a board and a stream to the same worker"
            channels[channel] = stream
        return found

    async def open(self, seat: Seat, channel: int, epoch: int, timeout_s: float | None) -> None:
        """Make sure there is a connection to this worker for this channel. Raises LinkError."""
        key = seat.worker, channel
        if key in self.streams or seat.worker in self.boards:
            return
        if delta.dials(self.own.worker, seat.worker):
            await asyncio.shield(self._dialing(seat, channel, epoch))
            return
        arrival = self._arrivals.setdefault(key, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([arrival], timeout=CALL_AFTER_S if channel == 0 else 0)
                if not arrival.done():
                    await self._dial(seat, channel, epoch, call=True)
                await asyncio.wait([arrival])
        except TimeoutError:
            raise LinkError(seat.worker, f"it did not connect within {timeout_s:g} s") from None

    async def channels(self, seats: Sequence[Seat], channel: int, epoch: int) -> list[Stream]:
        """The streams to these workers for one channel, opened where they are missing; waits for ever."""
        self._drop_ended((seat.worker, channel) for seat in seats)
        await asyncio.gather(*(self.open(seat, channel, epoch, None) for seat in seats))
        return [self.streams[seat.worker, channel] for seat in seats]

    # Dialing ------------------------------------------------------------------------------------------------

    def _dialing(self, seat: Seat, channel: int, epoch: int) -> asyncio.Task[None]:
        """The one dial for a key that is under way. It is finished whoever loses interest: no half links."""
        key = seat.worker, channel
        if key not in self._dials:
            task = self._dials[key] = asyncio.get_running_loop().create_task(self._dial(seat, channel, epoch))
            task.add_done_callback(lambda done: (self._dials.pop(key), done.cancelled() or done.exception()))
        return self._dials[key]

    async def _dial(self, seat: Seat, channel: int, epoch: int, call: bool = False) -> None:
        own = self.own
        shared = own.shared_memory and seat.host == own.host
        hello = Hello(link.VERSION, own.worker, seat.worker, own.host, epoch, channel, call, shared, b"", self.endpoint)
        try:
            async with asyncio.timeout(link.HANDSHAKE_S):
                sock = await link.connect(seat.endpoint, self.sockets.new)
                with sock:
                    wire = Wire(sock)
                    welcome = await link.introduce(wire, own.token, hello)
                    if call:
                        return
                    board = await self._enter(seat.worker, welcome, shared)
                    await wire.send(Settled(board is not None))
                    await wire.expect(Ready)
                    # No await from here on: both sides have it now.
                    self.counts.dialed += 1
                    self._install(seat.worker, channel, epoch, board or self._stream(sock, seat.worker, channel))
        except (OSError, ValueError, link.Refusal, link.Garbage) as error:
            raise LinkError(seat.worker, f"{seat.endpoint}: {link.told(error)}") from error

    async def _enter(self, worker: str, welcome: Welcome, shared: bool) -> Board | None:
        if not welcome.door:
            return None
        try:
            return await door.enter(welcome.door, welcome.ticket, self.own.board, self.sockets.new)
        except door.NoDoor as error:
            self._say(f"no shared memory with worker {worker} on the same host ({error}): using TCP")
            return None

    # Being dialed -------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Take connections, for ever: whatever one of them is or does ends in its own task."""
        while True:
            await door.readable(self._listener)
            try:
                sock = self.sockets.new(lambda: self._listener.accept()[0])
            except BlockingIOError:
                continue
            except OSError:  # no descriptors left, or a connection that is gone again
                await asyncio.sleep(RETRY_ACCEPT_S)
                continue
            if len(self._greetings) >= self._max_unproven:
                next(iter(self._greetings)).cancel()
            task = asyncio.get_running_loop().create_task(self._greet(sock))
            self._greetings[task] = None
            task.add_done_callback(self._greetings.pop)

    async def _greet(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.setblocking(False)
                async with asyncio.timeout(link.HANDSHAKE_S):
                    wire = Wire(sock)
                    hello = await link.admit(wire, self.own.token, self.own.worker, self._unwanted)
                    board = await self._welcome(wire, hello)
                    if hello.call:
                        return
                    await wire.send(Ready())
                worker, channel = hello.worker, hello.channel
                self.counts.accepted += 1
                self._install(worker, channel, hello.epoch, board or self._stream(sock, worker, channel))
        except (OSError, link.Refusal, link.Garbage):
            self.counts.refused += 1  # who dialed knows, and names us

    async def _welcome(self, wire: Wire, hello: Hello) -> Board | None:
        """Settle with a proven dialer what the link is: the other's board, or the connection itself."""
        own = self.own
        if hello.call:
            self._called(hello)
            await wire.send(Welcome())
            return None
        if hello.channel or not (own.shared_memory and hello.shared_memory and hello.host == own.host):
            await wire.send(Welcome())
            await wire.expect(Settled)
            return None
        sock, name = door.open_door(self.sockets.new)
        with sock:
            ticket = secrets.token_bytes(door.TICKET_BYTES)
            answer = asyncio.ensure_future(door.answer(sock, ticket, own.board, self.sockets.new))
            try:
                await wire.send(Welcome(name, ticket))
                settled, _ = await wire.expect(Settled)
                return await answer if settled.shared else None
            finally:
                answer.cancel()
                await asyncio.wait([answer])  # it lets go of the door before that is closed

    def _called(self, hello: Hello) -> None:
        """A worker which we have to dial waits for that."""
        key = hello.worker, hello.channel
        self._drop_ended([key])
        if delta.dials(self.own.worker, hello.worker) and key not in self.streams and hello.worker not in self.boards:
            self._dialing(Seat(hello.worker, "", hello.host, hello.endpoint), hello.channel, hello.epoch)

    def _unwanted(self, hello: Hello) -> str:
        over = self._is_over(hello.worker, hello.epoch)
        return f"epoch {self._formation.epoch} has no worker {hello.worker}" if over else ""

    # What there is ------------------------------------------------------------------------------------------

    def _is_over(self, worker: str, epoch: int) -> bool:
        """Whether a link that was wanted for this epoch is not any more."""
        return epoch <= self._formation.epoch and self._formation.role_of(worker) is None

    def _install(self, worker: str, channel: int, epoch: int, way: Board | Stream) -> None:
        """Keep a new connection. One that is there already is dead for the other side, or it would not have dialed."""
        epoch = self._epochs[worker] = max(epoch, self._epochs.get(worker, 0))
        old = self.streams.pop((worker, channel), None)
        if old is not None:
            old.end()
        if isinstance(way, Stream):
            self.boards.pop(worker, None)
            self.streams[worker, channel] = way
        else:
            self.boards[worker] = way
        if self._is_over(worker, epoch):
            self._drop(worker)
        elif (arrival := self._arrivals.pop((worker, channel), None)) is not None and not arrival.done():
            arrival.set_result(None)

    def _stream(self, sock: socket.socket, worker: str, channel: int) -> Stream:
        """The connection itself, when the handshake is over."""
        return Stream(self.sockets.new(lambda: Connection(fileno=sock.detach())), worker, channel)

    def _drop(self, worker: str) -> None:
        """End all links to a worker."""
        for key in [key for key in self.streams if key[0] == worker]:
            self.streams.pop(key).end()
        for key in [key for key in self._arrivals if key[0] == worker]:
            self._arrivals.pop(key).cancel()
        self.boards.pop(worker, None)
        self._epochs.pop(worker, None)

    def _drop_ended(self, keys: Iterable[Key]) -> None:
        """Forget those of these streams which the other side, or this one, has ended."""
        known = {stream: key for key in keys if (stream := self.streams.get(key)) is not None}
        for stream in over(known):
            stream.end()
            del self.streams[known[stream]]
