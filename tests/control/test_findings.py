"""Several detectors' findings about one incident become one verdict, parts and all; what is apart stays apart."""

from __future__ import annotations

import msgspec
import pytest

from everstep.control.findings import WINDOW_S, Findings
from everstep.core import events as e
from everstep.core.anomaly import Anomaly
from everstep.core.types import Blame, Exit, ExitCause, StacksTaken, Verdict
from everstep.observe.summary import summarize
from everstep.observe.text import render

FULL = "OSError: [Errno 28] No space left on device: '/scratch/a.pt'\n"


def slow(node: str, incident: str = "S001") -> e.SlowJudged:
    blame = Blame(1, node, "slow-compute", "+50%")
    return e.SlowJudged(incident, Verdict("slow", (blame,), f"rank 1 on {node} is slow", 0.9), "compute", 0.5, 40, 46)


def anomaly(incident: str = "A001", cause: str = "spike") -> e.AnomalyJudged:
    verdict = Verdict("anomaly", (Blame(-1, "", cause, "loss is 9"),), "loss is 9 at step 61", 0.9)
    return e.AnomalyJudged(incident, verdict, "n0/0#0", Anomaly(1, "loss", 61, cause, "loss is 9", 0.9))


def opened(incident: str, kind: str, *nodes: str, cause: str = "") -> e.IncidentOpened:
    blames = tuple(Blame(1, node, cause or kind) for node in nodes)
    return e.IncidentOpened(incident, kind, blames, f"{kind} of {', '.join(nodes)}")


def closed(incident: str) -> e.IncidentClosed:
    return e.IncidentClosed(incident, "recovered")


def feed(findings: Findings, *records: e.Record, first_s: float = 0.0) -> list[e.CauseFound]:
    """A record a second."""
    return [found for n, record in enumerate(records) for found in findings.saw(record, first_s + n)]


def raised(node: str) -> e.WorkerEnded:
    return e.WorkerEnded(1, node, Exit(ExitCause.ERROR, 1.0, message=FULL), 1.0)


def test_a_crash_of_a_slow_node_whose_log_knows_why() -> None:
    records = [slow("n1"), opened("S001", "slow", "n1"), raised("n1"), opened("I001", "crash", "n1"), closed("I001")]
    (found,) = feed(Findings(), *records)
    assert found.incident == "I001" and found.verdict.kind == "slow"
    assert [(b.rank, b.node, b.cause) for b in found.verdict.culprits] == [(1, "n1", "disk-space")]
    assert "behind it: disk-space" in found.verdict.why and found.verdict.confidence > 0.95
    assert [(role, part.kind) for role, part in found.evidence] == [("names", "log"), ("names", "slow")]
    entries = [e.Entry(n, n, n, "demo", 1, record) for n, record in enumerate([*records, found])]
    assert msgspec.json.decode(msgspec.json.encode(entries), type=list[e.Entry]) == entries
    assert "taken together: slow, rank 1 on n1 (9" in render(summarize(entries))


def test_one_part_alone_is_told_as_before() -> None:
    findings = Findings()
    (found,) = feed(findings, raised("n1"), opened("I001", "crash", "n1"), closed("I001"))
    assert found.verdict.kind == "log" and found.evidence == ()
    assert feed(findings, slow("n1"), opened("S001", "slow", "n1"), closed("S001"), first_s=10) == []


@pytest.mark.parametrize("apart", ["another node", "long before", "a metric"])
def test_what_is_apart_stays_apart(apart: str) -> None:
    findings = Findings()
    before = slow("n2" if apart == "another node" else "n1")
    if apart == "a metric":  # was out of line, and is not any more
        feed(findings, anomaly(), opened("A001", "anomaly"), closed("A001"))
    else:
        feed(findings, before, opened("S001", "slow", "n1"), closed("S001"))
    late = WINDOW_S + 9 if apart == "long before" else 5
    (found,) = feed(findings, raised("n1"), opened("I001", "crash", "n1"), closed("I001"), first_s=late)
    assert found.verdict.kind == "log"


def test_replicas_that_differ_explain_a_loss_that_jumped_and_a_slow_node_does_not() -> None:
    findings = Findings()
    feed(findings, slow("n2"), opened("S001", "slow", "n2"), anomaly(), opened("A001", "anomaly"))
    corrupt = [opened("I001", "corrupt", "n3"), closed("I001")]
    (found,) = feed(findings, *corrupt, first_s=5)
    assert found.verdict.kind == "corrupt" and found.verdict.culprits[0].node == "n3"
    assert {(role, part.kind) for role, part in found.evidence} == {("names", "corrupt"), ("tells", "anomaly")}
    (found,) = feed(findings, closed("A001"), first_s=8)
    assert found.incident == "A001" and found.verdict.culprits[0].node == "n3"
    assert "slow" not in {part.kind for _, part in found.evidence}


def test_a_hang_without_a_culprit_gets_one_from_the_slow_node() -> None:
    records = slow("n2"), opened("S001", "slow", "n2"), opened("I001", "hang"), closed("I001")
    (found,) = feed(Findings(), *records)
    assert found.verdict.kind == "hang" and found.verdict.culprits[0].node == "n2"


def test_what_is_found_afterwards_betters_it() -> None:
    findings = Findings()
    alone = feed(findings, opened("I001", "node-lost", "n1"), closed("I001"))
    assert alone == [] == findings.read(StacksTaken("n1", "I001", 1, {}, {1: "frobd: lane 4"}))
    (log,) = findings.read(StacksTaken("n1", "I001", 1, {}, {1: FULL}))
    assert log.verdict.kind == "log"
    (both,) = feed(findings, e.Alert("check-failed", "n1 is not used: disk", "n1"), first_s=9)
    assert both.incident == "I001" and both.verdict.culprits[0].node == "n1"
    assert {part.kind for _, part in both.evidence} == {"log", "check"}
    assert feed(findings, e.Alert("check-failed", "n1 is not used: disk", "n1"), first_s=10) == []
    assert feed(findings, e.Alert("check-failed", "n2 is not used: disk", "n2"), first_s=11) == []
