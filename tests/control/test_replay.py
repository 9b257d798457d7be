"""A controller that died between an input and its records: the next one owes the journal exactly the missing ones."""

from __future__ import annotations

from everstep.control import lifecycle
from everstep.control.job import Job, Note
from everstep.control.replay import replay
from everstep.core import events as e
from everstep.core.types import JobSpec, NodeReport

SPEC = JobSpec(job="j")
REPORT = NodeReport("n0", "i0", 1, 0.0, slots=2, address="127.0.0.1", store_port=1)
INPUTS: list[e.Input] = [e.JobSubmitted(SPEC), e.ControllerStarted(1), e.NodeReported(REPORT)]


def journal() -> tuple[Job, list[e.Entry], list[e.Record]]:
    """The job after three inputs, their whole journal, and the records of the last input."""
    job = Job(SPEC)
    entries: list[e.Entry] = []
    records: list[e.Record] = []
    for number, event in enumerate(INPUTS):
        job, commands = lifecycle.step(job, event, float(number))
        records = [c.record for c in commands if isinstance(c, Note)]
        for item in (event, *records):
            entries.append(e.Entry(len(entries) + 1, float(number), 0.0, "j", job.epoch, item))
    return job, entries, records


def test_every_cut_is_made_up_for() -> None:
    job, entries, records = journal()
    assert any(isinstance(record, e.EpochFormed) for record in records)
    for lost in range(len(records) + 1):
        replayed = replay(SPEC, entries[: len(entries) - lost])
        assert list(replayed.missing) == records[len(records) - lost :]
        assert replayed.term == 1
        assert replayed.job == job
