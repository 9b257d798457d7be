"""What the user holds: a session whose loop yields every step until it is committed, whoever dies meanwhile.

    with everstep.session() as run:
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(1000):
            with step:
                for batch in step.share(batches):
                    model(batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

Alone it is a world of one; under `everstep run` every worker's session is a member of the job. Gradients are averaged
when the share is through (or before the optimizer's step), then the members vote, then the optimizers run: that is the
commit. A fault before it undoes the step on every survivor and the loop yields the same step again. What the script
raises itself is the script's.
"""

from __future__ import annotations

import socket
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.core import identity
from everstep.core.dealing import Stream
from everstep.core.errors import EpochBroken, causes
from everstep.core.formation import Formation, Seat, Stage
from everstep.core.saves import Saves, Tier
from everstep.data.batches import Batches
from everstep.probe import boot
from everstep.state.flatten import Flat, Stateful
from everstep.state.local import is_sharded
from everstep.train import audit, ending, transfer
from everstep.train.buffers import share
from everstep.train.channel import Channel
from everstep.train.engine import Engine
from everstep.train.guard import Guard
from everstep.train.inner import Inner, library_of, sums_of
from everstep.train.keeping import Keeping
from everstep.train.metered import Metered
from everstep.train.metrics import Where, metrics_of
from everstep.train.randomness import reseed
from everstep.train.reducer import Reducer
from everstep.train.saving import Saving, saving_of
from everstep.train.undo import Undo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from everstep.train.sharded import Sharded

ALONE = "alone/0#0"


def session(
    *,
    seed: int = 0,
    log_file: Where = None,
    library: str | None = None,
    checkpoints: str | Path | Saving | None = None,
    check_every: int | None = None,
    audit_every: int | None = None,
) -> Session:
    """The job's session of this process.

    seed: of the randomness inside steps. log_file: `log` appends a JSON line a step to it; all members' nodes see it.
    Of steps that are done again, what was written before moves to `log_file.redone`. Or a tracker, or several of both.
    library: what sums gradients, "nccl" or "gloo"; None: NCCL on its devices, Everstep's own collectives on the CPU.
    checkpoints: a folder or URL where the state is saved, and from which a later run of the script goes on; or a
    `Saving`, which says how often as well. None: under `everstep run` it is kept in the nodes' memory only.
    check_every: steps between two comparisons of replicas, which find a flipped bit; None: as often as 0.5 % of the
    step time permits, 0: never. Each state that is saved is compared too. audit_every: steps between two that are
    computed twice, which finds a member that computes wrong gradients; None: about 2,000, 0: never.
    """
    return Session(seed, log_file, library, saving_of(checkpoints), check_every, audit_every)


class Stopped(SystemExit):
    """The whole job stops at this step. The session ends its process, as SIGTERM would, when it is closed."""


