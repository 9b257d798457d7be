"""Draining through the controller: the wish is remembered, and what has left leaves no gap that stays."""

from __future__ import annotations

import pytest
from reform_harness import World, spec

from everstep.control import drain, lifecycle, seats
from everstep.control import node as n
from everstep.control.job import Job
from everstep.control.job import Stage as JobStage
from everstep.core import events as e
from everstep.core.errors import UsageError
from everstep.core.formation import Stage
from everstep.core.types import Activity, ExitCause, NodeLoss

REFUSED = [
    ("n3", "there is no node and no worker 'n3' in this job: its nodes are n1, n2; its workers are 0 to 3"),
    ("n1/2", "no worker 'n1/2'"),
    ("4", "no worker '4'"),
    ("n1/", "no worker 'n1/'"),
    ("-1", "no worker '-1'"),
]


def asked(world: World, target: str) -> World:
    """As the controller does it."""
    found = drain.find(world.job, target)
    drain.require(world.job, found)
    world.feed(e.DrainAsked(found))
    world.settle()
    return world


def leave(world: World, *workers: str) -> None:
    """These act on the formation without them."""
    for worker in workers:
        world.say(worker, Stage.LEFT, world.job.formed - 1)
        world.die(worker, ExitCause.OK, "")


def drained_and_back() -> World:
    """A place was drained; then its node was lost, and came back."""
    world = asked(World().running(), "n2/1")
    world.follow()
    leave(world, "n2/1#0")
    world.lose("n2")
    world.follow()
    world.join("n2", life=2)
    world.settle()
    return world


def test_targets_are_found_by_every_name() -> None:
    job = World().running().job
    assert [drain.find(job, name) for name in ("n2", "n2/1", "3", "0")] == ["n2", "n2/1", "n2/1", "n1/0"]


