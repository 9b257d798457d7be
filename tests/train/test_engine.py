"""The engine between a session and its fabric: what it says, and which numbers its communicators have."""

from __future__ import annotations

import time
from collections.abc import Callable

import everstep
from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.comms.world import DEFAULT_INDEX
from everstep.core.formation import Formation, Seat, SessionReport
from everstep.state.flatten import Flat, flatten
from everstep.train.engine import Engine
from everstep.train.kept import Kept


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
    """A member without state."""

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
