"""What saving costs and how fast state comes back, against `dd`, torch.save, torch.distributed.checkpoint and NVRx.

    python benchmarks/checkpoint.py [--quick | --full] [--json]

State is a stack of linear layers with AdamW's moments. --full: 400 MB, with 100 MB and 1.5 GB beside it, about eleven
minutes; --quick: 100 MB with short steps, about two. Ours and the peers run in turn, each in processes of its own; the
peers in .venv-peers-checkpoint, made on first use.

Stall: blocks of steps with and without a save alternate in one process. What the steps of a block took beyond as many
of the quiet ones around it is what the save cost, however it spread over them (median over the blocks; below 1 ms,
which is noise, 1 ms is told). One thread trains, so one of two cores is left to whoever saves in the background.
Durable: from the call, with nothing else to do, until all is synced to the disk; ours from the end of the step after
which it was to be saved. `dd` writes random bytes from memory in between, oflag=direct bs=4M conv=fsync.
Restore: a new process with a new model; what is on disk was dropped from the page cache (ours reads past it anyway).
Into a new model and optimizer, as after a restart; and for dcp.load also the call alone, into tensors that are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint_more as more
from harness import ROOT, Claim, arguments, median, say, show

sys.path.insert(0, str(ROOT / "scripts"))
import peers

FOLDER = ROOT / ".venv-peers-checkpoint"
NVRX = "nvidia-resiliency-ext==0.4.1"
BACKGROUND = ("dcp.async_save thread", "dcp.async_save process", "nvrx fork")
METHODS = ("torch.save", "dcp.save", *BACKGROUND)
LEAST_S = 0.001  # a stall below this is noise


class Size(NamedTuple):
    """How a size of state is measured. `step_ms`: 0: no steps, only how long saves alone take."""

    name: str
    width: int
    layers: int
    step_ms: int
    block: int
    cycles: int  # of ours, in each of two processes: before the peers and after them
    pairs: int  # of each peer that saves in the background; the others need one
    alone: int
    stalling: tuple[str, ...] = METHODS  # whose stall is measured
    bars: bool = True

    @property
    def num_bytes(self) -> int:
        return 12 * self.width**2 * self.layers

    @property
    def shape(self) -> tuple[int, int]:
        return self.width, self.layers


MIDDLE = Size("400 MB", 2048, 8, step_ms=1250, block=4, cycles=2, pairs=3, alone=2)
FULL = (
    MIDDLE,
    Size("100 MB", 1024, 8, step_ms=300, block=4, cycles=2, pairs=3, alone=3, stalling=BACKGROUND, bars=False),
    Size("1.5 GB", 3952, 8, step_ms=2000, block=3, cycles=1, pairs=1, alone=2, stalling=BACKGROUND[:1], bars=False),
)
QUICK = (Size("100 MB", 1024, 8, step_ms=300, block=4, cycles=1, pairs=1, alone=2),)


class Saver(NamedTuple):
    """What was measured of one way to save. Lists: one for each block or save."""

    name: str
    step_s: float
    stalls: dict[str, list[float]]
    durable: list[float]
    peak_bytes: int


class Peers:
    """Their interpreter; this one's torch does where NVRx cannot be installed."""

    def __init__(self) -> None:
        self.python, self.has_nvrx = Path(sys.executable), True
        try:
            self.python = peers.prepare(FOLDER, peers.locked("torch"), peers.locked("numpy"), NVRX)
        except peers.NotInstalled as error:
            say(str(error))
            self.has_nvrx = False

    def named(self, method: str) -> str:
        return f"{NVRX.replace('==', ' ')}, fork" if method == "nvrx fork" else method


