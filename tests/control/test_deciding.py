"""What is decided about an incident stands in the journal; learned costs change it; nodes that fail often come last."""

from __future__ import annotations

import msgspec
from reform_harness import World, spec
from test_lifecycle import SPEC, Driver

from everstep.control.job import Stage
from everstep.core import events as e
from everstep.core.decisions import Action, Decision
from everstep.core.formation import Stage as Session
from everstep.core.types import Activity, Exit, ExitCause, NodeLoss


def decided(driver: World | Driver) -> list[Decision]:
    return [record.decision for record in driver.records if isinstance(record, e.Decided)]


def learn(driver: World | Driver, **seconds: float) -> None:
    """As if a job had seen it many times. Names with `_` for `-`."""
    for name, took_s in seconds.items():
        for _ in range(20):
            driver.feed(e.CostLearned(name.replace("_", "-"), took_s))


def with_standbys() -> World:
    world = World(nodes=3).running()
    for worker in ("n3/0#0", "n3/1#0"):
        world.say(worker, Session.READY)
    assert len(world.seated()) == 4
    return world


def reasons(decision: Decision) -> dict[Action, str]:
    return {other.action: other.why for other in decision.alternatives}


# With sessions ------------------------------------------------------------------------------------------


def test_a_standby_takes_the_role_and_without_one_the_others_go_on() -> None:
    world = with_standbys()
    world.die("n1/0#0")
    world.die("n2/0#0")
    first, second = decided(world)
    assert first.action is Action.PROMOTE and first.target == "n1/0#0"
    assert reasons(first)[Action.RESTART] == "a live member holds the newest state: nobody has to stop"
    assert second.action is Action.PROMOTE, "of the next formation, in the same incident"
    world.die("n1/1#0")
    assert decided(world)[-1].action is Action.SHRINK and len(world.seated()) == 3
    world.follow()
    assert len(decided(world)) == 3 and world.job.stage is Stage.RUNNING and world.job.incident is None


def test_where_promotions_took_long_the_others_go_on_first() -> None:
    """The standby then gets its role in a planned change, for which nobody waits."""
    world = with_standbys()
    learn(world, promote_standby=100.0, grow=0.0, shrink=0.0, process=0.0)
    world.die("n1/0#0")
    assert decided(world)[-1].action is Action.SHRINK
    formation = world.job.formation
    assert formation is not None and formation.abort and len(world.seated()) == 3
    world.follow()
    world.follow()
    formation = world.job.formation
    assert formation is not None and not formation.abort and len(world.seated()) == 4


def test_a_role_that_must_be_filled_is_decided_once() -> None:
    world = World(spec=spec(join_timeout_s=60.0), fixed=True).running()
    world.die("n1/0#0")
    for _ in range(5):
        world.tick(1.0)
    (decision,) = decided(world)
    assert decision.action is Action.RESPAWN
    assert reasons(decision)[Action.SHRINK] == "the number of members may not change"
    world.say("n1/0#1", Session.READY)
    world.follow()
    assert decided(world) == [decision] and world.job.incident is None


def test_a_function_that_raised_runs_again_and_then_in_a_new_process() -> None:
    world = World(fixed=True).running()
    for expected in (Action.RETRY, Action.RESPAWN):
        world.fail("n1/0#0", "ValueError: 1")
        assert decided(world)[-1].action is expected


def test_nobody_waits_for_a_standby() -> None:
    world = World(nodes=3).running()
    world.die("n3/0#0")
    assert [(d.action, d.loss_s) for d in decided(world)] == [(Action.RESPAWN, 0.0)]


# Plain scripts ------------------------------------------------------------------------------------------


def crash(job: Driver, message: str) -> None:
    job.fails("n1", message)
    job.stops("n1", ExitCause.ERROR, message)
    job.stops("n2")
    for node in ("n1", "n2"):
        job.runs(node)


def test_restart_and_in_the_end_stop() -> None:
    job = Driver(msgspec.structs.replace(SPEC, max_restarts=100))
    job.start("n1", "n2")
    for _ in range(3):
        crash(job, "ValueError: 1")
    made = decided(job)
    assert [d.action for d in made] == [Action.RESTART] * 3 + [Action.STOP]
    assert reasons(made[-1])[Action.RESTART] == "the same failure 3 times: it would come again"
    assert job.job.stage is Stage.FAILED


def lost_node(job: Driver) -> None:
    job.start("n1", "n2")
    learn(job, restart_workers=30.0, node=1.0)
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.DIED))
    job.stops("n2")


def test_a_node_that_is_expected_soon_is_waited_for() -> None:
    job = Driver()
    lost_node(job)
    assert decided(job)[-1].action is Action.RESCHEDULE and decided(job)[-1].target == "n1"
    job.tick(5.0)
    assert job.job.stage is Stage.REFORMING
    job.report("n3")
    assert job.job.epoch == 2 and job.places() == [("n3", 0), ("n2", 1)]
    job.restart()


def test_it_is_waited_for_in_vain_only_so_long_and_the_next_time_less() -> None:
    """No longer than one restart more costs. A wait in vain counts: after some, nothing is waited for."""
    job = Driver(msgspec.structs.replace(SPEC, join_timeout_s=300.0))
    lost_node(job)
    expected_s = job.job.costs.seconds("node", 2)
    job.tick(65.0)
    assert job.job.epoch == 2 and job.places() == [("n2", 0)]
    assert job.job.costs.seconds("node", 2) > expected_s


def test_without_learned_times_the_others_go_on_at_once() -> None:
    job = Driver()
    job.start("n1", "n2")
    job.feed(e.NodeGone("n1", "n1.1", NodeLoss.DIED))
    job.stops("n2")
    assert decided(job)[-1].action is Action.RESTART and job.job.epoch == 2


# Nodes that fail often ----------------------------------------------------------------------------------


def test_a_node_that_failed_three_times_is_seated_last_for_a_while() -> None:
    job = Driver(msgspec.structs.replace(SPEC, max_restarts=100))
    job.start("n1", "n2", "n3")
    assert job.places() == [("n1", 0), ("n2", 1)]
    for step in range(3):
        end = msgspec.structs.replace(job.reports["n1"].workers[0], gone=True, exit=_killed(step))
        job.report("n1", epoch=job.job.epoch, workers=(end,))
        job.report("n1", epoch=job.job.epoch, activity=Activity.STOPPED)
        job.stops("n2")
        for node, _ in job.places():
            job.runs(node)
    assert job.places() == [("n3", 0), ("n2", 1)] and job.job.excluded == {"n1"}
    (alert,) = [record for record in job.records if isinstance(record, e.Alert)]
    assert alert.kind == "node-excluded" and alert.text.startswith("n1 failed too often: for 10 min")
    job.tick(601.0)
    assert not job.job.excluded
    assert [record.kind for record in job.records if isinstance(record, e.Alert)][-1] == "node-admitted"
    job.restart()


def test_where_nobody_else_is_it_is_seated_all_the_same() -> None:
    job = Driver(msgspec.structs.replace(SPEC, max_nodes=1, max_restarts=100))
    job.start("n1")
    for step in range(5):
        end = msgspec.structs.replace(job.reports["n1"].workers[0], gone=True, exit=_killed(step))
        job.report("n1", epoch=job.job.epoch, activity=Activity.STOPPED, workers=(end,))
        job.runs("n1")
    assert job.places() == [("n1", 0)] and job.job.epoch == 6 and job.job.excluded == {"n1"}


def _killed(step: int) -> Exit:
    return Exit(ExitCause.SIGNAL, 0.0, signal=9, step=step)
