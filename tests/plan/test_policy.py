"""What is done about an incident: which action, why, and what else was weighed; costs, escalation, presets."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core import events as e
from everstep.core.decisions import Action, Decision
from everstep.core.errors import UsageError
from everstep.core.formation import Formation, Seat
from everstep.core.types import Exit, ExitCause, NodeLoss
from everstep.plan.costs import NODE, PROCESS, Accounts, Costs, key
from everstep.plan.escalation import Climb, bear, ladder, lost_to
from everstep.plan.policy import Situation, Tier, decide, price, why_not
from everstep.plan.presets import ARTIFACT, PRESETS, for_model, preset

A = Action
KINDS = ("crash", "exception", "hang", "node-lost", "slow", "corrupt", "drain", "grow")


def chosen(known: dict[str, object] | None = None, **facts: object) -> Action:
    facts = {**(known or {}), **facts}
    return decide(msgspec.structs.replace(Situation(kind="crash", workers=64), **facts), Costs()).action


def test_a_dead_member() -> None:
    steps = {"in_steps": True, "places": 1}
    assert chosen(steps, standbys=1) is A.PROMOTE
    assert chosen(steps) is A.SHRINK
    assert chosen(steps, fixed=True) is A.RESPAWN
    assert chosen(steps, fixed=True, places=0) is A.RESCHEDULE
    assert chosen(steps, fixed=True, copies=0, tiers=(Tier("memory", 3),)) is A.ROLL_BACK
    assert chosen(places=1) is A.RESTART
    assert chosen(places=1, repeats=3) is A.STOP
    assert chosen(places=1, restarts_left=0) is A.STOP


def test_a_job_is_never_given_up_because_going_on_is_dear() -> None:
    dear = Costs().saw(A.RESTART, 1e7)
    decision = decide(Situation(kind="crash", workers=64, places=1), dear)
    assert decision.action is A.RESTART
    assert next(other.loss_s for other in decision.alternatives if other.action is A.STOP) < decision.loss_s


def test_a_process_that_lives_on() -> None:
    raised = {"kind": "exception", "gone": False, "in_steps": True, "fixed": True, "places": 1}
    assert chosen(raised) is A.RETRY
    assert chosen(raised, tried=(A.RETRY,)) is A.RESPAWN
    assert chosen(raised, kind="corrupt", copies=0, tiers=(Tier("disk", 9),)) is A.ROLL_BACK


def test_a_pipeline() -> None:
    """What fits into the bubble is free; what does not competes with fewer workers, or a neighbour with two stages."""
    stage = {"in_steps": True, "fixed": True, "stages": 4, "replicas": 3, "micro_batches": 6, "workers": 12}
    assert chosen(stage) is A.REROUTE
    assert chosen(stage, redundant=True, micro_batches=64, replicas=2, workers=8) is A.REPARTITION
    assert chosen(stage, redundant=True, replicas=1, workers=4) is A.TAKE_OVER
    assert chosen(stage, replicas=1, workers=4, least=4) is A.RESCHEDULE
    assert chosen(stage, replicas=1, workers=12, least=4, expects=False) is A.REPARTITION


def test_a_lost_node_is_waited_for_only_as_long_as_that_is_cheaper() -> None:
    """Plain scripts: go on at once and restart once more when it is back, or wait. Learned times decide."""
    facts = {"kind": "node-lost", "workers": 8, "failed": 4, "least": 4}
    assert chosen(facts) is A.RESTART
    costs = Costs()
    for _ in range(20):
        costs = costs.saw(NODE, 1.0).saw(A.RESTART, 30.0)
    situation = msgspec.structs.replace(Situation(kind="", workers=8), **facts)
    assert decide(situation, costs).action is A.RESCHEDULE
    assert decide(msgspec.structs.replace(situation, expects=False), costs).action is A.RESTART


def test_every_action_is_kept_with_its_loss_or_the_reason() -> None:
    made = decide(Situation(kind="crash", workers=64, in_steps=True, places=1, step_s=2.0), Costs())
    assert {made.action, *(other.action for other in made.alternatives)} == set(Action)
    for other in made.alternatives:
        assert other.why and (other.loss_s < 0 or other.loss_s >= made.loss_s or other.action is A.STOP)
    again = msgspec.json.decode(msgspec.json.encode(e.Decided("I001", made)), type=e.Decided)
    assert again.decision == made


@given(
    st.sampled_from(KINDS), st.integers(1, 5000), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 4), st.integers(0, 4), st.integers(0, 2), st.floats(1, 3),
)  # fmt: skip
def test_something_can_always_be_done(
    kind: str, workers: int, failed: int, gone: bool, in_steps: bool, fixed: bool,
    standbys: int, places: int, copies: int, slowdown: float,
) -> None:  # fmt: skip
    situation = Situation(
        kind=kind, workers=workers, failed=min(failed, workers), gone=gone, in_steps=in_steps, fixed=fixed,
        standbys=standbys, places=places, copies=copies, slowdown=slowdown,
    )  # fmt: skip
    made = decide(situation, Costs())
    assert made.loss_s >= 0 and not why_not(made.action, situation)
    possible = [other.loss_s for other in made.alternatives if other.feasible and other.action is not A.STOP]
    assert made.action is A.STOP or all(made.loss_s <= loss_s for loss_s in possible)


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4))
def test_a_dearer_action_is_never_preferred_for_it(one_s: float, other_s: float) -> None:
    """Learning that promotions take longer never makes the policy promote where it did not."""
    low, high = sorted((one_s, other_s))
    situation = Situation(kind="crash", workers=64, in_steps=True, places=1, standbys=1)
    if decide(situation, Costs().saw(A.PROMOTE, low)).action is not A.PROMOTE:
        assert decide(situation, Costs().saw(A.PROMOTE, high)).action is not A.PROMOTE


# Costs --------------------------------------------------------------------------------------------------


def test_the_prior_counts_as_one_observation() -> None:
    costs = Costs()
    assert costs.seconds(A.PROMOTE, 1024) == pytest.approx(21.1)
    assert costs.saw(A.PROMOTE, 1.1).seconds(A.PROMOTE, 1024) == pytest.approx(11.1)
    assert costs.saw(A.PROMOTE, 1.1).seconds(A.PROMOTE, 4) == pytest.approx((1.1 + 0.082) / 2)
    assert costs.seconds(A.RESTART, 512) == pytest.approx(260)
    assert 260 < costs.seconds(A.RESTART, 700) < 300


def test_a_job_learns_from_its_incidents() -> None:
    accounts = Accounts()

    def saw(record: e.Record, now: float) -> list[tuple[str, float]]:
        return accounts.saw(record, now)

    exit = Exit(ExitCause.SIGNAL, 0.0, signal=9)
    assert saw(e.IncidentOpened("I001", "crash", (), ""), 10) == []
    assert saw(e.WorkerEnded(1, "n1", exit, 10.0), 10) == []
    assert saw(e.Decided("I001", Decision(A.SHRINK, 1.0, "")), 10) == []
    phases = {"detect": 2.0, "form": 0.1}  # how long nobody knew of it is the same whatever is done
    assert saw(e.IncidentClosed("I001", "recovered", 2.25, phases), 11) == [("shrink", 0.25)]
    seat = Seat("n1/1#1", "n1", "", "")
    assert saw(e.FormationMade(Formation(3, (seat,), False, 0)), 13) == [(PROCESS, 3.0)]
    assert saw(e.FormationMade(Formation(4, (seat,), False, 0)), 14) == []
    assert saw(e.NodeLost("n2", "i", NodeLoss.CLOSED), 20) == []
    assert saw(e.NodeJoined("n3", "i", "", 1), 27) == [(NODE, 7.0)]
    saw(e.Decided("I002", Decision(A.RESTART, 1.0, "")), 30)
    assert saw(e.IncidentClosed("I002", "job ended: no", -1.0), 31) == []


# Slow members -------------------------------------------------------------------------------------------


def test_nothing_is_done_until_the_loss_equals_the_price() -> None:
    situation = Situation(
        kind="slow", gone=False, workers=256, in_steps=True, standbys=1, spares=8, slowdown=1.34, replicas=32
    )
    rungs = ladder(situation, Costs())
    assert [rung.action for rung in rungs] == [A.REROUTE, A.EVICT]
    assert all(one.cost < two.cost and one.residual > two.residual for one, two in itertools.pairwise(rungs))
    climb, taken, seconds = Climb(), [], 0
    while len(taken) < len(rungs):
        climb, due = bear(climb, rungs, lost_to(1.0, 1.34, 256))
        seconds += 1
        taken += [(due.action, seconds)] if due else []
    rate = 1 - 1 / 1.34
    first = rungs[0].cost / 256 / rate
    second = first + rungs[1].cost / 256 / rate
    assert [at for _, at in taken] == pytest.approx([first, second], abs=2)
    assert bear(climb, rungs, 1e9)[1] is None


@given(st.floats(1.05, 3), st.floats(1, 1e5))
def test_ski_rental_costs_at_most_twice_what_one_who_knew_had_paid(slowdown: float, lasts_s: float) -> None:
    situation = Situation(kind="slow", gone=False, workers=64, in_steps=True, spares=8, slowdown=slowdown)
    rungs = tuple(rung for rung in ladder(situation, Costs()) if rung.action is A.EVICT)
    cure = rungs[0].cost
    climb, paid, step_s = Climb(), 0.0, lasts_s / 1000
    for _ in range(1000):
        if climb.taken:
            break
        lost = lost_to(step_s, slowdown, 64)
        climb, due = bear(climb, rungs, lost)
        paid += lost + (due.cost if due else 0.0)
    best = min(cure, lost_to(lasts_s, slowdown, 64))
    assert paid <= 2 * best + lost_to(step_s, slowdown, 64) + 1e-6


def test_no_slow_member_no_rung() -> None:
    assert ladder(Situation(kind="slow", gone=False, workers=64, in_steps=True, spares=8, slowdown=1.0), Costs()) == ()


# Other systems ------------------------------------------------------------------------------------------


def test_presets_do_what_their_systems_do() -> None:
    fault = Situation(
        kind="node-lost", workers=1024, failed=8, places=0, spares=8, standbys=8, in_steps=True, fixed=True, stages=8,
        replicas=16, micro_batches=64, redundant=True, tiers=(Tier("disk", 10),), step_s=5.0, least=64,
    )  # fmt: skip
    done = {}
    for name, each in PRESETS.items():
        seen = msgspec.structs.replace(fault, in_steps=each.in_steps)
        done[name] = decide(seen, each.costs, each.actions).action
    assert done == {
        "everstep": A.PROMOTE, "restart": A.RESTART, "nvrx": A.ROLL_BACK, "trainmover": A.PROMOTE,
        "oobleck": A.REPARTITION,
        "varuna": A.RESTART, "bamboo": A.TAKE_OVER, "parcae": A.REPARTITION, "recycle": A.REROUTE,
    }  # fmt: skip
    assert price(A.RESTART, fault, PRESETS["restart"].costs).down_s == pytest.approx(300)
    assert price(A.PROMOTE, fault, PRESETS["trainmover"].costs).down_s == pytest.approx(21.1)


def test_constants_of_the_artifact() -> None:
    assert set(ARTIFACT) == {"BERT-large", "GPT-2", "GPT-3-medium", "GPT-3-2_7b", "GPT-3-6_7b"}
    varuna = for_model("varuna", "GPT-3-6_7b")
    assert varuna.curves[key(A.RESTART)](30) == 701 and varuna.saving.cost_s == 120 and varuna.saving.every_steps == 10
    assert for_model("oobleck", "GPT-3-6_7b").costs.seconds(A.REPARTITION, 30) == pytest.approx(10)
    assert for_model("bamboo", "GPT-2").costs.seconds(A.TAKE_OVER, 30) == pytest.approx(80)
    for broken in (
        lambda: preset("megatron"),
        lambda: for_model("oobleck", "GPT-5"),
        lambda: for_model("nvrx", "GPT-2"),
    ):
        with pytest.raises(UsageError, match="there is no|no constants"):
            broken()
