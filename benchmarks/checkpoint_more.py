"""The other parts of benchmarks/checkpoint.py: recovery without a replica, 200 saves, the tuner of the interval."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT, Claim, median, say

from everstep.core import events as e
from everstep.core.formation import Stage
from everstep.testing.local import LocalRun

SCRIPTS = ROOT / "benchmarks" / "scripts"
Script = Callable[..., Any]
RECOVER_S = 1.0
START_S, END_S = 90.0, 60.0
WARM_STEPS = 8
BOUND = 20  # thousandths of the step time
CLOSE = 0.2  # of the optimum, or one step

# Recovery -----------------------------------------------------------------------------------------------

WORKER = ("--nproc-per-node", "2")
NODE = ("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "1", "--standbys", "1")


class Recovered(NamedTuple):
    """Seconds since the kill: the members' formation, their state restored, the first new step of who replaced it."""

    formed_s: float
    restored_s: float
    stepped_s: float
    lost_steps: int


class ShardedRun(LocalRun):
    """Two shards, one replica, nothing on disk."""

    def __init__(self, folder: Path, options: tuple[str, ...], width: int, layers: int, every: int) -> None:
        more = ("--preload", "torch.distributed.fsdp", "--set", "control.last_call_s=0.3")
        args = (str(folder), str(width), str(layers), str(every))
        super().__init__(folder, SCRIPTS / "checkpoint_sharded.py", *more, *options, args=args, OMP_NUM_THREADS="1")

    def steps(self) -> dict[int, list[dict[str, float]]]:
        """By process: the steps that it committed."""
        found = {}
        for path in self.directory.glob("notes-*.jsonl"):
            whole = path.read_text().rpartition("\n")[0]
            found[int(path.stem.partition("-")[2])] = [json.loads(line) for line in whole.splitlines()]
        return {pid: lines for pid, lines in found.items() if lines}

    def strike(self, node: bool) -> Recovered:
        """Kill role 1, or all of its node with its memory, and see the job go on."""
        self.until(lambda: self._warm(standby=node), START_S)
        before = self.steps()
        victim = next(pid for pid, lines in before.items() if lines[-1]["rank"] == 1)
        killed, moment = time.monotonic(), time.time()
        if node:
            name = next(n for n in ("node0", "node1", "node2") if victim in self.processes(n))
            killed, moment = time.monotonic(), time.time()
            os.kill(int((self.run_dir / f"vault-{name}.pid").read_text()), signal.SIGKILL)
            self.kill_agent(name)
        else:
            os.kill(victim, signal.SIGKILL)
        (first,) = self.until(lambda: [x[0] for pid, x in self.steps().items() if pid not in before][:1], END_S)
        back = self.until(lambda: self._since(moment, e.StateRestored))[0]
        formed = self._since(moment, e.FormationMade)[0]
        lost = int(back.event.lost)  # type: ignore[union-attr]
        return Recovered(formed.wall_s - moment, back.wall_s - moment, first["t"] - killed, lost)

    def _warm(self, standby: bool) -> bool:
        steps = self.steps()
        warm = len(steps) == 2 and all(lines[-1]["step"] >= WARM_STEPS for lines in steps.values())
        return warm and (not standby or self._waits())

    def _waits(self) -> bool:
        """Somebody is ready to take a role over."""
        last = {report.node: report for report in (each.report for each in self.events(e.NodeReported))}
        sessions = [worker.session for report in last.values() for worker in report.workers if not worker.gone]
        return any(session is not None and session.stage is Stage.READY for session in sessions)

    def _since(self, moment: float, kind: type[object]) -> list[e.Entry]:
        return [entry for entry in self.entries() if entry.wall_s >= moment and isinstance(entry.event, kind)]


def recovery(name: str, width: int, layers: int, kills: int) -> list[Claim]:
    """A snapshot every step where the worker dies; every fifth where the node does: a copy has to reach the peer."""
    claims = []
    for what, options, node, every in (
        ("worker SIGKILLed, no replica: own vault", WORKER, False, 1),
        ("node lost, no replica: a peer's vault, a standby", NODE, True, 5),
    ):
        found = []
        for kill in range(kills):
            with (
                tempfile.TemporaryDirectory(prefix="everstep-bench-", ignore_cleanup_errors=True) as folder,
                ShardedRun(Path(folder), options, width, layers, every) as run,
            ):
                found.append(run.strike(node))
                run.signal(signal.SIGTERM)
                run.wait()
            say(f"{what}, {kill + 1}/{kills}: {found[-1]}")
        formed, restored, stepped = (median([f[place] for f in found]) for place in range(3))
        title = f"{what} -> first new step, {name}"
        claims += [
            Claim(title, stepped, "s", bar=f"<= {RECOVER_S:g} s", holds=stepped <= RECOVER_S),
            Claim(f"of that, until its members met ({what})", formed, "s"),
            Claim(f"of that, from there until the state was back ({what})", restored - formed, "s"),
            Claim(f"steps done again ({what}, a snapshot every {every})", max(f.lost_steps for f in found), ""),
        ]
    return claims


