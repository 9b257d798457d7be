"""Scenario files on real processes, whose controller decides what the simulator decides: row 10 of the brain.

Two jobs: one in which a fault follows the other, and a slow member. benchmarks/parity.py plays each kind by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.sim.scenario import parse
from everstep.testing.parity import answers, full, live, simulated

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "scripts" / "parity_steps.py"

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("name", ["together", "slow"])
def test_a_real_job_decides_what_the_simulator_decides(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / "scenarios" / "parity" / f"{name}.toml"
    scenario = parse(path.read_text(encoding="utf-8"), path.name)
    told, names = live(scenario, tmp_path, SCRIPT)
    real = [answer.decided for answer in answers(told, names)]
    assert real == [answer.decided for answer in answers(simulated(scenario))]
    assert real == [answer.decided for answer in answers(full(scenario))]
    assert len(real) == len(scenario.faults)
