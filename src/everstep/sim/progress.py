"""Steps, saves and what is lost of them, in closed form: hours without an event cost no more than a second.

A step is worth accelerator-seconds of productive time. What a fault takes back is moved to redone work by its worth.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

EPSILON = 1e-9  # of a step: rounding must not take a step away


class Mark(NamedTuple):
    """A state between two steps. `worth`: of all steps up to it."""

    steps: int
    worth: float


class Save(NamedTuple):
    """A state that is kept from `durable_at_s` on. `before`: what the job goes back to if it fails until then."""

    durable_at_s: float
    steps: int
    worth: float
    before: Mark = Mark(0, 0.0)


class Pace(NamedTuple):
    """How fast steps are made at present. `worth`: accelerator-seconds of one."""

    step_s: float
    worth: float


class Progress:
    """Committed steps, the part of the next one, and the saves. `every`: steps between saves; 0: none.

    aligned: saves come at every so many steps ever made, whatever was saved between; else counted from the last one.
    undoes: a save that fails takes the job back to where it was so many steps before it, also saved ones; 0: to the
    newest of these.
    """

    def __init__(
        self, every: int = 0, stall_s: float = 0.0, durable_s: float = 0.0, aligned: bool = False, undoes: int = 0
    ) -> None:
        self.every, self.stall_s, self.durable_s, self.aligned = every, stall_s, durable_s, aligned
        self.undoes = undoes
        self.trail = deque([Mark(0, 0.0)], undoes + 1)  # after each of the last steps, redone ones among them
        self.last_s = 0.0  # when the last step was made, or the job went on
        self.torn = False  # the save under way: it goes on, for nothing
        self.steps = 0
        self.part = 0.0  # of the next step
        self.since = 0  # steps since the last save
        self.urgent = False  # one follows the next step
        self.stalled_s = 0.0  # of the save under way
        self.saving = False
        self.worth = 0.0
        self.part_worth = 0.0
        self.saves = 0
        self.kept = [Save(-math.inf, 0, 0.0)]

    def advance(self, now: float, for_s: float, pace: Pace) -> tuple[float, float]:
        """From `now` on for so long; the seconds spent in steps and in saves."""
        left, stalls = for_s, 0.0
        while left > 0:
            at = now + for_s - left
            if self.saving:
                used = self._stall(at, left)
                stalls += used
            elif self.every and not self.since and not self.part and not self.urgent and left >= self._cycle_s(pace):
                used, stalled = self._cycles(at, left, pace)
                stalls += stalled
                self.last_s = at + used - self.stall_s
            else:
                steps = self.steps
                used = self._step(left, pace)
                if self.steps > steps:
                    self.last_s = at + used - self.part * pace.step_s
            left -= used
        return for_s - stalls, stalls

    def drop_part(self) -> float:
        """The step under way is undone; its worth. So is a save under way: it begins again."""
        lost, self.part, self.part_worth, self.stalled_s = self.part_worth, 0.0, 0.0, 0.0
        self.worth -= lost
        return lost

    def roll_back(self, now: float, to: Save | None = None, keeps_part: bool = False) -> tuple[int, float]:
        """Back to the newest durable save, or to this one: steps lost, and the worth of all that is undone."""
        lost = 0.0 if keeps_part else self.drop_part()
        target = to or self._restorable(now)
        self.kept = [target]
        steps, lost = self.steps - target.steps, lost + self.worth - self.part_worth - target.worth
        self.steps, self.worth = target.steps, target.worth + self.part_worth
        if not self.aligned:
            self.since, self.saving = 0, False
        self.torn = self.saving and bool(self.undoes)
        here = Mark(self.steps, target.worth)
        self.trail = deque((min(mark, here) for mark in self.trail), self.undoes + 1)
        return steps, lost

    def failing(self, now: float) -> Mark | None:
        """Where the job goes back to if the save that is under way now fails; None: there is none, or it may."""
        if not self.undoes:
            return None
        pending = next((save.before for save in self.kept if save.durable_at_s > now), None)
        return pending or (self.trail[0] if self.saving and not self.torn else None)

    def _restorable(self, now: float) -> Save:
        """The newest durable save, or what is left of it when the one under way has failed."""
        save, before = self.durable(now), self.failing(now)
        if before is None or before.steps >= save.steps:
            return save
        return save._replace(steps=before.steps, worth=before.worth)

    def durable(self, now: float) -> Save:
        """The newest state that could be restored now. Older ones are forgotten."""
        newest = max(n for n, save in enumerate(self.kept) if save.durable_at_s <= now)
        del self.kept[:newest]
        return self.kept[0]

    def release(self, now: float) -> None:
        """Steps go on before the save under way is through; it ends in the background."""
        if self.saving:
            self._saved(now + self.stall_s - self.stalled_s)

    def step_ends_s(self, pace: Pace) -> float:
        """Seconds until the step under way is made, after the save under way."""
        return (self.stall_s - self.stalled_s if self.saving else 0.0) + (1 - self.part) * pace.step_s

    def save_next(self) -> None:
        """A save follows the next step, whatever the interval says."""
        self.urgent = bool(self.every)

    def _cycle_s(self, pace: Pace) -> float:
        return self.every * pace.step_s + self.stall_s

    def _cycles(self, now: float, left: float, pace: Pace) -> tuple[float, float]:
        """Whole rounds of steps and a save."""
        cycle_s = self._cycle_s(pace)
        count = int(left / cycle_s + EPSILON)
        recent = min(count, 2 + int(self.durable_s / cycle_s))  # older ones are surely durable
        for number in range(count - recent + 1, count + 1):
            steps = self.steps + number * self.every
            worth = self.worth + number * self.every * pace.worth
            before = self._ago(self.undoes - number * self.every, Mark(steps, worth), pace)
            self.kept.append(Save(now + number * cycle_s + self.durable_s, steps, worth, before))
        self.steps += count * self.every
        self.worth += count * self.every * pace.worth
        self._note(count * self.every, pace)
        self.saves += count
        self.durable(now + count * cycle_s)
        return min(left, count * cycle_s), count * self.stall_s

    def _step(self, left: float, pace: Pace) -> float:
        """Steps up to the next save, or as far as the time goes."""
        want = (1 if self.urgent else self.every - self.since) - self.part if self.every else math.inf
        made = min(want, left / pace.step_s)
        whole = self.part + made
        count = int(whole + EPSILON)
        self.worth += made * pace.worth
        self.steps += count
        self.part = max(0.0, whole - count) if whole - count > EPSILON else 0.0
        self.part_worth = self.part * pace.worth if count else self.part_worth + made * pace.worth
        self._note(count, pace)
        if self.every:
            self.since += count
            self.saving = self.since >= self.every or (self.urgent and count > 0)
            self.urgent = self.urgent and not self.saving  # asked for while one is under way, another one follows
        return left if made < want else min(left, made * pace.step_s)

    def _note(self, count: int, pace: Pace) -> None:
        """So many steps more were made, at this pace but for a part of the first."""
        worth = self.worth - self.part_worth
        for back in range(min(count, self.undoes + 1) - 1, -1, -1):
            self.trail.append(Mark(self.steps - back, worth - back * pace.worth))

    def _ago(self, earlier: int, mark: Mark, pace: Pace) -> Mark:
        """The state `undoes` steps before this one, of which so many were made before the trail's end."""
        if earlier > 0:
            return self.trail[max(0, len(self.trail) - 1 - earlier)]
        return Mark(mark.steps - self.undoes, mark.worth - self.undoes * pace.worth)

    def _stall(self, now: float, left: float) -> float:
        used = min(left, self.stall_s - self.stalled_s)
        self.stalled_s += used
        if self.stalled_s >= self.stall_s - EPSILON:
            self._saved(now + used)
        return used

    def _saved(self, at_s: float) -> None:
        if not self.torn:
            self.kept.append(Save(at_s + self.durable_s, self.steps, self.worth, self.trail[0]))
        self.saves += 1
        self.since = self.since % self.every if self.aligned else 0
        self.stalled_s, self.saving, self.torn = 0.0, False, False
