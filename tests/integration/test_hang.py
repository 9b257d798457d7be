"""Hangs of real processes: found in time, the odd one named, stacks kept, recovered; and what only looks like one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

BUSY = Path(__file__).parent / "scripts" / "busy.py"
HANG = ("--hang-timeout", "2")


def judged(run: LocalRun) -> e.HangJudged | None:
    found = run.events(e.HangJudged)
    return found[0] if found else None


def culprits(run: LocalRun) -> set[int]:
    verdict = run.until(lambda: judged(run), timeout_s=40)
    assert verdict is not None
    return {blame.rank for blame in verdict.verdict.culprits}


def stacks(run: LocalRun) -> dict[str, str]:
    folder = run.run_dir / "incidents" / "I001"
    return {path.name: path.read_text() for path in folder.glob("*-stacks.txt")}


def silence(run: LocalRun) -> float:
    """From the last step to the verdict, seconds of the controller's clock."""
    seen = [s.event for s in run.entries() if isinstance(s.event, e.StepsSeen) and s.event.epoch == 1]
    verdict = next(s.t_s for s in run.entries() if isinstance(s.event, e.HangJudged))
    return verdict - max(s.step_at_s for s in seen)


@pytest.mark.parametrize(
    ("what", "options", "env", "guilty"),
    [
        ("loader", ("--nproc-per-node", "2"), {}, {1}),
        ("loader", ("--nproc-per-node", "2"), {"LOADER_WORKERS": "1"}, {1}),
        ("skip", ("--nproc-per-node", "3"), {}, {0}),
    ],
)
def test_who_is_stuck_is_named(
    tmp_path: Path, what: str, options: tuple[str, ...], env: dict[str, str], guilty: set[int]
) -> None:
    """C1, C2, C7, C8: no error, no death, only no progress."""
    with LocalRun(tmp_path, BUSY, *HANG, *options, args=(what,), **env) as run:
        assert culprits(run) == guilty
        assert run.wait() == ExitCode.OK
        assert silence(run) < 3.5
        texts = stacks(run)
        assert len(texts) == run.plan().world_size
        assert all("most recent call first" in text for text in texts.values())
        closed = run.events(e.IncidentClosed)
        assert [c.outcome for c in closed] == ["recovered"]


@pytest.mark.parametrize("workers", [2, 4])
def test_a_stopped_worker_is_named_and_replaced(tmp_path: Path, workers: int) -> None:
    with LocalRun(tmp_path, BUSY, *HANG, "--nproc-per-node", str(workers), args=("nothing",)) as run:
        run.until_step(2)
        run.kill(1, signal.SIGSTOP)
        assert culprits(run) == {1}
        assert run.wait() == ExitCode.OK
        assert "most recent call first" in stacks(run)["rank1-stacks.txt"]
        (closed,) = run.events(e.IncidentClosed)
        assert closed.outcome == "recovered"
        assert closed.downtime_s < 6  # 3 s on a quiet machine: benchmarks/recovery.py measures


@pytest.mark.parametrize(("what", "seconds"), [("save", 5), ("eval", 5), ("first", 5)])
def test_long_phases_are_no_hang(tmp_path: Path, what: str, seconds: int) -> None:
    """C3: each phase has a limit of its own."""
    with LocalRun(tmp_path, BUSY, *HANG, "--nproc-per-node", "2", args=(what, str(seconds))) as run:
        assert run.wait() == ExitCode.OK
        assert not run.events(e.HangJudged)
        assert not run.events(e.IncidentOpened)


def test_a_save_that_hangs_is_found(tmp_path: Path) -> None:
    """C3's other half; and C5: the next epoch is judged by its own progress, not by the save that was cut off."""
    options = (*HANG, "--save-timeout", "3", "--nproc-per-node", "2")
    with LocalRun(tmp_path, BUSY, *options, args=("save",)) as run:
        assert culprits(run) == {0}
        run.until_step(3, epoch=2)
        run.kill(1, signal.SIGSTOP)  # no excuse is left over from the save
        run.until(lambda: len(run.events(e.HangJudged)) == 2, timeout_s=15)
        assert {b.rank for b in run.events(e.HangJudged)[1].verdict.culprits} == {1}
        assert run.wait() == ExitCode.OK


def test_without_restarts_a_hang_ends_the_job_with_its_code(tmp_path: Path) -> None:
    with LocalRun(tmp_path, BUSY, *HANG, "--max-restarts", "0", "--nproc-per-node", "2", args=("loader",)) as run:
        assert run.wait() == ExitCode.HUNG
