"""What a profile costs the worker that is sampled (`everstep profile`), while it is: nothing runs before and after.

    python benchmarks/sampling.py [--quick | --full] [--json]

Turns of a second with and without, in one process: steps of torch (some 10 ms, many layers), and
of Python alone, which never gives the interpreter's lock away by itself. The cost is the main thread's own time for a
step, and the sampler's share of a core, which the main thread waits for.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from harness import Claim, arguments, show
from torch import nn

from everstep.core.page import SAMPLE_SIGNAL, Page, Word
from everstep.core.sampled import Sampled
from everstep.probe import sampler

TURN_S = 1.0


def torch_step() -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(32, 256)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def python_step() -> Callable[[], None]:
    def step() -> None:
        total = 0
        for number in range(200_000):
            total += number & 7

    return step


def turn(step: Callable[[], None]) -> tuple[float, float]:
    """The main thread's own time and the wall time of a step."""
    count, began, own = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < TURN_S:
        step()
        count += 1
    return (time.thread_time() - own) / count, (time.perf_counter() - began) / count


def cost(name: str, step: Callable[[], None], turns: int, threads: bool) -> list[Claim]:
    page = Page.create("bench")
    own: dict[bool, list[float]] = {False: [], True: []}
    wall: dict[bool, list[float]] = {False: [], True: []}
    share = []
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        path = Path(folder) / "sampled"
        sampler.install(page, str(path))
        turn(step)  # warm
        for number in range(2 * turns):
            on = number % 2 == 1
            if on:
                page[Word.SAMPLE_THREADS] = int(threads)
                page[Word.SAMPLE_UNTIL_NS] = time.monotonic_ns() + int(TURN_S * 1e9)
                os.kill(os.getpid(), SAMPLE_SIGNAL)
            spent, passed = turn(step)
            own[on].append(spent)
            wall[on].append(passed)
            if on:
                share.append(_told(path))
    more = sum(own[True]) / sum(own[False]) - 1 + sum(share) / len(share)
    what = f"{name}, {'all threads' if threads else 'main thread'} sampled"
    return [
        Claim(f"{what}: cost in own time", more, "ratio", bar="< 0.02", holds=more < 0.02),
        Claim(f"{what}: sampler's share of a core", sum(share) / len(share), "ratio"),
        Claim(
            f"{what}: step", sum(wall[True]) / turns, "s", "without", sum(wall[False]) / turns,
            sum(wall[False]) / sum(wall[True]),
        ),
    ]  # fmt: skip


def _told(path: Path) -> float:
    """The sampler's share of a core in one turn, which it writes when it is done."""
    while not path.exists():
        time.sleep(0.01)
    sampled = msgspec.json.decode(path.read_bytes(), type=Sampled)
    path.unlink()
    return sampled.cpu_s / sampled.seconds


def main() -> None:
    args = arguments(__doc__ or "")
    turns = 60 if args.full else 8
    torch.set_num_threads(1)
    claims = cost("step of torch", torch_step(), turns, threads=False)
    claims += cost("step of torch", torch_step(), turns, threads=True)
    claims += cost("step of Python alone", python_step(), turns, threads=False)
    show(claims, args.json)


if __name__ == "__main__":
    main()
