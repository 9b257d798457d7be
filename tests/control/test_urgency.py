"""Which changes of a node's report wait for others of the same node, and which are told at once."""

from __future__ import annotations

import msgspec
import pytest

from everstep.control import membership
from everstep.control import node as n
from everstep.core.anomaly import Anomaly
from everstep.core.formation import Formation, Rollback, Seat, SessionReport, Stage
from everstep.core.saves import Saves
from everstep.core.types import Action, Directive, Exit, ExitCause, NodeReport

SEATS = tuple(Seat(f"n1/{k}#0", "n1", "n1", f"10.0.0.1:{k}") for k in (0, 1))


def session(local_rank: int, **changes: object) -> SessionReport:
    said = SessionReport(f"n1/{local_rank}#0", Stage.MEMBER, 5, 1, 1, "10.0.0.1:9", "n1", resumed=True)
    return msgspec.structs.replace(said, **changes)


def training() -> n.Node:
    """Two members, both in epoch 1; formation 2 is on its way."""
    report = NodeReport("n1", "n1.1", 1, 0.0, 2, "10.0.0.1", 7000)
    directive = Directive(1, 1, Action.RUN, 1, membership.deal(1, (), [report], 1, 0))
    node, _ = n.step(n.Node(report), n.Directed(directive), 0.0)
    for event in (n.WorkerStarted(1, 0, 100), n.WorkerStarted(1, 1, 101), spoke(session(0)), spoke(session(1))):
        node, _ = n.step(node, event, 0.0)
    formed = msgspec.structs.replace(directive, seq=2, formation=Formation(2, SEATS, True, 5))
    return n.step(node, n.Directed(formed), 0.0)[0]


def spoke(said: SessionReport) -> n.SessionSpoke:
    return n.SessionSpoke(1, int(said.worker[3]), said)


def soon(node: n.Node, event: n.NodeEvent) -> bool:
    (report,) = [c for c in n.step(node, event, 0.0)[1] if isinstance(c, n.Report)]
    return report.soon


@pytest.mark.parametrize(
    "changes",
    [
        {"committed": 6, "saves": Saves(requested=6)},
        {"saves": Saves(durable=6)},
        {"anomalies": (Anomaly(1, "loss", 5, 1.0, 1.0, 0.0),)},
    ],
)
def test_saves_and_metrics_wait(changes: dict[str, object]) -> None:
    assert soon(training(), spoke(session(0, **changes)))


@pytest.mark.parametrize(
    "event",
    [
        n.WorkerFailed(1, 0, Exit(ExitCause.ERROR, 0.0)),
        n.WorkerGone(1, 0, Exit(ExitCause.SIGNAL, 0.0, signal=9)),
        n.TermSeen(1, 0),
        n.LeaveAsked(),
        n.LinkChanged(True),
        spoke(session(0, failure="raised")),
        spoke(session(0, stage=Stage.LEFT)),
        spoke(session(0, saves=Saves(requested=6), failure="raised")),
        spoke(session(0, rollbacks=(Rollback(2, 3),))),
    ],
)
def test_what_a_recovery_waits_for_does_not(event: n.NodeEvent) -> None:
    assert not soon(training(), event)


def test_the_first_state_that_a_session_holds_is_told_at_once() -> None:
    node, _ = n.step(training(), spoke(session(0, committed=-1)), 0.0)
    assert not soon(node, spoke(session(0, committed=0)))


@pytest.mark.parametrize("phase", [{"prepared": 2}, {"epoch": 2, "resumed": False}])
def test_of_a_phase_of_a_formation_the_nodes_last_one_is_told_at_once(phase: dict[str, int]) -> None:
    node, commands = n.step(training(), spoke(session(0, **phase)), 0.0)
    assert [c.soon for c in commands if isinstance(c, n.Report)] == [True]
    assert not soon(node, spoke(session(1, **phase)))


def test_nobody_waits_for_one_that_has_ended() -> None:
    node, _ = n.step(training(), n.WorkerFailed(1, 1, Exit(ExitCause.ERROR, 0.0)), 0.0)
    assert not soon(node, spoke(session(0, prepared=2)))
