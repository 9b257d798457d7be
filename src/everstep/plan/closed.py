"""Closed forms of reliability and of pipelines, which the simulator must reproduce (SYSTEMS section 15).

Checkpoints that stop the job are in `plan.interval`, the placement of copies in `plan.placement`.
"""

from __future__ import annotations

import math

DAY_S = 86400.0


def mttf_s(num_nodes: int, failures_per_node_day: float) -> float:
    """Mean time between failures of a job: nodes fail independently, at a constant rate."""
    return DAY_S / (num_nodes * failures_per_node_day)


def ettr_non_blocking(mttf: float, interval_s: float, recovery_s: float) -> float:
    """Useful part of the time when saves cost nothing and a failure costs `recovery_s` and goes back to the last one.

    An interval counts once it is through; failures come at a constant rate, in recoveries too.
    """
    rate = 1 / mttf
    return rate * interval_s * math.exp(-rate * recovery_s) / math.expm1(rate * interval_s)


def ettr_linear(mttf: float, interval_s: float, recovery_s: float) -> float:
    """Meta's approximation: each failure costs the recovery and half of an interval. Too low once they are many."""
    return 1 - (recovery_s + interval_s / 2) / mttf


def bubble_1f1b(stages: int, micro_batches: int) -> float:
    """Idle part of a pipeline's time, for GPipe and 1F1B with equal stages."""
    return (stages - 1) / (micro_batches + stages - 1)


def ring_all_reduce_s(size_bytes: float, bandwidth: float, members: int) -> float:
    """Each member sends and receives twice all parts but one. `bandwidth`: bytes a second in each direction."""
    return 2 * (members - 1) / members * size_bytes / bandwidth


def rerouting_slowdown(replicas: int, stages: int, micro_batches: int, failed: int) -> float:
    """ReCycle against 1F1B: peers of the stage take the dead ones' micro-batches, with split backward passes.

    One per replica and step, each of whose failed ones are in the same stage; free while they fit into the bubble.
    """
    extra = math.ceil(micro_batches * failed / (replicas - failed))
    return max(1.0, (micro_batches + extra) / (micro_batches + stages - 1))


def binomial_quantile(num: int, probability: float, level: float) -> int:
    """Least k such that at most k of `num` fail with a probability of at least `level`."""
    if not 0 < probability < 1:
        return num if probability >= 1 else 0
    total = 0.0
    for k in range(num):
        total += math.exp(_log_binomial(num, probability, k))
        if total >= level:
            return k
    return num


def _log_binomial(num: int, probability: float, k: int) -> float:
    """Logarithm of the probability of exactly k: for large `num` the first ones are below what a float can hold."""
    ways = math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1)
    return ways + k * math.log(probability) + (num - k) * math.log1p(-probability)
