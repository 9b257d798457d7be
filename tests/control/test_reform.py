"""Step-level recovery in the life cycle: who is seated after which fault, and when eviction is the only way."""

from __future__ import annotations

from reform_harness import World, spec

from everstep.control import node as n
from everstep.control.job import Stage as JobStage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.formation import Stage
from everstep.core.types import Activity, Exit, ExitCause, NodeLoss

ALL = ["n1/0#0", "n1/1#0", "n2/0#0", "n2/1#0"]


def test_no_formation_before_every_worker_is_ready() -> None:
    world = World()
    world.tick(1.5)
    for worker in ALL[:3]:
        world.say(worker, Stage.READY)
    assert world.job.formation is None
    world.say(ALL[3], Stage.READY)
    assert world.seated() == ALL and not world.job.formation.abort
    assert all(world.heard[worker] == world.job.formation for worker in ALL)


def test_scripts_without_a_session_have_no_formation() -> None:
    world = World()
    world.tick(1.5)
    assert world.job.stage is JobStage.RUNNING and world.job.formation is None


def test_a_death_shrinks_at_once_and_the_place_gets_a_new_process() -> None:
    world = World().running()
    world.die("n1/1#0")
    assert world.seated() == ["n1/0#0", "n2/0#0", "n2/1#0"] and world.job.formation.abort
    assert world.job.stage is JobStage.RESEATING and world.job.epoch == 1
    assert "n1/1#1" in world.workers()
    world.follow()
    assert world.job.stage is JobStage.RUNNING and world.job.incident is None
    assert [type(r).__name__ for r in world.records if isinstance(r, e.IncidentOpened | e.StepResumed)] == [
        "IncidentOpened",
        "StepResumed",
    ]


def test_a_respawned_worker_is_seated_as_planned_when_it_is_ready() -> None:
    world = World().running()
    world.die("n1/1#0")
    world.say("n1/1#1", Stage.READY)
    assert len(world.seated()) == 3  # the survivors are not in their new formation yet
    world.follow()
    assert world.seated() == ["n1/0#0", "n2/0#0", "n2/1#0", "n1/1#1"] and not world.job.formation.abort


def test_nobody_is_seated_before_the_survivors_made_a_step() -> None:
    world = World().running()
    world.die("n1/1#0")
    world.say("n1/1#1", Stage.READY)
    formation = world.job.formation
    for worker in world.seated():
        world.say(worker, Stage.MEMBER, formation.epoch)  # in the new epoch, nothing committed yet
    assert world.job.formation == formation
    world.follow()
    assert "n1/1#1" in world.seated() and world.job.stage is JobStage.RUNNING


def test_a_standby_takes_the_dead_ones_role() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    world.say("n3/1#0", Stage.READY)
    assert world.seated() == ALL
    world.die("n1/1#0")
    assert world.seated() == ["n1/0#0", "n3/0#0", "n2/0#0", "n2/1#0"]


def test_a_standbys_death_moves_nobody() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    before = world.job.formation
    world.die("n3/0#0")
    assert world.job.formation == before and "n3/0#1" in world.workers()


def test_a_lost_node_leaves_the_others_running() -> None:
    world = World().running()
    world.lose("n2")
    assert world.seated() == ["n1/0#0", "n1/1#0"] and world.job.stage is JobStage.RESEATING
    assert world.nodes["n1"].report.activity is Activity.RUNNING
    world.follow()
    world.join("n2", life=2)
    world.settle()
    assert "n2/0#1" in world.workers()  # back in its place, in its next life
    world.say("n2/0#1", Stage.READY)
    world.say("n2/1#1", Stage.READY)
    world.follow()
    assert world.seated() == ["n1/0#0", "n1/1#0", "n2/0#1", "n2/1#1"]


def test_a_node_that_was_only_cut_off_stops_first_and_is_seated_in_its_next_life() -> None:
    world = World().running()
    cut_off = world.nodes["n2"]
    world.lose("n2", NodeLoss.SILENT)
    world.follow()
    world.nodes["n2"] = cut_off
    world.feed(e.NodeReported(cut_off.report))
    world.settle()
    world.tick(0.2)
    assert [w for w in world.workers() if w.startswith("n2")] == ["n2/0#1", "n2/1#1"]


def test_the_last_survivors_death_evicts_everybody() -> None:
    world = World().running()
    for worker in ALL[:3]:
        world.die(worker)
    assert world.seated() == ["n2/1#0"]
    world.die("n2/1#0")
    world.tick(1.5)
    assert world.job.epoch == 2 and world.job.formation is None and sorted(world.workers()) == ALL


def test_who_hangs_is_killed_and_the_others_go_on() -> None:
    world = World().running()
    world.hang(1, "n1")
    assert world.seated() == ["n1/0#0", "n2/0#0", "n2/1#0"]
    assert "n1/1#0" not in world.workers() and "n1/1#1" in world.workers()


def test_a_hang_of_nobody_in_particular_evicts() -> None:
    world = World().running()
    world.hang(-1, "")
    assert world.job.stage is not JobStage.RESEATING and world.job.epoch >= 1
    world.tick(1.5)
    assert world.job.epoch == 2


