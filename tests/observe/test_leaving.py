"""What `everstep drain` tells, from the journal's events alone."""

from __future__ import annotations

from everstep.core import events as e
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.types import EpochPlan, Exit, ExitCause, Member, NodeLoss, NodeReport, WorkerReport
from everstep.observe.leaving import Leaving

WORKERS = ("n1/0#0", "n1/1#0", "n2/0#0", "n2/1#0")


def formation(epoch: int, *workers: str) -> e.FormationMade:
    seats = tuple(Seat(worker, worker.partition("/")[0], "h", "h:1") for worker in workers)
    return e.FormationMade(Formation(epoch, seats, abort=False, floor=0))


def report(node: str, *left: int, gone: bool = False) -> e.NodeReported:
    """`left`: local rank of a worker that gave its seat up after 7 steps, and its neighbour after 6."""
    workers = tuple(
        WorkerReport(k, gone=gone and k in left, session=SessionReport(f"{node}/{k}#0", stage, 7 - k, 2, 2, "h:1", "h"))
        for k, stage in enumerate(Stage.LEFT if k in left else Stage.MEMBER for k in (0, 1))
    )
    return e.NodeReported(NodeReport(node, f"{node}.1", 1, 0.0, 2, "h", 1, workers=workers))


def plan(epoch: int, *nodes: str) -> e.EpochFormed:
    members = tuple(Member(node, f"{node}.1", "h", k, 2 * k, 2) for k, node in enumerate(nodes))
    return e.EpochFormed(EpochPlan(epoch, members, 2 * len(nodes), "h", 1, 0))


def told(target: str, *events: e.AnyEvent) -> tuple[list[str], Leaving]:
    leaving = Leaving(target)
    return [text for text in map(leaving.saw, events) if text], leaving


def test_a_node_of_a_session_job() -> None:
    events = [formation(1, *WORKERS), e.DrainAsked("n2"), formation(2, *WORKERS[:2]), report("n2", 0, 1)]
    lines, leaving = told("n2", *events)
    assert lines == ["n2 is asked to leave", "it leaves at the end of a step, 2 members go on (formation 2)"]
    assert not leaving.gone
    assert leaving.saw(e.NodeLost("n2", "n2.1", NodeLoss.LEFT)) == "n2 has left after step 7; 2 members go on"
    assert leaving.gone


def test_a_standby_in_its_place_is_named() -> None:
    events = [formation(1, *WORKERS), e.DrainAsked("n2/1"), formation(2, *WORKERS[:3], "n3/0#0")]
    lines, leaving = told("n2/1", *events)
    assert lines[-1] == "it leaves at the end of a step, 4 members go on, n3/0 in its place (formation 2)"
    assert not leaving.saw(report("n2", 0, gone=True)) and not leaving.gone  # another one of its node
    assert leaving.saw(report("n2", 1, gone=True)) == "n2/1 has left after step 6; 4 members go on, n3/0 in its place"
    assert leaving.gone


def test_a_node_of_a_job_without_sessions() -> None:
    """All stop; it has left when the others go on."""
    ended = [e.WorkerEnded(rank, "n2", Exit(ExitCause.STOPPED, 0.0, step=9), 0.0) for rank in (2, 3)]
    begin = [plan(1, "n1", "n2"), e.DrainAsked("n2"), e.IncidentOpened("I001", "drain", (), "a node leaves"), *ended]
    lost, formed = e.NodeLost("n2", "n2.1", NodeLoss.LEFT), plan(2, "n1")
    for rest in ((lost, formed), (formed, lost)):
        lines, leaving = told("n2", *begin, *rest)
        assert leaving.gone
        assert lines[1:] == ["n2 has left after step 9; 2 workers on n1 go on from there in epoch 2"]
    _, leaving = told("n2", *begin, lost)
    assert not leaving.gone


def test_an_earlier_departure_does_not_count() -> None:
    events = [plan(1, "n1", "n2"), e.DrainAsked("n2"), e.NodeLost("n2", "n2.1", NodeLoss.LEFT), e.DrainAsked("n2")]
    lines, leaving = told("n2", *events)
    assert not leaving.gone and len(lines) == 3


def test_a_node_that_is_lost_on_its_way_out_and_a_job_that_ends() -> None:
    lines, leaving = told("n2", e.DrainAsked("n2"), e.NodeLost("n2", "n2.1", NodeLoss.DIED), e.JobEnded(3, "why"))
    assert lines[-1] == "n2 has left; it was lost on its way out (died)"
    assert leaving.gone and leaving.ended == e.JobEnded(3, "why")
