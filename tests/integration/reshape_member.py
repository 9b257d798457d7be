"""One of two processes which load an image that was saved alone, train it as FSDP2 shards over gloo, and save theirs.

python reshape_member.py RANK FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from images import BytesSource, take
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from everstep.state.image import decode, encode
from everstep.state.restore import load

NUM_STEPS = 3


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 15), nn.Sequential(nn.Tanh(), nn.Linear(15, 16)), nn.Linear(16, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(objects: dict[str, Any], first: int) -> list[float]:
    """Losses of some steps, each on samples of its own."""
    losses = []
    for step in range(first, first + NUM_STEPS):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss: Tensor = (objects["model"](inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def write(folder: Path, name: str, source: BytesSource) -> None:
    (folder / f"{name}.index").write_bytes(encode(source.index))
    (folder / f"{name}.data").write_bytes(source.data)


def read(folder: Path, name: str) -> BytesSource:
    data = bytearray((folder / f"{name}.data").read_bytes())
    return BytesSource(decode((folder / f"{name}.index").read_bytes()), data)


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = net(rank)
    fully_shard(model[1])
    fully_shard(model)
    objects = {"model": model, "optimizer": adamw(model)}
    load(objects, [read(folder, "alone")])
    losses = train(objects, NUM_STEPS)
    write(folder, f"shard{rank}", take(objects, rank, 2))
    whole = [parameter.full_tensor().detach() for parameter in model.parameters()]
    state = [value["exp_avg_sq"].full_tensor() for value in objects["optimizer"].state.values()]
    if rank == 0:
        torch.save({"whole": whole, "state": state, "losses": losses}, folder / "told.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
