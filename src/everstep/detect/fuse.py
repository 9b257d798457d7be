"""One verdict out of several detectors' verdicts over one window: what happened, who did it, how sure, why.

The rules, in their order:

1. A verdict counts its confidence times RELIABILITY of its kind: how often such a verdict is right when it is sure.
2. Log lines of victims (VICTIMS: a time-out, NCCL, gloo) tell that something happened, not who did it.
3. For a place (a node), each kind counts once, by its best; kinds agree by noisy-or: 1 - product of (1 - p).
   Nodes named by the very same verdicts are one hypothesis (a rack, a switch).
4. One hypothesis is true, or none: belief = p / (1 - p), normalised over all and 1 for none. So those that disagree
   take from one another, and two weak signs of one node beat a middling one of another.
5. What happened is the gravest kind (GRAVITY) seen at the place, or one that names nobody: a hang that cannot tell
   its culprit gets it from a slow node, a metric or a log.
6. Why it happened is what the log says of the place (EXPLAINS); then what was seen there first.

Nothing is dropped: every part stays, with the role it played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import msgspec

from everstep.core.types import Blame, Verdict
from everstep.detect.signatures import Cause

# How often a sure verdict of the kind names the right one. Priors: ours are set, not yet learned from incidents.
RELIABILITY = {"log": 0.95, "check": 0.95, "corrupt": 0.98, "hang": 0.9, "slow": 0.9, "anomaly": 0.7, "jitter": 0.6}
UNKNOWN_KIND = 0.5
GRAVITY = ("corrupt", "hang", "slow", "jitter", "anomaly", "check", "log")  # gravest first
VICTIMS = {Cause.HANG.value, Cause.NCCL.value, Cause.GLOO.value}
EXPLAINS = ("log", "check", "slow", "anomaly")  # what may stand behind another kind at the same place, best first
ALMOST_ONE = 0.9999


class Part(msgspec.Struct, frozen=True):
    """One detector's verdict, and when it was reached (any one clock)."""

    verdict: Verdict
    at_s: float = 0.0


class Evidence(msgspec.Struct, frozen=True):
    """A part and its role: "names" the culprit, "tells" what happened without naming, "disagrees", "unknown"."""

    part: Part
    role: str


class Fused(msgspec.Struct, frozen=True):
    verdict: Verdict
    evidence: tuple[Evidence, ...]


def fuse(parts: Sequence[Part]) -> Fused | None:
    """None without parts."""
    if not parts:
        return None
    places = {part: _places(part.verdict) for part in parts}
    beliefs = _beliefs(parts, places)
    place = max(beliefs, key=lambda nodes: (beliefs[nodes], sorted(nodes)), default=frozenset[str]())
    evidence = tuple(Evidence(part, _role(part, places[part], place)) for part in parts)
    named = [e.part for e in evidence if e.role == "names"]
    told = [e.part for e in evidence if e.role == "tells"]
    seen = sorted((*named, *told), key=lambda part: _gravity(part.verdict.kind))
    if not seen:
        return Fused(Verdict("unknown", (), "no detector knows", 0.0), evidence)
    kind = seen[0].verdict.kind
    confidence = beliefs[place] if named else max(_weight(part) for part in told)
    culprits, why = _culprits(named, kind, place), _why(named, told, kind)
    verdict = Verdict(kind, culprits, why, round(min(confidence, ALMOST_ONE), 4))
    return Fused(verdict, evidence)


def _places(verdict: Verdict) -> frozenset[str]:
    """The nodes it holds responsible."""
    return frozenset(b.node for b in verdict.culprits if b.node and not _of_victim(verdict, b))


def _of_victim(verdict: Verdict, blame: Blame) -> bool:
    return verdict.kind == "log" and blame.cause in VICTIMS


def _beliefs(parts: Sequence[Part], places: Mapping[Part, frozenset[str]]) -> dict[frozenset[str], float]:
    """Hypotheses (sets of nodes that the same parts name) and what to believe of each."""
    by_node: dict[str, list[Part]] = {}
    for part in parts:
        for node in places[part]:
            by_node.setdefault(node, []).append(part)
    odds: dict[frozenset[str], float] = {}
    for named in by_node.values():
        together = frozenset(node for node, others in by_node.items() if others == named)
        p = min(_noisy_or(named), ALMOST_ONE)
        odds[together] = p / (1 - p)
    total = 1 + sum(odds.values())
    return {nodes: value / total for nodes, value in odds.items()}


def _noisy_or(parts: Sequence[Part]) -> float:
    best: dict[str, float] = {}
    for part in parts:
        best[part.verdict.kind] = max(best.get(part.verdict.kind, 0.0), _weight(part))
    return 1 - prod(1 - p for p in best.values())


def _weight(part: Part) -> float:
    return RELIABILITY.get(part.verdict.kind, UNKNOWN_KIND) * part.verdict.confidence


def _role(part: Part, nodes: frozenset[str], place: frozenset[str]) -> str:
    if nodes:
        return "names" if nodes & place else "disagrees"
    return "tells" if part.verdict.confidence > 0 else "unknown"


def _gravity(kind: str) -> int:
    return GRAVITY.index(kind) if kind in GRAVITY else len(GRAVITY)


def _culprits(named: Sequence[Part], kind: str, place: frozenset[str]) -> tuple[Blame, ...]:
    """The blames of the best part, by workers where one tells them, with the cause that explains most."""
    by_weight = sorted(named, key=_weight, reverse=True)
    same = [part for part in by_weight if part.verdict.kind == kind]
    ranked = [part for part in (*same, *by_weight) if any(b.rank >= 0 for b in part.verdict.culprits)]
    chosen = (*ranked, *same, *by_weight)[:1]
    log = next((part for part in by_weight if part.verdict.kind == "log"), None)
    blames = [blame for part in chosen for blame in part.verdict.culprits if blame.node in place]
    if log is None:
        return tuple(blames)
    said = {b.node: b for b in log.verdict.culprits}
    return tuple(
        Blame(b.rank, b.node, said[b.node].cause, said[b.node].detail) if b.node in said else b for b in blames
    )


def _why(named: Sequence[Part], told: Sequence[Part], kind: str) -> str:
    """The gravest first, then what explains it, then the rest in the order of time."""
    main = sorted((p for p in (*named, *told) if p.verdict.kind == kind), key=lambda p: (p in told, -_weight(p)))[0]
    behind = [p for p in named if p is not main and p.verdict.kind in EXPLAINS]
    behind.sort(key=lambda p: (EXPLAINS.index(p.verdict.kind), p.at_s))
    rest = sorted((p for p in (*named, *told) if p is not main and p not in behind), key=lambda p: p.at_s)
    text = main.verdict.why
    if behind:
        text += "; behind it: " + "; ".join(_dated(p, main) for p in behind)
    return text + "".join(f"; also {p.verdict.kind}: {p.verdict.why}" for p in rest)


def _dated(part: Part, main: Part) -> str:
    """Evidence from before the main one says how long before."""
    ahead = main.at_s - part.at_s
    before = f" ({ahead:.0f} s before)" if ahead >= 1 else ""
    return f"{part.verdict.why}{before}"