def test_deaths_while_the_survivors_move() -> None:
    world = World().running()
    world.die("n1/1#0")
    first = world.job.formation.epoch
    world.die("n2/0#0")
    assert world.job.formation.epoch == first + 1 and world.seated() == ["n1/0#0", "n2/1#0"]


def test_a_rack_that_burns_is_one_incident_and_no_crash_loop() -> None:
    world = World(nodes=3, spec=spec(max_nodes=3)).running()
    for worker in ("n1/0#0", "n1/1#0", "n2/0#0", "n2/1#0", "n3/0#0"):
        world.die(worker)
    assert len(world.said(e.IncidentOpened)) == 1 and world.job.restarts == 1
    assert world.seated() == ["n3/1#0"] and world.job.outcome is None


def test_a_place_that_dies_again_before_the_job_went_on_is_a_new_fault() -> None:
    world = World().running()
    world.die("n1/1#0")
    world.say("n1/1#1", Stage.READY)
    world.die("n2/0#0")
    assert "n1/1#1" in world.seated() and len(world.said(e.IncidentOpened)) == 1
    world.die("n1/1#1")
    assert len(world.said(e.IncidentOpened)) == 2 and world.job.restarts == 2


def test_the_status_that_comes_late_is_still_told() -> None:
    world = World().running()
    early = Exit(ExitCause.SIGNAL, world.now, message="died; the status is not known yet")
    world.inbox.append(("n1", n.WorkerFailed(1, 1, early)))
    world.settle()
    world.die("n1/1#0", ExitCause.OOM, "out of memory")
    assert world.seated() == ["n1/0#0", "n2/0#0", "n2/1#0"]
    ends = [r.exit.cause for r in world.said(e.WorkerEnded)]
    assert ends[0] is ExitCause.SIGNAL


def test_a_leaving_node_gives_its_seats_up() -> None:
    world = World().running()
    world.leave("n2")
    assert world.seated() == ["n1/0#0", "n1/1#0"] and not world.job.formation.abort
    assert world.nodes["n2"].report.activity is Activity.RUNNING
    for worker in ("n2/0#0", "n2/1#0"):
        world.say(worker, Stage.LEFT, 1)
        world.die(worker, ExitCause.OK, "")
    world.follow()
    assert world.job.stage is JobStage.RUNNING and not world.said(e.NodeLost)


def test_a_leaver_that_dies_on_its_way_out_ends_the_epoch_for_all() -> None:
    world = World().running()
    world.leave("n2")
    world.die("n2/1#0")
    assert world.job.formation.abort and world.seated() == ["n1/0#0", "n1/1#0", "n2/0#0"]  # may hold the state
    world.follow()
    assert world.seated() == ["n1/0#0", "n1/1#0"] and not world.job.formation.abort


def test_the_job_is_complete_when_every_member_finished_though_standbys_wait() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    for worker in ALL:
        world.die(worker, ExitCause.OK, "")
    world.settle()
    world.tick(0.2)
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK


def test_the_restart_budget_counts_step_level_recoveries() -> None:
    world = World(spec=spec(max_restarts=1)).running()
    world.die("n1/1#0")
    world.follow()
    world.die("n2/0#0")
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.FAILED


def test_the_floor_is_what_the_dead_had_committed() -> None:
    world = World().running()
    world.committed = 41
    world.die("n1/1#0")
    assert world.job.formation.floor == 41


def test_a_newcomer_that_has_fetched_nothing_is_no_survivor() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    world.say("n3/1#0", Stage.READY)
    world.lose("n1", NodeLoss.SILENT)
    assert world.seated() == ["n3/0#0", "n3/1#0", "n2/0#0", "n2/1#0"]
    world.lose("n2", NodeLoss.SILENT)
    assert world.job.stage is JobStage.EVICTING  # not: n3 begins anew from its own initial state


def test_a_newcomer_that_says_it_has_the_state_is_one() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    world.die("n1/0#0")
    world.follow()
    for worker in ALL[1:]:
        world.die(worker)
    assert world.job.stage is JobStage.RESEATING and "n3/0#0" in world.seated()


def test_nodes_out_of_sight_that_can_go_on_alone_are_waited_for() -> None:
    """Both members are cut off, a standby's node has stopped: that shows nothing about the two."""
    world = World(nodes=3).running()
    world.lose("n1", NodeLoss.SILENT)
    world.lose("n2", NodeLoss.SILENT)
    assert world.job.stage is JobStage.EVICTING
    world.tick(30.0)
    assert world.job.stage is JobStage.EVICTING
    world.tick(700.0)
    assert world.job.stage is JobStage.REFORMING


def test_a_formation_that_was_overtaken_may_still_be_acted_in_by_who_has_not_heard() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    world.say("n3/1#0", Stage.READY)
    world.lose("n1", NodeLoss.SILENT)  # n3 takes its roles; n2, cut off as well, does not hear of that
    world.lose("n2", NodeLoss.SILENT)
    world.tick(30.0)
    assert world.job.stage is JobStage.EVICTING and world.nodes["n3"].report.activity is Activity.STOPPED


