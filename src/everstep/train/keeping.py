"""The session's side of saves: whether there are any, the connection to the vault, the end of a job, SIGTERM.

Under `everstep run` every session keeps its state in the memory of nodes. With `checkpoints` it is on disk too: now and
then, when somebody asks (`run.save()`, `everstep save`), when the job's steps are through, and before a stop by
SIGTERM, at the one step at which all members stop.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Protocol

import msgspec
import torch
import xxhash

from everstep.core import identity
from everstep.core.formation import Seat
from everstep.core.identity import Identity
from everstep.core.saves import Saves, Tier
from everstep.probe import boot
from everstep.state import fingerprint
from everstep.state.client import News, Vault, VaultError
from everstep.state.flatten import Stateful
from everstep.train.kept import Kept
from everstep.train.saving import Saving
from everstep.train.snapshots import Snapshots


class SaveFailed(RuntimeError):
    """The last save to disk did not work out: what is there is older than what was trained."""


class Position(Protocol):
    """Where this process stands among the members of the job, and what was committed. The engine's words."""

    @property
    def role(self) -> int: ...
    @property
    def seats(self) -> tuple[Seat, ...]: ...
    @property
    def shards(self) -> int: ...
    @property
    def committed(self) -> int: ...
    @property
    def commit_epoch(self) -> int: ...
    @property
    def keep(self) -> Tier: ...
    def tell_saves(self, saves: Saves) -> None: ...


