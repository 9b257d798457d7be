"""What sessions tell of committed and saved steps: the floor of every formation, rollbacks, saves that fail."""

from __future__ import annotations

import msgspec
from reform_harness import World, spec

from everstep.control.job import Stage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.formation import Formation, Rollback
from everstep.core.formation import Stage as SessionStage
from everstep.core.saves import Saves
from everstep.core.types import ExitCause

MEMBER = SessionStage.MEMBER


def formation_of(world: World) -> Formation:
    assert world.job.formation is not None
    return world.job.formation


def incidents(world: World) -> list[str]:
    return [each.kind for each in world.said(e.IncidentOpened) if isinstance(each, e.IncidentOpened)]


def all_die(world: World) -> World:
    """At 7 steps. The next plan's workers are ready then."""
    world.committed = 7
    for worker in world.seated():
        world.die(worker)
    world.tick(1.5)
    assert world.job.epoch == 2
    world.all_ready()
    return world


def back(world: World, step: int, **more: object) -> None:
    """Every member went back to this step."""
    formation = formation_of(world)
    for worker in world.seated():
        rollbacks = (*formation.rollbacks, Rollback(formation.epoch, step))
        world.say(worker, MEMBER, formation.epoch, committed=step, rollbacks=rollbacks, **more)


def test_after_the_death_of_all_the_floor_is_what_was_committed() -> None:
    world = all_die(World(spec=spec(max_restarts=5)).running())
    formation = formation_of(world)
    assert (formation.floor, formation.abort, formation.scratch) == (7, False, True)
    back(world, 5)
    assert world.said(e.StateRestored) == [e.StateRestored(formation.epoch, 5, before=7, lost=2)]
    assert incidents(world)[-1] == "rolled-back"
    closed = world.said(e.IncidentClosed)[-1]
    assert isinstance(closed, e.IncidentClosed) and closed.redone_steps == 2
    assert world.job.stage is Stage.RUNNING and world.job.floor == 5
    world.committed = 5
    world.follow()
    world.die(world.seated()[0])
    following = formation_of(world)
    assert (following.floor, following.rollbacks) == (6, (Rollback(formation.epoch, 5),))


def test_a_job_that_kept_nothing_says_that_it_starts_over() -> None:
    world = all_die(World(spec=spec(max_restarts=5)).running())
    back(world, 0)
    (opened,) = [each for each in world.said(e.IncidentOpened) if "step-fell-back" in str(each)]
    assert "7 steps are lost" in str(opened)
    assert (world.job.floor, world.job.formation and world.job.formation.floor) == (0, 7)


def test_a_job_that_saved_does_not_start_over() -> None:
    world = World(spec=spec(max_restarts=5)).running()
    world.say(world.seated()[0], MEMBER, 1, saves=Saves(requested=1))
    assert not formation_of(all_die(world)).scratch


def test_what_is_restored_at_the_very_begin_is_no_incident() -> None:
    world = World()
    world.tick(1.5)
    world.all_ready()
    back(world, 40)
    assert world.said(e.StateRestored) == [e.StateRestored(1, 40, before=0, lost=0)]
    assert (incidents(world), world.job.floor) == ([], 40)


def test_numbers_of_before_a_rollback_do_not_count() -> None:
    world = World(fixed=True).running()
    first, second, third, _ = world.seated()
    world.committed = 7
    world.die(first)
    world.say(first.replace("#0", "#1"), SessionStage.READY)
    epoch = formation_of(world).epoch
    rollbacks = (Rollback(epoch, 4),)
    world.say(second, MEMBER, epoch, committed=4, rollbacks=rollbacks)
    world.say(third, MEMBER, epoch, committed=7)  # it was heard late
    assert (world.job.floor, formation_of(world).floor) == (4, 7)
    world.die(second)  # its page has 7 steps until it commits another one
    assert world.job.floor == 4
    world.say(second.replace("#0", "#1"), SessionStage.READY)
    assert (formation_of(world).floor, formation_of(world).rollbacks) == (4, rollbacks)


def test_a_save_is_told_when_it_is_asked_for_and_when_it_is_durable() -> None:
    world = World().running()
    first, second, *_ = world.seated()
    for worker in (first, second):
        world.say(worker, MEMBER, 1, saves=Saves(requested=3))
    world.say(second, MEMBER, 1, saves=Saves(requested=6, durable=3))
    world.say(first, MEMBER, 1, saves=Saves(requested=3, durable=3))
    told = [each for each in world.records if isinstance(each, e.SaveRequested | e.SaveDurable)]
    assert told == [e.SaveRequested(3), e.SaveRequested(6), e.SaveDurable(3)]


def ends(*saves: Saves) -> World:
    world = World().running()
    worker = world.seated()[0]
    for each in saves:
        world.say(worker, MEMBER, 1, saves=each)
    for name in world.workers():
        world.die(name, ExitCause.OK, "")
    world.tick(0.1)
    return world


FAILED = Saves(requested=3, failed_step=3, failed="disk full: 5 of 9 MB fit")


def test_a_failed_save_is_told_at_once_and_decides_on_the_exit_code() -> None:
    world = ends(FAILED)
    assert world.said(e.SaveFailed) == [e.SaveFailed(3, FAILED.failed)]
    (alert,) = world.said(e.Alert)
    assert isinstance(alert, e.Alert) and alert.kind == "save-failed" and "5 of 9 MB fit" in alert.text
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.SAVE_FAILED
    assert incidents(world) == ["save-failed"] and "5 of 9 MB fit" in world.job.outcome.why


def test_a_later_save_makes_it_good() -> None:
    world = ends(FAILED, msgspec.structs.replace(FAILED, requested=6, durable=6))
    assert world.job.outcome is not None and world.job.outcome.exit_code == ExitCode.OK
    assert len(world.said(e.SaveFailed)) == 1 and not incidents(world)
