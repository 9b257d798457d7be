"""The rule about missed steps in `testing.formations`: members of the shipped protocol by hand, and broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import pytest

from everstep.core.formation import Formation, Seat
from everstep.testing.claims import Violation
from everstep.testing.formations import Formations
from everstep.train import commit, resolve
from everstep.train import protocol as p
from everstep.train.commit import Member, Phase
from everstep.train.resolve import Stand

if TYPE_CHECKING:
    from everstep.testing.cluster import Cluster
    from everstep.testing.sessions import SimSession


def formation(epoch: int, names: str) -> Formation:
    return Formation(epoch, tuple(Seat(name, name, name, f"{name}:1") for name in names), abort=True, floor=0)


class Worker(NamedTuple):
    name: str
    epoch: int = 1
    can_step: bool = True


class Session:
    """A member that holds no step yet, in formation 5; what the rule asks of a simulated session."""

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.worker = job, Worker(name)
        self.member = Member(name, Stand(0), Phase.READY, epoch=5, formation=formation(5, "abcd"), prepared=5)
        self.history: tuple[int, ...] = ()
        self.entered = 5
        self.published: dict[int, Stand] = {}

    def feed(self, *events: p.Event) -> None:
        for event in events:
            before = self.member
            self.entered = before.epoch
            self.member, commands = commit.step(before, event)
            self.published |= {c.epoch: c.stand for c in commands if isinstance(c, p.PublishStand)}
            self._tell(before)

    def _tell(self, before: Member) -> None:
        stand, rules, me = self.member.stand, self.job.formations, cast("SimSession", self)
        if stand.committed == before.stand.committed + 1:
            self.history = (*self.history, stand.commit_epoch)
            rules.committed(me)
        if self.member.phase is Phase.READY:
            rules.ready(me, stand.committed)


class Job:
    """What the rule asks of a simulated cluster."""

    def __init__(self, have_gradients: str) -> None:
        self.launched_epoch = 1
        self.truth = self.rounds = self
        self.sessions = {name: Session(self, name) for name in "abcd"}
        self.formations = Formations(cast("Cluster", self))
        for name, session in self.sessions.items():
            session.feed(p.Began(5))
            if name in have_gradients:
                session.feed(p.Reduced(5, finite=True))

    def session(self, plan_epoch: int, worker: str) -> Session:
        return self.sessions[worker]

    def enter(self, names: str, new: Formation) -> None:
        for name in names:
            self.sessions[name].feed(p.FormationReceived(new), p.Prepared(new.epoch))

    def stood(self, names: str, new: Formation) -> None:
        """The round of stands is through at these; who is to apply something has."""
        stands = tuple(self.sessions[seat.worker].published[new.epoch] for seat in new.seats)
        for name in names:
            self.sessions[name].feed(p.Stood(new.epoch, stands))
            if self.sessions[name].member.phase is Phase.APPLYING:
                self.sessions[name].feed(p.Applied())

    def made(self, names: str) -> list[int]:
        return [self.sessions[name].member.stand.committed for name in names]


def never(holders: object) -> None:
    """Nobody rolls forward."""


def test_who_stays_behind_in_a_formation_that_cannot_commit_breaks_no_rule() -> None:
    """d left 6 before its round of stands was through, and made the step alone, with gradients which a lacks."""
    job, both, alone = Job("bcd"), formation(6, "abd"), formation(7, "d")
    job.enter("abd", both)
    job.enter("d", alone)
    job.stood("d", alone)
    job.stood("ab", both)
    assert job.made("abd") == [0, 0, 1]
    assert not job.formations.can_commit(1, both)
    job.enter("ab", alone)
    assert [job.sessions[name].member.phase for name in "ab"] == [Phase.FENCED] * 2


def test_who_is_behind_where_steps_can_still_be_made_is_found() -> None:
    """The same, but d acts in both formations."""
    job, both, alone = Job("bcd"), formation(6, "abd"), formation(7, "d")
    job.enter("abd", both)
    in_both = job.sessions["d"].member
    job.enter("d", alone)
    job.stood("d", alone)
    job.sessions["d"].member = in_both
    with pytest.raises(Violation, match="which can commit"):
        job.stood("a", both)


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_that_was_rolled_forward_in_a_formation_before_is_missed(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 6 a makes the step, with the gradients of 5, and dies; b and d left 6 before, and have these gradients too."""
    job, first, second = Job("abcd"), formation(6, "abd"), formation(7, "bd")
    job.enter("abd", first)
    job.stood("a", first)
    job.sessions["a"].worker = Worker("a", can_step=False)
    job.enter("bd", second)
    if not broken:
        job.stood("bd", second)
        assert job.made("bd") == [1, 1]
        return
    monkeypatch.setattr(resolve, "next_commit", never)
    with pytest.raises(Violation, match=r"steps \[0\] were committed before"):
        job.stood("b", second)


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_that_is_through_late_is_missed(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """d still applies the step of 5 when a and b go on in 6."""
    job, following = Job("abcd"), formation(6, "ab")
    job.sessions["d"].feed(p.Voted(5, (p.Vote(finite=True, prepared=5),) * 4))
    job.enter("ab", following)
    if broken:
        monkeypatch.setattr(resolve, "next_commit", never)
    job.stood("ab", following)
    if not broken:
        job.sessions["d"].feed(p.Applied())
        assert job.made("abd") == [1, 1, 1]
        return
    with pytest.raises(Violation, match=r"d commits step 0 in 5, \[6\] went on without it"):
        job.sessions["d"].feed(p.Applied())
