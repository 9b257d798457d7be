"""A model sharded by FSDP2 goes on bit by bit when a member is replaced, wherever in a step it dies."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from session_harness import Committed, SessionRun, oracle

from everstep.core import events as e
from everstep.core.errors import ExitCode

pytestmark = pytest.mark.timeout(150)

FOUR = ("--nproc-per-node", "4")
SPARE = ("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "2", "--standbys", "1")
STEPS = 60
WARM = ("--preload", "torch.distributed.fsdp")


class FsdpRun(SessionRun):
    """Four members: two replicas of two shards."""

    script = Path(__file__).parent / "scripts" / "session_fsdp.py"
    shards = 2

    def __init__(self, directory: Path, *options: str, steps: int = STEPS, args: tuple[str, ...] = ()) -> None:
        self.directory = directory
        super().__init__(directory, *WARM, *options, args=("--steps", str(steps), "--pause", "0.004", *args))

    def die(self, where: str, role: int) -> None:
        """Let a member die there, and wait until another one has its role."""
        self.until_standby()
        before = self.until_members(4)[role]
        mark = self.directory / f"die-{where}-{role}"
        mark.touch()
        self.until(lambda: not mark.exists())
        self.replaced(role, before)

    def replaced(self, role: int, before: int) -> None:
        self.until(lambda: self.members().get(role, before) != before)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Committed]:
    return story_of(tmp_path_factory.mktemp("quiet"))


def story_of(directory: Path, *args: str, steps: int = STEPS) -> list[Committed]:
    """Of a run in which nobody dies."""
    with FsdpRun(directory, *FOUR, steps=steps, args=args) as run:
        assert run.wait() == ExitCode.OK
        return run.check(steps)


def outcomes(run: SessionRun) -> set[str]:
    return {closed.outcome for closed in run.events(e.IncidentClosed)}


def test_a_standby_makes_the_same_bits(tmp_path: Path, undisturbed: list[Committed]) -> None:
    """Loss and state of each step are those of a run in which nobody died: at four places of a step, and anywhere."""
    dice = random.Random(4)
    with FsdpRun(tmp_path, *SPARE) as run:
        run.until_committed(5)
        for role, where in enumerate(("forward", "backward", "vote", "apply")):
            run.die(where, role)
        for _ in range(2):
            run.until_standby()
            role = dice.randrange(4)
            before = run.until_members(4)[role]
            time.sleep(dice.random() * 0.03)
            assert run.kill_member(role) == before
            run.replaced(role, before)
        assert run.wait() == ExitCode.OK
        assert run.check(STEPS) == undisturbed
        assert outcomes(run) == {"recovered"}


def test_with_whole_parameters_kept_and_sums_put_off(tmp_path: Path) -> None:
    """Whatever FSDP has in hand when a step breaks is dropped: whole parameters, gradients of earlier micro-batches."""
    more = ("--keep", "--no-sync")
    with FsdpRun(tmp_path, *SPARE, steps=35, args=more) as run:
        run.until_committed(5)
        for role, where in ((3, "forward"), (0, "backward")):
            run.die(where, role)
        assert run.wait() == ExitCode.OK
        assert run.check(35) == story_of(tmp_path / "quiet", *more, steps=35)


def test_without_a_standby_a_new_process_takes_the_role(tmp_path: Path, undisturbed: list[Committed]) -> None:
    """The others wait for it: their number is fixed."""
    with FsdpRun(tmp_path, *FOUR) as run:
        for role in (2, 1):
            run.until_committed(run.committed() + 5)
            run.replaced(role, run.kill_member(role))
        assert run.wait() == ExitCode.OK
        assert run.check(STEPS) == undisturbed
        assert outcomes(run) == {"recovered"}
        assert len(run.events(e.EpochFormed)) == 1  # no other process was touched


def test_uneven_micro_batches_weigh_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of two and three samples on four members: the losses are those of one process."""
    args = ("--plain", "--global-batch", "25")
    with FsdpRun(tmp_path, *FOUR, steps=30, args=args) as run:
        assert run.wait() == ExitCode.OK
        story = run.check(30)
        monkeypatch.syspath_prepend(run.script.parent)
        losses, rates, _ = oracle(30, 25, 30, run.script)
        assert [step.loss for step in story] == pytest.approx(losses, abs=1e-5)
        assert [step.lr for step in story] == rates


def test_both_holders_of_a_shard_are_killed(tmp_path: Path) -> None:
    """Their shard is gone, and nothing is kept: the job says so, and starts again."""
    with FsdpRun(tmp_path, *SPARE, "--vault-memory", "0", steps=40) as run:
        run.until_committed(10)
        run.until_standby()
        for role in (1, 3):
            run.kill_member(role)
        assert run.wait() == ExitCode.OK
        assert "all members that held shard 1 of the state are gone" in run.text()
        (restored,) = run.events(e.StateRestored)
        assert restored.step == 0 and restored.lost >= 10
        assert "step-fell-back" in [incident.kind for incident in run.events(e.IncidentOpened)]
        run.check(40, restarts=1)
