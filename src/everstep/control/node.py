"""What an agent does with its node: a pure machine `(state, event, now) -> (state, commands)`.

It follows the controller's newest directive, one epoch at a time: an older epoch's processes are all gone
(and their orphans swept) before a newer one starts. Losing the controller changes nothing for running
workers until it has lasted very long: a node that hears nothing for `fence_after_s` stops itself, because spares
may be about to take its place. Only a directive counts as hearing: a connection alone does not show that the
controller knows of us, so it answers the first report of each connection with the node's present directive.
"""

from __future__ import annotations

import signal

import msgspec

from everstep.control.membership import fence_after_s
from everstep.control.urgency import may_wait
from everstep.core.formation import Formation, SessionReport, Stage
from everstep.core.types import Action, Activity, Directive, EpochPlan, Exit, ExitCause, NodeReport, WorkerReport

ALIGN_S = 10.0  # a stop aligned to a step waits this long (at most half the grace) for that step


class Node(msgspec.Struct, frozen=True):
    """Everything the agent decides from. `report` is what the controller is told."""

    report: NodeReport
    plan: EpochPlan | None = None
    directive: Directive = Directive(term=0, seq=0, action=Action.PARK)
    stop_by_s: float = 0.0  # SIGKILL whoever is left then; meaningful while STOPPING
    term_by_s: float = 0.0  # SIGTERM then, when the stop was to wait for a step; 0: sent
    killed: bool = False
    silent_since_s: float = 0.0  # 0: the controller is heard
    fence_s: float = 60.0
    exit_s: float = 300.0  # a process may outlive its script by this much

    @property
    def fence_after_s(self) -> float:
        return fence_after_s(self.fence_s, len(self.plan.members) if self.plan else 1)


# Events -------------------------------------------------------------------------------------------------


class Directed(msgspec.Struct, frozen=True):
    directive: Directive


class WorkerStarted(msgspec.Struct, frozen=True):
    epoch: int
    local_rank: int
    pid: int


class WorkerFailed(msgspec.Struct, frozen=True):
    """First sign of an end: an error escaped the script, or the kernel released its mutex."""

    epoch: int
    local_rank: int
    exit: Exit


class WorkerGone(msgspec.Struct, frozen=True):
    epoch: int
    local_rank: int
    exit: Exit


class WorkerLingers(msgspec.Struct, frozen=True):
    """Its script ended well, its process is still there: no sign of life for `silent_s`."""

    epoch: int
    local_rank: int
    silent_s: float


class TermSeen(msgspec.Struct, frozen=True):
    epoch: int
    local_rank: int


class SessionSpoke(msgspec.Struct, frozen=True):
    """What the session of a worker's script reports: its stage, its epoch, where it listens."""

    epoch: int
    local_rank: int
    report: SessionReport


class Examined(msgspec.Struct, frozen=True):
    """The examination with this number is over. `unfit`: what is broken; empty: nothing."""

    number: int
    unfit: str = ""


class Swept(msgspec.Struct, frozen=True):
    epoch: int


class StoreOpened(msgspec.Struct, frozen=True):
    """A fresh listening socket is there for the next epoch's store."""

    port: int


class LinkChanged(msgspec.Struct, frozen=True):
    up: bool


class LeaveAsked(msgspec.Struct, frozen=True):
    """The agent was asked to give its node up (SIGUSR2)."""


class Ticked(msgspec.Struct, frozen=True):
    pass


NodeEvent = (
    Directed
    | WorkerStarted
    | WorkerFailed
    | WorkerGone
    | WorkerLingers
    | TermSeen
    | SessionSpoke
    | Examined
    | Swept
    | StoreOpened
    | LinkChanged
    | LeaveAsked
    | Ticked
)


# Commands -----------------------------------------------------------------------------------------------


class Launch(msgspec.Struct, frozen=True):
    plan: EpochPlan


class Respawn(msgspec.Struct, frozen=True):
    """A new process in the place of one that is gone."""

    local_rank: int
    life: int


class Tell(msgspec.Struct, frozen=True):
    """The sessions of this node's workers hear of a formation. Repeating it is harmless."""

    formation: Formation


class SignalWorkers(msgspec.Struct, frozen=True):
    local_ranks: tuple[int, ...]
    signum: int


class CutSockets(msgspec.Struct, frozen=True):
    """Shut these workers' connections to the epoch's nodes, so that waiting collectives raise.

    Late: to the epoch's store only, which a worker may have found after the first cut, to wait there for the others.
    """

    local_ranks: tuple[int, ...]
    late: bool = False


