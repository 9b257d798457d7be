"""How steps were dealt comes into the journal once a change, whoever tells of it."""

from __future__ import annotations

from reform_harness import World

from everstep.core import events as e
from everstep.core.dealing import RECENT, Dealing
from everstep.core.formation import Stage

FIRST, SECOND = Dealing(1, 4, 0), Dealing(3, 3, 9)


def tell(world: World, worker: str, *dealt: Dealing) -> None:
    world.say(worker, Stage.MEMBER, 1, dealt=dealt)


def test_each_change_is_noted_once() -> None:
    world = World().running()
    tell(world, "n1/0#0", FIRST)
    tell(world, "n2/0#0", FIRST)
    tell(world, "n2/0#0", FIRST, SECOND)
    tell(world, "n1/0#0", SECOND)
    assert world.said(e.StepsDealt) == [e.StepsDealt(FIRST), e.StepsDealt(SECOND)]


def test_what_came_late_is_noted_too() -> None:
    world = World().running()
    tell(world, "n1/0#0", SECOND)
    tell(world, "n2/0#0", FIRST, SECOND)
    assert world.said(e.StepsDealt) == [e.StepsDealt(SECOND), e.StepsDealt(FIRST)]


def test_more_changes_than_a_session_tells_at_once_may_have_been_missed() -> None:
    world = World().running()
    tell(world, "n1/0#0", FIRST)
    later = [Dealing(10 + k, 4, 20 + k) for k in range(RECENT)]
    tell(world, "n1/0#0", *later)
    assert [dealt.missed for dealt in world.said(e.StepsDealt)] == [False, True] + [False] * (RECENT - 1)


def test_an_agent_that_is_new_to_the_controller_is_heard_at_once() -> None:
    world = World().running()
    tell(world, "n1/0#0", FIRST)
    world.records.clear()
    world.lose("n2")
    world.job = world.job.__class__(world.job.spec)  # of a controller without a journal
    world.feed(e.NodeReported(world.nodes["n1"].report))
    assert world.said(e.StepsDealt) == [e.StepsDealt(FIRST)]
