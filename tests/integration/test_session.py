"""Step-level recovery of real jobs: real faults, and after each the invariants of `session_harness.check`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from session_harness import SessionRun, oracle

from everstep.control import procfs
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.accounts import add_up

pytestmark = pytest.mark.timeout(150)  # each takes less than 20 s on a quiet machine

ENDLESS = 5000  # steps of a job that is stopped when all has been seen; slow ones, so that others get the cores
FOUR = ("--nproc-per-node", "4")
TWO_NODES = ("--nnodes", "1:2", "--local-nodes", "2", "--nproc-per-node", "2")
SPARE = ("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "1", "--standbys", "1")
HANG_S = 2.0
HANG = ("--hang-timeout", str(HANG_S))
SOON_S = 3.0  # a quiet machine needs a step and 50 ms; a learned limit takes longer


def steps(count: int, *more: str) -> tuple[str, ...]:
    return ("--steps", str(count), "--pause", "0.02" if count == ENDLESS else "0.005", *more)


def outcomes(run: SessionRun) -> list[str]:
    return [closed.outcome for closed in run.events(e.IncidentClosed)]


# One member ---------------------------------------------------------------------------------------------


def test_one_of_four_is_killed(tmp_path: Path) -> None:
    """The others go on at once; a new process takes the place."""
    with SessionRun(tmp_path, *FOUR, args=steps(ENDLESS)) as run:
        run.until_committed(20)
        moment = time.time()
        killed = run.kill_member(2)
        run.until_dealt_to(3)
        assert killed not in run.until_members(4).values()
        run.until_committed(run.committed() + 5)
        run.stop()
        assert (run.pause_after(moment) or SOON_S) < SOON_S
        assert {step.members for step in run.check()} == {3, 4}
        assert outcomes(run)[:1] == ["recovered"]
        assert len(run.events(e.EpochFormed)) == 1  # no other process was touched
        view = add_up(run.entries())
        assert max(run.told()) > 20 and view.metrics.keys() == {"loss"}
        seen = run.events(e.WorkersSeen)
        assert any(sum(own_s > 0 for own_s in s.own_s) >= 3 and min(s.rss_bytes) > 0 for s in seen)
        assert max(view.workers.own_s) < 0 and not any(view.workers.rss_bytes)  # nobody is left
        assert len(view.memory_steps) == 1  # one member keeps it for all on this node


def test_an_exception_of_one_member_is_its_death(tmp_path: Path) -> None:
    """The traceback is told once; the others go on, and the one that follows is a member before the job ends."""
    with SessionRun(tmp_path, *FOUR, args=steps(ENDLESS, "--fault", "raise@20:1")) as run:
        run.until_dealt_to(3)
        run.until_members(4)
        run.stop()
        assert {step.members for step in run.check()} >= {3, 4}
        assert run.text().count("Traceback (most recent call last)") == 1
        assert "RuntimeError: this member's own mistake" in run.text()
        assert [opened.kind for opened in run.events(e.IncidentOpened)][1:] == ["stop"]
        assert outcomes(run)[:1] == ["recovered"]


def test_a_member_that_is_stopped_is_left_behind(tmp_path: Path) -> None:
    with SessionRun(tmp_path, *FOUR, *HANG, args=steps(ENDLESS)) as run:
        run.until_committed(20)
        moment = time.time()
        stopped = run.kill_member(1, signal.SIGSTOP)
        run.until_dealt_to(3)
        assert stopped not in run.until_members(4).values()
        run.stop()
        assert HANG_S - 0.5 < (run.pause_after(moment, 100) or 0.0) < HANG_S + SOON_S
        closed = run.events(e.IncidentClosed)[0]
        assert HANG_S - 0.5 < closed.downtime_s < HANG_S + SOON_S, (
            "also where the step it held up was committed after all"
        )
        run.check()


def test_a_member_that_sleeps_in_its_loop_is_left_behind(tmp_path: Path) -> None:
    with SessionRun(tmp_path, "--nproc-per-node", "2", *HANG, args=steps(80, "--fault", "sleep@30:1")) as run:
        assert run.wait() == ExitCode.OK
        assert {step.members for step in run.check(80)} == {1, 2}
        (judged,) = run.events(e.HangJudged)
        assert [blame.rank for blame in judged.verdict.culprits] == [1]


# Several ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [(0, 3), (0, 1, 2)], ids=["two", "all but the last"])
def test_several_are_killed_at_once(tmp_path: Path, roles: tuple[int, ...]) -> None:
    with SessionRun(tmp_path, *FOUR, args=steps(ENDLESS)) as run:
        run.until_committed(20)
        members = run.until_members(4)
        for role in roles:
            os.kill(members[role], signal.SIGKILL)
        run.until_dealt_to(4 - len(roles))
        run.until_members(4)
        run.stop()
        run.check()


def test_one_is_killed_while_the_others_recover(tmp_path: Path) -> None:
    with SessionRun(tmp_path, *FOUR, args=steps(ENDLESS)) as run:
        for after_s in (0.002, 0.005, 0.02):
            run.until_committed(run.committed() + 10)
            members = run.until_members(4)
            for role in (1, 3, 0):
                os.kill(members[role], signal.SIGKILL)
                time.sleep(after_s)
        run.until_members(4)
        run.stop()
        run.check()
        assert set(outcomes(run)) >= {"recovered"}


def test_all_are_killed_and_the_script_starts_again(tmp_path: Path) -> None:
    """Nobody is left who has the state: the job restarts, as one without sessions does."""
    with SessionRun(tmp_path, "--nproc-per-node", "2", args=steps(50)) as run:
        run.until_committed(20)
        for pid in run.until_members(2).values():
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == ExitCode.OK
        run.check(50, restarts=1)


# Places in a step ---------------------------------------------------------------------------------------


def test_deaths_around_the_commit(tmp_path: Path) -> None:
    """Before the vote, in it, behind it, in the optimizer's step, and right after."""
    kinds = ("die", "die-soon", "die-apply", "die-block", "die-soon")
    faults = [f"{kind}@{15 * (place + 1)}:{place % 2}" for place, kind in enumerate(kinds)]
    given = [word for fault in faults for word in ("--fault", fault)]
    with SessionRun(tmp_path, "--nproc-per-node", "3", args=steps(100, *given)) as run:
        assert run.wait() == ExitCode.OK
        run.check(100)
        assert len(list(tmp_path.glob("fault-*"))) == len(faults)
        assert set(outcomes(run)) == {"recovered"}


