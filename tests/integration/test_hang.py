"""Hangs of real processes: found in time, the odd one named, stacks kept, recovered; and what only looks like one."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.control import lifecycle
from everstep.control.job import Direct, Job, Stage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import NodeReport
from everstep.testing.local import LocalRun

FAULTY = Path(__file__).parent / "scripts_hang" / "faulty.py"
# A quiet machine needs a second on top of the limit of 2 s (benchmarks/recovery.py measures); a busy one may take more.
HANG = ("--hang-timeout", "2", "--set", "restart.crash_loop=1000")
LIMIT_S, SOON_S = 2.0, 4.5
TOLD_S = 2.0


class Found:
    """What the journal tells of the one incident of an epoch."""

    def __init__(self, run: LocalRun, epoch: int) -> None:
        run.until(lambda: [x for x in run.events(e.IncidentOpened) if x.incident == f"I{epoch:03d}"])
        run.until(lambda: [x for x in run.events(e.EpochFormed) if x.plan.epoch == epoch + 1])
        entries = run.entries()
        self.events = [x.event for x in entries if x.epoch == epoch]
        self.opened = self.only(e.IncidentOpened)
        self.folder = run.run_dir / "incidents" / self.opened.incident
        self.opened_s = next(x.t_s for x in entries if x.event == self.opened)

    def only(self, kind: type[Any]) -> Any:
        (found,) = [x for x in self.events if isinstance(x, kind)]
        return found

    @property
    def culprits(self) -> set[int]:
        """Whom the hang's verdict names."""
        return {blame.rank for blame in self.only(e.HangJudged).verdict.culprits}

    @property
    def silence_s(self) -> float:
        """From the last step to the incident, on the controller's clock. One that is woken for its stacks may yet
        make a step on its way out."""
        before = self.events[: self.events.index(self.opened)]
        return self.opened_s - max(x.step_at_s for x in before if isinstance(x, e.StepsSeen))

    def stacks(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob("*-stacks.txt")}

    def written(self) -> list[str]:
        """Those that are there in full."""
        return [name for name, text in self.stacks().items() if "most recent call first" in text]


def assert_recovered(run: LocalRun, count: int) -> None:
    """Every incident was, by a step of the next epoch; and no rank ever had two living processes."""
    closed = run.events(e.IncidentClosed)
    assert [(c.incident, c.outcome) for c in closed] == [(f"I{n + 1:03d}", "recovered") for n in range(count)]
    assert not list(run.directory.glob("twice-*"))


def test_who_is_stuck_is_named(tmp_path: Path) -> None:
    """C1, C7: no error, no death, only no progress. One job of four workers, stuck in another way each time."""
    words = ("loader", "loader-process", "skip", "wait")
    with LocalRun(tmp_path, FAULTY, *HANG, "--nproc-per-node", "4", args=words) as run:
        for epoch, odd in ((1, 1), (2, 1), (3, 1), (4, 2)):
            if epoch == 4:
                run.until_step(3, epoch=epoch)
                run.kill(odd, signal.SIGSTOP)
            found = Found(run, epoch)
            assert found.culprits == {odd}, f"{words[epoch - 1]}: {found.opened}"
            assert LIMIT_S < found.silence_s < SOON_S
            run.until(lambda found=found: len(found.written()) == 4)  # a stopped one's come with its end
            texts = found.stacks()
            assert sorted(texts) == [f"rank{rank}-stacks.txt" for rank in range(4)]
            assert ("__getitem__" in texts[f"rank{odd}-stacks.txt"]) == (epoch == 1)
        assert run.wait() == ExitCode.OK
        assert_recovered(run, 4)


def test_saves_that_hang_or_are_cut_off_leave_no_excuse(tmp_path: Path) -> None:
    """C3: a save has a limit of its own. C5: its epoch's. C2: who waits for a dead worker is told at once."""
    options = (*HANG, "--save-timeout", "5", "--nproc-per-node", "2")
    with LocalRun(tmp_path, FAULTY, *options, args=("save", "save", "wait")) as run:
        hung = Found(run, 1)
        assert hung.culprits == {0}
        assert 5.0 < hung.silence_s < 5.0 + SOON_S - LIMIT_S
        assert "no end of save" in hung.opened.why

        run.until(lambda: (tmp_path / "saving-1").exists())
        run.kill(0)
        killed = Found(run, 2)
        assert killed.opened.kind == "crash"
        assert killed.only(e.SurvivorsTold).after_s < TOLD_S

        run.until_step(200, epoch=3)  # longer than the limit: the saves of the earlier epochs count no more
        run.kill(1, signal.SIGSTOP)
        stopped = Found(run, 3)
        assert stopped.culprits == {1}
        assert stopped.silence_s < SOON_S

        assert run.wait() == ExitCode.OK
        assert_recovered(run, 3)
        phases = {c.incident: c.phases for c in run.events(e.IncidentClosed)}
        assert phases["I002"]["stop"] < 4.0  # the survivor sat in a collective that would have waited for an hour
        assert run.events(e.IncidentClosed)[2].downtime_s < 15.0


def test_long_phases_are_no_hang(tmp_path: Path) -> None:
    """C3: a first step, a save and an evaluation, each of twice the limit for steps."""
    with LocalRun(tmp_path, FAULTY, *HANG, "--nproc-per-node", "2", args=("first=4,save=4,eval=4",)) as run:
        assert run.wait() == ExitCode.OK
        assert not run.events(e.HangJudged)
        assert not run.events(e.IncidentOpened)
        assert (tmp_path / "saving-0").exists()


