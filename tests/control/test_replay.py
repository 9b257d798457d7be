"""A controller that died between an input and its records: the next one owes the journal exactly the missing ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from everstep.control import lifecycle, tending
from everstep.control.job import Command, Job, Note
from everstep.control.journal import Journal, read
from everstep.control.replay import Past, past_of, replay
from everstep.control.segments import Files
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


@pytest.mark.parametrize("seed", range(10))
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


def test_a_controller_begins_with_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the journal alone is read; what is kept by other code, or of a future that was lost, is not used."""
    files, spec = Files(tmp_path / "journal.jsonl"), JobSpec("j", 1, 4)
    with Journal.open(files.path, "j", 20_000) as journal:
        for number in range(200):
            report = msgspec.structs.replace(REPORT, node=f"n{number % 7}", seq=number)
            for event in [e.JobSubmitted(spec), e.ControllerStarted(1)] if not number else [e.NodeReported(report)]:
                journal.append(event, float(number), 0.0, 0)
            if number == 120:
                tending.tend(files.path, with_past=True)
                kept = files.past.read_bytes()
        last = journal.last
    whole = Past.of(spec)
    for entry in read(files.path):
        whole.add(entry)
    read_again: list[int] = []
    add = Past.add
    monkeypatch.setattr(Past, "add", lambda past, entry: (read_again.append(entry.n), add(past, entry))[1])
    assert past_of(files.path, spec, last) == whole and read_again[0] == 123
    tending.tend(files.path, with_past=True)
    read_again.clear()
    assert past_of(files.path, spec, last) == whole and read_again == []
    files.past.write_bytes(kept)
    assert past_of(files.path, msgspec.structs.replace(spec, max_nodes=5), last).spec.max_nodes == 5
    assert read_again[0] == 1 and not files.past.exists()
    files.past.write_bytes(kept)
    assert past_of(files.path, spec, 100) == whole and not files.past.exists()
    files.past.write_bytes(kept)
    monkeypatch.setattr("everstep.control.replay.fingerprint", lambda: "other")
    read_again.clear()
    assert past_of(files.path, spec, last) == whole and read_again[0] == 1
