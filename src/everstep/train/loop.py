"""`everstep.keep`: the state of a script which owns its loop, kept, and put back when the script begins again.

    model, optimizer = DistributedDataParallel(...), torch.optim.AdamW(...)
    with everstep.keep(model=model, optimizer=optimizer, checkpoints="runs/a") as kept:
        for step in range(kept.step, 1000):
            ...
            optimizer.step()
            kept.committed()

In an `@everstep.restartable` function, under `everstep run` without it, under torchrun, or alone. There is no vote
here: `committed` is where all members come to with the same step, so there the first one tells what is to be saved of
it. State lies still from there to the next optimizer step, before which its copy has to be through.
"""

from __future__ import annotations

import atexit
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.core import identity
from everstep.core.formation import Seat
from everstep.core.saves import Saves, Tier
from everstep.probe import boot
from everstep.state.flatten import Stateful
from everstep.train.keeping import Keeping, job_name
from everstep.train.kept import Commit, Image, newest, places
from everstep.train.members import Back, Hello, Members, Offer, part_of, shards_of
from everstep.train.saving import Saving, saving_of

STOP = 1 << 7  # in the word of the first member, beside a Tier


def keep(*, checkpoints: str | Path | Saving | None = None, **objects: Any) -> KeptLoop:
    """Put the newest kept state into these objects; from then on keep theirs. All members call it, once a loop.

    objects: modules (wrapped or not), optimizers, schedulers, anything with state_dict() and load_state_dict(): what
    all members have alike, or a model that FSDP2 shards over all of them. checkpoints: a folder or URL where the state
    is saved, and from which a later run goes on; or a `Saving`, which says how often as well. None: under
    `everstep run` it is kept in the nodes' memory only.

    Raises ValueError for what cannot be kept, or does not fit what was.
    """
    for name, thing in objects.items():
        if not isinstance(thing, Stateful):
            raise ValueError(f"{name}: {type(thing).__name__} has no state_dict() and load_state_dict()")
    if not objects:
        raise ValueError("nothing to keep: keep(model=model, optimizer=optimizer)")
    if any(loop.open for loop in _loops):
        raise ValueError("a process keeps the state of one loop: close() the one before")
    loop = KeptLoop(saving_of(checkpoints), objects)
    try:
        loop.begin()
    except BaseException:
        loop.close(save=False)
        raise
    return loop


_loops: weakref.WeakSet[KeptLoop] = weakref.WeakSet()


@dataclass
class At:
    """See keeping.Position."""

    role: int
    seats: tuple[Seat, ...]
    shards: int
    commit_epoch: int
    tell_saves: Callable[[Saves], None]
    committed: int = 0
    keep: Tier = Tier.NOTHING


