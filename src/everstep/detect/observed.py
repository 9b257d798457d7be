"""Silence in observed time: what each report adds to the silence of a worker, and what its end teaches.

A node reports ages on its own clock. They are believed only as far as reports kept coming: between two reports a
worker's silence grows by the time between them, capped (Limits.cap_s), and never beyond the reported age. So when a
machine was suspended and everything on it wakes up at once, nobody was silent. Three accounts are kept apart, so that
a phase within a phase hides neither: time outside of the excused phases, time in the present one, and all of it.
"""

from __future__ import annotations

import msgspec

from everstep.core.types import Phase, WorkerProgress
from everstep.detect.starts import Start
from everstep.detect.timeouts import LEARN_STEPS, Learned, Limits

INNER = (Phase.EVAL, Phase.SAVE, Phase.LOAD)  # phases with a limit of their own, inside START or TRAIN


class Watched(msgspec.Struct, frozen=True):
    """A worker's last report, and its silences in observed seconds."""

    seen: WorkerProgress
    working_s: float = 0.0  # in START or TRAIN, since the last step (or other sign of work)
    inner_s: float = 0.0  # in the present EVAL, SAVE or LOAD
    stepless_s: float = 0.0  # since the last step, whatever the phase
    stopped_s: float = 0.0  # as the kernel shows it stopped
    waiting: bool = True  # for its first step in this epoch

    def excused(self, limits: Limits, learned: Learned, kind: Start) -> bool:
        """It is busy with something that lets the others wait, and within the limit of that."""
        phase = self.seen.phase
        if self.seen.stopped or phase in (Phase.TRAIN, Phase.DONE) or self.stepless_s >= limits.stepless_s:
            return False
        if phase is Phase.START:
            return all(silence < limit for silence, limit in self._start(limits, learned, kind))
        return self.inner_s < limits.phase_s(phase, learned)

    def _start(self, limits: Limits, learned: Learned, kind: Start) -> tuple[tuple[float, float], ...]:
        """All of the start against the configured limit; since the last sign of life against the learned one."""
        whole = (self.working_s, limits.phase_s(Phase.START, learned))
        return (min(self.working_s, self.seen.life_age_s), limits.start_s(kind, learned)), whole

    def settling(self, kind: Start) -> Start | None:
        """Which start the limit of its steps still depends on."""
        if self.seen.step < LEARN_STEPS:
            return kind
        return Start.REFORMED if self.waiting else None

    def silence(self, limits: Limits, learned: Learned, kind: Start) -> tuple[float, float]:
        """The silence that is nearest to its limit, and that limit, seconds."""
        phase = self.seen.phase
        if phase in INNER:
            pairs: tuple[tuple[float, float], ...] = ((self.inner_s, limits.phase_s(phase, learned)),)
        elif phase is Phase.START:
            pairs = self._start(limits, learned, kind)
        else:
            pairs = ((self.working_s, limits.train_s(learned, self.settling(kind))),)
        return max(*pairs, (self.stepless_s, limits.stepless_s), key=lambda pair: pair[0] / pair[1])


def observe(before: Watched | None, now: WorkerProgress, passed_s: float, limits: Limits, excused: bool) -> Watched:
    """The worker after one more report, `passed_s` after the one before on its node's clock.

    `excused`: another worker was in an excused phase since then; who trains may have waited for it.
    """
    grown = min(passed_s, limits.cap_s)
    old = before or Watched(now)
    if now.step != old.seen.step:  # silence began anew in between, whatever the ages say
        old = msgspec.structs.replace(old, working_s=0.0, stepless_s=0.0)
    working = min(now.step_age_s, old.working_s)
    if now.phase in (Phase.START, Phase.TRAIN):
        working = min(now.step_age_s, old.working_s + min(grown, now.phase_age_s))
    if now.phase is Phase.TRAIN and not limits.timeout_s and now.batches != old.seen.batches:
        working = min(now.life_age_s, grown)
    if now.phase is Phase.TRAIN and excused:
        working = 0.0
    inner = 0.0
    if now.phase in INNER:
        earlier = old.inner_s if old.seen.phase is now.phase else 0.0
        inner = min(now.phase_age_s, earlier + grown)
    stopped = 0.0
    if now.stopped:
        stopped = old.stopped_s + (grown if old.stopped_s else min(grown, now.life_age_s))
    waiting = old.waiting and now.step == old.seen.step
    return Watched(now, working, inner, min(now.step_age_s, old.stepless_s + grown), stopped, waiting)


def learn(
    learned: Learned, before: Watched | None, after: Watched, passed_s: float, limits: Limits, kind: Start
) -> Learned:
    """What the end of a silence teaches; `kind`: of the epoch's start. That of a stopped worker teaches nothing."""
    if before is None or before.seen.stopped or after.seen.stopped:
        return learned
    old, new = before.seen, after.seen
    grown = min(passed_s, limits.cap_s)
    if old.phase in INNER and (new.phase is not old.phase or new.phase_age_s < old.phase_age_s):
        learned = learned.saw(old.phase, before.inner_s + max(0.0, grown - new.phase_age_s))
    if new.step > old.step and old.step == 0:
        duration_s = before.working_s + grown
        return learned.started(kind, duration_s).saw(Phase.START, duration_s)
    if old.phase is Phase.TRAIN and (new.step > old.step or new.batches > old.batches):
        gap_s = before.working_s + max(0.0, grown - after.working_s)
        return learned.started(Start.REFORMED, gap_s) if before.waiting else learned.saw(Phase.TRAIN, gap_s)
    return learned
