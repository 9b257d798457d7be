"""How long silence may last: configured limits, and limits learned from the job itself.

Two rules live here. `from_heartbeats` is NVIDIA Resiliency Extension's rule for heartbeats: a safety factor times the
longest gap seen, before the first heartbeat and between later ones, averaged with what earlier runs measured.
`Limits` is ours, by phase. It differs where killing a healthy job costs more than judging a sick one late:

- training: a configured `timeout_s` is obeyed as it is. Without one, the limit is max(30 s, factor x the longest gap
  steps or batches in this job), once the worker has made 5 steps in this epoch; before that, the limit of the first
  step holds. Each verdict under a learned limit doubles it (64 times at most), so a job whose long pauses are normal
  is not killed for ever.
- evaluation, save, load: the configured limit, never below `timeout_s`, and never below factor x the longest phase
  of its kind that this job completed. What was learned only extends these limits: short evaluations say nothing about
  the first long one.
- first step: the same, for the first start of a job and for the first of each kind (detect.starts). For a later one of
  that kind it is also a hang when a worker shows no sign of life for max(300 s, factor x the longest start of its kind,
  or of a warmer one). A verdict under this limit puts the configured one back until a start of that kind has ended. A
  session's member that trains on after its links were made anew compiles at most: it has these 300 s at once.
- a worker that the kernel shows stopped: `timeout_s`, or 30 s, whatever it was doing.
- whatever the phases are: a step within 5 x (first step + evaluation + save), so endless alternation is a hang too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.core.types import Phase
from everstep.detect.starts import Start

FLOOR_S = 30.0  # a learned limit is never below: garbage collection, a slow disk, a checkpoint we did not see
START_FLOOR_S = 300.0  # the same of a start: a compiler without its cache, a data loader that reads its index anew
LEARN_STEPS = 5  # steps of an epoch before its learned limit counts: compilers and allocators settle first
MAX_DOUBLED = 6
STEPLESS_FACTOR = 5.0  # the outermost limit, in sums of all phases' limits


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds until the first heartbeat, and between two later ones. 0: nothing seen yet."""

    initial_s: float
    subsequent_s: float

    def merged(self, earlier: Timeouts) -> Timeouts:
        """Averaged with the ones calculated earlier, field by field; a field without a measurement takes the other."""
        return Timeouts(
            _mean(self.initial_s, earlier.initial_s),
            _mean(self.subsequent_s, earlier.subsequent_s),
        )


def from_heartbeats(start_s: float, heartbeats_s: Sequence[float], factor: float) -> Timeouts:
    """NVRx's rule: factor x the time to the first heartbeat, and factor x the longest gap between two."""
    if not heartbeats_s:
        return Timeouts(0.0, 0.0)
    gaps = [after - before for before, after in zip(heartbeats_s, heartbeats_s[1:], strict=False)]
    return Timeouts(factor * (heartbeats_s[0] - start_s), factor * max(gaps, default=0.0))


def _mean(one: float, other: float) -> float:
    return (one + other) / 2 if one and other else one or other


class Learned(msgspec.Struct, frozen=True):
    """What a job's healthy moments taught: the longest of each phase, and for TRAIN the longest gap between signs
    of work. Outlives the epoch."""

    longest_s: dict[Phase, float] = {}
    doubled: int = 0  # verdicts given under the learned limit of training
    starts_s: dict[Start, float] = {}  # the longest of each kind
    doubted: frozenset[Start] = frozenset()  # a verdict was given under what was learned of these

    def saw(self, phase: Phase, duration_s: float) -> Learned:
        """With this duration, if it is the longest of its kind so far."""
        if duration_s <= self.longest_s.get(phase, 0.0):
            return self
        return msgspec.structs.replace(self, longest_s={**self.longest_s, phase: duration_s})

    def judged(self) -> Learned:
        """After a verdict under the learned limit of training."""
        return msgspec.structs.replace(self, doubled=min(self.doubled + 1, MAX_DOUBLED))

    def started(self, kind: Start, duration_s: float) -> Learned:
        """After a first step: that kind of start is known, and its limit holds (again)."""
        longest_s = max(duration_s, self.starts_s.get(kind, 0.0))
        if longest_s == self.starts_s.get(kind) and kind not in self.doubted:
            return self
        starts_s, doubted = {**self.starts_s, kind: longest_s}, self.doubted - {kind}
        return msgspec.structs.replace(self, starts_s=starts_s, doubted=doubted)

    def misjudged(self, kind: Start) -> Learned:
        """After a verdict under what was learned of such starts."""
        return msgspec.structs.replace(self, doubted=self.doubted | {kind})

    def start_s(self, kind: Start) -> float | None:
        """The longest start of this kind or of a warmer one; None: this kind is not known, or not trusted."""
        if kind is Start.FIRST or kind in self.doubted or (kind not in self.starts_s and kind is not Start.REFORMED):
            return None
        return max((seen_s for seen, seen_s in self.starts_s.items() if seen <= kind), default=0.0)


class Limits(msgspec.Struct, frozen=True):
    """The configured limits, seconds. `report_s`: how often a node reports its workers' progress."""

    timeout_s: float = 0.0  # 0: learned
    first_step_s: float = 1800.0
    save_s: float = 1800.0
    eval_s: float = 1800.0
    factor: float = 5.0
    report_s: float = 0.5

    @property
    def stopped_s(self) -> float:
        return self.timeout_s or FLOOR_S

    @property
    def stepless_s(self) -> float:
        return STEPLESS_FACTOR * (max(self.first_step_s, self.timeout_s) + self.eval_s + self.save_s)

    @property
    def cap_s(self) -> float:
        """Silence one report can add. More time than that between two reports means that the observer itself was
        suspended (a paused virtual machine), and says nothing about the worker."""
        return self.report_s + min(1.0, self.stopped_s / 8)

    def phase_s(self, phase: Phase, learned: Learned) -> float:
        """Limit of START, EVAL, SAVE and LOAD."""
        configured = {Phase.START: self.first_step_s, Phase.EVAL: self.eval_s}.get(phase, self.save_s)
        return max(configured, self.timeout_s, self.factor * learned.longest_s.get(phase, 0.0))

    def start_s(self, kind: Start, learned: Learned) -> float:
        """Limit between two signs of life before the first step. With configured limits nothing learned is shorter."""
        longest_s, most_s = learned.start_s(kind), self.phase_s(Phase.START, learned)
        if self.timeout_s or longest_s is None:
            return most_s
        return min(most_s, max(START_FLOOR_S, self.factor * longest_s))

    def train_s(self, learned: Learned, start: Start | None = None) -> float:
        """Limit between two signs of work in training. `start`: the limit of such a start holds, too."""
        if self.timeout_s:
            return self.timeout_s
        seen = max(FLOOR_S, self.factor * learned.longest_s.get(Phase.TRAIN, 0.0)) * 2.0**learned.doubled
        return seen if start is None else max(seen, self.start_s(start, learned))