# 200 saves ----------------------------------------------------------------------------------------------


def flatness(script: Script, saves: int) -> list[Claim]:
    say(f"{saves} saves")
    found = script(Path(sys.executable), "checkpoint_session.py", "flat", 512, 8, saves)
    return [
        level(f"resident memory of the worker, {saves} saves, last quarter over the second", found["worker"]),
        level(f"resident memory of the vault, {saves} saves, last quarter over the second", found["vault"]),
        level(f"shared memory of images, {saves} saves, last quarter over the second", found["shared"]),
    ]


def level(name: str, values: Sequence[int]) -> Claim:
    quarter = len(values) // 4
    ratio = sum(values[-quarter:]) / sum(values[quarter : 2 * quarter])
    return Claim(name, ratio, "x", bar="<= 1.05", holds=ratio <= 1.05)


# The interval -------------------------------------------------------------------------------------------


class Sized(NamedTuple):
    name: str
    width: int
    layers: int
    step_ms: int
    sweep_steps: int
    intervals: tuple[int, ...]
    tuned_steps: int


TUNED = (
    Sized("25 MB", 512, 8, 80, 32, (2, 4, 8, 2, 4, 8), 160),
    Sized("100 MB", 1024, 8, 120, 32, (2, 4, 8, 2, 4, 8), 200),
)


def tuning(script: Script, sizes: Sequence[Sized]) -> list[Claim]:
    claims = []
    for size in sizes:
        say(f"{size.name}: the interval, by a sweep and by the tuner")
        here, python = (size.width, size.layers), Path(sys.executable)
        batch = script(python, "checkpoint_steps.py", "calibrate", *here, size.step_ms, 0, 0, 0)
        swept = script(python, "checkpoint_session.py", "sweep", *here, batch, size.sweep_steps, *size.intervals)
        rows = script(python, "checkpoint_session.py", "tuned", *here, batch, size.tuned_steps, BOUND)["rows"]
        claims += judged(size.name, best(swept), rows)
    return claims


def best(swept: dict[str, Any]) -> int:
    """The smallest interval at which the measured overhead is under the bound and a save is through in time.

    Overhead is a cost over the interval: that cost is fitted over the whole sweep, so it need not have every interval.
    """
    weights = costs = 0.0
    for place, (kind, times) in enumerate(swept["blocks"]):
        if kind != "quiet":
            around = swept["blocks"][place - 1][1] + swept["blocks"][place + 1][1]
            quiet, every = sum(around) / len(around), int(kind)
            say(f"every {every}: {100 * (sum(times) / len(times) / quiet - 1):.1f} %")
            costs += (sum(times) / len(times) / quiet - 1) / every
            weights += 1 / every**2
    return max(1, math.ceil(costs / weights / (BOUND / 1000)), math.ceil(median(swept["wholes"])))


def judged(name: str, optimum: int, rows: Sequence[tuple[float, int, int]]) -> list[Claim]:
    """Over the second half. Steps in which no save was under way tell what a step costs without."""
    half = rows[len(rows) // 2 :]
    asked = sorted({requested for _, requested, _ in half})
    interval = median([b - a for a, b in zip(asked, asked[1:], strict=False)]) if len(asked) > 1 else float("inf")
    busy = [requested > durable for _, requested, durable in half]
    quiet = [row[0] for row, now, before in zip(half[1:], busy[1:], busy, strict=False) if not now and not before]
    usual = sum(quiet) / len(quiet) if quiet else float("nan")
    overhead = 100 * (sum(row[0] for row in half) / len(half) / usual - 1)
    close = abs(interval - optimum) <= max(1, CLOSE * optimum)
    bound = BOUND / 10
    return [
        Claim(
            f"interval that the tuner converges to, {name} to disk, overhead bound {bound:g} %", interval, "steps",
            "the optimum of a sweep", optimum, optimum / interval, "within 20 % (or a step)", close,
        ),
        Claim(f"overhead at it, {name}", overhead, "%", bar=f"<= {bound:g} %", holds=overhead <= bound),
    ]  # fmt: skip