class Session:
    """`with session() as run`. One a process. Its methods are for the main thread."""

    def __init__(
        self,
        seed: int = 0,
        log_file: Where = None,
        library: str | None = None,
        saving: Saving | None = None,
        check_every: int | None = None,
        audit_every: int | None = None,
    ) -> None:
        self.seed = seed
        self._objects: dict[str, Stateful] = {}
        self._keeping = Keeping(saving or Saving(), self._objects)
        self._guard = Guard(check_every, self._objects, audit_every)
        self._current: Step | None = None
        self._opened = False
        self._batches: set[Batches] = set()  # that steps took shares of
        self._group: ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None
        self._hooks: list[RemovableHandle] = []
        mine = identity.mine()
        self._channel = Channel(mine.channel, self._formation) if mine is not None else None
        worker, address = (mine.worker, mine.address) if mine is not None else (ALONE, "127.0.0.1")
        secret = mine.secret if mine is not None else socket.gethostname().encode()
        host = identity.host()
        fabric = Fabric(worker, host, secret, bind=address)
        library = library or library_of(self.device)
        inner = Inner(library, worker, address, self.device) if library is not None else None
        report = self._channel.report if self._channel else lambda report: None
        self._metered = Metered(report, metrics_of(log_file))
        self._engine = Engine(fabric, worker, host, self._metered, inner, self._guard)
        me = Seat(worker, "alone", host, fabric.endpoint, inner.store if inner is not None else "")
        self._alone = Formation(1, (me,), abort=False, floor=0)

    @property
    def device(self) -> torch.device:
        """Where this worker's model belongs."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator if accelerator is not None else torch.device("cpu")

    def __enter__(self) -> Self:
        if self._channel is not None:
            boot.hold_sigterm(commits=True)
            self._channel.start()
            self._keeping.prepare()
            self._engine.say(Stage.WARMING)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engine.leave()
        for handle in self._hooks:
            handle.remove()
        if self._hooks:
            self._reducer.close()
        self._keeping.close()
        self._metered.close()
        if self._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._engine.close()
        for batches in self._batches:
            batches.close()
        if self._channel is not None:
            self._channel.close()
            if boot.release_sigterm() and (error is None or isinstance(error, Stopped)):
                boot.die_of_sigterm()

    # What the script says -------------------------------------------------------------------------------

    def protect(self, **objects: Any) -> None:
        """Objects whose state belongs to the job: modules, optimizers, schedulers, anything with state_dict() and
        load_state_dict(). Each member holds a copy; a newcomer gets it from a live one.

        Raises ValueError for an object without the two methods, and after the first step.
        """
        if self._opened:
            raise ValueError("protect() comes before the first step: a newcomer copies all of it or nothing")
        for name, thing in objects.items():
            if not isinstance(thing, Stateful):
                raise ValueError(f"{name}: {type(thing).__name__} has no state_dict() and load_state_dict()")
            if name in self._objects:
                raise ValueError(f"{name} is protected already")
            self._objects[name] = thing

    def steps(self, num_steps: int) -> Iterator[Step]:
        """Yield steps until `num_steps` of the job are committed; one that a fault undid comes again.

        All members leave the loop at the same step, or the others go on without who does not.
        """
        if not self._opened:
            self._open()
        self._engine.aim(int(num_steps))
        while True:
            if boot.stop_due():
                self._keeping.finish("before the stop")
                raise Stopped
            number = self._engine.ready()
            if number >= num_steps and not self._engine.confirm(self._keeping.before_change):
                continue
            if number >= num_steps:
                self._keeping.finish("at the end")
                return
            self._keeping.stop_if_told()
            self._keeping.between()
            self._current = step = Step(self, number)
            with ending.in_loop(self._engine):
                yield step
            if not step.entered:
                raise ValueError("the loop over run.steps(...) needs `with step:` around the work of a step")

    @property
    def group(self) -> ProcessGroup:
        """torch's default group, of all members; it stays when one is replaced. Waits until this worker has a role.

        From then on the number of members is fixed: a dead one's role waits for who takes it over. Use it inside
        `with step`, where a fault undoes what it left half done.
        """
        if self._group is None:
            self._group = self._make_group()
        return self._group

    def mesh(self, *, shards: int, replicas: int | None = None) -> DeviceMesh:
        """All members as a mesh for `fully_shard(module, mesh=...)`: axes "replicate" and "shard", on the CPU.

        Build the model after it: it waits until this worker has a role, which decides on the shard. A member that dies
        is replaced from another one with the same shard, so with one replica only its death loses the state.
        Raises ValueError when the job has not replicas x shards members.
        """
        from everstep.comms.mesh import make_mesh  # torch.distributed: only for who needs it

        if self._mesh is not None:
            raise ValueError("a session has one mesh")
        num_members = self.group.size()
        replicas = num_members // max(shards, 1) if replicas is None else replicas
        if shards < 1 or replicas * shards != num_members:
            raise ValueError(f"a mesh of {replicas} replicas x {shards} shards for {num_members} members")
        self._engine.split(shards)
        self._mesh = make_mesh(replicas, shards)
        return self._mesh

    @property
    def role(self) -> int:
        """This member's place among the members of the present epoch; in an audited step, whose share it computes."""
        turn = self._current.turn if self._current is not None and self._current.active else 0
        return (self._engine.role + turn) % self._engine.num_members if turn else self._engine.role

    @property
    def num_members(self) -> int:
        return self._engine.num_members

    @boot.waits_for("metric")
    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all members of a tensor of any shape, for a metric: inside `with step`, before the optimizer's
        step, and on every member. Raises EpochBroken, which `with step` takes."""
        step = self._current
        if step is None or not step.active or step.committed:
            raise ValueError("run.sum() belongs inside `with step:`, before optimizer.step()")
        total = value.detach().cpu().clone()
        self._engine.beside.all_reduce(total)
        return total

    def log(self, **values: Any) -> None:
        """Values of the last step, printed or appended to the log file: the first member's, if it is committed."""
        step = self._current
        if step is None or not step.committed or self._engine.role:
            return
        numbers = {name: float(value) for name, value in values.items()}
        self._metered.saw(step.index + 1, numbers, self._engine.epoch)

    def save(self, *, memory_only: bool = False) -> None:
        """Save the state after the step under way, or the next one, to `checkpoints`; training goes on meanwhile.

        One member's word is enough. memory_only: in the memory of nodes, and no farther. Raises ValueError for a
        session without `checkpoints`; memory alone needs those, or `everstep run`.
        """
        self._keeping.ask(Tier.MEMORY if memory_only else Tier.DISK)

    @property
    def saves(self) -> Saves:
        """How far saves to disk are, as this member knows: `requested`, `durable`, `failed_step`, `failed` (why)."""
        return self._keeping.saves

    # The engine's view ----------------------------------------------------------------------------------

    @property
    def keeping(self) -> Keeping:
        return self._keeping

    def drop_gradients(self) -> None:
        self._reducer.drop()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> Flat:
        return transfer.take(self._objects)

    def fetch(self, communicator: Communicator, source: int) -> None:
        transfer.receive(communicator, self._objects, source)
        self._undo.begin()  # what it would go back to is older

    # Inside ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._opened = True
        things = self._objects.values()
        self._optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
        if not self._optimizers:
            raise ValueError("nothing to train: protect(...) at least one optimizer, and the modules it updates")
        self._reducer = self._make_reducer()
        self._undo = Undo(self._objects)
        mine = weakref.ref(self)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _about_to_step(mine(), optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _has_stepped(mine(), optimizer)),
        ]
        self._keeping.open(self._engine, self._undo.begin)
        self._engine.open(self)
        if self._channel is None and self._group is None:
            self._formation(self._alone)

    def _make_group(self) -> ProcessGroup:
        """Once there is a role: before, the agent is told that this worker waits for one."""
        from everstep.comms.group import make_group

        if self._opened:
            raise ValueError("run.group and run.mesh() come before the first step: they need to know the role")
        if torch.distributed.is_initialized():
            raise ValueError("torch.distributed has a default group already: leave out init_process_group()")
        if self._channel is None:
            self._formation(self._alone)
        self._engine.seat(self)
        return make_group(self._engine.fabric)

    def _make_reducer(self) -> Reducer | Sharded:
        parameters = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        sharded = [parameter for parameter in parameters if is_sharded(parameter)]
        plain = [parameter for parameter in parameters if not is_sharded(parameter)]
        fabric, inner = self._engine.fabric, self._engine.inner
        sums = sums_of(inner, self._engine.communicator, self.device)
        if not sharded:
            return Reducer(plain, fabric, sums)
        from everstep.train.sharded import Sharded

        mesh = self._mesh
        if mesh is None or any(parameter.device_mesh != mesh for parameter in sharded):
            raise ValueError("a sharded model needs the session's mesh: fully_shard(module, mesh=run.mesh(shards=...))")
        modules = [thing for thing in self._objects.values() if isinstance(thing, torch.nn.Module)]
        rest = Reducer(plain, fabric, sums) if plain else None
        return Sharded(modules, sharded, mesh.size(1), rest)

    def _formation(self, formation: Formation) -> None:
        self._engine.receive(formation)


