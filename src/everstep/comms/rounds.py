"""Rounds: the one primitive under all collectives.

In a round each member publishes one payload, and each reads the ranges it needs of the others'. A local payload is read
in place, in its owner's board; of a remote one just the needed range is sent. `need(p, q)` says which bytes (offset,
length) of rank p's payload rank q reads; both sides work it out, so nothing is asked for.

Two slots, used in turn: a slot is written again two rounds later, when everybody has published the round between, and
so is done with it. All members of a communicator publish every round, if only nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from everstep.comms.board import LINE_BYTES, ROUND_BITS, SLOT_BYTES, TOTAL_BYTES, Board, header_word, state_word
from everstep.comms.signature import Signature
from everstep.comms.table import Table
from everstep.comms.words import store, wait_for
from everstep.core.errors import EpochBroken

Need = Callable[[int, int], tuple[int, int]]

# Of a slot, so much is used. The fewer members, the more a piece should fit their caches; the more, the more a round
# costs. Summing 100 MB with 2 / 4 / 8 members of 2 cores took, with 1 MB 21 / 85 / 279 ms, with 2 MB 18 / 85 / 260 ms,
# with 4 MB 17 / 95 / 221 ms, with 8 MB 22 / 102 / 201 ms.
FEW_MEMBERS = 4
FEW_BYTES = 2 << 20

_MARK = struct.Struct("=QQ")
_NO_MARK = bytes(_MARK.size)


def nothing(_p: int, _q: int) -> tuple[int, int]:
    """The need of a round whose payload is empty, or whose members are all local."""
    return 0, 0


def first(num_bytes: int) -> Need:
    """Everybody reads so much of everybody."""
    return lambda p, q: (0, num_bytes)


def first_for(root: int, num_bytes: int) -> Need:
    """Only the root reads."""
    return lambda p, q: (0, num_bytes if q == root else 0)


def first_of(root: int, num_bytes: int) -> Need:
    """Only the root is read."""
    return lambda p, q: (0, num_bytes if p == root else 0)


def share_of(stride: int, num_bytes: int, root: int | None = None) -> Need:
    """Each reads the beginning of its share; with a root, only the root's."""
    return lambda p, q: (q * stride, num_bytes if root in (None, p) else 0)