class KeptLoop:
    """What `keep` gives. For the main thread. `step`: how many steps the objects' state is made of."""

    def __init__(self, saving: Saving, objects: dict[str, Stateful]) -> None:
        self._objects, self._mine = objects, identity.mine()
        if self._mine is None:
            saving = replace(saving, memory_every=0)  # a vault of this process's own ends with it
        self._keeping = Keeping(saving, objects)
        self._members = Members()
        self._open, self._changing = True, False
        mine = weakref.ref(self)
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _about_to_step(mine()))

    def begin(self) -> None:
        """Meet the other members and restore."""
        members, me = self._members, self._mine
        boot.hold_sigterm()
        _loops.add(self)
        if members.entry is not None:
            members.entry.at_leave(self._left)
        else:
            atexit.register(self._at_exit)
        node, vault = (me.worker.partition("/")[0], me.vault.endpoint) if me is not None else (identity.host(), "")
        hellos = members.gather(Hello(node, vault, part_of(self._objects), job_name(), members.epoch))
        seats = tuple(Seat(str(rank), hello.node, hello.node, "", "", hello.vault) for rank, hello in enumerate(hellos))
        tell = members.entry.entrance.tell_saves if members.entry is not None else lambda saves: None
        self._at = At(members.rank, seats, shards_of(hellos), hellos[0].epoch, tell)
        self._keeping.open(self._at, lambda: None, hellos[0].job)
        self._at.committed = self._restored()
        self._keeping.began()

    # What the script says -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that are in the state: the number of the next one."""
        return self._at.committed

    @property
    def open(self) -> bool:
        return self._open

    @property
    def saves(self) -> Saves:
        """How far saves to disk are, as this member knows: `requested`, `durable`, `failed_step`, `failed` (why)."""
        return self._keeping.saves

    def save(self) -> None:
        """Save the state of the next committed step to `checkpoints`; the first member's word counts."""
        self._keeping.ask(Tier.DISK)

    def committed(self) -> None:
        """The step is through, schedulers and all: the state is that of one step more. On all members.

        From here to the next optimizer step nothing else may change it. When the job is to stop (SIGTERM) it stops
        here, saved; a script that handles SIGTERM itself stops as it says.
        """
        if not self._open:
            raise ValueError("committed() after close()")
        mine = self._keeping.wish() | (STOP if self._keeping.stopping else 0)
        word = self._members.told(mine)
        self._at.committed += 1
        self._at.keep = Tier(word & ~STOP)
        self._changing = False
        self._keeping.committed()
        if word & STOP or boot.stop_due():
            self._stop()
        self._keeping.between()
        if not any(isinstance(thing, torch.optim.Optimizer) for thing in self._objects.values()):
            self._keeping.before_change()  # nobody will say when
        self._keeping.began()

    def close(self, save: bool = True) -> None:
        """The loop is over: save the last state to `checkpoints`, if it is not there, and wait for it.

        Raises SaveFailed when this process is the whole job and the save fails.
        """
        if self._end(save, "at the end") and save:
            boot.die_of_sigterm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(save=error is None)

    # Inside ---------------------------------------------------------------------------------------------

    def _end(self, save: bool, when: str) -> bool:
        """Whether SIGTERM came and did not do what it does."""
        if not self._open:
            return False
        try:
            if save and not self._changing:  # else the state is that of no step
                self._keeping.finish(when)
        finally:
            self._hook.remove()
            self._keeping.close()
            self._open = False  # last: what is interrupted here is done again when the function is left
            atexit.unregister(self._at_exit)
        return boot.release_sigterm()

    def _left(self, returned: bool) -> None:
        """The restartable function was."""
        self.close(save=returned)

    def _at_exit(self) -> None:
        """The script did not close it."""
        self.close(save=getattr(sys, "last_value", None) is None)

    def _stop(self) -> None:
        """All members are here, with the same step. For an agent a status is a failure, which ends who still saves."""
        self._end(save=True, when="before the stop")
        raise SystemExit(0 if self._mine is not None else 128 + signal.SIGTERM)

    def _restored(self) -> int:
        """Put the newest state in which all can have; its steps."""
        members, tried, failed = self._members, set[Image](), set[Commit]()
        while True:
            kept = [said.kept for said in members.gather(Offer(self._keeping.kept()))]
            image = newest(kept, (), failed)
            if image is None:
                break
            if self._all_have(image, places(kept, image)[members.rank]):
                if not members.rank:
                    where = "in the nodes' memory" if image.in_memory else "on disk"
                    print(f"everstep: goes on from step {image.step}, kept {where}", file=sys.stderr)
                return image.step
            if image in tried:  # once more without the node or the disk that failed, and no more
                failed.add((image.step, image.epoch))
            tried.add(image)
        if tried:
            raise RuntimeError("state was kept, and none of it can be used: see above")
        if self._at.commit_epoch > 1 and not members.rank:
            print("everstep: no state is kept: begins at step 0", file=sys.stderr)
        return 0

    def _all_have(self, image: Image, mine: tuple[int, ...]) -> bool:
        """Restore it here; whether that went well everywhere. Who found it damaged does not offer it again."""
        good = self._keeping.restore(image.step, mine, image.epoch)
        backs = self._members.gather(Back(good, self._keeping.fingerprint(trained_only=True) if good else 0))
        if not all(back.good for back in backs):
            return False
        shards = self._at.shards
        same = all(back.fingerprint == backs[role % shards].fingerprint for role, back in enumerate(backs))
        if not same:
            print(f"everstep: the kept state of step {image.step} is not the same on all members", file=sys.stderr)
        return same


def _about_to_step(loop: KeptLoop | None) -> None:
    """Any optimizer of the process: it may be one that is not kept, of parameters that are."""
    if loop is not None and loop.open:
        loop._keeping.before_change()
        loop._changing = True