def _about_to_step(run: Session | None, optimizer: torch.optim.Optimizer) -> None:
    if run is not None and run._current is not None and any(optimizer is known for known in run._optimizers):
        run._current._before_optimizer(optimizer)


def _has_stepped(run: Session | None, optimizer: torch.optim.Optimizer) -> None:
    if run is not None and run._current is not None and any(optimizer is known for known in run._optimizers):
        run._current._after_optimizer(optimizer)


class Step:
    """One optimizer step of the job. `index` counts from 0. `committed` tells whether it counts."""

    def __init__(self, run: Session, index: int) -> None:
        self.index = index
        self.committed = False
        self.entered = False
        self._run = run
        self.active, self.turn = False, 0
        self._reduced: bool | None = None  # whether the reduced gradients are finite; None: not reduced yet
        self._voted = False
        self._stepped: list[torch.optim.Optimizer] = []
        self._streams: tuple[Stream, ...] = ()  # what it took samples from

    def __enter__(self) -> Self:
        run = self._run
        if self.entered:
            raise ValueError(f"step {self.index} was entered twice")
        self.entered = self.active = True
        self.turn = run._engine.turn
        run._undo.begin()
        run._reducer.begin(1 / run.num_members)  # a mean, unless `share` weighs
        run._reducer.audit(run._engine.audits)
        reseed(run.seed, self.index, run.role)
        run._engine.began()
        run._keeping.began()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        run = self._run
        try:
            if error is None and not self.committed:
                self._commit_without_step()
        except EpochBroken as broken:
            error = broken
        finally:
            self.active = False
        if error is None:
            return False
        if self.committed or not self._ours(error):
            audit.explain(error, self.turn)
            return False  # the script's own
        run._undo.restore()
        run.drop_gradients()
        return True

    def share(self, batches: Batches) -> Iterator[Any]:
        """This member's micro-batches of the step. When they are through, the gradients are averaged over the job.

        Each is a mean over its samples; the weights that make them the mean over the global batch are applied here.
        """
        run = self._run
        if run._mesh is not None and not batches.sampler.even(run.num_members):
            raise ValueError(
                "a sharded model communicates in each forward, so all members need as many micro-batches: choose a "
                f"global_batch which micro_batch x {run.num_members} divides, or a smaller micro_batch"
            )
        run._batches.add(batches)
        dealt = boot.reading(batches.share(self.index, run.num_members, run.role))
        self._streams = (*self._streams, batches.stream)
        following = next(dealt, None)
        while following is not None:
            (micro, batch), following = following, next(dealt, None)
            run._reducer.weigh(micro.weight, last=following is None)
            yield batch
        self.reduce()

    def reduce(self) -> None:
        """Average the gradients over the members now, to clip them for instance. `share` does it by itself.

        Raises EpochBroken, which `with step` takes.
        """
        if self._reduced is None:
            finite = self._run._reducer.finish()
            self._share_buffers()
            self._reduced = finite

    # Commit ---------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Before each optimizer's step: reduce; before the last one's: vote. With several the earlier are kept."""
        run = self._run
        if not self.active or self.committed:
            raise ValueError("optimizer.step() belongs inside `with step:`, once a step for each optimizer")
        self.reduce()
        self._stepped.append(optimizer)
        if len(self._stepped) < len(run._optimizers):
            run._keeping.before_change()
            run._undo.keep_optimizer(optimizer)
            self._reduced = None  # the next one has gradients of its own
            return
        if not self._vote(bool(self._reduced)):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # nothing to do for the optimizer: non-finite gradients are not applied

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._voted and not self.committed:
            self._is_committed(applied=True)

    def _vote(self, finite: bool) -> bool:
        run = self._run
        said = run._guard.says(run._engine, run._keeping.before_change, run._reducer.trace, run._reducer.whole)
        apply = run._engine.vote(finite, run._keeping.wish(), said)
        self._voted = True
        if not apply:
            self._is_committed(applied=False)
        return apply

    def _is_committed(self, applied: bool) -> None:
        engine = self._run._engine
        engine.applied(self._streams) if applied else engine.skipped(self._streams)
        if not engine.role and self._stepped:  # where a grad scaler does not step, that is its business
            self._run._metered.gradients(engine.committed, applied)
        self.committed = True
        self._run._keeping.committed()
        boot.committed(engine.committed)

    def _commit_without_step(self) -> None:
        """The block ended, and not every optimizer was stepped: the others have their turn in another step.

        None was: a grad scaler that found non-finite gradients, or `continue`. Then nobody may apply this step.
        """
        self.reduce()
        if self._vote(bool(self._reduced and self._stepped)):
            self._is_committed(applied=True)

    @boot.waits_for("buffers")
    def _share_buffers(self) -> None:
        """What a forward pass changed (running statistics) is the first member's, as with DistributedDataParallel."""
        run = self._run
        buffers = run._undo.buffers
        if buffers and run.num_members > 1:
            share(buffers, run._undo.changed(), run._engine.beside)

    def _ours(self, error: BaseException) -> bool:
        """A fault of the world: the epoch broke, or what broke it surfaced as something else meanwhile."""
        if any(isinstance(cause, EpochBroken) for cause in causes(error)):
            return True
        if isinstance(error, Exception) and not self._run._engine.in_epoch():
            print(f"everstep: step {self.index} is done again: {type(error).__name__}: {error}", file=sys.stderr)
            return True
        return False
