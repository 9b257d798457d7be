"""One of several processes which train the same model twice, with DistributedDataParallel over gloo and with a Reducer
over the fabric, and compare the gradients of every step: `python reducer_ranks.py RANK SIZE STORE_FILE`.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.core.formation import Formation, Seat
from everstep.train.reducer import Reducer

TOKEN = b"0123456789abcdef" * 4


def enter(rank: int, size: int) -> Fabric:
    fabric = Fabric(f"node/{rank}#0", "host", TOKEN)
    endpoints: list[str] = [""] * size
    dist.all_gather_object(endpoints, fabric.endpoint)
    seats = tuple(Seat(f"node/{r}#0", "node", "host", endpoint) for r, endpoint in enumerate(endpoints))
    formation = Formation(1, seats, abort=False, floor=0)
    fabric.prepare(formation)
    fabric.switch(formation)
    return fabric


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 50))


def backward(net: nn.Module, tokens: Tensor) -> None:
    nn.functional.cross_entropy(net(tokens), tokens).backward()


def main(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    fabric = enter(rank, size)
    mine, theirs = model(), DistributedDataParallel(model())
    reducer = Reducer(mine.named_parameters(), fabric, Communicator(fabric), bucket_bytes=50_000)
    for step in range(4):
        tokens = torch.randint(50, (8,), generator=torch.Generator().manual_seed(step * size + rank))
        reducer.begin(1 / size)
        backward(mine, tokens)
        assert reducer.finish()
        backward(theirs, tokens)
        for ours, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, other.grad, rtol=3e-7, atol=3e-9)
            everybody = [torch.empty_like(ours) for _ in range(size)]
            dist.all_gather(everybody, ours.grad)
            assert all(torch.equal(everybody[0], gradient) for gradient in everybody)
            ours.grad = other.grad = None
    reducer.close()
    dist.barrier()
    fabric.close()
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
