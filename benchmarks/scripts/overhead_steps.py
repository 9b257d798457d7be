"""Steps of a plain model, by DDP over gloo or by a session: the last line of output has medians as JSON (rank 0)."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

MODE, FOLDER = sys.argv[1], Path(sys.argv[5])
WIDTH, LAYERS, STEPS = (int(text) for text in sys.argv[2:5])
BATCH = 16  # over all members
WARM = 5


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def pss_bytes() -> int:
    """This process's memory, what is shared counted in parts."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))


def finish(name: str, times: list[float], cpu_s: float) -> None:
    steps = times[WARM:]
    found = {"step_s": statistics.median(steps), "cpu_s": cpu_s / len(steps), "pss_bytes": pss_bytes()}
    (FOLDER / f"{name}.json").write_text(json.dumps(found))


def by_ddp(data: torch.Tensor) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times, cpu = [], 0.0
    share = data[rank * BATCH // world : (rank + 1) * BATCH // world]
    for step in range(WARM + STEPS):
        if step == WARM:
            cpu = time.process_time()
        began = time.perf_counter()
        (model(share) - share).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    finish(f"rank{rank}", times, time.process_time() - cpu)
    dist.barrier()
    dist.destroy_process_group()


def by_session(data: torch.Tensor) -> None:
    import everstep

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = everstep.Batches(data, global_batch=BATCH, shuffle=False)
    times, cpu = [], 0.0
    with everstep.session() as run:
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(WARM + STEPS):
            if step.index == WARM:
                cpu = time.process_time()
            began = time.perf_counter()
            with step:
                for share in step.share(batches):
                    (model(share) - share).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        finish(f"rank{os.environ['RANK']}", times, time.process_time() - cpu)


if __name__ == "__main__":
    torch.set_num_threads(1)
    samples = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    by_ddp(samples) if MODE == "ddp" else by_session(samples)
