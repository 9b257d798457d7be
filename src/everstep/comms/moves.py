"""How bytes are moved between the members: loops of rounds over pieces that fit a slot.

Tensors are flat, contiguous and uint8, so every dtype is moved, and bit by bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from everstep.comms.algorithms import pieces
from everstep.comms.rounds import Need, Rounds, first, first_for, first_of, share_of

BLOCK_BYTES = 1024  # of a message of a few bytes, which comes in one round
_LENGTH = struct.Struct("=Q")


def all_gather(rounds: Rounds, outputs: Sequence[Tensor], x: Tensor) -> None:
    """`outputs[p]` becomes what rank p has in `x`. Lengths may differ, and all know them."""
    for begin, end in pieces(max(len(output) for output in outputs), rounds.room(1), 1):
        mine = x[begin:end]
        rounds.begin(torch.uint8)[: len(mine)].copy_(mine)
        lengths = [len(output[begin:end]) for output in outputs]
        rounds.publish(_lengths(lengths))
        slots = rounds.meet(torch.uint8)
        for p in rounds.others:
            outputs[p][begin : begin + lengths[p]].copy_(slots[p][: lengths[p]])
    if outputs[rounds.rank].data_ptr() != x.data_ptr():
        outputs[rounds.rank].copy_(x)
    rounds.check()


def all_gather_bytes(rounds: Rounds, payload: bytes) -> list[bytes]:
    """Short messages of any length, by rank: one round for those which fit a block."""
    inline = BLOCK_BYTES - _LENGTH.size
    block = _LENGTH.pack(len(payload)) + payload[:inline]
    rounds.begin(torch.uint8)[: len(block)].copy_(_tensor(block))
    rounds.publish(first(BLOCK_BYTES))
    blocks = [bytes(slot[:BLOCK_BYTES].numpy()) for slot in rounds.meet(torch.uint8)]
    rounds.check()
    lengths = [_LENGTH.unpack_from(block)[0] for block in blocks]
    rests = [torch.empty(max(0, length - inline), dtype=torch.uint8) for length in lengths]
    if max(lengths) > inline:
        all_gather(rounds, rests, _tensor(payload[inline:]))
    messages = zip(blocks, lengths, rests, strict=True)
    return [block[_LENGTH.size :][:length] + bytes(rest.numpy()) for block, length, rest in messages]


def broadcast(rounds: Rounds, x: Tensor, root: int) -> None:
    for begin, end in pieces(len(x), rounds.room(1), 1):
        slot, length = rounds.begin(torch.uint8), end - begin
        if rounds.rank == root:
            slot[:length].copy_(x[begin:end])
        rounds.publish(first_of(root, length))
        slots = rounds.meet(torch.uint8)
        if rounds.rank != root:
            x[begin:end].copy_(slots[root][:length])
    rounds.check()


def gather(rounds: Rounds, outputs: Sequence[Tensor], x: Tensor, root: int) -> None:
    """`outputs` is empty but at the root."""
    for begin, end in pieces(len(x), rounds.room(1), 1):
        slot, length = rounds.begin(torch.uint8), end - begin
        if rounds.rank != root:
            slot[:length].copy_(x[begin:end])
        rounds.publish(first_for(root, length))
        slots = rounds.meet(torch.uint8)
        for p in rounds.others if rounds.rank == root else ():
            outputs[p][begin:end].copy_(slots[p][:length])
    if rounds.rank == root:
        outputs[root].copy_(x)
    rounds.check()


def scatter(rounds: Rounds, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
    """`inputs` is empty but at the root."""
    share = rounds.room(1, rounds.size)
    for begin, end in pieces(len(output), share, 1):
        slot, length = rounds.begin(torch.uint8), end - begin
        for q in rounds.others if rounds.rank == root else ():
            slot[q * share : q * share + length].copy_(inputs[q][begin:end])
        rounds.publish(share_of(share, length, root))
        slots = rounds.meet(torch.uint8)
        if rounds.rank != root:
            mine = rounds.rank * share
            output[begin:end].copy_(slots[root][mine : mine + length])
    if rounds.rank == root:
        output.copy_(inputs[root])
    rounds.check()


def all_to_all(rounds: Rounds, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`inputs[q]` goes to rank q, which has room of that length in its `outputs` for us; ValueError if not, on all."""
    share, rank = rounds.room(1, rounds.size), rounds.rank
    for begin, end in pieces(_longest(rounds, outputs, inputs), share, 1):
        slot = rounds.begin(torch.uint8)
        for q in rounds.others:
            segment = inputs[q][begin:end]
            slot[q * share : q * share + len(segment)].copy_(segment)

        def need(p: int, q: int, begin: int = begin, end: int = end) -> tuple[int, int]:
            return q * share, len((inputs[q] if p == rank else outputs[p])[begin:end])

        rounds.publish(need)
        slots = rounds.meet(torch.uint8)
        for p in rounds.others:
            segment = outputs[p][begin:end]
            segment.copy_(slots[p][rank * share : rank * share + len(segment)])
    outputs[rank].copy_(inputs[rank])
    rounds.check()


def _longest(rounds: Rounds, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
    """Length of the longest message of all, from a round in which everybody tells what it sends and expects."""
    mine = torch.tensor([[len(x) for x in inputs], [len(x) for x in outputs]], dtype=torch.int64)
    num_bytes = mine.numel() * mine.element_size()
    rounds.begin(torch.int64)[: mine.numel()].copy_(mine.view(-1))
    rounds.publish(first(num_bytes))
    told = torch.stack([slot[: mine.numel()].view(2, -1).clone() for slot in rounds.meet(torch.int64)])
    rounds.check()
    sent, expected = told[:, 0], told[:, 1].T
    if not torch.equal(sent, expected):
        p, q = (sent != expected).nonzero()[0].tolist()
        raise ValueError(f"rank {p} sends {int(sent[p, q])} bytes to rank {q}, which expects {int(expected[p, q])}")
    return int(sent.max())


def _lengths(num_bytes: Sequence[int]) -> Need:
    """Everybody reads all of everybody, who have so much by rank."""
    return lambda p, q: (0, num_bytes[p])


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
