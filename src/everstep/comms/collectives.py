"""The collectives as callers see them: tensors of any shape and layout, checked, made flat, and handed on.

A communicator is a fixed set of roles under a number. It outlives the epochs: each call takes part in the epoch that
its fabric is in, or raises EpochBroken; after that, tensors it should have filled hold anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from everstep.comms import algorithms, moves, p2p
from everstep.comms.board import MAX_COMMUNICATORS
from everstep.comms.reduction import Op, Reducer, validate
from everstep.comms.rounds import Rounds
from everstep.comms.signature import Kind, Signature
from everstep.comms.table import Table


class HasTable(Protocol):
    """What a communicator needs of the fabric."""

    @property
    def table(self) -> Table: ...


class Communicator:
    """Collectives among `roles` (None: all of the epoch); ranks are positions in it.

    `index`, below MAX_COMMUNICATORS, tells this one from the others of the fabric, and all its members must use the
    same. Communicators that share members may be used at once from different threads; calls on one take turns.
    Every collective must be called by all members in the same order. If they differ, all get ValueError.
    """

    def __init__(self, fabric: HasTable, index: int = 0, roles: tuple[int, ...] | None = None) -> None:
        if not 0 <= index < MAX_COMMUNICATORS:
            raise ValueError(f"communicator index {index}: must be from 0 to {MAX_COMMUNICATORS - 1}")
        if roles is not None and (not roles or len(set(roles)) != len(roles)):
            raise ValueError(f"roles {roles}: must be one or more, each once")
        self.index = index
        self._fabric = fabric
        self._fixed = roles
        self._lock = threading.Lock()
        self._rounds: Rounds | None = None
        self._reducers: dict[tuple[Op, torch.dtype], Reducer] = {}

    @property
    def roles(self) -> tuple[int, ...]:
        """By rank, in the current epoch."""
        return tuple(range(self._fabric.table.size)) if self._fixed is None else self._fixed

    @property
    def rank(self) -> int:
        """Ours. Raises ValueError when we are no member."""
        role = self._fabric.table.role
        if role not in self.roles:
            raise ValueError(f"role {role} is not in communicator {self.index}, which has {self.roles}")
        return self.roles.index(role)

    @property
    def size(self) -> int:
        return len(self.roles)

    def part(self) -> None:
        """The last call in an epoch that all members are about to leave together. Harmless if the epoch is over."""
        rounds = self._rounds
        if rounds is not None and rounds.table is self._fabric.table and rounds.table.broken is None:
            with self._lock:
                rounds.part()

    def all_reduce(self, tensor: Tensor, op: Op = Op.SUM) -> None:
        """Reduce in place, on all."""
        validate(op, tensor.dtype)
        with self._begin(Signature(Kind.ALL_REDUCE, tensor.dtype, tensor.numel(), op.value)) as rounds:
            flat = _flat(tensor)
            algorithms.all_reduce(rounds, flat, self._reducer(rounds, op, tensor.dtype))
            _give_back(flat, tensor)

    def all_reduce_shared(self, buffer: Tensor, op: Op = Op.SUM) -> None:
        """Reduce in place, on all, a contiguous tensor that lies in the arena: nothing is copied in."""
        validate(op, buffer.dtype)
        with self._begin(None) as rounds:
            if rounds.remotes or len(rounds.groups) > 1:
                rounds.sign(Signature(Kind.ALL_REDUCE, buffer.dtype, buffer.numel(), op.value))
                algorithms.all_reduce(rounds, buffer.view(-1), self._reducer(rounds, op, buffer.dtype))
                return
            offset = rounds.offset_of(buffer)
            rounds.sign(Signature(Kind.ALL_REDUCE_SHARED, buffer.dtype, buffer.numel(), op.value), offset)
            algorithms.all_reduce_shared(rounds, buffer.view(-1), self._reducer(rounds, op, buffer.dtype))

    def reduce(self, tensor: Tensor, root: int, op: Op = Op.SUM) -> None:
        """Reduce in place at the rank `root`; the others keep theirs."""
        validate(op, tensor.dtype)
        self._check_rank(root, "root")
        with self._begin(Signature(Kind.REDUCE, tensor.dtype, tensor.numel(), op.value, root)) as rounds:
            flat = _flat(tensor)
            algorithms.reduce(rounds, flat, root, self._reducer(rounds, op, tensor.dtype))
            if rounds.rank == root:
                _give_back(flat, tensor)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op = Op.SUM) -> None:
        """`inputs[q]` of all members, reduced, becomes the output of rank q."""
        validate(op, output.dtype)
        self._check_list(inputs, output, "input")
        with self._begin(Signature(Kind.REDUCE_SCATTER, output.dtype, output.numel(), op.value)) as rounds:
            flat = torch.empty_like(output).view(-1) if _overlaps(output, inputs) else _flat(output)
            parts = [_flat(part) for part in inputs]
            algorithms.reduce_scatter(rounds, flat, parts, self._reducer(rounds, op, output.dtype))
            _give_back(flat, output)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: Op = Op.SUM) -> None:
        """The same, with the inputs one behind the other in one tensor."""
        self.reduce_scatter(output, self._split(tensor, output, "input"), op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """`outputs[p]` becomes the tensor of rank p."""
        self._check_list(outputs, tensor, "output")
        with self._begin(Signature(Kind.ALL_GATHER, tensor.dtype, tensor.numel())) as rounds:
            flats = [_flat(output) for output in outputs]
            moves.all_gather(rounds, [_bytes(flat) for flat in flats], _bytes(_flat(tensor)))
            for flat, output in zip(flats, outputs, strict=True):
                _give_back(flat, output)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        """The same, with the outputs one behind the other in one tensor."""
        flat = _flat(output)
        self.all_gather(self._split(flat, tensor, "output"), tensor)
        _give_back(flat, output)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Control data, by rank. Made for less than a kilobyte: that takes one round."""
        with self._begin(Signature(Kind.ALL_GATHER_BYTES, torch.uint8, 0)) as rounds:
            return moves.all_gather_bytes(rounds, payload)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """On all what the rank `root` has."""
        self._check_rank(root, "root")
        with self._begin(Signature(Kind.BROADCAST, tensor.dtype, tensor.numel(), 0, root)) as rounds:
            flat = _flat(tensor)
            moves.broadcast(rounds, _bytes(flat), root)
            _give_back(flat, tensor)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int) -> None:
        """`outputs[p]` at the rank `root` becomes the tensor of rank p; None or empty elsewhere."""
        self._check_root_list(outputs, tensor, root, "outputs")
        with self._begin(Signature(Kind.GATHER, tensor.dtype, tensor.numel(), 0, root)) as rounds:
            flats = [_flat(output) for output in outputs or ()]
            moves.gather(rounds, [_bytes(flat) for flat in flats], _bytes(_flat(tensor)), root)
            for flat, output in zip(flats, outputs or (), strict=True):
                _give_back(flat, output)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, root: int) -> None:
        """`inputs[q]` of the rank `root` becomes the output of rank q; None or empty elsewhere."""
        self._check_root_list(inputs, output, root, "inputs")
        with self._begin(Signature(Kind.SCATTER, output.dtype, output.numel(), 0, root)) as rounds:
            flat = _flat(output)
            moves.scatter(rounds, _bytes(flat), [_bytes(_flat(x)) for x in inputs or ()], root)
            _give_back(flat, output)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """`inputs[q]` becomes `outputs[p]` of rank q, p being ours. Each pair has a length of its own."""
        if not len(outputs) == len(inputs) == self.size or len({x.dtype for x in (*outputs, *inputs)}) != 1:
            raise ValueError(f"all_to_all wants {self.size} inputs and {self.size} outputs of one dtype")
        with self._begin(Signature(Kind.ALL_TO_ALL, inputs[0].dtype, 0)) as rounds:
            shared = any(_overlaps(output, inputs) for output in outputs)
            flats = [_flat(output) for output in outputs]
            parts = [_bytes(_flat(x).clone() if shared else _flat(x)) for x in inputs]
            moves.all_to_all(rounds, [_bytes(flat) for flat in flats], parts)
            for flat, output in zip(flats, outputs, strict=True):
                _give_back(flat, output)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> None:
        """The same, with the parts one behind the other along dimension 0; None: equally long ones."""
        into = output.contiguous()
        outputs = self._cut(into, output_splits, "output")
        self.all_to_all(outputs, self._cut(tensor.contiguous(), input_splits, "input"))
        _give_back(into, output)

    def barrier(self) -> None:
        """Return when all have come here."""
        with self._begin(Signature(Kind.BARRIER, torch.uint8, 0)) as rounds:
            rounds.step()

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """To the rank `dst`. Returns when the tensor may be changed; for a long one when much of it was received."""
        p2p.send(self._fabric.table, self.index, self._other(dst), tag, _bytes(_flat(tensor)), tensor.dtype)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """The next one with this tag from the rank `src`. ValueError when it has another length or dtype."""
        flat = _flat(tensor)
        p2p.recv(self._fabric.table, self.index, self._other(src), tag, _bytes(flat), tensor.dtype)
        _give_back(flat, tensor)

    @contextmanager
    def _begin(self, signature: Signature | None) -> Iterator[Rounds]:
        """Our turn, in the epoch the fabric is in."""
        with self._lock, torch.no_grad():
            table = self._fabric.table
            table.check()
            if self._rounds is None or self._rounds.table is not table:
                _ = self.rank  # we must be a member
                self._rounds = Rounds(table, self.index, self.roles)
                self._reducers.clear()
            if signature is not None:
                self._rounds.sign(signature)
            try:
                yield self._rounds
            except ValueError:
                raise  # members are in step: all were told the same
            except BaseException as error:
                table.abort(str(error) or type(error).__name__)  # rounds are missing now: it cannot go on here
                raise

    def _reducer(self, rounds: Rounds, op: Op, dtype: torch.dtype) -> Reducer:
        reducer = self._reducers.get((op, dtype))
        if reducer is None:
            reducer = self._reducers[op, dtype] = Reducer(op, dtype, rounds.groups)
        return reducer

    def _other(self, rank: int) -> int:
        """The role of another member."""
        self._check_rank(rank, "rank")
        if rank == self.rank:
            raise ValueError(f"rank {rank} sends to itself")
        return self.roles[rank]

    def _check_rank(self, rank: int, name: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} {rank}: the ranks are 0 to {self.size - 1}")

    def _check_list(self, tensors: Sequence[Tensor], model: Tensor, name: str) -> None:
        if len(tensors) != self.size:
            raise ValueError(f"{len(tensors)} {name}s for {self.size} members")
        for rank, tensor in enumerate(tensors):
            if tensor.dtype != model.dtype or tensor.numel() != model.numel():
                raise ValueError(
                    f"{name} {rank} is {tensor.numel()} x {tensor.dtype}, not {model.numel()} x {model.dtype}"
                )

    def _check_root_list(self, tensors: Sequence[Tensor] | None, model: Tensor, root: int, name: str) -> None:
        self._check_rank(root, "root")
        if self.rank == root:
            self._check_list(tensors or (), model, name[:-1])
        elif tensors:
            raise ValueError(f"{name} at rank {self.rank}: only the root, rank {root}, has them")

    def _split(self, whole: Tensor, share: Tensor, name: str) -> list[Tensor]:
        if whole.numel() != self.size * share.numel() or whole.dtype != share.dtype:
            raise ValueError(
                f"an {name} of {whole.numel()} x {whole.dtype} for {self.size} members with "
                f"{share.numel()} x {share.dtype} each"
            )
        return list(_flat(whole).view(self.size, -1).unbind(0))

    def _cut(self, whole: Tensor, splits: Sequence[int] | None, name: str) -> list[Tensor]:
        length = whole.size(0)
        if not splits:
            if length % self.size:
                raise ValueError(f"{name} of length {length} does not divide into {self.size} parts: give its splits")
            splits = [length // self.size] * self.size
        if len(splits) != self.size or sum(splits) != length:
            raise ValueError(f"{name} splits {list(splits)} for length {length} and {self.size} members")
        return list(torch.split(whole, list(splits)))


def _flat(tensor: Tensor) -> Tensor:
    """Its elements in order, as one dimension: the tensor's own memory if it is contiguous, else a copy."""
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device}: these collectives are for the CPU")
    return tensor.detach().contiguous().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def _give_back(flat: Tensor, tensor: Tensor) -> None:
    """The result to where it belongs, if that was not contiguous."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _overlaps(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether an input may lie in the memory of the output."""
    memory = output.untyped_storage().data_ptr()
    return any(x.untyped_storage().data_ptr() == memory for x in inputs)
