"""What `make demo` shows: a small GPT learns Python's own sources on 2 nodes x 2 workers while one worker is killed.

    python examples/demo.py [--steps N]

The script takes its steps from a session (train_gpt_session.py), the nodes are two agents on loopback addresses, the
kill is a real SIGKILL of a random worker at a random step: the other three go on with the interrupted step, a new
process joins them some steps later. At the end: a sample of text, the summary, and a picture of the run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from everstep.core import events as e
from everstep.observe.plot import plot, read_rows
from everstep.testing.local import LocalRun

HERE = Path(__file__).resolve().parent
WORKERS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    folder = Path("everstep_runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    folder = folder.absolute()
    folder.mkdir(parents=True)
    script = ("--steps", str(steps), "--log-file", "train.jsonl")
    run = LocalRun(folder, HERE / "train_gpt_session.py", "--local-nodes", "2", "--nproc-per-node", "2", args=script)
    run.echo = True
    victim, moment = random.randrange(WORKERS), random.randint(steps * 3 // 10, steps * 6 // 10)
    with run:
        run.until_step(moment, timeout_s=150)
        pid = run.kill(victim)
        print(f"\ndemo: SIGKILL to rank {victim} (process {pid}) near step {moment}\n", file=sys.stderr, flush=True)
        code = run.wait(timeout_s=170)
    closed = [c for c in run.events(e.IncidentClosed) if c.outcome == "recovered"]
    picture = folder / "run.png"
    plot(run.entries(), read_rows(folder / "train.jsonl"), picture)
    print(
        f"\ndemo: {len(closed)} recovery; what it was and what it cost: {run.run_dir / 'report.html'}", file=sys.stderr
    )
    print(f"demo: picture of the run: {picture}", file=sys.stderr)
    return code if closed or code else 1


if __name__ == "__main__":
    sys.exit(main())
