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


def two_level_efficiency(
    period_s: float,
    per_outer: float,
    cost_s: tuple[float, float],
    rate: tuple[float, float],
    down_s: tuple[float, float],
) -> float:
    """Useful part of the time with two tiers of saves: inner ones every `period_s`, outer ones every `per_outer`-th.

    Each pair is (inner, outer): what a save costs (within the period; an outer one's is spread over its inner
    periods), failures a second that go back to that tier, downtime after each, without failures in it. With rates of
    (1 / mean, 0) it is `plan.interval.efficiency` without recovery.
    """
    total = rate[0] + rate[1]
    if total <= 0:
        return 1 - (cost_s[0] + cost_s[1] / per_outer) / period_s
    fails = -math.expm1(-total * period_s)
    again = fails * rate[0] / total  # the inner period is made once more
    ends = math.exp(-total * period_s) + fails * rate[1] / total  # it is through, or an outer failure came
    if ends <= 0:
        return 0.0  # too small for a float
    attempts_s = (fails / total + again * down_s[0]) / ends  # in one inner period, until it is through or lost
    lost_at = fails * rate[1] / total / ends  # the outer failure, rather than through
    log_all = per_outer * math.log1p(-lost_at) if lost_at < 1 else -math.inf  # through all periods of an outer one
    if log_all < -700:
        return 0.0
    lost = -math.expm1(log_all)  # an outer failure: all of them anew
    begun = lost / lost_at if lost_at > 0 else per_outer  # inner periods, until the outer one is through or lost
    whole_s = (attempts_s * begun + lost * down_s[1]) / math.exp(log_all)
    return (per_outer * (period_s - cost_s[0]) - cost_s[1]) / whole_s


def erlang_b(servers: int, load: float) -> float:
    """That all are taken when one more is needed: `load` is (needs a second) x (seconds that each is taken)."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked


def gamma_quantile(shape: float, z: float) -> float:
    """Of a Gamma distribution with mean 1, by its standard normal deviate `z` (Wilson and Hilferty)."""
    return max(0.0, 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3


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
