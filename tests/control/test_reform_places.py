"""Step-level recovery in the life cycle: nodes that come, come back, leave, and whose place is whose."""

from __future__ import annotations

import msgspec
import pytest
from reform_harness import World, spec

from everstep.control import node as n
from everstep.control import seats
from everstep.control.job import Stage as JobStage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.formation import Stage
from everstep.core.types import Action, Activity, Exit, ExitCause, NodeLoss

ALL = ["n1/0#0", "n1/1#0", "n2/0#0", "n2/1#0"]


def test_a_node_keeps_its_own_place_though_another_one_is_vacant() -> None:
    plan = World(nodes=2).running().job.plan
    assert plan is not None
    amended = seats.amend(plan, "n2", "n2.2", "10.0.0.2", 2, set())
    assert [m.node for m in amended.members] == ["n1", "n2"] and amended.members[1].incarnation == "n2.2"


def test_no_two_workers_of_an_epoch_have_the_same_name() -> None:
    """n1 is lost, n3 gets its place, n1 comes back and gets a new one: its workers' lives begin after all others'."""
    world = World().running()
    world.lose("n1")
    world.follow()
    world.join("n3")
    world.settle()
    world.join("n1", life=2)
    world.settle()
    assert {"n3/0#2", "n1/0#3"} <= set(world.workers())


def test_a_node_that_comes_while_the_first_formation_is_made_evicts_nobody() -> None:
    world = World(spec=spec(max_nodes=3))
    world.tick(1.5)
    for worker in ALL[:3]:
        world.say(worker, Stage.READY)
    world.join("n3")
    world.tick(0.1)
    world.now += 5.0
    world.say(ALL[3], Stage.READY)
    assert world.job.stage is JobStage.RUNNING and world.seated() == ALL


def test_a_dead_leavers_role_is_not_given_away_twice() -> None:
    world = World(nodes=4).running()
    for worker in ("n3/0#0", "n3/1#0"):
        world.say(worker, Stage.READY)
    world.leave("n2")
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n3/1#0"]
    world.say("n4/0#0", Stage.READY)
    world.die("n2/1#0")
    assert world.job.formation.abort and len(world.seated()) == 5  # n2/0 may hold the state
    world.say("n4/1#0", Stage.READY)
    world.follow()
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n3/1#0"]


def test_a_leaver_is_not_taken_for_finished() -> None:
    """It left in good order, its node is gone, and the one that stays has not said yet that it holds the state."""
    world = World(nodes=1, spec=spec(min_nodes=1)).running()
    world.join("n2")
    world.settle()
    for worker in ("n2/0#0", "n2/1#0"):
        world.say(worker, Stage.READY)
    world.say("n2/0#0", Stage.READY, 2)
    for worker in ("n1/0#0", "n1/1#0"):
        world.say(worker, Stage.MEMBER, 2)
    for worker in ("n2/0#0", "n2/1#0"):
        world.say(worker, Stage.READY, 3)
    for worker in ("n1/0#0", "n1/1#0"):
        world.say(worker, Stage.MEMBER, 3)
    world.leave("n1")
    assert world.seated() == ["n2/0#0", "n2/1#0"]
    for worker in ("n1/0#0", "n1/1#0"):
        world.say(worker, Stage.LEFT, 3)
        world.die(worker, ExitCause.OK, "")
    world.lose("n1", NodeLoss.CLOSED)
    assert world.job.stage is JobStage.RUNNING and world.job.directives["n2"].action is Action.RUN


def test_a_node_that_comes_back_while_the_job_finishes_does_not_keep_it() -> None:
    world = World(nodes=3).running()
    stopping = world.nodes.pop("n3")
    for worker in ALL:
        world.die(worker, ExitCause.OK, "")
    world.lose("n2", NodeLoss.CLOSED)
    world.join("n2", life=2)
    world.nodes["n3"] = stopping
    world.inbox.append(("n3", n.Directed(world.job.directives["n3"])))
    world.settle()
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK


