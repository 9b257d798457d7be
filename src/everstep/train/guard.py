"""A session's guard against silent corruption: when replicas compare their states, what they tell, who was wrong.

Every so many steps, and whenever the state is saved, each member's vote carries a fingerprint of its parameters and of
its optimizers' state, taken right before the vote, once nothing reads the state for a save any more. So an image of the
state is known to be good as soon as the vote on the step after it is through. Every vote carries the trace of a sample
of the member's own gradients (`detect.corrupt`). What is not compared: buffers, which follow the first member in each
step, and objects other than optimizers and the modules that they train: an average may be kept on one member only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import xxhash

from everstep.core.corruption import Corruption
from everstep.core.formation import Seat
from everstep.detect import corrupt
from everstep.plan.checking import Pace
from everstep.state import fingerprint, naming
from everstep.state.flatten import Stateful
from everstep.state.local import local
from everstep.train import audit
from everstep.train.protocol import Doubt, Said, Vote

SMALL_BYTES = 16 << 10  # tensors up to here are hashed together: a call for each would cost more than its bytes
TRACED = 4096  # steps whose traces are remembered, at most
GIVE_UP = 3  # times that replicas differ without ever agreeing in between: they do not compute the same


class Position(audit.Position, Protocol):
    """Where this process stands among the members of the job. The engine's words."""

    @property
    def epoch(self) -> int: ...
    @property
    def seats(self) -> tuple[Seat, ...]: ...
    @property
    def checks(self) -> bool: ...


def differ(votes: Sequence[Vote], shards: int) -> bool:
    """Whether the marks of replicas do."""
    return corrupt.odd([vote.said.mark for vote in votes], shards) is not None


