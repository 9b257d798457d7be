"""Slow workers of real jobs: who it is and in what, and that it is well again; and what only looks like one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from everstep.core import events as e
from everstep.testing.local import LocalRun

SCRIPTS = Path(__file__).parent / "scripts"
# A slow-down here is of 60 % and more; on a busy machine steps of 50 ms scatter.
SETTINGS = ("control.heartbeat_s=0.1", "straggler.threshold=0.3", "straggler.lasts_s=0")
OPTIONS = ("--nproc-per-node", "3", *(word for setting in SETTINGS for word in ("--set", setting)))
WITHIN = 25  # steps from the onset to the verdict; on a quiet machine it is 3 to 8
DUTY_S = 0.04  # stopped, then running


class Watched(LocalRun):
    def judged(self, number: int) -> e.SlowJudged:
        """That verdict, as soon as it is there."""
        return self.until(lambda: self.events(e.SlowJudged)[number - 1 :])[0]

    def assert_named(self, number: int, rank: int, phase: str) -> e.SlowJudged:
        found = self.judged(number)
        (culprit,) = found.verdict.culprits
        assert (culprit.rank, culprit.node, found.phase) == (rank, "node0", phase), found
        assert found.step - found.since <= WITHIN
        opened = next(x for x in self.events(e.IncidentOpened) if x.incident == found.incident)
        assert (opened.kind, opened.culprits) == ("slow", found.verdict.culprits)
        return found

    def until_well(self, found: e.SlowJudged) -> None:
        closed = self.until(lambda: [x for x in self.events(e.IncidentClosed) if x.incident == found.incident])
        assert closed[0].outcome.startswith("well again"), closed

    def stop_and_go(self, rank: int, until: Callable[[], object]) -> None:
        """SIGSTOP and SIGCONT in turn: that worker has half of the time."""
        pid, deadline = self.pids()[rank], time.monotonic() + 30
        while not until():
            assert time.monotonic() < deadline, self.text()
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pid, signum)
                time.sleep(DUTY_S)


def test_a_slow_worker_is_named_with_its_phase_and_is_well_again(tmp_path: Path) -> None:
    """C9, C12: 50 ms more in forward, in the loader, in saves of one rank, all of whose steps take as long as the
    others'; then one that is stopped half of the time. C10: pauses that go around name nobody."""
    with Watched(tmp_path, SCRIPTS / "slow.py", *OPTIONS) as run:
        run.until_step(30)
        for number, (what, rank, phase) in enumerate(
            [("forward", 1, "compute"), ("data", 2, "data"), ("save", 0, "save")], 1
        ):
            mark = tmp_path / f"{what}-{rank}"
            mark.touch()
            found = run.assert_named(number, rank, phase)
            assert found.slowdown > 0.4
            stacks = run.run_dir / "incidents" / found.incident / f"rank{rank}-stacks.txt"
            run.until(lambda stacks=stacks: stacks.exists() and " in takes" in stacks.read_text())
            mark.unlink()
            run.until_well(found)
        run.stop_and_go(1, lambda: run.events(e.SlowJudged)[3:])
        run.until_well(run.assert_named(4, 1, "compute"))
        (tmp_path / "pauses").touch()
        run.until_step(run.events(e.StepsSeen)[-1].step + 40)
        run.until(lambda: [x for x in run.events(e.Alert) if x.kind == "jitter"])
        assert len(run.events(e.SlowJudged)) == 4
        assert min(run.events(e.WorkersSeen)[-1].own_s) > 0.04  # without a session too
    assert "incident S001 (slow): rank 1 on node0 is slow in compute" in run.text()
    assert "incident S001: well again" in run.text()


def test_long_sequences_are_no_slow_worker(tmp_path: Path) -> None:
    """C11: one member of a session gets twice as long sequences as the others; later another one is slow indeed."""
    with Watched(tmp_path, SCRIPTS / "slow_session.py", *OPTIONS) as run:
        run.until_step(80)
        assert not run.events(e.SlowJudged)
        (tmp_path / "forward-2").touch()
        assert run.assert_named(1, 2, "compute").slowdown < 1
