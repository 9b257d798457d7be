"""The session of one simulated worker: the real commit protocol (train.commit) over simulated rounds.

It does what train.engine does with the protocol's commands, reports to the agent as that one reports, and hears
formations late. A process that hangs holds up what its main thread would do; one that is stopped hears nothing either.
The state is modelled by its history: the epochs whose gradients made each of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from everstep.core.corruption import Corruption
from everstep.core.formation import Formation, SessionReport, Stage
from everstep.core.saves import Saves
from everstep.core.types import ExitCause
from everstep.detect.corrupt import odd
from everstep.train import commit, protocol
from everstep.train.resolve import Stand

if TYPE_CHECKING:
    from everstep.testing.workers import SimWorker


COLLATERAL = "RuntimeError: connection closed by peer"  # what functions raise whose peer is gone


class SimSession:
    """Events of the protocol go in by `feed`; what the main thread does goes through `main`."""

    __slots__ = (
        "backlog",
        "cluster",
        "committed_s",
        "completed",
        "corrupt",
        "deaf",
        "entered",
        "failed_s",
        "failure",
        "flipped",
        "gap_s",
        "heard_s",
        "history",
        "incoming",
        "made",
        "member",
        "resumed",
        "saves",
        "speaks",
        "spoiled",
        "spoke_s",
        "stage",
        "worker",
    )

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.cluster = worker.agent.cluster
        self.member = commit.Member(worker.name)
        self.stage = Stage.WARMING
        self.speaks = False  # its agent heard from it
        self.resumed = self.completed = False
        self.made = 0  # committed in this process
        self.entered = 0  # the newest epoch in which its main thread took part: what it says it acts in
        self.history: tuple[int, ...] = ()
        self.incoming: tuple[int, tuple[int, ...]] | None = None  # a state that came before it was asked for: its epoch
        self.committed_s = 0.0
        self.gap_s = -1.0
        self.saves = Saves()
        self.failure = ""  # what its function raised, until it is in the next formation
        self.failed_s = 0.0
        self.flipped = False  # a bit of its state is another one than its replicas'
        self.corrupt: Corruption | None = None  # that it found last
        self.spoiled = False  # its function raises in every formation: only another process helps
        self.spoke_s = self.heard_s = 0.0  # when the last message either way arrives
        self.deaf = self.cluster.rng.random() < 0.5  # when it hangs, no thread of it runs
        self.backlog: list[tuple[Callable[..., None], tuple[object, ...]]] = []

    @property
    def lost(self) -> bool:
        """It died, so what it said last may not have reached everybody; who leaves in good order sees to that."""
        return self.worker.dead and not self.completed and self.stage is not Stage.LEFT

    def begin(self) -> None:
        self.tell()
        slow = self.cluster.rng.random() < 0.2
        self.after(0.05, 4.0 if slow else 0.6, self.main, self._open)

    def _open(self) -> None:
        self.stage = Stage.READY
        self.tell()

    def after(self, least_s: float, most_s: float, act: Callable[..., None], *args: object) -> None:
        self.cluster.clock.after(self.cluster.rng.uniform(least_s, most_s), act, *args)

    def main(self, act: Callable[..., None], *args: object) -> None:
        """Something the main thread does; nothing of the job any more once it is through with it."""
        if self.failure and act not in (self._enter, self.worker.fail):
            return
        if self.worker.can_step and not (self.completed and act != self.worker.die):
            if self.worker.hung:
                self.backlog.append((self.main, (act, *args)))
            else:
                act(*args)

    def thread(self, act: Callable[..., None], *args: object) -> None:
        """Something another thread does."""
        if self.worker.can_step:
            if self.worker.hung and self.deaf:
                self.backlog.append((self.thread, (act, *args)))
            else:
                act(*args)

    def catch_up(self) -> None:
        backlog, self.backlog = self.backlog, []
        for act, args in backlog:
            act(*args)

    # The agent ------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """In order, and a little late."""
        member, agent = self.member, self.worker.agent
        report = SessionReport(
            worker=member.worker,
            stage=self.stage,
            committed=member.stand.committed if self.made or not self.cluster.restartable else -1,
            epoch=self.entered,
            prepared=member.prepared,
            endpoint=f"{agent.name}:{self.worker.local_rank}",
            host=agent.name,
            resumed=self.resumed,
            gap_s=self.gap_s,
            fixed=self.cluster.fixed,
            failure=self.failure,
            rollbacks=member.stand.rollbacks,
            saves=self.saves,
            corrupt=self.corrupt,
        )
        self.spoke_s = max(self.spoke_s, self.cluster.clock.now_s + self.cluster.rng.uniform(0.001, 0.008))
        self.cluster.clock.at(self.spoke_s, agent.spoke, self.worker, report)

    def fail(self, why: str) -> None:
        """Its function raises in the midst of a step, or is through with what failed: the process waits."""
        if self.member.phase is commit.Phase.COMPUTING and self.member.entering is None:
            self.failure, self.failed_s = why, self.cluster.clock.now_s
            self.stage = Stage.READY
            self.tell()
            self.cluster.truth.raised(self)

    def hear(self, formation: Formation) -> None:
        slow = self.cluster.rng.random() < 0.1
        late_s = self.cluster.rng.uniform(0.001, 1.0 if slow else 0.01)
        self.heard_s = max(self.heard_s, self.cluster.clock.now_s + late_s)
        self.cluster.clock.at(self.heard_s, self.thread, self._hear, formation)

    def _hear(self, formation: Formation) -> None:
        self.feed(protocol.FormationReceived(formation))
        if self.member.planned is formation:
            self.cluster.rounds.urge(self.member.epoch)

    # The protocol ---------------------------------------------------------------------------------------

    def feed(self, event: protocol.Event) -> None:
        if not self.worker.can_step:
            return
        before = self.member
        self.member, commands = commit.step(before, event)
        if not isinstance(event, protocol.Fetched):
            self._note_commit(before.stand.committed, isinstance(event, protocol.Applied))
            if isinstance(event, protocol.Stood) and before.stand.committed < 0 <= self.member.stand.committed:
                self._begin_anew(before)
        for command in commands:
            self._carry_out(command)

    def _note_commit(self, before: int, applied: bool) -> None:
        stand = self.member.stand
        if stand.committed == before + 1 and (before >= 0 or applied):
            self.history = (*self.history, stand.commit_epoch)
            self.cluster.truth.formations.committed(self)
            self.made = stand.committed
            now = self.cluster.clock.now_s
            if not self.resumed:
                self.resumed = True
                self.gap_s = now - self.committed_s if self.committed_s else -1.0
                self.tell()
            self.committed_s = now
            self.cluster.vaults.save(self)

    def _begin_anew(self, before: commit.Member) -> None:
        """It holds a valid state which it did not get from a member."""
        stand = self.member.stand
        if stand.rollbacks and stand.rollbacks[-1].epoch == self.member.epoch:
            self.cluster.truth.formations.restored(self)
        elif stand.committed == 0 and not before.round:
            self.cluster.truth.formations.founded(self)

    def _carry_out(self, command: protocol.Command) -> None:
        rounds = self.cluster.rounds
        match command:
            case protocol.Prepare(formation):
                self.after(0.003, 0.3, self.thread, self._prepare, formation)
            case protocol.Switch(formation):
                self.resumed = False
                if self.cluster.sharded:
                    self.member = replace(self.member, shards=len(formation.seats))
            case protocol.PublishStand(epoch, stand, round_):
                self.after(0.001, 0.02, self.main, self._enter, epoch, stand, round_)
            case protocol.Restore():
                late_s = self.cluster.vaults.chance.uniform(0.01, 0.5)
                self.cluster.clock.after(late_s, self.main, self._restore, command)
            case protocol.CastVote(epoch, vote):
                self.main(rounds.take_part, self, "vote", epoch, self.member.stand.committed, vote)
            case protocol.Apply():
                self.after(0.005, 0.2, self.main, self.feed, protocol.Applied())
            case protocol.Fetch(epoch):
                if self.incoming is not None and self.incoming[0] == epoch:
                    self.main(self.fetched, *self.incoming)
            case protocol.Serve(epoch, roles):
                rounds.serve(self, epoch, roles)
            case protocol.Ready(epoch, step):
                self.main(self._ready, epoch, step)
            case protocol.Doubt():
                self._doubt(command)
            case protocol.Leave():
                self.main(self._leave)
            case protocol.Fenced(epoch):
                self.after(0.0, 0.1, self.main, self.worker.fail, f"the others went on without it in epoch {epoch}")
            case protocol.StateLost(committed, floor):
                self.main(
                    self.worker.fail, f"{floor} steps were committed, and nobody here holds more than {committed}"
                )

    def says(self) -> protocol.Said:
        """With its vote: what its state is, where states are compared."""
        if not self.cluster.compares:
            return protocol.NOTHING_SAID
        return protocol.Said(check=True, mark=(2 if self.flipped else 1) if self.member.check else 0)

    def _doubt(self, doubt: protocol.Doubt) -> None:
        formation = self.member.formation
        found = odd([vote.said.mark for vote in doubt.votes], self.member.shards)
        assert found is not None and formation is not None
        workers = tuple(formation.seats[role].worker for role in found.roles)
        verified = self.member.stand.verified
        self.corrupt = Corruption(doubt.epoch, doubt.step, workers, found.sure, verified=verified)
        self.tell()

    def _prepare(self, formation: Formation) -> None:
        """A dead peer can never be reached, a stopped one once it runs again."""
        if formation not in (self.member.entering, self.member.planned):
            return
        for seat in formation.seats:
            peer = self.cluster.rounds.session(self.worker.epoch, seat.worker)
            if not peer.worker.can_step:
                return
            if peer.worker.hung and peer.deaf:
                peer.backlog.append((self.thread, (self._prepare, formation)))
                return
        self.feed(protocol.Prepared(formation.epoch))
        if self.member.planned is formation:  # otherwise it enters in a moment, and says both
            self.tell()

    def _restore(self, command: protocol.Restore) -> None:
        member, goal = self.member, command.goal
        if member.phase is not commit.Phase.RESTORING or not commit.acts_in(member, command.epoch):
            return
        assert member.formation is not None
        shard = (member.formation.role_of(self.worker.name) or 0) % len(command.places)
        place = command.places[shard]
        node = member.formation.seats[place].node if place >= 0 else ""
        history = self.cluster.vaults.read(node, goal.committed, goal.commit_epoch, shard)
        if history is not None:
            self.history, self.saves, self.flipped = history, Saves(), False
        self.feed(protocol.Restored(command.epoch, history is not None, hash(history)))

    def _enter(self, epoch: int, stand: Stand, round_: int) -> None:
        if commit.acts_in(self.member, epoch):
            self.entered = epoch
            self.failure = ""
            self.tell()
            stand = replace(stand, kept=self.cluster.vaults.seen_from(self.worker.agent.name))
            self.cluster.rounds.take_part(self, "stand", epoch, -1 - round_, stand)

    def fetched(self, epoch: int, history: tuple[int, ...]) -> None:
        """The state of a peer arrived; it is kept until this one is where it asks for it."""
        if not commit.acts_in(self.member, epoch):
            return
        if self.member.phase is commit.Phase.FETCHING:
            self.history, self.incoming, self.flipped = history, None, False
            self.feed(protocol.Fetched(epoch))
        else:
            self.incoming = (epoch, history)

    def _ready(self, epoch: int, step: int) -> None:
        if self.member.phase is not commit.Phase.READY or not commit.acts_in(self.member, epoch):
            return  # a formation came first
        self.cluster.truth.formations.ready(self, step)
        if self.stage is not Stage.MEMBER or not self.resumed:
            self.stage = Stage.MEMBER
            self.tell()
        if self.cluster.rounds.through(self.worker.epoch, step):
            self.completed = True
            late = self.cluster.fixed and not self.cluster.quiet and self.cluster.rng.random() < 0.1
            end = (
                (ExitCause.SIGNAL, 9) if late else (ExitCause.OK, 0)
            )  # killed in its last moment, others still at work
            self.after(0.0, 0.4, self.main, self.worker.die, *end)
        else:
            self.feed(protocol.Began(epoch))
            self.cluster.rounds.compute(self, epoch, step)
            if self.spoiled:
                self.after(0.0, 0.05, self.main, self.fail, "RuntimeError: spoiled")

    def reduce(self, epoch: int, step: int) -> None:
        """Its own gradients are there."""
        stand = self.member.stand
        if commit.acts_in(self.member, epoch) and stand.committed == step:
            self.cluster.rounds.take_part(self, "gradients", epoch, step, None)

    def _leave(self) -> None:
        self.stage = Stage.LEFT
        self.tell()
        self.after(0.0, 0.3, self.main, self.worker.die, ExitCause.OK, 0)
