"""The other parts of benchmarks/checkpoint.py: recovery without a replica, 200 saves, the tuner of the interval."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from harness import ROOT, Claim, median, say
from jobs import free_port

from everstep.control import procfs
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

PRELOAD = ("--preload", "torch.distributed.fsdp", "--set", "control.last_call_s=0.3")


class Recovered(NamedTuple):
    """Seconds since the kill: the members met, their state was back, the first new step of who replaced the dead one.

    lost: steps done again.
    """

    met_s: float
    restored_s: float
    stepped_s: float
    lost: int


class Cluster:
    """Two shards, one replica, nothing on disk. Each node has a launcher; the first one's hosts the controller.

    `num_nodes`: three have one worker each, and one of these waits for a role; one has both.
    """

    def __init__(self, folder: Path, num_nodes: int, *args: int) -> None:
        self.folder, port = folder, free_port()
        options = ("--nproc-per-node", "2") if num_nodes == 1 else ("--nproc-per-node", "1", "--nnodes", "2")
        self.launchers = []
        for rank in range(num_nodes):
            meet = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "bench", "--rdzv-conf", f"is_host={rank == 0}")
            more = (*meet, "--standbys", "1") if num_nodes > 1 else ()
            (folder / str(rank)).mkdir()
            texts = (str(folder), *map(str, args))
            env = {"HOME": str(folder), "OMP_NUM_THREADS": "1"}
            script = SCRIPTS / "checkpoint_sharded.py"
            self.launchers.append(LocalRun(folder / str(rank), script, *PRELOAD, *options, *more, args=texts, **env))

    def __enter__(self) -> Cluster:
        for launcher in self.launchers:
            launcher.__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        for launcher in self.launchers:
            if launcher.process is not None and launcher.process.poll() is None:
                launcher.signal(signal.SIGTERM)
        for launcher in self.launchers:
            with contextlib.suppress(AssertionError):  # it is killed then
                launcher.wait()
            launcher.__exit__(None, None, None)

    def steps(self) -> dict[int, list[dict[str, float]]]:
        """By process: the steps that it committed."""
        found = {}
        for path in self.folder.glob("notes-*.jsonl"):
            whole = path.read_text().rpartition("\n")[0]
            found[int(path.stem.partition("-")[2])] = [json.loads(line) for line in whole.splitlines()]
        return {pid: lines for pid, lines in found.items() if lines}

    def strike(self) -> Recovered:
        """Kill a worker, or all that a node runs, and see the job go on."""
        host = self.launchers[0]
        host.until(self._warm, START_S)
        before = self.steps()
        victims = [next(pid for pid, lines in before.items() if lines[-1]["rank"] == 1)]
        launcher = 0
        if len(self.launchers) > 1:
            nodes = [tree(launcher.process.pid) for launcher in self.launchers[1:] if launcher.process]
            launcher, *victims = next(node for node in nodes if before.keys() & set(node))
        killed, moment = time.monotonic(), time.time()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if launcher:  # it has told of it, and would start the node again, with the cores that the others need here
            host.until(lambda: self._since(moment, e.NodeLost))
            os.kill(launcher, signal.SIGKILL)
        (first,) = host.until(lambda: [x[0] for pid, x in self.steps().items() if pid not in before][:1], END_S)
        met = host.until(lambda: self._since(moment, e.FormationMade))[0]
        back = host.until(lambda: self._since(moment, e.StateRestored))[0]
        assert isinstance(back.event, e.StateRestored)
        return Recovered(met.wall_s - moment, back.wall_s - moment, first["t"] - killed, back.event.lost)

    def _warm(self) -> bool:
        steps = self.steps()
        warm = len(steps) == 2 and all(lines[-1]["step"] >= WARM_STEPS for lines in steps.values())
        return warm and (len(self.launchers) == 1 or self._waits())

    def _waits(self) -> bool:
        """Somebody is ready to take a role over."""
        reports = (each.report for each in self.launchers[0].events(e.NodeReported))
        last = {report.node: report for report in reports}
        sessions = [worker.session for report in last.values() for worker in report.workers if not worker.gone]
        return any(session is not None and session.stage is Stage.READY for session in sessions)

    def _since(self, moment: float, kind: type[object]) -> list[e.Entry]:
        return [n for n in self.launchers[0].entries() if n.wall_s >= moment and isinstance(n.event, kind)]


def recovery(name: str, width: int, layers: int, kills: int) -> list[Claim]:
    """A snapshot every step where the worker dies; every fifth where the node does: a copy has to reach the peer."""
    claims = []
    for what, num_nodes, every in (
        ("worker SIGKILLed, no replica: own vault", 1, 1),
        ("node lost, no replica: a peer's vault, a standby", 3, 5),
    ):
        found = []
        for kill in range(kills):
            with (
                tempfile.TemporaryDirectory(prefix="everstep-bench-", ignore_cleanup_errors=True) as folder,
                Cluster(Path(folder), num_nodes, width, layers, every) as cluster,
            ):
                found.append(cluster.strike())
            say(f"{what}, {kill + 1}/{kills}: {found[-1]}")
        met, restored, stepped = (median([f[place] for f in found]) for place in range(3))
        claims += [
            Claim(
                f"{what} -> first new step, {name}", stepped, "s", bar=f"<= {RECOVER_S:g} s", holds=stepped <= RECOVER_S
            ),
            Claim(f"of that, until its members met ({what})", met, "s"),
            Claim(f"of that, from there until the state was back ({what})", restored - met, "s"),
            Claim(f"steps done again ({what}, a snapshot every {every})", max(f.lost for f in found), ""),
        ]
    return claims


def tree(pid: int) -> list[int]:
    return [pid, *(each for child in procfs.children(pid) for each in tree(child))]


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
    Sized("50 MB", 720, 8, 40, 24, (3, 6, 12) * 24, 3000),
    Sized("200 MB", 1440, 8, 100, 24, (4, 8, 12) * 10, 1500),
)


def tuning(script: Script, sizes: Sequence[Sized]) -> list[Claim]:
    claims = []
    for size in sizes:
        say(f"{size.name}: the interval, by a sweep and by the tuner")
        here, python = (size.width, size.layers), Path(sys.executable)
        batch = script(python, "checkpoint_steps.py", "calibrate", *here, size.step_ms, 0, 0, 0)
        halves = []
        for again in (False, True):  # the tuner runs between them: the machine's state drifts over minutes
            halves.append(
                script(python, "checkpoint_session.py", "sweep", *here, batch, size.sweep_steps, *size.intervals)
            )
            if not again:
                rows = script(python, "checkpoint_session.py", "tuned", *here, batch, size.tuned_steps, BOUND)["rows"]
        claims += judged(size.name, best(halves), rows)
    return claims


def best(sweeps: Sequence[dict[str, Any]]) -> int:
    """The smallest interval at which the measured overhead is under the bound and a save is through in time.

    Overhead is a cost over the interval: that cost is fitted over the whole sweep, so it need not have every interval.
    """
    found: dict[int, list[float]] = {}
    for swept in sweeps:
        for place, (kind, times) in enumerate(swept["blocks"]):
            if kind != "quiet":
                around = swept["blocks"][place - 1][1] + swept["blocks"][place + 1][1]
                found.setdefault(int(kind), []).append(sum(times) / len(times) / (sum(around) / len(around)) - 1)
    for every, overheads in sorted(found.items()):
        error = stdev(overheads) / math.sqrt(len(overheads))
        say(f"every {every}: {100 * fmean(overheads):.2f} +- {100 * error:.2f} % in {len(overheads)} blocks")
    weights = sum(len(overheads) / every**2 for every, overheads in found.items())
    cost = sum(sum(overheads) / every for every, overheads in found.items()) / weights
    wholes = [whole for swept in sweeps for whole in swept["wholes"]]
    say(f"a save costs {cost:.3f} steps and is durable after {median(wholes):g}")
    return max(1, math.ceil(cost / (BOUND / 1000)), math.ceil(median(wholes)))


def judged(name: str, optimum: int, rows: Sequence[tuple[float, int, int]]) -> list[Claim]:
    """Over the second half. Steps in which no save was under way, nor right before, tell what a step costs without."""
    half = rows[len(rows) // 2 :]
    asked = sorted({requested for _, requested, _ in half})
    interval = (asked[-1] - asked[0]) / (len(asked) - 1) if len(asked) > 1 else float("inf")
    busy = [now[1] > before[1] or before[1] > before[2] for before, now in pairwise(half)]
    quiet = [row[0] for row, (before, now) in zip(half[2:], pairwise(busy), strict=True) if not now and not before]
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
