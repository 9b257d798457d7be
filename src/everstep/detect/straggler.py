"""Stragglers: which member takes longer for its work than its work, its peers and its own past say, and in what.

One machine over steps. It is given what each member did itself in a step (`core.work.StepWork`, time in waits for
others taken out: the slowest waits least) and finds members that became slow, that are well again, and jitter.

Three channels for each member: compute over what its sequence lengths predict (`workload`), data loader, and saves
(steps that save only), the last two in units of a typical step's work. Of each, the excess beyond the usual distance
to the other members (`usual`), in units of its own noise, goes through a CUSUM (`change`). An alarm is a candidate;
what was summed up since its onset must then validate it:

- at least `least` slower on average, and clearly beyond its noise: tiny shifts and slow wandering are no event;
- slower than its own past too: when the others became faster, it is not to blame;
- late in more steps than pauses that go around among the others explain: a binomial test (chance below 1e-5).

ResiHP validates above 1.25 x predicted or at a change point. Here only the change point counts: 10 % never reaches
1.25, and above it the bounded CUSUM needs four steps whatever the size. Steady differences from the start are part of
what is usual, except those that NVRx's score condemns: others' median / own < 0.75.

Cost: arrays over members, no loop over them; some 60 numpy calls a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.core.types import Blame, Verdict
from everstep.core.work import StepWork
from everstep.detect.change import Cusum
from everstep.detect.jitter import Jitter
from everstep.detect.peers import FLAGGED_UNDER, Flags, Floats
from everstep.detect.usual import Usual
from everstep.detect.workload import WorkloadModel

PHASES = ("compute", "data", "save")
CONDEMNED = 1.0 / FLAGGED_UNDER - 1.0
LATE = 2.5  # spreads above the usual: late in this step
PAUSE = 4.0  # the same, for what may be jitter
RATE_MEMORY = 1.0 / 32  # weight of the newest step in how often a member is late
CHANCE, IN_JITTER = 1e-5, 1e-8  # that pauses which go around make one member late as often as this
DOUBT = 1.5  # level of the CUSUM at which what is usual follows half as fast
OWN_PAST = 0.7  # of the excess over the others that a member must show over its own past
CLEAR = 1.75  # lasting noise that a mean excess must exceed
PATIENCE = 8  # steps a candidate has to be slower than its own past


class Options(msgspec.Struct, frozen=True):
    """What may be tuned. The same values serve all jobs that we measured (benchmarks/detection.py)."""

    warm: int = 16  # steps that teach before anything is judged
    warm_saves: int = 4  # the same for steps that save
    horizon: int = 64  # steps that "usual" remembers
    least: float = 0.05  # smallest slow-down worth an event
    floor: float = 0.01  # no member is taken to be steadier than this
    lifted: float = 0.3  # of the slow-down left: well again


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One step of all members as arrays over members; nan: not known. Fields as in StepWork."""

    work_s: Floats
    data_s: Floats
    save_s: Floats
    tokens: Floats
    squares: Floats

    @classmethod
    def of(cls, members: int, told: Mapping[int, StepWork]) -> Work:
        """From what some of the members told about one step."""
        table = np.zeros((5, members))
        table[0] = np.nan
        for member, w in told.items():
            table[:, member] = w.work_s, w.data_s, w.save_s, w.tokens, w.squares
        return cls(*table)

    @classmethod
    def plain(cls, work_s: Floats) -> Work:
        """Only times are known."""
        nothing = np.zeros_like(work_s)
        return cls(np.asarray(work_s, dtype=float), nothing, nothing, nothing, nothing)

    def without(self, members: Flags) -> Work:
        """Of these nothing is known."""
        return dataclasses.replace(self, work_s=np.where(members, np.nan, self.work_s))


