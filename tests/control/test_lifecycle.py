"""The machine of a job: what a fault leads to, what a restarted controller knows, and sound states after any events."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep.control import lifecycle
from everstep.control.job import ENDED, Direct, Job, Note, Stage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import (
    Action,
    Activity,
    Blame,
    Exit,
    ExitCause,
    JobSpec,
    NodeLoss,
    NodeReport,
    Verdict,
    WorkerReport,
)

SPEC = JobSpec(
    "job", min_nodes=1, max_nodes=2, max_restarts=2, grace_s=5.0, join_timeout_s=30.0, last_call_s=1.0,
    reconnect_s=0.5, lease_s=2.0, recover_s=3.0, stop_margin_s=1.0, fence_s=10.0,
)  # fmt: skip


class Driver:
    """A job, its journal, and the newest report of each node; nodes obey at once when `obey` is called."""

    def __init__(self, spec: JobSpec = SPEC) -> None:
        self.job = Job(spec)
        self.now = 1.0
        self.journal: list[tuple[float, e.Input]] = []
        self.reports: dict[str, NodeReport] = {}
        self.sent: list[Direct] = []
        self.records: list[e.Record] = []
        self.feed(e.JobSubmitted(spec))
        self.feed(e.ControllerStarted(1))

    def feed(self, event: e.Input, after_s: float = 0.0) -> None:
        self.now += after_s
        self.journal.append((self.now, event))
        self.job, commands = lifecycle.step(self.job, event, self.now)
        self.sent = [c for c in commands if isinstance(c, Direct)]
        self.records += [c.record for c in commands if isinstance(c, Note)]

    def tick(self, after_s: float) -> None:
        self.feed(e.Ticked(), after_s)

    def report(self, node: str, after_s: float = 0.0, **changes: object) -> None:
        known = self.reports.get(node)
        if known is None:
            known = NodeReport(node, f"{node}.1", 0, 0.0, 1, f"10.0.0.{node[1:]}", 7000)
        self.reports[node] = msgspec.structs.replace(known, seq=known.seq + 1, **changes)
        self.feed(e.NodeReported(self.reports[node]), after_s)

    def new_agent(self, node: str, life: int) -> None:
        self.reports.pop(node, None)
        self.report(node, incarnation=f"{node}.{life}")

    def runs(self, node: str) -> None:
        self.report(node, epoch=self.job.epoch, activity=Activity.RUNNING, workers=(WorkerReport(0, 100),))

    def stops(self, node: str, cause: ExitCause = ExitCause.STOPPED, message: str = "") -> None:
        worker = WorkerReport(0, 100, True, Exit(cause, 0.0, message=message))
        self.report(node, epoch=self.job.epoch, activity=Activity.STOPPED, workers=(worker,))

    def fails(self, node: str, message: str = "ValueError: 1") -> None:
        worker = WorkerReport(0, 100, False, Exit(ExitCause.ERROR, 0.0, message=message))
        self.report(node, epoch=self.job.epoch, activity=Activity.RUNNING, workers=(worker,))

    def start(self, *nodes: str) -> None:
        for node in nodes:
            self.report(node)
        self.tick(1.0)
        for member in self.job.plan.members if self.job.plan else ():
            self.runs(member.node)
        assert self.job.stage is Stage.RUNNING

    def orders(self) -> dict[str, Action]:
        return {d.node: d.directive.action for d in self.sent}

    def restart(self) -> None:
        """A new controller knows the journal, and nothing else."""
        job = Job(self.job.spec)
        for now, event in self.journal:
            job, _ = lifecycle.step(job, event, now)
        assert job == self.job
        self.feed(e.ControllerStarted(job.term + 1), after_s=0.5)

    def places(self) -> list[tuple[str, int]]:
        assert self.job.plan is not None
        return [(m.node, m.group_rank) for m in self.job.plan.members]


def test_never_starts_below_the_minimum() -> None:
    job = Driver(msgspec.structs.replace(SPEC, min_nodes=2))
    job.report("n1")
    job.tick(29.0)
    assert job.job.stage is Stage.CHECKING and job.job.epoch == 0
    job.tick(2.0)
    assert job.job.outcome is not None and job.job.outcome.exit_code == ExitCode.TOO_FEW_NODES


def test_crash_evicts_all_and_reforms_when_all_have_stopped() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.fails("n1")
    assert job.job.stage is Stage.EVICTING and job.orders() == {"n1": Action.STOP, "n2": Action.STOP}
    assert all(d.directive.cut for d in job.sent)
    job.stops("n1", ExitCause.ERROR, "ValueError: 1")
    assert job.job.epoch == 1 and not job.orders()
    job.stops("n2")
    assert job.job.epoch == 2 and job.orders() == {"n1": Action.RUN, "n2": Action.RUN}
    assert job.job.restarts == 1 and job.places() == [("n1", 0), ("n2", 1)]


def test_lost_node_costs_no_restart_and_a_spare_takes_its_place() -> None:
    job = Driver()
    job.start("n1", "n2", "n3")
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.CLOSED))
    assert job.job.stage is Stage.RUNNING, "it may only have lost its connection"
    job.tick(0.6)
    assert job.job.stage is Stage.EVICTING and job.orders() == {"n2": Action.STOP}
    job.stops("n2")
    assert job.places() == [("n3", 0), ("n2", 1)] and job.job.restarts == 0


def test_a_connection_that_comes_back_in_time_changes_nothing() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.CLOSED))
    job.report("n1", after_s=0.3)
    job.tick(1.0)
    assert job.job.stage is Stage.RUNNING and not job.sent


def test_lone_node_out_of_sight_is_replaced_only_after_it_fenced_itself() -> None:
    spec = msgspec.structs.replace(SPEC, max_nodes=1)
    for how in (NodeLoss.SILENT, NodeLoss.CLOSED):
        job = Driver(spec)
        job.start("n1", "n2")
        job.feed(e.NodeGone("n1", "n1.1", how))
        job.tick(0.6)
        assert job.job.stage is Stage.EVICTING
        job.tick(spec.fence_s + spec.lease_s)
        assert job.job.epoch == 1
        job.tick(spec.stop_margin_s + 0.1)
        assert job.job.epoch == 2 and job.places() == [("n2", 0)]


def test_lone_node_known_to_be_dead_is_replaced_soon() -> None:
    job = Driver(msgspec.structs.replace(SPEC, max_nodes=1))
    job.start("n1", "n2")
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.CLOSED))
    job.tick(0.6)
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.DIED))  # its launcher is later than its connection
    assert job.job.epoch == 1
    job.tick(2.1)
    assert job.job.epoch == 2


def test_all_members_cut_off_together_may_still_train() -> None:
    job = Driver()
    job.start("n1", "n2", "n3", "n4")
    for node in ("n1", "n2"):
        job.feed(e.NodeGone(node, f"{node}.1", NodeLoss.SILENT))
    job.tick(20.0)
    assert job.job.stage is Stage.EVICTING, "nothing shows that a worker of theirs is gone"
    job.report("n2")
    assert job.orders() == {"n2": Action.STOP}
    job.stops("n2")
    assert job.job.epoch == 2, "without n2 the epoch makes no step: n1 need not be waited for"


def test_who_comes_back_with_old_workers_is_waited_for() -> None:
    job = Driver(msgspec.structs.replace(SPEC, min_nodes=2))
    job.start("n1", "n2")
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.SILENT))
    job.stops("n2")
    assert job.job.stage is Stage.REFORMING
    job.report("n3")
    job.report("n1")  # still running epoch 1
    assert job.job.epoch == 2, "n2 and n3 were enough before it came"
    job = Driver(msgspec.structs.replace(SPEC, min_nodes=2))
    job.start("n1", "n2")
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.SILENT))
    job.stops("n2")
    job.report("n1")
    job.report("n3")
    assert job.job.epoch == 1, "n1 saves, perhaps, what the next epoch loads"
    job.stops("n1")
    assert job.job.epoch == 2


def test_late_words_of_a_former_agent_are_ignored() -> None:
    job = Driver(msgspec.structs.replace(SPEC, max_nodes=1))
    job.start("n1")
    old = job.reports["n1"]
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.DIED))
    job.new_agent("n1", 2)
    assert job.job.epoch == 2, "its start ended what the old one left"
    before = job.job
    for late in (e.NodeReported(msgspec.structs.replace(old, seq=99)), e.NodeGone("n1", "n1.1", NodeLoss.CLOSED)):
        job.feed(late)
        assert job.job == before and not job.sent


def test_a_node_that_fenced_itself_did_not_finish() -> None:
    for cause in (ExitCause.STOPPED, ExitCause.GRACE):
        job = Driver(msgspec.structs.replace(SPEC, max_nodes=1))
        job.start("n1")
        job.stops("n1", cause)
        assert job.job.epoch == 2 and job.job.restarts == 0 and job.job.stage is Stage.FORMING


def test_finishes_when_all_have_exited_0() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.stops("n1", ExitCause.OK)
    assert job.job.stage is Stage.RUNNING
    job.stops("n2", ExitCause.OK)
    assert job.job.stage is Stage.FINISHED and job.orders() == {"n1": Action.LEAVE, "n2": Action.LEAVE}
    late = Driver(msgspec.structs.replace(SPEC, expect_steps=100))
    late.start("n1", "n2")
    late.stops("n1", ExitCause.OK)
    late.stops("n2", ExitCause.OK)
    assert late.job.outcome is not None and late.job.outcome.exit_code == ExitCode.INCOMPLETE


def test_budget_and_crash_loop() -> None:
    for messages, code in ((("a", "b", "c"), ExitCode.FAILED), (("same",) * 3, ExitCode.CRASH_LOOP)):
        job = Driver(msgspec.structs.replace(SPEC, max_nodes=1))
        job.start("n1")
        for message in messages:
            job.runs("n1")
            job.stops("n1", ExitCause.ERROR, message)
        assert job.job.outcome is not None and job.job.outcome.exit_code == code


def test_hung_rank_is_killed_the_others_are_asked() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.feed(e.HangSuspected(1, "no step"))
    assert job.job.stage is Stage.SUSPECT
    job.feed(e.HangJudged(1, Verdict("hang", (Blame(1, "n2", "hang"),), "no step")))
    assert job.job.stage is Stage.EVICTING
    assert all(d.directive.kill_ranks == (1,) for d in job.sent)
    before = job.job
    job.feed(e.HangJudged(0, Verdict("hang", (), "of another epoch")))
    assert job.job == before


def test_stop_that_nobody_obeys_ends_all_the_same() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.feed(e.StopAsked("asked", 15, 5.0))
    job.fails("n1")
    for _ in range(61):
        job.tick(0.1)
    assert job.job.stage is Stage.FAILED and job.job.outcome is not None and job.job.outcome.exit_code == 143


def test_second_stop_can_only_be_quicker() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.feed(e.StopAsked("asked", 15, 5.0))
    job.feed(e.StopAsked("again", 15, 60.0))
    assert [d.directive.grace_s for d in job.sent] == [5.0, 5.0]
    job.feed(e.StopAsked("now", 15, 0.5))
    assert [d.directive.grace_s for d in job.sent] == [0.5, 0.5]


def test_controller_restarted_idle_keeps_the_membership() -> None:
    """F2: nothing is relaunched, nobody is moved."""
    job = Driver()
    job.start("n1", "n2", "n3")
    plan = job.job.plan
    job.restart()
    for node in ("n2", "n3", "n1"):
        job.report(node)
        assert not job.sent
    job.tick(5.0)
    assert job.job.stage is Stage.RUNNING and job.job.plan == plan and job.job.term == 2


def test_controller_restarted_in_a_change_of_epoch_orders_nothing_twice() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.fails("n1")
    seqs = {name: d.seq for name, d in job.job.directives.items()}
    job.restart()
    assert not job.sent and {name: d.seq for name, d in job.job.directives.items()} == seqs
    job.stops("n2")
    assert job.job.epoch == 1
    job.stops("n1", ExitCause.ERROR, "ValueError: 1")
    assert job.job.epoch == 2 and job.job.restarts == 1 and job.places() == [("n1", 0), ("n2", 1)]
    plan = job.job.plan
    job.restart()  # RUN may be under way: it is sent again as it was, not dealt again
    for node in ("n1", "n2"):
        job.runs(node)
        assert not job.sent
    assert job.job.stage is Stage.RUNNING and job.job.plan == plan


def test_controller_restarted_while_workers_save_on_a_stop() -> None:
    """They stop with a grace, each with a checkpoint to write: the new controller waits for them, and asks once."""
    job = Driver()
    job.start("n1", "n2")
    job.feed(e.StopAsked("asked", 15, 5.0))
    assert job.orders() == {"n1": Action.STOP, "n2": Action.STOP}
    job.restart()
    for node in ("n1", "n2"):
        job.report(node, after_s=0.5, activity=Activity.STOPPING)
        assert not job.sent and job.job.stage is Stage.STOPPING
    job.stops("n1")
    job.stops("n2")
    assert job.job.outcome is not None and job.job.outcome.exit_code == 143
    assert sum(isinstance(record, e.IncidentOpened) for record in job.records) == 1


def test_nodes_that_do_not_come_back_to_a_new_controller_are_lost() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.restart()
    job.report("n2")
    job.tick(2.9)
    assert job.job.stage is Stage.RUNNING
    job.tick(0.2)
    assert job.job.stage is Stage.EVICTING and job.orders() == {"n2": Action.STOP}


class AnyJob(RuleBasedStateMachine):
    """Reports, losses, verdicts and stops of three nodes in any order, obeying or not."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.lives = {"n1": 1, "n2": 1, "n3": 1}
        self.epochs: dict[int, object] = {}
        self.ended: Stage | None = None

    nodes = st.sampled_from(("n1", "n2", "n3"))

    @rule(node=nodes)
    def says_nothing_new(self, node: str) -> None:
        self.driver.report(node)

    @rule(node=nodes)
    def obeys(self, node: str) -> None:
        directive = self.driver.job.directives.get(node)
        report = self.driver.reports.get(node)
        if directive is None or report is None:
            return
        if directive.action is Action.RUN and directive.epoch > report.epoch:
            self.driver.report(node, epoch=directive.epoch, activity=Activity.RUNNING, workers=(WorkerReport(0, 100),))
        elif directive.action is not Action.RUN and report.activity is Activity.RUNNING:
            worker = WorkerReport(0, 100, True, Exit(ExitCause.STOPPED, 0.0))
            self.driver.report(node, activity=Activity.STOPPED, workers=(worker,))
        elif directive.action is Action.STOP and directive.epoch > report.epoch:
            self.driver.report(node, epoch=directive.epoch, activity=Activity.STOPPED, workers=())

    @rule(node=nodes, cause=st.sampled_from((ExitCause.OK, ExitCause.ERROR, ExitCause.SIGNAL)))
    def worker_ends(self, node: str, cause: ExitCause) -> None:
        report = self.driver.reports.get(node)
        if report is not None and report.activity is Activity.RUNNING:
            worker = WorkerReport(0, 100, True, Exit(cause, 0.0, message=str(self.driver.now)))
            self.driver.report(node, activity=Activity.STOPPED, workers=(worker,))

    @rule(node=nodes, how=st.sampled_from((NodeLoss.CLOSED, NodeLoss.SILENT, NodeLoss.DIED)))
    def is_gone(self, node: str, how: NodeLoss) -> None:
        self.driver.feed(e.NodeGone(node, f"{node}.{self.lives[node]}", how))

    @rule(node=nodes)
    def new_agent(self, node: str) -> None:
        self.lives[node] += 1
        self.driver.new_agent(node, self.lives[node])

    @rule(passed_s=st.sampled_from((0.1, 0.6, 3.0, 15.0)))
    def time_passes(self, passed_s: float) -> None:
        self.driver.tick(passed_s)

    @rule()
    def controller_restarts(self) -> None:
        self.driver.restart()

    @precondition(lambda self: self.driver.job.stage in (Stage.RUNNING, Stage.SUSPECT))
    @rule()
    def hang(self) -> None:
        self.driver.feed(e.HangJudged(self.driver.job.epoch, Verdict("hang", (Blame(0, "n1", "hang"),), "hang")))

    @rule(grace_s=st.sampled_from((0.5, 5.0)), really=st.integers(0, 9))
    def stop(self, grace_s: float, really: int) -> None:
        if really == 0:
            self.driver.feed(e.StopAsked("asked", 15, grace_s))

    @invariant()
    def state_is_sound(self) -> None:
        job = self.driver.job
        assert job.restarts <= job.spec.max_restarts
        if job.plan is not None:
            assert job.plan.epoch == job.epoch
            assert self.epochs.setdefault(job.epoch, job.plan) == job.plan
            assert job.spec.min_nodes <= len(job.plan.members) <= job.spec.max_nodes
        assert max(self.epochs, default=0) == job.epoch
        if self.ended is not None:
            assert job.stage is self.ended
        elif job.stage in ENDED:
            assert job.outcome is not None and job.outcome.why
            self.ended = job.stage
        assert all(d.epoch <= job.epoch for d in job.directives.values())

    @invariant()
    def settled_state_stays(self) -> None:
        job, _ = lifecycle.step(self.driver.job, e.Ticked(), self.driver.now)
        again, more = lifecycle.step(job, e.Ticked(), self.driver.now)
        assert again == job and not more


TestAnyJob = AnyJob.TestCase
TestAnyJob.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_new_agent_of_a_node_that_was_through_keeps_nobody() -> None:
    """It has ended what its predecessor ran, and nothing of this epoch is left on its node."""
    job = Driver()
    job.start("n1", "n2")
    job.stops("n1", ExitCause.OK)
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.DIED))
    job.new_agent("n1", 2)
    job.stops("n2", ExitCause.OK)
    assert job.job.stage is Stage.FINISHED
