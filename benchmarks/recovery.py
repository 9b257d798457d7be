"""Recovery of an unmodified DDP script under `everstep run` and under torchrun, alternating in one run.

    python benchmarks/recovery.py [--quick | --full] [--json]

Faults are real: SIGKILL and SIGSTOP to a worker, an exception in the script. Two workers, 10.5 M parameters, a
checkpoint every step. A time ends when every rank has made a step that it had not made when the fault came.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import ROOT, Claim, arguments, median, say, show

SCRIPT = ROOT / "benchmarks" / "scripts" / "ddp_steps.py"
RANKS = 2
WARM_STEPS = 8
STEADY_STEPS = 60
HANG_TIMEOUT_S = 2.0


def everstep(*options: str) -> list[str]:
    return [sys.executable, "-m", "everstep", "run", "--nproc-per-node", str(RANKS), *options, str(SCRIPT)]


def torchrun(*_options: str) -> list[str]:
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "100"]
    return [*module, "--nproc-per-node", str(RANKS), str(SCRIPT)]


class Job:
    """One launch in a folder of its own, watched through the lines its script writes."""

    def __init__(self, command: list[str], *script_args: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        self.log = (self.folder / "output.txt").open("wb")
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, str(self.folder), *script_args], cwd=self.folder, env=env, stdout=self.log, stderr=self.log
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in {row["pid"] for rank in range(RANKS) for row in self.rows(rank)}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def rows(self, rank: int) -> list[dict[str, float]]:
        path = self.folder / f"rank{rank}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def steps(self, rank: int) -> list[dict[str, float]]:
        return [row for row in self.rows(rank) if row["event"] == "step"]

    def until(self, what: Callable[[], float | None], timeout_s: float) -> float | None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            value = what()
            if value is not None:
                return value
            time.sleep(0.005)
        return None

    def until_step(self, count: int, timeout_s: float = 90.0) -> None:
        def reached() -> float | None:
            return 1.0 if all(len(self.steps(r)) >= count for r in range(RANKS)) else None

        if self.until(reached, timeout_s) is None:
            raise RuntimeError(f"no {count} steps:\n{(self.folder / 'output.txt').read_text()[-3000:]}")

    def new_step_after(self, moment: float, best: float, timeout_s: float) -> float | None:
        """When the last rank had made a step above `best` after `moment`."""

        def done() -> float | None:
            firsts = []
            for rank in range(RANKS):
                new = [row["t"] for row in self.steps(rank) if row["t"] > moment and row["step"] > best]
                if not new:
                    return None
                firsts.append(new[0])
            return max(firsts)

        return self.until(done, timeout_s)


def recover(command: list[str], fault: str, timeout_s: float) -> dict[str, float | None]:
    """Start, warm up, one fault at a random moment of a step, first new step."""
    with Job(command) as job:
        job.until_step(WARM_STEPS)
        time.sleep(random.random() * 0.3)
        first = max(job.steps(r)[0]["t"] for r in range(RANKS)) - job.began
        moment, best = inject(job, fault)
        recovered = job.new_step_after(moment, best, timeout_s)
        starts = [
            row["t"] for r in range(RANKS) for row in job.rows(r) if row["event"] == "start" and row["t"] > moment
        ]
        return {
            "start": first,
            "gap": recovered - moment if recovered else None,
            "restart": recovered - min(starts) if recovered and starts else None,
        }


def steady(command: list[str]) -> dict[str, float | None]:
    """Median step of a job left alone; nobody reads its files meanwhile."""
    with Job(command, "--steps", str(STEADY_STEPS), "--no-checkpoint") as job:
        job.process.wait(180)
        times = [row["t"] for row in job.steps(0)][WARM_STEPS:]
    return {"step": median([b - a for a, b in zip(times, times[1:], strict=False)])}


def inject(job: Job, fault: str) -> tuple[float, float]:
    """When the fault came, and the newest step anybody had made by then."""
    if fault == "raise":
        (job.folder / "raise").touch()
        job.until(lambda: 1.0 if job.rows(1)[-1]["event"] == "raise" else None, 30)
        row = job.rows(1)[-1]
        return row["t"], row["step"]
    best = max(job.steps(r)[-1]["step"] for r in range(RANKS))
    moment = time.monotonic()
    os.kill(int(job.rows(1)[-1]["pid"]), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    return moment, best


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = 5 if options.full else 1
    ours: dict[str, list[dict[str, float | None]]] = {"kill": [], "raise": [], "stop": [], "alone": []}
    peers: dict[str, list[dict[str, float | None]]] = {"kill": [], "raise": [], "stop": [], "alone": []}
    for number in range(rounds):
        for fault in ("kill", "raise"):
            say(f"round {number + 1} of {rounds}: {fault}")
            ours[fault].append(recover(everstep(), fault, 30))
            peers[fault].append(recover(torchrun(), fault, 60))
        ours["alone"].append(steady(everstep()))
        peers["alone"].append(steady(torchrun()))
        ours["stop"].append(recover(everstep("--hang-timeout", str(HANG_TIMEOUT_S)), "stop", 30))
    if options.full:
        peers["stop"].append(recover(torchrun(), "stop", 30))
    show(claims(ours, peers), options.json)


def claims(
    ours: dict[str, list[dict[str, float | None]]], peers: dict[str, list[dict[str, float | None]]]
) -> list[Claim]:
    def values(rows: list[dict[str, float | None]], key: str) -> list[float]:
        return [v for row in rows if (v := row[key]) is not None]

    def compare(claim: str, fault: str, key: str, bar: str, most: float, least_ratio: float) -> Claim:
        mine, theirs = values(ours[fault], key), values(peers[fault], key)
        value = median(mine) if len(mine) == len(ours[fault]) else None
        peer = median(theirs) if theirs else None
        ratio = peer / value if peer and value else None
        holds = value is not None and value <= most and (ratio is None or ratio >= least_ratio)
        return Claim(claim, value, "s", "torchrun", peer, ratio, bar, holds)

    infinity = float("inf")
    return [
        compare("SIGKILL of a worker -> first new step", "kill", "gap", "<= 0.7 s and 8x", 0.7, 8),
        compare("exception in a worker -> first new step", "raise", "gap", "", infinity, 1),
        compare("SIGSTOP of a worker, --hang-timeout 2 -> first new step", "stop", "gap", "<= 3 s", 3.0, 0),
        compare("job start -> first step", "kill", "start", "not slower", infinity, 1),
        compare("restart of all workers -> first step", "kill", "restart", "<= 0.5 s", 0.5, 1),
        compare("steady step", "alone", "step", "not slower (5 %)", infinity, 0.95),
    ]


if __name__ == "__main__":
    main()