def test_a_process_that_starts_when_its_next_life_is_wanted_is_killed() -> None:
    """What is not forked yet cannot be signalled."""
    node = World().running().nodes["n1"]
    wanted = msgspec.structs.replace(node.directive, seq=node.directive.seq + 1, lives=(0, 1))
    node, _ = n.step(node, n.Directed(wanted), 2.0)
    node, commands = n.step(node, n.WorkerStarted(1, 1, 4000), 2.1)
    assert n.SignalWorkers((1,), 9) in commands


def test_a_standbys_node_that_does_not_stop_costs_no_restart() -> None:
    world = World(nodes=3).running()
    world.leave("n3", quietly=True)
    report = world.nodes.pop("n3").report
    killed = msgspec.structs.replace(report.workers[0], gone=True, exit=Exit(ExitCause.GRACE, world.now))
    workers = (killed, report.workers[1])
    world.feed(e.NodeReported(msgspec.structs.replace(report, seq=99, activity=Activity.STOPPING, workers=workers)))
    world.tick(20.0)
    assert world.said(e.NodeLost) and world.job.restarts == 0


def test_a_new_agent_whose_former_one_left_starts_a_new_life() -> None:
    """How its workers had ended was never reported."""
    world = World().running()
    world.leave("n2")
    report = world.nodes.pop("n2").report
    world.follow()
    world.feed(e.NodeReported(msgspec.structs.replace(report, seq=99, activity=Activity.STOPPED, workers=())))
    world.feed(e.NodeGone("n2", "n2.1", NodeLoss.CLOSED))
    world.join("n2", life=2)
    world.settle()
    assert {"n2/0#1", "n2/1#1"} <= set(world.workers())


def test_a_node_whose_place_was_given_away_may_still_run_when_it_is_lost_again() -> None:
    world = World().running()
    cut_off = world.nodes["n1"]
    world.lose("n1", NodeLoss.SILENT)
    world.follow()
    world.join("n3")
    world.settle()
    world.feed(e.NodeReported(cut_off.report))
    world.feed(e.NodeGone("n1", "n1.1", NodeLoss.SILENT))
    assert world.job.gone_by["n1.1"] > world.now


def test_a_death_among_those_who_all_leave_is_counted_once() -> None:
    world = World().running()
    world.leave("n1")
    for worker in ("n1/0#0", "n1/1#0"):
        world.say(worker, Stage.LEFT, 1)
        world.die(worker, ExitCause.OK, "")
    world.follow()
    node = world.nodes["n2"]
    error = Exit(ExitCause.ERROR, world.now, message="ValueError: bad sample")
    workers = (node.report.workers[0], msgspec.structs.replace(node.report.workers[1], exit=error))
    report = msgspec.structs.replace(node.report, seq=node.report.seq + 1, leaving=True, workers=workers)
    world.nodes["n2"] = msgspec.structs.replace(node, report=report)
    world.feed(e.NodeReported(report))
    world.settle()
    world.tick(1.5)
    assert world.job.stage is JobStage.REFORMING and world.job.restarts == 1


def test_leavers_may_come_to_their_own_end() -> None:
    """The others finish with the very step after which these would have left."""
    world = World().running()
    world.leave("n2")
    for worker in ("n1/0#0", "n1/1#0"):
        world.die(worker, ExitCause.OK, "")
    assert world.job.outcome is None and world.job.directives["n2"].action is Action.RUN
    for worker in ("n2/0#0", "n2/1#0"):
        world.die(worker, ExitCause.OK, "")
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK


def test_what_is_said_of_an_older_life_is_not_taken_for_the_last_ones_end() -> None:
    world = World().running()
    for life, message in enumerate(("first", "second")):
        world.die(f"n2/1#{life}", message=message)
        world.all_ready()
        world.follow()
    report = world.nodes["n2"].report
    late = [msgspec.structs.replace(w, life=w.life - 1, before=Exit(ExitCause.SIGNAL, 1.0, message="first"), gone=True)
            if w.local_rank == 1 else w for w in report.workers]  # fmt: skip
    before = world.said(e.WorkerEnded)
    world.feed(e.NodeReported(msgspec.structs.replace(report, seq=report.seq + 1, workers=tuple(late))))
    assert world.said(e.WorkerEnded) == before
    assert world.job.departed[3].message == "second"


