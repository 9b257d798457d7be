"""A bit flips in one member's memory: that one is named before long, and the run comes to the bits of one without."""

from __future__ import annotations

from pathlib import Path

import pytest
from session_harness import Line, SessionRun, assert_ledger

from everstep.core import events as e
from everstep.core.corruption import Corruption
from everstep.core.errors import ExitCode
from everstep.state.disk import Checkpoints

pytestmark = pytest.mark.timeout(150)

EVERY = 5
ARGS = ("--steps", "60", "--memory-every", str(EVERY), "--check-every", str(EVERY))


def train(folder: Path, members: int, *faults: str) -> SessionRun:
    args = [word for fault in faults for word in ("--fault", fault)]
    args += ["--checkpoints", str(folder / "checkpoints"), "--every", "45"]
    with SessionRun(folder, "--nproc-per-node", str(members), args=(*ARGS, *args)) as run:
        assert run.wait() == ExitCode.OK
    return run


def last(run: SessionRun) -> dict[tuple[int, int], Line]:
    """By role and step: what stayed of steps that were done again."""
    lines = sorted((line for lines in run.commits().values() for line in lines), key=lambda line: line.time)
    return {(line.role, line.step): line for line in lines}


def bits(run: SessionRun) -> dict[tuple[int, int], tuple[str, float]]:
    return {key: (line.digest, line.loss) for key, line in last(run).items()}


def on_disk(run: SessionRun, step: int) -> list[tuple[int, ...]]:
    """Checksums of what a later run would go on from."""
    place = Checkpoints(run.directory / "checkpoints")
    if step not in place.found():
        return []
    with place.reading(step) as sources:
        return [source.index.sums for source in sources]


def found(run: SessionRun) -> list[Corruption]:
    """What the sessions told, each once, as it was known in the end."""
    workers = (worker for event in run.events(e.NodeReported) for worker in event.report.workers)
    told = [w.session.corrupt for w in workers if w.session is not None and w.session.corrupt is not None]
    return list({each.epoch: each for each in sorted(told, key=lambda each: (each.epoch, each.sure))}.values())


def test_of_three_the_one_that_differs_is_named_and_all_come_to_what_they_would_have(tmp_path: Path) -> None:
    # The last one after the last step that is compared in a vote.
    faults = ("flip-parameter@12:1", "flip-moment@27:2", "flip-gradient@57:0")
    run = train(tmp_path / "flipped", 3, *faults)
    assert bits(run) == bits(train(tmp_path / "plain", 3))
    incidents = run.events(e.IncidentOpened)
    assert [(i.kind, [blame.rank for blame in i.culprits]) for i in incidents] == [("corrupt", [k]) for k in (1, 2, 0)]
    assert [each.step for each in found(run)] == [15, 30, 60]
    assert [each.verified for each in found(run)] == [10, 25, 55]
    assert "model.0.weight" in incidents[0].culprits[0].detail
    assert [back.step for back in run.events(e.StateRestored)] == [10, 25, 55]
    assert all("all went back to step" in update.why for update in run.events(e.IncidentUpdated))


def test_of_two_the_steps_done_again_show_who_was_wrong(tmp_path: Path) -> None:
    run, plain = (
        train(tmp_path / "flipped", 2, "flip-parameter@12:1", "flip-gradient@44:0"),
        train(tmp_path / "plain", 2),
    )
    assert bits(run) == bits(plain)
    assert on_disk(run, 45) in ([], on_disk(plain, 45))  # not with the wrong bit; the new one may have been overtaken
    assert on_disk(run, 60) == on_disk(plain, 60) != []
    opened = run.events(e.IncidentOpened)
    assert [(i.kind, {blame.rank for blame in i.culprits}) for i in opened] == [("corrupt", {0, 1})] * 2
    assert [each.sure for each in found(run)] == [True, True]
    named = [u for u in run.events(e.IncidentUpdated) if len(u.culprits) == 1]
    assert [(u.incident, u.culprits[0].rank) for u in named] == [(opened[0].incident, 1), (opened[1].incident, 0)]


def audited(folder: Path, members: int, *faults: str) -> SessionRun:
    """The number of members stays, so that the bits of their sums do. What is kept of step 12 is alike, and wrong."""
    args = [word for fault in faults for word in ("--fault", fault)]
    args += ["--fixed", "--audit-every", str(EVERY), "--check-every", "1", "--memory-every", "4"]
    with SessionRun(folder, "--nproc-per-node", str(members), args=("--steps", "30", *args)) as run:
        assert run.wait() == ExitCode.OK
    return run


def test_who_computes_wrong_gradients_is_named_replaced_and_leaves_no_trace(tmp_path: Path) -> None:
    """Its states are those of all others. Another one is killed later, when it has role 0's share in an audit."""
    run, plain = audited(tmp_path / "wrong", 3, "wrong@11:1", "die@25:0"), audited(tmp_path / "plain", 3)
    assert bits(run) == bits(plain)
    wrong, crash = run.events(e.IncidentOpened)
    assert [(i.kind, [blame.rank for blame in i.culprits]) for i in (wrong, crash)] == [
        ("corrupt", [1]),
        ("crash", [2]),
    ]
    ((step, verified, sure),) = {(each.step, each.verified, each.sure) for each in found(run)}
    assert (step, verified, sure) == (15, 11, True) and [back.step for back in run.events(e.StateRestored)] == [8]
    assert any("up to which all had computed rightly" in update.why for update in run.events(e.IncidentUpdated))
    assert_ledger(run)
    assert plain.events(e.StepsSeen)[-1].twice_s > 0.0, "a pass that is not committed makes no step"


def test_of_two_who_compute_unlike_nobody_is_named_nor_believed(tmp_path: Path) -> None:
    """A fault that is the same each time: they differ, and each is as sure of itself. All go back; in the end audits
    give up, and say so."""
    run = audited(tmp_path, 2, "wrong@11:1")
    opened = run.events(e.IncidentOpened)
    assert [(i.kind, [b.rank for b in i.culprits]) for i in opened] == [("corrupt", [0, 1])] * 3
    assert next(back.step for back in run.events(e.StateRestored)) == 8
    assert run.text().count("3 audits could not tell who. There are no more") == 1
    assert len(run.commits()) == 2, "no process was replaced"
