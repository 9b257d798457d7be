"""FSDP2: `fully_shard` on each layer and the root, with distributed checkpoints of sharded state.

Stands for sharded trainers which save with `torch.distributed.checkpoint`: every rank writes its shards, and the
newest folder whose `.metadata` (written last) is there is the one to resume from.

    torchrun --standalone --nproc-per-node 2 examples/public/fsdp2.py --steps 60 --folder fsdp2_checkpoints
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS, SYMBOLS, LENGTH = 64, 3, 32, 32


class Model(nn.Module):
    """A small transformer which learns to tell the symbol that came three places before."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.symbols(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.head(h)


def batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randint(SYMBOLS, (16, LENGTH), generator=dice).to(device)
    return x, x.roll(3, dims=1)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step that was written to its end."""
    whole = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(whole, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        for path in folder.glob("step-*"):
            if int(path.name.removeprefix("step-")) < step:
                shutil.rmtree(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("fsdp2_checkpoints"))
    args = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(kind, (world,))
    torch.manual_seed(0)
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done, path = 0, newest(args.folder)
    dist.barrier()  # all have looked before rank 0 may remove an old one
    if path is not None:
        done = load(path, model, optimizer)
        print(f"rank {rank} resumes at step {done}", flush=True)
    for step in range(done, args.steps):
        x, y = batch(step, rank, device)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.folder, step + 1, model, optimizer)
    with torch.no_grad():
        x, y = batch(10**6, rank, device)
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    dist.all_reduce(total)
    if rank == 0:
        print(f"final loss {total.item() / world:.6f}", flush=True)
    dist.barrier()  # torch 2.13 with gloo aborts now and then in a rank that ends while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
