"""Restartable functions that raise while their processes live: in-process recovery first, a new process after that."""

from __future__ import annotations

from reform_harness import World, spec

from everstep.control.job import Stage as JobStage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.formation import Stage
from everstep.core.types import ExitCause, NodeLoss

ALL = ["n1/0#0", "n1/1#0", "n2/0#0", "n2/1#0"]
BAD = "ValueError: bad sample"
BROKEN = "RuntimeError: Connection closed by peer"


def restartable(nodes: int = 2, **changes: object) -> World:
    return World(nodes, spec(**changes), fixed=True).running()


def test_an_exception_leads_to_a_formation_with_the_same_seats() -> None:
    world = restartable()
    first = world.job.formation.epoch
    world.fail("n1/1#0", BAD, committed=7)
    assert world.seated() == ALL and world.job.formation.epoch == first + 1 and world.job.formation.abort
    assert world.job.stage is JobStage.RESEATING and sorted(world.workers()) == ALL
    (incident,) = world.said(e.IncidentOpened)
    assert incident.kind == "exception" and [(c.rank, c.node, c.detail) for c in incident.culprits] == [(1, "n1", BAD)]
    assert incident.why == "rank 1 on n1 raised ValueError: bad sample at step 7" and world.job.restarts == 1
    world.follow()
    assert world.job.stage is JobStage.RUNNING and world.job.incident is None


def test_sessions_of_any_number_of_members_may_raise() -> None:
    world = World().running()
    world.fail("n1/1#0", BAD)
    assert world.seated() == ALL and world.job.formation.abort


def test_failures_of_one_formation_are_one_incident() -> None:
    world = restartable()
    epoch = world.job.formation.epoch
    world.fail("n1/1#0", BAD)
    world.say("n2/0#0", Stage.READY, epoch, failure="KeyError: 1")
    world.say("n2/1#0", Stage.READY, epoch, failure="KeyError: 2")
    assert world.job.formation.epoch == epoch + 1
    assert world.job.restarts == 1 and len(world.said(e.IncidentOpened)) == 1


