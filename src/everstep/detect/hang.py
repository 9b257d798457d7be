"""The hang detector: a pure machine `(state, event, now) -> (state, output)` over the progress of one epoch.

Progress counts, not heartbeats. A worker that exceeds the limit of its phase (detect.timeouts) is overdue. While
any worker is in an excused phase (first step, evaluation, save, load) within its limit, those that wait for it are
excused too. Shortly before a limit the machine asks for stacks; at the limit it names the odd one (detect.oddone).
Who does not report is not judged: a silent node is its lease's business. State belongs to one epoch; only what was
learned about the job goes on to the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from everstep.core.events import Ticked
from everstep.core.types import Blame, EpochPlan, NodeProgress, Phase, StacksTaken, Verdict
from everstep.detect.observed import INNER, Watched, learn, observe
from everstep.detect.oddone import Odd, busy_ones, odd_one
from everstep.detect.starts import Starting
from everstep.detect.timeouts import Learned, Limits

LEAD_S = 1.0  # stacks are asked for this long before a limit, or a quarter of it
STACKS_S = 2.0  # at a limit, missing stacks are waited for at most this long, or a fortieth of the limit
ON_ITS_OWN = 2  # steps made beyond a silent worker's: its maker does not wait for it


class SuspectStacksWanted(msgspec.Struct, frozen=True):
    """A verdict is near: ask for the stacks of these ranks. Stopped workers are left out: to answer, one would have
    to be woken, and would run on for a moment."""

    epoch: int
    why: str
    ranks: tuple[int, ...]


class SuspicionLifted(msgspec.Struct, frozen=True):
    """The job moved on after stacks were asked for."""

    epoch: int


HangEvent = NodeProgress | StacksTaken | Ticked
Output = SuspectStacksWanted | SuspicionLifted | Verdict


class NodeWatch(msgspec.Struct, frozen=True):
    """One member's workers at its last report: sent at `sent_s` (its clock), heard at `heard_s` (ours)."""

    sent_s: float
    heard_s: float
    workers: tuple[Watched, ...]
    excused: bool  # one of them is in an excused phase
    close: bool  # one of them is near a limit

    @property
    def stepped(self) -> bool:
        return bool(self.workers) and all(worker.seen.step for worker in self.workers)


class HangState(msgspec.Struct, frozen=True):
    plan: EpochPlan | None = None
    learned: Learned = Learned()
    starting: Starting = Starting()
    nodes: dict[str, NodeWatch] = {}
    excused_at_s: float = -1.0  # last report of an excused worker, our clock
    asked: tuple[int, ...] = ()  # ranks whose stacks were asked for
    suspected: bool = False
    stacks: dict[int, str] = {}
    due_at_s: float = -1.0  # when a limit was first exceeded, our clock; -1: it was not
    false_alarms: int = 0  # each halves the lead, so that slow steps do not mean stacks at every step
    judged: bool = False

    @property
    def world_size(self) -> int:
        return self.plan.world_size if self.plan else 0

    def workers(self) -> Iterator[tuple[str, Watched]]:
        return ((name, worker) for name, node in self.nodes.items() for worker in node.workers)