def test_a_collective_that_times_out_names_who_was_late(tmp_path: Path) -> None:
    """C8: the library gives up long before our limit. Rank 1 sleeps in the loop; only the others complain."""
    options = ("--hang-timeout", "60", "--nproc-per-node", "3")
    with LocalRun(tmp_path, FAULTY, *options, args=("late=3",)) as run:
        found = Found(run, 1)
        assert found.opened.kind == "hang"
        assert [(blame.rank, blame.node) for blame in found.opened.culprits] == [(1, "node0")]
        assert "gave up waiting (RuntimeError: " in found.opened.why and "Timed out waiting 3000ms" in found.opened.why
        assert "late was rank 1 on node0" in found.opened.why and "faulty.py" in found.opened.why
        assert 3.0 < found.silence_s < 3.0 + SOON_S - LIMIT_S
        assert "in between" in found.stacks()["rank1-stacks.txt"]
        assert run.wait() == ExitCode.OK
        assert_recovered(run, 1)
    assert "no worker is known to have died" not in run.text()


def test_a_collective_that_times_out_near_our_own_limit_is_one_incident(tmp_path: Path) -> None:
    """C8: whether the library gives up first, or at about the time of the verdict, the job recovers."""
    with LocalRun(tmp_path, FAULTY, *HANG, "--nproc-per-node", "2", args=("late=1.5", "late=2.1")) as run:
        assert Found(run, 1).culprits == {1}
        assert run.wait() == ExitCode.OK
        assert_recovered(run, 2)
        assert [f.plan.epoch for f in run.events(e.EpochFormed)] == [1, 2, 3]


# C18: two hosts whose clocks differ by a minute ---------------------------------------------------------


@pytest.mark.parametrize("ahead", ["controller", "joined"])
def test_clocks_of_hosts_are_not_compared(tmp_path: Path, ahead: str) -> None:
    """One of two launchers runs in a time namespace, so CLOCK_MONOTONIC of everything it starts is 60 s ahead."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    options = (*HANG, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint)
    runs = []
    for name in ("controller", "joined"):
        (tmp_path / name).mkdir()
        # The token of jobs over several hosts lies in the home folder.
        runs.append(LocalRun(tmp_path / name, FAULTY, *options, args=("wait", "wait"), HOME=str(tmp_path)))
        if name == ahead:
            runs[-1].command = [*minute_ahead(), *runs[-1].command]
    with runs[0] as run:
        run.until(lambda: run.events(e.NodeJoined))  # the first of them gets the controller
        with runs[1] as joined:
            for epoch, signum in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
                run.until_step(3, epoch=epoch)
                run.kill(1, signum)
                Found(run, epoch)
            assert run.wait() == joined.wait() == ExitCode.OK
        assert_recovered(run, 2)
        assert Found(run, 1).only(e.SurvivorsTold).after_s < TOLD_S
        stopped = Found(run, 2)
        assert stopped.culprits == {1}
        assert stopped.silence_s < SOON_S
        for closed in run.events(e.IncidentClosed):
            assert 0 < closed.downtime_s < 15.0
            assert all(seconds >= 0 for seconds in closed.phases.values())
        for entry in run.entries():  # times of the other host's workers, on the controller's clock
            if isinstance(entry.event, e.StepsSeen):
                assert 0 <= entry.t_s - entry.event.step_at_s < 15.0
            if isinstance(entry.event, e.WorkerEnded):
                assert 0 <= entry.t_s - entry.event.seen_s < 15.0
        node = run.plan().members[1].node
        as_it_was = decisions(run, node, 0.0)
        assert as_it_was[-1] is Stage.FINISHED
        assert decisions(run, node, -60.0) == decisions(run, node, 60.0) == as_it_was


def minute_ahead() -> tuple[str, ...]:
    """Prefix of a command: its clock starts a minute ahead. Empty where that is not possible."""
    prefix = ("unshare", "--time", "--monotonic", "60", "--fork", "--kill-child")
    possible = shutil.which("unshare") and not subprocess.run([*prefix, "true"], capture_output=True).returncode
    return prefix if possible else ()


def decisions(run: LocalRun, node: str, shift_s: float) -> list[Direct | Stage]:
    """Orders and stages that the job's machine makes of this journal, with the clock of one node shifted."""
    found: list[Direct | Stage] = []
    for entry in run.entries():
        event = entry.event
        if isinstance(event, e.JobSubmitted):
            job = Job(event.spec)
        if not isinstance(event, e.Input):
            continue
        if isinstance(event, e.NodeReported) and event.report.node == node:
            event = e.NodeReported(shifted(event.report, shift_s))
        job, commands = lifecycle.step(job, event, entry.t_s)
        found += [*(c for c in commands if isinstance(c, Direct)), job.stage]
    return found


def shifted(report: NodeReport, shift_s: float) -> NodeReport:
    replace = msgspec.structs.replace
    workers = [replace(w, exit=replace(w.exit, at_s=w.exit.at_s + shift_s)) if w.exit else w for w in report.workers]
    return replace(report, sent_s=report.sent_s + shift_s, workers=tuple(workers))
