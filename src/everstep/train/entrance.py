"""A worker's way into the entries of a restartable function: it waits for a role, meets the others, says how far it is.

A session without steps: the members of an epoch are the ranks of one entry. They meet over the fabric, where the
first one tells the address of a store of its own. It serves this entry only: nothing of an earlier one can be read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch.distributed as dist

from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric, Superseded
from everstep.comms.link import LinkError
from everstep.core import identity
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, SessionReport, Stage
from everstep.core.saves import Saves
from everstep.train.channel import Channel

UNREACHABLE_S = 60.0  # a member that cannot be reached for so long, and is not dead: the network is broken
RETRY_S = 0.2


class Ranks(msgspec.Struct, frozen=True):
    """Who this worker is in one entry. `hosts` and `ports`: of the fabrics of all its members."""

    rank: int
    world_size: int
    store: str  # "host:port"
    restarts: int  # entries of the job before this one
    hosts: frozenset[str]
    ports: frozenset[int]

    def environment(self) -> Mapping[str, str]:
        """What `init_process_group` reads: every member is a client of the store."""
        host, _, port = self.store.rpartition(":")
        rank, world = str(self.rank), str(self.world_size)
        return {
            "RANK": rank,
            "ROLE_RANK": rank,
            "WORLD_SIZE": world,
            "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


def serve_store(address: str) -> Any:
    """A store for one entry, at a port of its own: `init_process_group` finds it through the environment."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


class Entrance:
    """For the main thread. `on_over(why)` is called in the channel's thread when a formation ends the present epoch."""

    def __init__(self, me: identity.Identity, on_over: Callable[[str], None]) -> None:
        self._me, self._on_over = me, on_over
        self._channel = Channel(me.channel, self._received)
        host = identity.host()
        self._fabric = Fabric(me.worker, host, me.secret, bind=me.address)
        self._communicator = Communicator(self._fabric)
        self.beside = Communicator(self._fabric, index=1)  # for the function: what it agrees on with its members
        self._news = threading.Condition()
        self._newest: Formation | None = None
        self._unreachable_s: tuple[int, float] | None = None  # epoch, since when
        self._store: Any = None
        endpoint = self._fabric.endpoint
        self._saying = threading.Lock()
        self._said = SessionReport(
            me.worker, Stage.WARMING, -1, 0, 0, endpoint, host, fixed=True, vault=me.vault.endpoint
        )

    @property
    def epoch(self) -> int:
        """Of the present entry, or of the last one; 0 before the first."""
        return self._said.epoch

    @property
    def over(self) -> str | None:
        """Why the present epoch is over; None while it is not."""
        newest = self._newest
        return f"epoch {newest.epoch} follows" if newest is not None and newest.epoch > self.epoch else None

    def open(self) -> None:
        self._channel.start()
        self._say(stage=Stage.WARMING)

    def close(self) -> None:
        """Take part in nothing any more. A store that this worker serves lives on for what the script still does."""
        self._fabric.close()
        self._channel.close()

    # Into an entry, and out of it -----------------------------------------------------------------------

    def enter(self, failure: str = "", steps: int = -1) -> Ranks:
        """Wait until this worker has a role and has met the others.

        failure: what the function raised in the epoch it left; whether another member was first is not known here.
        steps: of the job, as far as this worker knows; -1: it has been in no entry.
        """
        self._store = None  # of the entry before
        failure = failure if self.over is None else ""
        self._say(stage=Stage.READY, committed=steps, resumed=False, gap_s=-1.0, failure=failure)
        while True:
            formation = self._next()
            try:
                self._fabric.prepare(formation)
                self._fabric.switch(formation)
                self._change(epoch=formation.epoch, prepared=formation.epoch)
                ranks = self._meet(formation)
            except (Superseded, EpochBroken):
                self._say(stage=Stage.READY, failure="")
            except LinkError as error:
                self._retry(formation, error)
            else:
                self._say(stage=Stage.MEMBER, committed=max(0, steps), failure="")
                return ranks

    def resumed(self, steps: int, gap_s: float = -1.0) -> None:
        """The function makes progress in this entry, `gap_s` after that of the one before (-1: there was none)."""
        if not self._said.resumed:
            self._say(resumed=True, committed=max(0, steps), gap_s=gap_s)

    def tell_saves(self, saves: Saves) -> None:
        """What is known of saves to disk by now. From any thread."""
        self._say(saves=saves)

    def finish(self) -> bool:
        """Wait until the functions of all members have returned. False: one of them will not in this epoch.

        Nobody leaves before everybody is through with the first round. So the second may also break because others have
        left, all being done; unless another epoch follows, which the others may enter.
        """
        try:
            self._communicator.barrier()
        except EpochBroken:
            return False
        try:
            self._communicator.barrier()
        except EpochBroken:
            return self.over is None
        return True

    # Inside ---------------------------------------------------------------------------------------------

    def _say(self, **changes: Any) -> None:
        self._channel.report(self._change(**changes))

    def _change(self, **changes: Any) -> SessionReport:
        with self._saying:
            self._said = said = msgspec.structs.replace(self._said, **changes)
        return said

    def _received(self, formation: Formation) -> None:
        """In the channel's thread. Waits for nobody."""
        with self._news:
            former = self._newest
            if former is not None and formation.epoch <= former.epoch:
                return
            self._newest = formation
            self._news.notify_all()
        why = f"epoch {formation.epoch} follows"
        if former is not None:
            self._fabric.abort(former.epoch, why)
        self._fabric.abort_before(formation.epoch, why)
        self._fabric.cancel(formation.epoch - 1)
        if former is not None:
            self._on_over(why)

    def _next(self) -> Formation:
        """The newest formation, which is to be entered. Raises SystemExit when the others go on without this worker."""
        with self._news:
            while True:
                formation = self._newest
                if formation is not None and formation.epoch > self.epoch:
                    if formation.role_of(self._me.worker) is not None:
                        return formation
                    if self.epoch:
                        self._dismissed(formation)
                self._news.wait()

    def _dismissed(self, formation: Formation) -> None:
        if not formation.abort:
            self._say(stage=Stage.LEFT)
            raise SystemExit(0)
        raise SystemExit(f"everstep: the others went on without this worker in epoch {formation.epoch}: it stops")

    def _meet(self, formation: Formation) -> Ranks:
        """Raises EpochBroken."""
        role = formation.role_of(self._me.worker)
        assert role is not None
        mine = b""
        if role == 0:
            address = self._me.address
            self._store = serve_store(address)
            mine = f"{address}:{self._store.port}".encode()
        store = self._communicator.all_gather_bytes(mine)[0].decode()
        ends = [seat.endpoint.rpartition(":") for seat in formation.seats]
        hosts, ports = frozenset(host.strip("[]") for host, _, _ in ends), frozenset(int(port) for _, _, port in ends)
        return Ranks(role, len(formation.seats), store, formation.epoch - 1, hosts, ports)

    def _retry(self, formation: Formation, error: LinkError) -> None:
        """A peer that cannot be reached is, as a rule, dead, and a formation without it is on its way."""
        now = time.monotonic()
        if self._unreachable_s is None or self._unreachable_s[0] != formation.epoch:
            self._unreachable_s = formation.epoch, now
        if now - self._unreachable_s[1] > UNREACHABLE_S:
            raise error
        with self._news:
            if self._newest is formation:
                self._news.wait(RETRY_S)
