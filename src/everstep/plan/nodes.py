"""What is remembered of nodes: who failed how often, whom to leave out for a while, how many spares to hold.

A node's failures decay with a half-life. At `limit` of them it is excluded for a back-off, which doubles each time; a
health check that it passes lets it back at once, one that it fails begins the back-off anew. It comes back on
probation: the next failure excludes it again. Excluded means last in line, not never: a job that has no other node
takes it.
"""

from __future__ import annotations

import math

import msgspec

from everstep.plan.closed import binomial_quantile

SPARE_LEVEL = 0.99  # ByteRobust: spares cover the failures of 99 of 100 days


class Rule(msgspec.Struct, frozen=True):
    limit: float = 2.5  # failures, decayed, that exclude a node: three within half an hour
    half_life_s: float = 3600.0
    back_off_s: float = 600.0  # of the first exclusion
    longest_s: float = 86400.0


RULE = Rule()


class Record(msgspec.Struct, frozen=True):
    """One node. Times on the controller's clock."""

    score: float = 0.0  # failures, each worth a half after every half-life
    at_s: float = 0.0  # when that was the score
    out_until_s: float = 0.0  # excluded until then; 0: it is not
    times: int = 0  # excluded so far


class Memory(msgspec.Struct, frozen=True):
    """All nodes that ever failed, by name."""

    nodes: dict[str, Record] = {}

    def score(self, node: str, now: float, rule: Rule = RULE) -> float:
        known = self.nodes.get(node)
        return _decayed(known, now, rule) if known is not None else 0.0

    def excluded(self, node: str, now: float) -> bool:
        """Whether others are to be seated before it."""
        known = self.nodes.get(node)
        return known is not None and now < known.out_until_s

    def failed(self, node: str, now: float, rule: Rule = RULE) -> Memory:
        """It failed once more; perhaps it is excluded by that."""
        known = self.nodes.get(node, Record())
        score = _decayed(known, now, rule) + 1
        record = Record(score, now, known.out_until_s, known.times)
        return self._with(node, _shut_out(record, now, rule) if score >= rule.limit - 1e-9 else record)

    def checked(self, node: str, healthy: bool, now: float, rule: Rule = RULE) -> Memory:
        """Its hardware was checked: back at once, or out for as long as it was, once more."""
        known = self.nodes.get(node)
        if healthy:
            return self if known is None else self._with(node, msgspec.structs.replace(known, out_until_s=0.0))
        return self._with(node, _shut_out(known or Record(at_s=now), now, rule))

    def rebased(self, now: float, rule: Rule = RULE) -> Memory:
        """For another controller, whose clock may be another one: nobody is out for longer than its back-off."""
        nodes = {
            node: msgspec.structs.replace(
                known,
                at_s=min(known.at_s, now + _back_off_s(known.times, rule)),
                out_until_s=min(known.out_until_s, now + _back_off_s(known.times, rule)) if known.out_until_s else 0.0,
            )
            for node, known in self.nodes.items()
        }
        return Memory(nodes)

    def _with(self, node: str, record: Record) -> Memory:
        return Memory({**self.nodes, node: record})


def _decayed(known: Record, now: float, rule: Rule) -> float:
    return known.score * math.pow(2.0, -max(0.0, now - known.at_s) / rule.half_life_s)


def _shut_out(record: Record, now: float, rule: Rule) -> Record:
    """On probation afterwards: half a failure below the limit, and that decays only once it is back."""
    until_s = now + _back_off_s(record.times + 1, rule)
    return Record(rule.limit - 0.5, until_s, until_s, record.times + 1)


def _back_off_s(times: int, rule: Rule) -> float:
    return min(rule.longest_s, rule.back_off_s * 2.0 ** max(0, min(times, 64) - 1))


def num_spares(num_nodes: int, failures_per_node: float, level: float = SPARE_LEVEL) -> int:
    """Spare nodes which suffice with probability `level`, until replacements are there.

    failures_per_node: expected in that time.
    """
    return binomial_quantile(num_nodes, failures_per_node, level)
