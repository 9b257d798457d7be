"""The control plane's machines under random schedules of faults, and proof that broken machines do not pass them.

The full count runs from the command line: everstep schedules --count 10000.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from everstep.cli.schedules import replay, schedules
from everstep.control import lifecycle, membership, node, raised, reform, roles, saved, seating, seats, verdicts
from everstep.control.draft import Draft
from everstep.control.job import Incident, Job, NodeState
from everstep.core.events import WorkerEnded
from everstep.core.formation import Formation, Seat, SessionReport
from everstep.core.types import Action, Activity, Directive, EpochPlan, NodeReport
from everstep.testing.schedules import play, play_many

Patch = Callable[[pytest.MonkeyPatch], None]
SEEDS_TO_CATCH = 500


@pytest.mark.parametrize("first", [0, 500])
def test_invariants_hold_and_jobs_recover(first: int) -> None:
    """Twice as many as catch every broken machine; in two parts, as each takes seconds of a core."""
    summary = play_many(range(first, first + 500))
    assert summary.failures == [], "\n".join(
        f"everstep schedules --seed {f.seed} --trace\n{f.why}\n{f.where}" for f in summary.failures
    )
    assert summary.events > 100_000
    assert len(summary.faults) >= 15 and min(summary.faults.values()) >= 17, summary.faults
    assert {"runs", "finished", "failed"} <= set(summary.outcomes)


def test_same_seed_same_schedule() -> None:
    first: list[str] = []
    again: list[str] = []
    assert play(7, first) == play(7, again)
    assert first == again and len(first) > 20


def settles_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "settled", lambda self: True)


def takes_cut_off_nodes_for_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "longest_s", lambda self: 0.0)


def forgets_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node, "fence_after_s", lambda fence_s, num_members: float("inf"))


def ignores_incarnations(patch: pytest.MonkeyPatch) -> None:
    """Takes a new agent for the old one of the same name, and waits for it to stop what it never ran."""
    settled = Draft.settled

    def by_name(self: Draft) -> bool:
        plan, nodes = self.job.plan, self.job.nodes
        assert plan is not None
        here = [nodes[m.node] for m in plan.members if m.node in nodes]
        return settled(self) and all(n.stopped(plan.epoch) for n in here)

    patch.setattr(Draft, "settled", by_name)


def reuses_epochs(patch: pytest.MonkeyPatch) -> None:
    deal = membership.deal

    def same(epoch: int, *others: object) -> EpochPlan:
        return deal(max(1, epoch - 1), *others)  # type: ignore[arg-type]

    patch.setattr(membership, "deal", same)


def launches_before_the_old_epoch_is_gone(patch: pytest.MonkeyPatch) -> None:
    follow = node._Draft.follow

    def hasty(self: node._Draft) -> None:
        directive = self.node.directive
        if directive.action is Action.RUN and directive.epoch > self.node.report.epoch:
            self.launch(directive)
        else:
            follow(self)

    patch.setattr(node._Draft, "follow", hasty)
    # A cautious controller hides a hasty node: let it deal while cut-off nodes that are back still stop.
    patch.setattr(NodeState, "at_rest", property(lambda self: True))
    patch.setattr(Draft, "settled", lambda self: True)


def counts_lost_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verdicts, "_name_cause", lambda draft, incident: True)


def never_gives_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verdicts, "_give_up", lambda draft: False)


def never_kills(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node._Draft, "kill_when_due", lambda self: None)


def misses_workers_that_start_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node._Draft, "signal_late", lambda self, local_rank: None)


def obeys_older_directives(patch: pytest.MonkeyPatch) -> None:
    def directed(self: node._Draft, directive: Directive) -> None:
        self.set(directive=directive, silent_since_s=0.0)
        self.follow()

    patch.setattr(node._Draft, "directed", directed)


def believes_older_reports(patch: pytest.MonkeyPatch) -> None:
    reported = lifecycle._reported

    def believing(draft: Draft, report: NodeReport) -> None:
        known = draft.job.nodes.get(report.node)
        newer = known.report.seq + 1 if known else report.seq
        reported(draft, msgspec.structs.replace(report, seq=newer))

    patch.setattr(lifecycle, "_reported", believing)


def shuffles_ranks(patch: pytest.MonkeyPatch) -> None:
    seat = membership.seat
    patch.setattr(membership, "seat", lambda previous, chosen: seat((), chosen[::-1]))


def repeats_old_exits(patch: pytest.MonkeyPatch) -> None:
    def follow_stop(self: node._Draft, directive: Directive) -> None:
        if directive.epoch >= self.node.report.epoch:
            if self.activity in (Activity.RUNNING, Activity.STOPPING):
                self.begin_stop(directive)
            else:
                self.set_report(epoch=directive.epoch, activity=Activity.STOPPED)

    patch.setattr(node._Draft, "follow_stop", follow_stop)


def counts_on_memory(patch: pytest.MonkeyPatch) -> None:
    """State outside the job: a replay of the journal cannot see it."""
    opened: list[str] = []

    def open_incident(self: Draft, kind: str, culprits: object, why: str, counts: bool) -> None:
        opened.append(why)
        incident = Incident(f"I{len(opened)}", kind, (), why, self.now, counts)
        self.set(incident=incident, incidents=len(opened))

    patch.setattr(Draft, "open_incident", open_incident)


# Of jobs whose scripts have sessions --------------------------------------------------------------------


def leaves_a_survivor_out(patch: pytest.MonkeyPatch) -> None:
    without_dead = seats.without_dead

    def fewer(job: Job, formation: Formation, epoch: int) -> Formation | None:
        following = without_dead(job, formation, epoch)
        if following is None or len(following.seats) == 1:
            return following
        return msgspec.structs.replace(following, seats=following.seats[:-1])

    patch.setattr(seats, "without_dead", fewer)


def fences_only_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Workers that hang, or whose node was lost, keep their life."""
    next_life = seating.next_life

    def ended(draft: Draft, ranks: list[int]) -> None:
        next_life(draft, [rank for rank in ranks if rank in draft.job.ended])

    patch.setattr(seating, "next_life", ended)


