"""The fabric of one worker: its board, its links, and the table of the epoch it is in.

Change of members has two phases: `prepare` opens the missing links while training goes on, `switch` swaps the table and
opens nothing. Between the two formations nothing is done twice and stayers keep their connections.

Who may call what: `switch` belongs to the thread which takes the steps. `prepare` waits, so it gets a thread of its
own; a newer one ends an older one. `abort` and `cancel` are for any thread and for signal handlers: they wait for
nobody. Links are owned by a thread in here (`links.py`); the threads inside collectives hold on to the table they
began with. In a forked child the fabric is gone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import select
import sys
import threading
from collections.abc import Sequence

import torch

from everstep.comms import futex
from everstep.comms.board import Board
from everstep.comms.flag import Flag
from everstep.comms.link import LinkError
from everstep.comms.links import Counts, Links, Own
from everstep.comms.stream import Stream
from everstep.comms.table import Peer, Table
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation

PREPARE_S = 30.0  # members get a formation, and joiners start to listen, at different times
ALIGNMENT = 4096


class Superseded(Exception):
    """A formation need not be prepared any more."""


class Fabric:
    """`endpoint`: where it listens, "host:port". `counts`: links opened so far. `bind` is the address others reach."""

    def __init__(
        self, worker: str, host: str, token: bytes, *, bind: str = "127.0.0.1", shared_memory: bool = True
    ) -> None:
        self.worker = worker
        self.board = Board.create(worker)
        self._table: Table | None = None
        self._aborted: dict[int, str] = {}  # epoch -> why
        self._cancelled = [0]  # formations up to the greatest of these epochs are not prepared any more
        self._preparing: dict[int, concurrent.futures.Future[None]] = {}
        self._arena_used = 0
        self._arena_lock = threading.Lock()
        self._said = False
        if shared_memory and not futex.ordered():
            shared_memory = False
            self._say("no shared memory between workers on this kind of processor: using TCP")
        own = Own(worker, host, token, shared_memory, self.board)
        self._links = Links(own, bind, self._say, self._forget)
        self._links.start()
        self._closed = False

    @property
    def endpoint(self) -> str:
        return self._links.endpoint

    @property
    def counts(self) -> Counts:
        return self._links.counts

    @property
    def table(self) -> Table:
        """Of the epoch this worker is in. Raises RuntimeError before the first switch, and in a forked child."""
        if self._table is None:
            raise RuntimeError("this worker is in no epoch")
        return self._table

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed bytes of this worker's arena, which peers of the host can read in place. They are never taken back."""
        with self._arena_lock:
            begin = self._arena_used
            arena = self.board.arena
            if num_bytes > len(arena) - begin:
                raise ValueError(f"{num_bytes} bytes do not fit into the {len(arena) - begin} left of the arena")
            self._arena_used = begin + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return arena.narrow(0, begin, num_bytes)

    # Change of members --------------------------------------------------------------------------------------

    def prepare(self, formation: Formation, timeout_s: float = PREPARE_S) -> None:
        """Open the links which the formation needs and which are missing. Waits for all of them.

        Raises LinkError, which names the worker, and Superseded when `cancel` or a newer formation ended it.
        """
        self._seat(formation)
        future = self._links.ask(self._links.prepare(formation, timeout_s))
        self._preparing[formation.epoch] = future
        self.cancel(formation.epoch - 1)
        if formation.epoch <= max(self._cancelled):  # by somebody who could not see it yet
            future.cancel()
        try:
            future.result()
        except concurrent.futures.CancelledError as error:
            raise Superseded(f"formation {formation.epoch} is not prepared any more") from error
        finally:
            future.cancel()  # after an exception in this thread: a signal handler's, say
            self._preparing.pop(formation.epoch, None)

    def cancel(self, epoch: int | None = None) -> None:
        """End what is being prepared; with `epoch`, formations up to that one will not be prepared later either."""
        upto = max(self._preparing, default=0) if epoch is None else epoch
        if epoch is not None:
            self._cancelled.append(epoch)  # one step, whichever threads do it at once
        for number, future in list(self._preparing.items()):
            if number <= upto:
                future.cancel()

    def switch(self, formation: Formation) -> Table:
        """Be in this epoch from now on. Raises LinkError when a link of it is missing: it was not prepared.

        Links to workers which have no seat in it end, and so does whatever still waits in the epoch before.
        """
        role = self._seat(formation)
        before = self._table
        if before is not None and formation.epoch <= before.epoch:
            raise ValueError(f"formation {formation.epoch} comes after {before.epoch}: epochs only grow")
        ways = self._links.ask(self._links.take(formation)).result()
        peers = []
        for seat in formation.seats:
            way = self.board if seat.worker == self.worker else ways[seat.worker]
            peers.append(Peer(seat, way) if isinstance(way, Board) else Peer(seat, None, way))
        table = self._table = Table(formation, role, peers, self._connect)
        # `abort` writes before it looks at the table, so one of the two sees the other.
        if (why := self._aborted.get(formation.epoch)) is not None:
            table.abort(why)
        if before is not None:
            before.abort(f"epoch {formation.epoch} began")
        for epoch in [epoch for epoch in list(self._aborted) if epoch < formation.epoch]:
            del self._aborted[epoch]
        return table

    def abort(self, epoch: int, why: str) -> None:
        """Make every call that waits in this epoch raise EpochBroken, now and, if it has not begun, when it begins."""
        self._aborted[epoch] = why
        table = self._table
        if table is not None and table.epoch == epoch:
            table.abort(why)

    def abort_before(self, epoch: int, why: str) -> None:
        """Abort the epoch this worker is in if it is an older one: parting from it is in vain."""
        table = self._table
        if table is not None and table.epoch < epoch:
            table.abort(why)

    def close(self) -> None:
        """Leave: whatever waits raises, and all links end. Harmless when done before."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        if self._table is not None:
            self._table.abort("this worker has left")
        self._links.stop()
        self.board.close()

    # Inside -------------------------------------------------------------------------------------------------

    def _seat(self, formation: Formation) -> int:
        role = formation.role_of(self.worker)
        if role is None:
            raise ValueError(f"worker {self.worker} has no seat in formation {formation.epoch}")
        return role

    def _connect(self, table: Table, channel: int, roles: Sequence[int]) -> None:
        """Open the streams of a channel on its first use. Raises EpochBroken."""
        seats = [table.seats[role] for role in roles]
        future = self._links.ask(self._links.channels(seats, channel, table.epoch))
        done = Flag()
        future.add_done_callback(lambda _: done.raise_())
        poll = select.poll()
        poll.register(done, select.POLLIN)
        poll.register(table.gate, select.POLLIN)
        poll.poll()
        future.cancel()
        table.check()
        try:
            streams: list[Stream] = future.result()
        except (LinkError, concurrent.futures.CancelledError) as error:
            table.abort(str(error))
            raise EpochBroken(table.epoch, str(error)) from error
        for role, stream in zip(roles, streams, strict=True):
            table.peer(role).streams[channel] = stream

    def _say(self, text: str) -> None:
        """Once: what holds for one worker of the host holds for the others."""
        if not self._said:
            self._said = True
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                sys.stderr.write(f"everstep: {self.worker}: {text}\n")  # in one piece: others write to it as well

    def _forget(self) -> None:
        self._table = None
