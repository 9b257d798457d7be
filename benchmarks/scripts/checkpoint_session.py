"""A session's steps with saves, for benchmarks/checkpoint.py: `checkpoint_session.py WHAT FOLDER WIDTH LAYERS ...`.

    stall FOLDER WIDTH LAYERS BATCH BLOCK CYCLES   times of the steps in quiet and saving blocks, which alternate
    durable FOLDER WIDTH LAYERS ROUNDS             asked -> durable, with nothing else to do; `dd` in between
    flat FOLDER WIDTH LAYERS SAVES                 memory of this process and of its vault after each save
    sweep FOLDER WIDTH LAYERS BATCH STEPS EVERY... times of the steps in blocks with a save to disk every so many steps
    tuned FOLDER WIDTH LAYERS BATCH STEPS BOUND    times of the steps when the session chooses; BOUND in thousandths

All run the session alone, so the vault is a child of this process. The last line of output is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_steps import Memory, build, tree

import everstep
from everstep.core.saves import Tier

Starts = list[Tier]  # by step: what save begins with it
SMALL_BATCH = 8
WARM_SAVES = 3  # until each of the vault's buffers was used


class Loop:
    """A session of a plain model whose steps are saved as they are told."""

    def __init__(
        self, folder: Path, width: int, layers: int, batch: int, saving: everstep.Saving | None = None
    ) -> None:
        self.model, self.optimizer = build(width, layers)
        self.data = torch.randn(batch, width)
        self.run = everstep.session(checkpoints=saving or everstep.Saving(folder, every=0, memory_every=0, keep=1))
        self.run.protect(model=self.model, optimizer=self.optimizer)

    def steps(self, starts: Sequence[Tier], begun: Callable[[int], None] | None = None) -> Iterator[float]:
        """Train; yields the time of each step, all included. `begun` is called when the save of a step has begun."""
        self.before = time.perf_counter()
        for step in self.run.steps(len(starts) + 1):
            if step.index == len(starts):
                return  # before the session ends: it would save once more
            if begun and starts[step.index]:
                begun(step.index)
            with step:
                following = starts[step.index + 1] if step.index + 1 < len(starts) else Tier.NOTHING
                if following:
                    self.run.save(memory_only=following is Tier.MEMORY)
                (self.model(self.data) - self.data).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            now = time.perf_counter()
            took, self.before = now - self.before, now
            yield took

    def until_durable(self, step: int) -> None:
        while self.run.saves.durable < step:
            if self.run.saves.failed_step >= step:
                raise RuntimeError(self.run.saves.failed)
            time.sleep(0.0005)


def cut(times: Sequence[float], kinds: Sequence[str], block: int) -> list[tuple[str, list[float]]]:
    return [(kind, list(times[i * block : (i + 1) * block])) for i, kind in enumerate(kinds)]


def stall(folder: Path, width: int, layers: int, batch: int, block: int, cycles: int) -> dict[str, Any]:
    """`memory each`: a save with every step of the block; the others: one, with its first step."""
    none, memory, disk = Tier.NOTHING, Tier.MEMORY, Tier.DISK
    blocks: dict[str, Starts] = {
        "quiet": [none] * block,
        "memory": [memory, *[none] * (block - 1)],
        "memory each": [memory] * block,
        "disk": [disk, *[none] * (block - 1)],
    }
    order = [kind for _ in range(cycles) for kind in ("quiet", "memory", "quiet", "memory each", "quiet", "disk")]
    order.append("quiet")
    warm = [none, none, memory, memory, memory, disk, none, none]  # all memory is there, and all code was run
    loop, peak = Loop(folder, width, layers, batch), Memory()
    with loop.run:
        times = list(loop.steps(warm + [tier for kind in order for tier in blocks[kind]]))
        return {"blocks": cut(times[len(warm) :], order, block), "peak_bytes": peak.peak_bytes}


def durable(folder: Path, width: int, layers: int, rounds: int) -> dict[str, Any]:
    """The first saves allocate memory in the vault and start its writer: they do not count."""
    loop = Loop(folder, width, layers, SMALL_BATCH)
    source = random_file(3 * 4 * width * width * layers)
    found: dict[str, list[float]] = {"ours": [], "dd": []}

    def begun(step: int) -> None:
        loop.until_durable(step)
        found["ours"].append(time.perf_counter() - loop.before)
        found["dd"].append(dd(source, folder / "dd"))

    with loop.run:
        list(loop.steps([Tier.NOTHING, *[Tier.DISK] * (rounds + WARM_SAVES)], begun))
        return {kind: times[WARM_SAVES:] for kind, times in found.items()}


def random_file(num_bytes: int) -> str:
    """In memory."""
    fd = os.memfd_create("everstep-bench")
    piece = os.urandom(1 << 20)
    while os.fstat(fd).st_size < num_bytes:
        os.write(fd, piece)
    os.ftruncate(fd, num_bytes)
    return f"/proc/{os.getpid()}/fd/{fd}"


def dd(source: str, target: Path) -> float:
    began = time.perf_counter()
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "oflag=direct", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    took = time.perf_counter() - began
    target.unlink()
    return took


def flat(folder: Path, width: int, layers: int, saves: int) -> dict[str, Any]:
    """A save to memory with every step, each tenth to disk."""
    loop = Loop(folder, width, layers, SMALL_BATCH, everstep.Saving(folder, every=10, memory_every=1, keep=1))
    found: dict[str, list[int]] = {"worker": [], "vault": [], "shared": []}
    with loop.run:
        for number, _ in enumerate(loop.steps([Tier.NOTHING] * (saves + WARM_SAVES))):
            if number < WARM_SAVES:
                continue
            vault = vault_pid()
            found["worker"].append(resident(os.getpid(), "RssAnon"))
            found["vault"].append(resident(vault, "RssAnon"))
            found["shared"].append(image_bytes(vault))
    return found


def vault_pid() -> int:
    return next(p for p in tree(os.getpid()) if b"everstep.state.vault" in Path(f"/proc/{p}/cmdline").read_bytes())


def resident(pid: int, field: str) -> int:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith(f"{field}:"))


def image_bytes(pid: int) -> int:
    """Of the vault's shared memory: what its anonymous files hold."""
    found: dict[int, int] = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:everstep-image" in os.readlink(fd):
                there = fd.stat()
                found[there.st_ino] = there.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(found.values())


