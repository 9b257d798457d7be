"""Where the accelerators' time went, as a fold: every accelerator-second of a job is in exactly one bucket.

docs/goodput.md defines the buckets. What acts is booked late: time since the newest step is `open`, in segments, and
only a later event tells what it was (a step, a fault, the job's end). Until then it counts as what it looks like, so
the buckets add up at every moment. What was booked as productive is moved when it turns out to be made again.
"""

from __future__ import annotations

import msgspec

from everstep.observe.shares import Bins, Made
from everstep.observe.view import Bucket

PRODUCTIVE, DETECTION, RECOVERY, REDONE, STALL, START, WAITING, STANDBY, STRAGGLER, REDUNDANCY = (
    bucket.value for bucket in Bucket
)
STEPPING = (PRODUCTIVE, DETECTION)  # of a segment in which steps may be made
KEPT_OPEN = 64  # segments; of more, the older half is booked as what it looks like


class Segment(msgspec.Struct):
    """From then on, until the next segment, so many accelerators acted; `owner`: incident that it is charged to."""

    from_s: float
    acting: int
    kind: str
    owner: str = ""


class Goodput(msgspec.Struct):
    """The books. `advance` brings them up to a moment; only then may anything be told.

    `charged`: incident -> bucket -> accelerator-seconds that were lost through it; "": through none.
    """

    spent: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys((b.value for b in Bucket), 0.0))
    charged: dict[str, dict[str, float]] = {}
    made: Made = msgspec.field(default_factory=Made)
    bins: Bins = msgspec.field(default_factory=Bins)
    open: list[Segment] = msgspec.field(default_factory=lambda: [Segment(0.0, 0, START)])
    now_s: float = 0.0
    last_s: float = 0.0  # the newest step was made, or steps began to be made
    effective_s: float = 0.0  # time in which steps were made that last
    loose: float = 0.0  # productive accelerator-seconds after the newest step
    loose_s: float = 0.0
    acting: int = 0
    warming: int = 0  # their processes are made, again if some incident is to blame
    standby: int = 0
    missing: int = 0
    short: str = ""  # incident to which missing ones are charged
    blamed: str = ""  # incident to which warming ones are charged
    slow: dict[str, float] = {}  # incident -> share of the time of every step in which all wait for a slow one
    told: bool = False  # how much is lost to slow ones is told of the whole job, as `straggling`
    straggling: float = 0.0
    redundant: float = 0.0  # share of the rest of that time that is spent on redundancy
    detected: float = 0.0  # booked as detection when nobody made steps any more, since the newest step
    stalled_s: float = 0.0  # since the newest step, in saves
    twice_s: float = 0.0  # since then, in passes of audited steps that are not committed
    started: bool = False  # a step was made
    over: bool = False

    # Time -----------------------------------------------------------------------------------------------

    def advance(self, to_s: float) -> None:
        before, self.now_s = self.now_s, max(to_s, self.now_s)
        span_s = to_s - before
        if span_s <= 0 or self.over:
            return
        for bucket, owner, count in self._beside():
            self._book(bucket, owner, before, to_s, count * span_s)

    def _beside(self) -> list[tuple[str, str, int]]:
        """Who does not act: bucket, incident, how many."""
        found = []
        if self.warming:
            found.append((RECOVERY if self.blamed else START, self.blamed, self.warming))
        if self.standby:
            found.append((STANDBY, "", self.standby))
        if self.missing:
            found.append((WAITING, self.short, self.missing))
        return found

    def _book(self, bucket: str, owner: str, from_s: float, to_s: float, spent: float) -> None:
        self.spent[bucket] += spent
        self.bins.add(bucket, from_s, to_s, spent)
        if bucket != PRODUCTIVE:
            _add(self.charged, owner, bucket, spent)

    def fleet(self, acting: int, warming: int, standby: int, missing: int) -> None:
        """From now on."""
        self.warming, self.standby, self.missing = warming, standby, missing
        if not missing:
            self.short = ""
        if acting != self.acting:
            self.acting = acting
            last = self.open[-1]
            self.phase(last.kind, last.owner)

    def phase(self, kind: str, owner: str = "") -> None:
        """What those who act do from now on, as it looks."""
        last = self.open[-1]
        if last.kind == kind and last.owner == owner and last.acting == self.acting:
            return
        if last.from_s >= self.now_s:
            last.kind, last.owner, last.acting = kind, owner, self.acting
            return
        self.open.append(Segment(self.now_s, self.acting, kind, owner))
        if len(self.open) > KEPT_OPEN:
            self.settle(self.open[KEPT_OPEN // 2].from_s)

    # What it was ----------------------------------------------------------------------------------------

    def _cut(self, at_s: float) -> int:
        """A segment begins at this moment, if it is not over yet; its place in `open`."""
        segments = self.open
        n = len(segments) - 1
        while n >= 0 and segments[n].from_s > at_s:
            n -= 1
        if n < 0 or segments[n].from_s == at_s:
            return max(n, 0)
        if at_s < self.now_s:
            found = segments[n]
            segments.insert(n + 1, Segment(at_s, found.acting, found.kind, found.owner))
        return n + 1

    def relabel(self, from_s: float, to_s: float, kind: str, owner: str = "") -> None:
        """Whoever acted within this time did that, as far as it is not booked yet."""
        if to_s <= from_s or to_s <= self.open[0].from_s:
            return
        first = self._cut(from_s)
        end = self._cut(to_s) if to_s < self.now_s else len(self.open)
        for segment in self.open[first:end]:
            segment.kind, segment.owner = kind, owner

    def settle(self, to_s: float) -> None:
        """Book what is open up to this moment."""
        to_s = min(to_s, self.now_s)
        segments = self.open
        while True:
            segment = segments[0]
            end_s = segments[1].from_s if len(segments) > 1 else self.now_s
            until_s = min(end_s, to_s)
            span_s = until_s - segment.from_s
            if span_s > 0:
                if segment.kind == PRODUCTIVE:
                    self._steps(segment, until_s)
                elif segment.acting:
                    self._book(segment.kind, segment.owner, segment.from_s, until_s, segment.acting * span_s)
                segment.from_s = until_s
            if len(segments) == 1 or until_s < end_s:
                return
            del segments[0]

    def _steps(self, segment: Segment, until_s: float) -> None:
        """Time in which steps were made: what of it they are worth, and what was lost beside them."""
        span_s = until_s - segment.from_s
        stall_s = min(span_s, self.stalled_s)
        twice_s = min(span_s - stall_s, self.twice_s)
        useful_s = span_s - stall_s - twice_s
        total = segment.acting * useful_s
        self.stalled_s -= stall_s
        self.twice_s -= twice_s
        self.loose_s += useful_s
        self.effective_s += useful_s
        if self.told or self.slow or stall_s or twice_s:
            share, owner = self._lost()
            lost, redundant = total * share, total * (1 - share) * self.redundant
            twice, stall = segment.acting * twice_s, segment.acting * stall_s
            parts = ((STRAGGLER, owner, lost), (REDUNDANCY, "", redundant + twice), (STALL, "", stall))
            for bucket, whose, spent in parts:
                if spent:
                    self._book(bucket, whose, segment.from_s, until_s, spent)
            total -= lost + redundant
        if total:
            self._book(PRODUCTIVE, "", segment.from_s, until_s, total)
            self.loose += total

    def _lost(self) -> tuple[float, str]:
        """Share of the time in which all wait for a slow one, and the incident of the slowest."""
        owner = max(self.slow, key=self.slow.__getitem__, default="")
        return (self.straggling if self.told else self.slow.get(owner, 0.0)), owner

    # Steps ----------------------------------------------------------------------------------------------

    def stepped(self, step: int, at_s: float, since_s: float) -> None:
        """The newest step was made at `at_s`; from `since_s` on whoever acts made steps."""
        self.started = True
        if len(self.open) > 1 or self.open[0].kind != PRODUCTIVE:
            self.relabel(since_s, at_s, PRODUCTIVE)
        self.settle(at_s)
        if step > self.made.step:
            self.made.add(step, at_s, self.loose, self.loose_s)
            self.loose = self.loose_s = 0.0
        self.last_s, self.detected = at_s, 0.0

    def stopped(self, step_s: float, fault_s: float, owner: str) -> None:
        """A fault was seen: nobody makes steps from now on. What was under way is made again, at most one step and up
        to the fault; the rest of the time since the newest step passed until it was seen. `fault_s` -1: not known."""
        under_way_s = step_s if step_s > 0 else self.now_s - self.last_s
        if fault_s >= 0:
            under_way_s = min(under_way_s, fault_s - self.last_s)
        struck = self._cut(min(self.last_s + max(0.0, under_way_s), self.now_s))
        for n, segment in enumerate(self.open):
            if segment.kind in STEPPING:
                segment.kind, segment.owner = (REDONE if n < struck else DETECTION), owner
        before = self.spent[DETECTION]
        self.settle(self.now_s)
        self.detected = self.spent[DETECTION] - before
        self._undo(owner)

    def unseen(self, seconds: float, owner: str) -> None:
        """For so long after the newest step others were made, which nobody told of before they were taken back."""
        spent = min(self.detected, seconds * self.acting)
        self._move(DETECTION, REDONE, owner, self.last_s, self.now_s, spent)
        self.detected -= spent
        if self.open[-1].kind in STEPPING:
            self.relabel(self.last_s, min(self.last_s + seconds, self.now_s), REDONE, owner)
            self.settle(self.last_s + seconds)

    def _undo(self, owner: str) -> None:
        """Of a step under way some may be booked already."""
        self.effective_s -= self.loose_s
        self._move(PRODUCTIVE, REDONE, owner, self.last_s, self.now_s, self.loose)
        self.loose = self.loose_s = 0.0

    def resumed(self) -> None:
        """Steps are made again from now on."""
        self.settle(self.now_s)
        self.last_s, self.started = self.now_s, True

    def went_back(self, step: int, owner: str) -> tuple[float, float]:
        """Steps after this one are made again; the span of time in which they were made."""
        from_s, worth, seconds = self.made.back(step, self.last_s)
        self.effective_s -= seconds
        self._move(PRODUCTIVE, REDONE, owner, from_s, self.last_s, worth)
        return from_s, self.last_s

    def lost_before(self, step: int, owner: str) -> tuple[float, float]:
        """All steps up to this one are made again, by those that came after it; see `went_back`."""
        from_s = self.made.at_s[0]
        to_s, worth, seconds = self.made.forget(step)
        self.effective_s -= seconds
        self._move(PRODUCTIVE, REDONE, owner, from_s, to_s, worth)
        return from_s, to_s

    def _move(self, source: str, target: str, owner: str, from_s: float, to_s: float, spent: float) -> None:
        """What was booked turned out to be something else."""
        if spent > 0:
            self.spent[source] -= spent
            self.spent[target] += spent
            if source != PRODUCTIVE:
                _add(self.charged, owner, source, -spent)
            _add(self.charged, owner, target, spent)
            self.bins.move(source, target, from_s, to_s, spent)

    def slowed(self, incident: str, slowdown: float, since: int) -> None:
        """A member takes `slowdown` of a usual step longer, since that step; all others wait for it."""
        share = slowdown / (1 + slowdown) if slowdown > 0 else 0.0
        before, _ = self._lost()
        self.slow[incident] = share
        if share > before and not self.told:
            from_s = self.made.at(since)[0]
            spent = self.made.scale(since, (1 - share) / (1 - before))
            self._move(PRODUCTIVE, STRAGGLER, incident, from_s, self.last_s, spent)

    def ended(self) -> None:
        """The job has: what comes after its newest step is its end, and nothing is counted any more."""
        for segment in self.open:
            if segment.kind in STEPPING:
                segment.kind, segment.owner = START, ""
        self.settle(self.now_s)
        self.over, self.acting, self.open = True, 0, [Segment(self.now_s, 0, START)]

    # What is shown --------------------------------------------------------------------------------------

    def _undecided(self, ahead_s: float) -> list[tuple[str, str, float]]:
        """What is not booked: as what it counts for now, whom it is charged to, how much; if all stays so for
        `ahead_s` seconds from now."""
        if self.over:
            return []
        ends = [segment.from_s for segment in self.open[1:]] + [self.now_s + ahead_s]
        acting = [(s.kind, s.owner, s.acting * (end - s.from_s)) for s, end in zip(self.open, ends, strict=True)]
        return acting + [(bucket, owner, count * ahead_s) for bucket, owner, count in self._beside()]

    @property
    def booked_s(self) -> float:
        """Up to then all is booked, of everybody."""
        return next((segment.from_s for segment in self.open if segment.acting), self.now_s)

    def buckets(self, ahead_s: float = 0.0) -> dict[str, float]:
        found = dict(self.spent)
        for bucket, _, spent in self._undecided(ahead_s):
            found[bucket] += spent
        return found

    def losses(self, ahead_s: float = 0.0) -> dict[str, dict[str, float]]:
        """As `charged`, with what is not booked yet."""
        found = {owner: dict(costs) for owner, costs in self.charged.items()}
        for bucket, owner, spent in self._undecided(ahead_s):
            if bucket != PRODUCTIVE and spent:
                _add(found, owner, bucket, spent)
        return found

    def effective(self, ahead_s: float = 0.0) -> float:
        """Seconds in which steps were made that last."""
        ends = [segment.from_s for segment in self.open[1:]] + [self.now_s + ahead_s]
        spans = (end - s.from_s for s, end in zip(self.open, ends, strict=True) if s.kind == PRODUCTIVE)
        return self.effective_s + (0.0 if self.over else sum(spans))


def _add(charged: dict[str, dict[str, float]], owner: str, bucket: str, spent: float) -> None:
    costs = charged.get(owner)
    if costs is None:
        costs = charged[owner] = {}
    costs[bucket] = costs.get(bucket, 0.0) + spent
