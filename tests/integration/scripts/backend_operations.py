"""Every operation of torch.distributed on the backend, against what it must come to.

    python backend_operations.py NUM_RANKS plain|SHM|TCP

plain: the group makes its own fabric; SHM and TCP: it is given one, as a session gives it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import backend_ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

from everstep.comms.group import make_group

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def values(rank: int, length: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: their sums are exact."""
    return (torch.arange(length) % 3 + rank + 1).to(dtype)


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(a, b), (a, b)


def reductions(rank: int, size: int) -> None:
    everybody = torch.stack([values(r) for r in range(size)])
    wanted = {
        dist.ReduceOp.SUM: everybody.sum(0),
        dist.ReduceOp.AVG: everybody.mean(0),
        dist.ReduceOp.MIN: everybody.amin(0),
        dist.ReduceOp.MAX: everybody.amax(0),
        dist.ReduceOp.PRODUCT: everybody.prod(0),
    }
    for op, result in wanted.items():
        x, y = values(rank), values(rank)
        dist.all_reduce(x, op)
        work = dist.all_reduce(y, op, async_op=True)
        work.wait()
        assert work.is_completed()
        same(x, result)
        same(y, result)
        z = values(rank)
        dist.reduce(z, size - 1, op)
        same(z, result if rank == size - 1 else values(rank))
    for dtype in DTYPES:
        x = values(rank, 100_003, dtype)
        dist.all_reduce(x)
        same(x, sum(values(r, 100_003, dtype) for r in range(size)))
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    same(bits, torch.tensor([(1 << size) - 1]))
    spiral = torch.view_as_complex(values(rank, 6).view(3, 2))
    dist.all_reduce(spiral)
    same(torch.view_as_real(spiral).flatten(), everybody.sum(0))


def moves(rank: int, size: int) -> None:
    for root in (0, size - 1):
        x = values(rank)
        dist.broadcast(x, root)
        same(x, values(root))
        parts = [torch.empty(6) for _ in range(size)] if rank == root else None
        dist.gather(values(rank), parts, root)
        for r, part in enumerate(parts or ()):
            same(part, values(r))
        x = torch.empty(6)
        dist.scatter(x, [values(r) for r in range(size)] if rank == root else None, root)
        same(x, values(rank))
    parts = [torch.empty(6) for _ in range(size)]
    dist.all_gather(parts, values(rank))
    together = torch.empty(size, 6)
    dist.all_gather_single(together, values(rank))
    for r in range(size):
        same(parts[r], values(r))
        same(together[r], values(r))
    everybody = [torch.stack([values(r + q) for q in range(size)]) for r in range(size)]
    x, y = torch.empty(6), torch.empty(6)
    dist.reduce_scatter(x, list(everybody[rank].unbind(0)))
    dist.reduce_scatter_single(y, everybody[rank], op=dist.ReduceOp.AVG)
    same(x, sum(everybody)[rank])
    same(y, sum(everybody)[rank] / size)
    dist.barrier()
    dist.barrier(async_op=True).wait()


def all_to_all(rank: int, size: int) -> None:
    outputs = [torch.empty(q + 1) for q in range(size)]
    dist.all_to_all(outputs, [torch.full((rank + 1,), float(q)) for q in range(size)])
    for q, output in enumerate(outputs):
        same(output, torch.full((q + 1,), float(rank)))
    x = torch.empty(size, 2)
    dist.all_to_all_single(x, torch.arange(size).repeat_interleave(2).view(size, 2) + 10.0 * rank)
    same(x[:, 0], torch.arange(size) * 10.0 + rank)
    total = sum(q + 1 for q in range(size))
    x = torch.empty(total)
    sent = torch.arange(size).repeat_interleave(rank + 1).float()
    dist.all_to_all_single(x, sent, [q + 1 for q in range(size)], [rank + 1] * size)
    same(x, torch.full((total,), float(rank)))


def objects(rank: int, size: int) -> None:
    said: list[object] = [None] * size
    dist.all_gather_object(said, {"rank": rank})
    assert said == [{"rank": r} for r in range(size)]
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, src=1)
    assert box == ["from 1"]
    gathered: list[object] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert gathered in (None, list(range(size)))
    got: list[object] = [None]
    dist.scatter_object_list(got, list("abcdefgh"[:size]) if rank == 0 else None, 0)
    assert got == ["abcdefgh"[rank]]


