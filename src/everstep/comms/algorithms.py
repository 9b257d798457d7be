"""How tensors are reduced over the members: loops of rounds over pieces that fit a slot.

A piece is as small as the cache, so what travels through slots is read and written there, and memory sees each tensor
once. Tensors are flat and contiguous. Which member reduces what never changes the result (`reduction.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from everstep.comms.board import LINE_BYTES
from everstep.comms.reduction import Reducer
from everstep.comms.rounds import Rounds, first, first_for, nothing, share_of

DIRECT_BYTES = 64 << 10  # up to here every member reduces everything, in one round
SHARED_PIECE_BYTES = 8 << 20

Fold = Callable[[Sequence[Tensor], Tensor], None]


def pieces(num_elements: int, most: int, width: int) -> list[tuple[int, int]]:
    """Cut into as few equal pieces as go into `most` elements each of `width` bytes: (begin, end). At least one."""
    count = max(1, -(-num_elements // most))
    line = LINE_BYTES // width
    size = max(line, -(-num_elements // (count * line)) * line)
    return [(begin, min(begin + size, num_elements)) for begin in range(0, max(1, num_elements), size)]


def part(num_elements: int, count: int, place: int, width: int) -> tuple[int, int]:
    """One of `count` equal parts of a piece: (begin, end). Whole cache lines, so that no two write to one."""
    line = LINE_BYTES // width
    length = -(-num_elements // (count * line)) * line
    return min(place * length, num_elements), min((place + 1) * length, num_elements)


def all_reduce(rounds: Rounds, x: Tensor, reducer: Reducer) -> None:
    """In place."""
    width = x.element_size()
    if rounds.size == 1:
        reducer.fold([x], x)
    elif x.numel() * width <= DIRECT_BYTES:
        _reduce_directly(rounds, x, reducer)
    elif len(rounds.groups) == 1 and not rounds.remotes:
        _reduce_by_parts(rounds, x, reducer)
    else:
        for begin, end in pieces(x.numel(), rounds.room(width), width):
            if len(rounds.groups) == 1:
                _reduce_apart(rounds, x[begin:end], reducer)
            else:
                _reduce_by_groups(rounds, x[begin:end], reducer)
    rounds.check()


def _reduce_directly(rounds: Rounds, x: Tensor, reducer: Reducer) -> None:
    """Everybody reads everything."""
    length, num_bytes = x.numel(), x.numel() * x.element_size()
    rounds.begin(x.dtype)[:length].copy_(x)
    rounds.publish(first(num_bytes))
    reducer.fold([slot[:length] for slot in rounds.meet(x.dtype)], x)


def _reduce_by_parts(rounds: Rounds, x: Tensor, reducer: Reducer) -> None:
    """Each reduces its part of a piece; in the round in which it shares that, it offers its input of the next piece.

    All members are local. A slot holds the input of a piece, and behind that the own part of the piece before.
    """
    size, rank, width = rounds.size, rounds.rank, x.element_size()
    behind = rounds.room(width, size + 1) * size
    before: Tensor | None = None
    todo: list[Tensor | None] = [x[begin:end] for begin, end in pieces(x.numel(), behind, width)]
    for piece in [*todo, None]:
        slot = rounds.begin(x.dtype)
        if piece is not None:
            begin, end = part(piece.numel(), size, rank, width)
            slot[:begin].copy_(piece[:begin])
            slot[end : piece.numel()].copy_(piece[end:])
        if before is not None:
            low, high = part(before.numel(), size, rank, width)
            slot[behind : behind + high - low].copy_(before[low:high])
        rounds.publish(nothing)
        slots = rounds.meet(x.dtype)
        if before is not None:
            for p in rounds.others:
                low, high = part(before.numel(), size, p, width)
                before[low:high].copy_(slots[p][behind : behind + high - low])
        if piece is not None:
            mine = piece[begin:end]
            reducer.fold([mine if p == rank else slots[p][begin:end] for p in range(size)], mine)
        before = piece


def _reduce_apart(rounds: Rounds, piece: Tensor, reducer: Reducer) -> None:
    """The same in two rounds, so that only what is needed travels to other hosts."""
    everybody = rounds.groups[0]
    _reduce_parts(rounds, piece, everybody, len(everybody), reducer.fold)
    _share_parts(rounds, piece, everybody, len(everybody))


def _reduce_by_groups(rounds: Rounds, piece: Tensor, reducer: Reducer) -> None:
    """Three rounds: parts inside each group, the same part over the groups, all parts inside each group.

    So between hosts each byte travels once for each group, not once for each member. The smallest group says how many
    parts there are; who is beyond that in a bigger group has none.
    """
    count = min(len(group) for group in rounds.groups)
    group = next(group for group in rounds.groups if rounds.rank in group)
    _reduce_parts(rounds, piece, group, count, reducer.fold_group)
    _reduce_over_groups(rounds, piece, count, group.index(rounds.rank), reducer)
    _share_parts(rounds, piece, group, count)


def _reduce_parts(rounds: Rounds, piece: Tensor, group: Sequence[int], count: int, fold: Fold) -> None:
    """One round: everybody offers its piece to its group, and reduces its own of `count` parts."""
    width, places = piece.element_size(), {rank: place for place, rank in enumerate(group)}
    low, high = part(piece.numel(), count, places[rounds.rank], width)
    slot = rounds.begin(piece.dtype)
    slot[:low].copy_(piece[:low])
    slot[high : piece.numel()].copy_(piece[high:])

    def need(p: int, q: int) -> tuple[int, int]:
        if p not in places or q not in places:
            return 0, 0
        begin, end = part(piece.numel(), count, places[q], width)
        return begin * width, (end - begin) * width

    rounds.publish(need)
    slots = rounds.meet(piece.dtype)
    mine = piece[low:high]
    fold([mine if p == rounds.rank else slots[p][low:high] for p in group], mine)


def _reduce_over_groups(rounds: Rounds, piece: Tensor, count: int, place: int, reducer: Reducer) -> None:
    """One round between those with the same place in their groups, which have the same part."""
    width, places = piece.element_size(), {rank: i for group in rounds.groups for i, rank in enumerate(group)}
    low, high = part(piece.numel(), count, place, width)
    rounds.begin(piece.dtype)[: high - low].copy_(piece[low:high])

    def need(p: int, q: int) -> tuple[int, int]:
        return (0, (high - low) * width) if places[p] == places[q] else (0, 0)

    rounds.publish(need)
    slots = rounds.meet(piece.dtype)
    if low < high:
        reducer.fold_groups([slots[group[place]][: high - low] for group in rounds.groups], piece[low:high])


def _share_parts(rounds: Rounds, piece: Tensor, group: Sequence[int], count: int) -> None:
    """One round: everybody gets the reduced parts of its group."""
    width, places = piece.element_size(), {rank: place for place, rank in enumerate(group)}
    bounds = [part(piece.numel(), count, place, width) for place in range(len(group))]
    low, high = bounds[places[rounds.rank]]
    rounds.begin(piece.dtype)[: high - low].copy_(piece[low:high])

    def need(p: int, q: int) -> tuple[int, int]:
        if p not in places or q not in places:
            return 0, 0
        begin, end = bounds[places[p]]
        return 0, (end - begin) * width

    rounds.publish(need)
    slots = rounds.meet(piece.dtype)
    for p in group:
        begin, end = bounds[places[p]]
        if p != rounds.rank:
            piece[begin:end].copy_(slots[p][: end - begin])


def all_reduce_shared(rounds: Rounds, x: Tensor, reducer: Reducer) -> None:
    """In place, for a tensor which every member has in its arena, at the offset it signed with. All are local.

    Nothing is copied in: each reads its parts where the others have them. Ends when nobody reads ours any more.
    """
    size, rank, width = rounds.size, rounds.rank, x.element_size()
    rounds.step()
    arenas = [arena.view(x.dtype) for arena in rounds.in_place(x.numel() * width)]
    before: tuple[int, int] | None = None
    todo: list[tuple[int, int] | None] = [*pieces(x.numel(), SHARED_PIECE_BYTES // width, width)]
    for piece in [*todo, None]:
        if before is not None:
            rounds.step()
            for p in rounds.others:
                begin, end = _within(before, size, p, width)
                x[begin:end].copy_(arenas[p][begin:end])
        if piece is not None:
            mine = slice(*_within(piece, size, rank, width))
            own = x[mine]
            reducer.fold([own if p == rank else arenas[p][mine] for p in range(size)], own)
        before = piece
    rounds.step()
    rounds.check()


def _within(piece: tuple[int, int], count: int, place: int, width: int) -> tuple[int, int]:
    """One of `count` equal parts of a piece, as bounds in the whole tensor."""
    low, high = part(piece[1] - piece[0], count, place, width)
    return piece[0] + low, piece[0] + high


def reduce(rounds: Rounds, x: Tensor, root: int, reducer: Reducer) -> None:
    """In place at the root; the others keep theirs."""
    width = x.element_size()
    for begin, end in pieces(x.numel(), rounds.room(width), width):
        length = end - begin
        if rounds.rank != root:
            rounds.begin(x.dtype)[:length].copy_(x[begin:end])
        else:
            rounds.begin(x.dtype)
        rounds.publish(first_for(root, length * width))
        slots = rounds.meet(x.dtype)
        if rounds.rank == root:
            mine = x[begin:end]
            reducer.fold([mine if p == root else slots[p][:length] for p in range(rounds.size)], mine)
    rounds.check()


def reduce_scatter(rounds: Rounds, output: Tensor, inputs: Sequence[Tensor], reducer: Reducer) -> None:
    """`inputs[q]` of all members, reduced, is the output of rank q."""
    width, rank = output.element_size(), rounds.rank
    most = rounds.room(width, rounds.size)
    for begin, end in pieces(output.numel(), most, width):
        slot, length = rounds.begin(output.dtype), end - begin
        for q in rounds.others:
            slot[q * most : q * most + length].copy_(inputs[q][begin:end])
        rounds.publish(share_of(most * width, length * width))
        slots, mine = rounds.meet(output.dtype), slice(rank * most, rank * most + length)
        reducer.fold(
            [inputs[rank][begin:end] if p == rank else slots[p][mine] for p in range(rounds.size)], output[begin:end]
        )
    rounds.check()
