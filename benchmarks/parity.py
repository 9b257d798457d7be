"""The same scenario on real processes and in the simulator: the same decisions, and how far recovery times are apart.

    python benchmarks/parity.py [--quick | --full] [--json]

Each file of examples/scenarios/parity is played by real processes on this machine (--full: three times), by the
simulator's engine and by the shipped control plane on a virtual clock. For every incident both sequences of decisions
are printed, and the factor between the recovery times.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from harness import ROOT, Claim, arguments, median, say, show

from everstep.sim.scenario import Scenario, parse
from everstep.testing import parity

SCENARIOS = ROOT / "examples" / "scenarios" / "parity"
SCRIPT = ROOT / "benchmarks" / "scripts" / "parity_steps.py"
FACTOR = 5  # between recovery times: the simulator's are curves of published and measured ones, not of this machine
SEEDS = 20  # of the simulation at full resolution, in which chance decides when messages arrive


def main() -> None:
    options = arguments(__doc__ or "")
    rows = [row for path in sorted(SCENARIOS.glob("*.toml")) for row in rows_of(path, 3 if options.full else 1)]
    show(rows, options.json)


def rows_of(path: Path, runs: int) -> list[Claim]:
    scenario = parse(path.read_text(encoding="utf-8"), path.name)
    engine = parity.answers(parity.simulated(scenario))
    seeds = [msgspec.structs.replace(scenario, seed=seed) for seed in range(1, SEEDS + 1)]
    full = [parity.answers(parity.full(seeded)) for seeded in seeds]
    real = [once(scenario) for _ in range(runs)]
    say(f"{scenario.name}:")
    for number, answer in enumerate(engine):
        say(f"  real       {real[0][number] if number < len(real[0]) else 'nothing'}")
        say(f"  simulated  {answer}")
    wanted = [answer.decided for answer in engine]
    same = [[answer.decided for answer in each] == wanted for each in (*real, *full)]
    what = f"{scenario.name}: plays with the simulator's decisions, of {runs} real and {SEEDS} seeds at full resolution"
    rows = [Claim(what, sum(same), "plays", bar="all", holds=all(same))]
    for number, answer in enumerate(engine):
        took_s = median([each[number].recovery_s for each in real if number < len(each)])
        factor = took_s / answer.recovery_s
        told = f"{scenario.name}, {answer.kind}: {took_s:.3f} s real over {answer.recovery_s:.3f} s simulated"
        near = 1 / FACTOR <= factor <= FACTOR
        rows.append(Claim(told, factor, "times", bar=f"within a factor of {FACTOR}", holds=near))
    return rows


def once(scenario: Scenario) -> list[parity.Answer]:
    told, names = parity.live(scenario, Path(tempfile.mkdtemp(prefix="everstep-parity-")), SCRIPT)
    return parity.answers(told, names)


if __name__ == "__main__":
    main()