def withdrawn_change() -> World:
    """n1/0 was to go on alone; one of the two that were to leave died, so all who are left are seated again."""
    world = World().running()
    world.feed(e.DrainAsked("n1/1"))
    world.feed(e.DrainAsked("n2/0"))
    world.feed(e.DrainAsked("n2/1"))
    world.settle()
    world.say("n1/1#0", Stage.LEFT, 1)
    world.die("n1/1#0", ExitCause.OK, "")
    world.follow()
    assert world.seated() == ["n1/0#0"]
    world.die("n2/0#0")
    assert world.seated() == ["n1/0#0", "n2/1#0"] and world.job.formation.abort
    return world


def test_who_was_to_leave_does_not_go_on_without_those_who_may_have_made_the_change() -> None:
    """n1 is cut off, and may have made the change before it heard that it was withdrawn: both could commit."""
    world = withdrawn_change()
    withdrawal = world.job.formation
    world.say("n2/1#0", Stage.MEMBER, withdrawal.epoch)
    world.lose("n1", NodeLoss.SILENT)
    assert world.job.formation == withdrawal and world.job.stage is JobStage.EVICTING
    world.tick(30.0)
    assert world.job.stage is JobStage.EVICTING
    world.tick(700.0)  # n1 has surely stopped by itself
    assert world.job.stage is not JobStage.EVICTING


def test_who_was_to_leave_goes_on_when_one_who_was_to_stay_heard_that_the_change_was_withdrawn() -> None:
    world = withdrawn_change()
    world.say("n1/0#0", Stage.MEMBER, world.job.formation.epoch)
    world.lose("n1", NodeLoss.SILENT)
    assert world.seated() == ["n2/1#0"] and world.job.stage is JobStage.RESEATING


@pytest.mark.parametrize("last_hears", [False, True])
def test_who_was_to_leave_goes_on_when_of_all_who_were_to_stay_it_is_known_how_far_they_came(last_hears: bool) -> None:
    """One ended, one heard of the withdrawal: no more steps are made, but the last one may have made one more."""
    world = World(nodes=3, spec=spec(max_nodes=3)).running()
    for place in ("n3/0", "n2/0", "n2/1"):
        world.feed(e.DrainAsked(place))
    world.settle()
    world.say("n3/0#0", Stage.LEFT, 1)
    world.die("n3/0#0", ExitCause.OK, "")
    world.follow()
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/1#0"]
    world.die("n1/1#0")
    for worker in ("n1/0#0", "n3/1#0")[: 1 + last_hears]:
        world.say(worker, Stage.MEMBER, world.job.formation.epoch)
    world.lose("n1", NodeLoss.SILENT)
    world.lose("n3", NodeLoss.SILENT)
    goes_on = world.seated() == ["n2/0#0", "n2/1#0"] and world.job.stage is JobStage.RESEATING
    assert goes_on == last_hears and (goes_on or world.job.stage is JobStage.EVICTING)


def test_without_those_who_may_have_made_the_change_a_hang_is_counted_once() -> None:
    world = withdrawn_change()
    restarts = world.job.restarts
    world.hang(0, "n1")
    assert world.job.epoch == 2 and world.job.restarts == restarts + 1


def test_a_newcomer_whose_node_does_not_stop_holds_up_the_end_of_the_job_for_its_grace_only() -> None:
    world = World(spec=spec(max_nodes=3)).running()
    world.join("n3")
    world.settle()
    world.say("n3/0#0", Stage.READY)
    assert "n3/0#0" in world.seated()
    del world.nodes["n3"]  # it hears nothing any more
    for worker in ALL:
        world.die(worker, ExitCause.OK, "")
    world.tick(5.5)
    assert world.job.outcome is None
    world.tick(1.0)
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK
