"""What is decided about a slow worker: it is borne at first; once that has cost as much, a standby takes its role."""

from __future__ import annotations

import msgspec
import pytest
from reform_harness import World

from everstep.control.job import Stage
from everstep.control.slowness import Slowness
from everstep.core import events as e
from everstep.core.decisions import Action
from everstep.core.formation import Stage as Session
from everstep.core.types import Blame, Verdict

SLOW = e.SlowJudged("S001", Verdict("slow", (Blame(1, "n1", "slow-compute"),), "why"), "compute", 1.0, 3, 8)
EVICTION_S = 0.03 * 2  # a planned change stops all for 0.03 s; at half the pace half of the time is lost


def with_standbys() -> World:
    world = World(nodes=3).running()
    for worker in ("n3/0#0", "n3/1#0"):
        world.say(worker, Session.READY)
    return world


def due(slowness: Slowness, world: World, now: float) -> list[tuple[str, str]]:
    """Actions with their targets, and wishes."""
    made = slowness.due(world.job, now)
    return [
        (each.decision.action.value, each.decision.target) if isinstance(each, e.Decided) else ("drain", each.target)
        for each in made
    ]


def test_a_standby_takes_its_role_once_it_has_cost_as_much() -> None:
    world, slowness = with_standbys(), Slowness(act=True)
    slowness.saw(SLOW)
    assert due(slowness, world, 100.0) == [("leave-it", "n1/1")]
    assert due(slowness, world, 100.0 + 0.9 * EVICTION_S) == []
    assert due(slowness, world, 100.0 + 1.1 * EVICTION_S) == [("evict-node", "n1/1"), ("drain", "n1/1")]
    assert due(slowness, world, 200.0) == [], "once"
    world.feed(e.DrainAsked("n1/1"))
    world.settle()
    assert "n1/1#0" not in world.seated() and "n3/0#0" in world.seated()
    assert not world.said(e.IncidentOpened), "nobody stopped for it"


def test_nothing_is_done_unless_it_is_configured() -> None:
    world, slowness = with_standbys(), Slowness(act=False)
    slowness.saw(SLOW)
    (decided,) = slowness.due(world.job, 100.0)
    assert isinstance(decided, e.Decided) and decided.decision.action is Action.LEAVE
    assert "evict-node is due once it has cost as much" in decided.decision.why
    barred = {other.action: other.why for other in decided.decision.alternatives if not other.feasible}
    assert barred[Action.SHRINK] == "its place would stay empty: who is slow does more than nobody"
    assert due(slowness, world, 1000.0) == []


def test_without_a_standby_it_is_borne_until_there_is_one() -> None:
    world, slowness = World(nodes=3).running(), Slowness(act=True)
    slowness.saw(SLOW)
    assert due(slowness, world, 100.0) == [("leave-it", "n1/1")]
    assert due(slowness, world, 500.0) == []
    world.say("n3/0#0", Session.READY)
    assert due(slowness, world, 500.1) == [("evict-node", "n1/1"), ("drain", "n1/1")]


@pytest.mark.parametrize("why", ["recovering", "closed", "gone"])
def test_what_is_not_its_fault_or_is_over_does_not_count(why: str) -> None:
    world, slowness = with_standbys(), Slowness(act=True)
    slowness.saw(SLOW)
    job = world.job
    assert due(slowness, world, 100.0)
    if why == "recovering":
        world.job = msgspec.structs.replace(job, stage=Stage.RESEATING)
    elif why == "closed":
        slowness.saw(e.IncidentClosed("S001", "well again"))
    else:
        world.lose("n1")
    assert due(slowness, world, 200.0) == []
    if why == "recovering":
        world.job = job
        assert due(slowness, world, 200.0 + 0.9 * EVICTION_S) == []
        assert due(slowness, world, 200.0 + 1.1 * EVICTION_S)


def test_workers_that_stop_and_start_together_are_borne() -> None:
    world, slowness = World(), Slowness(act=True)
    world.tick(1.5)
    assert world.job.formation is None
    slowness.saw(SLOW)
    assert due(slowness, world, 100.0) == [("leave-it", "n1/1")]
    assert due(slowness, world, 1000.0) == []