# Nodes and the controller -------------------------------------------------------------------------------


def test_a_node_is_lost(tmp_path: Path) -> None:
    with SessionRun(tmp_path, *TWO_NODES, args=steps(ENDLESS)) as run:
        run.until_committed(20)
        moment = time.time()
        run.kill_agent("node1")
        run.until_dealt_to(2)
        run.until_members(4)  # a fresh agent
        run.stop()
        assert (run.pause_after(moment) or SOON_S) < SOON_S
        run.check()


def test_a_node_leaves_between_two_steps(tmp_path: Path) -> None:
    """Nobody waits for anything, and who leaves ends well."""
    with SessionRun(tmp_path, *TWO_NODES, args=steps(80)) as run:
        run.until_committed(20)
        run.kill_agent("node1", signal.SIGUSR2)
        run.until_dealt_to(2)
        assert run.wait() == ExitCode.OK
        story = run.check(80)
        left = [step.members for step in story].index(2)
        assert {step.members for step in story[left:]} == {2}
        assert not run.events(e.IncidentOpened)
        assert {ended.exit.cause.value for ended in run.events(e.WorkerEnded)} <= {"ok"}


def test_the_controller_and_then_a_member_are_killed(tmp_path: Path) -> None:
    with SessionRun(tmp_path, *FOUR, args=steps(120)) as run:
        before = run.until_committed(20)
        run.kill_controller()
        run.until_committed(before + 10)
        run.kill_member(1)
        assert run.wait() == ExitCode.OK
        run.check(120)
        assert len(run.events(e.ControllerStarted)) == 2


# The same numbers ---------------------------------------------------------------------------------------


def test_a_standby_makes_the_same_bits(tmp_path: Path) -> None:
    """As if nothing had happened: every commit's state, after several kills, with dropout and running statistics.

    And with loader workers (E2 to E4), one of which is killed as well: no incident, it is replaced by its member.
    """
    args = steps(50, "--norm", "--noise", "--loader-workers")
    with SessionRun(tmp_path / "quiet", "--nproc-per-node", "2", args=(*args, "0")) as quiet:
        assert quiet.wait() == ExitCode.OK
    with SessionRun(tmp_path / "killed", *SPARE, args=(*args, "2")) as run:
        for kill in range(2):
            run.until_committed(10 + 20 * kill)
            run.until_standby()
            (loader, _) = procfs.children(run.until_members(2)[1 - kill])
            os.kill(loader, signal.SIGKILL)
            run.kill_member(kill)
        assert run.wait() == ExitCode.OK
        assert not run.processes()
        assert run.check(50) == quiet.check(50)
        assert outcomes(run) == ["recovered"] * 2
        assert run.text().count("it is replaced, and its micro-batches are read again") == 2


@pytest.mark.parametrize("global_batch", [24, 25])
def test_the_batch_stays_the_same_with_fewer_and_more_members(tmp_path: Path, global_batch: int) -> None:
    """4 members, 3, 4 again, 2, and 4 again: losses and learning rates are those of one process without Everstep.

    A new member is there within one or two steps, so that two must die at once for a step of two members.
    In float64: the order of a sum makes more than 1e-5 in float32 over as many steps as there may be.
    """
    args = steps(ENDLESS, "--dropout", "0", "--double", "--global-batch", str(global_batch))
    with SessionRun(tmp_path, *FOUR, args=args) as run:
        run.until_committed(10)
        for roles in ((1,), (1, 3)):
            members = run.until_members(4)
            for role in roles:
                os.kill(members[role], signal.SIGKILL)
            run.until_dealt_to(4 - len(roles))
        run.until_members(4)
        run.until_committed(run.committed() + 10)
        run.stop()
        story = run.check()
        sizes = {step.members for step in story}
        assert {2, 3, 4} <= sizes
        assert story[-1].members == 4
        losses, rates, _ = oracle(ENDLESS, global_batch, len(story), double=True)
        assert [step.loss for step in story] == pytest.approx(losses, abs=1e-5)
        assert [step.lr for step in story] == rates


def test_more_members_than_samples(tmp_path: Path) -> None:
    """Some compute nothing, and take part all the same."""
    args = steps(60, "--global-batch", "3", "--micro-batch", "2", "--dropout", "0")
    with SessionRun(tmp_path, *FOUR, args=args) as run:
        run.until_committed(20)
        run.kill_member(3)
        run.until_committed(40)
        run.kill_member(0)
        assert run.wait() == ExitCode.OK
        story = run.check(60)
        losses, rates, _ = oracle(60, 3, 60)
        assert [step.loss for step in story] == pytest.approx(losses, abs=1e-5)
        assert [step.lr for step in story] == rates
