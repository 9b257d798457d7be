"""Gradients summed over the members while backward still runs, for plain modules.

Hooks on the parameters count; a bucket whose last gradient has come is packed and handed to one thread, which sums it
over the members where it lies. Buckets go in the same order on all members, whatever order they fill in. In the end
each parameter's `.grad` is the summed bucket's memory: there is never a second copy of the gradients.

Micro-batches before the last sum up in place. The first step is reduced after backward, to learn whether parameters
get several gradients in a micro-batch (two calls of backward()): then all steps are.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from everstep.comms.reduction import Op
from everstep.probe import boot
from everstep.train.background import Background
from everstep.train.buckets import Arena, Bucket, Slot, build, kind_of, regions

BUCKET_BYTES = 4 << 20
WORD = (1 << 63) - 1


class Collective(Protocol):
    """Blocking sums over the members, in the order of their roles. Raises EpochBroken when the epoch is aborted.

    On return nobody reads the buffer any more: its owner may write into it.
    """

    def all_reduce_shared(self, tensor: Tensor, op: Op) -> None:
        """Of memory from the arena."""

    def all_reduce(self, tensor: Tensor, op: Op) -> None: ...


class Reducer:
    """Sums gradients over members, weighted. One step: `begin`, `weigh` before each forward, `finish` or `drop`.

    parameters: of all members alike, in the same order; as tensors or (name, tensor) pairs. Tied ones count once.
    overlap: reduce in a thread of its own while backward goes on; False: all in `finish`, to have no second thread.

    Not for sparse gradients, nor for backward(create_graph=True): ValueError, which names the parameter.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor | tuple[str, Tensor]],
        arena: Arena,
        collective: Collective,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
    ) -> None:
        self._named = named(parameters)
        self._parameters = [parameter for _, parameter in self._named]
        self._arena = arena
        self._collective = collective
        self._bucket_bytes = bucket_bytes
        self._lock = threading.Lock()  # hooks of different devices come from different threads
        self._eager = False
        self._runner = Background(self._reduce) if overlap else None
        self._marks = arena.allocate(len(self._parameters))
        self._memory = regions(self._parameters, arena)
        self._buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        self._scaling: list[Any] = []
        self._layout: list[Any] = []
        self._active = self._counting = self._last = self._twice = self._finished = False
        self._next = 0

    @property
    def layout(self) -> bytes:
        """Equal for members whose buckets are cut alike, which is needed: the same parameters are frozen, for one."""
        cuts = [(b.flat.numel(), str(b.flat.dtype), [slot.number for slot in b.slots]) for b in self._buckets]
        return hashlib.blake2b(repr(cuts).encode(), digest_size=8).digest()

    @property
    def trace(self) -> int:
        """Of a sample of this member's own gradients of the step, before they were summed. 0: not known."""
        traces = [bucket.trace for bucket in self._buckets]
        return hash(tuple(traces)) & WORD if all(traces) else 0

    @property
    def whole(self) -> int | None:
        """Hash of all of them. 0: `audit` did not ask for it."""
        hashes = [bucket.whole for bucket in self._buckets]
        return hash(tuple(hashes)) & WORD if all(hashes) else 0

    def audit(self, wanted: bool) -> None:
        """Between `begin` and the first gradient: hash all of this member's own gradients of the step, or not."""
        for bucket in self._buckets:
            bucket.hashes = wanted

    # A step -----------------------------------------------------------------------------------------------

    def begin(self, weight: float = 1.0) -> None:
        """Start a step. `weight`: of what is accumulated if `weigh` is not called, 1 / members for a mean."""
        assert not self._active or self._finished, "the step before was neither finished nor dropped"
        layout = [(p.requires_grad, p.dtype, p.device) for p in self._parameters]
        if layout != self._layout:
            self._rebuild()
            self._layout = layout
        for bucket in self._buckets:
            bucket.packed = False
        self._active, self._finished, self._next = True, False, 0
        self._touched = bytearray(len(self._parameters))
        self._unit: float | None = None
        self._weight = weight
        self._arm(last=True)

    def weigh(self, weight: float, last: bool) -> None:
        """The next backward is of a micro-batch of this weight; `last`: no other one follows in this step.

        The sum over micro-batches and members of weight times gradient is what `finish` leaves.
        """
        assert self._active and not self._finished, "weigh() belongs between begin() and finish()"
        if self._unit is None:
            self._unit = self._weight = weight
        self._unscale()
        if weight != self._unit:
            if not self._unit:
                raise ValueError(f"a micro-batch of weight {weight} follows one of weight 0")
            scale = functools.partial(torch.mul, torch.tensor(weight / self._unit, dtype=torch.float64))
            self._scaling = [
                slot.parameter.register_hook(scale)  # type: ignore[no-untyped-call]
                for bucket in self._buckets
                for slot in bucket.slots
            ]
        self._arm(last)

    @boot.waits_for("sums")
    def finish(self) -> bool:
        """Wait for all sums; every `.grad` is then the whole job's. True if all are finite, the same on all members.

        Once more in a step (several optimizers with a backward each): sums what came since. Raises EpochBroken.
        """
        assert self._active, "finish() comes after begin()"
        self._counting = False
        self._unscale()
        with torch.no_grad():
            if self._finished:
                return self._finish_again()
            self._launch(len(self._buckets))
            if self._runner is not None:
                finite = self._runner.results()
            else:
                finite = [self._reduce(bucket) for bucket in self._buckets]
            for bucket in self._buckets:
                bucket.settle()
        if any(self._seen):
            self._eager = not self._twice
        self._finished = True
        return all(finite)

    def drop(self) -> None:
        """Forget the step and its gradients. The epoch is aborted before: this waits for the sum in progress to end."""
        self._active = self._counting = False
        self._unscale()
        if self._runner is not None:
            self._runner.cancel()
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """End the thread and remove the hooks. As `drop`, after the epoch's end."""
        self.drop()
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self._runner is not None:
            self._runner.close()

    # Inside -----------------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        for handle in self._hooks:
            handle.remove()
        for parameter in self._parameters:
            if parameter.grad is not None:  # may lie where another one's will
                parameter.grad = parameter.grad.clone()
        if any(kind_of(parameter) not in self._memory for parameter in self._parameters):
            self._memory = regions(self._parameters, self._arena)
        self._buckets = build(self._named, self._memory, self._bucket_bytes)
        self._hooks = [self._hook(slot, bucket) for bucket in self._buckets for slot in bucket.slots]

    def _hook(self, slot: Slot, bucket: Bucket) -> Any:
        function = functools.partial(self._accumulated, slot.number, bucket)
        return slot.parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]

    def _arm(self, last: bool) -> None:
        self._seen = bytearray(len(self._parameters))
        for bucket in self._buckets:
            bucket.waiting = len(bucket.slots)
        self._last = last
        self._counting = True

    def _unscale(self) -> None:
        for handle in self._scaling:
            handle.remove()
        self._scaling = []

    def _accumulated(self, number: int, bucket: Bucket, parameter: Tensor) -> None:
        """The hook: backward has added to this parameter's gradient."""
        if not self._counting:
            if self._active:
                self._touched[number] = 1
            return
        with self._lock:
            if self._seen[number]:
                self._again(number, bucket)
                return
            self._seen[number] = 1
            bucket.waiting -= 1
            if not bucket.waiting:
                self._filled(bucket)

    def _again(self, number: int, bucket: Bucket) -> None:
        if not self._last:
            return
        self._twice = True
        if bucket.packed:
            self._eager = False
            raise ValueError(
                f"{self._named[number][0]} got a second gradient in a micro-batch, after steps in which it got one: it "
                "is being averaged already. Call backward() once for a micro-batch, on the sum of the losses"
            )

    def _filled(self, bucket: Bucket) -> None:
        with torch.no_grad():
            if not (self._last and self._eager):
                bucket.adopt()
                return
            bucket.pack(self._factor())
            ready = self._next
            while ready < len(self._buckets) and self._buckets[ready].packed:
                ready += 1
            self._launch(ready)

    def _factor(self) -> Tensor | None:
        return None if self._weight == 1.0 else torch.tensor(self._weight, dtype=torch.float64)

    def _launch(self, end: int) -> None:
        """Hand over the buckets before this one, in order. Raises, inside backward, what ended an earlier one."""
        factor = self._factor()
        for bucket in self._buckets[self._next : end]:
            if not bucket.packed:
                bucket.pack(factor)
            if self._runner is not None:
                self._runner.submit(bucket)
        self._next = max(self._next, end)

    @boot.traced("sum", lambda self, bucket: bucket.flat.nbytes)
    def _reduce(self, bucket: Bucket) -> bool:
        """Sum one bucket over the members; whether all of it is finite."""
        flat = bucket.flat
        if flat.device.type == "cpu":
            self._collective.all_reduce_shared(flat, Op.SUM)
        else:
            if bucket.event is not None:
                bucket.event.synchronize()
            self._collective.all_reduce(flat, Op.SUM)
        return bucket.finite()

    def _finish_again(self) -> bool:
        """Sum the gradients that came since the last `finish` on any member; the others stay as they are."""
        self._marks.copy_(torch.frombuffer(self._touched, dtype=torch.uint8))
        self._collective.all_reduce_shared(self._marks, Op.MAX)
        fresh = self._marks.tolist()
        finite = True
        self.audit(False)  # beside fresh ones there are sums, in which the order of members shows
        wholes = [bucket.whole for bucket in self._buckets]
        for bucket in self._buckets:
            if not any(fresh[slot.number] for slot in bucket.slots):
                continue
            old = [slot for slot in bucket.slots if not fresh[slot.number]]
            kept = [(slot.parameter.grad, slot.view.clone()) for slot in old]
            bucket.pack(self._factor())
            finite = self._reduce(bucket) and finite
            bucket.settle()
            for slot, (gradient, value) in zip(old, kept, strict=True):
                slot.view.copy_(value)
                slot.parameter.grad = gradient
        for bucket, whole in zip(self._buckets, wholes, strict=True):
            bucket.whole = whole
        self._touched = bytearray(len(self._parameters))
        return finite


def named(parameters: Iterable[Tensor | tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """(name, parameter), each once. Raises ValueError for what cannot be reduced in flat buffers."""
    found: dict[int, tuple[str, Tensor]] = {}
    for place, item in enumerate(parameters):
        name, parameter = item if isinstance(item, tuple) else (f"parameter {place}", item)
        if isinstance(item, Tensor):
            name += f" of shape {tuple(item.shape)}"
        if type(parameter) not in (Tensor, nn.Parameter) or not parameter.is_leaf:
            raise ValueError(f"{name}: gradients of a {type(parameter).__name__} are not for plain data parallelism")
        found.setdefault(id(parameter), (name, parameter))
    return list(found.values())