def sweep(folder: Path, width: int, layers: int, batch: int, steps: int, *intervals: int) -> dict[str, Any]:
    """As many quiet steps around each block. `wholes`: in how many steps each save was durable."""
    loop, quiet = Loop(folder, width, layers, batch), steps
    order: list[tuple[str, Starts]] = []
    for every in intervals:
        order.append(("quiet", [Tier.NOTHING] * quiet))
        order.append((str(every), [Tier.NOTHING if i % every else Tier.DISK for i in range(steps)]))
    order.append(("quiet", [Tier.NOTHING] * quiet))
    starts = [Tier.NOTHING, *[Tier.DISK, *[Tier.NOTHING] * 5] * WARM_SAVES]
    num_warm = len(starts)
    starts += [tier for _, each in order for tier in each]
    times: list[float] = []
    durable: dict[int, int] = {}  # step -> steps until it was
    with loop.run:
        for number, took in enumerate(loop.steps(starts)):
            times.append(took)
            saves = loop.run.saves
            durable.setdefault(saves.durable, number + 1 - saves.durable)
    rest = iter(times[num_warm:])
    wholes = [late for step, late in durable.items() if step > num_warm]
    return {"blocks": [(kind, [next(rest) for _ in each]) for kind, each in order], "wholes": wholes}


def tuned(folder: Path, width: int, layers: int, batch: int, steps: int, thousandths: int) -> dict[str, Any]:
    """By step: its time, the newest step that was to be saved when it ended, the newest durable one."""
    saving = everstep.Saving(folder, memory_every=0, overhead=thousandths / 1000, keep=1)
    loop, rows = Loop(folder, width, layers, batch, saving), []
    with loop.run:
        for took in loop.steps([Tier.NOTHING] * steps):
            rows.append((took, loop.run.saves.requested, loop.run.saves.durable))
    return {"rows": rows}


WHAT: dict[str, Callable[..., dict[str, Any]]] = {
    "stall": stall,
    "durable": durable,
    "flat": flat,
    "sweep": sweep,
    "tuned": tuned,
}


def main() -> None:
    torch.set_num_threads(1)
    found = WHAT[sys.argv[1]](Path(sys.argv[2]), *(int(text) for text in sys.argv[3:]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