def messages(rank: int, size: int) -> None:
    """A ring of 4 MB both ways at once, and tags out of order."""
    after, before = (rank + 1) % size, (rank - 1) % size
    big = torch.full((1 << 20,), float(rank))
    forth, back = torch.empty_like(big), torch.empty_like(big)
    ops = [dist.P2POp(dist.isend, big, peer) for peer in (after, before)]
    ops += [dist.P2POp(dist.irecv, into, peer) for into, peer in ((forth, before), (back, after))]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if size > 2:
        same(forth, torch.full_like(big, before))
        same(back, torch.full_like(big, after))
    if rank == 0:
        dist.send(torch.tensor([5]), 1, tag=5)
        dist.send(torch.tensor([3]), 1, tag=3)
    elif rank == 1:
        x, y = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        works = [dist.irecv(x, 0, tag=3), dist.irecv(y, 0, tag=5)]
        for work in reversed(works):
            work.wait()
        assert (int(x), int(y)) == (3, 5)


def coalesced(rank: int, size: int) -> None:
    everybody = sum(values(r) for r in range(size))
    xs = [values(rank), values(rank).double(), values(rank)]
    with coalescing():
        for x in xs:
            dist.all_reduce(x)
    for x in xs:
        same(x.float(), everybody)
    outs = [torch.empty(size, 6) for _ in range(2)]
    with coalescing(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_single(out, values(rank))
    manager.wait()
    same(outs[1][size - 1], values(size - 1))
    shares = [torch.empty(1) for _ in range(2)]
    with coalescing():
        for share in shares:
            dist.reduce_scatter_single(share, values(rank, size))
    same(shares[1][0], sum(values(r, size) for r in range(size))[rank])
    x, y = values(rank), values(rank)
    with coalescing(device=torch.device("cpu"), async_ops=True) as manager:
        dist.distributed_c10d._get_default_group().allreduce([x])
        dist.distributed_c10d._get_default_group().broadcast(y, 1)
    manager.wait()
    same(x, everybody)
    same(y, values(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lists = [[torch.empty(6), torch.empty(2)] for _ in range(size)]
        dist.all_gather_coalesced(lists, [values(rank), values(rank, 2)])
    same(lists[size - 1][1], values(size - 1, 2))


def functional(rank: int, size: int) -> None:
    group = dist.group.WORLD
    everybody = sum(values(r) for r in range(size))
    same(funcol.all_reduce(values(rank), "sum", group) + 0, everybody)
    same(funcol.all_reduce(values(rank), "avg", group) + 0, everybody / size)
    same(funcol.all_gather_single(values(rank), 0, group).view(size, 6)[1] + 0, values(1))
    reduced = sum(values(r, size) for r in range(size))[rank : rank + 1]
    same(funcol.reduce_scatter_single(values(rank, size), "sum", 0, group) + 0, reduced)
    same(funcol.broadcast(values(rank), 1, group) + 0, values(1))
    column = torch.stack([values(r, size)[rank] for r in range(size)])
    same(funcol.all_to_all_single(values(rank, size), None, None, group) + 0, column)
    for x in funcol.all_reduce_coalesced([values(rank), values(rank)], "max", group):
        same(x + 0, values(size - 1))
    leaf = values(rank).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_nn.all_reduce(leaf).sum().backward()
    same(leaf.grad, torch.full((6,), float(size)))


def subgroups(rank: int, size: int) -> None:
    """Overlapping ones, made in one order; and some that have no member in common."""
    pairs = {(a, b): dist.new_group([a, b]) for a in range(size) for b in range(a + 1, size)}
    for pair, group in pairs.items():
        if rank in pair:
            x = values(rank)
            dist.all_reduce(x, group=group)
            same(x, sum(values(r) for r in pair))
            assert dist.get_rank(group) == pair.index(rank) and dist.get_world_size(group) == 2
            dist.broadcast(x, pair[1], group=group)
    own = among([[r] for r in range(size)], rank)
    halves = [[r for r in range(size) if r % 2 == rest] for rest in range(2)]
    half, local = halves[rank % 2], among(halves, rank)
    works = []
    for group, members in ((own, [rank]), (local, half), (None, range(size))):
        x = values(rank, 50_000)
        works.append((x, dist.all_reduce(x, group=group, async_op=True), members))
    for x, work, members in reversed(works):
        work.wait()
        same(x, sum(values(r, 50_000) for r in members))
    dist.destroy_process_group(local)


def among(parts: list[list[int]], rank: int) -> dist.ProcessGroup:
    """The group of our part: made by its members alone or, in a session, by all members in one order."""
    if dist.group.WORLD._world.fixed:
        return dist.new_group(next(part for part in parts if rank in part), use_local_synchronization=True)
    groups = [dist.new_group(part) for part in parts]
    return next(group for group, part in zip(groups, parts, strict=True) if rank in part)


def modes(rank: int, size: int) -> None:
    """Tensors of inference mode, modes that would catch the work's own operations, and tensors with holes."""
    everybody = sum(values(r) for r in range(size))
    with torch.inference_mode():
        x = values(rank)
        dist.all_reduce(x)
        y = values(rank)
        dist.all_reduce(y, async_op=True).wait()
    same(x.clone(), everybody)
    same(y.clone(), everybody)
    z = values(rank)
    with torch.device("meta"):
        dist.all_reduce(z)
    same(z, everybody)
    holes = torch.zeros(6, 2)
    holes[:, 0] = values(rank)
    dist.all_reduce(holes[:, 0])
    same(holes, torch.stack([everybody, torch.zeros(6)], 1))
    parameter = torch.nn.Parameter(values(rank))
    dist.all_reduce(parameter)
    same(parameter.detach(), everybody)
    if rank == 0:
        dist.send(parameter, 1)
    elif rank == 1:
        received = torch.nn.Parameter(torch.zeros(6, 2))[:, 1]
        dist.recv(received, 0)
        same(received.detach(), everybody)


def order(rank: int, size: int) -> None:
    """What is waited for at once comes after what was begun before; and works end while their caller does not look."""
    xs = [values(rank, 30_000) for _ in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    dist.all_reduce(xs[0])
    assert all(work.is_completed() for work in works)
    same(xs[0], size * sum(values(r, 30_000) for r in range(size)))
    x = values(rank)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    same(future.wait(), 2 * sum(values(r) for r in range(size)))
    assert work.is_success() and work.exception() is None and work.result()[0] is x


def errors(rank: int, size: int) -> None:
    told = []
    for call in (
        lambda: dist.all_reduce(values(rank), dist._make_nccl_premul_sum(2.0)),
        lambda: dist.recv(values(rank)),
        lambda: dist.all_reduce(values(rank).to_sparse()),
        lambda: dist.all_reduce(values(rank, 5 + rank % 2)),  # differs: all are told, and go on
        lambda: dist.all_reduce(torch.ones(1, dtype=torch.int64), dist.ReduceOp.AVG),
    ):
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            told.append(f"{type(error).__name__} {error}")
    kinds = ["NotImplementedError"] * 3 + ["ValueError"] * 2
    assert [text.split()[0] for text in told] == kinds, told
    assert "PREMUL_SUM" in told[0] and "source" in told[1] and "sparse" in told[2]
    other = torch.empty(6)
    if rank == 0:
        work = dist.irecv(other, 1)
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=0.1))
        except dist.DistBackendError:
            assert 0.1 <= time.monotonic() - began < 2
        else:
            raise AssertionError("nothing was sent")
    dist.barrier()
    if rank == 1:
        dist.send(values(1), 0)
    elif rank == 0:
        work.wait()
        same(other, values(1))


CHECKS: tuple[Callable[[int, int], None], ...] = (
    modes, reductions, moves, all_to_all, objects, messages, coalesced, functional, subgroups, order, errors
)  # fmt: skip


def check(rank: int, size: int, mode: str, folder: str) -> None:
    if mode == "plain":
        backend_ranks.init("everstep", rank, size, folder)
    else:
        fabric, seats = backend_ranks.fabric_of(rank, size, folder, mode == "SHM")
        backend_ranks.enter(fabric, 1, seats)
        make_group(fabric)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    for each in CHECKS:
        each(rank, size)
        dist.barrier()
    dist.destroy_process_group()
    if mode != "plain":
        fabric.close()


def main() -> None:
    size, mode = int(sys.argv[1]), sys.argv[2]
    sys.exit(backend_ranks.fails(size, lambda rank, folder: check(rank, size, mode, folder)))


if __name__ == "__main__":
    main()
