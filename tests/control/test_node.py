"""The machine of a node: one epoch at a time, stops that end, and orders that can be repeated."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep.control import membership
from everstep.control import node as n
from everstep.core.formation import SessionReport, Stage
from everstep.core.types import Action, Activity, Directive, EpochPlan, Exit, ExitCause, NodeReport

OTHER = NodeReport("n2", "n2.1", 1, 0.0, 2, "10.0.0.2", 7000)


def fresh(fence_s: float = 60.0) -> n.Node:
    return n.Node(NodeReport("n1", "n1.1", 1, 0.0, 2, "10.0.0.1", 7000), fence_s=fence_s)


def plan(epoch: int, *, alone: bool = False) -> EpochPlan:
    return membership.deal(epoch, (), [fresh().report] if alone else [fresh().report, OTHER], 2, 0)


def run(epoch: int, seq: int, *, alone: bool = False) -> n.Directed:
    return n.Directed(Directive(1, seq, Action.RUN, epoch, plan(epoch, alone=alone)))


def stop(epoch: int, seq: int, grace_s: float = 5.0, **fields: object) -> n.Directed:
    return n.Directed(Directive(1, seq, Action.STOP, epoch, grace_s=grace_s, **fields))  # type: ignore[arg-type]


def gone(epoch: int, local_rank: int, cause: ExitCause = ExitCause.STOPPED) -> n.WorkerGone:
    return n.WorkerGone(epoch, local_rank, Exit(cause, 0.0))


def play(node: n.Node, *events: n.NodeEvent, now: float = 0.0) -> tuple[n.Node, list[n.Command]]:
    commands: list[n.Command] = []
    for event in events:
        node, more = n.step(node, event, now)
        commands += more
    return node, commands


def running(epoch: int = 1, *, alone: bool = False, fence_s: float = 60.0) -> n.Node:
    started = [n.WorkerStarted(epoch, r, 100 + r) for r in (0, 1)]
    node, _ = play(fresh(fence_s), run(epoch, 1, alone=alone), *started)
    return node


def kinds(commands: Sequence[n.Command]) -> list[str]:
    return [type(c).__name__ for c in commands]


def signals(commands: Sequence[n.Command]) -> list[tuple[tuple[int, ...], int]]:
    return [(c.local_ranks, c.signum) for c in commands if isinstance(c, n.SignalWorkers)]


def test_runs_then_stops_then_sweeps() -> None:
    node, commands = play(fresh(), run(1, 1))
    assert kinds(commands) == ["Launch", "Report"]
    node, commands = play(node, stop(1, 2, cut=True))
    assert signals(commands) == [((0, 1), signal.SIGTERM)]
    assert kinds(commands)[-3:] == ["SignalWorkers", "Report", "CutSockets"]  # a cut waits: the report is ahead of it
    assert play(node, n.Ticked())[1] == [n.CutSockets((0, 1), late=True)]  # who came to the store meanwhile
    node, commands = play(node, gone(1, 0), gone(1, 1))
    assert kinds(commands) == ["Report", "Sweep", "Report"]
    assert "CutSockets" not in kinds(play(node, n.Ticked())[1])
    node, _ = play(node, n.Swept(1))
    assert node.report.activity is Activity.STOPPED and node.report.seq == 6


def test_newer_epoch_waits_until_the_older_is_swept() -> None:
    node, commands = play(running(1), run(2, 2))
    assert signals(commands) == [((0, 1), signal.SIGKILL)] and "Launch" not in kinds(commands)
    node, commands = play(node, gone(1, 0), gone(1, 1), n.Swept(1))
    assert kinds(commands)[-2:] == ["Launch", "Report"] and node.report.epoch == 2


def test_who_is_parked_while_it_runs_has_nothing_left_to_save() -> None:
    """A host that was frozen while others took its place: its workers may wait in a collective that nobody ends."""
    node, commands = play(running(1), n.Directed(Directive(1, 2, Action.PARK, grace_s=30.0)))
    assert signals(commands) == [((0, 1), signal.SIGKILL)]
    node, _ = play(node, gone(1, 0), gone(1, 1), n.Swept(1))
    assert node.report.activity is Activity.STOPPED
    _, commands = play(running(1), n.Directed(Directive(1, 2, Action.LEAVE, grace_s=30.0)))
    assert signals(commands) == [((0, 1), signal.SIGTERM)]


def test_grace_ends_in_sigkill_once() -> None:
    node, _ = play(running(), stop(1, 2, grace_s=5.0))
    node, commands = play(node, n.Ticked(), now=4.9)
    assert not commands
    node, commands = play(node, n.Ticked(), n.Ticked(), now=5.0)
    assert signals(commands) == [((0, 1), signal.SIGKILL)]


def test_a_repeated_stop_only_shortens_the_grace() -> None:
    node, _ = play(running(), stop(1, 2, grace_s=5.0))
    later, _ = play(node, stop(1, 3, grace_s=60.0), now=1.0)
    sooner, _ = play(node, stop(1, 3, grace_s=1.0), now=1.0)
    assert (later.stop_by_s, sooner.stop_by_s) == (5.0, 2.0)


def test_hung_ranks_are_killed_at_once() -> None:
    _, commands = play(running(), stop(1, 2, cut=True, kill_ranks=(1, 3)))
    assert signals(commands) == [((1,), signal.SIGKILL), ((0,), signal.SIGTERM)]


def test_aligned_stop_falls_back_to_sigterm() -> None:
    node, commands = play(running(), stop(1, 2, grace_s=4.0, stop_at_step=9))
    assert kinds(commands) == ["StopAtStep", "Report"]
    _, commands = play(node, n.Ticked(), now=2.0)
    assert signals(commands) == [((0, 1), signal.SIGTERM)]


def test_an_aligned_stop_does_not_wait_for_who_has_no_role() -> None:
    node = running()
    for local_rank, stage in ((0, Stage.MEMBER), (1, Stage.READY)):
        node, _ = play(node, n.SessionSpoke(1, local_rank, SessionReport(f"w{local_rank}", stage, 0, 0, 0, "", "")))
    _, commands = play(node, stop(1, 2, grace_s=4.0, stop_at_step=9))
    assert [c.local_ranks for c in commands if isinstance(c, n.StopAtStep)] == [(0,)]
    assert signals(commands) == [((1,), signal.SIGTERM)]


def test_a_worker_forked_after_the_signals_gets_its_own() -> None:
    node, _ = play(fresh(), run(1, 1), stop(1, 2, grace_s=5.0))
    _, commands = play(node, n.WorkerStarted(1, 0, 100))
    assert signals(commands) == [((0,), signal.SIGTERM)]
    node, _ = play(node, n.Ticked(), now=5.0)
    _, commands = play(node, n.WorkerStarted(1, 0, 100), now=5.1)
    assert signals(commands) == [((0,), signal.SIGKILL)]


def test_a_stop_of_an_epoch_it_never_ran_shows_no_old_exits() -> None:
    node, _ = play(running(1), gone(1, 0, ExitCause.ERROR), gone(1, 1), n.Swept(1), stop(2, 3))
    assert (node.report.epoch, node.report.activity, node.report.workers) == (2, Activity.STOPPED, ())
    _, commands = play(node, n.Directed(Directive(1, 2, Action.RUN, 2, plan(2))))
    assert not commands, "an order that came late"


def test_a_plan_for_an_earlier_agent_is_not_run() -> None:
    other = n.Node(NodeReport("n1", "n1.2", 1, 0.0, 2, "10.0.0.1", 7000))
    _, commands = play(other, run(1, 1))
    assert not commands


def test_only_a_directive_ends_the_silence() -> None:
    node, _ = play(running(alone=True, fence_s=10.0), n.LinkChanged(False), now=1.0)
    node, commands = play(node, n.LinkChanged(True), now=2.0)
    assert kinds(commands) == ["Report"] and node.silent_since_s == 1.0
    again, _ = play(node, run(1, 1, alone=True), now=2.1)
    assert again.silent_since_s == 0.0
    _, commands = play(node, n.Ticked(), now=11.0)
    assert signals(commands) == [((0, 1), signal.SIGKILL)]
    _, commands = play(again, n.Ticked(), now=11.0)
    assert not commands


def test_members_of_a_larger_epoch_outlive_a_longer_silence() -> None:
    node, _ = play(running(fence_s=10.0), n.LinkChanged(False), now=1.0)
    _, commands = play(node, n.Ticked(), now=100.9)
    assert not commands
    _, commands = play(node, n.Ticked(), now=101.0)
    assert signals(commands) == [((0, 1), signal.SIGKILL)]


def test_a_stop_that_began_in_sight_is_fenced_too() -> None:
    node, _ = play(running(alone=True, fence_s=10.0), stop(1, 2, grace_s=100.0), n.LinkChanged(False), now=1.0)
    _, commands = play(node, n.Ticked(), now=11.0)
    assert signals(commands) == [((0, 1), signal.SIGKILL)]


def test_a_leaving_node_out_of_sight_stops_itself_and_reports_before_it_quits() -> None:
    node, commands = play(running(), n.LeaveAsked())
    assert kinds(commands) == ["Report"], "the controller orders the stop"
    node, commands = play(node, n.LinkChanged(False), now=1.0)
    assert signals(commands) == [((0, 1), signal.SIGTERM)]
    _, commands = play(node, gone(1, 0), gone(1, 1), n.Swept(1), now=1.1)
    assert kinds(commands)[-2:] == ["Report", "Quit"]


class AnyNode(RuleBasedStateMachine):
    """Events in any order an agent could see them; the processes are modelled beside the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.node = fresh(fence_s=10.0)
        self.now = 1.0
        self.seq = 0
        self.alive: set[int] = set()
        self.sweeping = False
        self.quit = False

    def feed(self, event: n.NodeEvent) -> None:
        before = self.node
        self.node, commands = n.step(before, event, self.now)
        for command in commands:
            match command:
                case n.Launch(dealt):
                    assert not self.alive and not self.sweeping, "two epochs at once"
                    assert dealt.epoch > before.report.epoch
                    self.alive = {0, 1}
                case n.SignalWorkers(local_ranks, _):
                    assert set(local_ranks) <= self.alive
                case n.Sweep():
                    assert not self.alive
                    self.sweeping = True
                case n.Quit():
                    assert not self.alive
                    self.quit = True
        if isinstance(event, n.Directed):
            assert n.step(self.node, event, self.now) == (self.node, [])

    @rule(action=st.sampled_from(Action), epoch=st.integers(1, 4), late=st.booleans(), alone=st.booleans())
    def directed(self, action: Action, epoch: int, late: bool, alone: bool) -> None:
        self.seq += 1
        seq = max(1, self.seq - 3) if late else self.seq
        dealt = plan(epoch, alone=alone) if action is Action.RUN else None
        self.feed(n.Directed(Directive(1, seq, action, epoch, dealt, grace_s=3.0)))

    @precondition(lambda self: self.alive)
    @rule(cause=st.sampled_from((ExitCause.OK, ExitCause.ERROR, ExitCause.STOPPED)))
    def worker_gone(self, cause: ExitCause) -> None:
        local_rank = min(self.alive)
        self.alive.discard(local_rank)
        self.feed(gone(self.node.report.epoch, local_rank, cause))

    @precondition(lambda self: self.sweeping)
    @rule()
    def swept(self) -> None:
        self.sweeping = False
        self.feed(n.Swept(self.node.report.epoch))

    @rule(up=st.booleans())
    def link_changed(self, up: bool) -> None:
        self.feed(n.LinkChanged(up))

    @rule()
    def leave_asked(self) -> None:
        self.feed(n.LeaveAsked())

    @rule(passed_s=st.floats(0.1, 20.0))
    def ticked(self, passed_s: float) -> None:
        self.now += passed_s
        self.feed(n.Ticked())

    @invariant()
    def report_tells_the_truth(self) -> None:
        report = self.node.report
        assert {w.local_rank for w in report.workers if not w.gone} == self.alive
        at_rest = report.activity in (Activity.IDLE, Activity.STOPPED)
        assert not (at_rest and (self.alive or self.sweeping))

    @invariant()
    def a_stop_ends(self) -> None:
        stopping = self.node.report.activity is Activity.STOPPING
        assert not stopping or self.node.killed or self.node.stop_by_s <= self.now + 30.0


TestAnyNode = AnyNode.TestCase
TestAnyNode.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
