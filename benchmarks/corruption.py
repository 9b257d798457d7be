"""What it costs to compare replicas and to audit steps, and how soon a flipped bit is found: default settings.

    python benchmarks/corruption.py [--quick | --full] [--json]

Cost: two members (a core each here), models of 2 M and 20 M parameters with AdamW, nothing saved. What a step which
compares takes beyond the median of its neighbours, over the steps from one such step to the next; so do audits, every
10 steps to have many, over the interval that is the default. Beside it, blocks of
steps with and without comparisons, which alternate in the same processes. Delay, with states kept in memory as often as
is usual: steps from a flip of one parameter's lowest bit, in one of three members, to the one after which it was found.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, Claim, arguments, median, say, show

from everstep.core import events as e
from everstep.core.corruption import Corruption
from everstep.testing.local import LocalRun

SCRIPT = ROOT / "benchmarks" / "scripts" / "corruption_steps.py"
SIZES = {"2 M": (512, 8, 200), "20 M": (1280, 12, 60)}  # width, layers, steps of a block
BOUND = 0.005
AUDIT_BOUND = 0.001
NEAR = 4  # steps before and after


def job(folder: Path, members: int, *args: object) -> tuple[LocalRun, dict[str, Any]]:
    words = [args[0], folder, *args[1:]]
    options = ("--nproc-per-node", str(members))
    os.environ["OMP_NUM_THREADS"] = "1"
    with LocalRun(folder, SCRIPT, *options, args=tuple(map(str, words))) as run:
        code = run.wait(900.0)
    if code:
        raise RuntimeError(f"exit code {code}\n{run.text()[-2000:]}")
    return run, json.loads((folder / "rank0.json").read_text())


def cost(size: str, num_blocks: int) -> list[Claim]:
    width, layers, block = SIZES[size]
    say(f"{size} parameters: {num_blocks} blocks of {block} steps")
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        _, found = job(Path(folder), 2, "blocks", width, layers, block, num_blocks)
    times, compared, interval = found["times"], found["compared"], found["interval"]
    step_s, excess_s = median(times), median(excesses(times, compared))
    share = excess_s / (interval * step_s)
    cpu_s = median(excesses(found["cpu"], compared))
    apart, error = blocks_apart([statistics.mean(times[k : k + block]) for k in range(0, len(times), block)])
    say(f"  a step {step_s * 1e3:.1f} ms, comparing {excess_s * 1e3:.2f} ms, of CPU {cpu_s * 1e3:.2f} ms")
    say(f"  blocks with comparisons: {apart:+.2%} +- {error:.2%}")
    name = f"{size} parameters"
    return [
        Claim(f"comparing replicas, {name}", share, "of the step", bar=f"<= {BOUND}", holds=share <= BOUND),
        Claim(f"CPU time of that, {name}", cpu_s / (interval * step_s), "of the step"),
        Claim(f"a step which compares, beyond its neighbours, {name}", excess_s, "s"),
        Claim(f"a step, {name}", step_s, "s"),
        Claim(f"steps between two comparisons, {name}", interval, "steps"),
        Claim(f"blocks with comparisons beyond those without, {name}", apart, "of the step"),
        Claim(f"standard error of that, {name}", error, "of the step"),
    ]


def audits(size: str, num_steps: int) -> list[Claim]:
    width, layers, _ = SIZES[size]
    say(f"{size} parameters: audits in {num_steps} steps, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        _, found = job(Path(folder), 2, "audits", width, layers, num_steps)
    twice = found["compared"]
    step_s = median([seconds for seconds, again in zip(found["times"], twice, strict=True) if not again])
    excess_s, interval = median(excesses(found["times"], twice)), found["interval"]
    share = excess_s / (interval * step_s)
    say(f"  a step {step_s * 1e3:.1f} ms, an audit {excess_s * 1e3:.1f} ms more, every {interval} steps: {share:.3%}")
    return [
        Claim(f"audits, {size} parameters", share, "of the step", bar=f"<= {AUDIT_BOUND}", holds=share <= AUDIT_BOUND),
        Claim(f"an audited step, beyond its neighbours, {size} parameters", excess_s / step_s, "steps"),
        Claim(f"steps between two audits, {size} parameters", interval, "steps"),
    ]


def excesses(times: Sequence[float], compared: Sequence[bool]) -> list[float]:
    """What each comparing step took beyond the median of the others around it."""
    found = []
    for k in (k for k, compares in enumerate(compared) if compares and NEAR <= k < len(times) - NEAR):
        others = [times[i] for i in range(k - NEAR, k + NEAR + 1) if not compared[i]]
        found.append(times[k] - median(others))
    return found


def blocks_apart(means: Sequence[float]) -> tuple[float, float]:
    """Mean over the blocks with comparisons of how much more than the two around them they took; standard error."""
    shares = [means[k] / ((means[k - 1] + means[k + 1]) / 2) - 1 for k in range(2, len(means) - 1, 2)]
    return statistics.mean(shares), statistics.stdev(shares) / len(shares) ** 0.5


def delay(num_flips: int) -> list[Claim]:
    width, layers, _ = SIZES["2 M"]
    flips = [60 + 97 * k for k in range(num_flips)]
    say(f"flips before steps {flips}")
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        run, told = job(Path(folder), 3, "flips", width, layers, flips[-1] + 90, *flips)
        found = corruptions(run)
        named = [[blame.rank for blame in each.culprits] for each in run.events(e.IncidentOpened)]
        redone = sum(back.lost for back in run.events(e.StateRestored))
    delays = [each.step - flip for each, flip in zip(found, flips, strict=True)]
    say(f"  found after {delays} steps, interval {told['interval']}, redone {redone}")
    right = sum(ranks == [2] for ranks in named)
    return [
        Claim("flips found, and the right member named", right, f"of {num_flips}", holds=right == num_flips, bar="all"),
        Claim("steps from a flip to its discovery, median", median(delays), "steps"),
        Claim("the longest", max(delays), "steps"),
        Claim("steps done again for a flip, mean", redone / num_flips, "steps"),
    ]


def corruptions(run: LocalRun) -> list[Corruption]:
    workers = (worker for event in run.events(e.NodeReported) for worker in event.report.workers)
    told = [w.session.corrupt for w in workers if w.session is not None and w.session.corrupt is not None]
    return [each for _, each in sorted({each.epoch: each for each in told}.items())]


def main() -> None:
    args = arguments(__doc__ or "")
    num_blocks = 25 if args.full else 7
    claims = [claim for size in SIZES for claim in cost(size, num_blocks)]
    claims += [claim for size in SIZES for claim in audits(size, 400 if args.full else 120)]
    show([*claims, *delay(12 if args.full else 3)], args.json)


if __name__ == "__main__":
    main()
