"""A step counter that falls back after a restart: steps redone from an older checkpoint, or a start from scratch.

The first is the normal price of a restart and is told in the incident. The second means that the script does not
resume: it runs the same arguments again, exits 0, and nobody notices that the work before the fault was thrown away.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.core.events import Alert, StepsSeen
from everstep.core.types import Exit

WORTH_STEPS = 2  # an attempt that made fewer steps had nothing to lose


class How(str, enum.Enum):
    REDONE = "redone"  # resumed from a checkpoint older by `steps`
    SCRATCH = "from-scratch"  # began at the first step again: `steps` lost


class FellBack(msgspec.Struct, frozen=True):
    epoch: int
    how: How
    steps: int  # to be made again
    text: str

    def alert(self) -> Alert:
        """The record for the journal."""
        return Alert("step-fell-back" if self.how is How.SCRATCH else "steps-redone", self.text)


class Counted(msgspec.Struct, frozen=True):
    """What is remembered between epochs: the best step so far, by both counts."""

    epoch: int = 0  # the last one that made a step
    best_total: int = -1  # the optimizer's own count, -1: unknown
    best_step: int = 0  # within one attempt


def saw_end(counted: Counted, exit: Exit) -> Counted:
    """A worker's end tells its last step, which the progress before it may have missed."""
    if counted.epoch == 0:
        return counted
    best_total, best_step = max(counted.best_total, exit.total_step), max(counted.best_step, exit.step)
    return msgspec.structs.replace(counted, best_total=best_total, best_step=best_step)


def compare(counted: Counted, seen: StepsSeen, loads: int) -> tuple[Counted, FellBack | None]:
    """Fold over the progress of all epochs; judges the first steps of each new one.

    `loads`: what any worker of the epoch loaded (torch.load and the like) before these steps.
    """
    fell = None
    if seen.step < 1:
        return counted, None
    if counted.epoch and seen.epoch > counted.epoch:
        fell = _judge(counted, seen, loads)
    best = Counted(seen.epoch, max(counted.best_total, seen.total_step), max(counted.best_step, seen.step))
    return best, fell


def _judge(counted: Counted, seen: StepsSeen, loads: int) -> FellBack | None:
    before = counted.best_total if counted.best_total >= 0 else counted.best_step
    if before < WORTH_STEPS:
        return None
    if seen.total_step < 0 or counted.best_total < 0:
        return None if loads else _scratch(seen, before, "and nothing was loaded")
    first = seen.total_step - seen.step + 1
    if first <= 1:
        return _scratch(seen, before, "its optimizer counts from the beginning")
    redone = before - first + 1
    if redone <= 0:
        return None
    text = f"epoch {seen.epoch} resumed at step {first} of {before}: {redone} steps are redone"
    return FellBack(seen.epoch, How.REDONE, redone, text)


def _scratch(seen: StepsSeen, before: int, reason: str) -> FellBack:
    text = (
        f"epoch {seen.epoch} started from scratch, {reason}: {before} steps are lost. "
        "Let the script load its newest checkpoint when there is one"
    )
    return FellBack(seen.epoch, How.SCRATCH, before, text)
