"""Gradients on a device are summed by the device's own library: NCCL (RCCL), or gloo where that is wanted.

Its groups know no change of members, so there is one for each epoch: made in the background while training goes on in
the one before, taken at the switch, ended by its own abort. gloo's abort wakes nobody: its sockets are shut down. A
group of NCCL that was aborted keeps its dead communicator, so that a sum which begins too late raises at once.

The members of an epoch find each other through a TCPStore that the first of them serves (`Seat.store`). As with any
group of torch, who can reach that port on the job's network is trusted. Votes, state and the sums of CPU tensors go
over the fabric.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from everstep.comms.collectives import Communicator
from everstep.comms.link import LinkError
from everstep.comms.reduction import Op
from everstep.control import sockets
from everstep.core.errors import EpochBroken, UsageError
from everstep.core.formation import Formation, Seat

MEET_S = 30.0  # the members of an epoch begin to make its group at different times
NEVER = timedelta(days=100)  # a sum is given up by an abort, not by a time-out
ANYWHERE = ("0.0.0.0/0", "::/0")
_OPS: dict[Op, Any] = {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX, Op.MIN: dist.ReduceOp.MIN}


class Library(Protocol):
    """One group of a library, for one epoch."""

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """In place, and over on return. Raises RuntimeError when a member is gone or the group was aborted."""

    def abort(self) -> None:
        """Whatever waits in it raises. From any thread; the group is of no use any more."""


class Gloo:
    """gloo over TCP, for tensors on the CPU.

    Shut sockets wake who waits in gloo, but for one case (torch 2.13; 1 in 30 in a test of two): nothing tells the
    buffer whose message is half read, so a sum that waits for that one waits for ever. So sums are taken in room of
    the group's own; an abort wakes the caller itself, and the sum that cannot end keeps its group and its room.
    """

    def __init__(self, store: c10d.Store, formation: Formation, role: int, device: torch.device) -> None:
        # Only this worker's links and meetings come about at the same time.
        self._ports = {_port(address) for seat in formation.seats for address in (seat.endpoint, seat.store)}
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry when a sum ends, one at the abort
        self._room = torch.empty(0, dtype=torch.uint8)
        before = sockets.own()
        meet = timedelta(seconds=MEET_S)
        self._group: Any = dist.ProcessGroupGloo(store, role, len(formation.seats), meet)
        self._mine = sockets.own() - before

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        room = self._room_for(tensor).copy_(tensor)
        over, future = self._over, self._group.allreduce([room], _options(op)).get_future()
        # gloo's thread must not hold the group: the last to let go of it joins that thread.
        future.add_done_callback(lambda _: over.put(None))
        over.get()
        if not future.done():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # its destructor would wait for the sum
            raise RuntimeError("it was aborted")
        future.wait()
        tensor.copy_(room)

    def abort(self) -> None:
        sockets.cut_own(ANYWHERE, self._ports, self._mine.__contains__, still=False)
        self._over.put(None)

    def _room_for(self, tensor: Tensor) -> Tensor:
        if self._room.numel() < tensor.nbytes:
            self._room = torch.empty(tensor.nbytes, dtype=torch.uint8)
        return self._room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class Nccl:
    """NCCL or RCCL, for tensors on one device."""

    def __init__(self, store: c10d.Store, formation: Formation, role: int, device: torch.device) -> None:
        # A lost peer is no reason for torch's watchdog to end this process: the abort that follows wakes who waits.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._device = device
        self._group: Any = dist.ProcessGroupNCCL(store, role, len(formation.seats), dist.ProcessGroupNCCL.Options())
        self._group.eager_connect_single_device(device)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        self._group.allreduce([tensor], _options(op)).wait()
        torch.accelerator.current_stream(self._device).synchronize()  # `wait` only orders the streams

    def abort(self) -> None:
        self._group.abort()


def _options(op: Op) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    options.timeout = NEVER
    return options


LIBRARIES: dict[str, Callable[[c10d.Store, Formation, int, torch.device], Library]] = {"gloo": Gloo, "nccl": Nccl}


class Inner:
    """The library's groups of this worker. `store`: where it serves the others' meeting, "host:port".

    `prepare` waits, so it has a thread of its own; `switch` belongs to the thread that takes the steps, `all_reduce`
    to one at a time; `abort` is for any.
    """

    def __init__(self, library: str, worker: str, address: str, device: torch.device) -> None:
        if library not in LIBRARIES:
            raise UsageError(f"no library {library!r} sums gradients: use one of {', '.join(sorted(LIBRARIES))}")
        self._make = LIBRARIES[library]
        self._worker, self._device = worker, device
        self._server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.store = f"{address}:{self._server.port}"
        self._lock = threading.Lock()
        self._groups: dict[int, Library] = {}  # epoch -> group: the one in use, and those that may be
        self._epoch = 0
        self._ended = 0  # epochs up to this one are over
        self._failed: dict[int, LinkError] = {}  # a group that could not be made: its meeting cannot be held again

    def prepare(self, formation: Formation) -> None:
        """Make the group of an epoch, together with its other members. Raises LinkError when one does not come."""
        role = formation.role_of(self._worker)
        assert role is not None
        if formation.epoch in self._failed:
            raise self._failed[formation.epoch]
        try:
            group = self._make(self._meeting(formation), formation, role, self._device)
        except RuntimeError as error:
            self._failed[formation.epoch] = LinkError(formation.seats[0].worker, f"no group was made: {error}")
            raise self._failed[formation.epoch] from error
        with self._lock:
            if formation.epoch > self._ended:
                self._groups[formation.epoch] = group
                return
        group.abort()

    def switch(self, formation: Formation) -> None:
        """Use the group of this epoch, which was prepared, from now on; those before are over."""
        self._epoch = formation.epoch
        self.abort(formation.epoch - 1)

    def all_reduce(self, tensor: Tensor, op: Op = Op.SUM) -> None:
        """In place, on all. Raises EpochBroken when the epoch is over, or a member is gone."""
        epoch = self._epoch
        with self._lock:
            group = self._groups.get(epoch)
        if group is None:
            raise EpochBroken(epoch, "its group was aborted")
        try:
            group.all_reduce(tensor, op)
        except RuntimeError as error:
            self.abort(epoch)  # this member cannot go on in it, so nobody can
            raise EpochBroken(epoch, str(error)) from error
        with self._lock:
            if epoch not in self._groups:  # an aborted sum may end without an error, with anything in the tensor
                raise EpochBroken(epoch, "its group was aborted")

    all_reduce_shared = all_reduce  # the library copies anyway

    def abort(self, epoch: int) -> None:
        """End the groups of the epochs up to this one."""
        with self._lock:
            self._ended = max(self._ended, epoch)
            self._failed = {number: error for number, error in self._failed.items() if number > self._ended}
            over = [self._groups.pop(number) for number in list(self._groups) if number <= epoch]
        for group in over:
            group.abort()

    def close(self) -> None:
        with self._lock:
            newest = max(self._groups, default=0)
        self.abort(newest)

    def _meeting(self, formation: Formation) -> c10d.Store:
        """The store of the first member, and in it the part of this epoch."""
        first: Seat = formation.seats[0]
        limit = timedelta(seconds=MEET_S)
        if first.worker == self._worker:
            server: Any = self._server
        else:
            place = _host(first.store), _port(first.store)
            server = dist.TCPStore(*place, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
        return c10d.PrefixStore(f"epoch {formation.epoch}", server)


class Both(NamedTuple):
    """Sums of tensors on the host by one, on the device by the other."""

    on_host: Communicator
    on_device: Inner

    def all_reduce_shared(self, tensor: Tensor, op: Op) -> None:
        self.on_host.all_reduce_shared(tensor, op)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        self.on_device.all_reduce(tensor, op)


def sums_of(inner: Inner | None, fabrics: Communicator, device: torch.device) -> Communicator | Inner | Both:
    """What sums gradients: the library those it can, which may be on a device; the fabric what it is not for."""
    if inner is None:
        return fabrics
    return inner if device.type == "cpu" else Both(on_host=fabrics, on_device=inner)


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def library_of(device: torch.device) -> str | None:
    """What sums gradients there unless the user says otherwise; None: the fabric."""
    chosen = {"cuda": "nccl"}.get(device.type)
    if chosen and not dist.is_nccl_available():
        raise UsageError(f"gradients on {device} need NCCL, which this build of PyTorch lacks")
    return chosen
