"""How workers end, and what the job says of it: causes, first cause and collateral, logs, exit codes, crash loops.

Scripts that do not need torch run with --no-zygote: they start in a fraction of a second.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import ExitCause
from everstep.testing.local import LocalRun

SCRIPTS = Path(__file__).parent / "scripts"
ENDING = SCRIPTS / "ending.py"
PLAIN = ("--no-zygote", "--nproc-per-node")


def first_ends(run: LocalRun, epoch: int = 1) -> dict[int, e.WorkerEnded]:
    """Rank -> the last that was said about its end in that epoch."""
    return {x.event.rank: x.event for x in run.entries() if isinstance(x.event, e.WorkerEnded) and x.epoch == epoch}


# B10: who killed it -------------------------------------------------------------------------------------


def test_out_of_memory_is_told_from_other_kills(tmp_path: Path, small_cgroup: Callable[[int], Path]) -> None:
    group = small_cgroup(512 << 20)
    with LocalRun(tmp_path, ENDING, *PLAIN, "1", args=("eat",)) as run:
        assert run.process is not None
        (group / "cgroup.procs").write_text(str(run.process.pid))
        assert run.wait() == 0
        end = first_ends(run)[0].exit
        assert end.cause is ExitCause.OOM, end
        assert "killed by the kernel, out of memory" in end.message
        assert "killed by the kernel: out of memory" in run.text()
        assert run.events(e.CauseFound)[0].verdict.culprits[0].cause == "host-out-of-memory"


def test_a_kill_from_outside_and_one_after_the_grace(tmp_path: Path) -> None:
    args = ("wait", "--others", "ignore")
    with LocalRun(tmp_path, ENDING, *PLAIN, "2", "--grace", "0.5", args=args) as run:
        run.until(lambda: (tmp_path / "ready-0-0").exists() and (tmp_path / "ready-0-1").exists())
        run.kill(rank=0)
        assert run.wait() == 0
        ends = first_ends(run)
        assert ends[0].exit.cause is ExitCause.SIGNAL
        assert "from outside, not by Everstep and not by the kernel for memory" in ends[0].exit.message
        assert "resident" in ends[0].exit.message
        assert ends[1].exit.cause is ExitCause.GRACE
        assert "did not end within the grace period" in ends[1].exit.message
        update = run.events(e.IncidentUpdated)[0]
        assert [b.rank for b in update.culprits] == [0]
        assert [b.rank for b in update.collateral] == [1]
        assert "killed by signal 9 (sent from outside)" in run.text()


# B19, B3: the grace is kept, and no more than it -------------------------------------------------------


def test_who_ignores_sigterm_holds_nobody_up(tmp_path: Path) -> None:
    args = ("raise", "--others", "ignore")
    with LocalRun(tmp_path, ENDING, *PLAIN, "2", "--grace", "1", args=args) as run:
        assert run.wait() == 0
        opened = next(x.t_s for x in run.entries() if isinstance(x.event, e.IncidentOpened))
        formed = [x.t_s for x in run.entries() if isinstance(x.event, e.EpochFormed)]
        assert 1.0 <= formed[1] - opened <= 1.8
        assert first_ends(run)[1].exit.cause is ExitCause.GRACE


def test_who_saves_within_the_grace_may_finish(tmp_path: Path) -> None:
    args = ("raise", "--others", "slow", "--seconds", "1")
    with LocalRun(tmp_path, ENDING, *PLAIN, "2", "--grace", "20", args=args) as run:
        assert run.wait() == 0
        end = first_ends(run)[1].exit
        assert end.cause is ExitCause.OK or end.cause is ExitCause.STOPPED, end
        assert "saved" in (run.run_dir / "logs/node0/attempt_1/1/stdout.log").read_text()


# B11, B16: first cause and collateral, in real collectives ----------------------------------------------


def test_survivors_of_a_large_all_reduce_recover_and_are_collateral(tmp_path: Path) -> None:
    """B16: in a ring of four, rank 0 is no neighbour of rank 2: it waits on, unless its connections are shut."""
    options = ("--nproc-per-node", "4", "--grace", "5")
    with LocalRun(tmp_path, SCRIPTS / "reduce.py", *options, args=("3", "32")) as run:
        run.until_step(2)
        run.kill(rank=2)
        assert run.wait() == 0
        assert sorted(path.name for path in tmp_path.glob("shard-*")) == ["shard-0", "shard-1", "shard-3"]
        ends = first_ends(run)
        assert ends[2].exit.cause is ExitCause.SIGNAL
        assert ExitCause.GRACE not in [w.exit.cause for w in ends.values()], "a survivor was not woken"
        assert all(w.exit.signal not in (signal.SIGABRT, signal.SIGSEGV) for w in ends.values()), ends
        update = run.events(e.IncidentUpdated)[0]
        assert [b.rank for b in update.culprits] == [2]
        assert {b.rank for b in update.collateral} == {r for r, w in ends.items() if w.exit.failed} - {2}
        assert "rank 2 on node0 was killed by signal 9" in update.why
        assert run.events(e.EpochFormed)[-1].plan.epoch == 2


# B12: logs ----------------------------------------------------------------------------------------------


def test_every_attempts_logs_are_kept_and_the_last_lines_shown(tmp_path: Path) -> None:
    args = ("raise", "--rank", "1", "--attempts", "2", "--others", "wait")
    with LocalRun(tmp_path, ENDING, *PLAIN, "2", args=args) as run:
        assert run.wait() == 0
        for attempt in (1, 2, 3):
            for rank in (0, 1):
                text = (run.run_dir / f"logs/node0/attempt_{attempt}/{rank}/stdout.log").read_text()
                assert text == f"rank {rank} is ready in attempt {attempt - 1}\n"
        console = [x for x in run.text().splitlines() if "is ready in attempt" in x]
        assert sorted(console) == sorted(
            f"[rank{r}]: rank {r} is ready in attempt {a}" for r in (0, 1) for a in range(3)
        )
        assert "ValueError: the data set has no sample 12" in (run.run_dir / "summary.txt").read_text()
        incident = run.events(e.IncidentOpened)[0].incident
        kept = (run.run_dir / "incidents" / incident / "rank1-log.txt").read_text()
        assert "ValueError: the data set has no sample 12" in kept
        causes = [x.verdict.culprits[0] for x in run.events(e.CauseFound)]
        assert [(x.rank, x.cause) for x in causes] == [(1, "code")] * 2
        assert (run.run_dir / "summary.txt").read_text().count("its log: code (90% sure)") == 2
        report = json.loads((run.run_dir / "report.json").read_bytes())
        assert [(x["title"], x["who"]) for x in report["incidents"]] == [("A worker died", "rank 1 on node0")] * 2
        assert abs(sum(bucket["share"] for bucket in report["buckets"]) - 1) < 1e-3 and report["verdict"] == "finished"
        assert "no sample 12" in (run.run_dir / "report.html").read_text()


# B14, B18: exit codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", ["0", "100"])
def test_no_failure_ends_with_status_0(tmp_path: Path, restarts: str) -> None:
    """The same failure each time: the budget ends the job, or the crash loop does. All jobs at once."""
    hows = ("raise", "exit", "kill", "vanish", "nan")
    with ExitStack() as stack:
        jobs = {}
        for how in hows:
            (tmp_path / how).mkdir()
            options = (*PLAIN, "1", "--max-restarts", restarts)
            jobs[how] = stack.enter_context(LocalRun(tmp_path / how, ENDING, *options, args=(how, "--attempts", "99")))
        for how, run in jobs.items():
            code = ExitCode.FAILED if restarts == "0" else ExitCode.CRASH_LOOP
            assert run.wait() == code, f"{how}:\n{run.text()}"
            assert len(run.events(e.EpochFormed)) == (1 if restarts == "0" else 3), how
            words = "no restart left of 0" if restarts == "0" else "the same failure 3 times"
            assert words in (run.run_dir / "summary.txt").read_text()


def test_the_same_error_at_the_same_step_and_a_hang(tmp_path: Path) -> None:
    cases = {"raise": (), "hang": ("--max-restarts", "0", "--hang-timeout", "2")}
    with ExitStack() as stack:
        jobs = started(stack, tmp_path, "finite.py", cases)
        run = jobs["raise"]
        assert run.wait() == ExitCode.CRASH_LOOP, run.text()
        assert len(run.events(e.EpochFormed)) == 3
        assert "the same failure 3 times at step 12" in run.text()
        assert jobs["hang"].wait() == ExitCode.HUNG, jobs["hang"].text()


def test_a_job_that_ends_too_early_failed(tmp_path: Path) -> None:
    cases = {"well-100": ("--expect-steps", "100"), "well-12": ("--expect-steps", "12")}
    with ExitStack() as stack:
        jobs = started(stack, tmp_path, "finite.py", cases)
        assert jobs["well-100"].wait() == ExitCode.INCOMPLETE, jobs["well-100"].text()
        assert "at step 12 of 100" in jobs["well-100"].text()
        assert jobs["well-12"].wait() == ExitCode.OK, jobs["well-12"].text()
        assert not jobs["well-12"].events(e.IncidentOpened)


def started(stack: ExitStack, folder: Path, script: str, cases: dict[str, tuple[str, ...]]) -> dict[str, LocalRun]:
    """One job a case, all at once: name (how it ends, before a dash) -> job, given its options."""
    jobs = {}
    for name, options in cases.items():
        (folder / name).mkdir()
        run = LocalRun(folder / name, SCRIPTS / script, *options, args=(name.partition("-")[0], "12"))
        jobs[name] = stack.enter_context(run)
    return jobs
