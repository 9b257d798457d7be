"""What a job consumed, from its journal: a fold which gives for every committed step the samples of every member.

    for step in account(read(run_dir / "journal.jsonl")).steps():
        print(step.number, step.shares)

The journal holds where the dealing changed (events.StepsDealt), not the steps; what lies between follows. Steps after
one to which all went back (events.StateRestored) were dealt again: the later dealing counts. A journal
that cannot be a whole account is refused: a change that may have been missed, one of another number of members than
its formation has, steps that were lost or came twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from everstep.core import events as e
from everstep.core.dealing import Dealing
from everstep.core.formation import SessionReport
from everstep.core.types import Exit
from everstep.data.ledger import LedgerError
from everstep.data.sampler import Sampler


class Span(msgspec.Struct, frozen=True):
    """Committed steps in a row, from `dealing.first_step` up to `end`, which is not one of them."""

    dealing: Dealing
    end: int


class Step(msgspec.Struct, frozen=True):
    """A committed step. `shares`: by role, the numbers of the samples that it consumed."""

    number: int
    epoch: int
    shares: tuple[tuple[int, ...], ...]


class Account:
    """The fold. `see` takes the journal's events in their order; raises LedgerError for what cannot be."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # epoch of a formation -> its members
        self._attempts: dict[int, int] = {}  # epoch of a formation -> of which plan it is
        self._plan = 0  # epoch of the newest plan; a new one makes steps again whose state was lost
        self._committed: dict[int, int] = {}  # epoch of a plan -> steps committed in it
        self._dealings: list[Dealing] = []
        self._restored: list[e.StateRestored] = []
        self._redone: list[Span] = []

    def see(self, event: e.AnyEvent) -> None:
        match event:
            case e.EpochFormed(plan):
                self._plan = plan.epoch
            case e.FormationMade(formation):
                self._sizes[formation.epoch] = len(formation.seats)
                self._attempts[formation.epoch] = self._plan
            case e.StepsDealt(dealing, missed):
                self._deal(dealing, missed)
            case e.StateRestored(_, step):
                self._restored.append(event)
                if self._plan in self._committed:
                    self._committed[self._plan] = step
            case e.WorkerEnded(_, _, exit) if not self._era:  # else it may be a number of before
                self._reached(exit.step)
            case e.NodeReported(report) if report.epoch == self._plan:
                for worker in report.workers:
                    if worker.session is not None:
                        self._hear(worker.session, worker.exit)

    @property
    def _era(self) -> int:
        """Epoch of the last formation that went back."""
        return self._restored[-1].epoch if self._restored else 0

    def _hear(self, session: SessionReport, exit: Exit | None) -> None:
        """As far as its numbers are of after the last rollback."""
        if (session.rollbacks[-1].epoch if session.rollbacks else 0) >= self._era:
            self._reached(session.committed)
        if exit is not None and session.resumed and session.epoch >= self._era:
            self._reached(exit.step)

    def _reached(self, committed: int) -> None:
        self._committed[self._plan] = max(committed, self._committed.get(self._plan, 0))

    def _deal(self, dealing: Dealing, missed: bool) -> None:
        seats = self._sizes.get(dealing.epoch)
        if missed:
            raise LedgerError(f"how the steps before step {dealing.first_step} were dealt may not be known in full")
        if seats != dealing.num_members:
            raise LedgerError(f"{_text(dealing)}, but that epoch has {seats or 'no'} members")
        self._dealings.append(dealing)

    def spans(self) -> tuple[Span, ...]:
        """Committed steps without a gap. Raises LedgerError when they are not."""
        spans: list[Span] = []
        self._redone = []
        for dealing in sorted(self._dealings, key=lambda dealing: (dealing.epoch, dealing.first_step)):
            went_back = self._go_back(spans, dealing.epoch)
            if spans and (went_back or self._attempts[spans[-1].dealing.epoch] != self._attempts[dealing.epoch]):
                self._cut(spans, dealing.first_step)
            elif spans:
                last = spans[-1].dealing
                if last.first_step >= dealing.first_step:
                    raise LedgerError(f"{_text(dealing)}, which cannot follow: {_text(last)}")
                spans[-1] = Span(last, dealing.first_step)
            elif dealing.first_step:
                raise LedgerError(f"steps 0 to {dealing.first_step - 1} were dealt to nobody")
            spans.append(Span(dealing, self._committed.get(self._attempts[dealing.epoch], 0)))
        if not self._go_back(spans, None) and spans and spans[-1].end <= spans[-1].dealing.first_step:
            raise LedgerError(f"{_text(spans[-1].dealing)}, but {spans[-1].end} steps are known to be committed")
        return tuple(spans)

    def _go_back(self, spans: list[Span], until: int | None) -> bool:
        """Take back what was dealt before the rollbacks up to this epoch, or to the last. Whether there are any."""
        later = [each for each in self._restored if spans and spans[-1].dealing.epoch < each.epoch]
        backs = [each for each in later if until is None or each.epoch <= until]
        for back in backs:
            if spans and self._attempts[spans[-1].dealing.epoch] == self._attempts.get(back.epoch):
                last = spans[-1].dealing
                spans[-1] = Span(last, max(back.before, last.first_step + 1))
            if spans:
                self._cut(spans, back.step)
        return bool(backs)

    def _cut(self, spans: list[Span], first: int) -> None:
        """The state was lost, and steps from this one on are made again: what was consumed in them does not count."""
        if first > spans[-1].end:
            raise LedgerError(f"steps {spans[-1].end} to {first - 1} were dealt to nobody")
        for span in spans:
            if span.end > first:
                lost = msgspec.structs.replace(span.dealing, first_step=max(first, span.dealing.first_step))
                self._redone.append(Span(lost, span.end))
        kept = [span for span in spans if span.dealing.first_step < first]
        spans[:] = [msgspec.structs.replace(span, end=min(span.end, first)) for span in kept]

    @property
    def redone(self) -> tuple[Span, ...]:
        """Steps that were committed, and lost with the state: they do not count, and were dealt again."""
        self.spans()
        return tuple(self._redone)

    @property
    def committed(self) -> int:
        """Steps of the job that count."""
        spans = self.spans()
        return spans[-1].end if spans else 0

    def steps(self) -> Iterator[Step]:
        """Every committed step once, in order; its samples are computed as it is asked for."""
        for span in self.spans():
            samplers = [Sampler.of(stream) for stream in span.dealing.streams]
            for number in range(span.dealing.first_step, span.end):
                yield _step(span.dealing, number, samplers)

    def count(self) -> int:
        """Committed steps, without their samples. Of each span one step is checked: in all others each member's share
        is the same, so many global batches further on."""
        spans = self.spans()
        for dealing in (span.dealing for span in spans):
            for stream in dealing.streams:
                _shares(dealing, dealing.first_step, Sampler.of(stream))
        return sum(max(0, span.end - span.dealing.first_step) for span in spans)

    def step(self, number: int) -> Step | None:
        """One of them; None: it is not committed."""
        for span in self.spans():
            if span.dealing.first_step <= number < span.end:
                return _step(span.dealing, number, [Sampler.of(stream) for stream in span.dealing.streams])
        return None


def account(entries: Iterable[e.Entry]) -> Account:
    """The account of a journal. Raises LedgerError."""
    made = Account()
    for entry in entries:
        made.see(entry.event)
    return made


def _step(dealing: Dealing, number: int, samplers: list[Sampler]) -> Step:
    shares: list[tuple[int, ...]] = [()] * dealing.num_members
    for sampler in samplers:
        parts = _shares(dealing, number, sampler)
        shares = [share + sampler.samples(part) for share, part in zip(shares, parts, strict=True)]
    return Step(number, dealing.epoch, tuple(shares))


def _shares(dealing: Dealing, number: int, sampler: Sampler) -> list[range]:
    """Each position of the step's part of a stream is in exactly one share: that is checked here, not believed."""
    parts = [sampler.share(number, dealing.num_members, role) for role in range(dealing.num_members)]
    if [position for part in parts for position in part] != list(sampler.step_positions(number)):
        raise LedgerError(f"{_text(dealing)}, whose shares are not step {number} in whole")
    return parts


def _text(dealing: Dealing) -> str:
    return f"from step {dealing.first_step} on epoch {dealing.epoch} dealt to {dealing.num_members} members"
