"""What a job consumed, from its journal: a fold which gives for every committed step the samples of every member.

    for step in account(read(run_dir / "journal.jsonl")).steps():
        print(step.number, step.shares)

The journal holds where the dealing changed (events.StepsDealt), not the steps; what lies between follows. A journal
that cannot be a whole account is refused: a change that may have been missed, one of another number of members than
its formation has, steps that were lost or came twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from everstep.core import events as e
from everstep.core.dealing import Dealing
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

    def see(self, event: e.AnyEvent) -> None:
        match event:
            case e.EpochFormed(plan):
                self._plan = plan.epoch
            case e.FormationMade(formation):
                self._sizes[formation.epoch] = len(formation.seats)
                self._attempts[formation.epoch] = self._plan
            case e.StepsDealt(dealing, missed):
                self._deal(dealing, missed)
            case e.WorkerEnded(_, _, exit):
                self._reached(exit.step)
            case e.NodeReported(report) if report.epoch == self._plan:
                sessions = (worker.session for worker in report.workers)
                self._reached(max((session.committed for session in sessions if session is not None), default=0))

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
        for dealing in sorted(self._dealings, key=lambda dealing: (dealing.epoch, dealing.first_step)):
            if spans and self._attempts[spans[-1].dealing.epoch] != self._attempts[dealing.epoch]:
                spans = _rolled_back(spans, dealing)
            elif spans:
                last = spans[-1].dealing
                if last.first_step >= dealing.first_step:
                    raise LedgerError(f"{_text(dealing)}, which cannot follow: {_text(last)}")
                spans[-1] = Span(last, dealing.first_step)
            elif dealing.first_step:
                raise LedgerError(f"steps 0 to {dealing.first_step - 1} were dealt to nobody")
            spans.append(Span(dealing, self._committed.get(self._attempts[dealing.epoch], 0)))
        if spans and spans[-1].end <= spans[-1].dealing.first_step:
            raise LedgerError(f"{_text(spans[-1].dealing)}, but {spans[-1].end} steps are known to be committed")
        return tuple(spans)

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


def _rolled_back(spans: list[Span], dealing: Dealing) -> list[Span]:
    """The state was lost, and steps from this one on are made again: what was consumed in them does not count."""
    if dealing.first_step > spans[-1].end:
        raise LedgerError(f"steps {spans[-1].end} to {dealing.first_step - 1} were dealt to nobody")
    kept = [span for span in spans if span.dealing.first_step < dealing.first_step]
    return [msgspec.structs.replace(span, end=min(span.end, dealing.first_step)) for span in kept]


def _step(dealing: Dealing, number: int, samplers: list[Sampler]) -> Step:
    """Each position of the step's part of a stream is in exactly one share: that is checked here, not believed."""
    shares: list[tuple[int, ...]] = [()] * dealing.num_members
    for sampler in samplers:
        parts = [sampler.share(number, dealing.num_members, role) for role in range(dealing.num_members)]
        if [position for part in parts for position in part] != list(sampler.step_positions(number)):
            raise LedgerError(f"{_text(dealing)}, whose shares are not step {number} in whole")
        shares = [share + sampler.samples(part) for share, part in zip(shares, parts, strict=True)]
    return Step(number, dealing.epoch, tuple(shares))


def _text(dealing: Dealing) -> str:
    return f"from step {dealing.first_step} on epoch {dealing.epoch} dealt to {dealing.num_members} members"