def plans_while_a_change_is_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seats, "adopted", lambda job, formation: True)


def forgets_leavers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seats, "holders", lambda job, formation: formation.seats)


def tells_only_who_is_linked(patch: pytest.MonkeyPatch) -> None:
    """A controller that has just restarted tells nobody."""
    direct = Draft.direct

    def linked(self: Draft, name: str, action: Action, **fields: object) -> None:
        node = self.job.nodes.get(name)
        if action is not Action.RUN or (node is not None and not node.lost_at_s):
            direct(self, name, action, **fields)

    patch.setattr(Draft, "direct", linked)


def evicts_for_a_standby(patch: pytest.MonkeyPatch) -> None:
    react = reform.react

    def hasty(draft: Draft) -> bool:
        return not draft.job.ended and react(draft)

    patch.setattr(reform, "react", hasty)


def reuses_formations(patch: pytest.MonkeyPatch) -> None:
    issue = seating.issue

    def same(draft: Draft, formation: Formation) -> None:
        issue(draft, msgspec.structs.replace(formation, epoch=max(1, formation.epoch - 1)))

    patch.setattr(seating, "issue", same)


def takes_newcomers_for_survivors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seats, "may_hold", lambda job, worker: True)


def forgets_formations_out_of_sight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reform, "over", lambda draft: True)


def takes_leavers_for_finished(patch: pytest.MonkeyPatch) -> None:
    def complete(job: Job, formation: Formation) -> bool:
        return all(
            seats.ended_well(job, seat.worker) or not seats.may_hold(job, seat.worker) for seat in formation.seats
        )

    patch.setattr(seats, "complete", complete)


def gives_roles_to_who_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seats, "leaving", lambda job, worker: False)


def evicts_for_every_hang(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reform, "hung", lambda draft, verdict: False)


def respawns_beside_the_dying(patch: pytest.MonkeyPatch) -> None:
    def reseat(self: node._Draft) -> None:
        for worker in self.node.report.workers:
            life = node._life(self.node.directive, worker.local_rank)
            if life > worker.life and self.node.directive.epoch == self.node.report.epoch:
                self.change_worker(worker.local_rank, gone=False, exit=None, life=life, session=None)
                self.commands.append(node.Respawn(worker.local_rank, life))

    patch.setattr(node._Draft, "reseat", reseat)


def fills_beyond_the_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seats, "target", lambda job: 99)


# Of jobs whose number of members may not change, and of functions that raise -----------------------------


def shrinks_though_it_may_not(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roles, "refilled", seats.without_dead)


def grows_though_it_may_not(patch: pytest.MonkeyPatch) -> None:
    changed = seats.changed

    def any_size(job: Job, formation: Formation, epoch: int) -> Formation | None:
        return changed(msgspec.structs.replace(job, fixed=False), formation, epoch)

    patch.setattr(seats, "changed", any_size)


def moves_survivors(patch: pytest.MonkeyPatch) -> None:
    refilled = roles.refilled

    def turned(job: Job, formation: Formation, epoch: int) -> Formation | None:
        following = refilled(job, formation, epoch)
        if following is None:
            return None
        return msgspec.structs.replace(following, seats=(*following.seats[1:], following.seats[0]))

    patch.setattr(roles, "refilled", turned)


