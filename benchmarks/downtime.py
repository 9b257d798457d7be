"""SIGKILL of one of four data-parallel members: how long until the others commit a step without it.

    python benchmarks/downtime.py [--quick | --full] [--json]

Same model, same steps, alternating in one run: Everstep (a session, with and without a standby), torchft and NVRx's
in-process restart from PyPI (installed into .venv-peers-downtime on first use), and DistributedDataParallel with a
checkpoint every step under torchrun. Each is set up for the shortest recovery that we know of: benchmarks/jobs.py and
benchmarks/scripts/downtime_*.py say how.

A time begins before the signal is sent. It ends when the last survivor has committed a step that nobody had made before
and that the dead one had no part in; under torchrun, which replaces the survivors, when all four new processes have;
with a standby, when the one that took over has. --full makes at least seven kills a system, --quick two. Then a job
with a standby is killed on and on (ten times in 200 steps, --quick twice in 40) and compared with an undisturbed one.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import jobs
from harness import ROOT, Claim, arguments, median, say, show

sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "tests" / "integration"))
import peers
from session_harness import SessionRun

FOLDER = ROOT / ".venv-peers-downtime"
SPARE = ("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "2", "--standbys", "1")
TORCHFT = "torchft-nightly==2026.10.26"
NVRX = "nvidia-resiliency-ext==0.4.1"
FASTER = 20.0  # times, than torchft and NVRx
FAILURES = 2  # of a peer, then it is left alone
WHAT = "SIGKILL of 1 of 4 -> survivors' next committed step"


class Series:
    """What became of one system's jobs. `ratio`: how many times faster we have to be. `lacks`: why it did not run."""

    def __init__(self, system: jobs.System, ratio: float = 0.0, lacks: str = "") -> None:
        self.system, self.ratio, self.lacks = system, ratio, lacks
        self.faults: list[jobs.Fault] = []
        self.failures = 0

    @property
    def name(self) -> str:
        """With the times that it did not go on, which no median shows."""
        tries = self.failures + len(self.faults)
        return self.system.name + (f", {self.failures} of {tries} never" if self.failures else "")

    @property
    def gap_s(self) -> float | None:
        return median([fault.gap_s for fault in self.faults]) if self.faults else None

    @property
    def step_s(self) -> float | None:
        return median([fault.step_s for fault in self.faults]) if self.faults else None

    def extend(self) -> None:
        """One more job, with as many kills as it can take."""
        with jobs.Job(self.system) as job:
            for _ in range(self.system.kills):
                fault = job.strike()
                self.faults.append(fault)
                say(f"{self.system.name}: {fault.gap_s:.3f} s, a step takes {fault.step_s:.3f} s")


def everstep() -> tuple[Series, Series]:
    """Without a standby and with one."""
    alone = jobs.System("Everstep", lambda folder: jobs.everstep(folder, "--nproc-per-node", "4"))
    spared = jobs.System("Everstep, a standby", lambda folder: jobs.everstep(folder, *SPARE), newcomers=1, standby=True)
    return Series(alone), Series(spared)


def others() -> list[Series]:
    torch = version(peers.locked("torch"))
    return [
        peer(TORCHFT, "heartbeat and gloo time-out 1 s", jobs.torchft_tuned),
        peer(TORCHFT, "heartbeat time-out 5 s, its default", jobs.torchft, ratio=0.0),
        peer(NVRX, "in-process, looks every 0.1 s, gloo time-out 1 s", jobs.nvrx, kills=1),
        Series(jobs.System(f"torchrun {torch} (checkpoint every step)", jobs.torchrun, newcomers=4)),
    ]


def version(pinned: str) -> str:
    return pinned.partition("==")[2]


def peer(pinned: str, how: str, launches: jobs.PeerLaunches, kills: int = 2, ratio: float = FASTER) -> Series:
    """From PyPI; one that cannot be installed here is said to lack, and does not fail the rest."""
    python, lacks = Path(), ""
    try:
        python = peers.prepare(FOLDER, peers.locked("torch"), peers.locked("numpy"), pinned)
    except peers.NotInstalled as error:
        say(str(error))
        lacks = "could not be installed"
    name = f"{pinned.replace('==', ' ')} ({how})"
    return Series(jobs.System(name, lambda folder: launches(python, folder), kills=kills), ratio, lacks)


def alternate(ours: tuple[Series, Series], theirs: list[Series], rounds: int) -> None:
    for number in range(1, rounds + 1):
        say(f"round {number} of {rounds}")
        for series in (ours[0], *theirs, ours[1]):
            if series.lacks or series.failures >= FAILURES or len(series.faults) >= number:
                continue
            try:
                series.extend()
            except jobs.Stuck as stuck:
                if series in ours:
                    raise
                series.failures += 1
                say(str(stuck))


def differing(num_steps: int, num_kills: int) -> int:
    """Steps of a job that were not to the bit those of the undisturbed one, while its members were killed at random."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder, args = Path(name), ("--steps", str(num_steps))
        with SessionRun(folder / "undisturbed", *SPARE, args=args) as quiet:
            if quiet.wait():
                raise RuntimeError(quiet.text())
        with SessionRun(folder / "killed", *SPARE, args=(*args, "--pause", "0.03")) as run:
            every = num_steps // (num_kills + 1)
            for kill in range(num_kills):
                run.until_committed(kill * every + random.randint(1, every))
                run.until_standby()
                run.kill_member(random.randrange(4))
            if run.wait():
                raise RuntimeError(run.text())
        return sum(a != b for a, b in zip(run.check(num_steps), quiet.check(num_steps), strict=True))


def main() -> None:
    options = arguments(__doc__ or "")
    ours, theirs = everstep(), others()
    alternate(ours, theirs, 7 if options.full else 2)
    num_steps, num_kills = (200, 10) if options.full else (40, 2)
    say(f"{num_kills} kills in {num_steps} steps")
    unequal = differing(num_steps, num_kills)
    bits = f"steps that differ from an undisturbed run, {num_kills} kills in {num_steps} steps, a standby"
    show(
        [
            within(WHAT, ours[0], 0.05),
            *(against(ours[0], other) for other in theirs),
            within("SIGKILL of 1 of 4 -> first committed step of the standby that took over", ours[1], 0.15),
            Claim(bits, unequal, "", bar="0", holds=unequal == 0),
            *(steady(ours[0], other) for other in theirs if other.step_s),
        ],
        options.json,
    )


def within(claim: str, series: Series, more_s: float) -> Claim:
    """At most one step and a bit."""
    assert series.gap_s is not None and series.step_s is not None
    bar = f"<= one step ({series.step_s:.3f} s) + {more_s} s"
    return Claim(claim, series.gap_s, "s", bar=bar, holds=series.gap_s <= series.step_s + more_s)


def against(mine: Series, other: Series) -> Claim:
    """The bar counts as held only where the other one went on at all."""
    bar = f">= {other.ratio:.0f}x" if other.ratio else ""
    if other.lacks:
        return Claim(f"{WHAT}; {other.name} {other.lacks}", mine.gap_s, "s", bar=bar)
    ratio = other.gap_s / mine.gap_s if other.gap_s and mine.gap_s else None
    holds = ratio >= other.ratio if ratio and bar else None
    return Claim(WHAT, mine.gap_s, "s", other.name, other.gap_s, ratio, bar, holds)


def steady(mine: Series, other: Series) -> Claim:
    assert mine.step_s is not None and other.step_s is not None
    return Claim("a step before the kills", mine.step_s, "s", other.name, other.step_s, other.step_s / mine.step_s)


if __name__ == "__main__":
    main()
