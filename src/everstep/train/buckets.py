"""Where each gradient lies: flat buffers which are reduced as a whole, filled in about the order backward goes.

One region of memory for each dtype and device, large enough for all parameters, allocated once; buckets cut it up anew
when parameters are frozen or unfrozen. Behind the gradients of a bucket stands one element for each, above zero after
the sum if any member has that gradient: so one that nobody has stays None, as without data parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from everstep.state import fingerprint

ALIGN_BYTES = 64
SMALL_BYTES = 16 << 10  # up to here a call costs more than the copy: such gradients are moved and scaled together
TRACED_BYTES = 64 << 10  # of a bucket: 5 us
Kind = tuple[torch.dtype, torch.device]


class Arena(Protocol):
    """Host memory which the other members of this host can read in place."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Zeroed uint8, aligned to a page; never taken back."""


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter: its number among all, what errors call it, and the place of its gradient."""

    number: int
    name: str
    parameter: Tensor
    view: Tensor
    small: bool


@dataclass(eq=False, slots=True)
class Bucket:
    """`flat` is what is reduced: large gradients, `small` ones, their marks, then nothing up to the alignment."""

    flat: Tensor
    small: Tensor
    marks: Tensor
    slots: list[Slot]
    waiting: int = 0  # parameters without a gradient of this micro-batch yet
    packed: bool = False
    lacking: bool = False  # this member had no gradient of some parameter
    trace: int = 0  # of the first of this member's own gradients, before they are summed; 0: on a device
    hashes: bool = False  # all of them are wanted
    whole: int = 0  # hash of all; 0: not wanted
    event: torch.Event | None = field(default=None, repr=False)

    def pack(self, weight: Tensor | None) -> None:
        """Move the gradients in, times the weight (None: as they are); parameters without one contribute zeros."""
        moved: list[tuple[Slot, Tensor]] = []
        have = [self._pack_one(slot, weight, moved) for slot in self.slots]
        if moved:
            torch._foreach_copy_([slot.view for slot, _ in moved], [gradient for _, gradient in moved])
            for slot, _ in moved:
                slot.parameter.grad = slot.view
        if weight is not None:
            self.small.mul_(weight)
        self.packed = True
        self.lacking = not all(have)
        if self.lacking:
            self.marks.copy_(torch.tensor(have))
        else:
            self.marks.fill_(1)
        self.whole = fingerprint.of_tensor(self.flat) or 1 if self.hashes else 0
        if self.flat.device.type == "cpu":
            self.trace = sample(self.flat)
        else:
            self.event = torch.Event(self.flat.device)
            self.event.record()

    def _pack_one(self, slot: Slot, weight: Tensor | None, moved: list[tuple[Slot, Tensor]]) -> bool:
        """Whether there is a gradient. A small one is only noted, to be moved with the others by one call."""
        view, gradient = slot.view, slot.parameter.grad
        if gradient is None:
            view.zero_()
            return False
        if gradient.layout is not torch.strided or gradient.requires_grad:
            refuse(slot, gradient)
        if slot.small:
            if gradient is not view:
                moved.append((slot, gradient))
        elif weight is None:
            if gradient is not view:
                view.copy_(gradient)
                slot.parameter.grad = view
        else:
            torch.mul(gradient, weight, out=view)
            slot.parameter.grad = view
        return True

    def adopt(self) -> None:
        """Let the gradients be summed up in place from now on: there is no second memory for them."""
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient is not slot.view:
                if gradient.layout is not torch.strided or gradient.requires_grad:
                    refuse(slot, gradient)
                slot.view.copy_(gradient)
                slot.parameter.grad = slot.view

    def finite(self) -> bool:
        """Whether all elements are. A sum sees every inf and nan in one pass, but may overflow by itself."""
        flat = self.flat
        if bool(flat.sum().isfinite()):
            return True
        return all(bool(end.isfinite()) for end in flat.aminmax())

    def settle(self) -> None:
        """After the sum: give this member the gradients which only others had."""
        if not self.lacking:
            return
        for slot, mark in zip(self.slots, self.marks.tolist(), strict=True):
            if slot.parameter.grad is None and mark > 0:
                slot.parameter.grad = slot.view


def sample(gradients: Tensor) -> int:
    """Fingerprint of the first bytes of contiguous host memory."""
    return xxhash.xxh3_64_intdigest(gradients.detach().view(-1).view(torch.uint8)[:TRACED_BYTES].numpy().data)


def refuse(slot: Slot, gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise ValueError(f"{slot.name} has a gradient of layout {gradient.layout}: use sparse=False for its module")
    raise ValueError(f"{slot.name} has a gradient made by backward(create_graph=True), which cannot be averaged")


def kind_of(parameter: Tensor) -> Kind:
    """The dtype of the buffer, which is that of its gradient; complex numbers travel as pairs."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return (dtype.to_real() if dtype.is_complex else dtype), parameter.device