class Guard:
    """One a session. `every`: steps between two comparisons; None: as often as is cheap, 0: never. `audit_every` too.

    For the main thread; `found` is read from any.
    """

    def __init__(self, every: int | None, objects: Mapping[str, Stateful], audit_every: int | None = 0) -> None:
        """Raises ValueError for a number that means nothing."""
        if every is not None and every < 0:
            raise ValueError(f"check_every = {every}: a number of steps, 0 for never, None for as often as it is cheap")
        self._every, self._objects = every, objects
        self._pace = Pace(every)
        self.audit = audit.Audit(audit_every)
        self._voted_s = 0.0
        self._traces: dict[int, tuple[int, ...]] = {}  # by step, of all roles
        self._replay: corrupt.Replay | None = None
        self._replayed: tuple[Seat, ...] = ()  # who had the roles of it
        self._doubts = 0  # since replicas were last alike
        self._closes_in = 0  # the epoch in which all voted on what is their last step
        self.goal = 0  # steps after which this member leaves the loop
        self.found: Corruption | None = None

    @property
    def interval(self) -> int:
        """Steps between two comparisons, for now."""
        return self._pace.interval

    @property
    def _on(self) -> bool:
        return self._every != 0 and self._doubts < GIVE_UP

    def says(self, at: Position, settle: Callable[[], None], trace: int = 0, whole: int | None = None) -> Said:
        """For the vote on the step under way. `settle` waits for who still reads the state."""
        return self.audit.adds(Said() if at.turn else self._says(at, settle, trace), at, whole)

    def _says(self, at: Position, settle: Callable[[], None], trace: int) -> Said:
        if not self._on or at.num_members <= at.shards:
            return Said()
        now = time.monotonic()
        if not at.checks and not at.audits and self._voted_s:
            self._pace.stepped(now - self._voted_s)
        mark = 0
        if at.checks:
            settle()
            began_s = time.monotonic()
            mark = self.mark()
            self._pace.compared(at.committed, time.monotonic() - began_s)
        self._voted_s = time.monotonic()
        due = at.role == 0 and self._pace.due(at.committed + 1)
        due = due or self._replays(at.committed + 1)
        return Said(due, mark, trace, last=at.committed + 1 == self.goal)

    def last(self, at: Position, settle: Callable[[], None]) -> Said | None:
        """For the round after the last step. None: there is none, as not all said that it was theirs, or one is new."""
        if self._closes_in != at.epoch:
            return None
        settle()
        return Said(mark=self.mark() if self._on else 0)

    def _replays(self, step: int) -> bool:
        """The state of this step is that which was found to differ."""
        return self._replay is not None and step == self._replay.step

    def heard(self, epoch: int, step: int, votes: Sequence[Vote], shards: int) -> bool:
        """What all said in the vote on this step. Whether more is known now of `found`."""
        if votes[0].said.turn:
            return False
        traces = tuple(vote.said.trace for vote in votes)
        marks = tuple(vote.said.mark for vote in votes)
        self._closes_in = epoch if all(vote.said.last for vote in votes) else 0
        if any(marks):
            if corrupt.odd(marks, shards):
                return False
            self._traces = {}  # replicas are alike up to here
            if self.found is None or step >= self.found.step:
                self._doubts = 0
        self._traces[step] = traces
        self._traces.pop(step - TRACED, None)
        return self._judge(step, traces, marks)

    def _judge(self, step: int, traces: tuple[int, ...], marks: tuple[int, ...]) -> bool:
        replay, found = self._replay, self.found
        if replay is None or found is None:
            return False
        judged = corrupt.judge(replay, step, traces, marks)
        if judged.over or judged.roles:
            self._replay = None
        if not judged.roles:
            return False
        workers = tuple(self._replayed[role].worker for role in judged.roles)
        self.found = Corruption(found.epoch, found.step, workers, True, found.parts, found.marks, found.verified)
        return True

    def doubts(self, doubt: Doubt, at: Position, verified: int, gather: Callable[[bytes], list[bytes]]) -> None:
        """Replicas differ. `gather`: a round of all members, which raises EpochBroken: then details are lacking."""
        if doubt.found is not None:
            workers = tuple(at.seats[role].worker for role in doubt.found.roles)
            self._replay = None
            self.found = Corruption(doubt.epoch, doubt.step, workers, doubt.found.sure, verified=verified, audit=True)
            return
        marks = tuple(vote.said.mark for vote in doubt.votes)
        odd = corrupt.odd(marks, at.shards)
        assert odd is not None
        workers = tuple(at.seats[role].worker for role in odd.roles)
        self._doubts += 1
        traces = {**self._traces, doubt.step: tuple(vote.said.trace for vote in doubt.votes)}
        self._replay = None if odd.sure else corrupt.Replay(doubt.step, marks, traces, odd.roles)
        self._replayed = at.seats
        self.found = found = Corruption(doubt.epoch, doubt.step, workers, odd.sure, (), marks, verified)
        names, sums = self._parts()
        payload = b"".join(each.to_bytes(8, "little") for each in sums)
        told = [[int.from_bytes(p[i : i + 8], "little") for i in range(0, len(p), 8)] for p in gather(payload)]
        parts = corrupt.parts(names, told, at.shards)
        self.found = Corruption(found.epoch, found.step, workers, odd.sure, parts, marks, verified)
        if self._doubts == GIVE_UP:
            print(
                f"everstep: replicas differ for the {GIVE_UP}rd time, though the steps were done again: they do not "
                "compute the same, and are not compared any more",
                file=sys.stderr,
            )

    # The state ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def mark(self) -> int:
        """Of all bits that replicas should have alike, in their order."""
        whole = xxhash.xxh3_64()
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in _tensors(self._objects):
            if tensor.device.type != "cpu":
                whole.update(fingerprint.of_tensor(tensor).to_bytes(8, "little"))
            elif tensor.numel() * tensor.element_size() <= SMALL_BYTES:
                small.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
            else:
                whole.update(fingerprint.octets(tensor).numpy().data)
        for together in small.values():
            whole.update(fingerprint.octets(torch.cat(together)).numpy().data)
        return whole.intdigest() or 1

    @torch.no_grad()
    def _parts(self) -> tuple[list[str], list[int]]:
        known = naming.parameters(self._objects)
        names: list[str] = []
        trained = _trained(self._objects)
        for key, thing in self._objects.items():
            if key in trained:
                names += [f"{key}.{path}" for path, _ in trained[key].named_parameters()]
            elif isinstance(thing, torch.optim.Optimizer):
                for parameter, titles in naming.fqns(thing, known):
                    state = thing.state.get(parameter, {})
                    names += [f"{key}.state.{titles[0]}.{path}" for path, _ in _within(state)]
        return names, [fingerprint.of_tensor(tensor) for tensor in _tensors(self._objects)]


def _tensors(objects: Mapping[str, Stateful]) -> Iterator[torch.Tensor]:
    """Parameters and state of optimizers, this process's part of each."""
    trained = _trained(objects)
    for key, thing in objects.items():
        if key in trained:
            for parameter in trained[key].parameters():
                yield local(parameter).detach()
        elif isinstance(thing, torch.optim.Optimizer):
            for parameter in (p for group in thing.param_groups for p in group["params"]):
                for _, tensor in _within(thing.state.get(parameter, {})):
                    yield local(tensor).detach()


def _trained(objects: Mapping[str, Stateful]) -> dict[str, torch.nn.Module]:
    """Modules with a parameter of an optimizer; what is frozen in them counts too."""
    optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    modules = {key: thing for key, thing in objects.items() if isinstance(thing, torch.nn.Module)}
    return {key: module for key, module in modules.items() if any(id(p) in owned for p in module.parameters())}


def _within(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one parameter's state, which is a dict, as a rule of tensors and numbers."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key in sorted(state, key=str):  # a state that was copied may have another order
            value = state[key]
            yield from _within(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from _within(value, f"{path}.{place}" if path else str(place))
