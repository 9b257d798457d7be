"""A small model on a session, for tests of recovery: every member writes what it computed and what it committed.

In --out: begun-PID.jsonl gets a line before each backward, of all samples of the step so far: once the last one is
under way the others may come to have its gradients, and commit them if it dies. commits-PID.jsonl gets a line after
each commit, with a digest of all state.

--fault WHAT@STEP:ROLE lets one member fail there, once for a run: raise, leave (the loop, with exit code 0, after the
commit), vanish (os._exit), sleep, die (before the vote), die-middle (after its first micro-batch), die-reduce (up to
8 ms after its last backward began), die-soon (up to 2 ms after the vote began), die-apply, die-block (in the block,
after the commit), flip-parameter, flip-moment, flip-gradient (a bit of it), wrong (from there on this process flips a
bit in its own gradient of each backward, whatever its role). --leave STEP: all leave the loop after it.
--bug STEP: all members raise there, always.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch
from torch import nn

import everstep


class Fault:
    """One member's failure, which comes once: a file says that it was."""

    def __init__(self, text: str, out: Path) -> None:
        self.what, _, where = text.partition("@")
        step, _, role = where.partition(":")
        self.step, self.role = int(step), int(role)
        self._mark = out / f"fault-{text}"

    def comes(self, what: str, step: int, role: int) -> bool:
        if (what, step, role) != (self.what, self.step, self.role):
            return False
        try:
            self._mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def flip(tensor: torch.Tensor, bit: int) -> None:
    """In the memory of the last element."""
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[-1] ^= 1 << bit


def flip_state(comes: Callable[[str], bool], model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    weight = model[0].weight
    assert isinstance(weight, torch.Tensor)
    if comes("flip-parameter"):
        flip(weight, bit=0)
    if comes("flip-moment"):
        flip(optimizer.state[weight]["exp_avg"], bit=12)
    if comes("wrong"):
        be_wrong(weight)


def flip_gradient(comes: Callable[[str], bool], model: nn.Sequential) -> None:
    """Of the whole batch: it is summed by now."""
    if comes("flip-gradient"):
        flip(model[0].bias.grad, bit=22)  # type: ignore[arg-type]


def be_wrong(weight: torch.Tensor) -> None:
    """From now on, in this process: a bit of what backward has computed is another one before it is summed."""

    def flipped(gradient: torch.Tensor) -> torch.Tensor:
        wrong = gradient.clone()
        flip(wrong, bit=18)
        return wrong

    weight.register_hook(flipped)  # type: ignore[no-untyped-call]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(seconds: float) -> None:
    moment = random.SystemRandom().random() * seconds
    threading.Thread(target=lambda: (time.sleep(moment), die()), daemon=True).start()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters, buffers and the optimizer's state."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        hashed.update(tensor.numpy().tobytes())
    for state in optimizer.state.values():
        for value in state.values():
            hashed.update(value.numpy().tobytes())
    return hashed.hexdigest()


def build(dropout: float, norm: bool, hidden: int = 64) -> nn.Sequential:
    torch.manual_seed(7)
    extra = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(nn.Linear(16, hidden), nn.Dropout(dropout), *extra, nn.ReLU(), nn.Linear(hidden, 1))


def data() -> tuple[torch.Tensor, ...]:
    """200 samples, each with its number."""
    inputs = torch.randn(200, 16, generator=torch.Generator().manual_seed(3))
    return inputs, inputs.sum(dim=1, keepdim=True).sin(), torch.arange(200)


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, ...]]):
    """The same, one by one."""

    def __init__(self, noise: bool) -> None:
        self.columns, self.noise = data(), noise

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y, number = (column[index] for column in self.columns)
        if self.noise:
            x = x + 0.1 * (random.random() + float(numpy.random.rand()) + torch.rand(16))
        return x, y, number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each micro-batch")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--noise", action="store_true", help="inputs get some from random and numpy, samples too")
    parser.add_argument(
        "--loader-workers", type=int, nargs="+", help="of each local rank, in turn; read sample by sample"
    )
    parser.add_argument("--library", help="what sums gradients")
    parser.add_argument("--norm", action="store_true", help="with a BatchNorm")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--double", action="store_true", help="in float64: sums in any order stay alike for long")
    parser.add_argument("--child", action="store_true", help="start a program; its number is in child-PID")
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--bug", type=int, default=-1)
    parser.add_argument("--leave", type=int, default=-1)
    parser.add_argument("--check-every", type=int)
    parser.add_argument("--audit-every", type=int)
    parser.add_argument("--fixed", action="store_true", help="the number of members may not change")
    add_saving(parser)
    return parser.parse_args()


