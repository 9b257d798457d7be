"""The same faults for the engine, which counts nodes, and for the shipped control plane with all its reports."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.core import events as e
from everstep.core.errors import UsageError
from everstep.sim.engine import Engine
from everstep.sim.scenario import build, parse
from everstep.testing.resolved import play

FILE = Path(__file__).parents[2] / "examples/scenarios/faults.toml"


@pytest.mark.parametrize("seed", [1, 2])
def test_both_resolutions_decide_the_same(seed: int) -> None:
    """Seeds in which every standby is ready in time, and the detector knows who hangs: others have less luck."""
    scenario = parse(FILE.read_text(encoding="utf-8"), FILE.name)
    scenario = msgspec.structs.replace(scenario, seed=seed)
    machines = [record for _, record in play(scenario)]
    engine: list[e.AnyEvent] = []
    Engine(scenario, random.Random(seed), lambda *told: engine.append(told[2])).run()

    def story(records: list[Any]) -> list[tuple[str, str]]:
        kinds = {record.incident: record.kind for record in records if isinstance(record, e.IncidentOpened)}
        decided = [record for record in records if isinstance(record, e.Decided)]
        return [(kinds[record.incident], record.decision.action.value) for record in decided]

    assert len(story(engine)) == 5
    assert story(machines) == story(engine)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cluster": {"nodes": 300}}, "cluster.nodes = 300: at full resolution at most 256"),
        ({"faults": [{"kind": "slow", "at_s": 1.0}]}, "faults[0].kind = 'slow': at full resolution there are kill"),
    ],
)
def test_what_cannot_be_played_is_said(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        play(build({"duration_s": 10.0, "cluster": {"nodes": 2}, **change}, "test"))
    assert str(error.value).startswith(said)