def test_who_was_through_before_it_heard_of_the_formation_is_not_waited_for() -> None:
    world = World().running()
    world.die("n1/1#0")
    world.say("n1/0#0", Stage.MEMBER, world.job.formation.epoch, resumed=True)
    world.die("n2/0#0", ExitCause.OK, "")
    assert world.seated() == ["n1/0#0", "n2/1#0"] and world.job.formation.abort
    assert world.job.restarts == 1 and len(world.said(e.IncidentOpened)) == 1
    for worker in ("n1/0#0", "n2/1#0"):
        world.die(worker, ExitCause.OK, "")
    world.settle()
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK


def test_a_job_whose_members_finish_while_a_newcomer_is_planned_is_complete() -> None:
    world = World().running()
    world.die("n1/1#0")
    world.follow()
    world.say("n1/1#1", Stage.READY)
    assert "n1/1#1" in world.seated()
    for worker in ("n1/0#0", "n2/0#0", "n2/1#0"):
        world.die(worker, ExitCause.OK, "")
    world.settle()
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK


def test_no_change_is_planned_once_members_finish() -> None:
    world = World(nodes=3, spec=spec(max_nodes=3)).running()
    world.die("n3/0#0")
    world.follow()
    world.die("n1/0#0", ExitCause.OK, "")
    before = world.job.formation
    world.say("n3/0#1", Stage.READY)
    assert world.job.formation == before


def test_a_leaving_node_with_standbys_only_is_let_go() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    world.leave("n3")
    assert world.nodes["n3"].report.activity is Activity.STOPPED
    assert world.job.stage is JobStage.RUNNING and not world.said(e.IncidentOpened)


def test_a_standby_of_a_leaving_node_gets_no_role() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    world.leave("n3", quietly=True)
    world.die("n1/1#0")
    assert world.seated() == ["n1/0#0", "n2/0#0", "n2/1#0"]


def test_nobody_is_started_again_on_a_leaving_node() -> None:
    world = World().running()
    world.leave("n2")
    world.die("n2/1#0")
    assert "n2/1#1" not in world.workers()


def test_a_standbys_incident_is_over_at_once() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    world.die("n3/0#0")
    assert world.job.incident is None and world.job.stage is JobStage.RUNNING
    assert isinstance(world.records[-1], e.StepResumed)


def test_a_standby_that_hangs_leaves_nobody_under_suspicion() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY)
    world.feed(e.HangSuspected(1, "no step"))
    world.hang(4, "n3")
    assert world.job.stage is JobStage.RUNNING and world.job.incident is None


def test_a_hang_of_all_survivors_is_counted_once() -> None:
    world = World(spec=spec(min_nodes=1, max_nodes=1)).running()
    world.hang(0, "n1")
    world.follow()
    world.hang(1, "n1")
    world.tick(1.5)
    assert len(world.said(e.IncidentOpened)) == 2 and world.job.restarts == 2


def test_a_lost_node_and_stopped_workers_cost_no_restart() -> None:
    world = World().running()
    for local_rank in (0, 1):
        world.inbox.append(("n2", n.WorkerGone(1, local_rank, Exit(ExitCause.GRACE, world.now))))
    world.settle()
    assert world.job.restarts == 0 and world.seated() == ["n1/0#0", "n1/1#0"]


def test_who_ends_before_the_others_is_left_behind_and_replaced() -> None:
    """Exit status 0 at step 1 of 100 is a failure once the others go on; they do not wait for it."""
    world = World()
    world.goal = 100
    world.running()
    world.die(ALL[2], ExitCause.OK, "")
    assert world.seated() == [ALL[0], ALL[1], ALL[3]] and world.job.formation.abort
    assert not world.said(e.IncidentOpened) and "n2/0#1" not in world.workers()
    world.follow()
    (opened,) = world.said(e.IncidentOpened)
    assert opened.kind == "left-early" and [blame.rank for blame in opened.culprits] == [2]
    assert opened.why == "rank 2 on n2 ended (exit 0) at step 1 while the others went on"
    assert "n2/0#1" in world.workers() and world.job.restarts == 1
    assert world.job.stage is JobStage.RUNNING and world.job.incident is None


def test_who_ends_before_the_others_may_end_the_job() -> None:
    world = World(spec=spec(max_restarts=0))
    world.goal = 100
    world.running()
    world.die(ALL[2], ExitCause.OK, "")
    world.follow()
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.FAILED
    assert "at step 1 while the others went on" in world.job.outcome.why


def test_all_leave_their_loops_at_the_same_step() -> None:
    """However slowly one after the other ends: nobody made a step without the others."""
    world = World()
    world.goal = 100
    world.running()
    for worker in ALL:
        world.tick(1.0)
        world.die(worker, ExitCause.OK, "")
    world.tick(6.0)
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK
    assert not world.said(e.IncidentOpened)