def script(python: Path, name: str, what: str, *numbers: int) -> Any:
    """The last line of what a script prints, as JSON; it has a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", ignore_cleanup_errors=True) as folder:
        return script_in(Path(folder), python, name, what, *numbers)


def script_in(folder: Path, python: Path, name: str, what: str, *numbers: int) -> Any:
    command = [str(python), str(more.SCRIPTS / name), what, str(folder), *map(str, numbers)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{name} {what}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# Stall and durability -----------------------------------------------------------------------------------


def stalls(blocks: Sequence[tuple[str, list[float]]]) -> dict[str, list[float]]:
    """By kind: what each block took beyond as many of the quiet steps before and after it."""
    found: dict[str, list[float]] = {}
    for place, (kind, times) in enumerate(blocks):
        if kind != "quiet":
            around = [b for b in blocks[max(0, place - 1) : place + 2] if b[0] == "quiet"]
            quiet = sum(sum(b[1]) for b in around) / sum(len(b[1]) for b in around)
            found.setdefault(kind, []).append(sum(times) - len(times) * quiet)
    return found


def quiet_step(blocks: Sequence[tuple[str, list[float]]]) -> float:
    times = [t for kind, block in blocks if kind == "quiet" for t in block]
    return sum(times) / len(times) if times else 0.0


def ours(size: Size, batch: int) -> Saver:
    found = script(Path(sys.executable), "checkpoint_session.py", "stall", *size.shape, batch, size.block, size.cycles)
    return Saver("Everstep", quiet_step(found["blocks"]), stalls(found["blocks"]), [], found["peak_bytes"])


def theirs(peer: Peers, method: str, size: Size, batch: int) -> Saver | None:
    """None: it does not run here, which is said."""
    pairs = 0 if method not in size.stalling else size.pairs if method in BACKGROUND else 1
    say(f"{size.name}: {method}")
    try:
        numbers = (*size.shape, batch, size.block, pairs, size.alone)
        found = script(peer.python, "checkpoint_steps.py", method, *numbers)
    except RuntimeError as error:
        say(str(error))
        return None
    blocks = found["blocks"]
    return Saver(peer.named(method), quiet_step(blocks), stalls(blocks), found["durable"], found["peak_bytes"])


def merged(one: Saver, other: Saver) -> Saver:
    both = {kind: one.stalls[kind] + other.stalls[kind] for kind in one.stalls}
    return Saver(one.name, (one.step_s + other.step_s) / 2, both, [], max(one.peak_bytes, other.peak_bytes))


def durability(size: Size, rounds: int) -> tuple[list[float], list[float]]:
    say(f"{size.name}: time to durable, and dd, {rounds} rounds")
    found = script(Path(sys.executable), "checkpoint_session.py", "durable", *size.shape, rounds)
    return found["ours"], found["dd"]


def saving(size: Size, peer: Peers, rounds: int) -> list[Claim]:
    batch = script(Path(sys.executable), "checkpoint_steps.py", "calibrate", *size.shape, size.step_ms, 0, 0, 0)
    say(f"{size.name}: our saves, batches of {batch}")
    mine = ours(size, batch)
    methods = [method for method in METHODS if method != "nvrx fork" or peer.has_nvrx]
    others = [saver for method in methods if (saver := theirs(peer, method, size, batch)) is not None]
    say(f"{size.name}: our saves again")
    mine = merged(mine, ours(size, batch))
    durable, dd = durability(size, rounds)
    return [
        *growth(size, mine),
        *(stalled(size, mine, other, "memory") for other in others if other.stalls),
        *(stalled(size, mine, other, "disk") for other in others if other.stalls),
        direct(size, median(durable), median(dd)),
        *(sooner(size, median(durable), other) for other in others if other.durable),
        *(peak(size, mine, other) for other in others if other.stalls),
    ]


def growth(size: Size, mine: Saver) -> list[Claim]:
    step_s, each = mine.step_s, median(mine.stalls["memory each"]) / size.block
    once, disk = median(mine.stalls["memory"]), median(mine.stalls["disk"])
    long = ">= 1 s" if size.bars and size.step_ms >= 1000 else ""
    return [
        Claim(
            f"a step without saves, {size.name} of state", step_s, "s", bar=long, holds=step_s >= 1.0 if long else None
        ),
        percent(size, "every step in memory", 100 * each / step_s, 5.0),
        percent(size, "every 10th step in memory", 100 * once / (10 * step_s), 1.0),
        percent(size, "every 10th step on disk", 100 * disk / (10 * step_s), 0.0),
    ]


def percent(size: Size, how: str, value: float, bar: float) -> Claim:
    text = f"<= {bar:g} %" if bar and size.bars else ""
    return Claim(f"mean step grows, {how}, {size.name}", value, "%", bar=text, holds=value <= bar if text else None)


def stalled(size: Size, mine: Saver, other: Saver, tier: str) -> Claim:
    us, them = (max(LEAST_S, median(s.stalls[k])) for s, k in ((mine, tier), (other, "saving")))
    bar = "less than the peer" if tier == "memory" else ""
    name = f"stall of a save to {tier}, {size.name}"
    return Claim(name, us, "s", other.name, them, them / us, bar, us < them if bar else None)


def direct(size: Size, us: float, dd: float) -> Claim:
    peer = f"dd oflag=direct, {size.num_bytes / dd / 1e9:.2f} GB/s,"
    return Claim(f"asked -> durable, {size.name}", us, "s", peer, dd, dd / us, ">= 0.8 of dd", dd / us >= 0.8)


def sooner(size: Size, us: float, other: Saver) -> Claim:
    them = median(other.durable)
    return Claim(f"asked -> durable, {size.name}", us, "s", other.name, them, them / us, "faster", us < them)


def peak(size: Size, mine: Saver, other: Saver) -> Claim:
    us, them = mine.peak_bytes, other.peak_bytes
    return Claim(f"peak memory of all processes, {size.name} of state", us, "bytes", other.name, them, them / us)


# Restore ------------------------------------------------------------------------------------------------


WHOLE = "get_state_dict, dcp.load, set_state_dict"
WAYS = ("disk", "dcp", "disk, in place", "dcp, in place")
MEMORY = Path("/dev/shm")  # files in memory: what the disk's own rate hides


def restoring(size: Size, repeats: int) -> list[Claim]:
    took, rise = restores(size, repeats, None, (*WAYS, "torch.load", "read", "own vault", "peer's vault"))
    disk, call, file = took["disk"], took["dcp, in place"], took["torch.load"]
    bar = "<= 1.1" if size.bars and size.num_bytes > 2e8 else ""  # chunks in the hands of threads count for small ones
    claims = [
        faster(f"restore from disk, {size.name}", disk, WHOLE, took["dcp"]),
        Claim(f"restore from disk into tensors that are there, {size.name}", took["disk, in place"], "s",
              "dcp.load alone", call, call / took["disk, in place"]),
        Claim(f"of that, the disk: the file read by 4 MiB past the cache, {size.name}", took["read"], "s"),
        Claim(f"restore from disk, {size.name}", disk, "s", "torch.load", file, file / disk),
        Claim(f"peak memory of it over the state, {size.name}", rise["disk"], "x", WHOLE, rise["dcp"],
              rise["dcp"] / rise["disk"], bar, rise["disk"] <= 1.1 if bar else None),
        Claim(f"restore from the own vault's memory, {size.name}", took["own vault"], "s"),
        Claim(f"restore from a peer's vault, {size.name}", took["peer's vault"], "s"),
    ]  # fmt: skip
    if MEMORY.is_dir():
        took, _ = restores(size, repeats, MEMORY, WAYS)
        where, here = f"a file in memory, {size.name}", f"a file in memory into tensors that are there, {size.name}"
        claims.append(faster(f"restore from {where}", took["disk"], WHOLE, took["dcp"]))
        claims.append(faster(f"restore from {here}", took["disk, in place"], "dcp.load alone", took["dcp, in place"]))
    return claims


def faster(name: str, ours: float, peer: str, theirs: float) -> Claim:
    return Claim(name, ours, "s", peer, theirs, theirs / ours, ">= 2x", theirs >= 2 * ours)


def restores(
    size: Size, repeats: int, place: Path | None, ways: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """By way: seconds, and how far the memory rose over the size of the state; medians of alternating runs."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=place) as name:
        restore = partial(script_in, Path(name), Path(sys.executable), "checkpoint_restore.py")
        restore("write", *size.shape)
        for number in range(repeats):
            say(f"{size.name}: restore {number + 1}/{repeats}{' from memory' if place else ''}")
            for way in ways:
                found[way].append(restore(way, *size.shape))
    took = {way: median([each["seconds"] for each in runs]) for way, runs in found.items()}
    return took, {way: median([e["rise_bytes"] / e["state_bytes"] for e in runs]) for way, runs in found.items()}


def main() -> None:
    options = arguments(__doc__ or "")
    began, peer = time.monotonic(), Peers()
    sizes = FULL if options.full else QUICK
    claims: list[Claim] = []
    for size in sizes:
        claims += saving(size, peer, 8 if size.num_bytes < 1e9 else 4)
    for size in sizes:
        if size.bars or size.num_bytes > 1e9:
            claims += restoring(size, 3 if options.full else 1)
    claims += more.recovery(sizes[0].name, *sizes[0].shape, kills=3 if options.full else 1)
    claims += more.flatness(script, 200 if options.full else 60)
    claims += more.tuning(script, more.TUNED if options.full else more.TUNED[:1])
    say(f"{time.monotonic() - began:.0f} s in all")
    show(claims, options.json)


if __name__ == "__main__":
    main()
