"""Train small models with torch's own ways of being parallel, on gloo and on everstep in turn, and compare.

    python backend_models.py SCENARIO NUM_RANKS...

Each rank of each size prints what differed at most, as one line of JSON; 0.0 means that every bit is the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import backend_ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
WIDTH = 32


def mlp(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(depth)]
    return nn.Sequential(*layers)


def batches(part: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of this part of the data."""
    for step in range(STEPS):
        dice = torch.Generator().manual_seed(1000 * step + part)
        yield torch.randn(8, WIDTH, generator=dice), torch.randn(8, WIDTH, generator=dice)


def train(model: nn.Module, part: int) -> list[Tensor]:
    """The losses, and the parameters, whole, at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches(part):
        loss = (model(x) - y).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*map(whole, losses), *(whole(p) for p in model.parameters())]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def ddp(rank: int, size: int) -> list[Tensor]:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(batches(rank)):
        if step % 2 == 0:  # accumulate two batches
            with wrapped.no_sync():
                (wrapped(x) - y).square().mean().backward()
        else:
            (wrapped(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [value.detach().clone() for value in model.state_dict().values()]


def fsdp(rank: int, size: int, mesh: DeviceMesh | None = None) -> list[Tensor]:
    model = mlp()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), rank)


def hsdp(rank: int, size: int) -> list[Tensor]:
    """Two replicas, each in shards."""
    return fsdp(rank, size, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))


def tensor(rank: int, size: int) -> list[Tensor]:
    """Tensor parallel in two dimensions of the mesh: data by FSDP, tensors by DTensor, the sequence too."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.LayerNorm(WIDTH), *mlp(2))
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
        "0": SequenceParallel(sequence_dim=0),
        "1.0": ColwiseParallel(input_layouts=Shard(0)),
        "1.2": RowwiseParallel(),
        "2.0": ColwiseParallel(),
        "2.2": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tensor"], plan)
    if size > 2:
        fully_shard(model, mesh=mesh["data"])
    return train(model, rank // 2) + placements(mesh)


def placements(mesh: DeviceMesh) -> list[Tensor]:
    """A tensor that changes its placement: all-to-all, all-gather, reduce-scatter."""
    full = torch.arange(64.0).view(8, 8)
    by_row = distribute_tensor(full, mesh["tensor"], [Shard(0)])
    by_column = by_row.redistribute(placements=[Shard(1)])
    product = (by_column @ by_column.redistribute(placements=[Shard(0)])).redistribute(placements=[Shard(0)])
    return [by_column.to_local().clone(), product.redistribute(placements=[Replicate()]).to_local().clone()]


def pipeline(rank: int, size: int) -> list[Tensor]:
    """1F1B in two stages; with more ranks several pipelines, whose gradients are averaged."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "pipe"))
    index, layers = rank % 2, mlp(4)
    part = nn.Sequential(*layers[2 * index : 2 * index + 2])
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
    losses: list[Tensor] = []
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for x, y in batches(rank // 2):
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        for parameter in part.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, group=mesh["data"].get_group())
        optimizer.step()
        optimizer.zero_grad()
    return [*(p.detach().clone() for p in part.parameters()), *(loss.detach().clone() for loss in losses)]


def checkpoint(rank: int, size: int) -> list[Tensor]:
    """What one sharded model saved another one loads, into another split: from shards by two into shards by all."""
    names = ("replicate", "shard")
    model = mlp()
    trained = train(fully_shard(model, mesh=init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=names)), rank)
    folder = Path(str(shared(tempfile.mkdtemp() if rank == 0 else "")))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    fresh = fully_shard(mlp())
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    loaded = [whole(p) for p in fresh.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(loaded, trained[STEPS:], strict=True))
    return loaded


def shared(value: object) -> object:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


SCENARIOS: dict[str, Callable[[int, int], list[Tensor]]] = {
    each.__name__: each for each in (ddp, fsdp, hsdp, tensor, pipeline, checkpoint)
}


HELD: list[Any] = []  # torch 2.13 may deadlock when a group of gloo is freed right behind its last operation


def on(backend: str, scenario: str, rank: int, size: int, folder: str) -> list[Tensor]:
    backend_ranks.init(backend, rank, size, folder)
    assert dist.get_backend() == backend
    values = SCENARIOS[scenario](rank, size)
    dist.barrier()
    HELD.append(dist.group.WORLD)
    dist.destroy_process_group()
    return values


def compare(scenario: str, rank: int, size: int, folder: str) -> None:
    theirs, ours = (on(backend, scenario, rank, size, folder) for backend in ("gloo", "everstep"))
    pairs = list(zip(theirs, ours, strict=True))
    line = {
        "size": size,
        "same": all(torch.equal(a, b) for a, b in pairs),
        "worst": max(float((a - b).abs().max()) for a, b in pairs),
        "moved": max(float(a.abs().max()) for a in theirs) > 0,
    }
    sys.stdout.write(json.dumps(line) + "\n")


def main() -> None:
    scenario, *sizes = sys.argv[1:]
    for size in map(int, sizes):
        if backend_ranks.fails(size, lambda rank, folder, size=size: compare(scenario, rank, size, folder)):
            sys.exit(1)


if __name__ == "__main__":
    main()
