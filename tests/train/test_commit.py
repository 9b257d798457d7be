"""The commit protocol under everything that can happen: all interleavings of small jobs, random ones of larger jobs.

The second half breaks one rule at a time, and shows that the model finds it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from everstep.core.formation import Formation, Rollback, Seat
from everstep.core.saves import Tier
from everstep.detect import corrupt
from everstep.train import commit, kept, resolve
from everstep.train import protocol as p
from everstep.train.commit import Member, Phase
from everstep.train.kept import Image, Kept
from everstep.train.resolve import Known, Move, Resolved, Stand

from .commit_model import Model, Scenario, World
from .commit_peer import Message, Violation
from .commit_search import explore, walk

WORLDS = {
    "no fault": Scenario(3, steps=3),
    "every small thing by itself, from the start": Scenario(2, 1, deaths=1, eager=False, started=False),
    "two deaths of two, one standby": Scenario(2, 1, steps=3, deaths=2),
    "two deaths of three": Scenario(3, steps=2, deaths=2),
    "two deaths of three, one standby": Scenario(3, 1, steps=1, deaths=2),
    "joiner, death": Scenario(2, 1, steps=1, deaths=1, plans=("join",)),
    "leaver, death": Scenario(2, 1, steps=1, deaths=1, plans=("leave",)),
    "joiner, then leaver, death": Scenario(2, 1, steps=1, deaths=1, plans=("join", "leave")),
    "standby for leaver, two deaths": Scenario(2, 1, steps=1, deaths=2, plans=("swap",)),
    "broken link, death": Scenario(2, 1, steps=1, deaths=1, blips=1),
    "live member fenced, death": Scenario(2, 1, steps=1, deaths=1, fences=1),
    "broken link, then a live member fenced": Scenario(2, 1, steps=1, blips=1, fences=1),
    "fenced member seated again": Scenario(2, steps=2, fences=1, returns=True),
    "all steps skipped": Scenario(2, 1, steps=2, deaths=2, nonfinite="always"),
    "each member's gradients finite or not": Scenario(2, 1, steps=2, deaths=2, nonfinite="mixed"),
    "the same, three members": Scenario(3, steps=1, deaths=2, nonfinite="mixed"),
    "controller behind": Scenario(2, 1, steps=2, deaths=2, stray_floor=True),
    "two shards, one of them twice": Scenario(3, 1, steps=2, deaths=1, shards=2),
    "the same, two deaths, from the start": Scenario(3, 1, steps=1, deaths=2, shards=2, started=False),
    "kept by a node, all die": Scenario(2, 1, steps=2, deaths=2, to_memory=(1,)),
    "kept by nodes and on disk, some die": Scenario(
        2, 1, steps=2, deaths=2, to_memory=(1, 2), to_disk=(1,), node_deaths=True
    ),
    "kept shards, one is damaged, who asks for seats hears of no rollback": Scenario(
        2, 2, steps=2, deaths=2, shards=2, to_memory=(1,), damages=1, deaf=True
    ),
    "kept when nobody is busy, all die": Scenario(2, 1, steps=2, deaths=2, to_memory=(1, 2), to_disk=(2,), busy=(1, 2)),
    "replicas differ, death, kept before": Scenario(2, 1, steps=2, deaths=1, to_memory=(1,), checks=(2,), flips=1),
    "two of three agree, death, nothing kept": Scenario(3, 0, steps=2, deaths=1, checks=(1,), flips=1),
    "replicas of a shard differ, damage": Scenario(4, steps=2, shards=2, to_memory=(1,), damages=1, flips=1),
    "replicas differ, a joiner": Scenario(2, 1, steps=2, plans=("join",), to_memory=(1,), checks=(1,), flips=2),
    "a shard twice, two deaths, one damage": Scenario(3, 1, steps=2, deaths=2, shards=2, to_memory=(1,), damages=1),
    "a step computed twice, death, joiner": Scenario(2, 1, steps=2, deaths=1, plans=("join",), audits=(1,)),
    "one computes wrongly, death": Scenario(2, 1, steps=2, deaths=1, to_memory=(1,), audits=(1,), slips=2),
    "one of three computes wrongly, once or more": Scenario(3, steps=2, to_memory=(1,), audits=(1,), slips=2),
}


@pytest.mark.parametrize("world", WORLDS)
def test_every_interleaving(world: str) -> None:
    explored = explore(WORLDS[world])
    print(f"{world}: {explored.states:,} states, {explored.transitions:,} transitions, {explored.ends:,} ends")
    assert explored.ends
    assert explored.states > (2000 if WORLDS[world].deaths else 20)


LARGE = {
    "4 members": Scenario(4, 8, steps=8, deaths=6, plans=("join", "leave", "swap")),
    "6 members, all alone steps": Scenario(6, 5, steps=6, deaths=5, fences=2, plans=("swap",) * 3, eager=False),
    "8 members": Scenario(8, 8, steps=6, deaths=8, fences=2, blips=2, plans=("swap", "join", "leave") * 2),
    "2 replicas of 2 shards": Scenario(4, 12, steps=8, deaths=10, blips=2, shards=2),
    "the same, kept": Scenario(
        4,
        12,
        steps=9,
        deaths=10,
        shards=2,
        to_memory=(2, 3, 5, 7),
        to_disk=(3, 7),
        node_deaths=True,
        damages=3,
        flips=3,
    ),
    "3 replicas of 2 shards, from the start": Scenario(6, 9, steps=4, deaths=9, shards=2, eager=False, started=False),
    "8 members, from the start": Scenario(8, 8, steps=3, deaths=12, nonfinite="mixed", eager=False, started=False),
}


@pytest.mark.parametrize("world", LARGE)
def test_random_walks(world: str) -> None:
    events = formations = 0
    for seed in range(6):
        taken, last, _ = walk(LARGE[world], random.Random(seed), rare=0.03)
        events, formations = events + taken, formations + len(last.formations)
    print(f"{world}: {events:,} events, {formations} formations")
    assert formations > 12


# Rules broken, one at a time -----------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]
real_resolve, real_move, real_enter, real_reached = resolve.resolve, resolve._move, commit._enter, commit._reached
real_decide_resolve, real_receive, real_source = commit._resolve, commit._receive, resolve._source
real_step, real_once_more = commit.step, commit._once_more
real_restored, real_newest = resolve._restored, resolve._newest


def some_voted(monkeypatch: pytest.MonkeyPatch) -> None:
    def each_for_itself(stands: Sequence[Stand], known: Known) -> tuple[Resolved, ...]:
        return tuple(
            replace(agreed, move=Move.APPLY, goal=resolve.after(stand, skipped=False)) if stand.voted_in else agreed
            for stand, agreed in zip(stands, real_resolve(stands, known), strict=True)
        )

    monkeypatch.setattr(resolve, "resolve", each_for_itself)


def leaver_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_commit(holders: Sequence[Stand]) -> Stand | None:
        alike = {(stand.commit, stand.voted_in) for stand in holders}
        return resolve.after(holders[0], skipped=False) if len(alike) == 1 and holders[0].voted_in else None

    monkeypatch.setattr(resolve, "next_commit", next_commit)


def no_roll_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "next_commit", lambda holders: None)


def voted_in_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(stand: Stand, goal: Stand) -> Move:
        return Move.APPLY if stand.voted_in and stand.committed + 1 == goal.committed else real_move(stand, goal)

    monkeypatch.setattr(resolve, "_move", move)


def newcomer_counts_as_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    def holding(stands: Sequence[Stand], known: Known) -> tuple[Resolved, ...]:
        return real_resolve([replace(s, committed=0) if s.fresh else s for s in stands], known)

    monkeypatch.setattr(resolve, "resolve", holding)


def floor_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "resolve", lambda stands, known: real_resolve(stands, replace(known, floor=0)))


def skip_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(stand: Stand, goal: Stand) -> Move:
        found = real_move(stand, goal)
        return Move.APPLY if found is Move.SKIP else found

    monkeypatch.setattr(resolve, "_move", move)


def dropped_gradients_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_clean", lambda stand: stand)


def vote_of_another_epoch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def round_(self: Model, world: World, kind: str, epoch: int, step: int, formation: Formation) -> list[Message]:
        found = {}
        for message in sorted(map(self.messages.items.__getitem__, world.sent), key=lambda m: m.epoch):
            if message.kind == kind and message.step == step and (kind == "vote" or message.epoch == epoch):
                found[message.sender] = message
        return [found[seat.worker] for seat in formation.seats if seat.worker in found]

    monkeypatch.setattr(Model, "round", round_)
    monkeypatch.setattr(Model, "_tidy", lambda self, world: world)


def switch_when_one_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "switches", lambda epoch, votes: max(vote.prepared for vote in votes) > epoch)


def applied_does_not_count_after_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(member: Member) -> Member:
        return replace(member, goal=None) if member.entering else real_reached(member)

    monkeypatch.setattr(commit, "_reached", reached)


def torn_state_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_(member: Member, stands: tuple[Stand, ...]) -> commit.Outcome:
        after, commands = real_decide_resolve(member, stands)
        return (replace(after, stand=member.stand) if after.phase is Phase.FETCHING else after), commands

    monkeypatch.setattr(commit, "_resolve", resolve_)


def older_formation_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(member: Member, formation: Formation) -> commit.Outcome:
        return real_enter(member, formation) if formation.abort else real_receive(member, formation)

    monkeypatch.setattr(commit, "_receive", receive)


def any_shard_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_source", lambda moves, shard, shards: real_source(moves, 0, 1))


def newer_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def restored(stands: Sequence[Stand], image: Image, known: Known) -> tuple[Resolved, ...]:
        return tuple(
            replace(each, move=Move.KEEP) if stand.committed > image.step else each
            for stand, each in zip(stands, real_restored(stands, image, known), strict=True)
        )

    monkeypatch.setattr(resolve, "_restored", restored)


def live_state_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_(stands: Sequence[Stand], known: Known) -> tuple[Resolved, ...]:
        image = resolve._newest(stands, known)
        again = any(stand.restored for stand in stands)
        return real_restored(stands, image, known) if image and not again else real_resolve(stands, known)

    monkeypatch.setattr(resolve, "resolve", resolve_)


def each_restores_its_own_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    def restored(stands: Sequence[Stand], image: Image, known: Known) -> tuple[Resolved, ...]:
        own = [kept.newest([stand.kept], (), ()) or image for stand in stands]
        return tuple(real_restored(stands, mine, known)[role] for role, mine in enumerate(own))

    monkeypatch.setattr(resolve, "_restored", restored)


def restores_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_tell_restored", lambda member, good, mark: commit._boundary(real_reached(member)))


def floor_of_before_a_rollback_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_(stands: Sequence[Stand], known: Known) -> tuple[Resolved, ...]:
        return real_resolve([replace(stand, rollbacks=()) for stand in stands], known)

    monkeypatch.setattr(resolve, "resolve", resolve_)


def busy_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "agreed", max)


def what_may_be_wrong_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_newest", lambda stands, known, trusted=None: real_newest(stands, known))


def marks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrupt, "odd", lambda marks, shards: None)


def doubt_is_forgotten_in_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_void", lambda rollbacks, trusted=None: Stand(rollbacks=rollbacks))


def gradients_of_a_first_pass_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(member: Member, event: p.Event) -> commit.Outcome:
        member, commands = real_step(member, event)
        if isinstance(event, p.Reduced) and member.phase is Phase.VOTING:
            member = replace(member, stand=replace(member.stand, voted_in=member.epoch))
        return member, commands

    monkeypatch.setattr(commit, "step", counted)


def gradients_of_a_doubtful_step_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(member: Member, turn: int) -> commit.Outcome:
        after, commands = real_once_more(member, turn)
        return replace(after, stand=member.stand), commands

    monkeypatch.setattr(commit, "_once_more", counted)


def a_new_epoch_goes_on_with_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def goes_on(member: Member, stands: tuple[Stand, ...]) -> commit.Outcome:
        after, commands = real_decide_resolve(member, stands)
        return replace(after, turn=member.turn), commands

    monkeypatch.setattr(commit, "_resolve", goes_on)


SHARDED = Scenario(2, 1, steps=2, deaths=1, shards=2, to_memory=(1,))
DOUBTED = Scenario(2, steps=3, to_memory=(1, 2), flips=1)
BROKEN: list[tuple[Patch, Scenario]] = [
    (some_voted, Scenario(2, blips=1)),
    (leaver_has_a_say, Scenario(2, 1, steps=2, deaths=1, plans=("swap",))),
    (no_roll_forward, Scenario(2, 1, deaths=1)),
    (voted_in_not_compared, WORLDS["fenced member seated again"]),
    (newcomer_counts_as_holder, Scenario(2, 1, deaths=1)),
    (floor_ignored, Scenario(2, 1, deaths=2)),
    (skip_forgotten, Scenario(2, blips=1, nonfinite="mixed")),
    (dropped_gradients_still_counted, Scenario(2, deaths=1, blips=1)),
    (vote_of_another_epoch_counts, Scenario(2, blips=1)),
    (switch_when_one_is_prepared, Scenario(2, 1, plans=("join",))),
    (applied_does_not_count_after_abort, Scenario(2, 1, deaths=1)),
    (torn_state_counts, Scenario(2, 1, deaths=2)),
    (older_formation_entered, Scenario(2, 1, deaths=2)),
    (any_shard_will_do, Scenario(3, 1, deaths=1, shards=2)),
    (newer_state_is_kept, SHARDED),
    (live_state_given_up, SHARDED._replace(shards=1)),
    (each_restores_its_own_newest, SHARDED._replace(standbys=2, deaths=2, to_memory=(1, 2), to_disk=(1,))),
    (restores_are_not_compared, SHARDED._replace(damages=1)),
    (what_may_be_wrong_is_restored, DOUBTED),
    (marks_do_not_count, DOUBTED),
    (doubt_is_forgotten_in_a_restore, DOUBTED._replace(blips=1)),
    (gradients_of_a_first_pass_count, Scenario(2, steps=2, blips=1, audits=(1,))),
    (gradients_of_a_doubtful_step_count, Scenario(2, steps=2, blips=1, audits=(1,), slips=1)),
    (a_new_epoch_goes_on_with_the_next_pass, Scenario(2, steps=2, blips=1, audits=(1,))),
    (busy_does_not_count, Scenario(2, blips=1, to_memory=(1,), busy=(1,))),
    (floor_of_before_a_rollback_counts, SHARDED._replace(blips=1, deaf=True)),
]


@pytest.mark.parametrize(("broken", "scenario"), BROKEN, ids=[patch.__name__ for patch, _ in BROKEN])
def test_a_broken_rule_is_found(broken: Patch, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(Violation) as caught:
        explore(scenario)
    print(caught.value)


# One member ----------------------------------------------------------------------------------------------


def formation(epoch: int, *workers: str, abort: bool = False, floor: int = 0) -> Formation:
    return Formation(epoch, tuple(Seat(w, w, w, f"{w}:1") for w in workers), abort, floor)


def after(member: Member, *events: p.Event) -> tuple[Member, tuple[p.Command, ...]]:
    """The member after these events, and the commands of the last one."""
    commands: tuple[p.Command, ...] = ()
    for event in events:
        member, commands = commit.step(member, event)
    return member, commands


ALONE = formation(1, "a")
START = (p.FormationReceived(ALONE), p.Prepared(1), p.Stood(1, (Stand(fresh=True),)))


def test_a_world_of_one_commits() -> None:
    member, commands = after(Member("a"), *START)
    assert commands == (p.DropGradients(), p.Ready(1, 0))
    member, commands = after(member, p.Began(1), p.Reduced(1, finite=True))
    assert commands == (p.CastVote(1, p.Vote(finite=True, prepared=1)),)
    member, commands = after(member, p.Voted(1, (p.Vote(finite=True, prepared=1),)))
    assert commands == (p.Apply(0),)
    member, commands = after(member, p.Applied())
    assert commands == (p.Ready(1, 1),)


def test_non_finite_gradients_are_committed_without_apply() -> None:
    votes = (p.Vote(finite=False, prepared=1),)
    member, commands = after(Member("a"), *START, p.Began(1), p.Reduced(1, finite=False), p.Voted(1, votes))
    assert commands == (p.DropGradients(), p.Ready(1, 1))
    assert member.stand == Stand(1, commit_epoch=1, skipped=True)


def test_a_round_that_completes_late_changes_nothing() -> None:
    voting, _ = after(Member("a"), *START, p.Began(1), p.Reduced(1, finite=True))
    left, commands = after(voting, p.FormationReceived(formation(2, "a", "b", abort=True)))
    assert commands == (p.Abort(1), p.Prepare(formation(2, "a", "b", abort=True)))
    assert after(left, p.Voted(1, (p.Vote(finite=True, prepared=1),))) == (left, ())
    _, commands = after(left, p.Prepared(2))
    assert commands[1] == p.PublishStand(2, Stand(voted_in=1, committed=0, acted_in=1))


def test_an_abort_inside_apply_waits_for_it() -> None:
    vote = p.Voted(1, (p.Vote(finite=True, prepared=1),))
    again = formation(2, "a", abort=True)
    member, _ = after(Member("a"), *START, p.Began(1), p.Reduced(1, finite=True), vote)
    member, commands = after(member, p.FormationReceived(again), p.Prepared(2))
    assert (member.phase, commands) == (Phase.APPLYING, ())
    member, commands = after(member, p.Applied())
    assert commands == (p.Switch(again), p.PublishStand(2, Stand(1, commit_epoch=1, acted_in=1)))


def test_a_fenced_worker_does_nothing_any_more() -> None:
    member, commands = after(Member("a"), *START, p.Began(1), p.FormationReceived(formation(2, "b", abort=True)))
    assert commands == (p.Abort(1), p.Fenced(2))
    assert after(member, p.Reduced(1, finite=True), p.Applied(), p.FormationReceived(ALONE)) == (member, ())


def test_a_leaver_goes_at_the_end_of_the_step() -> None:
    plan = formation(2, "b")
    member, commands = after(Member("a"), *START, p.Began(1), p.FormationReceived(plan))
    assert commands == ()
    member, commands = after(member, p.Reduced(1, finite=True))
    assert commands == (p.CastVote(1, p.Vote(finite=True, prepared=2)),)
    member, commands = after(member, p.Voted(1, (p.Vote(finite=True, prepared=2),)), p.Applied())
    assert (member.phase, commands, member.stand.committed) == (Phase.LEFT, (p.Leave(),), 1)


def test_a_standby_waits_and_goes_back_to_waiting() -> None:
    seated = formation(2, "a", "s", abort=True)
    standby, commands = after(Member("s"), p.FormationReceived(ALONE))
    assert (standby.phase, commands) == (Phase.STANDBY, ())
    joining, commands = after(standby, p.FormationReceived(seated))
    assert (joining.phase, commands) == (Phase.FORMING, (p.Prepare(seated),))
    back, commands = after(joining, p.FormationReceived(formation(3, "a", abort=True)))
    assert (back.phase, commands) == (Phase.STANDBY, ())
    assert after(back, p.Prepared(2), p.FormationReceived(seated)) == (back, ())


def test_lost_state_is_said() -> None:
    only = formation(4, "s", abort=True, floor=7)
    member, commands = after(Member("s"), p.FormationReceived(only), p.Prepared(4), p.Stood(4, (Stand(fresh=True),)))
    assert (member.phase, commands) == (Phase.LOST, (p.StateLost(0, 7),))


def test_what_one_wants_kept_all_keep() -> None:
    pair = formation(1, "a", "b")
    voting, _ = after(Member("a"), p.FormationReceived(pair), p.Prepared(1), p.Stood(1, (Stand(fresh=True),) * 2))
    voting, commands = after(voting, p.Began(1), p.Reduced(1, finite=True, keep=Tier.MEMORY))
    assert commands == (p.CastVote(1, p.Vote(finite=True, prepared=1, keep=Tier.MEMORY)),)
    for finite in (True, False):
        votes = (p.Vote(finite, 1, Tier.MEMORY), p.Vote(finite, 1, Tier.DISK))
        assert after(voting, p.Voted(1, votes))[0].keep is Tier.DISK
    for wishes, decided in (
        ((Tier.MEMORY, Tier.BUSY), Tier.NOTHING),
        ((Tier.BUSY, Tier.DISK), Tier.DISK),
        ((Tier.BUSY, Tier.BUSY), Tier.NOTHING),
    ):
        votes = tuple(p.Vote(finite=True, prepared=1, keep=wish) for wish in wishes)
        assert after(voting, p.Voted(1, votes))[0].keep is decided
    again = formation(2, "a", "b", abort=True)
    stands = (Stand(0, voted_in=1, acted_in=1),) * 2
    rolled, commands = after(voting, p.FormationReceived(again), p.Prepared(2), p.Stood(2, stands))
    assert (commands, rolled.keep) == ((p.Apply(0),), Tier.NOTHING)  # nobody here knows what was voted


def test_a_restore_is_void_until_all_have_told_of_it() -> None:
    pair = formation(7, "a", "b", abort=True, floor=9)
    kept_by_a = Stand(fresh=True, kept=(Kept(6, 0, 1, epoch=3),))
    first = p.FormationReceived(pair), p.Prepared(7), p.Stood(7, (kept_by_a, Stand(fresh=True)))
    member, commands = after(Member("b"), *first)
    goal = Stand(6, commit_epoch=3, rollbacks=(Rollback(7, 6),), verified=6)
    assert (member.stand, commands) == (Stand(), (p.DropGradients(), p.Restore(7, (0,), goal)))
    told, commands = after(member, p.Restored(7, good=True, fingerprint=5))
    assert commands == (p.PublishStand(7, replace(goal, restored=True, fingerprint=5), round=1),)
    assert told.stand == Stand()
    same = replace(goal, restored=True, fingerprint=5)
    done, commands = after(told, p.Stood(7, (same, same)))
    assert (done.stand, commands) == (goal, (p.DropGradients(), p.Ready(7, 6)))
    failed, commands = after(member, p.Restored(7, good=False))
    assert commands == (p.PublishStand(7, Stand(failed=((6, 3),)), round=1),)
    _, commands = after(failed, p.Stood(7, (same, Stand(failed=((6, 3),)))))
    assert commands == (p.DropGradients(), p.Fetch(7, 0, goal))
    lost, _ = after(failed, p.Stood(7, (Stand(failed=((6, 3),)), Stand(failed=((6, 3),), kept=kept_by_a.kept))))
    assert lost.phase is Phase.LOST
    before = (Rollback(5, 8),)  # going back to step 6 makes it needless, unless that fails
    member, _ = after(Member("b"), *first[:2], p.Stood(7, (replace(kept_by_a, rollbacks=before), Stand(fresh=True))))
    assert member.stand == Stand(rollbacks=before) and member.goal == goal
