"""A worker whose script ended but whose process stays: it is ended after a while, and not before."""

from __future__ import annotations

from everstep.control import node as n
from everstep.control.membership import deal
from everstep.core.types import Action, Directive, Exit, ExitCause, NodeReport

LIMIT_S = 5.0


def running() -> n.Node:
    node = n.Node(NodeReport("n1", "n1.1", 1, 0.0, 2, "10.0.0.1", 7000), exit_s=LIMIT_S)
    node, _ = n.step(node, n.Directed(Directive(1, 1, Action.RUN, 1, deal(1, (), [node.report], 1, 0))), 0.0)
    for local_rank in (0, 1):
        node, _ = n.step(node, n.WorkerStarted(1, local_rank, 100 + local_rank), 0.0)
    return node


def lingers(node: n.Node, local_rank: int, silent_s: float, epoch: int = 1) -> list[n.Command]:
    after, commands = n.step(node, n.WorkerLingers(epoch, local_rank, silent_s), 0.0)
    assert after == node, "only its end changes what the controller is told"
    return commands


def test_a_silent_process_is_ended_at_the_limit() -> None:
    assert lingers(running(), 1, LIMIT_S - 0.1) == []
    assert lingers(running(), 1, LIMIT_S) == [n.EndLingering(1)]


def test_not_one_of_another_epoch_nor_one_that_is_gone() -> None:
    assert lingers(running(), 1, LIMIT_S, epoch=2) == []
    node, _ = n.step(running(), n.WorkerGone(1, 1, Exit(ExitCause.OK, 0.0)), 0.0)
    assert lingers(node, 1, LIMIT_S) == []
    assert lingers(node, 0, LIMIT_S) == [n.EndLingering(0)]