class EndLingering(msgspec.Struct, frozen=True):
    """SIGKILL for a worker whose script ended: it counts as having ended well."""

    local_rank: int


class AskSave(msgspec.Struct, frozen=True):
    """Tell the workers that a person wants the state on disk: the number of the wish."""

    number: int


class StopAtStep(msgspec.Struct, frozen=True):
    local_ranks: tuple[int, ...]
    step: int


class Sweep(msgspec.Struct, frozen=True):
    """Kill whatever the epoch left behind, then answer Swept."""

    epoch: int


class Examine(msgspec.Struct, frozen=True):
    """Examine the node, once nothing of an epoch runs here; then answer Examined."""

    number: int


class Report(msgspec.Struct, frozen=True):
    report: NodeReport
    soon: bool = False  # within MERGE_S, with what changes until then; else at once


class Quit(msgspec.Struct, frozen=True):
    pass


Command = (
    Launch
    | Respawn
    | Tell
    | SignalWorkers
    | CutSockets
    | EndLingering
    | StopAtStep
    | AskSave
    | Examine
    | Sweep
    | Report
    | Quit
)


def step(node: Node, event: NodeEvent, now: float) -> tuple[Node, list[Command]]:
    """Advance by one event. A report follows every change that the controller must know."""
    draft = _Draft(node, now)
    draft.take(event)
    return draft.result()


