"""A model sharded by FSDP2, one replica: `checkpoint_sharded.py FOLDER WIDTH LAYERS EVERY`, of a benchmark.

Kept in the nodes' memory every so many steps, and nowhere else. Writes a line for each step that it committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from downtime_work import Notes
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep

BATCH = 4
SHARDS = 2


def build(width: int, layers: int) -> nn.Sequential:
    """Its values cost nothing: a script whose model will be loaded skips its initialisation, or should."""
    blocks = [nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(layers)]
    for block in blocks:
        nn.init.constant_(block.weight, 1 / width)
    return nn.Sequential(*(nn.Sequential(block, nn.Tanh()) for block in blocks))


def main(folder: Path, width: int, layers: int, every: int) -> None:
    torch.set_num_threads(1)
    data = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1))
    notes = Notes(folder)
    with everstep.session(checkpoints=everstep.Saving(memory_every=every)) as run:
        mesh = run.mesh(shards=SHARDS)
        model = build(width, layers)
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(1_000_000):
            with step:
                role, members = run.role, run.num_members
                (model(data) - data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed:
                notes.committed(role, members, step.index + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
