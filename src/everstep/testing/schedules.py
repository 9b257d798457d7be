"""Seeded random schedules of faults against the control plane's machines, on a virtual clock.

Run: everstep schedules --count 10000, or --seed N --trace for one with everything that happened.

A schedule is a whole simulated job (testing.cluster) of a minute or two with several faults (testing.faults), whose
invariants are checked after every event (testing.truth). Then the faults stop, and the job must run again, or end.
The same seed gives the same schedule, event for event.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Iterable

import msgspec

from everstep.control.job import ENDED
from everstep.core.types import JobSpec
from everstep.testing.claims import require
from everstep.testing.cluster import Cluster
from everstep.testing.faults import Faults

# A machine's own assertion, or a mistake in its code, is as much a failure as a violated invariant.
BROKEN = (AssertionError, LookupError, TypeError, ValueError, AttributeError, StopIteration)
SETTLE_S = 240.0  # virtual seconds in which a job must run again, or end, once the faults stop
LASTING_S = 45.0  # longer than every lease and fence of a schedule


class Played(msgspec.Struct, frozen=True):
    """One schedule that held."""

    seed: int
    events: int
    outcome: str
    faults: Counter[str]


class Failure(msgspec.Struct, frozen=True):
    seed: int
    why: str
    where: str


class Summary(msgspec.Struct):
    schedules: int = 0
    events: int = 0
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    failures: list[Failure] = msgspec.field(default_factory=list)

    def add(self, other: Summary) -> None:
        self.schedules += other.schedules
        self.events += other.events
        self.faults += other.faults
        self.outcomes += other.outcomes
        self.failures += other.failures


def spec_of(rng: random.Random) -> JobSpec:
    """Short time-outs in the order that core.config demands."""
    most = rng.choice((1, 1, 2, 2, 3, 4))
    return JobSpec(
        job="schedule",
        min_nodes=rng.randint(1, most),
        max_nodes=most,
        max_restarts=rng.choice((100, 100, 100, 100, 3, 0)),
        grace_s=rng.choice((1.0, 3.0)),
        join_timeout_s=30.0,
        last_call_s=1.0,
        reconnect_s=0.5,
        lease_s=2.0,
        recover_s=2.5,
        stop_margin_s=1.0,
        fence_s=4.0,
        crash_loop=3,
    )


def sort_of(seed: int, rng: random.Random) -> dict[str, bool]:
    """Odd seeds: scripts have sessions; in four of ten of these the number of members may not change."""
    fixed = bool(seed % 2) and rng.random() < 0.4
    return {"with_sessions": bool(seed % 2), "fixed": fixed, "restartable": fixed and rng.random() < 0.5}


def play(seed: int, lines: list[str] | None = None) -> Played:
    """One schedule. Raises truth.Violation, or whatever a machine raised. `lines` collects what happened."""
    rng = random.Random(seed)
    cluster = Cluster(rng, spec_of(rng), lines, **sort_of(seed, rng))
    faults = Faults(cluster, slots=rng.randint(1, 2))
    cluster.one_bug = rng.random() < 0.1
    if cluster.one_bug and rng.random() < 0.5:
        cluster.rounds.poison_step = rng.randint(0, 4)
    for _ in range(rng.randint(cluster.spec.min_nodes, cluster.spec.max_nodes + 1)):
        faults.count(faults.node_joined)
    begin_s = cluster.clock.now_s
    until_s = begin_s + rng.uniform(50.0, 105.0)
    if rng.random() < 0.3:
        cluster.finish_at(begin_s + rng.uniform(5.0, 130.0))
    _plan_faults(faults, begin_s, until_s - begin_s)
    while cluster.controller.job.stage not in ENDED and cluster.clock.step(until_s):
        pass
    _settle(cluster, faults)
    stage = cluster.controller.job.stage
    return Played(seed, cluster.clock.happened, stage.value if stage in ENDED else "runs", cluster.faults)


def _plan_faults(faults: Faults, begin_s: float, lasting_s: float) -> None:
    """Some alone, some in bursts: a second fault while the first is being recovered from."""
    rng, clock = faults.rng, faults.cluster.clock
    for _ in range(rng.randint(2, 9)):
        moment = begin_s + lasting_s * rng.random()
        for _ in range(rng.choice((1, 1, 2, 4))):
            clock.at(moment, faults.strike)
            moment += rng.expovariate(1.0)
    if rng.random() < 0.1:
        moment = begin_s + lasting_s * rng.random()
        for _ in range(rng.randint(1, 2)):
            clock.at(moment, faults.count, faults.stop_asked)
            moment += rng.expovariate(1.0)


def _settle(cluster: Cluster, faults: Faults) -> None:
    """Without faults the job must run with a whole epoch, or end and leave nothing behind."""
    faults.silence()
    deadline_s = cluster.clock.now_s + SETTLE_S
    for more_s in (LASTING_S, 0.0):  # it settles, and some time later it still is
        while not cluster.settled and cluster.clock.step(deadline_s):
            pass
        lasting_s = cluster.clock.now_s + more_s
        while more_s and cluster.clock.step(lasting_s):
            pass
    job = cluster.controller.job
    why = cluster.formations_lack() if job.stage not in ENDED else ""
    require(cluster.settled, f"{SETTLE_S:.0f} s without faults, and the job is {job.stage.value}, not running; {why}")
    if job.stage in ENDED:
        require(job.outcome is not None and job.outcome.why, "ended without a reason")
    cluster.truth.same_job(job, cluster.controller.replayed())


def play_many(seeds: Iterable[int], *, stop_at: int = 5) -> Summary:
    """Play them all, or until `stop_at` have failed."""
    summary = Summary()
    for seed in seeds:
        summary.schedules += 1
        try:
            played = play(seed)
        except BROKEN as error:
            where = traceback.format_exc(limit=-3)
            summary.failures.append(Failure(seed, f"{type(error).__name__}: {error}"[:300], where))
            if len(summary.failures) >= stop_at:
                break
            continue
        summary.events += played.events
        summary.faults += played.faults
        summary.outcomes[played.outcome] += 1
    return summary
