"""Jobs that work on until what follows a loss is ready: switches that find nobody, and saves that they tear."""

from __future__ import annotations

import random
from typing import Any

import pytest

from everstep.core.errors import UsageError
from everstep.sim.engine import Engine
from everstep.sim.result import Result
from everstep.sim.scenario import build

RATES = {"4": 6.0, "3": 5.0, "2": 3.0, "1": 2.0}  # 60 samples a step: of 10 s with four nodes, then 12, 20
FOUR = "".join(f"0,add,{name}\n" for name in "abcd")


def run(trace: str, until_s: float, saves: dict[str, Any], rates: dict[str, float] = RATES, **strategy: Any) -> Result:
    seconds = {"restart-workers": strategy.pop("restart_s", 30.0)}
    tree = {
        "duration_s": until_s,
        "cluster": {"nodes": 4, "accelerators_per_node": 1},
        "job": {"law": "table", "samples_per_s": rates, "samples_per_step": 60, "start_s": 25.0},
        "failures": [{"kind": "trace", "file": "trace"}],
        "saves": {"every_steps": 4, "stall_s": 5.0, "durable_s": 5.0, **saves},
        "strategy": {
            "preset": "varuna", "actions": ["restart-workers"], "seconds": seconds, "meanwhile": True, **strategy,
        },
    }  # fmt: skip
    return Engine(build(tree, "test"), random.Random(1), None, {"trace": FOUR + trace}).run()


@pytest.mark.parametrize(("overlap", "steps", "waited_s"), [("again", 2 + 3, 5 + 60), ("stands", 3, 35 * 4)])
def test_a_switch_that_nobody_waits_for(overlap: str, steps: int, waited_s: int) -> None:
    """a goes while the job forms, without it: what follows at 50 finds nobody. What follows b, at 85, takes all."""
    result = run("20000,remove,a\n55000,remove,b", 85 + 60.5, {"every_steps": 100}, overlap=overlap)
    assert (result.steps, result.steps_redone) == (steps, 2)
    spent = {name: seconds for name, seconds in result.accelerator_s.items() if abs(seconds) > 1e-6}
    assert spent.pop("waiting for capacity") == pytest.approx(5 + 25 + waited_s + 2 * 60.5)
    assert spent.pop("start") == pytest.approx(20 * 4 + 5 * 3)
    assert set(spent) == {"productive", "redone work"}


# Steps end at 35, 45, 55, 65; the save of four counts from 75 on. Three more are lost at 103, and made again by 130.
LOSS = "103000,remove,a"


@pytest.mark.parametrize(
    ("tears", "undoes", "steps"), [([1], 2, 5), ([1], 5, 5), ([1], 8, 4), ([1], 99, 1), ([2], 2, 9), ([], 2, 9)]
)
def test_a_switch_tears_the_save_under_way(tears: list[int], undoes: int, steps: int) -> None:
    """At 148 that of the eighth step, made at 140. Eight steps before it, redone ones among them, was the third."""
    result = run(LOSS, 148 + 12.1, {"failed_undoes": undoes}, restart_s=45.0, tears=tears)
    assert result.steps == steps
    assert result.steps_redone == 3 + 9 - steps


@pytest.mark.parametrize(("tears", "steps"), [([1], 4 + 2), ([], 8 + 2)])
def test_so_does_the_step_that_it_cuts_off(tears: list[int], steps: int) -> None:
    """It would have ended at 140, when the save of the eighth step, made at 133.5, does not count yet."""
    fast = {**RATES, "3": 30.0}
    assert run(LOSS, 144, {"failed_undoes": 2}, fast, restart_s=28.5, tears=tears).steps == steps


@pytest.mark.parametrize(("undoes", "until_s", "steps"), [(6, 117.0, 2), (3, 117.0, 4), (6, 120.1, 8), (0, 117.0, 8)])
def test_so_does_the_end(undoes: int, until_s: float, steps: int) -> None:
    result = run("", until_s, {"failed_undoes": undoes})
    assert (result.steps, result.samples_per_s) == (steps, pytest.approx(60 * steps / (110 - 25)))


def test_a_pause_counts_but_not_the_step_after_it() -> None:
    """Back to four steps at 103, and on at 133."""
    result = run(LOSS, 140, {}, meanwhile=False)
    assert (result.steps, result.samples_per_s) == (4, pytest.approx(60 * 4 / (133 - 25)))


@pytest.mark.parametrize(
    ("key", "strategy"),
    [
        ("strategy.tears", {"tears": [1]}),
        ("strategy.tears", {"tears": [1], "meanwhile": False}),
        ("strategy.overlap", {"overlap": "stands", "meanwhile": False}),
    ],
)
def test_what_needs_what(key: str, strategy: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=key):
        run("", 100.0, {"failed_undoes": int("meanwhile" in strategy)}, **strategy)
