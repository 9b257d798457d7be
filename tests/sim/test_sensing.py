"""The shipped detectors in the simulator: what they see of a fault, and what they do not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from everstep.core import events as e
from everstep.core.decisions import Action
from everstep.sim.chance import Stream
from everstep.sim.engine import Engine
from everstep.sim.result import Result
from everstep.sim.samples import Crew, told
from everstep.sim.scenario import build
from everstep.sim.sensing import named_by_redo
from everstep.sim.stages import growth
from everstep.sim.standstill import stood
from everstep.sim.workload import Pipeline

Told = list[tuple[float, e.AnyEvent]]


def played(seed: int = 1, **changes: Any) -> tuple[Result, Told]:
    """Four replicas of two nodes, steps of 10 s, a fault after 200 of them; `changes`: of whole tables."""
    tree: dict[str, Any] = {"days": 0.2, "cluster": {"nodes": 8, "standbys": 1}, "seed": seed}
    tree |= {"job": {"replicas": 4, "step_s": 10.0, **changes.pop("job", {})}, "saves": {"every_steps": 5}, **changes}
    said: Told = []
    engine = Engine(build(tree, "test"), random.Random(seed), lambda at_s, _, event: said.append((at_s, event)))
    return engine.run(), said


def fault(kind: str, **more: Any) -> list[dict[str, Any]]:
    return [{"kind": kind, "at_s": 2000.0, "node": 3, **more}]


def opened(said: Told) -> tuple[float, e.IncidentOpened]:
    """The only incident; seconds after the fault."""
    ((at_s, event),) = ((at_s, event) for at_s, event in said if isinstance(event, e.IncidentOpened))
    return at_s - 2000.0, event


def test_the_smaller_a_slow_down_the_later_it_is_found() -> None:
    """Unexplained noise of 10 %; over some seeds, as one trial says little."""
    crew, never = Crew(32, 0.0, 0.1, 0.1), 300
    means = []
    for slowdown in (2.0, 1.35, 1.2, 1.12):
        found = [told(crew, slowdown, 64, Stream(seed / 10).random()) for seed in range(5)]
        means.append(sum(each.steps if each else never for each in found) / len(found))
    assert means == sorted(means) and means[0] < 6 and means[-1] > 100


def test_a_verdict_is_the_detector_s_and_is_told_once_it_has_lasted() -> None:
    result, said = played(job={"jitter": 0.3}, faults=fault("slow", slowdown=1.5, lasts_s=20000.0))
    after_s, incident = opened(said)
    (judged,) = (event for _, event in said if isinstance(event, e.SlowJudged))
    assert [blame.node for blame in incident.culprits] == ["n3"]
    assert judged.phase == "compute" and judged.slowdown == pytest.approx(0.5, abs=0.12) and judged.slowdown != 0.5
    assert 199 <= judged.since <= 202 < judged.step <= 208
    assert 30 <= after_s <= 120
    assert result.actions["evict-node"] == 1 and not result.unnoticed
    assert sum(isinstance(event, e.IncidentClosed) for _, event in said) == 1


def test_a_slow_down_has_to_last_for_as_long_as_in_a_live_job() -> None:
    _, said = played(job={"step_s": 0.5}, faults=fault("slow", slowdown=1.5, lasts_s=1000.0))
    assert 10.0 < opened(said)[0] < 15.0, "a few steps are enough to be sure, and [straggler] lasts_s are 10 s"


def test_the_same_seed_hears_the_same_of_the_detectors() -> None:
    faults = {
        "job": {"noise": 0.1},
        "failures": [{"kind": "slow", "rate": 3000.0, "slowdown": 1.3}, {"kind": "silent", "rate": 500.0}],
        "faults": fault("hang"),
    }
    (_, one), (_, again), (_, other) = played(7, **faults), played(7, **faults), played(8, **faults)
    assert one == again != other
    assert sum(isinstance(event, e.SlowJudged) for _, event in one) > 2


@pytest.mark.parametrize(("slowdown", "jitter"), [(1.03, 0.3), (1.07, 0.0)])
def test_three_percent_among_thirty_and_seven_under_the_threshold_go_unnoticed(slowdown: float, jitter: float) -> None:
    result, said = played(job={"jitter": jitter}, faults=fault("slow", slowdown=slowdown, lasts_s=5000.0))
    assert not any(isinstance(event, e.IncidentOpened) for _, event in said)
    assert result.unnoticed == {"slow": 1} and result.failures == 1
    assert result.shares["straggler loss"] > 0, "it costs all the same"


def test_a_number_in_the_scenario_and_another_system_do_not_ask_the_detectors() -> None:
    slow = {"job": {"jitter": 0.3}, "faults": fault("slow", slowdown=1.03, lasts_s=5000.0)}
    assert opened(played(**slow, strategy={"slow_detect_s": 7.0})[1])[0] == pytest.approx(7.0)
    assert opened(played(**slow, strategy={"preset": "trainmover"})[1])[0] == pytest.approx(60.0)


def test_nobody_knows_how_fast_a_newcomer_should_be() -> None:
    """Node 8 takes a seat, and is slow in its first steps: told when two thirds slower, not when a fifth. A slow one
    that is known stays known."""
    strategy = {"actions": ["promote-standby", "leave-it"], "seconds": {"promote-standby": 2000.0}}
    for slowdown, told_ones in ((1.66, ["n3", "n8"]), (1.2, ["n3"])):
        known = fault("slow", slowdown=1.5, lasts_s=1e5)
        lost = {"kind": "node-lost", "at_s": 2200.0, "node": 6}
        newcomer = {"kind": "slow", "at_s": 4300.0, "node": 8, "slowdown": slowdown, "lasts_s": 1e5}
        _, said = played(faults=[*known, lost, newcomer], strategy=strategy)
        judged = [event.verdict.culprits[0].node for _, event in said if isinstance(event, e.SlowJudged)]
        assert judged == told_ones


def test_a_hang_is_found_near_the_learned_limit() -> None:
    """Five times the longest step, from the last one on; half an hour in a job's first steps and at the first step of
    who is the first to begin anew; later such ones have five minutes. Their second step is no start."""
    for members in (1, 2, 3):
        found = stood(members, 10.0, 0.0, 5, Stream(0.3))
        assert found.right and 44.0 < found.took_s < 51.0
    assert stood(3, 10.0, 0.3, 5, Stream(0.3)).took_s > 51.0
    assert stood(3, 1.0, 0.0, 5, Stream(0.3)).took_s == pytest.approx(30.0, abs=1.0)
    assert stood(3, 10.0, 0.0, 2, Stream(0.3)).took_s == pytest.approx(1800.0, abs=20.0)
    assert stood(3, 10.0, 0.0, 0, Stream(0.3), 1).took_s == pytest.approx(1800.0, abs=20.0)
    assert stood(3, 10.0, 0.0, 0, Stream(0.3), 2).took_s == pytest.approx(300.0, abs=20.0)
    assert stood(3, 10.0, 0.0, 1, Stream(0.3), 2).took_s == pytest.approx(50.0, abs=10.0)


def test_so_a_job_stands_still_for_as_long() -> None:
    result, said = played(faults=fault("hang"))
    (closed,) = (event for _, event in said if isinstance(event, e.IncidentClosed))
    assert 44.0 < closed.phases["detect"] < 51.0
    assert result.accelerator_s["detection"] == pytest.approx(64 * closed.phases["detect"])
    kills = [{"kind": "kill", "at_s": at_s, "node": 1} for at_s in (500.0, 1000.0)]
    for faults, limit_s in (
        ([{"kind": "hang", "at_s": 25.0, "node": 3}], 1800),
        ([kills[1], {"kind": "hang", "at_s": 1003.0, "node": 3}], 1800),
        ([*kills, {"kind": "hang", "at_s": 1003.0, "node": 3}], 300),
    ):
        early, _ = played(faults=faults)
        assert early.accelerator_s["detection"] == pytest.approx(64 * limit_s, rel=0.03)


@pytest.mark.parametrize(("nodes", "replicas", "suspects"), [(8, 4, ["n3"]), (4, 2, ["n1", "n3"])])
def test_a_flipped_bit_is_found_at_the_next_comparison(nodes: int, replicas: int, suspects: list[str]) -> None:
    """Every 25 steps: 0.875 s is 0.35 % of 250 s. Of two nobody is named before the steps are done again."""
    job = {"replicas": replicas, "compare_s": 0.875}
    _, said = played(job=job, cluster={"nodes": nodes}, faults=fault("corrupt", at_step=205))
    incident = next(event for _, event in said if isinstance(event, e.IncidentOpened))
    steps = max(event.total_step for at_s, event in said if isinstance(event, e.StepsSeen) and at_s < 2260)
    assert steps == 225
    assert sorted(blame.node for blame in incident.culprits) == suspects
    assert {blame.cause for blame in incident.culprits} == {f"silent-corruption{'?' * (replicas == 2)}"}
    named = [[blame.node for blame in event.culprits] for _, event in said if isinstance(event, e.IncidentUpdated)]
    assert named == ([["n3"]] if replicas == 2 else [])
    made = [event.decision.action for _, event in said if isinstance(event, e.Decided)]
    assert made == [Action.ROLL_BACK]


def test_without_a_second_replica_nobody_ever_knows() -> None:
    result, said = played(job={"replicas": 1}, faults=fault("corrupt"))
    assert result.unnoticed == {"silent": 1}
    assert not any(isinstance(event, e.IncidentOpened) for _, event in said)


def test_of_two_the_redo_names_the_wrong_one_wherever_the_flip_was() -> None:
    assert [named_by_redo(10, wrong) for wrong in (3, 9, 10, 11)] == [(0,)] * 4


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "varuna"])
def test_a_slow_stage_costs_what_it_adds_to_the_critical_path(schedule: str) -> None:
    """1F1B: a stage computes in 16 of 19 slots, and what it waits in at the ends of the pipeline hides a part."""
    pipeline = Pipeline(schedule, 4, 16, 0.1, 0.2)
    grown = [growth(pipeline, 2, range(stage, stage + 1), 1.5) for stage in range(4)]
    assert all(1.0 < each < 1.5 for each in grown)
    if schedule == "1f1b":
        assert all(1 + 0.5 * 13 / 19 - 1e-9 <= each <= 1 + 0.5 * 16 / 19 + 1e-9 for each in grown)
    assert growth(pipeline, 2, range(4), 1.5) == pytest.approx(1.5)
    whole_s = pipeline.step_s(2, 2)
    reducing = Pipeline(schedule, 4, 16, 0.1, 0.2, update_s=whole_s)
    assert growth(reducing, 2, range(1), 1.5) == pytest.approx(1 + (grown[0] - 1) / 2)


def test_large_graphs_have_a_closed_form_that_agrees() -> None:
    for micro_batches, within in ((256, 0.01), (4096, 1e-9)):
        pipeline = Pipeline("1f1b", 8, micro_batches, 0.1, 0.2)
        closed = 1 + 0.3 * micro_batches / (micro_batches + 7)
        assert growth(pipeline, 1, range(1), 1.3) == pytest.approx(closed, rel=within)


def test_the_job_loses_only_that() -> None:
    job = {"replicas": 1, "pipeline": {"stages": 4, "micro_batches": 4, "forward_s": 1.0, "backward_s": 2.0}}
    slow = [{"kind": "slow", "at_s": 0.0, "node": 0, "slowdown": 2.0, "lasts_s": 1e6}]
    result, _ = played(job=job, cluster={"nodes": 4}, faults=slow, strategy={"actions": ["leave-it"]})
    grown = growth(Pipeline("1f1b", 4, 4, 1.0, 2.0), 1, range(1), 2.0)
    assert result.shares["straggler loss"] == pytest.approx(1 - 1 / grown, abs=0.01)
    assert 1.2 < grown < 1.8
