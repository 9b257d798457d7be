"""An incident as spans: where they begin and end, what they tell, and ids that are the same each time."""

from __future__ import annotations

from everstep.core.types import Blame, Verdict
from everstep.observe.spans import Span, spans
from everstep.observe.view import IncidentView, Moment, View

SUBMITTED_S = 1_700_000_000.0


def view_of(incident: IncidentView, job: str = "gpt") -> View:
    return View(job=job, submitted_wall_s=SUBMITTED_S, incidents=[incident])


def crash() -> IncidentView:
    blame = Blame(3, "node1", "signal", "SIGKILL")
    return IncidentView(
        "I001", "crash", 2, 100.5, "rank 3 on node1: killed by SIGKILL", (blame,), first_sign_s=100.25, closed_s=104.25,
        outcome="recovered", downtime_s=4.0, phases={"detect": 0.5, "stop": 1.5, "form": 1.0, "first-step": 1.0},
        redone_steps=0, step=77, answer="promote-standby", cause=Verdict("log", (blame,), "why"),
        timeline=[Moment(100.5, "detect", "the kernel told"), Moment(101.0, "decide", "promote-standby")],
        cost={"recovery": 28.0},
    )  # fmt: skip


def seconds(span: Span) -> tuple[float, float]:
    """Since the job's submission."""
    return tuple(round(at / 1e9 - SUBMITTED_S, 3) for at in (span.begin_ns, span.end_ns))  # type: ignore[return-value]


def test_phases_lie_one_after_the_other_in_the_whole() -> None:
    root, *phases = spans(view_of(crash()), crash())
    assert (root.name, root.parent_id, seconds(root)) == ("incident: crash", 0, (100.0, 104.0))
    assert {phase.name: seconds(phase) for phase in phases} == {
        "detect": (100.0, 100.5), "stop": (100.5, 102.0), "form": (102.0, 103.0), "first-step": (103.0, 104.0),
    }  # fmt: skip
    assert {(phase.trace_id, phase.parent_id) for phase in phases} == {(root.trace_id, root.span_id)}
    assert len({span.span_id for span in (root, *phases)}) == 5


def test_what_a_span_tells() -> None:
    root = spans(view_of(crash()), crash())[0]
    assert root.error == "rank 3 on node1: killed by SIGKILL"
    assert root.attributes["everstep.culprits"] == "rank 3 on node1"
    assert root.attributes["everstep.cause"] == "signal"
    assert root.attributes["everstep.lost_accelerator_seconds.recovery"] == 28.0
    assert root.attributes["everstep.redone_steps"] == 0
    assert "everstep.expected_loss_accelerator_seconds" not in root.attributes, "unknown"
    assert [(event.name, event.at_ns / 1e9 - SUBMITTED_S) for event in root.events] == [
        ("detect", 100.5),
        ("decide", 101.0),
    ]


def test_the_same_incident_has_the_same_ids_and_others_have_others() -> None:
    first, again = spans(view_of(crash()), crash()), spans(view_of(crash()), crash())
    assert first == again
    other = crash()
    other.id = "I002"
    traces = {spans(view_of(i, job), i)[0].trace_id for i, job in ((crash(), "gpt"), (other, "gpt"), (crash(), "bert"))}
    assert len(traces) == 3


def test_an_incident_without_a_step_after_it_ends_when_it_was_closed() -> None:
    stop = IncidentView("I003", "stop", 1, 50.0, "asked by a person", closed_s=53.0, outcome="stopped")
    (root,) = spans(view_of(stop), stop)
    assert (seconds(root), root.error) == ((50.0, 53.0), "")
    stop.phases, stop.first_sign_s = {"detect": 2.0}, 47.0
    root, detect = spans(view_of(stop), stop)
    assert (seconds(root), seconds(detect)) == ((47.0, 53.0), (48.0, 50.0))
