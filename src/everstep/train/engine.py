"""Drives one worker's commit protocol: the machine of `train.commit`, the fabric, and the threads between them.

The main thread takes the steps and carries out what the machine wants; it waits here and inside collectives. The
channel's thread delivers formations: it wakes the main thread out of an epoch that is over, and has the links of the
next one opened by a thread of their own. One lock guards the machine; nobody holds it while he waits for a peer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric, Superseded
from everstep.comms.link import LinkError
from everstep.core import identity
from everstep.core.dealing import RECENT, Dealing, Stream
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.saves import Saves, Tier
from everstep.probe import boot
from everstep.train import commit, protocol, transfer
from everstep.train.guard import Guard, differ
from everstep.train.inner import Inner
from everstep.train.protocol import NOTHING_SAID, Said
from everstep.train.resolve import Stand
from everstep.train.worker import Worker

UNREACHABLE_S = 60.0  # a member that cannot be reached for so long, and is not dead: the network is broken
RETRY_S = 0.2

T = TypeVar("T", Stand, protocol.Vote)


class StateLost(RuntimeError):
    """No member holds the steps that were committed: the job has to go back to a saved state."""


class Engine:
    """`report` tells the agent; `open` makes this worker known, `ready` waits for its first step.

    inner: the library which sums gradients in place of the fabric.
    guard: what members tell each other to find a wrong state; None: nothing.
    """

    def __init__(
        self,
        fabric: Fabric,
        worker: str,
        host: str,
        report: Callable[[SessionReport], None],
        inner: Inner | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.fabric = fabric
        self.inner = inner
        self._guard = guard or Guard(0, {})
        self.communicator = Communicator(fabric)
        self._side = Communicator(fabric, index=1)  # state travels here, while the first one is at work
        self._serving = transfer.Serving(self._side)
        self.beside = Communicator(fabric, index=2)  # for the main thread, while gradients are summed in the first one
        self._host = host
        self._report = report
        self._owner: Worker | None = None
        self._news = threading.Condition()
        self._member = commit.Member(worker)
        self._todo: deque[protocol.Command] = deque()
        self._unreachable: LinkError | None = None
        self._committed_s = self._began_s = 0.0
        self._gap_s = self._late_s = -1.0
        self._resumed_in = 0  # epoch of the last commit here
        self._stage = Stage.WARMING
        self._epoch = 0
        self._entered = 0  # the epoch whose links the main thread uses; the machine may be ahead of it
        self._dealt_to = 0  # members that the step under way was dealt to
        self._dealt: tuple[Dealing, ...] = ()
        self._replaced = False  # in the step under way the state was overwritten from elsewhere
        self._restoring = False
        self._keep = Tier.NOTHING
        mine = identity.mine()
        self._vault = mine.vault.endpoint if mine is not None else ""
        self._saves = Saves()
        self._place: tuple[int, int] | None = None  # role and number of members, of a state that depends on them
        self._goal = 0

    # What the session sees ------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        return self._member.stand.committed

    @property
    def epoch(self) -> int:
        """Of the step under way. The machine may have left it already."""
        return self._epoch

    @property
    def commit_epoch(self) -> int:
        """Whose gradients made the last commit: together with its step, that names the state."""
        return self._member.stand.commit_epoch

    @property
    def keep(self) -> Tier:
        """How far the step just committed is to be saved, by all members; one that was rolled forward is not."""
        return self._keep

    @property
    def checks(self) -> bool:
        """Whether the vote on the step under way compares the state before it."""
        return self._member.check

    @property
    def turn(self) -> int:
        """By how many roles shares are handed on in the step under way."""
        return self._member.turn

    @property
    def audits(self) -> bool:
        return commit.audits(self._member)

    @property
    def unsure(self) -> int:
        return self._member.stand.unsure

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Of the epoch entered last, by role."""
        formation = self._member.formation
        return formation.seats if formation is not None else ()

    @property
    def role(self) -> int:
        return self.fabric.table.role

    @property
    def shards(self) -> int:
        """Parts of the state: role r holds part r % shards."""
        return self._member.shards

    @property
    def num_members(self) -> int:
        return self.fabric.table.size

    def say(self, stage: Stage) -> None:
        """Tell the agent where this session stands."""
        self._stage = stage
        self._tell()

    def seat(self, owner: Worker) -> None:
        """Wait for a role before there is state, which will depend on it: from here on the role must stay the same.

        The others wait for the state in the first round of the epoch.
        """
        from everstep.comms.work import Work  # torch.distributed: only for who needs it

        boot.waits_in(Work)
        self._owner, self._place = owner, (-1, -1)
        self.say(Stage.READY)
        self._carry_out(self._until(protocol.Switch))

    def split(self, shards: int) -> None:
        """The state is in so many shards: role r holds shard r % shards. Before the first step."""
        with self._news:
            self._member = replace(self._member, shards=shards)

    def open(self, owner: Worker) -> None:
        """The state is complete and can be seated: from here on formations have an effect."""
        self._owner = owner
        if self._place is None:
            self.say(Stage.READY)

    def aim(self, num_steps: int) -> None:
        """The loop of this script ends when the job has so many steps."""
        if num_steps != self._goal:
            self._goal = self._guard.goal = num_steps
            self._tell()

    def ready(self) -> int:
        """Wait until a step may begin; its number. Changes of epoch that are due happen in here."""
        command = self._until(protocol.Ready)
        assert isinstance(command, protocol.Ready)
        self._epoch, self._dealt_to, self._replaced = command.epoch, self.num_members, False
        if self._stage is not Stage.MEMBER or self._resumed_in != command.epoch:
            self.say(Stage.MEMBER)
        return command.step

    def began(self) -> None:
        self._began_s = time.monotonic()
        self._feed(protocol.Began(self.epoch))

    def vote(self, finite: bool, keep: Tier = Tier.NOTHING, said: Said = NOTHING_SAID) -> bool:
        """The gradients are complete. True: apply them, then call `applied`. False: this step commits without them.

        keep: how far this member wants the state after the step to be saved; `Engine.keep` has the decision. Raises
        EpochBroken when the step is not committed: it will be ready again. Whatever becomes of the epoch, the answer is
        the one that all survivors come to.
        """
        before = self.committed
        self._keep = Tier.NOTHING
        self._feed(protocol.Reduced(self.epoch, finite, keep, said))
        command = self._until(protocol.Apply, protocol.Serve, protocol.Ready)
        if isinstance(command, protocol.Apply):
            assert self._owner is not None
            self._owner.keeping.before_change()
            return True
        with self._news:
            self._todo.appendleft(command)  # for `ready`: the state is whole only at the end of the step
        if self.audits:
            boot.repeated(time.monotonic() - self._began_s)
        if self._replaced or self.committed == before:
            raise EpochBroken(
                self.epoch,
                f"step {before} is not committed here: it is done again, or was copied or restored",
            )
        return False

    def applied(self, streams: tuple[Stream, ...] = ()) -> None:
        """The optimizer is through: the step is committed. `streams`: what it took its samples from."""
        self._feed(protocol.Applied())
        self._note_commit(streams)

    def skipped(self, streams: tuple[Stream, ...] = ()) -> None:
        self._note_commit(streams)

    def in_epoch(self) -> bool:
        """Whether the epoch of the step under way still is."""
        with self._news:
            return commit.acts_in(self._member, self._epoch)

    def require_epoch(self) -> None:
        """Raises EpochBroken when the epoch entered last is over: for whoever waits for something else than members."""
        with self._news:
            if not commit.acts_in(self._member, self._entered):
                raise EpochBroken(self._entered, "another formation follows it")

    def tell_saves(self, saves: Saves) -> None:
        """What is known of saves to disk by now. From any thread."""
        if saves != self._saves:
            self._saves = saves
            self._tell()

    def confirm(self, settle: Callable[[], None]) -> bool:
        """After the last step: compare replicas once more. False: they differ, or the epoch is over: ask `ready` again.

        `settle` waits for who still reads the state.
        """
        last = self._guard.last(self, settle)
        if last is None:
            return True
        try:
            votes = self._gather(protocol.Vote(True, 0, said=last), protocol.Vote)
        except EpochBroken:  # for a formation, or because somebody left without asking
            with self._news:
                return commit.acts_in(self._member, self._epoch)
        self._feed(protocol.Compared(self._epoch, votes))
        if self._guard.heard(self._epoch, self.committed, votes, self.shards):
            self._tell()
        if differ(votes, self.shards):
            return False
        with contextlib.suppress(EpochBroken):  # the first to leave would end the epoch for who still reads
            self.communicator.part()
        return True

    def leave(self) -> None:
        """Take part in nothing any more, once a newcomer has all it was promised: what waits for others raises."""
        self._serving.finish()
        with self._news:
            self.fabric.abort(self._member.epoch, "this worker has left")

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()
        self.fabric.close()

    # Formations, in the channel's thread ----------------------------------------------------------------

    def receive(self, formation: Formation) -> None:
        """A formation was issued, or is repeated. From any thread; waits for no peer."""
        for command in self._feed(protocol.FormationReceived(formation), background=True):
            if isinstance(command, protocol.Prepare):
                threading.Thread(
                    target=self._prepare, args=(command.formation,), name="everstep-prepare", daemon=True
                ).start()
            elif isinstance(command, protocol.Abort):
                why = f"formation {formation.epoch} follows it"
                self.fabric.abort(command.epoch, why)
                self.fabric.abort_before(command.epoch, why)
                if self.inner is not None:
                    self.inner.abort(command.epoch)
                if self._restoring and self._owner is not None:
                    self._owner.keeping.interrupt()

    def _prepare(self, formation: Formation) -> None:
        """A peer that cannot be reached is, as a rule, dead, and a formation without it is on its way."""
        deadline = time.monotonic() + UNREACHABLE_S
        while True:
            try:
                self.fabric.prepare(formation)
                if self.inner is not None:
                    self.inner.prepare(formation)
            except Superseded:
                return
            except LinkError as error:
                with self._news:
                    if self._wanted(formation) and time.monotonic() > deadline:
                        self._unreachable = error
                        self._news.notify_all()
                    if not self._wanted(formation) or self._unreachable is not None:
                        return
                    self._news.wait(RETRY_S)
            else:
                break
        self._feed(protocol.Prepared(formation.epoch))
        self._tell()

    def _wanted(self, formation: Formation) -> bool:
        return formation in (self._member.entering, self._member.planned)

    # The machine ----------------------------------------------------------------------------------------

    def _feed(self, event: protocol.Event, background: bool = False) -> list[protocol.Command]:
        """One event; what the main thread has to do is queued. Returns what is for the caller's thread."""
        at_once = (protocol.Prepare, protocol.Abort)
        with self._news:
            self._member, commands = commit.step(self._member, event)
            mine: list[protocol.Command] = [command for command in commands if isinstance(command, at_once)]
            assert background or not mine
            if any(isinstance(command, protocol.Abort) for command in commands):
                self._drop_overtaken()
            self._todo.extend(command for command in commands if not isinstance(command, at_once))
            self._news.notify_all()
        return mine

    def _drop_overtaken(self) -> None:
        """What was still to be done in an epoch that is over; an apply and void gradients are this worker's own."""
        own = protocol.Apply | protocol.DropGradients | protocol.Audited | protocol.Doubt
        kept = [command for command in self._todo if isinstance(command, own)]
        self._todo.clear()
        self._todo.extend(kept)

    def _next(self) -> protocol.Command:
        with self._news:
            while not self._todo:
                if self._unreachable is not None:
                    raise self._unreachable
                self._news.wait()
            return self._todo.popleft()

    @boot.waits_for("agree")
    def _until(self, *kinds: type[protocol.Command]) -> protocol.Command:
        """Carry out what is to be done until one of these is: it is the caller's."""
        while True:
            command = self._next()
            if isinstance(command, kinds):
                return command
            self._carry_out(command)

    def _carry_out(self, command: protocol.Command) -> None:
        owner = self._owner
        assert owner is not None
        try:
            match command:
                case protocol.Switch(formation):
                    self._serving.finish()
                    self.communicator.part()
                    self.fabric.switch(formation)
                    if self.inner is not None:
                        self.inner.switch(formation)
                    self._entered = formation.epoch
                    boot.undone(formation.epoch)
                    self._tell()
                    self._check_place(formation)
                case protocol.PublishStand(epoch, stand):
                    self._feed(protocol.Stood(epoch, self._gather(replace(stand, kept=owner.keeping.kept()), Stand)))
                case protocol.CastVote(epoch, vote):
                    step, votes = self.committed, self._gather(vote, protocol.Vote)
                    self._feed(protocol.Voted(epoch, votes))
                    self._keep = self._member.keep
                    if self._guard.heard(epoch, step, votes, self.shards):
                        self._tell()
                case protocol.Audited():
                    self._guard.audit.told(command)
                case protocol.Doubt():
                    self._doubt(command)
                case protocol.DropGradients():
                    owner.drop_gradients()
                case protocol.Fetch(epoch, source):
                    self._replaced = True
                    owner.keeping.before_change()
                    owner.fetch(self._side, source)
                    self._feed(protocol.Fetched(epoch))
                case protocol.Restore():
                    self._restore(owner, command)
                case protocol.Serve(_, roles):
                    self._serving.begin(owner.state, roles)
                case protocol.Leave():
                    self.communicator.part()
                    self.say(Stage.LEFT)
                    raise SystemExit(0)
                case protocol.Fenced(epoch):
                    raise SystemExit(f"everstep: the others went on without this worker in epoch {epoch}: it stops")
                case protocol.StateLost():
                    raise StateLost(command.text)
                case _:
                    raise AssertionError(command)
        except EpochBroken:
            return  # a formation that ends the epoch came, or will come: the machine says what is next

    def _doubt(self, doubt: protocol.Doubt) -> None:
        """What is found out is told in any case: it leads to the epoch in which all go back."""
        try:
            self._guard.doubts(doubt, self, self._member.stand.verified, self.communicator.all_gather_bytes)
        finally:
            self._tell()

    def _restore(self, owner: Worker, command: protocol.Restore) -> None:
        """A formation that comes meanwhile gets it out: by `interrupt`, or before it waits by `require_epoch`."""
        self._replaced = True
        owner.keeping.before_change()
        self._restoring = True
        try:
            self.require_epoch()
            goal = command.goal
            good = owner.keeping.restore(goal.committed, command.places, goal.commit_epoch)
            fingerprint = owner.keeping.fingerprint() if good else 0
        finally:
            self._restoring = False
        self._feed(protocol.Restored(command.epoch, good, fingerprint))

    def _check_place(self, formation: Formation) -> None:
        """Shapes and groups were made for one role of so many. RuntimeError when this worker got another one."""
        if self._place is None:
            return
        place = self.role, self.num_members
        if self._place[0] < 0:
            self._place = place
        if self._place != place:
            mine, now = ("role {} of {}".format(*each) for each in (self._place, place))
            raise RuntimeError(f"epoch {formation.epoch} needs {now} here, and the sharded state is that of {mine}")

    def _gather(self, mine: T, kind: type[T]) -> tuple[T, ...]:
        said = self.communicator.all_gather_bytes(msgspec.msgpack.encode(mine))
        return tuple(msgspec.msgpack.decode(each, type=kind) for each in said)

    # What is told ---------------------------------------------------------------------------------------

    def _note_commit(self, streams: tuple[Stream, ...]) -> None:
        now, changed = time.monotonic(), self._note_dealing(streams)
        gap_s = now - self._committed_s if self._committed_s else -1.0
        if self._resumed_in != self._epoch:
            self._resumed_in, self._gap_s, changed = self._epoch, max(gap_s, self._late_s), True
            self._late_s = -1.0
        elif not self.in_epoch():  # what a fault held up is committed after all
            self._late_s = gap_s
        if changed:
            self._tell()
        self._committed_s = now

    def _note_dealing(self, streams: tuple[Stream, ...]) -> bool:
        """Whether the step just committed was dealt in another way than the one before it."""
        last = self._dealt[-1] if self._dealt else None
        if last is not None and (last.epoch, last.streams) == (self._epoch, streams):
            return False
        dealing = Dealing(self._epoch, self._dealt_to, self.committed - 1, streams)
        self._dealt = (*self._dealt, dealing)[-RECENT:]
        return True

    def _tell(self) -> None:
        with self._news:
            member = self._member
        self._report(
            SessionReport(
                worker=member.worker,
                stage=self._stage,
                committed=member.stand.committed,
                epoch=self._entered,
                prepared=member.prepared,
                endpoint=self.fabric.endpoint,
                host=self._host,
                resumed=self._resumed_in == self._entered > 0,
                gap_s=self._gap_s,
                fixed=self._place is not None,
                dealt=self._dealt,
                goal=self._goal,
                store=self.inner.store if self.inner is not None else "",
                rollbacks=member.stand.rollbacks,
                vault=self._vault,
                saves=self._saves,
                corrupt=self._guard.found,
            )
        )
