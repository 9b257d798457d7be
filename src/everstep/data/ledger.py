"""The account of consumed samples: a fold over what members report at each commit, which refuses what cannot be.

Every member reports every step it commits, so most reports repeat what another said, and one that died right after
a commit is not missed. Steps begun and not committed are never reported. A report names the epoch whose deal made the
gradients: a step rolled forward in a later epoch was dealt in the earlier one. Kept as spans of steps with the same
members, so a ledger of a million steps is as large as the number of changes of membership.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import msgspec

from everstep.core.errors import EverstepError, ExitCode


class LedgerError(EverstepError):
    """Samples were lost, repeated or dealt twice; the text says at which step and which positions. Our defect."""

    code = ExitCode.INTERNAL


class Consumed(msgspec.Struct, frozen=True):
    """A committed step as a member reports it: all members' positions together, and the epoch and members dealt to."""

    step: int
    epoch: int
    num_members: int
    first_position: int
    num_positions: int


class Span(msgspec.Struct, frozen=True):
    """Committed steps in a row, dealt in one epoch."""

    epoch: int
    num_members: int
    first_step: int
    num_steps: int


class Ledger:
    """Committed steps from `first_step` (where the job began or resumed), each with `global_batch` positions.

    Reports of different members may arrive in any order: one ahead of a step not yet reported waits for it. An error
    leaves the ledger as it was.
    """

    def __init__(self, global_batch: int, first_step: int = 0) -> None:
        self.global_batch = global_batch
        self.first_step = first_step
        self._spans: list[Span] = []
        self._ahead: dict[int, Consumed] = {}
        self._rollbacks: list[tuple[int, int]] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @property
    def committed(self) -> int:
        """The number of the next step: all before it are in the account, without a gap."""
        return self._spans[-1].first_step + self._spans[-1].num_steps if self._spans else self.first_step

    def step(self, step: int) -> Consumed | None:
        """What was consumed in this step; None: not reported, or before this ledger."""
        if step in self._ahead:
            return self._ahead[step]
        if not self.first_step <= step < self.committed:
            return None
        span = self._spans[bisect.bisect_right(self._spans, step, key=lambda span: span.first_step) - 1]
        return Consumed(step, span.epoch, span.num_members, step * self.global_batch, self.global_batch)

    def add(self, record: Consumed) -> None:
        """Take one member's report. Raises LedgerError when it contradicts the stream or an earlier report."""
        if any(record.step >= step and record.epoch < epoch for step, epoch in self._rollbacks):
            return
        self._check_positions(record)
        known = self.step(record.step)
        if known is not None:
            if record != known:
                raise LedgerError(f"{_deal(record)}, but was committed before: {_deal(known)}")
            return
        self._check_neighbours(record)
        self._ahead[record.step] = record
        while (following := self._ahead.pop(self.committed, None)) is not None:
            self._append(following)

    def roll_back(self, step: int, epoch: int) -> None:
        """The job goes back to an older state on purpose: steps from this one on are made again, from `epoch` on.

        Reports of those steps from before that epoch, which may still be on their way, no longer count.
        """
        self._rollbacks.append((step, epoch))
        self._ahead = {number: record for number, record in self._ahead.items() if number < step}
        while self._spans and self.committed > step:
            last = self._spans.pop()
            if last.first_step < step:
                self._spans.append(msgspec.structs.replace(last, num_steps=step - last.first_step))
        self.first_step = min(self.first_step, step)

    def check_complete(self, num_steps: int) -> None:
        """Raises LedgerError unless exactly the steps before `num_steps` were committed."""
        if self._ahead or self.committed < num_steps:
            gap_end = min(self._ahead, default=num_steps)
            positions = _text(self.committed * self.global_batch, gap_end * self.global_batch)
            raise LedgerError(f"steps {_text(self.committed, gap_end)}, positions {positions}, were never committed")
        if self.committed > num_steps:
            positions = _text(num_steps * self.global_batch, self.committed * self.global_batch)
            raise LedgerError(f"steps {_text(num_steps, self.committed)} are beyond the end, positions {positions} too")

    def _check_positions(self, record: Consumed) -> None:
        if record.step < self.first_step:
            raise LedgerError(f"{_deal(record)}, but this job began at step {self.first_step}")
        expected = range(record.step * self.global_batch, (record.step + 1) * self.global_batch)
        first, end = record.first_position, record.first_position + record.num_positions
        if (first, end) == (expected.start, expected.stop):
            return
        parts = {
            "missing": [(expected.start, min(first, expected.stop)), (max(end, expected.start), expected.stop)],
            "of other steps": [(first, min(expected.start, end)), (max(expected.stop, first), end)],
        }
        faults = [f"{_text(*part)} {what}" for what, found in parts.items() for part in found if part[0] < part[1]]
        raise LedgerError(f"{_deal(record)}, not {_text(expected.start, expected.stop)}: {', '.join(faults)}")

    def _check_neighbours(self, record: Consumed) -> None:
        """Epochs grow with the steps and have one membership each; with what is known around it that must stay so."""
        before = self.step(max((step for step in self._ahead if step < record.step), default=self.committed - 1))
        after = self.step(min((step for step in self._ahead if step > record.step), default=-1))
        for earlier, later in ((before, record), (record, after)):
            if earlier is None or later is None or earlier.epoch < later.epoch:
                continue
            if earlier.epoch > later.epoch or earlier.num_members != later.num_members:
                raise LedgerError(f"{_deal(later)}, which cannot follow: {_deal(earlier)}")

    def _append(self, record: Consumed) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.epoch == record.epoch:
            self._spans[-1] = msgspec.structs.replace(last, num_steps=last.num_steps + 1)
        else:
            self._spans.append(Span(record.epoch, record.num_members, record.step, 1))


def fold(records: Iterable[Consumed], global_batch: int, first_step: int = 0) -> Ledger:
    """The ledger of these reports. Raises LedgerError at the first which cannot be."""
    ledger = Ledger(global_batch, first_step)
    for record in records:
        ledger.add(record)
    return ledger


def _text(first: int, end: int) -> str:
    return f"{first} to {end - 1}"


def _deal(record: Consumed) -> str:
    positions = _text(record.first_position, record.first_position + record.num_positions)
    return f"step {record.step} (epoch {record.epoch}, {record.num_members} members) consumed positions {positions}"
