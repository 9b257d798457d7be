"""Anomalies of metrics as incidents: opened, repeated, closed; by whoever has the first role, over controllers."""

from __future__ import annotations

from typing import cast

import msgspec
from msgspec.structs import replace

from everstep.control.anomalies import AnomalyWatch
from everstep.control.job import Job
from everstep.core import events as e
from everstep.core.anomaly import Anomaly
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.types import JobSpec, NodeReport, WorkerReport
from everstep.observe.summary import summarize
from everstep.observe.text import render

SPIKE = Anomaly(1, "loss", 61, "spike", "loss is 9 at step 61", 0.9, 9.0, 1.9, 2.1)
AGAIN = replace(SPIKE, cause="repeated-spike", why="loss is 9, number 3")
NAN = Anomaly(2, "gradients", 70, "non-finite", "gradients is nan at step 70", 0.9)


def job_of(*workers: str, epoch: int = 1) -> Job:
    seats = tuple(Seat(worker, worker.split("/")[0], "h", "") for worker in workers)
    return replace(Job(JobSpec("demo")), epoch=epoch, formation=Formation(epoch, seats, False, 0))


def report(worker: str, *anomalies: Anomaly, epoch: int = 1) -> NodeReport:
    said = SessionReport(worker, Stage.MEMBER, 61, 1, 1, "", "h", anomalies=anomalies)
    return NodeReport("n", "a", 1, 0.0, 1, "", 0, epoch, workers=(WorkerReport(0, session=said),))


def kinds(records: list[e.Record]) -> list[str]:
    return [type(record).__name__ for record in records]


def test_an_incident_from_the_first_sign_until_it_is_over() -> None:
    watch, job = AnomalyWatch(), job_of("n0/0#0", "n1/0#0")
    assert watch.saw(report("n1/0#0", SPIKE), job) == []  # not the first role's
    records = watch.saw(report("n0/0#0", SPIKE), job)
    assert kinds(records) == ["AnomalyJudged", "IncidentOpened"] and watch.saw(report("n0/0#0", SPIKE), job) == []
    records += watch.saw(report("n0/0#0", AGAIN), job)
    assert kinds(records[2:]) == ["AnomalyJudged", "IncidentUpdated", "Alert"]
    records += watch.saw(report("n0/0#0", replace(AGAIN, over=63), NAN), job)
    assert kinds(records[5:]) == ["IncidentClosed", "AnomalyJudged", "IncidentOpened"]
    records += watch.end()
    entries = [e.Entry(n, n, n, "demo", 1, record) for n, record in enumerate(records)]
    assert msgspec.json.decode(msgspec.json.encode(entries), type=list[e.Entry]) == entries
    text = render(summarize(entries))
    assert "A001  anomaly at 1.0 s: loss is 9, number 3" in text and "loss is as usual again at step 63" in text
    assert "A002  anomaly" in text and "out of line to the end of the job" in text
    assert "note: anomaly: loss: repeated-spike (incident A001): a person should look" in text


def test_what_another_one_told_has_no_end_that_anybody_knows() -> None:
    watch = AnomalyWatch()
    watch.saw(report("n0/0#0", SPIKE), job_of("n0/0#0", "n1/0#0"))
    (closed,) = watch.saw(report("n0/0#0", SPIKE), job_of("n1/0#0", "n0/0#0"))
    assert isinstance(closed, e.IncidentClosed) and closed.incident == "A001"
    assert watch.saw(report("n0/0#0", replace(SPIKE, over=63)), job_of("n0/0#0", "n1/0#0")) == []  # told already
    restarted = watch.saw(report("n0/0#0", SPIKE, epoch=2), job_of("n0/0#0", epoch=2))  # another process of that name
    assert cast(e.AnomalyJudged, restarted[0]).incident == "A002"


def test_a_new_controller_goes_on_with_what_is_open() -> None:
    watch, job = AnomalyWatch(), job_of("n0/0#0")
    records = watch.saw(report("n0/0#0", SPIKE, NAN), job)
    records += watch.saw(report("n0/0#0", replace(SPIKE, over=63), NAN), job)
    entries = [e.Entry(n, n, n, "demo", 1, record) for n, record in enumerate(records)]
    successor = AnomalyWatch()
    assert successor.adopt(entries, job) == []
    assert successor.saw(report("n0/0#0", replace(SPIKE, over=63), NAN), job) == []
    (closed,) = successor.saw(report("n0/0#0", replace(NAN, over=71)), job)
    assert closed == e.IncidentClosed("A002", "gradients is as usual again at step 71")
    later = AnomalyWatch().adopt(entries, job_of("n0/0#0", epoch=2))
    assert later == [e.IncidentClosed("A002", "the job began anew")]