def counts_a_death_as_long_as_it_waits(patch: pytest.MonkeyPatch) -> None:
    wait = reform._wait

    def forgetful(draft: Draft, formation: Formation) -> None:
        wait(draft, formation)
        draft.set(vacant=frozenset())

    patch.setattr(reform, "_wait", forgetful)


def takes_who_waits_for_hung(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reform, "_not_waiting", lambda job, formation, ranks: ranks)


def waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reform, "_overdue", lambda draft: False)


def lets_leavers_stay_beside_their_followers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reform, "_stop_leavers", lambda draft, following: None)


def waits_for_who_is_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reform, "_replace", lambda draft, workers: None)


def hears_no_failures(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seats, "raised", lambda job, formation: [])


def hears_failures_of_older_formations(patch: pytest.MonkeyPatch) -> None:
    def ever(job: Job, formation: Formation) -> list[SessionReport]:
        members = [seats.sessions_of(job).get(seat.worker) for seat in formation.seats]
        return [said for said in members if said is not None and said.failure]

    patch.setattr(seats, "raised", ever)


def counts_collateral(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(raised, "may_be_collateral", lambda draft, failed: False)


def never_replaces_a_process_that_raises(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(raised, "again", lambda job, formation, blames: [])


def replaces_every_process_that_raises(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(raised, "again", lambda job, formation, blames: [blame.rank for blame in blames])


def counts_no_failures(patch: pytest.MonkeyPatch) -> None:
    charge = verdicts.charge

    def only_deaths(draft: Draft, ends: Sequence[WorkerEnded] = ()) -> bool:
        return True if ends else charge(draft)

    patch.setattr(verdicts, "charge", only_deaths)


def starts_over_and_says_nothing(patch: pytest.MonkeyPatch) -> None:
    real = seats.form

    def form(job: Job, epoch: int, members: Sequence[Seat], abort: bool) -> Formation:
        made = real(job, epoch, members, abort)
        return made if job.formation is not None else msgspec.structs.replace(made, floor=0)

    patch.setattr(seats, "form", form)


def knows_of_no_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saved, "_rolled_back", lambda draft, rollback: None)


WITHOUT_SESSIONS: list[Patch] = [
    settles_too_early,
    takes_cut_off_nodes_for_dead,
    forgets_the_fence,
    ignores_incarnations,
    reuses_epochs,
    launches_before_the_old_epoch_is_gone,
    counts_lost_nodes,
    never_gives_up,
    never_kills,
    misses_workers_that_start_late,
    obeys_older_directives,
    believes_older_reports,
    shuffles_ranks,
    repeats_old_exits,
    counts_on_memory,
]
WITH_SESSIONS: list[Patch] = [
    leaves_a_survivor_out,
    fences_only_the_dead,
    plans_while_a_change_is_under_way,
    forgets_leavers,
    tells_only_who_is_linked,
    evicts_for_a_standby,
    reuses_formations,
    takes_newcomers_for_survivors,
    forgets_formations_out_of_sight,
    takes_leavers_for_finished,
    gives_roles_to_who_leaves,
    evicts_for_every_hang,
    respawns_beside_the_dying,
    fills_beyond_the_size,
    shrinks_though_it_may_not,
    grows_though_it_may_not,
    moves_survivors,
    counts_a_death_as_long_as_it_waits,
    takes_who_waits_for_hung,
    waits_for_ever,
    lets_leavers_stay_beside_their_followers,
    waits_for_who_is_through,
    hears_no_failures,
    hears_failures_of_older_formations,
    counts_collateral,
    never_replaces_a_process_that_raises,
    replaces_every_process_that_raises,
    counts_no_failures,
    starts_over_and_says_nothing,
    knows_of_no_rollback,
]


@pytest.mark.parametrize("mutant", WITHOUT_SESSIONS + WITH_SESSIONS, ids=lambda mutant: mutant.__name__)
def test_broken_machine_is_caught(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    odd = mutant in WITH_SESSIONS  # these are the schedules in which scripts have sessions
    seeds = range(1, 2 * SEEDS_TO_CATCH, 2) if odd else range(SEEDS_TO_CATCH)
    summary = play_many(seeds, stop_at=1)
    assert summary.failures, f"{mutant.__name__} passed {SEEDS_TO_CATCH} schedules"
    print(f"{mutant.__name__}: seed {summary.failures[0].seed}: {summary.failures[0].why}")


def test_a_failing_seed_is_replayed_with_its_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(3, 5) == 0
    assert "seed 3 holds" in capsys.readouterr().out
    reuses_epochs(monkeypatch)
    assert schedules(count=3, jobs=1) == 1
    assert "everstep schedules --seed 0 --trace" in capsys.readouterr().out
    assert schedules(seed=0, trace=True) == 1
    said = capsys.readouterr().out
    assert "controller: life 1 begins" in said and "Violation" in said