class Keeping:
    """One a session, whether anything is kept or not. For the main thread, but for `interrupt`."""

    def __init__(self, saving: Saving, objects: Mapping[str, Stateful]) -> None:
        self._saving, self._objects = saving, objects
        self._snapshots: Snapshots | None = None
        self._began_s = 0.0
        self._stopping = self._handles = False
        self._asked = boot.save_asked()

    def prepare(self) -> None:
        """Have this node's vault started, which takes a moment: a standby needs it as soon as it has a role."""
        mine = identity.mine()
        make = _vault_of(mine, self._saving)
        if mine is not None and make is not None:
            threading.Thread(target=_start, args=(make,), name="everstep-vault", daemon=True).start()

    def open(self, position: Position, changed: Callable[[], None], job: str = "") -> None:
        """The state is complete, and may be restored from here on: `changed` is called after a restore."""
        self._position, self._changed = position, changed
        mine = identity.mine()
        make = _vault_of(mine, self._saving)
        if make is None:
            return
        job = job or job_name()
        self._snapshots = snapshots = Snapshots(self._saving, job, make, self._objects, position.tell_saves)
        threading.Thread(target=snapshots.connect, name="everstep-vault", daemon=True).start()
        if mine is None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self._handles = True
                signal.signal(signal.SIGTERM, self._asked_to_stop)

    def _asked_to_stop(self, signum: int, frame: FrameType | None) -> None:
        """Alone; under `everstep run` all members have to stop at one step, see probe.termination."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether this process was told to stop."""
        return self._stopping

    # Steps ----------------------------------------------------------------------------------------------

    def ask(self, tier: Tier) -> None:
        """Somebody wants the next committed state kept that far. Raises ValueError when it has nowhere to go."""
        if self._snapshots is None or (tier is Tier.DISK and self._saving.where is None):
            raise ValueError("where to? Say it to the session: everstep.session(checkpoints=FOLDER)")
        self._snapshots.ask(tier)

    def began(self) -> None:
        self._began_s = time.monotonic()

    def wish(self) -> Tier:
        """For the vote on the step under way."""
        if self._snapshots is None:
            return Tier.NOTHING
        if (asked := boot.save_asked()) != self._asked and self._position.role == 0:  # all hear of it, each in its time
            self._asked = asked
            self._snapshots.ask(Tier.DISK)
        return self._snapshots.wish(self._position.role, self._position.committed + 1)

    @boot.saving
    def committed(self) -> None:
        at = self._position
        if self._snapshots is not None:
            took_s = time.monotonic() - self._began_s
            if at.role and at.keep is Tier.DISK:
                self._asked = boot.save_asked()  # done, and not to be done again when this member becomes the first
            self._snapshots.committed(at.keep, at.committed, at.commit_epoch, took_s)

    @boot.saving
    def between(self) -> None:
        """A step may begin: the script has done what it does between two of them, so the state lies still now."""
        if self._snapshots is not None:
            self._seat(self._snapshots)
            self._snapshots.take()

    def stop_if_told(self) -> None:
        """Alone: where all members would stop."""
        if self._stopping:
            self.finish("before the stop")
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _seat(self, snapshots: Snapshots) -> None:
        at = self._position
        snapshots.seat(at.seats, at.role, at.shards)

    def finish(self, when: str) -> None:
        """All members leave the loop here. Raises SaveFailed when this process is the whole job and the save fails."""
        if self._snapshots is None or self._saving.where is None:
            return
        self._seat(self._snapshots)
        failed = self._save_last(when)
        if failed and identity.mine() is None:
            raise SaveFailed(failed)

    def _save_last(self, when: str) -> str:
        snapshots, at = self._snapshots, self._position
        assert snapshots is not None
        if snapshots.finish(at.committed, at.commit_epoch):
            return ""
        saves = snapshots.saves
        known = f"the last durable step is {saves.durable}" if saves.durable >= 0 else "nothing was saved"
        text = f"the save of step {at.committed} {when} failed: {saves.failed}; {known}"
        print(f"everstep: {text}", file=sys.stderr)
        return text

    @property
    def saves(self) -> Saves:
        return self._snapshots.saves if self._snapshots is not None else Saves()

    # The engine's view ----------------------------------------------------------------------------------

    @boot.saving
    def before_change(self) -> None:
        if self._snapshots is not None:
            self._snapshots.settle()

    def kept(self) -> tuple[Kept, ...]:
        return self._snapshots.kept() if self._snapshots is not None else ()

    @boot.traced("restore")
    def restore(self, step: int, places: tuple[int, ...], epoch: int) -> bool:
        assert self._snapshots is not None, "nothing was offered"
        self._seat(self._snapshots)
        good = self._snapshots.restore(step, places, epoch)
        if good:
            self._changed()
            boot.restored(step)
        return good

    def fingerprint(self, trained_only: bool = False) -> int:
        """Of this member's state: equal for replicas. trained_only: of parameters and optimizers; without a session
        nobody makes the rest equal."""
        trained = (torch.nn.Module, torch.optim.Optimizer)
        objects = {key: o for key, o in self._objects.items() if not trained_only or isinstance(o, trained)}
        found = fingerprint.fingerprints(objects, buffers=not trained_only)
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(found)) >> 1

    def interrupt(self) -> None:
        if self._snapshots is not None:
            self._snapshots.interrupt()

    def close(self) -> None:
        if self._snapshots is not None:
            self._snapshots.settle()
            self._snapshots.close()
        if self._handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def job_name() -> str:
    """Of the job; a process without a launcher of ours is one of its own."""
    job = os.environ.get("TORCHELASTIC_RUN_ID") if identity.mine() is not None else None
    return job or f"alone-{secrets.token_hex(4)}"


def _start(make: Callable[[Callable[[News], None]], Vault]) -> None:
    vault = make(lambda news: None)
    with contextlib.suppress(VaultError):  # who needs it will say so
        _ = vault.endpoint
    vault.close()


def _vault_of(mine: Identity | None, saving: Saving) -> Callable[[Callable[[News], None]], Vault] | None:
    """How to get to this node's vault; None where there is none, and nothing to keep."""
    if mine is None:
        return None if saving.where is None else lambda on_news: Vault.alone(on_news=on_news)
    if not mine.vault.socket:
        return None
    return lambda on_news: Vault(mine.vault.socket, mine.secret, on_news)
