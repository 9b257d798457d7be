"""A session that reads two bad batches: at step 60 targets a hundred times too large, at step 80 inputs that are no
numbers. Without an end; one member logs the loss and a learning rate."""

from __future__ import annotations

import time

import torch

import everstep


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    targets = inputs.sum(dim=1, keepdim=True) * (100 if step == 60 else 1)
    return inputs * (float("nan") if step == 80 else 1), targets


def main() -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with everstep.session(seed=1, log_file="metrics.jsonl") as run:
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(10**6):
            with step:
                inputs, targets = batch(step.index)
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.005)
            run.log(loss=loss, lr=1e-6 * (step.index % 10))


if __name__ == "__main__":
    main()
