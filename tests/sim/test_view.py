"""A simulated job's view is a fold over the events it tells, and has the numbers of its books."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import published as p
import pytest

from everstep.cli.sim import cases_of
from everstep.core import events as e
from everstep.observe.view import View
from everstep.plan.presets import PRESETS
from everstep.sim.engine import Engine
from everstep.sim.result import Result
from everstep.sim.scenario import Scenario, build
from everstep.testing.accounts import add_up

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
CLOSE = 2e-3  # of all time. What of a step is lost is only known where a step was told shortly before


def simulated(name: str, *changes: str) -> tuple[Result, View]:
    case = cases_of(SCENARIOS / f"{name}.toml", None, changes, ())[0]
    return watched(build(case.tree, case.origin), case.traces)


def watched(scenario: Scenario, traces: Mapping[str, str]) -> tuple[Result, View]:
    entries: list[e.Entry] = []

    def sink(at_s: float, epoch: int, event: e.AnyEvent) -> None:
        entries.append(e.Entry(len(entries) + 1, at_s, at_s, "simulated", epoch, event))

    result = Engine(scenario, random.Random(scenario.seed), sink, traces).run()
    return result, add_up(entries)


def agree(result: Result, view: View) -> None:
    held = result.wall_s * result.accelerators
    assert sum(view.buckets.values()) == pytest.approx(held, rel=1e-6)
    apart = {name: (view.buckets[name] - spent) / held for name, spent in result.accelerator_s.items()}
    assert max(map(abs, apart.values())) < CLOSE, apart
    for name in ("detection", "recovery", "waiting for capacity", "straggler loss", "start"):
        assert view.buckets[name] == pytest.approx(result.accelerator_s[name], rel=0.02, abs=1e-6 * held), name
    incidents = sum(count for kind, count in result.incidents.items() if kind != "grow")
    assert (view.simulated, view.num_incidents, view.ended) == (True, incidents, True)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_buckets_are_those_of_the_books(preset: str) -> None:
    """A week with node losses, crashes and slow nodes."""
    result, view = simulated("month", f"strategy.preset={preset}", "days=7")
    agree(result, view)


@pytest.mark.parametrize("name", ["faults", "spot", "torus", "ft_hsdp"])
def test_so_they_are_in_other_scenarios(name: str) -> None:
    days = () if name in ("faults", "spot") else ("days=4",)
    result, view = simulated(name, *days)
    agree(result, view)
    assert view.steps - view.redone_steps == pytest.approx(result.steps, abs=1)


def test_a_job_that_works_on_through_losses_and_goes_back() -> None:
    tree, traces = p.oobleck("GPT-3-6_7b", "varuna", "10m")
    result, view = watched(build({"seed": 1, **tree}, "published"), traces)
    assert view.steps - view.redone_steps == result.steps
    held = result.wall_s * result.accelerators
    assert view.buckets["redone work"] == pytest.approx(result.accelerator_s["redone work"], abs=0.05 * held)


def test_131072_accelerators() -> None:
    result, view = simulated("year", "days=5")
    agree(result, view)
    assert view.fleet.total == result.accelerators == 131_200
    assert len(view.nodes) < 300 and len(msgspec.json.encode(view)) < 1_000_000
