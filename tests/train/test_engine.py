"""The engine between a session and its fabric: what it says, and which numbers its communicators have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import everstep
from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.comms.world import DEFAULT_INDEX
from everstep.core.formation import Formation, Rollback, Seat, SessionReport
from everstep.core.saves import Tier
from everstep.state.flatten import Flat, flatten
from everstep.train.engine import Engine
from everstep.train.kept import Kept
from everstep.train.worker import Keeper


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_process_group_beside_the_session_has_numbers_of_its_own() -> None:
    with everstep.session() as run:
        own = [c.index for c in vars(run._engine).values() if isinstance(c, Communicator)]
    assert len(set(own)) == len(own) and max(own) < DEFAULT_INDEX


class Empty:
    """A member without state, and its own keeper."""

    @property
    def keeping(self) -> Keeper:
        return self

    def drop_gradients(self) -> None:
        """It has none."""

    def state(self) -> Flat:
        return flatten({})

    def fetch(self, communicator: Communicator, source: int) -> None:
        raise AssertionError("nobody else is there")

    def before_change(self) -> None:
        """Nobody reads it."""

    def kept(self) -> tuple[Kept, ...]:
        return ()

    def restore(self, step: int, places: tuple[int, ...], epoch: int) -> bool:
        raise AssertionError("nothing is kept")

    def fingerprint(self) -> int:
        return 0

    def interrupt(self) -> None:
        raise AssertionError("nothing is kept")


def test_an_epoch_is_reported_once_its_links_are_in_use_not_when_they_are_open() -> None:
    said: list[SessionReport] = []
    fabric = Fabric("n/0#0", "host", b"secret")
    engine = Engine(fabric, "n/0#0", "host", said.append)
    try:
        seat = Seat("n/0#0", "n", "host", fabric.endpoint)
        engine.open(Empty())
        engine.receive(Formation(4, (seat,), abort=False, floor=0))
        until(lambda: said and said[-1].prepared == 4)
        assert said[-1].epoch == 0  # nobody called `ready`: the main thread may still be anywhere
        assert engine.ready() == 0 and said[-1].epoch == 4
    finally:
        engine.close()


class Keeping(Empty):
    """A member whose node keeps two states; while it reads, a formation comes, and the newer one is damaged."""

    def __init__(self, engine: Engine, following: Formation) -> None:
        self.engine, self.following = engine, following
        self.over = threading.Event()
        self.did: list[str] = []

    def before_change(self) -> None:
        self.did.append("wait")

    def kept(self) -> tuple[Kept, ...]:
        return Kept(8, 0, 1, epoch=3), Kept(6, 0, 1, epoch=3)

    def restore(self, step: int, places: tuple[int, ...], epoch: int) -> bool:
        assert (places, epoch) == ((0,), 3)
        self.did.append(f"restore {step}")
        if self.did.count("restore 8") == 1:
            threading.Thread(target=self.engine.receive, args=(self.following,)).start()
            assert self.over.wait(10)
            self.engine.require_epoch()
        return step == 6

    def interrupt(self) -> None:
        self.over.set()


def test_a_restore_is_left_for_the_next_formation_and_a_damaged_state_for_an_older_one() -> None:
    said: list[SessionReport] = []
    fabric = Fabric("n/0#0", "host", b"secret")
    engine = Engine(fabric, "n/0#0", "host", said.append)
    try:
        seat = Seat("n/0#0", "n", "host", fabric.endpoint)
        owner = Keeping(engine, Formation(5, (seat,), abort=True, floor=9))
        engine.open(owner)
        engine.receive(Formation(4, (seat,), abort=False, floor=9))
        assert engine.ready() == 6
        assert owner.did == ["wait", "restore 8", "wait", "restore 8", "wait", "restore 6"]
        assert (said[-1].rollbacks, said[-1].committed) == ((Rollback(5, 6),), 6)
        engine.began()
        assert engine.vote(finite=True, keep=Tier.DISK) and owner.did[-1] == "wait"
        engine.applied()
        assert (engine.keep, engine.commit_epoch, engine.committed) == (Tier.DISK, 5, 7)
        assert engine.ready() == 7
        engine.began()
        assert not engine.vote(finite=False, keep=Tier.MEMORY)
        assert engine.keep is Tier.MEMORY
        assert said[-1].rollbacks == (Rollback(5, 6),)
    finally:
        engine.close()