class Rounds:
    """The rounds of one communicator in one epoch. One thread at a time."""

    def __init__(self, table: Table, index: int, roles: tuple[int, ...]) -> None:
        self.table = table
        self.size = len(roles)
        self.rank = roles.index(table.role)
        self.groups = _groups(table, roles)
        self.room_bytes = FEW_BYTES if self.size <= FEW_MEMBERS else SLOT_BYTES
        self._roles = roles
        self._number = 0
        self._signature: Signature | None = None
        boards = [table.peer(role).board for role in roles]
        own = boards[self.rank]
        assert own is not None, "a worker has a board of its own"
        self._own = own
        self._index = index
        self._state = state_word(index)
        self._base = table.epoch << ROUND_BITS
        self._limit = self._base + (1 << ROUND_BITS)
        # Each begins with the rank behind it, so that not all wait for the same one.
        order = [(self.rank + i) % self.size for i in range(1, self.size)]
        self.others = order
        self.remotes = [rank for rank in order if boards[rank] is None]
        self._boards = [(rank, board) for rank in order if (board := boards[rank]) is not None]
        # Where a remote member's payload is received: laid out as its slot, and memory only once it is touched.
        self._staging = {(p, rank): memoryview(bytearray(SLOT_BYTES)) for rank in self.remotes for p in (0, 1)}
        self._slots = {torch.uint8: (self._views(boards, 0), self._views(boards, 1))}
        # Whoever still reads our slots in an earlier epoch sees this before it can see anything new in them.
        store(own, self._state, self._base)

    def room(self, width: int, shares: int = 1) -> int:
        """Elements of `width` bytes in one of so many equal shares of a slot: whole cache lines."""
        return self.room_bytes // shares // LINE_BYTES * LINE_BYTES // width

    def sign(self, signature: Signature, offset: int = 0) -> None:
        """Begin a collective: the next round carries what it is, and `meet` checks that all agree.

        `offset`: where in the own board the tensor lies, if the others shall read it there.
        """
        self._signature = signature
        words, header = self._own.words, header_word(self._index, self._number + 1 & 1)
        self._wait_for_all()
        words[header], words[header + 1] = signature.words()
        words[header + 2] = offset

    def begin(self, dtype: torch.dtype) -> Tensor:
        """My slot for the next round, seen as `dtype`, once nobody reads what it held."""
        self._wait_for_all()
        self._number += 1
        return self._seen_as(dtype)[self._number & 1][self.rank]

    def publish(self, need: Need) -> None:
        """Let the others read the slot, and get what the remote ones publish."""
        self.check()
        store(self._own, self._state, self._base + self._number)
        if self.remotes:
            self._exchange(need)

    def meet(self, dtype: torch.dtype) -> list[Tensor]:
        """Wait for everybody's payload of this round: slots by rank. Raises ValueError when the calls differ."""
        self._wait_for_all()
        parity = self._number & 1
        if self._signature is not None:
            header, mine = header_word(self._index, parity), self._signature.words()
            for rank, board in self._boards:
                if (theirs := (board.words[header], board.words[header + 1])) != mine:
                    self._disagree(rank, theirs)
            self._signature = None
        return self._seen_as(dtype)[parity]

    def step(self) -> None:
        """A round without a payload: when it returns, everybody has come as far."""
        self.begin(torch.uint8)
        self.publish(nothing)
        self.meet(torch.uint8)

    def part(self) -> None:
        """The last round of an epoch that ends as planned: when it returns, nobody reads our slots any more.

        Who is in the next epoch already has been here. Without this the first of them would overwrite what the last
        still reads.
        """
        self.check()
        self._number += 1
        target = self._base + self._number
        store(self._own, self._state, target)
        for _, board in self._boards:
            wait_for(self.table, board, self._state, target)

    def offset_of(self, tensor: Tensor) -> int:
        """Where it lies in the own board. Raises ValueError when it does not."""
        offset = tensor.data_ptr() - self._own.address if tensor.numel() else 0
        if not tensor.is_contiguous() or not 0 <= offset <= TOTAL_BYTES - tensor.numel() * tensor.element_size():
            raise ValueError("the tensor must be contiguous, and in memory from the fabric's `allocate`")
        return offset

    def in_place(self, num_bytes: int) -> list[Tensor]:
        """By rank the bytes on its board at the `offset` it signed with in this round. All must be local."""
        header = header_word(self._index, self._number & 1)
        boards = dict([(self.rank, self._own), *self._boards])
        offsets = [boards[rank].words[header + 2] for rank in range(self.size)]
        self.check()
        return [boards[rank].bytes.narrow(0, offset, num_bytes) for rank, offset in enumerate(offsets)]

    def check(self) -> None:
        """Raise EpochBroken if the epoch was aborted, or if what was read so far may be of another one."""
        self.table.check()
        for rank, board in self._boards:
            if board.words[self._state] >= self._limit:
                self._left(rank)

    def _wait_for_all(self) -> None:
        if not self._number:
            return  # nobody can have been reading in this epoch
        target = self._base + self._number
        for rank, board in self._boards:
            if wait_for(self.table, board, self._state, target) >= self._limit:
                self._left(rank)

    def _left(self, rank: int) -> None:
        self.table.check()
        raise EpochBroken(self.table.epoch, f"role {self._roles[rank]} is in a later epoch")

    def _disagree(self, rank: int, theirs: tuple[int, int]) -> None:
        mine, self._signature = self._signature, None
        self.check()  # a header of a later epoch is no disagreement
        raise ValueError(
            f"members called different collectives: role {self.table.role} {mine}, "
            f"role {self._roles[rank]} {Signature.from_words(*theirs)}"
        )

    def _exchange(self, need: Need) -> None:
        """The same round with the members on other hosts. In a signed one all hear of all."""
        parity, me, signed = self._number & 1, self.rank, self._signature is not None
        mark = _MARK.pack(*self._signature.words()) if self._signature is not None else _NO_MARK
        payload = self._own.slot_bytes(self._index, parity)
        sends: dict[int, memoryview] = {}
        receives: dict[int, memoryview] = {}
        for rank in self.remotes:
            (out, num_out), (into, num_in) = need(me, rank), need(rank, me)
            if num_out or signed:
                sends[self._roles[rank]] = payload[out : out + num_out]
            if num_in or signed:
                receives[self._roles[rank]] = self._staging[parity, rank][into : into + num_in]
        marks = self.table.exchange(self._index, self._number, mark, sends, receives)
        for rank in self.remotes:
            if (theirs := marks.get(self._roles[rank], mark)) != mark:
                # Signed calls that agree need the same bytes; then an empty mark, a wrong length, is our defect.
                assert signed and theirs, "members are out of step"
                self._disagree(rank, _MARK.unpack(theirs))

    def _views(self, boards: list[Board | None], parity: int) -> list[Tensor]:
        return [
            torch.frombuffer(self._staging[parity, rank], dtype=torch.uint8)
            if board is None
            else board.slot(self._index, parity)
            for rank, board in enumerate(boards)
        ]

    def _seen_as(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        slots = self._slots.get(dtype)
        if slots is None:
            even, odd = self._slots[torch.uint8]
            slots = self._slots[dtype] = ([slot.view(dtype) for slot in even], [slot.view(dtype) for slot in odd])
        return slots


def _groups(table: Table, roles: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks by group of the formation, in order of the groups."""
    if not table.groups:
        return (tuple(range(len(roles))),)
    numbers = sorted({table.groups[role] for role in roles})
    return tuple(tuple(r for r, role in enumerate(roles) if table.groups[role] == number) for number in numbers)