class HangDetector:
    """Holds the limits; all that changes is in HangState."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def begin(self, plan: EpochPlan | None, before: HangState | None = None) -> HangState:
        """A new epoch: everything is forgotten but what was learned about the job, and where it made steps."""
        if before is None:
            return HangState(plan)
        members = before.plan.members if before.plan else ()
        made = {m.node: m.incarnation for m in members if m.node in before.nodes and before.nodes[m.node].stepped}
        first = Phase.START not in before.learned.longest_s
        return HangState(plan, before.learned, before.starting.next(plan, made, first))

    def step(self, state: HangState, event: HangEvent, now: float) -> tuple[HangState, Output | None]:
        """Advance by one event. `now`: seconds on the caller's monotonic clock. One verdict an epoch at most."""
        plan = state.plan
        if plan is None or state.judged:
            return state, None
        if isinstance(event, NodeProgress):
            member = plan.member(event.node)
            if event.epoch != plan.epoch or member is None or member.incarnation != event.incarnation:
                return state, None
            state = self._heard(state, event, now)
        elif isinstance(event, StacksTaken) and event.epoch == plan.epoch:
            state = msgspec.structs.replace(state, stacks={**state.stacks, **event.stacks})
        return self._judge(state, plan, now)

    # Observe --------------------------------------------------------------------------------------------

    def _heard(self, state: HangState, message: NodeProgress, now: float) -> HangState:
        node, learned, starting = state.nodes.get(message.node), state.learned, state.starting
        passed = max(0.0, message.sent_s - node.sent_s) if node else self.limits.cap_s
        excused = node is not None and state.excused_at_s >= node.heard_s
        known = {w.seen.rank: w for w in node.workers} if node else {}
        workers = []
        for progress in message.workers:
            before = known.get(progress.rank)
            after = observe(before, progress, passed, self.limits, excused)
            starting = starting if before else starting.saw(message.node, progress)
            learned = learn(learned, before, after, passed, self.limits, starting.kind)
            workers.append(after)
        state = msgspec.structs.replace(state, learned=learned, starting=starting)
        busy = any(w.excused(self.limits, learned, starting.kind) for w in workers)
        close = any(self._over(w, state, state.false_alarms) for w in workers)
        watch = NodeWatch(message.sent_s, now, tuple(workers), busy, close)
        any_busy = busy or any(n.excused for name, n in state.nodes.items() if name != message.node)
        return msgspec.structs.replace(
            state,
            nodes={**state.nodes, message.node: watch},
            excused_at_s=now if any_busy else state.excused_at_s,
        )

    def _silence(self, worker: Watched, state: HangState) -> tuple[float, float]:
        return worker.silence(self.limits, state.learned, state.starting.kind)

    def _over(self, worker: Watched, state: HangState, false_alarms: int | None = None) -> bool:
        """Whether it exceeds its limit; with `false_alarms`, whether it will soon."""
        if worker.seen.phase is Phase.DONE:
            return False
        silence, limit = self._silence(worker, state)
        return silence >= limit - _lead(limit, false_alarms) or self._stopped(worker, false_alarms)

    def _stopped(self, worker: Watched, false_alarms: int | None) -> bool:
        limit = self.limits.stopped_s
        return worker.seen.stopped and worker.stopped_s >= limit - _lead(limit, false_alarms)

    # Judge ----------------------------------------------------------------------------------------------

    def _judge(self, state: HangState, plan: EpochPlan, now: float) -> tuple[HangState, Output | None]:
        soon = self._suspects(state, plan, state.false_alarms)
        if not soon:
            if not state.suspected:
                return state, None
            alarms = state.false_alarms + 1
            lifted = msgspec.structs.replace(
                state, suspected=False, asked=(), stacks={}, due_at_s=-1.0, false_alarms=alarms
            )
            return lifted, SuspicionLifted(plan.epoch)
        if not state.suspected:
            asked = tuple(w.seen.rank for _, w in state.workers() if self._can_answer(w))
            state = msgspec.structs.replace(state, suspected=True, asked=asked)
            return state, SuspectStacksWanted(plan.epoch, self._silences(state, soon), asked)
        over = self._suspects(state, plan)
        if not over:
            return state, None
        if state.due_at_s < 0:
            state = msgspec.structs.replace(state, due_at_s=now)
        worst = over[0]
        limit = self.limits.stopped_s if worst.seen.stopped else self._silence(worst, state)[1]
        missing = any(rank not in state.stacks for rank in state.asked)
        if missing and now < state.due_at_s + min(STACKS_S, limit / 40):
            return state, None
        return self._name(state, plan, over)

    @staticmethod
    def _can_answer(worker: Watched) -> bool:
        return not worker.seen.stopped and worker.seen.phase is not Phase.DONE

    def _suspects(self, state: HangState, plan: EpochPlan, false_alarms: int | None = None) -> list[Watched]:
        """The overdue, when they make a hang; else empty."""
        if not any(node.close for node in state.nodes.values()):
            return []
        workers = [w for _, w in state.workers()]
        stopped = [w for w in workers if self._stopped(w, false_alarms)]
        if stopped:
            return stopped
        if len(workers) < plan.world_size or any(node.excused for node in state.nodes.values()):
            return []
        over = [w for w in workers if self._over(w, state, false_alarms)]
        own = [w for w in over if w.seen.phase in (*INNER, Phase.START)]
        if own or not over:
            return own
        fewest = min(w.seen.step for w in over)
        others = [w for w in workers if w not in over and w.seen.phase is not Phase.DONE]
        return over if all(w.seen.step >= fewest + ON_ITS_OWN for w in others) else []

    def _name(self, state: HangState, plan: EpochPlan, over: list[Watched]) -> tuple[HangState, Output | None]:
        """Judge the overdue, but let a last one finish alone what it does after the others' scripts ended."""
        everybody = [w.seen for _, w in state.workers()]
        done = [w for w in everybody if w.phase is Phase.DONE]
        seen = [w.seen for w in over]
        alone = bool(done) and max(w.step for w in done) >= max(w.step for w in seen)
        if alone and len(busy_ones(seen, state.stacks)) == len(seen):
            if max(w.working_s for w in over) < self.limits.phase_s(Phase.START, state.learned):
                return state, None
        whole_job = len(seen) + len(done) == len(everybody) and not any(w.phase in INNER for w in seen)
        odd = odd_one(everybody if whole_job else seen, state.stacks)
        if not odd.ranks and not whole_job:
            odd = Odd(tuple(sorted(w.rank for w in seen)), "the others do not wait for it", 0.7)
        verdict = Verdict(
            "hang", self._blames(state, odd), f"{self._silences(state, over)}: {odd.what}", odd.confidence
        )
        return msgspec.structs.replace(state, judged=True, learned=self._doubted(state, over)), verdict

    def _doubted(self, state: HangState, over: list[Watched]) -> Learned:
        """Who was judged under what was learned may have been healthy."""
        learned, kind = state.learned, state.starting.kind
        own = [w for w in over if not w.seen.stopped and w.seen.phase in (Phase.START, Phase.TRAIN)]
        if self.limits.timeout_s:
            return learned
        if any(w.seen.phase is Phase.TRAIN for w in own):
            learned = learned.judged()
        for settling in {w.settling(kind) for w in own}:
            learned = learned if settling is None else learned.misjudged(settling)
        return learned

    def _blames(self, state: HangState, odd: Odd) -> tuple[Blame, ...]:
        if not odd.ranks:
            return (Blame(-1, "", "hang", odd.what),)
        names = {w.seen.rank: name for name, w in state.workers()}
        return tuple(Blame(rank, names[rank], odd.cause, odd.what) for rank in odd.ranks)

    def _silences(self, state: HangState, over: list[Watched]) -> str:
        """One sentence with the numbers: who is silent, for how long, against which limit."""
        worst = over[0]
        name = next(n for n, w in state.workers() if w is worst)
        who = f"rank {worst.seen.rank} on {name}" if len(over) == 1 else f"{len(over)} of {state.world_size} workers"
        if worst.seen.stopped:
            return f"{who} stopped for {worst.stopped_s:.1f} s (limit {self.limits.stopped_s:.1f} s)"
        silence, limit = self._silence(worst, state)
        phase = worst.seen.phase
        what = "no step" if phase is Phase.TRAIN else f"no end of {phase.name.lower()}"
        sooner = phase is Phase.START and limit < self.limits.phase_s(phase, state.learned)
        what = "no sign of life in its start" if sooner else what
        rule = "learned" if sooner or (phase is Phase.TRAIN and not self.limits.timeout_s) else "configured"
        return f"{who}: {what} for {silence:.1f} s after step {worst.seen.step} (limit {limit:.1f} s, {rule})"


def _lead(limit_s: float, false_alarms: int | None) -> float:
    """How long before a limit it counts as near; 0 at the limit itself."""
    return 0.0 if false_alarms is None else min(LEAD_S, limit_s / 4) / 2**false_alarms
