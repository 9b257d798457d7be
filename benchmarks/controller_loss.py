"""The controller is killed while a job trains: does any step take longer than usual, and is the next fault handled?

    python benchmarks/controller_loss.py [--quick | --full] [--json]

Real SIGKILLs. Step times come from the script's own log. "Usual" is the slowest of the steps away from the kills.
"""

from __future__ import annotations

import os
import signal
import time

from harness import Claim, arguments, median, say, show
from recovery import WARM_STEPS, Job, everstep

from everstep.control.journal import read
from everstep.core import events as e

WINDOW_S = 1.0  # after a kill
PAUSE_S = 3.0  # between kills
SLACK = 1.2  # noise of the slowest step


def main() -> None:
    options = arguments(__doc__ or "")
    kills = 10 if options.full else 3
    with Job(everstep("--run-dir", "runs"), "--no-checkpoint") as job:
        job.until_step(WARM_STEPS)
        run_dir = job.folder / "runs" / "latest"
        moments = []
        for number in range(kills):
            job.until_step(len(job.steps(0)) + int(PAUSE_S / typical(job)))
            moments.append(time.monotonic())
            os.kill(int((run_dir / "controller.pid").read_text()), signal.SIGKILL)
            say(f"controller killed, {number + 1} of {kills}")
            job.until_step(len(job.steps(0)) + int(PAUSE_S / typical(job)))
        rows = [row["t"] for row in job.steps(0)][WARM_STEPS:]
        steps = [(a, b - a) for a, b in zip(rows, rows[1:], strict=False)]
        near = [s for at, s in steps if any(-s < at - m < WINDOW_S for m in moments)]
        usual = [s for at, s in steps if not any(-s < at - m < WINDOW_S for m in moments)]
        events = [entry.event for entry in read(run_dir / "journal.jsonl")]
        epochs = sum(isinstance(event, e.EpochFormed) for event in events)
        lives = sum(isinstance(event, e.ControllerStarted) for event in events)
        fault = time.monotonic()
        os.kill(int(job.rows(1)[-1]["pid"]), signal.SIGKILL)
        recovered = job.new_step_after(fault, 0, 20)
    ratio = max(near) / max(usual)
    show(
        [
            Claim("slowest step within 1 s of a kill, over the slowest of the others", ratio, "x", bar=f"<= {SLACK}",
                  holds=ratio <= SLACK),
            Claim("median step within 1 s of a kill, over that of the others", median(near) / median(usual), "x"),
            Claim("controllers after the kills", lives, "", bar=f"{kills + 1}", holds=lives == kills + 1),
            Claim("epochs after the kills", epochs, "", bar="1", holds=epochs == 1),
            Claim("then a worker killed -> first step", recovered - fault if recovered else None, "s", bar="recovers",
                  holds=recovered is not None),
        ],
        options.json,
    )  # fmt: skip


def typical(job: Job) -> float:
    """Median step, seconds."""
    rows = [row["t"] for row in job.steps(0)]
    return median([b - a for a, b in zip(rows, rows[1:], strict=False)])


if __name__ == "__main__":
    main()
