"""Steps of a small model in a session, without an end: what a scenario's faults strike (benchmarks/parity.py).

Nothing here fails by itself. A file state-PID says where in this process's memory a part of the model's state is that
no step changes, so that a bit of it can be flipped from outside.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import everstep

NAP_S = 0.002  # a step is many of them: who is stopped half of the time then takes twice as long


class Scaled(nn.Module):
    """`scale` is no parameter of the optimizer's, but of every gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x * self.scale)
        return y


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--save-every", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = Scaled()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    inputs = torch.randn(240, 16, generator=torch.Generator().manual_seed(3))
    batches = everstep.Batches((inputs, inputs.sum(dim=1, keepdim=True)), global_batch=12, micro_batch=12, seed=5)
    saving = everstep.Saving(memory_every=args.save_every)
    with everstep.session(seed=11, checkpoints=saving, check_every=args.save_every) as run:
        run.protect(model=model, optimizer=optimizer)
        Path(f"state-{os.getpid()}").write_text(str(model.scale.data_ptr()))
        for step in run.steps(10**6):
            with step:
                for x, y in step.share(batches):
                    for _ in range(round(args.step_s / NAP_S)):
                        time.sleep(NAP_S)
                    nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
