"""From SIGKILL of a worker to everybody knowing it, with a lot of memory in the victim.

    python benchmarks/detection_latency.py [--quick | --full] [--json]

The victim is signalled by this program, which notes the time; the controller's journal has the time at which every
survivor's agent had signalled its workers (SurvivorsTold). Both read CLOCK_MONOTONIC of one machine.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

from harness import ROOT, Claim, arguments, median, say, show

from everstep.core import events as e
from everstep.testing.local import LocalRun

SCRIPT = ROOT / "benchmarks" / "scripts" / "tiny_steps.py"
OPTIONS = ("--local-nodes", "2", "--nproc-per-node", "1", "--max-restarts", "1000", "--set", "restart.crash_loop=1000")


def latencies(ballast_gb: float, count: int) -> tuple[list[float], list[float]]:
    """Seconds from the kill until the controller had journalled it, and until all survivors were told."""
    known, told = [], []
    folder = Path(tempfile.mkdtemp(prefix="everstep-latency-"))
    with LocalRun(folder, SCRIPT, *OPTIONS, BALLAST_GB=str(ballast_gb)) as run:
        for number in range(1, count + 1):
            run.until_step(5, epoch=number, timeout_s=90)
            victim = run.pids()[random.randrange(2)]
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            run.until(lambda number=number: len(run.events(e.SurvivorsTold)) >= number)  # type: ignore[misc]
            for entry in run.entries():
                if entry.t_s > began and isinstance(entry.event, e.IncidentOpened):
                    known.append(entry.t_s - began)
                elif entry.t_s > began and isinstance(entry.event, e.SurvivorsTold):
                    told.append(entry.t_s - began)
        run.signal(signal.SIGTERM)
        run.wait()
    return known, told


def main() -> None:
    options = arguments(__doc__ or "")
    count = 15 if options.full else 4
    rows = []
    for ballast in (0.0, 4.0):
        known, told = latencies(ballast, count)
        what = f"SIGKILL of a worker with {ballast:.0f} GB of ballast"
        say(f"{what}: told after {', '.join(f'{t * 1e3:.1f}' for t in told)} ms")
        rows.append(Claim(f"{what} -> in the controller's journal", median(known) * 1e3, "ms"))
        middle = median(told) * 1e3
        rows.append(Claim(f"{what} -> all survivors signalled", middle, "ms", bar="<= 10 ms", holds=middle <= 10))
    show(rows, options.json)


if __name__ == "__main__":
    main()
