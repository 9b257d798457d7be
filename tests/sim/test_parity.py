"""The same scenarios for the engine, which counts nodes, and for the shipped control plane with all its reports."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.core import events as e
from everstep.core.decisions import Action, Decision
from everstep.core.types import Blame
from everstep.sim.scenario import build, with_value
from everstep.testing.parity import Answer, answers, full, simulated
from everstep.testing.resolved import Told

FOLDER = Path(__file__).parents[2] / "examples" / "scenarios"
SEEDS = range(1, 21)

# Kind, who, what, of whom, and how it ended.
Expected = tuple[tuple[str, str, tuple[tuple[str, str], ...], str], ...]
OVER = "recovered"
EXPECTED: dict[str, Expected] = {
    "kill": (
        ("crash", "n1", (("promote-standby", "n1"),), OVER),
        ("crash", "n2", (("promote-standby", "n2"),), OVER),
    ),
    "hang": (("hang", "n1", (("shrink", "n1"),), OVER),),
    "slow": (("slow", "n1", (("leave-it", "n1"), ("evict-node", "n1")), "it holds no role any more"),),
    "node-lost": (
        ("node-lost", "n2", (("promote-standby", "n2"),), OVER),
        ("node-lost", "n0", (("promote-standby", "n0"),), OVER),
    ),
    "corrupt": (("corrupt", "n1", (("roll-back", "kept state"),), OVER),),
    "together": (
        ("crash", "n1", (("promote-standby", "n1"),), OVER),
        ("corrupt", "n2", (("roll-back", "kept state"),), OVER),
        ("hang", "n0", (("promote-standby", "n0"),), OVER),
        ("node-lost", "n2", (("promote-standby", "n2"),), OVER),
    ),
}


def tree(name: str) -> dict[str, Any]:
    path = FOLDER / (f"parity/{name}.toml" if name in EXPECTED else f"{name}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def decided(made: list[Answer]) -> list[tuple[object, ...]]:
    return [answer.decided for answer in made]


@pytest.mark.parametrize("name", EXPECTED)
def test_engine_and_control_plane_decide_the_same_with_any_seed(name: str) -> None:
    scenario = build(tree(name), name)
    wanted = [(kind, (who,), decisions, outcome) for kind, who, decisions, outcome in EXPECTED[name]]
    assert decided(answers(simulated(scenario))) == wanted
    for seed in SEEDS:
        assert decided(answers(full(msgspec.structs.replace(scenario, seed=seed)))) == wanted, seed


def test_so_do_they_with_several_workers_a_node() -> None:
    scenario = build(tree("faults"), "faults")
    wanted = decided(answers(simulated(scenario)))
    assert len(wanted) == 5
    for seed in (1, 2, 3):
        assert decided(answers(full(msgspec.structs.replace(scenario, seed=seed)))) == wanted, seed


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("kill", "strategy.seconds", {"promote-standby": 30.0}),
        ("kill", "cluster.standbys", 0),
        ("hang", "cluster.standbys", 1),
        ("slow", "strategy.actions", ["leave-it"]),
        ("slow", "faults.0.slowdown", 1.0),
        ("node-lost", "faults.0.node", 1),
        ("corrupt", "saves", None),
    ],
)
def test_what_would_be_decided_otherwise_is_seen(name: str, key: str, value: object) -> None:
    """Costs, spare nodes, victims and saves: the sequence says all of them."""
    changed = with_value(tree(name), key, value)
    changed = {key: value for key, value in changed.items() if value is not None}
    other = decided(answers(simulated(build(changed, name))))
    assert other != decided(answers(simulated(build(tree(name), name))))


def test_the_whole_control_plane_sees_it_too() -> None:
    def played(**changes: object) -> list[tuple[object, ...]]:
        made: dict[str, Any] = tree("kill")
        for key, value in changes.items():
            made = with_value(made, key.replace("__", "."), value)
        return decided(answers(full(build(made, "kill"))))

    usual = played()
    assert played(cluster__standbys=0) != usual != played(faults__0__kind="hang")


def test_an_answer_has_the_names_of_the_scenario_and_the_last_that_is_known() -> None:
    told = [
        e.IncidentOpened("I1", "corrupt", (Blame(0, "a", "corrupt?"), Blame(1, "b", "corrupt?")), ""),
        e.Decided("I1", Decision(Action.SHRINK, 1.0, "", "b/0#0, b/1#2")),
        e.IncidentOpened("I2", "stop", (), ""),
        e.IncidentUpdated("I1", (Blame(1, "b", "corrupt"),)),
        e.IncidentUpdated("I1", ()),
        e.IncidentClosed("I1", "recovered", -1.0),
        e.IncidentOpened("I3", "slow", (), ""),
    ]
    made = answers([Told(float(k), record) for k, record in enumerate(told)], {"a": "n0", "b": "n1"})
    assert made == [
        Answer("corrupt", ("n1",), (("shrink", "n1"),), "recovered", 5.0),
        Answer("slow", (), (), "open", -1.0),
    ]
    assert str(made[0]) == "corrupt of n1: shrink (n1); recovered"


def test_what_is_struck_has_to_be_whole() -> None:
    """The second fault comes at once, but not before the first one's standby is replaced."""
    changed = with_value(with_value(tree("node-lost"), "faults.1.at_step", 0), "faults.0.at_step", 0)
    assert decided(answers(simulated(build(changed, "x")))) == decided(answers(full(build(changed, "x"))))
    hasty = with_value(changed, "faults.1.whole", False)
    assert decided(answers(simulated(build(hasty, "x")))) != decided(answers(simulated(build(changed, "x"))))
