"""The order of samples, and who trains on which, as pure functions of (seed, step, members, role).

The stream of positions 0, 1, 2, ... runs through pass after pass over the data set; each pass is a permutation of its
own, computed for one position at a time. Step s consumes the positions [s * B, (s + 1) * B), B being the global batch,
whatever the number of members. So nothing has to be stored, sent or replayed to resume at any step with any members.
B is one number for the whole run: a batch that ramps up needs a table of (step, first position), which is not here.
"""

from __future__ import annotations

import hashlib
import math
import operator
import struct
from collections.abc import Iterator
from typing import NamedTuple, SupportsIndex

from everstep.core.dealing import Stream

NUM_ROUNDS = 8  # triples of places show no bias over 30,000 keys from size 10 on; with 6, up to size 9 they do
SMALL_SIZE, SMALL_ROUNDS = 64, 24  # all orders of 5 and 6 show 14 % of bias with 8 rounds, some with 12, none with 16
WORD = (1 << 64) - 1


def mix(word: int) -> int:
    """64 bits scrambled: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


class Permutation:
    """A permutation of range(size), keyed by (seed, number): one value at a time, in constant time and memory.

    A Feistel network over a rectangle just large enough, walked until it is back inside the size (Black and Rogaway:
    Ciphers with arbitrary finite domains, CT-RSA 2002, section 5 and "cycle walking"). The rectangle has fewer than
    sqrt(size) + 1 cells too many, so a second walk is rare. Small sizes take more rounds, as in FFX (Bellare, Rogaway,
    Spies, 2010). For shuffling, not for secrets. `size` is at most 2 ** 128.
    """

    __slots__ = ("_columns", "_keys", "_rows", "_size")

    def __init__(self, size: int, seed: int, number: int) -> None:
        self._size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        num_rounds = SMALL_ROUNDS if size < SMALL_SIZE else NUM_ROUNDS
        text = f"everstep order {seed} {number}".encode()
        keys = struct.unpack(f"<{num_rounds}Q", hashlib.shake_128(text).digest(8 * num_rounds))
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __getitem__(self, index: int) -> int:
        rows, columns = self._rows, self._columns
        while True:
            row, column = divmod(index, columns)
            for row_key, column_key in self._keys:
                row = (row + mix(row_key ^ column)) % rows
                column = (column + mix(column_key ^ row)) % columns
            index = row * columns + column
            if index < self._size:
                return index


class MicroBatch(NamedTuple):
    """What one forward and backward works on: sample `indices[i]` stands at `positions[i]` of the stream.

    The weighted sum of the mean losses of all micro-batches of all members is the mean loss of the global batch.
    """

    positions: range
    indices: tuple[int, ...]
    weight: float


class Sampler:
    """The stream over `num_samples` samples, dealt in steps of `global_batch`.

    At the end of a pass the stream goes on into the next one: a step may hold the end of one pass and the start of
    another (several, when the data set is smaller than the global batch), so every sample comes exactly once a pass.
    With `drop_last` a pass ends after its last whole step; the samples left over are others in each pass when shuffled.

    `micro_batch`: the most samples in one forward; None: a member's share is not split. Raises ValueError.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        *,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.num_samples = whole("num_samples", num_samples, 1)
        self.global_batch = whole("global_batch", global_batch, 1)
        self.micro_batch = self.global_batch if micro_batch is None else whole("micro_batch", micro_batch, 1)
        self.seed = whole("seed", seed)
        self.shuffle = shuffle
        self.drop_last = drop_last
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"micro_batch={self.micro_batch} is larger than global_batch={self.global_batch}: global_batch counts "
                "the samples of all members together, micro_batch those of one forward"
            )
        dropped = self.num_samples % self.global_batch if drop_last else 0
        self.pass_length = self.num_samples - dropped
        if not self.pass_length:
            raise ValueError(
                f"drop_last=True with {self.num_samples} samples and global_batch={self.global_batch} drops every "
                "sample: make global_batch smaller, or set drop_last=False"
            )

    @classmethod
    def of(cls, stream: Stream) -> Sampler:
        """The sampler of a stream that was told."""
        seed, shuffle, drop_last = int(stream.seed), stream.shuffle, stream.drop_last
        return cls(stream.num_samples, stream.global_batch, seed=seed, shuffle=shuffle, drop_last=drop_last)

    @property
    def stream(self) -> Stream:
        """What the order of samples follows from. How a share is cut into micro-batches does not matter to it."""
        return Stream(self.num_samples, self.global_batch, str(self.seed), bool(self.shuffle), bool(self.drop_last))

    def step_positions(self, step: int) -> range:
        """The positions all members together consume in this step."""
        first = whole("step", step, 0) * self.global_batch
        return range(first, first + self.global_batch)

    def share(self, step: int, num_members: int, role: int) -> range:
        """This member's positions: one block in order of roles, sizes differing by at most one."""
        num_members = whole("num_members", num_members, 1)
        if whole("role", role, 0) >= num_members:
            raise ValueError(f"role={role} is not one of {num_members} members, counted from 0")
        return _part(self.step_positions(step), num_members, role)

    def deal(self, step: int, num_members: int, role: int) -> tuple[MicroBatch, ...]:
        """This member's micro-batches of the step; their sizes differ by at most one.

        Every member gets as many, since a sharded model communicates in each forward; only a member with fewer
        samples than that gets one for each sample. With more members than samples some get none: they take part in
        the reduction all the same, with gradients of zero.
        """
        parts = self.cut(step, num_members, role)
        return tuple(MicroBatch(part, self.samples(part), len(part) / self.global_batch) for part in parts)

    def cut(self, step: int, num_members: int, role: int) -> tuple[range, ...]:
        """The positions of these micro-batches."""
        share = self.share(step, num_members, role)
        largest_share = -(-self.global_batch // num_members)
        count = min(-(-largest_share // self.micro_batch), len(share))
        return tuple(_part(share, count, number) for number in range(count))

    def even(self, num_members: int) -> bool:
        """Whether all members get as many micro-batches in every step."""
        largest_share = -(-self.global_batch // num_members)
        return self.global_batch // num_members >= -(-largest_share // self.micro_batch)

    def samples(self, positions: range) -> tuple[int, ...]:
        """The sample at each of these positions of the stream (a range of step 1)."""
        return tuple(self._walk(positions.start, positions.stop))

    def _walk(self, first: int, stop: int) -> Iterator[int]:
        while first < stop:
            number, start = divmod(first, self.pass_length)
            end = min(start + stop - first, self.pass_length)
            first += end - start
            if self.shuffle:
                order = Permutation(self.num_samples, self.seed, number)
                yield from (order[index] for index in range(start, end))
            else:
                yield from range(start, end)


def _part(positions: range, count: int, number: int) -> range:
    """Block `number` of `count` as even blocks as can be; the first ones take what is left over."""
    size, extra = divmod(len(positions), count)
    first = number * size + min(number, extra)
    return positions[first : first + size + (number < extra)]


def whole(name: str, value: SupportsIndex, least: int | None = None) -> int:
    """The value as an int. Raises ValueError unless it is a whole number (NumPy's too) of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number