class Finding(msgspec.Struct, frozen=True):
    """What one step brought to light. `member` -1: jitter of all. `slowdown` 0.2: takes 1.2 times as long."""

    kind: str  # "slow" or "jitter"
    step: int
    member: int
    phase: str
    since: int  # step of the onset
    slowdown: float
    why: str
    confidence: float = 1.0
    cleared: bool = False  # it was so, and is over

    @property
    def score(self) -> float:
        """NVRx's: reference / own."""
        return 1.0 / (1.0 + self.slowdown)

    def verdict(self, places: Sequence[tuple[int, str]]) -> Verdict:
        """`places`: (rank, node) of each member."""
        if self.member < 0:
            return Verdict(self.kind, (), self.why, self.confidence)
        rank, node = places[self.member]
        return Verdict(self.kind, (Blame(rank, node, self.kind, self.phase),), self.why, self.confidence)


class Straggler:
    """`saw` every step in order. Members are places 0..n-1; make a new one when their number changes."""

    def __init__(self, members: int, options: Options | None = None) -> None:
        self._options = options or Options()
        self._members = members
        self._first: list[tuple[int, Work]] = []
        self._typical_s = 0.0
        self._model = WorkloadModel()
        self._usual = Usual((3, members), self._options.horizon, self._options.floor)
        self._up = Cusum((3, members), tracked=4)
        self._down = Cusum((members,), tracked=0, drift=0.0)
        self._jitter = Jitter(members)
        self._late_rate = np.zeros(members)
        self._channel = np.full(members, -1)  # in which a member is slow; -1: it is not
        self._slowdown = np.zeros(members)
        self._since = np.zeros(members, dtype=np.int64)
        self._began = np.zeros(members, dtype=np.int64)  # first step of the process in this place
        self._newest = 0
        warm, saves = self._options.warm, self._options.warm_saves
        self._needed = np.array([[warm], [warm], [saves]])

    @property
    def slow(self) -> tuple[int, ...]:
        """Members that are slow now."""
        return tuple(int(member) for member in np.flatnonzero(self._channel >= 0))

    def scores(self) -> Floats:
        """Others' median over own usual compute, by member: below 0.75 NVRx flags. 0: not known yet."""
        own = self._usual.own[0]
        slowed = own + np.where(self._channel == 0, self._slowdown, 0.0)
        return np.asarray(np.divide(own - self._usual.distance[0], slowed, out=np.zeros_like(own), where=slowed > 0))

    def forget(self, member: int) -> None:
        """Another process has this place."""
        if len(self._first) < self._options.warm:
            gone = np.arange(self._members) == member
            self._first = [(step, work.without(gone)) for step, work in self._first]
        self._usual.forget(member)
        self._jitter.forget(member)
        self._late_rate[member] = 0.0
        self._began[member] = self._newest + 1
        self._release(np.arange(self._members) == member)

    def saw(self, step: int, work: Work) -> tuple[Finding, ...]:
        """The work of one step, all members. Steps may be left out; they must not go back."""
        self._newest = step
        if len(self._first) < self._options.warm:
            self._first.append((step, work))
            return self._begin() if len(self._first) == self._options.warm else ()
        values = self._values(work)
        healthy = self._channel < 0
        excess, own = self._usual.excess(values, healthy)
        before = self._usual.count >= self._needed
        z = np.where(before & healthy, excess / self._usual.lasting, np.nan)
        self._up.saw(step, z, self._evidence(excess, own, before & healthy))
        found = self._lifted(step, excess) + self._judged(step)
        healthy = self._channel < 0
        pauses = (excess > PAUSE * self._usual.spread) & (excess > self._options.least) & before & healthy
        found += self._jittered(step, np.asarray(pauses.any(0)), excess)
        self._usual.learn(excess, own, np.broadcast_to(healthy, excess.shape), self._up.level / DOUBT)
        self._learn(work, healthy)
        return found + self._from_start(step, ~before & (self._usual.count >= self._needed))

    def _evidence(self, excess: Floats, own: Floats, judged: Flags) -> Floats:
        """What is summed up since an onset: excess, own excess, own late steps, the others' late steps a member."""
        late = (excess > LATE * self._usual.spread) & (excess > self._options.least / 2) & judged
        anyhow = late.any(0)
        others = (anyhow.sum() - anyhow) / max(1, self._members - 1)
        self._late_rate += RATE_MEMORY * (anyhow - self._late_rate)
        return np.stack((excess, own, late, np.broadcast_to(others, excess.shape)))

    def _begin(self) -> tuple[Finding, ...]:
        steps = [work for _, work in self._first]
        compute_s = np.stack([_compute_s(work) for work in steps])
        known = np.concatenate([work.work_s[np.isfinite(work.work_s)] for work in steps])
        if not known.size:  # nobody told anything: these steps teach nothing
            self._first.clear()
            return ()
        self._typical_s = float(np.median(known))
        self._began = np.maximum(self._began, self._first[0][0])
        self._model.begin(compute_s, np.stack([w.tokens for w in steps]), np.stack([w.squares for w in steps]))
        self._usual.begin(np.stack([self._values(work) for work in steps]))
        return self._from_start(self._first[-1][0], self._usual.count >= self._needed)

    def _values(self, work: Work) -> Floats:
        """(channels, members): compute over its prediction, data and save over a typical step's work."""
        unknown = np.isnan(work.work_s)
        values = np.stack(
            (
                _compute_s(work) / self._model.predict(work.tokens, work.squares),
                work.data_s / self._typical_s,
                np.where(work.save_s > 0, work.save_s, np.nan) / self._typical_s,
            )
        )
        values[:, unknown] = np.nan
        return values

    def _learn(self, work: Work, healthy: Flags) -> None:
        compute_s = np.where(healthy, _compute_s(work), np.nan)
        known = work.work_s[np.isfinite(work.work_s)]
        if known.size:
            self._typical_s += (float(np.median(known)) - self._typical_s) / self._options.horizon
            self._model.learn(compute_s / np.maximum(self._usual.own[0], 1e-3), work.tokens, work.squares)

    def _judged(self, step: int) -> tuple[Finding, ...]:
        """Candidates of the change point, validated."""
        candidates = self._up.alarms
        if not candidates.any():
            return ()
        excess, own, late, others = self._up.means()
        length = self._up.length
        enough = excess > np.maximum(self._options.least, CLEAR * self._usual.lasting)
        own_past = own > OWN_PAST * excess
        slow = candidates & enough & own_past & self._concentrated(late, others, length)
        settled = candidates & ~slow & (~own_past & (length >= PATIENCE) | ~enough & (length >= self._options.horizon))
        self._usual.accept(settled, excess)
        self._up.clear(settled)
        ranked = np.where(slow, excess, -1.0)
        found = []
        for member in np.flatnonzero(slow.any(0)):
            channel = int(ranked[:, member].argmax())
            told = self._told(step, int(member), channel, float(late[channel, member]))
            found.append(told)
        return tuple(found)

    def _concentrated(self, late: Floats, others: Floats, length: NDArray[np.int64]) -> Flags:
        """Whether this member is late more often than the others' pauses explain: Chernoff's bound of the binomial
        tail, with the higher of the others' rates before and since the onset."""
        before = (self._late_rate.sum() - self._late_rate) / max(1, self._members - 1)
        rate = np.maximum(before, others) + 0.5 / ((self._members - 1) * length + 1)
        rate, share = np.minimum(rate, 0.95), np.clip(late, 1e-9, 1 - 1e-9)
        surprise = share * np.log(share / rate) + (1 - share) * np.log((1 - share) / (1 - rate))
        chance = IN_JITTER if self._jitter.going_on else CHANCE
        return np.asarray((share > rate) & (length * surprise > -math.log(chance)))

    def _told(self, step: int, member: int, channel: int, late: float) -> Finding:
        excess, own = self._up.means()[:2, channel, member]
        level = float(self._usual.own[0, member]) if channel == 0 else 1.0
        slowdown, since = float(excess) / level, int(self._up.onset[channel, member])
        length, noise = int(self._up.length[channel, member]), float(self._usual.spread[channel, member])
        longer = "longer than its work predicts" if channel == 0 else "of a step's usual work longer"
        others = "compared with the others" if self._members > 1 else "with no other member to compare with"
        why = (
            f"{PHASES[channel]} takes {100 * excess:.1f} % {longer} since step {since}, {others}; "
            f"{100 * own:.1f} % longer than in its own past; late in {round(late * length)} of {length} steps, "
            f"which vary by {100 * noise:.1f} % as a rule"
        )
        certain = (1.0 if self._members > 1 else 0.7) * length / (length + 0.5)
        self._mark(member, channel, float(excess), since)
        return Finding("slow", step, member, PHASES[channel], since, slowdown, why, round(certain, 2))

    def _mark(self, member: int, channel: int, excess: float, since: int) -> None:
        self._channel[member], self._slowdown[member], self._since[member] = channel, excess, since
        self._up.clear(np.broadcast_to(np.arange(self._members) == member, self._up.level.shape))

    def _lifted(self, step: int, excess: Floats) -> tuple[Finding, ...]:
        """Members that were slow and are no longer."""
        slow = self._channel >= 0
        if not slow.any():
            return ()
        members = np.arange(self._members)
        now, noise = excess[self._channel, members], self._usual.lasting[self._channel, members]
        z = np.where(slow, (self._options.lifted * self._slowdown - now) / noise, np.nan)
        self._down.saw(step, z, np.zeros((0, self._members)))
        well = self._down.alarms & slow
        found = tuple(self._well(step, int(member)) for member in np.flatnonzero(well))
        self._release(well)
        return found

    def _well(self, step: int, member: int) -> Finding:
        phase, since = PHASES[self._channel[member]], int(self._down.onset[member])
        why = f"{phase} takes as long as before again, since step {since}; it was slow since step {self._since[member]}"
        return Finding("slow", step, member, phase, since, 0.0, why, 0.95, cleared=True)

    def _release(self, members: Flags) -> None:
        self._channel[members] = -1
        self._slowdown[members] = 0.0
        self._down.clear(members)
        self._up.clear(np.broadcast_to(members, self._up.level.shape))

    def _jittered(self, step: int, paused: Flags, excess: Floats) -> tuple[Finding, ...]:
        if not self._jitter.saw(paused, np.nan_to_num(excess).max(0)):
            return ()
        cost, rates = self._jitter.cost, self._jitter.rates
        if not self._jitter.going_on:
            return (Finding("jitter", step, -1, "", step, cost, "pauses became rare again", 0.9, cleared=True),)
        most = ", ".join(f"{m} in {100 * rates[m]:.0f} %" for m in np.argsort(-rates, kind="stable")[:4])
        why = f"members are late in turn, no one most: {most} of the steps; each step waits {100 * cost:.0f} % longer"
        return (Finding("jitter", step, -1, "", step, cost, why, 0.9),)

    def _from_start(self, step: int, newly: Flags) -> tuple[Finding, ...]:
        """Members whose first steps NVRx's score condemns: they are slow, though nothing changed."""
        level = np.stack((self._usual.own[0] - self._usual.distance[0], np.ones(self._members)))
        bad = newly[:2] & (self._usual.distance[:2] > CONDEMNED * np.maximum(level, 1e-9))
        found = []
        for member in np.flatnonzero(bad.any(0)) if bad.any() else ():
            channel = int(bad[:, member].argmax())
            found.append(self._slow_from_start(step, int(member), channel, float(level[channel, member])))
        return tuple(found)

    def _slow_from_start(self, step: int, member: int, channel: int, level: float) -> Finding:
        excess = float(self._usual.distance[channel, member])
        self._usual.distance[channel, member] = 0.0
        self._usual.own[channel, member] -= excess
        since = int(self._began[member])
        self._mark(member, channel, excess, since)
        score = 1.0 / (1.0 + excess / level)
        why = f"{PHASES[channel]}: others' median over its own is {score:.2f} from the start (under {FLAGGED_UNDER})"
        return Finding("slow", step, int(member), PHASES[channel], since, excess / level, why, 0.9)


def _compute_s(work: Work) -> Floats:
    return np.asarray(np.maximum(work.work_s - work.data_s - work.save_s, 0.0))