def add_saving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--every", type=int, default=0, help="steps between saves to disk")
    parser.add_argument("--memory-every", type=int, default=1, help="steps between those in memory")


def saving(args: argparse.Namespace) -> everstep.Saving:
    return everstep.Saving(args.checkpoints, every=args.every, memory_every=args.memory_every)


def comparing(args: argparse.Namespace) -> dict[str, Any]:
    return {"check_every": args.check_every, "audit_every": args.audit_every}


def start_child(out: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    (out / f"child-{os.getpid()}").write_text(str(child.pid))


def write(file: TextIO, **line: Any) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def main() -> None:
    args = arguments()
    if args.child:
        start_child(args.out)
    if args.double:
        torch.set_default_dtype(torch.float64)
    model = build(args.dropout, args.norm, args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loaders = args.loader_workers or [0]
    source = data() if args.loader_workers is None else Samples(args.noise)
    batches = everstep.Batches(
        source,
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        seed=5,
        num_workers=loaders[int(os.environ.get("LOCAL_RANK", "0")) % len(loaders)],
    )
    faults = [Fault(text, args.out) for text in args.fault]
    begun = (args.out / f"begun-{os.getpid()}.jsonl").open("w")
    commits = (args.out / f"commits-{os.getpid()}.jsonl").open("w")
    metrics = args.out / "metrics.jsonl"
    with everstep.session(
        seed=11, log_file=metrics, library=args.library, checkpoints=saving(args), **comparing(args)
    ) as run:
        run.protect(model=model, optimizer=optimizer, schedule=schedule)
        assert not args.fixed or run.group
        at = {"step": -1, "role": -1}

        def comes(what: str) -> bool:
            return any(fault.comes(what, at["step"], at["role"]) for fault in faults)

        optimizer.register_step_pre_hook(lambda *_: die() if comes("die-apply") else None)  # behind the vote
        for step in run.steps(args.steps):
            with step:
                at = {"step": step.index, "role": run.role}
                deal = {**at, "members": run.num_members}
                flip_state(comes, model, optimizer)
                samples: list[int] = []
                mine = len(batches.sampler.share(step.index, run.num_members, run.role))
                total = 0.0
                for x, y, numbers in step.share(batches):
                    if args.noise:
                        x += 0.1 * (random.random() + numpy.random.rand())
                    loss = (model(x) - y).square().mean()
                    samples += numbers.tolist()
                    total += float(loss.detach()) * len(x) / args.global_batch
                    write(begun, **deal, samples=samples, loss=total, time=time.time())
                    if len(samples) == mine and comes("die-reduce"):
                        die_within(0.008)
                    loss.backward()
                    if comes("die-middle"):
                        die()
                    time.sleep(args.pause)
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                flip_gradient(comes, model)
                if comes("raise"):
                    raise RuntimeError("this member's own mistake")
                if step.index == args.bug:
                    raise RuntimeError("everybody's mistake")
                if comes("vanish"):
                    os._exit(3)
                if comes("sleep"):
                    time.sleep(3600)
                if comes("die"):
                    die()
                if comes("die-soon"):
                    die_within(0.002)
                optimizer.step()
                if comes("die-block"):
                    die()
                schedule.step()
                optimizer.zero_grad()
            if step.committed:
                run.log(loss=total)
                rate, state = optimizer.param_groups[0]["lr"], digest(model, optimizer)
                write(commits, **deal, digest=state, lr=rate, norm=norm, loss=total, samples=samples, time=time.time())
            if comes("leave") or step.index == args.leave:
                break


if __name__ == "__main__":
    main()
