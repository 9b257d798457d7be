"""What the engine needs of the session: its state, its gradients, what is kept of it."""

from __future__ import annotations

from typing import Protocol

from everstep.comms.collectives import Communicator
from everstep.state.flatten import Flat
from everstep.train.kept import Kept


class Keeper(Protocol):
    """What is kept of the state. In the main thread, but for `interrupt`."""

    def before_change(self) -> None:
        """The state is about to change (an optimizer's step, a copy, a restore): wait for who still reads it."""

    def kept(self) -> tuple[Kept, ...]:
        """The newest of what this node keeps, in memory and on disk; what this session found damaged is left out."""

    def restore(self, step: int, places: tuple[int, ...], epoch: int) -> bool:
        """Overwrite the whole state by the kept one (Kept.step, Kept.epoch); `places` as in protocol.Restore.

        False: something is missing or damaged; the state may be overwritten in part then.
        """

    def fingerprint(self) -> int:
        """Of the whole state: the same on all members which hold the same bits."""

    def interrupt(self) -> None:
        """From another thread: the epoch of a restore under way is over, so what it waits for must raise."""


class Worker(Protocol):
    """What the engine needs of the session: its state, its gradients."""

    @property
    def keeping(self) -> Keeper: ...

    def drop_gradients(self) -> None: ...

    def state(self) -> Flat:
        """The whole state, which does not change before the next optimizer step."""

    def fetch(self, communicator: Communicator, source: int) -> None:
        """Overwrite the whole state; raises EpochBroken. Nothing is overwritten before all has arrived."""
