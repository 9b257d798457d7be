"""A controller that died between an input and its records: the next one owes the journal exactly the missing ones."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import pytest

from everstep.control import lifecycle
from everstep.control.job import Command, Job, Note
from everstep.control.replay import Past, replay
from everstep.core import events as e
from everstep.core.types import JobSpec, NodeReport
from everstep.testing import schedules
from everstep.testing.cluster import SimController

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


def back(job: Job) -> Job:
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job)
    assert found == job
    return found


@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "12"))))
def test_what_is_kept_and_read_back_goes_on_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a controller that begins with a kept state is the one that would have replayed everything."""
    undisturbed: list[str] = []
    played = schedules.play(seed, undisturbed)
    entries: list[e.Entry] = []
    step = lifecycle.step

    def through_bytes(act: Callable[..., None]) -> Callable[..., None]:
        def acts(controller: SimController, *arguments: object) -> None:
            controller.job = back(controller.job)
            act(controller, *arguments)

        return acts

    def recorded(job: Job, event: e.Input, now: float) -> tuple[Job, tuple[Command, ...]]:
        after, commands = step(job, event, now)
        if after != job or commands:
            for item in (event, *(c.record for c in commands if isinstance(c, Note))):
                entries.append(e.Entry(len(entries) + 1, now, 0.0, "j", after.epoch, item))
        return after, tuple(commands)

    with monkeypatch.context() as patch:
        for name in ("receive", "restart", "_tick"):
            patch.setattr(SimController, name, through_bytes(getattr(SimController, name)))
        patch.setattr(SimController, "replayed", lambda controller: controller.job)  # else steps would count twice
        patch.setattr(lifecycle, "step", recorded)
        lines: list[str] = []
        assert schedules.play(seed, lines) == played
    assert lines == undisturbed
    assert isinstance(entries[0].event, e.JobSubmitted)
    whole = Past.of(entries[0].event.spec)
    kept: list[Past] = []
    for entry in entries:
        whole.add(entry)
        for past in kept:
            past.add(entry)
        if entry.n % 20 == 10:
            kept.append(msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=Past))
    assert kept and all(past == whole for past in kept)
