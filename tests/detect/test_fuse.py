"""Several detectors, one verdict: the documented rules of detect.fuse, one by one."""

from __future__ import annotations

import pytest

from everstep.core.types import Blame, Verdict
from everstep.detect.fuse import RELIABILITY, Fused, Part, fuse
from everstep.detect.logs import WorkerLog, classify


def part(kind: str, confidence: float, *places: tuple[int, str], at_s: float = 0.0, cause: str = "") -> Part:
    blames = tuple(Blame(rank, node, cause or kind) for rank, node in places)
    names = ", ".join(f"{rank}@{node}" for rank, node in places) or "nobody"
    return Part(Verdict(kind, blames, f"{kind} of {names}", confidence), at_s)


def of(*parts: Part) -> Fused:
    fused = fuse(parts)
    assert fused is not None
    return fused


XID = "kernel: NVRM: Xid (PCI:0000:9d:00): 79, pid=1, GPU has fallen off the bus."


def test_one_part_keeps_its_meaning() -> None:
    fused = of(part("hang", 0.8, (5, "n1")))
    assert fused.verdict.kind == "hang" and fused.verdict.culprits[0].rank == 5
    assert fused.verdict.confidence == pytest.approx(0.8 * RELIABILITY["hang"], abs=1e-3)
    assert fuse([]) is None


def test_kinds_that_agree_are_surer_and_the_same_kind_counts_once() -> None:
    hang, again = part("hang", 0.7, (5, "n1")), part("hang", 0.6, (5, "n1"))
    slow = part("slow", 0.7, (-1, "n1"))
    alone, twice, both = (of(*parts).verdict.confidence for parts in ([hang], [hang, again], [hang, slow]))
    assert alone == twice < both == pytest.approx(1 - 0.37**2, abs=1e-3)


def test_disagreement_lowers_and_two_weak_signs_beat_one() -> None:
    weak = [part("slow", 0.6, (-1, "n2")), part("anomaly", 0.6, (-1, "n2"))]
    fused = of(part("hang", 0.7, (5, "n1")), *weak)
    assert fused.verdict.culprits[0].node == "n2" and fused.verdict.kind == "slow"
    assert fused.verdict.confidence < of(*weak).verdict.confidence
    assert [e.role for e in fused.evidence] == ["disagrees", "names", "names"]


def test_a_log_explains_a_hang_of_the_same_node() -> None:
    log = Part(classify([WorkerLog(-1, "n1", XID)]), 10.0)
    fused = of(part("hang", 0.8, (5, "n1"), at_s=40.0), log)
    (blame,) = fused.verdict.culprits
    assert fused.verdict.kind == "hang" and (blame.rank, blame.cause, blame.detail) == (5, "device-lost", XID)
    assert "behind it: device-lost" in fused.verdict.why and "(30 s before)" in fused.verdict.why
    assert fused.verdict.confidence > 0.95


def test_hardware_elsewhere_beats_a_middling_hang_but_not_a_sure_one() -> None:
    log = Part(classify([WorkerLog(-1, "n9", XID)]))
    assert of(part("hang", 0.7, (3, "n0")), log).verdict.culprits[0].node == "n9"
    corrupt = part("corrupt", 1.0, (3, "n0"))
    assert of(corrupt, log).verdict.culprits[0].node == "n0"


def test_words_of_victims_name_nobody() -> None:
    watchdog = Part(classify([WorkerLog(0, "n0", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL")]))
    fused = of(part("hang", 0.8, (5, "n1")), watchdog)
    assert fused.verdict.culprits[0].node == "n1" and [e.role for e in fused.evidence] == ["names", "tells"]
    assert fused.verdict.confidence == of(part("hang", 0.8, (5, "n1"))).verdict.confidence
    assert "also log" in fused.verdict.why


def test_a_hang_without_culprit_gets_one_from_a_slow_node_before_it() -> None:
    nobody = Part(Verdict("hang", (Blame(-1, "", "hang"),), "all look the same", 0.3), 100.0)
    fused = of(nobody, part("slow", 0.8, (2, "n2"), at_s=70.0))
    assert fused.verdict.kind == "hang" and fused.verdict.culprits[0].node == "n2"
    assert fused.verdict.why == "all look the same; behind it: slow of 2@n2 (30 s before)"
    alone = of(nobody).verdict
    assert alone.kind == "hang" and alone.culprits == () and alone.confidence < 0.3


def test_nodes_that_only_appear_together_are_one_hypothesis() -> None:
    rack = part("slow", 0.9, (-1, "r1a"), (-1, "r1b"))
    fused = of(rack)
    assert [b.node for b in fused.verdict.culprits] == ["r1a", "r1b"] and fused.verdict.confidence > 0.75
    one = of(rack, part("hang", 0.9, (4, "r1b"))).verdict
    assert [b.node for b in one.culprits] == ["r1b"]
    same = of(rack, part("anomaly", 0.9, (-1, "r1b"))).verdict
    assert same.kind == "slow" and [b.node for b in same.culprits] == ["r1b"]


def test_what_nobody_knows_stays_unknown_and_is_kept() -> None:
    unknown = Part(classify([WorkerLog(0, "n0", "frobd: lane 4 lost sync")]))
    fused = of(unknown)
    assert (fused.verdict.kind, fused.verdict.culprits, fused.verdict.confidence) == ("unknown", (), 0.0)
    assert of(unknown, part("slow", 0.8, (2, "n2"))).verdict.culprits[0].node == "n2"
    assert fused.evidence[0].part is unknown


def test_a_corrupt_member_explains_a_loss_that_is_no_number() -> None:
    fused = of(part("anomaly", 0.9, cause="non-finite"), part("corrupt", 0.95, (6, "n3")))
    assert fused.verdict.kind == "corrupt" and fused.verdict.culprits[0].rank == 6
    assert "also anomaly" in fused.verdict.why


def test_the_log_explains_before_what_was_seen_earlier() -> None:
    log = Part(classify([WorkerLog(-1, "n1", XID)]), 50.0)
    why = of(part("slow", 0.9, (-1, "n1"), at_s=10.0), log, part("hang", 0.9, (5, "n1"), at_s=60.0)).verdict.why
    assert why.index("hang of") < why.index("behind it: device-lost") < why.index("slow of")
