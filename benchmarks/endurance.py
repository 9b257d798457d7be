"""Forced restarts in one job: descriptors, threads and memory of every part of the control plane stay flat.

    python benchmarks/endurance.py [--quick | --full] [--json]

Each restart is a real SIGKILL of a random worker once all have stepped. --quick makes 40 of them, --full 200.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

from harness import ROOT, Claim, arguments, median, say, show

from everstep.control import procfs, sweep
from everstep.core import events as e
from everstep.testing.local import LocalRun

SCRIPT = ROOT / "benchmarks" / "scripts" / "tiny_steps.py"
EARLY = 10  # restarts before the first look: caches are warm by then
LOOKS = 10
RSS_GROWTH = 1.1  # what counts as flat
OPTIONS = ("--nproc-per-node", "2", "--max-restarts", "100000", "--set", "restart.crash_loop=100000")


def parts(run: LocalRun) -> dict[str, int]:
    """Processes of the control plane: name -> pid."""
    agent = run.agent_pid("node0")
    assert run.process is not None
    zygote = next(pid for pid in procfs.children(agent) if pid not in run.pids().values())
    return {"launcher": run.process.pid, "controller": run.controller_pid(), "agent": agent, "zygote": zygote}


def look(run: LocalRun) -> dict[str, tuple[int, int, int]]:
    """For each part: descriptors, threads, resident bytes; the least of several looks, as logs are still being closed
    and requests answered for a moment after a restart."""
    found: dict[str, tuple[int, int, int]] = {}
    for _ in range(LOOKS):
        for name, pid in parts(run).items():
            sample = procfs.sample(pid)
            assert sample is not None
            seen = (len(os.listdir(f"/proc/{pid}/fd")), sample.threads, sample.rss_bytes)
            least = found.get(name, seen)
            found[name] = (min(least[0], seen[0]), min(least[1], seen[1]), min(least[2], seen[2]))
        time.sleep(0.1)
    return found


def main() -> None:
    options = arguments(__doc__ or "")
    count = 200 if options.full else 40
    segments = set(os.listdir("/dev/shm"))
    with LocalRun(Path(tempfile.mkdtemp(prefix="everstep-endurance-")), SCRIPT, *OPTIONS) as run:
        gaps, early = [], {}
        for number in range(1, count + 1):
            run.until_step(1, epoch=number)
            if number == EARLY:
                early = look(run)
            began = time.monotonic()
            run.kill(random.randrange(2))
            run.until_step(1, epoch=number + 1)
            gaps.append(time.monotonic() - began)
            if number % 20 == 0:
                say(f"{number} of {count} restarts, the last in {gaps[-1]:.2f} s")
        late, job = look(run), run.run_dir.name
        run.signal(signal.SIGTERM)
        run.wait()
        epochs = len(run.events(e.EpochFormed))
    left = len(sweep.leftovers(job, "node0", ())) + len(set(os.listdir("/dev/shm")) - segments)
    show(claims(count, epochs, early, late, left, median(gaps)), options.json)


def claims(
    count: int,
    epochs: int,
    early: dict[str, tuple[int, int, int]],
    late: dict[str, tuple[int, int, int]],
    left: int,
    gap: float,
) -> list[Claim]:
    rows = [
        Claim("restarts made (epochs formed less one)", epochs - 1, "", bar=f"{count}", holds=epochs == count + 1),
        Claim("processes and /dev/shm entries left at the end", left, "", bar="0", holds=left == 0),
        Claim("SIGKILL -> all workers of a tiny script stepped again (seen in the journal)", gap, "s"),
    ]
    for name, (fds, threads, rss) in late.items():
        before = early[name]
        rows.append(
            Claim(f"{name}: descriptors now less then", fds - before[0], "", bar="<= 0", holds=fds <= before[0])
        )
        rows.append(
            Claim(f"{name}: threads now less then", threads - before[1], "", bar="<= 0", holds=threads <= before[1])
        )
        growth = rss / before[2]
        rows.append(
            Claim(f"{name}: memory now over then", growth, "x", bar=f"<= {RSS_GROWTH}", holds=growth <= RSS_GROWTH)
        )
    return rows


if __name__ == "__main__":
    main()
