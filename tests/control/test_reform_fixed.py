"""Step-level recovery where the number of members may not change: survivors wait, and each role is filled."""

from __future__ import annotations

from reform_harness import World, spec

from everstep.control import node as n
from everstep.control import roles
from everstep.control.job import Stage as JobStage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.formation import Stage
from everstep.core.types import Action, Activity, ExitCause, NodeLoss

ALL = ["n1/0#0", "n1/1#0", "n2/0#0", "n2/1#0"]


def fixed(nodes: int = 2, goal: int = 0, **changes: object) -> World:
    world = World(nodes, spec(**changes), fixed=True)
    world.goal = goal
    return world.running()


def test_survivors_wait_until_the_dead_ones_place_is_ready() -> None:
    world = fixed()
    first = world.job.formation
    world.die("n1/1#0")
    assert world.job.formation == first and world.job.stage is JobStage.RESEATING and "n1/1#1" in world.workers()
    assert roles.waits_for(world.job) == "a worker in role 1 (of n1/1#0)"
    world.tick(30.0)
    world.say("n1/1#1", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#1", "n2/0#0", "n2/1#0"] and world.job.formation.abort
    assert roles.waits_for(world.job) == ""
    world.follow()
    assert world.job.stage is JobStage.RUNNING and world.job.incident is None
    assert len(world.said(e.IncidentOpened)) == 1 and world.job.restarts == 1


def test_a_standby_that_is_ready_takes_the_role_at_once() -> None:
    world = fixed(nodes=3)
    world.say("n3/0#0", Stage.READY)
    world.die("n1/1#0")
    assert world.seated() == ["n1/0#0", "n3/0#0", "n2/0#0", "n2/1#0"]


def test_more_deaths_while_the_survivors_wait_are_the_same_incident() -> None:
    world = fixed()
    first = world.job.formation
    world.die("n1/1#0")
    world.die("n2/0#0")
    world.say("n1/1#1", Stage.READY)
    assert world.job.formation == first
    world.say("n2/0#1", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#1", "n2/0#1", "n2/1#0"]
    assert len(world.said(e.IncidentOpened)) == 1 and world.job.restarts == 1
    assert world.job.incident is not None and len(world.job.incident.culprits) == 2


def test_a_place_takes_its_own_role_again_whoever_is_ready_first() -> None:
    world = fixed(nodes=3)
    world.die("n1/1#0")
    world.die("n2/1#0")
    world.say("n2/1#1", Stage.READY)
    world.say("n3/1#0", Stage.READY)
    assert world.seated() == ["n1/0#0", "n3/1#0", "n2/0#0", "n2/1#1"]


def test_a_replacement_that_dies_before_it_had_a_role_is_a_new_fault() -> None:
    world = fixed()
    world.die("n1/1#0")
    world.die("n1/1#1")
    assert "n1/1#2" in world.workers() and world.job.restarts == 2
    world.say("n1/1#2", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#2", "n2/0#0", "n2/1#0"]


def test_who_comes_beyond_the_number_of_roles_is_a_standby() -> None:
    world = fixed(max_nodes=3)
    world.join("n3")
    world.settle()
    world.say("n3/0#0", Stage.READY)
    world.say("n3/1#0", Stage.READY)
    assert world.seated() == ALL
    world.die("n2/0#0")
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n2/1#0"]


def test_a_leaver_stays_until_a_standby_can_take_its_role() -> None:
    world = fixed(nodes=3)
    world.leave("n2")
    assert world.seated() == ALL
    waits = "a worker in role 2 (of n2/0#0, which leaves), role 3 (of n2/1#0, which leaves)"
    assert roles.waits_for(world.job) == waits
    world.say("n3/0#0", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n2/1#0"] and not world.job.formation.abort
    world.say("n3/1#0", Stage.READY)
    world.say("n2/0#0", Stage.LEFT, 1)
    world.die("n2/0#0", ExitCause.OK, "")
    world.follow()
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n3/1#0"] and not world.said(e.IncidentOpened)


def test_a_lost_node_is_waited_for() -> None:
    world = fixed()
    first = world.job.formation
    world.lose("n2")
    world.tick(60.0)
    assert world.job.formation == first and world.nodes["n1"].report.activity is Activity.RUNNING
    assert roles.waits_for(world.job).endswith("there is none: a node has to come")
    world.join("n2", life=2)
    world.settle()
    world.say("n2/0#1", Stage.READY)
    world.say("n2/1#1", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#0", "n2/0#1", "n2/1#1"] and world.job.restarts == 0


def test_a_role_that_nobody_comes_to_take_is_not_waited_for_for_ever() -> None:
    world = fixed(min_nodes=1, join_timeout_s=30.0)
    world.lose("n2")
    world.tick(29.0)
    assert world.job.stage is JobStage.RESEATING
    world.tick(2.0)
    world.tick(1.5)
    assert world.job.epoch == 2 and world.job.restarts == 0
    assert "waited 30 s for a worker in role 2 (of n2/0#0)" in world.said(e.IncidentOpened)[-1].why


def test_a_place_that_gets_a_new_process_is_waited_for_without_a_limit() -> None:
    world = fixed(join_timeout_s=30.0)
    world.die("n1/1#0")
    world.tick(31.0)
    assert world.job.stage is JobStage.RESEATING and world.job.epoch == 1


def test_a_leaver_whose_role_nobody_can_take_leaves_all_the_same() -> None:
    world = fixed(min_nodes=1, join_timeout_s=30.0)
    world.leave("n2")
    world.tick(29.0)
    assert world.seated() == ALL and world.job.stage is JobStage.RUNNING
    world.tick(2.0)
    assert world.said(e.IncidentOpened)[-1].kind == "drain"


def test_a_drained_worker_stays_until_a_standby_can_take_its_role() -> None:
    world = fixed(join_timeout_s=30.0)
    world.feed(e.DrainAsked("n2/0"))
    world.settle()
    world.tick(31.0)
    assert world.seated() == ALL and world.job.stage is JobStage.RUNNING and world.job.epoch == 1


def test_members_that_wait_are_not_taken_for_hung() -> None:
    world = fixed()
    world.die("n1/1#0")
    before = world.job
    world.hang(0, "n1")
    assert world.job == before
    assert roles.acting(world.job) == {1}  # who warms up is watched


def test_who_hangs_while_it_warms_up_for_a_role_is_replaced() -> None:
    world = fixed()
    world.die("n1/1#0")
    world.hang(1, "n1")
    assert "n1/1#2" in world.workers() and world.job.restarts == 2
    world.hang(-1, "")
    assert "n1/1#3" in world.workers() and "n1/0#0" in world.workers()
    world.say("n1/1#3", Stage.READY)
    assert roles.acting(world.job) == {0, 1, 2, 3}


def test_who_hangs_is_killed_and_its_role_waits_for_the_next_life() -> None:
    world = fixed()
    world.hang(1, "n1")
    assert world.seated() == ALL and world.job.stage is JobStage.RESEATING
    world.die("n2/0#0")
    assert len(world.said(e.IncidentOpened)) == 1
    world.say("n1/1#1", Stage.READY)
    world.say("n2/0#1", Stage.READY)
    assert world.seated() == ["n1/0#0", "n1/1#1", "n2/0#1", "n2/1#0"]


def test_the_last_survivors_death_evicts() -> None:
    world = fixed()
    for worker in ALL:
        world.die(worker)
    world.tick(1.5)
    assert world.job.epoch == 2 and world.job.formation is None and not world.job.vacant


def test_who_was_through_is_needed_again_when_another_one_dies_at_the_end() -> None:
    world = fixed()
    world.die("n1/0#0", ExitCause.OK, "")
    world.die("n1/1#0")
    assert {"n1/0#1", "n1/1#1"} <= set(world.workers())
    world.die("n2/0#0", ExitCause.OK, "")
    for worker in ("n1/0#1", "n1/1#1", "n2/0#1"):
        assert world.job.outcome is None
        world.say(worker, Stage.READY)
    assert world.seated() == ["n1/0#1", "n1/1#1", "n2/0#1", "n2/1#0"] and world.job.restarts == 1


def test_a_change_under_way_when_somebody_dies_ends_without_the_leaver() -> None:
    world = fixed(nodes=3)
    world.say("n3/0#0", Stage.READY)
    world.leave("n2")
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n2/1#0"]
    world.die("n1/1#0")
    world.say("n3/1#0", Stage.READY)
    assert world.seated() == ["n1/0#0", "n3/1#0", "n3/0#0", "n2/1#0"]
    assert "n2/0#0" not in world.workers() and "n2/0#1" not in world.workers()
    world.follow()
    assert world.job.stage is JobStage.RUNNING and world.job.restarts == 1


def test_a_node_that_comes_while_a_broken_change_waits_gets_a_place() -> None:
    world = fixed(nodes=3)
    world.say("n3/0#0", Stage.READY)
    world.leave("n2")
    world.die("n1/1#0")
    world.join("n4")
    world.settle()
    assert any(worker.startswith("n4/") for worker in world.workers())


def test_a_leaver_whose_follower_dies_keeps_its_role() -> None:
    world = fixed(nodes=3)
    world.say("n3/0#0", Stage.READY)
    world.leave("n2")
    world.die("n3/0#0")
    assert world.seated() == ALL and world.job.formation.abort and world.job.stage is JobStage.RESEATING


def test_a_stop_reaches_members_that_wait() -> None:
    world = fixed()
    world.die("n1/1#0")
    world.feed(e.StopAsked("asked", 15, 5.0))
    order = world.job.directives["n2"]
    assert order.action is Action.STOP and order.cut


def test_a_node_that_comes_back_stops_first_though_its_roles_are_waited_for() -> None:
    world = fixed()
    cut_off = world.nodes["n2"]
    world.lose("n2", NodeLoss.SILENT)
    world.feed(e.NodeReported(cut_off.report))
    world.tick(0.1)  # nothing but the order to stop reaches it, and it takes its time
    assert world.job.directives["n2"].action is Action.STOP
    world.nodes["n2"] = cut_off
    world.inbox.append(("n2", n.Directed(world.job.directives["n2"])))
    world.settle()
    assert world.job.directives["n2"].action is Action.RUN and world.job.nodes["n2"].stop_by_s == 0.0
    world.say("n2/0#1", Stage.READY)
    world.say("n2/1#1", Stage.READY)
    world.tick(20.0)
    assert world.seated() == ["n1/0#0", "n1/1#0", "n2/0#1", "n2/1#1"] and len(world.said(e.NodeLost)) == 1


def test_more_nodes_of_a_cut_off_pair_are_not_seated_twice() -> None:
    world = fixed(nodes=3)
    world.say("n3/0#0", Stage.READY)
    world.say("n3/1#0", Stage.READY)
    world.lose("n2", NodeLoss.SILENT)
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n3/1#0"] and world.job.formation.abort


def test_nothing_is_said_twice_while_the_survivors_wait() -> None:
    world = fixed()
    world.die("n1/1#0", message="ValueError: 1")
    told = len(world.records)
    world.tick(0.1)
    world.feed(e.NodeReported(world.nodes["n2"].report))
    assert len(world.records) == told and world.job.restarts == 1


def test_a_worker_without_a_role_that_had_one_is_seated_in_its_next_life_only() -> None:
    world = World(nodes=3).running()
    world.say("n3/0#0", Stage.READY, 1)
    world.die("n1/1#0")
    assert world.seated() == ["n1/0#0", "n2/0#0", "n2/1#0"]


def the_others_end_too(world: World) -> None:
    for worker in ALL[1:]:
        world.die(worker, ExitCause.OK, "")
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK
    assert not world.said(e.IncidentOpened)


def test_all_who_leave_the_loop_at_one_step_end_the_job() -> None:
    """The first to end is not replaced at once: the others can only wait for it, or be about to end as well."""
    world = fixed(goal=100)
    world.die("n1/0#0", ExitCause.OK, "")
    world.tick(50.0)
    assert world.job.outcome is None and "n1/0#1" not in world.workers() and not world.job.vacant
    the_others_end_too(world)


def test_whose_loop_ended_is_not_waited_for_however_long_the_others_scripts_take() -> None:
    world = fixed(goal=100)
    for worker in ALL:
        world.say(worker, Stage.MEMBER, 1, goal=world.committed, resumed=True)
    world.die("n1/0#0", ExitCause.OK, "")
    world.tick(3600.0)
    assert world.job.outcome is None and "n1/0#1" not in world.workers()
    the_others_end_too(world)


def test_who_alone_leaves_the_loop_is_needed_again() -> None:
    world = fixed(goal=100)
    world.die("n1/0#0", ExitCause.OK, "")
    world.tick(61.0)
    assert "n1/0#1" in world.workers()
    world.say("n1/0#1", Stage.READY)
    assert world.seated() == ["n1/0#1", *ALL[1:]]