class _Draft:
    """One step under construction: the new state and the commands so far."""

    def __init__(self, node: Node, now: float) -> None:
        self.before = node
        self.node = node
        self.now = now
        self.commands: list[Command] = []

    def result(self) -> tuple[Node, list[Command]]:
        if self.node.report != self.before.report:
            self.set_report(seq=self.node.report.seq + 1)
            places = [place for place, each in enumerate(self.commands) if isinstance(each, (CutSockets, Quit))]
            soon = may_wait(self.before.report, self.node.report, self.node.directive.formation)
            # First the report: a cut may wait for a while, and nothing follows a quit.
            self.commands.insert(min(places, default=len(self.commands)), Report(self.node.report, soon))
        return self.node, self.commands

    def set(self, **changes: object) -> None:
        self.node = msgspec.structs.replace(self.node, **changes)

    def set_report(self, **changes: object) -> None:
        self.set(report=msgspec.structs.replace(self.node.report, **changes))

    @property
    def activity(self) -> Activity:
        return self.node.report.activity

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(w.local_rank for w in self.node.report.workers if not w.gone)

    def take(self, event: NodeEvent) -> None:
        match event:
            case Directed(directive):
                self.directed(directive)
            case WorkerStarted(epoch, local_rank, pid) if epoch == self.node.report.epoch:
                self.change_worker(local_rank, pid=pid)
                self.signal_late(local_rank)
                if self.activity is Activity.RUNNING:
                    self.reseat()  # its place may be wanted for the next life since it was asked for
            case WorkerFailed(epoch, local_rank, exit) if epoch == self.node.report.epoch:
                self.change_worker(local_rank, exit=exit)
                if self.activity is Activity.STOPPING and self.node.directive.cut:
                    self.commands.append(SignalWorkers((local_rank,), signal.SIGKILL))
            case WorkerGone(epoch, local_rank, exit) if epoch == self.node.report.epoch:
                self.change_worker(local_rank, gone=True, exit=exit)
                if self.activity is Activity.RUNNING:
                    self.reseat()
                self.sweep_when_empty()
            case WorkerLingers(epoch, local_rank, silent_s) if epoch == self.node.report.epoch:
                # Tear-down can dead-lock in a library; whoever waited for this process would wait for ever.
                if silent_s >= self.node.exit_s and local_rank in self.alive:
                    self.commands.append(EndLingering(local_rank))
            case TermSeen(epoch, local_rank) if epoch == self.node.report.epoch:
                self.change_worker(local_rank, term_asked=True)
            case SessionSpoke(epoch, local_rank, report) if epoch == self.node.report.epoch:
                self.change_worker(local_rank, session=report)
            case Swept(epoch) if epoch == self.node.report.epoch and not self.alive:
                self.set_report(activity=Activity.STOPPED)
                self.follow()
            case Examined(number, unfit):
                self.set_report(examined=number, unfit=unfit)
            case StoreOpened(port):
                self.set_report(store_port=port)
            case LinkChanged(up):
                if up:
                    self.set_report(seq=self.node.report.seq + 1)
                else:
                    self.set(silent_since_s=self.node.silent_since_s or self.now)
                    self.stop_unasked()
            case LeaveAsked():
                self.leave()
                self.leave_when_idle()
            case Ticked():
                self.tick()

    def directed(self, directive: Directive) -> None:
        known = self.node.directive
        if self.node.silent_since_s:
            self.set(silent_since_s=0.0)
        if (directive.term, directive.seq) <= (known.term, known.seq):
            return
        self.set(directive=directive)
        if directive.save_asked > known.save_asked:
            self.commands.append(AskSave(directive.save_asked))
        if directive.exam > known.exam:
            self.commands.append(Examine(directive.exam))
        if directive.leave and not self.node.report.leaving:
            self.leave()
        self.follow()

    def leave(self) -> None:
        """From now on this node gives itself up, as soon as nobody relies on what it runs."""
        self.set_report(leaving=True)
        self.stop_unasked()
        if self.node.directive.formation is not None:
            self.sweep_when_empty()

    def follow(self) -> None:
        """Do what the newest directive wants, as far as the present state lets it."""
        directive = self.node.directive
        busy = self.activity in (Activity.RUNNING, Activity.STOPPING)
        if directive.action is Action.RUN:
            if directive.epoch > self.node.report.epoch and not self.node.report.leaving:
                self.stop_now() if busy else self.launch(directive)
            elif directive.epoch == self.node.report.epoch and directive.formation is not None:
                self.follow_formation(directive)
        elif directive.action is Action.STOP:
            self.follow_stop(directive)
        elif busy and directive.action is Action.PARK:
            self.stop_now()  # others have its place: what it would save must not meet what they load
        elif busy:
            self.begin_stop(directive)
        elif directive.action is Action.LEAVE:
            self.commands.append(Quit())
        self.leave_when_idle()

    def follow_stop(self, directive: Directive) -> None:
        if directive.epoch < self.node.report.epoch:
            return
        if self.activity in (Activity.RUNNING, Activity.STOPPING):
            if directive.epoch == self.node.report.epoch:
                self.begin_stop(directive)
            else:
                self.stop_now()
        else:  # nothing runs: this epoch can never start here
            self.set_report(epoch=directive.epoch, activity=Activity.STOPPED, workers=())

    def launch(self, directive: Directive) -> None:
        plan = directive.plan
        assert plan is not None
        member = plan.member(self.node.report.node)
        if member is None or member.incarnation != self.node.report.incarnation:
            return  # meant for an earlier agent of this name
        workers = tuple(
            WorkerReport(k, life=_life(directive, k), gone=k in directive.vacant) for k in range(member.slots)
        )
        self.set(plan=plan, killed=False, stop_by_s=0.0, term_by_s=0.0)
        self.set_report(epoch=plan.epoch, activity=Activity.RUNNING, workers=workers)
        self.commands.append(Launch(plan))

    def follow_formation(self, directive: Directive) -> None:
        """The plan may have changed, and which process of a place counts."""
        if self.activity is Activity.RUNNING:
            self.set(plan=directive.plan)
            self.reseat()
            assert directive.formation is not None
            self.commands.append(Tell(directive.formation))
        elif self.activity is Activity.STOPPED and not self.node.report.leaving:
            workers = [w for w in self.node.report.workers if w.local_rank not in directive.vacant]
            wanted = len(directive.vacant) < self.node.report.slots  # again: it was lost, and has stopped
            if wanted and all(_life(directive, w.local_rank) > w.life for w in workers):
                self.launch(directive)

    def reseat(self) -> None:
        """Places whose process is to be a later life: end what is left of the old one, then start it."""
        for worker in self.node.report.workers:
            life = _life(self.node.directive, worker.local_rank)
            if life <= worker.life or self.node.directive.epoch != self.node.report.epoch:
                continue
            if worker.gone and not self.node.report.leaving and worker.local_rank not in self.node.directive.vacant:
                before = worker.exit
                fresh = {"pid": 0, "gone": False, "exit": None, "term_asked": False, "session": None}
                self.change_worker(worker.local_rank, **fresh, life=life, before=before)
                self.commands.append(Respawn(worker.local_rank, life))
            elif not worker.gone:
                self.commands.append(SignalWorkers((worker.local_rank,), signal.SIGKILL))

    def change_worker(self, local_rank: int, **changes: object) -> None:
        workers = list(self.node.report.workers)
        workers[local_rank] = msgspec.structs.replace(workers[local_rank], **changes)
        self.set_report(workers=tuple(workers))

    def sweep_when_empty(self) -> None:
        if self.alive or self.activity not in (Activity.RUNNING, Activity.STOPPING):
            return
        failed = any(w.exit is not None and w.exit.cause is not ExitCause.OK for w in self.node.report.workers)
        wanted = self.node.directive.formation is not None and not self.node.report.leaving
        if self.activity is Activity.RUNNING and wanted and failed:
            return  # the places may be filled again
        self.commands.append(Sweep(self.node.report.epoch))

    def begin_stop(self, order: Directive) -> None:
        """SIGTERM now or at a step; a repeated order can only shorten the grace."""
        stop_by = self.now + order.grace_s
        if self.activity is Activity.STOPPING:
            self.set(stop_by_s=min(stop_by, self.node.stop_by_s))
        else:
            self.set_report(activity=Activity.STOPPING)
            self.set(stop_by_s=stop_by, term_by_s=0.0)
        hung = self.hung(order)
        rest = tuple(r for r in self.alive if r not in hung)
        if hung:
            self.commands.append(SignalWorkers(hung, signal.SIGKILL))
        if order.stop_at_step and not order.cut:
            idle = tuple(r for r in rest if self._makes_no_step(r))
            self.commands.append(StopAtStep(tuple(r for r in rest if r not in idle), order.stop_at_step))
            if idle:
                self.commands.append(SignalWorkers(idle, signal.SIGTERM))
            self.set(term_by_s=self.now + min(ALIGN_S, order.grace_s / 2))
        else:
            self.commands.append(SignalWorkers(rest, signal.SIGTERM))
        if order.cut:
            self.commands.append(CutSockets(rest))
        self.sweep_when_empty()
        self.kill_when_due()

    def hung(self, order: Directive) -> tuple[int, ...]:
        """Who has nothing to save: judged hung, or failed already and only taking its time to leave."""
        member = self.node.plan.member(self.node.report.node) if self.node.plan else None
        first = member.first_rank if member else 0
        failed = {w.local_rank for w in self.node.report.workers if w.exit is not None and order.cut}
        return tuple(r for r in self.alive if first + r in order.kill_ranks or r in failed)

    def _makes_no_step(self, local_rank: int) -> bool:
        """Its session waits for a role: no step to stop at ever comes."""
        session = self.node.report.workers[local_rank].session
        return session is not None and session.stage in (Stage.WARMING, Stage.READY)

    def stop_unasked(self) -> None:
        """A leaving node that is out of the controller's sight: nobody is there to order its stop."""
        if self.node.report.leaving and self.node.silent_since_s and self.activity is Activity.RUNNING:
            self.begin_stop(self.node.directive)

    def signal_late(self, local_rank: int) -> None:
        """A worker that was not forked yet when the others were signalled."""
        if self.activity is Activity.STOPPING and not self.node.term_by_s:
            signum = signal.SIGKILL if self.node.killed else signal.SIGTERM
            self.commands.append(SignalWorkers((local_rank,), signum))

    def stop_now(self) -> None:
        """The epoch is over for the others: nothing to save any more."""
        if self.activity is not Activity.STOPPING:
            self.set_report(activity=Activity.STOPPING)
        self.set(stop_by_s=self.now, term_by_s=0.0)
        self.kill_when_due()
        self.sweep_when_empty()

    def kill_when_due(self) -> None:
        if self.activity is Activity.STOPPING and not self.node.killed and self.now >= self.node.stop_by_s:
            self.set(killed=True)
            if self.alive:
                self.commands.append(SignalWorkers(self.alive, signal.SIGKILL))

    def leave_when_idle(self) -> None:
        """A leaving node that runs nothing, and never will, can go."""
        if self.node.report.leaving and self.activity in (Activity.IDLE, Activity.STOPPED):
            self.commands.append(Quit())

    def tick(self) -> None:
        node = self.node
        if self.activity is Activity.STOPPING:
            if node.term_by_s and self.now >= node.term_by_s:
                self.set(term_by_s=0.0)
                self.commands.append(SignalWorkers(self.alive, signal.SIGTERM))
            if node.directive.cut and self.alive and not node.killed:
                self.commands.append(CutSockets(self.alive, late=True))
            self.kill_when_due()
            self.sweep_when_empty()
        busy = self.activity in (Activity.RUNNING, Activity.STOPPING)
        if busy and node.silent_since_s and not self.node.killed:
            if self.now - node.silent_since_s >= node.fence_after_s:
                self.stop_now()


def _life(directive: Directive, local_rank: int) -> int:
    return directive.lives[local_rank] if local_rank < len(directive.lives) else 0
