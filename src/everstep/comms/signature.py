"""What a member says it is doing, in two words that travel with the first round of each collective.

Members that called different collectives, or the same one with other shapes, all get one error that names both calls,
instead of garbage or a wait without end.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch


class Kind(enum.IntEnum):
    """The collectives."""

    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    ALL_GATHER_BYTES = 10
    ALL_REDUCE_SHARED = 11


_DTYPES = sorted((v for v in vars(torch).values() if isinstance(v, torch.dtype)), key=str)
_CODES = {dtype: code for code, dtype in reversed(list(enumerate(_DTYPES)))}


def code_of(dtype: torch.dtype) -> int:
    """A number for it, the same in every process of one torch version."""
    return _CODES[dtype]


def dtype_of(code: int) -> torch.dtype:
    return _DTYPES[code]


class Signature(NamedTuple):
    """One call. `op` and `root` are 0 where there is none; `num_elements` is that of the member's part."""

    kind: Kind
    dtype: torch.dtype
    num_elements: int
    op: int = 0
    root: int = 0

    def words(self) -> tuple[int, int]:
        return self.kind << 48 | _CODES[self.dtype] << 32 | self.op << 24 | self.root, self.num_elements

    @classmethod
    def from_words(cls, first: int, second: int) -> Signature:
        kind, code, op, root = first >> 48, first >> 32 & 0xFFFF, first >> 24 & 0xFF, first & 0xFFFFFF
        return cls(Kind(kind), _DTYPES[code], second, op, root)

    def __str__(self) -> str:
        text = f"{self.kind.name.lower()} of {self.num_elements} x {str(self.dtype).removeprefix('torch.')}"
        return f"{text} (op {self.op}, root {self.root})"
