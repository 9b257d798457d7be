"""The small GPT of train_gpt.py on a session: a worker dies, the others lose one interrupted step.

Compare train_gpt.py: no process group, no DistributedDataParallel, no checkpoint code for restarts, no seed per rank.
The model, the text and the learning rate are the same.

    python examples/train_gpt_session.py                                     # alone, a world of one
    everstep run --nproc-per-node 4 examples/train_gpt_session.py            # four members
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from train_gpt import GPT, learning_rate, parse_args, read_text, sample_text

import everstep


class Windows(Dataset[Tensor]):
    """Every stretch of context + 1 bytes of the text is a sample."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index : index + self.context + 1]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    rows = rows.long()
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: GPT, windows: Windows, batch: int) -> float:
    model.eval()
    dice = torch.Generator().manual_seed(0)
    starts = torch.randint(len(windows), (4, batch), generator=dice).tolist()
    total = sum(float(loss_of(model, torch.stack([windows[i] for i in row]))) for row in starts)
    model.train()
    return total / len(starts)


def train(args: argparse.Namespace, run: everstep.Session) -> GPT:
    torch.manual_seed(args.seed)
    text = read_text(args)
    train_text, held_out = text.tensor_split([len(text) * 9 // 10])
    model = GPT(args).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = everstep.Batches(Windows(train_text, args.context), global_batch=args.batch, seed=args.seed)
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(args.steps):
        began = time.perf_counter()
        with step:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step.index, args)
            loss = torch.zeros(1)
            for rows in step.share(batches):
                part = loss_of(model, rows.to(run.device))
                part.backward()
                loss += part.detach().cpu() * len(rows) / args.batch
            loss = run.sum(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss=loss, step_s=time.perf_counter() - began)
        if step.committed and (step.index + 1) % args.eval_every == 0 and run.role == 0:
            print(f"held out {evaluate(model, Windows(held_out, args.context), args.batch):.3f}", flush=True)
    return model


def main() -> None:
    args = parse_args()
    with everstep.session(seed=args.seed, log_file=args.log_file) as run:
        model = train(args, run)
        if run.role == 0:
            text = sample_text(model, "def ", args.sample, args.seed, run.device)
            print("-" * 40, text, "-" * 40, sep="\n", flush=True)


if __name__ == "__main__":
    main()
