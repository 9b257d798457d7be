"""Jobs of whole pipelines: who waits without a role, who computes for a lost neighbour, and when all form anew."""

from __future__ import annotations

import random
from typing import Any

import pytest

from everstep.core.decisions import Action
from everstep.core.errors import UsageError
from everstep.sim.engine import Engine
from everstep.sim.result import Result
from everstep.sim.scenario import build

RATES = {"7": 12.0, "6": 10.0, "5": 6.0, "4": 6.0, "3": 6.0}  # 60 samples a step: of 5 s with seven nodes
SEVEN = "".join(f"0,add,{name}\n" for name in "abcdefg")  # pipelines abc, def; g waits


def run(trace: str, until_s: float, nodes: int = 7, ready: str = "", **strategy: Any) -> Result:
    tree = {
        "duration_s": until_s,
        "cluster": {"nodes": nodes, "accelerators_per_node": 1, "ready": list(ready)},
        "job": {"law": "table", "samples_per_s": RATES, "samples_per_step": 60, "pipeline_nodes": 3},
        "failures": [{"kind": "trace", "file": "trace"}],
        "strategy": {
            "preset": "bamboo", "seconds": {"take-over-by-redundancy": 10.0, "restart-workers": 20.0}, **strategy,
        },
    }  # fmt: skip
    return Engine(build(tree, "test"), random.Random(1), None, {"trace": trace}).run()


def test_the_step_is_made_at_a_slower_pace_then_all_meet() -> None:
    """3 s of a step of 5 are left and take 4.5; 10 s later steps of six nodes begin, of 6 s."""
    begin_s = 12 + 4.5 + 10
    assert run(SEVEN + "12000,remove,b", begin_s + 0.1).steps == 3
    assert run(SEVEN + "12000,remove,b", 16.4).steps == 2
    later = run(SEVEN + "12000,remove,b", begin_s + 60.1)
    assert (later.steps, later.steps_redone, later.actions) == (3 + 10, 0, {Action.TAKE_OVER.value: 1})
    spent = {name: seconds for name, seconds in later.accelerator_s.items() if seconds > 1e-6}
    assert spent.pop("redundant work") == pytest.approx(5 * 1.5)
    assert spent.pop("recovery") == pytest.approx(6 * 10)
    assert spent.pop("waiting for capacity") == pytest.approx(12 + 2 * 4.5 + 10 + 60.1), "g, then b and g, then b"
    assert set(spent) == {"productive"}


@pytest.mark.parametrize(("slows", "steps"), [(False, 12), (True, 8)])
def test_one_without_a_role_goes(slows: bool, steps: int) -> None:
    """Nobody forms anew for it; in Bamboo's simulator the job is slower all the same: 2.4 steps, then 48 s of 7.5."""
    result = run(SEVEN + "12000,remove,g", 60.1, idle_slows=slows)
    assert (result.steps, result.actions, result.failures) == (steps, {}, 1)


def test_all_form_anew_also_ends_the_slowness_by_one_without_a_role() -> None:
    """2.4 steps, the third ends at 16.5; b goes at 20 in the fourth, which ends at 24; from 34 on a step takes 10 s."""
    assert run(SEVEN + "12000,remove,g\n20000,remove,b", 34 + 30.1, idle_slows=True).steps == 4 + 3


@pytest.mark.parametrize(("second", "restarts"), [("b", 1), ("c", 1), ("d", 0), ("g", 0)])
def test_a_stage_that_is_lost_with_its_copy_makes_all_restart(second: str, restarts: int) -> None:
    result = run(SEVEN + f"12000,remove,a\n13000,remove,{second}", 100)
    assert result.actions.get(Action.RESTART.value, 0) == restarts


def test_who_goes_while_all_meet_makes_them_meet_again() -> None:
    """They meet at 16.5, and again at 20, when five are left: steps of 10 s from 30 on, not 26.5."""
    assert run(SEVEN + "12000,remove,b\n20000,remove,g", 30 + 17).steps == 3 + 1


def test_first_roles_by_readiness_later_ones_by_number() -> None:
    lost = run(SEVEN + "12000,remove,a", 60, ready="gfedcba")
    assert lost.actions == {}, "a was the last to be ready: it had no role"
    again = run(SEVEN + "12000,remove,c\n60000,remove,b", 100, ready="gfedcba")
    assert again.actions == {Action.TAKE_OVER.value: 2}
    with pytest.raises(UsageError, match=r"cluster\.ready"):
        run(SEVEN, 60, ready="abc")


def test_who_comes_gets_a_role_when_there_can_be_one_pipeline_more() -> None:
    """The step under way ends at 20, all meet until 30, then steps take 6 s. Of four, one more makes no pipeline."""
    five = SEVEN.replace("0,add,f\n0,add,g\n", "")
    assert run(five + "12000,add,f", 60.1, nodes=6).steps == 2 + 5
    assert run(five.replace("0,add,e\n", "") + "12000,add,e", 60.1, nodes=6).steps == 6


def test_with_too_few_for_a_pipeline_the_job_waits() -> None:
    """The second step ends at 24 with two nodes, who cannot meet; a third one comes at 100, with a new process."""
    three = "0,add,a\n0,add,b\n0,add,c\n"
    assert run(three + "12000,remove,b", 99, nodes=3).steps == 2
    assert run(three + "12000,remove,b\n100000,add,h", 110 + 60.1, nodes=3).steps == 2 + 6
    assert run("5000,add,a\n5000,add,b\n5000,add,c", 35.1, nodes=3).steps == 3


@pytest.mark.parametrize("preset", ["bamboo", "oobleck"])
def test_every_accelerator_second_is_in_one_bucket(preset: str) -> None:
    kinds = [{"kind": "slow", "rate": 400.0}, {"kind": "silent", "rate": 40.0}, {"kind": "maintenance", "rate": 100.0}]
    for seed in range(3):
        tree = {
            "days": 10,
            "cluster": {"nodes": 30, "accelerators_per_node": 2, "standbys": 2, "repair_s": 9000.0},
            "job": {
                "law": "table", "samples_per_s": {str(n): 3.0 * (n // 6) for n in range(6, 31)},
                "samples_per_step": 40, "pipeline_nodes": 6,
            },
            "failures": [{"kind": "exponential", "rate": 900.0, "causes": "llama3"}, *kinds],
            "strategy": {"preset": preset, "idle_slows": True, "detect_s": 3.0},
        }  # fmt: skip
        result = Engine(build(tree, "test"), random.Random(seed)).run()
        assert sum(result.accelerator_s.values()) == pytest.approx(result.wall_s * 64, rel=1e-3)
        assert min(result.accelerator_s.values()) > -1e-3
        assert result.failures > 50
        assert result.goodput > 0.3


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"job": {"pipeline_nodes": 3}}, r"job\.pipeline_nodes"),
        ({"strategy": {"idle_slows": True}}, r"strategy\.idle_slows"),
        ({"cluster": {"ready": ["a"]}}, r"cluster\.ready"),
    ],
)
def test_what_needs_whole_pipelines_says_so(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError, match=key):
        build({"days": 1, **tree}, "test")
