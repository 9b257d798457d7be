"""A session's steps in blocks, replicas compared in every second one; or a bit of the last rank flips now and then.

corruption_steps.py blocks FOLDER WIDTH LAYERS BLOCK BLOCKS    rank0.json: seconds of each step, whether it compared
corruption_steps.py audits FOLDER WIDTH LAYERS STEPS           rank0.json: the same of audits, every AUDITED steps
corruption_steps.py flips FOLDER WIDTH LAYERS STEPS AT...      rank0.json: interval; AT: steps before which it flips
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import everstep

BATCH = 16  # over all members
WARM = 20
AUDITED = 10
RANK = int(os.environ["RANK"])


class Loop:
    def __init__(self, width: int, layers: int, saving: everstep.Saving) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        data = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1))
        self.batches = everstep.Batches(data, global_batch=BATCH, shuffle=False)
        self.run = everstep.session(checkpoints=saving)
        self.run.protect(model=self.model, optimizer=self.optimizer)

    def make(self, step: everstep.train.session.Step) -> None:  # type: ignore[name-defined]
        with step:
            for share in step.share(self.batches):
                (self.model(share) - share).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def blocks(folder: Path, width: int, layers: int, block: int, count: int) -> None:
    """The same processes all along, so that nothing but the comparisons differs between two blocks in a row."""
    loop = Loop(width, layers, everstep.Saving(memory_every=0))
    times: list[float] = []
    cpu: list[float] = []  # of the main thread, in which replicas are compared
    compared: list[bool] = []
    with loop.run as run:
        steps = run.steps(WARM + block * count)
        for _ in range(WARM):
            loop.make(next(steps))
        for number in range(count):
            run._guard._every = 0 if number % 2 else None
            for _ in range(block):
                began, used = time.perf_counter(), time.thread_time()
                step = next(steps)
                loop.make(step)
                times.append(time.perf_counter() - began)
                cpu.append(time.thread_time() - used)
                compared.append(run._guard._pace._last == step.index)
        tell(folder, {"times": times, "cpu": cpu, "compared": compared, "interval": run._guard.interval})


def audits(folder: Path, width: int, layers: int, num_steps: int) -> None:
    """A step that is computed twice comes twice out of the loop. The interval is what it would be by default."""
    loop = Loop(width, layers, everstep.Saving(memory_every=0))
    times, cpu, audited = [0.0], [0.0], [False]
    with loop.run as run:
        run._guard._every, pace = 0, run._guard.audit._pace
        pace._every = AUDITED
        for step in run.steps(WARM + num_steps):
            began, used = time.perf_counter(), time.thread_time()
            loop.make(step)
            times[-1] += time.perf_counter() - began
            cpu[-1] += time.thread_time() - used
            audited[-1] = audited[-1] or not step.committed
            if step.committed:
                times, cpu, audited = [*times, 0.0], [*cpu, 0.0], [*audited, False]
        pace._every = None
        told = {"times": times[WARM:-1], "cpu": cpu[WARM:-1], "compared": audited[WARM:-1], "interval": pace.interval}
        tell(folder, told)


def flips(folder: Path, width: int, layers: int, num_steps: int, *at: int) -> None:
    loop, due = Loop(width, layers, everstep.Saving()), set(at)
    weights = [p for p in loop.model.parameters() if p.dim() > 1]
    with loop.run as run:
        for step in run.steps(num_steps):
            if step.index in due and run.role == run.num_members - 1:
                due.remove(step.index)
                with torch.no_grad():
                    weights[step.index % layers].view(-1).view(torch.int32)[step.index] ^= 1
            loop.make(step)
        tell(folder, {"interval": run._guard.interval})


def tell(folder: Path, found: object) -> None:
    (folder / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    what = {"blocks": blocks, "audits": audits, "flips": flips}[sys.argv[1]]
    what(Path(sys.argv[2]), *(int(text) for text in sys.argv[3:]))