@pytest.mark.parametrize(("name", "said"), REFUSED)
def test_an_unknown_target_is_told_what_there_is(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", "\\(")):
        drain.find(World().running().job, name)


# Nodes --------------------------------------------------------------------------------------------------


def test_a_drained_node_leaves_as_on_its_own_wish() -> None:
    world = asked(World().running(), "n2")
    assert world.nodes["n2"].report.leaving and world.seated() == ["n1/0#0", "n1/1#0"]
    assert not world.job.formation.abort
    world.follow()
    leave(world, "n2/0#0", "n2/1#0")
    assert world.nodes["n2"].report.activity is Activity.STOPPED
    assert not world.said(e.IncidentOpened)


def test_a_standby_takes_a_drained_nodes_roles() -> None:
    world = World(nodes=3).running()
    for worker in ("n3/0#0", "n3/1#0"):
        world.say(worker, Stage.READY)
    asked(world, "n2")
    assert world.seated() == ["n1/0#0", "n1/1#0", "n3/0#0", "n3/1#0"]


def test_the_wish_is_told_to_an_agent_that_comes_in_the_place_of_one_that_died() -> None:
    world = World().running()
    world.feed(e.DrainAsked("n2"))
    world.inbox.clear()  # it died before it heard
    world.lose("n2")
    world.join("n2", life=2)
    world.settle()
    assert world.nodes["n2"].report.leaving


def test_the_wish_ends_when_the_node_has_left() -> None:
    """Somebody may start it again on purpose."""
    world = asked(World().running(), "n2")
    world.follow()
    leave(world, "n2/0#0", "n2/1#0")
    world.lose("n2", NodeLoss.CLOSED)
    assert not world.job.drains
    world.join("n2", life=2)
    world.settle()
    assert not world.nodes["n2"].report.leaving and len(world.workers()) == 4


def test_a_new_controller_remembers_the_wish() -> None:
    """It is a fold over the inputs, and the directive of its node holds it."""
    world = World().running()
    inputs = [e.DrainAsked("n2"), e.ControllerStarted(2)]
    job: Job = world.job
    for event in inputs:
        job, _ = lifecycle.step(job, event, world.now)
    assert job.directives["n2"].leave and not job.directives["n1"].leave


def test_an_order_to_leave_is_followed_once() -> None:
    world = asked(World().running(), "n2")
    seq = world.nodes["n2"].report.seq
    repeated = world.job.directives["n2"]
    node, commands = n.step(world.nodes["n2"], n.Directed(repeated), world.now)
    assert node.report.seq == seq and not commands


def test_without_sessions_all_stop_and_the_others_form_again() -> None:
    world = World(spec=spec(min_nodes=1))
    world.tick(1.5)
    asked(world, "n2")
    assert [opened.kind for opened in world.said(e.IncidentOpened)] == ["drain"]
    world.tick(0.1)
    assert world.nodes["n2"].report.leaving
    world.lose("n2", NodeLoss.CLOSED)
    world.tick(1.5)
    assert world.job.plan is not None and [m.node for m in world.job.plan.members] == ["n1"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_node_which_the_job_cannot_do_without_stays(waits: bool) -> None:
    world = World(nodes=1 if waits else 2)
    world.tick(1.5)
    with pytest.raises(UsageError, match="nobody of the nodes" if waits else "needs 2 .--nnodes."):
        drain.require(world.job, "n1")


def test_the_last_members_stay() -> None:
    world = asked(World().running(), "n2")
    with pytest.raises(UsageError, match="without n1 nobody of the workers"):
        drain.require(world.job, "n1")
    with pytest.raises(UsageError, match="the job ends"):
        drain.require(lifecycle.step(world.job, e.StopAsked("asked"), world.now)[0], "n1")


# Workers ------------------------------------------------------------------------------------------------


def test_a_drained_worker_leaves_and_its_place_stays_empty() -> None:
    world = asked(World().running(), "3")
    assert world.seated() == ["n1/0#0", "n1/1#0", "n2/0#0"]
    world.follow()
    leave(world, "n2/1#0")
    world.tick(1.0)
    world.follow()
    assert set(world.workers()) == {"n1/0#0", "n1/1#0", "n2/0#0"} and not world.nodes["n2"].report.leaving
    assert not world.said(e.IncidentOpened)


def test_a_drained_worker_that_dies_on_its_way_out_is_not_replaced() -> None:
    world = asked(World().running(), "n2/1")
    world.die("n2/1#0")
    world.follow()
    world.tick(1.0)
    assert set(world.workers()) == {"n1/0#0", "n1/1#0", "n2/0#0"}
    assert world.job.stage is JobStage.RUNNING and world.job.lives[3] == 1


def test_a_place_stays_empty_whatever_becomes_of_its_node() -> None:
    world = drained_and_back()
    assert [w for w in world.workers() if w.startswith("n2")] == ["n2/0#1"]


def test_a_drained_standby_is_ended() -> None:
    world = World().running()
    world.die("n2/1#0")
    world.follow()
    world.say("n2/1#1", Stage.WARMING)
    assert "n2/1#1" in world.workers()
    asked(world, "n2/1")
    assert "n2/1#1" not in world.workers() and "n2/1#2" not in world.workers()
    assert len(world.said(e.IncidentOpened)) == 1  # the death before


def test_a_job_that_starts_again_does_without_drained_places() -> None:
    world = asked(World().running(), "n2/1")
    world.follow()
    leave(world, "n2/1#0")
    for worker in ("n1/0#0", "n1/1#0", "n2/0#0"):
        world.die(worker)
    world.tick(1.5)
    assert world.job.epoch == 2 and len(world.workers()) == 3
    world.all_ready()
    assert world.job.formation is not None and len(world.seated()) == 3


def test_the_last_one_of_a_drained_place_stays_until_somebody_else_can_go_on() -> None:
    world = asked(World().running(), "n2/1")
    for worker in ("n1/0#0", "n1/1#0", "n2/0#0"):
        world.die(worker)
    world.follow()
    assert world.seated() == ["n2/1#0"]
    world.say("n1/0#1", Stage.READY)
    assert world.seated() == ["n1/0#1"]


def test_a_drained_place_stays_for_a_node_that_leaves_by_itself() -> None:
    world = World().running()
    world.die("n2/0#0")
    world.feed(e.DrainAsked("n2/1"))
    world.settle()
    world.leave("n1")
    world.follow()
    assert world.seated() == ["n2/1#0"] and not world.job.formation.abort


def test_a_worker_of_a_job_without_sessions_cannot_leave_alone() -> None:
    world = World()
    world.tick(1.5)
    with pytest.raises(UsageError, match="no session, so its workers stop and start together. `everstep drain n2`"):
        drain.require(world.job, "n2/1")


def test_all_places_but_one_can_be_drained() -> None:
    world = World().running()
    for target in ("0", "1", "2"):
        asked(world, target)
        world.follow()
    assert world.seated() == ["n2/1#0"]
    with pytest.raises(UsageError, match="nobody of the workers"):
        drain.require(world.job, "n2/1")
    assert seats.num_places(world.job) == 1


def test_a_drained_place_can_be_filled_again() -> None:
    world = asked(World().running(), "n2/1")
    with pytest.raises(UsageError, match="just leaving"):
        drain.require_undo(world.job, "n2/1")
    world.follow()
    leave(world, "n2/1#0")
    drain.require_undo(world.job, "n2/1")
    world.feed(e.DrainAsked("n2/1", undo=True))
    world.settle()
    world.say("n2/1#1", Stage.READY)
    world.follow()
    assert world.seated() == ["n1/0#0", "n1/1#0", "n2/0#0", "n2/1#1"]
    with pytest.raises(UsageError, match="n2/1 was not drained"):
        drain.require_undo(world.job, "n2/1")


def test_a_place_that_was_empty_when_its_node_started_can_be_filled() -> None:
    world = drained_and_back()
    world.feed(e.DrainAsked("n2/1", undo=True))
    world.settle()
    assert {w for w in world.workers() if w.startswith("n2/1")} and len(world.workers()) == 4


def test_a_node_that_leaves_cannot_be_called_back() -> None:
    world = asked(World().running(), "n2")
    with pytest.raises(UsageError, match="on its way out"):
        drain.require_undo(world.job, "n2")
