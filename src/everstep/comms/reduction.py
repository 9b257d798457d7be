"""Operators, and sums in a fixed order.

Results depend on the inputs and their order alone: ((x0 + x1) + x2) + ..., element by element, whatever the size, the
pieces or the way the data came. With groups, first inside each group, then over the groups. float16 and bfloat16 are
summed, averaged and multiplied in float32 and rounded once a level; integers wrap; the sum of bool is `or`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Op(enum.Enum):
    """How the members' elements become one."""

    SUM = 0
    AVG = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    BAND = 5
    BOR = 6
    BXOR = 7


DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_HALVES = frozenset({torch.float16, torch.bfloat16})
_BITWISE = frozenset({Op.BAND, Op.BOR, Op.BXOR})
_ROUNDING = frozenset({Op.SUM, Op.AVG, Op.PRODUCT})
_FUNCTIONS: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.PRODUCT: torch.mul,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def validate(op: Op, dtype: torch.dtype) -> None:
    """Raise ValueError when there is no such reduction."""
    if dtype not in DTYPES:
        raise ValueError(f"no reduction of {dtype}; there is one of {', '.join(str(d) for d in DTYPES)}")
    if op is Op.AVG and not dtype.is_floating_point:
        raise ValueError(f"no average of {dtype}: use SUM, or a floating point type")
    if op in _BITWISE and dtype.is_floating_point:
        raise ValueError(f"no {op.name} of {dtype}: it is for integers and bool")


class Reducer:
    """Folds the members' parts, for one operator, one dtype and one grouping. Keeps its scratch memory."""

    def __init__(self, op: Op, dtype: torch.dtype, groups: Sequence[Sequence[int]]) -> None:
        validate(op, dtype)
        self._function = _FUNCTIONS[op]
        self._dtype = dtype
        self._wide = dtype in _HALVES and op in _ROUNDING
        self._divisor = sum(len(g) for g in groups) if op is Op.AVG else 0
        self._groups = groups
        self._scratch: dict[object, Tensor] = {}

    def fold(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Reduce equally long parts, given in rank order, into `out`, which may be one of them (the same object)."""
        if len(self._groups) == 1:
            self.fold_groups(sources, out)
            return
        partials = [self._room(i, out.numel(), self._dtype) for i in range(len(self._groups))]
        for group, partial in zip(self._groups, partials, strict=True):
            self.fold_group([sources[rank] for rank in group], partial)
        self.fold_groups(partials, out)

    def fold_group(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """The first level alone: parts of one group, in rank order."""
        self._chain(sources, out, 0)

    def fold_groups(self, partials: Sequence[Tensor], out: Tensor) -> None:
        """The second level alone: what the groups came to, in their order."""
        self._chain(partials, out, self._divisor)

    def _chain(self, sources: Sequence[Tensor], out: Tensor, divisor: int) -> None:
        if self._wide and (len(sources) > 2 or divisor):
            self._chain_wide(sources, out, divisor)
            return
        first, *rest = sources
        if not rest and first is not out:
            out.copy_(first)
        # As long as `out` is still to be read, the sum grows elsewhere.
        last_alias = max((i for i, source in enumerate(rest) if source is out), default=0)
        target = self._room("chain", out.numel(), out.dtype) if last_alias else out
        for i, source in enumerate(rest):
            if i == last_alias:
                target = out
            first = self._function(first, source, out=target)
        if divisor:
            out.div_(divisor)

    def _chain_wide(self, sources: Sequence[Tensor], out: Tensor, divisor: int) -> None:
        total = self._room("wide", out.numel(), torch.float32)
        total.copy_(sources[0])
        for source in sources[1:]:
            self._function(total, source, out=total)
        if divisor:
            total.div_(divisor)
        out.copy_(total)

    def _room(self, key: object, num_elements: int, dtype: torch.dtype) -> Tensor:
        room = self._scratch.get(key)
        if room is None or room.numel() < num_elements:
            room = self._scratch[key] = torch.empty(num_elements, dtype=dtype)
        return room[:num_elements]