def test_who_raises_again_before_anybody_went_on_gets_a_new_process() -> None:
    world = restartable()
    world.fail("n1/1#0", BAD)
    second = world.job.formation
    world.fail("n1/1#0", "KeyError: 1")
    assert "n1/1#1" in world.workers() and "n1/1#0" not in world.workers()
    assert world.job.formation == second and world.job.restarts == 2
    world.say("n1/1#1", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#1", "n2/0#0", "n2/1#0"]
    world.follow()
    assert world.job.stage is JobStage.RUNNING and world.job.restarts == 2


def test_a_standbys_fault_in_between_is_no_excuse() -> None:
    world = restartable(nodes=3)
    world.say("n3/0#0", Stage.READY)
    world.fail("n1/1#0", BAD)
    world.hang(4, "n3")
    world.fail("n1/1#0", "KeyError: 1")
    assert "n1/1#1" in world.workers()


def test_who_raises_again_after_somebody_went_on_keeps_its_process() -> None:
    world = restartable()
    world.fail("n1/1#0", BAD)
    world.say("n2/0#0", Stage.MEMBER, world.job.formation.epoch, resumed=True)
    world.fail("n1/1#0", "KeyError: 1")
    assert world.seated() == ALL and sorted(world.workers()) == ALL and world.job.restarts == 2


def test_what_was_raised_before_the_job_went_on_is_forgotten() -> None:
    world = restartable()
    world.fail("n1/1#0", BAD)
    world.follow()
    world.die("n2/0#0")
    world.say("n2/0#1", Stage.READY)
    world.fail("n1/1#0", "KeyError: 1")
    assert "n1/1#0" in world.workers() and world.job.restarts == 2


def test_another_one_that_raises_then_is_the_same_incident() -> None:
    world = restartable()
    world.fail("n1/1#0", BAD)
    world.fail("n2/0#0", BAD)
    assert sorted(world.workers()) == ALL and world.job.restarts == 1
    world.fail("n2/0#0", BAD)
    assert "n2/0#1" in world.workers() and world.job.restarts == 2


def test_what_is_raised_because_a_member_died_is_not_counted() -> None:
    world = restartable()
    world.die("n1/1#0")
    world.fail("n2/0#0", "ValueError: a shape of nothing")
    assert world.job.restarts == 1 and len(world.said(e.IncidentOpened)) == 1
    assert world.job.incident is not None and len(world.job.incident.culprits) == 1
    world.say("n1/1#1", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#1", "n2/0#0", "n2/1#0"]


def test_a_broken_connection_is_looked_into_before_it_is_counted() -> None:
    world = restartable()
    world.fail("n2/0#0", BROKEN)
    world.tick(0.3)
    world.die("n1/1#0")
    assert [opened.kind for opened in world.said(e.IncidentOpened)] == ["crash"]
    world = restartable()
    first = world.job.formation
    world.fail("n2/0#0", BROKEN)
    world.tick(0.4)
    assert world.job.formation == first and not world.said(e.IncidentOpened)
    world.tick(0.2)
    assert [opened.kind for opened in world.said(e.IncidentOpened)] == ["exception"] and world.seated() == ALL


def test_who_raised_because_another_one_did_is_not_to_blame() -> None:
    world = restartable()
    world.fail("n1/0#0", BROKEN)
    world.fail("n2/0#0", BAD)
    (incident,) = world.said(e.IncidentOpened)
    assert [c.rank for c in incident.culprits] == [2] and world.seated() == ALL


def test_nothing_is_concluded_while_a_node_may_be_lost() -> None:
    world = restartable()
    report = world.nodes["n2"].report
    world.feed(e.NodeGone("n2", report.incarnation, NodeLoss.CLOSED))
    world.fail("n1/1#0", "ValueError: what is it?")
    assert not world.said(e.IncidentOpened)
    world.tick(0.6)
    assert [opened.kind for opened in world.said(e.IncidentOpened)] == ["node-lost"] and world.job.restarts == 0


def test_a_failure_that_was_held_back_counts_when_the_node_is_back() -> None:
    world = restartable()
    report = world.nodes["n2"].report
    world.feed(e.NodeGone("n2", report.incarnation, NodeLoss.CLOSED))
    world.fail("n1/1#0", BAD)
    world.fail("n2/1#0", BAD)
    assert [opened.kind for opened in world.said(e.IncidentOpened)] == ["exception"]
    assert world.job.incident is not None and len(world.job.incident.culprits) == 2


def test_the_same_failure_at_the_same_step_ends_the_job() -> None:
    world = restartable()
    for _ in range(3):
        assert world.job.outcome is None
        world.fail("n1/1#0", BAD, committed=7)
        if world.job.outcome is None:
            world.follow()
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.CRASH_LOOP


def test_it_is_the_same_failure_whether_the_process_survives_it_or_not() -> None:
    world = restartable()
    for worker in ("n1/1#0", "n2/1#0"):
        world.fail(worker, BAD, committed=7)
        world.follow()
    world.committed = 7
    world.die("n2/0#0", ExitCause.ERROR, BAD)
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.CRASH_LOOP


def test_the_restart_budget_counts_exceptions() -> None:
    world = restartable(max_restarts=1)
    world.fail("n1/1#0", BAD)
    world.follow()
    world.fail("n2/1#0", "KeyError: 1")
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.FAILED


def test_who_raises_while_a_change_is_planned_ends_the_formation_before_it() -> None:
    world = restartable(nodes=3)
    world.say("n3/0#0", Stage.READY)
    former = world.job.formation
    world.leave("n2")
    assert "n3/0#0" in world.seated() and not world.job.formation.abort
    world.say("n1/0#0", Stage.READY, former.epoch, failure=BAD)
    assert world.job.formation.abort and world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n2/1#0"]
    assert "n2/0#0" not in world.workers()


def test_who_had_returned_is_needed_again() -> None:
    world = restartable()
    world.die("n1/0#0", ExitCause.OK, "")
    world.fail("n1/1#0", BAD)
    assert "n1/0#1" in world.workers() and world.job.stage is JobStage.RESEATING
    world.say("n1/0#1", Stage.READY)
    assert world.seated() == ["n1/0#1", "n1/1#0", "n2/0#0", "n2/1#0"] and world.job.restarts == 1


def test_one_that_died_in_the_recovery_from_an_exception_belongs_to_it() -> None:
    world = restartable()
    world.fail("n1/1#0", BAD)
    world.die("n2/0#0")
    assert len(world.said(e.IncidentOpened)) == 1 and world.job.restarts == 1
    world.say("n2/0#1", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#0", "n2/0#1", "n2/1#0"]


def test_the_job_is_done_only_when_everybody_has_returned_though_no_progress_was_told() -> None:
    world = restartable()
    world.die("n1/1#0")
    world.say("n1/1#1", Stage.READY)
    epoch = world.job.formation.epoch
    for worker in world.seated():
        world.say(worker, Stage.MEMBER, epoch, committed=-1)
    for worker in ("n1/0#0", "n2/0#0", "n2/1#0"):
        world.die(worker, ExitCause.OK, "")
    assert world.job.outcome is None and "n1/1#1" in world.workers()
    world.die("n1/1#1", ExitCause.OK, "")
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK
