"""The operations of torch's process groups, as torch calls them, on a communicator.

torch gives an operation its arguments in one of its option structs, sometimes bare, and a list of tensors where others
have several devices.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from everstep.comms.collectives import Communicator
from everstep.comms.reduction import Op
from everstep.comms.work import Lane, Work

NAME = "everstep"


class Operations:
    """Half of a process group; the other half says who the members are, and when what is done."""

    communicator: Communicator

    @abc.abstractmethod
    def begin(
        self,
        name: str,
        call: Callable[[], None],
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        lane: Lane | None = None,
    ) -> Work:
        """Have it done, in order."""

    @abc.abstractmethod
    def lane(self, way: str, peer: int, tag: int) -> Lane:
        """The order that messages keep."""

    # Collectives --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        op, flats = _op(opts), _plains(tensors)

        def call() -> None:
            for tensor in flats:
                self.communicator.all_reduce(tensor, op)

        return self.begin("all_reduce", call, tensors, opts, timeout)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        op, flats = _op(opts), _plains(tensors)

        def call() -> None:
            for dtype in dict.fromkeys(tensor.dtype for tensor in flats):
                self._all_reduce_as_one([tensor for tensor in flats if tensor.dtype == dtype], op)

        return self.begin("all_reduce_coalesced", call, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        root, flats = opts if isinstance(opts, int) else opts.rootRank, _plains(tensors)

        def call() -> None:
            for tensor in flats:
                self.communicator.broadcast(tensor, root)

        return self.begin("broadcast", call, tensors, opts, timeout)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        op, (tensor,) = _op(opts), _plains(tensors)
        return self.begin("reduce", lambda: self.communicator.reduce(tensor, opts.rootRank, op), tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = list(zip(map(_plains, _nested(outputs)), _plains(inputs), strict=True))

        def call() -> None:
            for theirs, mine in pairs:
                self.communicator.all_gather(theirs, mine)

        return self.begin("all_gather", call, outputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """`outputs[p]` are the inputs of rank p."""
        by_rank = [_plains(each) for each in outputs]
        mine = _plains(inputs)

        def call() -> None:
            for i, tensor in enumerate(mine):
                self.communicator.all_gather([theirs[i] for theirs in by_rank], tensor)

        return self.begin("all_gather_coalesced", call, outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = list(zip(_plains(outputs), _plains(inputs), strict=True))

        def call() -> None:
            for output, tensor in pairs:
                self.communicator.all_gather_single(output, tensor)

        return self.begin("all_gather_single", call, outputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        op = _op(opts)
        pairs = list(zip(_plains(outputs), map(_plains, _nested(inputs)), strict=True))

        def call() -> None:
            for output, parts in pairs:
                self.communicator.reduce_scatter(output, parts, op)

        return self.begin("reduce_scatter", call, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        op, pairs = _op(opts), list(zip(_plains(outputs), _plains(inputs), strict=True))

        def call() -> None:
            for output, tensor in pairs:
                self.communicator.reduce_scatter_single(output, tensor, op)

        return self.begin("reduce_scatter_single", call, outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        theirs, (mine,) = [_plain(tensor) for each in outputs for tensor in each], _plains(inputs)
        return self.begin("gather", lambda: self.communicator.gather(theirs, mine, opts.rootRank), outputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        (mine,), parts = _plains(outputs), [_plain(tensor) for each in inputs for tensor in each]
        return self.begin("scatter", lambda: self.communicator.scatter(mine, parts, opts.rootRank), outputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        theirs, mine = _plains(outputs), _plains(inputs)
        return self.begin("all_to_all", lambda: self.communicator.all_to_all(theirs, mine), outputs, opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> Work:
        theirs, mine = _plain(output), _plain(tensor)

        def call() -> None:
            self.communicator.all_to_all_single(theirs, mine, output_splits, input_splits)

        return self.begin("all_to_all_single", call, [output], opts)

    def barrier(self, opts: Any = None) -> Work:
        return self.begin("barrier", self.communicator.barrier, [], opts)

    # What torch called them before.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Messages -----------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int) -> Work:
        (tensor,) = _plains(tensors)
        # One lane for all tags: what the peer does not take yet is in the way of the others anyhow.
        lane = self.lane("send", dst, 0)
        return self.begin(f"send to rank {dst}", lambda: self.communicator.send(tensor, dst, tag), tensors, lane=lane)

    def recv(self, tensors: Any, src: int, tag: int) -> Work:
        (tensor,) = _plains(tensors)
        lane = self.lane("recv", src, tag)
        call = functools.partial(self.communicator.recv, tensor, src, tag)
        return self.begin(f"recv from rank {src}", call, tensors, lane=lane)

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        raise NotImplementedError("recv from any rank: name the source")

    def _all_reduce_as_one(self, tensors: Sequence[Tensor], op: Op) -> None:
        """Of one dtype. Their sums are the same whether they travel together or not."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.communicator.all_reduce(flat, op)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _op(opts: Any) -> Op:
    """The operator of some options; torch also gives it bare."""
    given = getattr(opts, "reduceOp", opts)
    if given is None:
        return Op.SUM
    name = getattr(given, "op", given).name
    if name not in Op.__members__:
        raise NotImplementedError(f"{NAME} has no ReduceOp.{name}; it has {', '.join(Op.__members__)}")
    return Op[name]


def _nested(tensors: Any) -> Any:
    """A list of lists, also where torch gives a list for one."""
    return tensors if not tensors or isinstance(tensors[0], list | tuple) else [tensors]


def _plains(tensors: Any) -> list[Tensor]:
    return [_plain(tensors)] if isinstance(tensors, Tensor) else [_plain(tensor) for tensor in tensors]


def _plain(tensor: Tensor) -> Tensor:
    """The same memory, for any thread: one made in inference mode can be written in that mode only."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"{NAME} has no collectives for {tensor.layout} tensors: use dense ones")
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        memory = tensor.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
