"""What the sessions of a simulated job do together: rounds of stands, gradients and votes, and transfers of state.

A round completes at each member at a moment of its own, once all have taken part. Where somebody died before that
moment it may never complete, at some members and not at others. Steps take long where nothing happens: after a few
in a new epoch everybody computes until a change is planned, the job is to finish, or a fault wants a step to break.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from everstep.core.types import ExitCause
from everstep.train import commit, protocol
from everstep.train.resolve import Stand

if TYPE_CHECKING:
    from everstep.testing.cluster import Cluster
    from everstep.testing.sessions import SimSession

Key = tuple[str, int, int]  # kind, formation's epoch, step
Said = Stand | protocol.Vote | None


class Rounds:
    """All sessions of the cluster, by the epoch of their plan and their worker's name."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sessions: dict[tuple[int, str], SimSession] = {}
        self.said: dict[Key, dict[str, Said]] = {}
        self.finite: dict[Key, bool] = {}
        self.wanted: dict[int, float] = {}  # formation's epoch -> steps to be made in it before it takes its time
        self.made: Counter[int] = Counter()  # formation's epoch -> steps begun in it
        self.computing: dict[int, list[tuple[SimSession, int]]] = {}
        self.last_step: dict[int, int] = {}  # plan's epoch -> steps after which the scripts end
        self.deadly = False  # the next round that completes somewhere kills somebody in it
        self.poison_step = -1  # whoever is first in the formation dies computing this one

    def session(self, plan_epoch: int, worker: str) -> SimSession:
        return self.sessions[plan_epoch, worker]

    # Rounds ---------------------------------------------------------------------------------------------

    def take_part(self, session: SimSession, kind: str, epoch: int, step: int, said: Said) -> None:
        if not commit.acts_in(session.member, epoch):
            return
        round_ = self.said.setdefault((kind, epoch, step), {})
        round_[session.worker.name] = said
        formation = session.member.formation
        assert formation is not None
        if len(round_) == len(formation.seats):
            for seat in formation.seats:
                member = self.session(session.worker.epoch, seat.worker)
                member.after(0.001, 0.05, member.main, self._complete, member, (kind, epoch, step))

    def _complete(self, session: SimSession, key: Key) -> None:
        kind, epoch, _ = key
        if not commit.acts_in(session.member, epoch) or session.member.formation is None:
            return
        members = [self.session(session.worker.epoch, s.worker) for s in session.member.formation.seats]
        rng = self.cluster.rng
        if self.deadly:
            self.deadly = False
            rng.choice(members).worker.die(ExitCause.SIGNAL, 9)
        if any(member.lost for member in members) and rng.random() < 0.5:
            return
        said = self.said[key]
        match kind:
            case "stand":
                stands = tuple(said[m.worker.name] for m in members)
                session.feed(protocol.Stood(epoch, stands))  # type: ignore[arg-type]
            case "gradients":
                finite = self.finite.setdefault(key, rng.random() < 0.95)
                session.feed(protocol.Reduced(epoch, finite, self.cluster.vaults.wish(), session.says()))
            case _:
                votes = tuple(said[m.worker.name] for m in members)
                session.feed(protocol.Voted(epoch, votes))  # type: ignore[arg-type]

    def serve(self, session: SimSession, epoch: int, roles: tuple[int, ...]) -> None:
        formation = session.member.formation
        assert formation is not None
        for role in roles:
            peer = self.session(session.worker.epoch, formation.seats[role].worker)
            peer.after(0.01, 0.5, peer.main, self._arrive, session, peer, epoch, session.history)

    def _arrive(self, source: SimSession, peer: SimSession, epoch: int, history: tuple[int, ...]) -> None:
        if not source.lost or self.cluster.rng.random() < 0.5:
            peer.fetched(epoch, history)

    # Pace -----------------------------------------------------------------------------------------------

    def compute(self, session: SimSession, epoch: int, step: int) -> None:
        formation = session.member.formation
        assert formation is not None
        if epoch not in self.wanted:
            self.wanted[epoch] = math.inf if self.poison_step >= 0 else self.cluster.rng.randint(1, 3)
        first = formation.seats[0].worker == session.worker.name
        if first:
            self.made[epoch] += 1
        if first and step == self.poison_step:
            fail = session.fail if self.cluster.restartable else session.worker.fail
            session.after(0.01, 0.2, session.main, fail, "ValueError: bad sample")
        elif len(session.history) - self._before(session, epoch) < self.wanted[epoch] or self.finishing:
            self._go(session, epoch, step)
        else:
            self.computing.setdefault(epoch, []).append((session, step))

    def _before(self, session: SimSession, epoch: int) -> int:
        """Steps that it had before this epoch."""
        return sum(made_in < epoch for made_in in session.history)

    def _go(self, session: SimSession, epoch: int, step: int) -> None:
        slower = 1.0 + self.made[epoch] / 4
        session.after(0.01, 0.3 * slower, session.main, session.reduce, epoch, step)

    def urge(self, epoch: int, steps: float = math.inf) -> None:
        """That many more steps are to be made in this formation's epoch: who computes comes to an end."""
        self.wanted[epoch] = self.wanted.get(epoch, 0) + steps
        for session, step in self.computing.pop(epoch, ()):
            self._go(session, epoch, step)

    def urge_all(self, steps: float = math.inf) -> None:
        for epoch in list(self.computing):
            self.urge(epoch, steps)

    @property
    def finishing(self) -> bool:
        return self.cluster.clock.now_s >= self.cluster.finish_s

    def through(self, plan_epoch: int, step: int) -> bool:
        """Whether the scripts end after this many steps; they do a little after the moment the schedule set."""
        if not self.finishing:
            return False
        ahead = len(self.cluster.truth.formations.log.get(plan_epoch, ()))
        return step >= self.last_step.setdefault(plan_epoch, ahead + 2)
