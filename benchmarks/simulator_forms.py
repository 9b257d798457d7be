"""Closed forms against played processes, and against the numbers that are known of them (SYSTEMS section 15).

    python benchmarks/simulator_forms.py [--quick | --full] [--json]

The value of a row is how far the form is from the mean of the played runs, in percent; its claim names both, the
standard error, and the known number. Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from harness import Claim, arguments, show

from everstep.plan import closed, interval, placement
from everstep.testing import chance
from everstep.testing.chance import Played

BAR = 1.0  # percent

BLOCKING = (  # period, mean time between failures, cost, downtime, recovery, known
    (44.8, 185.6, 5.0, 10.0, 5.0, 0.7255),
    (20.0, 185.6, 5.0, 10.0, 5.0, 0.6561),
    (120.0, 185.6, 5.0, 10.0, 5.0, 0.6305),
    (7.9, 185.6, 1 / 6, 0.5, 0.5, 0.9531),
    (17194.0, 240601.0, 600.0, 60.0, 600.0, 0.9285),
    (8701.0, 60150.0, 600.0, 60.0, 600.0, 0.8559),
    (3218.0, 7519.0, 600.0, 60.0, 600.0, 0.5971),
)
OPTIMA = ((240601.0, 600.0, 17194.0), (60150.0, 600.0, 8701.0), (7519.0, 600.0, 3218.0))
NON_BLOCKING = ((16_000, 60.0, 5.0, 0.7202), (16_000, 5.0, 5.0, 0.9345), (100_000, 7.0, 5.0, 0.6150))
GEMINI = ((16, 2, 2, 0.9333), (16, 2, 3, 0.8), (128, 2, 2, 0.99213), (1024, 2, 2, 0.99902))
SPARES = ((128, 2), (256, 2), (512, 3), (1024, 4))
RATE = 6.5e-3  # failures a node and day


def row(what: str, form: float, played: Played, known: float | None = None) -> Claim:
    stated = f", known {known:g}" if known is not None else ""
    off = 100 * abs(form / played.mean - 1)
    holds = off <= BAR and (known is None or 100 * abs(form / known - 1) <= BAR)
    text = f"{what}: form {form:.5g}, played {played.mean:.5g} +- {played.error:.2g}{stated}"
    return Claim(text, off, "%", bar=f"<= {BAR:g} %", holds=holds)


def rows(count: int) -> Iterator[Claim]:
    dice = np.random.default_rng(15)
    for nodes in (128, 2000):
        form = closed.mttf_s(nodes, RATE) / 3600
        played = chance.first_failure(nodes, RATE / 24, min(count, 100_000), dice)
        yield row(f"mean time to failure of {nodes} nodes (h)", form, played)
    for period, mttf, cost, down, recovery, known in BLOCKING:
        form = interval.efficiency(period, mttf, cost, down, recovery)
        played = chance.blocking(period, mttf, cost, down, recovery, count, dice)
        yield row(f"blocking saves, T {period:g}, mu {mttf:g}, C {cost:.3g}", form, played, known)
    for mttf, cost, known in OPTIMA:
        yield row(
            f"optimum for mu {mttf:g}, C {cost:g}, by trying",
            interval.optimal_period_s(mttf, cost),
            tried(mttf, cost),
            known,
        )
    for gpus, every, recovery, known in NON_BLOCKING:
        mttf = closed.mttf_s(gpus // 8, RATE) / 60
        form = closed.ettr_non_blocking(mttf, every, recovery)
        yield row(
            f"non-blocking saves, {gpus} GPUs, every {every:g} min",
            form,
            chance.non_blocking(mttf, every, recovery, count, dice),
            known,
        )
    yield from pipelines()
    for nodes, copies, lost, known in GEMINI:
        form = placement.recovery_probability(nodes, copies, lost)
        runs = min(count, 20_000 if nodes < 1000 else 5_000)
        yield row(
            f"placement, {nodes} nodes, {copies} copies, {lost} lost",
            form,
            chance.placement(nodes, copies, lost, runs, dice),
            known,
        )
    for nodes, known_spares in SPARES:
        spares = closed.binomial_quantile(nodes, 0.0012, 0.99)
        days = chance.failing(nodes, 0.0012, count, dice)
        played = Played(float(np.quantile(days, 0.99, method="inverted_cdf")), 0.0)
        yield row(f"spares for {nodes} machines on 99 of 100 days", spares, played, known_spares)
    for period, inner, costs, rates, downs in (
        (20.0, 12, (0.5, 4.0), (1 / 185.6, 1 / 2000), (2.0, 30.0)),
        (5.0, 40, (0.1, 2.0), (1 / 60, 1 / 500), (1.0, 10.0)),
    ):
        form = closed.two_level_efficiency(period, inner, costs, rates, downs)
        played = chance.two_tiers(period, inner, costs, rates, downs, count // 4, dice)
        yield row(f"two tiers, every {period:g} and {inner} times that", form, played)


def tried(mttf: float, cost: float) -> Played:
    """The period with the greatest efficiency, of 20,000."""
    periods = np.geomspace(cost * 1.01, 20 * mttf, 20_000)
    values = [interval.efficiency(float(period), mttf, cost, 0.0, 0.0) for period in periods]
    return Played(float(periods[int(np.argmax(values))]), 0.0)


def pipelines() -> Iterator[Claim]:
    for stages, micro_batches in ((4, 8), (8, 32), (16, 16)):
        played = Played(chance.one_forward_one_backward(stages, micro_batches), 0.0)
        yield row(
            f"idle part of 1F1B, {stages} stages, {micro_batches} micro-batches",
            closed.bubble_1f1b(stages, micro_batches),
            played,
        )
    for members in (4, 64):
        played = Played(chance.ring(1e9, 25e9, members), 0.0)
        yield row(
            f"all-reduce of 1 GB in a ring of {members} (s)", closed.ring_all_reduce_s(1e9, 25e9, members), played
        )


def main() -> None:
    options = arguments(__doc__ or "")
    show(list(rows(4_000_000 if options.full else 400_000)), options.json)


if __name__ == "__main__":
    main()