def room(parameter: Tensor) -> int:
    """Elements of the buffer, whole cache lines."""
    dtype, _ = kind_of(parameter)
    return aligned(parameter.numel() * (2 if parameter.is_complex() else 1), dtype)


def aligned(num_elements: int, dtype: torch.dtype) -> int:
    unit = ALIGN_BYTES // dtype.itemsize
    return -(-num_elements // unit) * unit


def regions(parameters: Sequence[Tensor], arena: Arena) -> dict[Kind, Tensor]:
    """Memory for all of the parameters however they are put into buckets; what is not used is never touched."""
    sizes: dict[Kind, int] = {}
    for parameter in parameters:
        dtype, _ = kind = kind_of(parameter)
        sizes[kind] = sizes.get(kind, 0) + room(parameter) + aligned(1, dtype)
    return {
        (dtype, device): arena.allocate(size * dtype.itemsize).view(dtype)
        if device.type == "cpu"
        else torch.zeros(size, dtype=dtype, device=device)
        for (dtype, device), size in sizes.items()
    }


def deal(kinds: Sequence[Kind], sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Numbers of the parameters in each bucket, buckets in the order in which backward should fill them.

    Last registered first; a bucket is closed once it has `bucket_bytes`.
    """
    buckets: list[list[int]] = []
    filling: dict[Kind, tuple[list[int], int]] = {}
    for number in reversed(range(len(kinds))):
        kind = kinds[number]
        numbers, size = filling.pop(kind, ([], 0))
        if not numbers:
            buckets.append(numbers)
        numbers.append(number)
        size += sizes[number] * kind[0].itemsize
        if size < bucket_bytes:
            filling[kind] = numbers, size
    return sorted(buckets, key=lambda numbers: -numbers[-1])


def build(named: Sequence[tuple[str, Tensor]], memory: dict[Kind, Tensor], bucket_bytes: int) -> list[Bucket]:
    """Buckets for the parameters which require a gradient."""
    live = [(number, name, p) for number, (name, p) in enumerate(named) if p.requires_grad]
    used = dict.fromkeys(memory, 0)
    buckets = []
    for members in deal([kind_of(p) for *_, p in live], [room(p) for *_, p in live], bucket_bytes):
        kind = kind_of(live[members[0]][2])
        bucket = fill(memory[kind][used[kind] :], [live[member] for member in members])
        used[kind] += bucket.flat.numel()
        buckets.append(bucket)
    return buckets


def fill(region: Tensor, members: Sequence[tuple[int, str, Tensor]]) -> Bucket:
    """A bucket at the beginning of the region, of these (number, name, parameter)."""
    slots: list[Slot] = []
    offset = begin_small = 0
    for small in (False, True):
        begin_small = offset
        for number, name, parameter in members:
            if (room(parameter) * region.itemsize <= SMALL_BYTES) is small:
                slots.append(Slot(number, name, parameter, place(region, offset, parameter), small))
                offset += room(parameter)
    end = offset + aligned(len(slots), region.dtype)
    marks = region[offset : offset + len(slots)]
    return Bucket(region[:end].zero_(), region[begin_small:offset], marks, slots)


def place(region: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A gradient in the memory format of its parameter, so that optimizers keep their fast paths."""
    strides = torch.empty_like(parameter, device="meta").stride()
    if not parameter.is_complex():
        return region.as_strided(parameter.shape, strides, region.storage_offset() + offset)
    pairs = torch.view_as_complex(region[offset : offset + 2 * parameter.numel()].view(-1, 2))
    return pairs.as_strided(parameter.shape, strides, pairs.storage_offset())
