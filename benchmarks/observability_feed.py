"""What it costs that metrics and the workers' own times get into the journal: of a step, an agent, a controller.

    python benchmarks/observability_feed.py [--quick | --full] [--json]

Eight metrics in each step; 1,000 workers on 125 nodes with heartbeats of 0.5 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from harness import Claim, arguments, median, say, show

import everstep
from everstep.control.job import Job
from everstep.control.ticks import Ticks
from everstep.core import events as e
from everstep.core.logged import Logged, decode
from everstep.core.page import Page
from everstep.core.types import JobSpec, NodeProgress, Phase, WorkerProgress
from everstep.core.work import StepWork
from everstep.probe import boot
from everstep.probe.values import Values

METRICS = {f"metric_{number}": 1.234567890123 * number for number in range(8)}
NODES, SLOTS, HEARTBEAT_S = 125, 8, 0.5
WARM = 20  # steps
DAYS = 30


class Nowhere:
    """A sink that costs nothing, so that only ours is measured."""

    def write(self, step: int, values: dict[str, float], epoch: int = 0) -> None: ...

    def close(self) -> None: ...


def seconds_of(call: Callable[[], object], times: int) -> float:
    """Median of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            call()
        rounds.append((time.perf_counter() - began) / times)
    return median(rounds)


def one_call(times: int) -> list[Claim]:
    page, values = Page.create("benchmark"), Values()
    steps = iter(range(1, 1 << 40))
    put_s = seconds_of(lambda: values.tell(page, 1, next(steps), METRICS), times)
    read_s = seconds_of(lambda: decode(page.values()), times)
    page.close()
    return [
        Claim("run.log for the journal, 8 metrics", put_s * 1e6, "microseconds", bar="<= 20", holds=put_s <= 20e-6),
        Claim("the agent's look at them, each heartbeat", read_s * 1e6, "microseconds"),
    ]


def steps(count: int) -> Claim:
    """Measured where it happens, in the steps of a session: comparing steps with and without would show the noise."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch, logged = torch.randn(32, 512), boot.logged
    inside: list[float] = []

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        logged(*args)
        inside.append(time.perf_counter() - began)

    boot.logged = timed
    whole: list[float] = []
    with everstep.session(log_file=Nowhere()) as run:
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(count):
            began = time.perf_counter()
            with step:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            run.log(**METRICS)
            whole.append(time.perf_counter() - began)
    boot.logged = logged
    share = 100 * median(inside[WARM:]) / median(whole[WARM:])
    text = f"of a step of {median(whole[WARM:]) * 1e3:.1f} ms with a log"
    return Claim(text, share, "%", bar="<= 0.5 %", holds=share <= 0.5)


def heartbeats(at: int) -> list[NodeProgress]:
    def worker(rank: int) -> WorkerProgress:
        work = tuple(StepWork(at * 5 + k, 0.0987654321) for k in range(5))
        logged = Logged(1, at * 5, METRICS) if rank == 0 else None
        return WorkerProgress(
            rank, rank % SLOTS, at * 5, at * 5, Phase.TRAIN, 0.0, 0.0, 0.0, rss_bytes=12_345_678_901 + rank,
            work=work, logged=logged, kept_step=at * 5 - 3,
        )  # fmt: skip

    ranks = range(0, NODES * SLOTS, SLOTS)
    return [NodeProgress(f"n{first}", "a", 1, 0.0, tuple(worker(first + k) for k in range(SLOTS))) for first in ranks]


def controller(seconds: int) -> list[Claim]:
    ticks, job = Ticks(), Job(JobSpec("benchmark"))
    spent_s, written = 0.0, 0
    for beat in range(int(seconds / HEARTBEAT_S)):
        now, messages = beat * HEARTBEAT_S, heartbeats(beat)
        began = time.perf_counter()
        records: list[e.Record] = []
        for message in messages:
            records += ticks.saw(message, job, now)
        spent_s += time.perf_counter() - began
        entries = (e.Entry(beat, now, 1.7e9 + now, "benchmark", 1, record) for record in records)
        written += sum(len(msgspec.json.encode(entry)) + 1 for entry in entries)
    month = written / seconds * DAYS * 86400
    share = spent_s / seconds
    return [
        Claim("of a core for 1,000 workers", share * 100, "%", bar="<= 5 %", holds=share <= 0.05),
        Claim(f"journal of {DAYS} days, before it is packed", month / 1e9, "GB"),
    ]


def main() -> None:
    args = arguments(__doc__ or "")
    say("one call")
    claims = one_call(20_000)
    page = Page.create("benchmark")
    boot.install(page)
    say("steps")
    claims.append(steps(1000 if args.full else 200))
    boot.leave()
    say("1,000 workers")
    claims += controller(600 if args.full else 130)
    show(claims, args.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
