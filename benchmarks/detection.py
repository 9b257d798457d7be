"""Stragglers: found, falsely found, how soon, at what cost: python benchmarks/detection.py [--quick | --full] [--json]

Issue 5, rows 1, 2 and 6. Row 1: synthetic jobs (detection_jobs.py) with a slow-down of 10, 20 and 50 % each, besides
jobs with none; the same for two peers (detection_peers.py) on the same jobs. Row 2: two real series. Row 6: time of
`Straggler.saw`. One process, one thread; EVERSTEP_PLOT=file.png draws the delays and the real series.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from detection_jobs import STEP_S, Job, Slow, job
from detection_peers import Event, change_points, z_score
from harness import ROOT, Claim, arguments, machine, median, say, show

from everstep.detect.straggler import Finding, Straggler, Work

SERIES = ROOT / "tests" / "detect" / "data"
BY = (0.1, 0.2, 0.5)
MEMBERS = (8, 16, 32, 64)
GRACE = 2  # steps after the end of a slow-down in which naming its member is no false alarm


@dataclasses.dataclass
class Score:
    """Of one way over many jobs. `delays`: slow steps until named, by size; None: never."""

    delays: dict[float, list[int | None]]
    false_alarms: list[int]  # by job
    repeats: int = 0  # the same slow-down named again
    jitter: int = 0  # of the false alarms: jitter of all, nobody named
    cleared: list[int | None] = dataclasses.field(default_factory=list)  # healthy steps until cleared

    def found(self, by: float) -> float:
        return 100.0 * sum(d is not None for d in self.delays[by]) / len(self.delays[by])

    def within(self, by: float, steps: int) -> float:
        return 100.0 * sum(d is not None and d <= steps for d in self.delays[by]) / len(self.delays[by])

    def typical(self, by: float, quantile: float) -> float:
        known = sorted(np.inf if d is None else d for d in self.delays[by])
        return float(known[min(len(known) - 1, int(quantile * len(known)))])


def empty() -> Score:
    return Score({by: [] for by in BY}, [])


def watch(job: Job) -> list[Finding]:
    """All that the detector says about a job."""
    detector = Straggler(job.work_s.shape[1])
    nothing = np.zeros(job.work_s.shape[1])
    found: list[Finding] = []
    for step, work_s in enumerate(job.work_s):
        found += detector.saw(step, Work(work_s, nothing, nothing, job.tokens[step], job.squares[step]))
    return found


def count(score: Score, job: Job, events: Sequence[Event]) -> None:
    """Events against the truth: within a slow-down its member's first is a hit, all others' are false."""
    wrong = 0
    hits: dict[Slow, int] = {}
    for step, member in events:
        slow = next((s for s in job.slow if s.member == member and s.first <= step < s.last + GRACE), None)
        if slow is None:
            wrong += 1
        elif slow in hits:
            score.repeats += 1
        else:
            hits[slow] = step - slow.first + 1
    for slow in job.slow:
        score.delays[slow.by].append(hits.get(slow))
    score.false_alarms.append(wrong)


def count_ours(score: Score, job: Job, found: Sequence[Finding]) -> None:
    count(score, job, [(f.step, f.member) for f in found if not f.cleared])
    score.jitter += sum(f.kind == "jitter" and not f.cleared for f in found)
    steps = len(job.work_s)
    for slow in job.slow:
        if slow.last < steps - 20 and any(f.member == slow.member and not f.cleared for f in found):
            ends = [f.step for f in found if f.cleared and f.member == slow.member and f.step >= slow.last]
            score.cleared.append(ends[0] - slow.last + 1 if ends else None)


def synthetic(jobs: int, clean: int, noise: Callable[[np.random.Generator], float], peers: bool) -> dict[str, Score]:
    rng = np.random.default_rng(5)
    scores = {name: empty() for name in ("everstep", "z-score", "ACF + change point")[: 3 if peers else 1]}
    for number in range(jobs + clean):
        made = job(rng, int(rng.choice(MEMBERS)), BY if number < jobs else (), noise(rng))
        count_ours(scores["everstep"], made, watch(made))
        if peers:
            count(scores["z-score"], made, z_score(made.work_s))
            count(scores["ACF + change point"], made, change_points(made.work_s))
        if number % 50 == 49:
            say(f"{number + 1} of {jobs + clean} jobs")
    return scores


def row_one(scores: dict[str, Score], what: str, judged: bool) -> list[Claim]:
    """`judged`: the bars of the issue hold for these jobs."""
    rows = [row for by in BY for row in one_size(scores, f"{what}, +{100 * by:.0f} %", by, judged)]
    for name, s in scores.items():
        alarms = float(np.mean(s.false_alarms))
        ours = judged and name == "everstep"
        bar, holds = ("<= 0.1", alarms <= 0.1) if ours else ("", None)
        rows.append(Claim(f"{what}: false alarms a run, {name}", alarms, "a run", bar=bar, holds=holds))
    score = scores["everstep"]
    known = [np.inf if c is None else float(c) for c in score.cleared]
    soon = 100 * float(np.mean(np.array(known) <= 20))
    return [
        *rows,
        Claim(f"{what}: of them jitter, nobody named", score.jitter / len(score.false_alarms), "a run"),
        Claim(f"{what}: slow-downs named twice", float(score.repeats), "of all"),
        Claim(f"{what}: healthy steps until cleared, median", median(known), "steps"),
        Claim(f"{what}: cleared within 20 steps", soon, "%"),
    ]


def one_size(scores: dict[str, Score], size: str, by: float, judged: bool) -> list[Claim]:
    ours = scores["everstep"]
    found, late = ours.found(by), ours.typical(by, 0.99)
    bar, holds = (">= 99 %", found >= 99) if judged else ("", None)
    rows = [Claim(f"{size}: named", found, "%", bar=bar, holds=holds)]
    rows += [Claim(f"{size}: named by the {name}", s.found(by), "%") for name, s in list(scores.items())[1:]]
    bar, holds = ("<= 5 steps", late <= 5) if judged and by == 0.2 else ("", None)
    return [
        *rows,
        Claim(f"{size}: slow steps until named, median", ours.typical(by, 0.5), "steps"),
        Claim(f"{size}: slow steps until named, 99 of 100", late, "steps", bar=bar, holds=holds),
        Claim(f"{size}: named within 5 steps", ours.within(by, 5), "%"),
    ]


def series(path: Path) -> tuple[list[int], np.ndarray]:
    """(steps, times) of a file of real times; nan where a worker has none."""
    with path.open() as file:
        rows = [(int(r["time"]), int(r["worker"]), float(r["batch_time_norm"])) for r in csv.DictReader(file)]
    steps = sorted({step for step, _, _ in rows})
    times = np.full((len(steps), 1 + max(worker for _, worker, _ in rows)), np.nan)
    for step, worker, value in rows:
        times[steps.index(step), worker] = value
    return steps, times


def real(name: str) -> list[Finding]:
    steps, times = series(SERIES / name)
    detector = Straggler(times.shape[1])
    return [f for step, row in zip(steps, times, strict=True) for f in detector.saw(step, Work.plain(row))]


def row_two() -> list[Claim]:
    first, second = real("alibaba-job-1.csv"), real("alibaba-job-2.csv")
    for f in (*first, *second):
        say(f"step {f.step}: {f.kind} of {f.member}{', cleared' if f.cleared else ''}: {f.why}")
    named = {f.member for f in first if not f.cleared}
    onset = min((f.step for f in first if f.member == 6), default=None)
    late = None if onset is None else (onset - 1811) / 10 + 1
    return [
        Claim("real job 1: members named besides worker 6", len(named - {6}), "members", bar="0", holds=named == {6}),
        Claim("real job 1: samples until worker 6 is named", late, "samples", bar="<= 5", holds=0 < (late or 0) <= 5),
        Claim("real job 2: events", len(second), "events", bar="0", holds=not second),
    ]


def cost_s(members: int, steps: int) -> list[float]:
    """Seconds of processor time of each call of `saw`, from the first to the last: other work beside does not count."""
    rng = np.random.default_rng(1)
    made = job(rng, members, (0.2,), 0.015, steps)
    detector, nothing, taken = Straggler(members), np.zeros(members), []
    data_s = np.full(members, 0.001)
    for step, work_s in enumerate(made.work_s):
        work = Work(work_s, data_s, nothing, made.tokens[step], made.squares[step])
        began = time.process_time()
        detector.saw(step, work)
        taken.append(time.process_time() - began)
    return taken


def row_six() -> list[Claim]:
    small, large = cost_s(8, 1000), cost_s(10_000, 60)
    share = 100 * float(np.mean(small)) / STEP_S
    worst = 1e3 * max(large)
    return [
        Claim("8 members: time of a step's detection, mean", 1e6 * float(np.mean(small)), "us"),
        Claim("8 members: of a step of 0.3 s", share, "%", bar="< 0.5 %", holds=share < 0.5),
        Claim("10,000 members: time of a step's detection, median", 1e3 * median(large), "ms"),
        Claim("10,000 members: longest of 60 steps", worst, "ms", bar="< 50 ms", holds=worst < 50),
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    say(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    rows = row_six() + row_two()
    jobs, clean = (200, 60) if options.full else (20, 10)
    scores = synthetic(jobs, clean, lambda rng: rng.uniform(0.012, 0.016), peers=True)
    rows += row_one(scores, "noise 1.2 to 1.6 %", judged=True)
    noisy = synthetic(jobs // 5, clean // 5, lambda rng: 0.04, peers=False)
    rows += row_one(noisy, "noise 4 %", judged=False)
    if os.environ.get("EVERSTEP_PLOT"):
        from detection_plot import plot

        plot(Path(os.environ["EVERSTEP_PLOT"]), scores["everstep"].delays, series(SERIES / "alibaba-job-1.csv"))
    show(rows, options.json)


if __name__ == "__main__":
    main()
