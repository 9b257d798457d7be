"""Replicas differ: the job's machine records who was wrong and has all members go on in a new formation."""

from __future__ import annotations

import msgspec
from reform_harness import World

from everstep.core import events as e
from everstep.core.corruption import Corruption
from everstep.core.decisions import Action
from everstep.core.formation import Rollback, Stage

PAIR = ("n1/0#0", "n1/1#0")


def running() -> World:
    world = World().running()
    world.committed = 19
    world.follow()
    return world


def found(world: World, *workers: str, sure: bool = True) -> Corruption:
    assert world.job.formation is not None
    return Corruption(world.job.formation.epoch, 20, workers, sure, ("model.weight",), (1, 2, 1, 1), 15)


def tell(world: World, what: Corruption, *rollbacks: Rollback, epoch: int = 0, committed: int = 20) -> None:
    """All of them, of the formation in which it was found or of a later one."""
    for worker in world.workers():
        more = {"corrupt": what, "rollbacks": rollbacks, "committed": committed, "resumed": bool(epoch)}
        world.say(worker, Stage.MEMBER, epoch or what.epoch, **more)


def of(world: World, kind: type[e.Record]) -> list[e.Record]:
    return [record for record in world.records if isinstance(record, kind)]


def test_who_was_wrong_is_named_once_and_all_go_back() -> None:
    world = running()
    what = found(world, "n2/0#0")
    tell(world, what)
    (opened,) = of(world, e.IncidentOpened)
    assert isinstance(opened, e.IncidentOpened)
    assert (opened.kind, [(b.rank, b.node, b.detail) for b in opened.culprits]) == (
        "corrupt",
        [(2, "n2", "model.weight")],
    )
    formation = world.job.formation
    assert formation is not None and formation.abort and formation.epoch == what.epoch + 1
    assert len(formation.seats) == 4 and world.job.restarts == 0
    tell(world, what, Rollback(formation.epoch, 15), epoch=formation.epoch, committed=16)
    (update,) = of(world, e.IncidentUpdated)
    assert isinstance(update, e.IncidentUpdated)
    assert "all went back to step 15" in update.why and "5 steps are done again" in update.why
    (decided,) = of(world, e.Decided)
    assert isinstance(decided, e.Decided) and decided.decision.action is Action.ROLL_BACK
    reasons = {other.action: other.why for other in decided.decision.alternatives}
    assert reasons[Action.RETRY] == "what came of its wrong state is in everybody's state by now"
    assert len(of(world, e.IncidentOpened)) == 1 and len(of(world, e.StepResumed)) == 1
    assert world.job.formation == formation and world.job.incident is None


def test_who_was_wrong_of_two_is_named_later() -> None:
    world = running()
    what = found(world, *PAIR, sure=False)
    tell(world, what)
    formation = world.job.formation
    assert formation is not None
    tell(world, what, Rollback(formation.epoch, 15), epoch=formation.epoch, committed=16)
    tell(world, msgspec.structs.replace(what, sure=True, workers=PAIR[1:]), epoch=formation.epoch, committed=21)
    last = of(world, e.IncidentUpdated)[-1]
    assert isinstance(last, e.IncidentUpdated)
    assert [blame.rank for blame in last.culprits] == [1] and "rank 1 on n1 was wrong" in last.why
    assert len(of(world, e.IncidentOpened)) == 1 and world.job.formation == formation


def test_without_a_kept_state_it_says_what_copying_means() -> None:
    world = running()
    what = found(world, "n2/0#0")
    tell(world, what)
    assert world.job.formation is not None
    tell(world, what, epoch=world.job.formation.epoch, committed=21)
    (update,) = of(world, e.IncidentUpdated)
    assert isinstance(update, e.IncidentUpdated) and "it was copied from a member" in update.why
    chosen = [record.decision.action for record in of(world, e.Decided) if isinstance(record, e.Decided)]
    assert chosen == [Action.ROLL_BACK, Action.RETRY], "the second one once nobody had anything to go back to"


def test_a_death_at_the_same_time_leads_to_one_formation_more_and_both_are_told() -> None:
    world = running()
    what = found(world, "n2/0#0")
    world.say("n1/0#0", Stage.MEMBER, what.epoch, corrupt=what)
    world.die("n2/1#0")
    assert [record.kind for record in of(world, e.IncidentOpened) if isinstance(record, e.IncidentOpened)] == [
        "corrupt",
        "crash",
    ]
    assert world.job.formation is not None and len(world.job.formation.seats) == 3


def test_a_rollback_of_before_is_not_what_healed_it() -> None:
    world = running()
    what = found(world, "n2/0#0")
    tell(world, what)
    assert world.job.formation is not None
    tell(world, what, Rollback(what.epoch, 7), epoch=world.job.formation.epoch, committed=21)
    (update,) = of(world, e.IncidentUpdated)
    assert isinstance(update, e.IncidentUpdated) and "all went back" not in update.why


def test_who_computes_wrongly_gets_no_seat_any_more_and_its_node_is_remembered() -> None:
    world = running()
    what = msgspec.structs.replace(found(world, "n2/0#0"), audit=True, parts=(), marks=())
    tell(world, what)
    (opened,) = of(world, e.IncidentOpened)
    assert isinstance(opened, e.IncidentOpened)
    assert "rank 2 on n2 computes other gradients than all others" in opened.why and "up to step 15" in opened.why
    formation = world.job.formation
    assert formation is not None and formation.abort
    assert [seat.worker for seat in formation.seats] == ["n1/0#0", "n1/1#0", "n2/1#0"]
    assert world.job.lives[2] == 1 and world.job.restarts == 0 and "n2" in world.job.memory.nodes
    tell(world, what, Rollback(formation.epoch, 15), epoch=formation.epoch, committed=16)
    last = of(world, e.IncidentUpdated)[-1]
    assert isinstance(last, e.IncidentUpdated) and "up to which all had computed rightly: 5 steps" in last.why
    assert world.job.lives[2] == 1, "once"


def test_who_computed_wrongly_and_died_is_replaced_once() -> None:
    world = running()
    what = msgspec.structs.replace(found(world, "n2/0#0"), audit=True)
    world.die("n2/0#0")
    world.say("n1/0#0", Stage.MEMBER, what.epoch, corrupt=what)
    assert world.job.lives[2] == 1


def test_where_it_is_not_known_who_computes_wrongly_all_stay() -> None:
    world = running()
    what = msgspec.structs.replace(found(world, *PAIR, sure=False), audit=True)
    tell(world, what)
    formation = world.job.formation
    assert formation is not None and len(formation.seats) == 4 and not any(world.job.lives.values())
    tell(world, what, epoch=formation.epoch, committed=21)
    last = of(world, e.IncidentUpdated)[-1]
    assert isinstance(last, e.IncidentUpdated) and "they go on from what they have" in last.why
