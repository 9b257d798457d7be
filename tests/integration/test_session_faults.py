"""Faults of FAULTS.md in jobs with a session, several in one run; docs/faults.md says which test shows which row.

Two hosts are one machine here. What tells workers whether they share memory is the kernel's boot id, so the second
host's launcher runs in a mount namespace in which another one lies there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from session_harness import NUM_SAMPLES, SEED, SessionRun, alive, oracle
from test_signals import SCRIPTS, signal_everybody

from everstep.control import sweep
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import ExitCause
from everstep.data.sampler import Sampler
from everstep.testing.local import LocalRun

pytestmark = pytest.mark.timeout(150)  # each takes less than 20 s on a quiet machine

ENDLESS = 5000  # steps of a job that is stopped when all has been seen; slow ones, so that others get the cores
FOUR = ("--nproc-per-node", "4")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
ELSEWHERE = "00000000-0000-4000-8000-00000000000e"


def steps(count: int, *more: str, faults: Sequence[str] = ()) -> tuple[str, ...]:
    given = [word for fault in faults for word in ("--fault", fault)]
    return ("--steps", str(count), "--pause", "0.02" if count == ENDLESS else "0.005", *more, *given)


def outcomes(run: SessionRun) -> list[str]:
    return [closed.outcome for closed in run.events(e.IncidentClosed)]


def came(run: SessionRun, faults: Sequence[str]) -> bool:
    return {path.name for path in run.directory.glob("fault-*")} == {f"fault-{fault}" for fault in faults}


# Over TCP -----------------------------------------------------------------------------------------------


def elsewhere(folder: Path) -> tuple[str, ...]:
    """Prefix of a command, which runs on another host then, as far as Everstep can tell."""
    identity = folder / "boot_id"
    identity.write_text(f"{ELSEWHERE}\n")
    prefix = ("unshare", "--mount", "sh", "-c", f'mount --bind "$0" {BOOT_ID} && exec "$@"', str(identity))
    tried = subprocess.run([*prefix, "cat", BOOT_ID], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace for a second host: {tried.stderr.strip()}")
    assert tried.stdout == identity.read_text()
    return prefix


@contextlib.contextmanager
def two_hosts(
    folder: Path, *options: str, there: tuple[str, ...] = (), args: tuple[str, ...]
) -> Iterator[tuple[SessionRun, SessionRun]]:
    """The launcher with the controller, and the one of the second host, which is started when the first is ready."""
    folder.mkdir(exist_ok=True)
    token = folder / "token"
    token.write_text("3" * 64 + "\n")
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    common = ("--token-file", str(token), *options)
    args = (*args, "--out", str(folder))
    run = SessionRun(folder, *common, "--rdzv-endpoint", endpoint, args=args)
    other = SessionRun(folder / "there", *common, "--controller", endpoint, *there, args=args)
    other.command = [*elsewhere(folder), *other.command]
    with run:
        run.until(lambda: run.events(e.NodeJoined))
        with other:
            yield run, other


def agents(run: LocalRun) -> list[int]:
    return [int(path.read_text()) for path in (run.directory / "runs").glob("*-*/agent-*.pid")]


def roles_elsewhere(run: SessionRun) -> list[int]:
    seats = run.events(e.FormationMade)[-1].formation.seats
    return [role for role, seat in enumerate(seats) if seat.host == ELSEWHERE]


def test_two_hosts_lose_a_member_and_a_node_each(tmp_path: Path) -> None:
    """A10: also the node with role 0. Members of one host share memory, the others speak TCP."""
    options = ("--nnodes", "1:2", "--nproc-per-node", "2", "--set", "control.last_call_s=20")
    with two_hosts(tmp_path, *options, args=steps(ENDLESS)) as (run, other):
        run.until_committed(20)
        run.until_members(4)
        assert len(roles_elsewhere(run)) == 2
        run.kill_member(3)
        run.until_dealt_to(3)
        run.until_members(4)
        for number, host in enumerate((other, run), 1):
            (agent,) = agents(host)
            os.kill(agent, signal.SIGKILL)
            run.until(lambda number=number: len(run.events(e.NodeLost)) == number)
            run.until_members(2)
            run.until_members(4, timeout_s=60.0)
            assert len(roles_elsewhere(run)) == 2
        run.stop()
        other.wait()
        assert {step.members for step in run.check()} == {2, 3, 4}
        assert set(outcomes(run)[:3]) == {"recovered"} and len(run.events(e.EpochFormed)) == 1


def test_a_standby_on_another_host_makes_the_same_bits(tmp_path: Path) -> None:
    """E5: with dropout and random numbers of Python and numpy; over TCP, and after the change in shared memory.

    The undisturbed job ends as soon as its members can: all must hear the last vote.
    """
    options, args = ("--nnodes", "2", "--nproc-per-node", "1"), steps(ENDLESS, "--noise")
    with two_hosts(tmp_path / "quiet", *options, args=(*args, "--leave", "59")) as (quiet, other):
        assert quiet.wait() == other.wait() == ExitCode.OK
        assert not quiet.events(e.IncidentOpened)
        assert [lines[-1].step for lines in quiet.commits().values()] == [59, 59]
    with two_hosts(tmp_path / "killed", *options, there=("--local-nodes", "2"), args=args) as (run, other):
        run.until_committed(10)
        run.until_standby()
        (stays,) = roles_elsewhere(run)
        run.kill_member(1 - stays)
        run.until_committed(max(60, run.committed() + 10))
        assert roles_elsewhere(run) == [0, 1] and len(run.until_members(2)) == 2
        run.stop()
        other.wait()
        assert run.check()[:60] == quiet.check(60)
        assert outcomes(run)[0] == "recovered"


# Leaving the loop ---------------------------------------------------------------------------------------


def test_several_jobs_at_once_whose_members_leave_their_loops(tmp_path: Path) -> None:
    """A2, B14, B18: all leave at the same step; one does, once; all fail at the same step, always."""
    jobs = {
        "all": (("--nproc-per-node", "3", "--max-restarts", "0"), steps(100, "--leave", "11")),
        "fixed": (("--nproc-per-node", "2", "--max-restarts", "0"), steps(100, "--fixed", "--leave", "11")),
        "one": (("--nproc-per-node", "3"), steps(150, faults=("leave@11:1",))),
        "bug": (("--nproc-per-node", "2", "--set", "restart.crash_loop=3"), steps(100, "--bug", "5")),
        "plain": (("--nproc-per-node", "2"), steps(40)),
    }
    with ExitStack() as stack:
        runs = {n: stack.enter_context(SessionRun(tmp_path / n, *o, args=a)) for n, (o, a) in jobs.items()}
        for name in ("all", "fixed"):
            assert runs[name].wait() == ExitCode.OK
            runs[name].check(12)
            assert {lines[-1].step for lines in runs[name].commits().values()} == {11}
            assert not runs[name].events(e.IncidentOpened)
        assert runs["plain"].wait() == ExitCode.OK
        runs["plain"].check(40)
        assert runs["one"].wait() == ExitCode.OK
        story = runs["one"].check(150)
        assert [step.members for step in story[:13]] == [3] * 12 + [2]
        (opened,) = runs["one"].events(e.IncidentOpened)
        assert opened.why == "rank 1 on node0 ended (exit 0) at step 12 while the others went on"
        assert outcomes(runs["one"]) == ["recovered"] and "rank 1 on node0 ended (exit 0)" in runs["one"].text()
        assert runs["bug"].wait() == ExitCode.CRASH_LOOP
        assert "the same failure 3 times at step 5" in runs["bug"].text()


# How members end ----------------------------------------------------------------------------------------


def test_every_kind_of_end_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A1, B1, B2, B10, B11, B12, B14: an exception, os._exit(3), SIGKILL; then the launcher is killed."""
    faults = ("raise@20:1", "vanish@120:2")
    with SessionRun(tmp_path, *FOUR, args=steps(ENDLESS, "--child", faults=faults)) as run:
        run.until_committed(200)
        run.until_members(4)
        killed = run.kill_member(3)
        run.until(lambda: len(outcomes(run)) == 3)
        pids = set(run.until_members(4).values())
        assert came(run, faults)
        children = {int(path.name.partition("-")[2]): int(path.read_text()) for path in tmp_path.glob("child-*")}
        run.until(lambda: not any(alive(child) for pid, child in children.items() if pid not in pids))
        ends = {w.exit.cause: w.exit for w in run.events(e.WorkerEnded)}
        assert set(ends) == {ExitCause.ERROR, ExitCause.EXIT_CODE, ExitCause.SIGNAL}
        assert "from outside, not by Everstep" in ends[ExitCause.SIGNAL].message and killed not in pids
        assert [len(opened.culprits) for opened in run.events(e.IncidentOpened)] == [1, 1, 1]
        assert not [update for update in run.events(e.IncidentUpdated) if update.collateral]
        assert all(resumed.gap_s < 5.0 for resumed in run.events(e.StepResumed))
        logs = run.run_dir / "logs" / "node0" / "attempt_1"
        assert len(list(logs.iterdir())) == 4 + 3  # of every life of every place
        assert "this member's own mistake" in (logs / "1" / "stderr.log").read_text()
        for child in (child for pid, child in children.items() if pid in pids):
            os.kill(child, signal.SIGKILL)  # programs do not end with their parents when nobody is left to end them
        processes = run.processes()
        began = time.monotonic()
        run.signal(signal.SIGKILL)
        while any(alive(process) for process in processes):
            assert time.monotonic() - began < 10.0, "a process outlived its launcher"
            time.sleep(0.01)
        run.check()


def test_a_stop_is_at_the_same_step_and_waits_for_no_hung_member(tmp_path: Path) -> None:
    """B3, B4, B6, B19: the launcher is told, or every process is, loader workers too; one member is stopped."""
    with ExitStack() as stack:
        runs = {}
        for name in ("together", "everybody", "hung"):
            options = ("--nproc-per-node", "3", "--grace", "1" if name == "hung" else "10")
            args = steps(ENDLESS, *(("--loader-workers", "2") if name == "everybody" else ()))
            runs[name] = stack.enter_context(SessionRun(tmp_path / name, *options, args=args))
        for name in ("together", "everybody"):
            run = runs[name]
            run.until_committed(20)
            run.until_step(2)  # so much is heard where the step to stop at is chosen
            if name == "everybody":
                assert signal_everybody(run, random.Random(4)) >= 3 + 3 * 2
                assert run.wait() == 128 + signal.SIGTERM
            else:
                run.stop()
            (asked,) = run.events(e.StopAsked)
            assert {lines[-1].step + 1 for lines in run.commits().values()} == {asked.stop_at_step}, run.text()
            assert [opened.kind for opened in run.events(e.IncidentOpened)] == ["stop"]
            assert not [w for w in run.events(e.WorkerEnded) if w.exit.failed], run.text()
        hung = runs["hung"]
        hung.until_committed(20)
        hung.kill_member(1, signal.SIGSTOP)
        began = time.monotonic()
        hung.stop()
        assert time.monotonic() - began < 1.0 + 5.0
        assert ExitCause.GRACE in {w.exit.cause for w in hung.events(e.WorkerEnded)}
        for run in runs.values():
            assert not sweep.leftovers(run.run_dir.name, "node0", ())
            run.check()


def test_a_stop_in_any_phase_ends_within_the_grace(tmp_path: Path) -> None:
    """B5. Busy for good between two steps or in one; no member commits what another one does not."""
    with ExitStack() as stack:
        jobs = {}
        for where in ("import", "first", "evaluation", "data"):
            (tmp_path / where).mkdir()
            options = ("--nproc-per-node", "2", "--grace", "2")
            script = SCRIPTS / "session_stall.py"
            jobs[where] = stack.enter_context(LocalRun(tmp_path / where, script, *options, args=(where,)))

        def committed(where: str) -> list[str]:
            logs = (jobs[where].run_dir / "logs" / "node0" / "attempt_1").glob("*/stdout.log")
            return [["0", *log.read_text().split()][-1] for log in logs]

        for where, run in jobs.items():
            last = "5" if where in ("evaluation", "data") else "0"
            run.until(lambda run=run: len(list(run.directory.glob("busy-*"))) == 2)
            run.until(lambda where=where, last=last: committed(where) == [last] * 2)
            signal_everybody(run, random.Random(5))
        for where, run in jobs.items():
            assert run.wait() == 128 + signal.SIGTERM, f"{where}: {run.text()}"
            stop = next(x.t_s for x in run.entries() if isinstance(x.event, e.StopAsked))
            end = next(x.t_s for x in run.entries() if isinstance(x.event, e.JobEnded))
            assert end - stop < 2 + 1.5, where
            assert [opened.kind for opened in run.events(e.IncidentOpened)][-1:] == ["stop"], where
            assert committed(where) == ["5" if where in ("evaluation", "data") else "0"] * 2, where
            assert not sweep.leftovers(run.run_dir.name, "node0", ())


def test_an_agent_dies_before_the_first_step(tmp_path: Path) -> None:
    """A13: while the script gets ready, and when the first formation was made. Nobody waits for a time-out."""
    options = ("--nnodes", "1:2", "--local-nodes", "2", "--nproc-per-node", "1")
    with SessionRun(tmp_path, *options, args=steps(ENDLESS)) as run:
        run.until(lambda: run.events(e.EpochFormed))
        run.kill_agent("node1")
        run.until(lambda: run.events(e.NodeLost))
        run.until(lambda: run.events(e.FormationMade))
        run.kill_agent("node0")
        run.until_members(2, timeout_s=25.0)
        run.stop()
        run.check(restarts=1)


def test_deaths_in_a_large_reduction(tmp_path: Path) -> None:
    """B16: 7 MB of gradients; who dies in the midst of summing them is no error for the others."""
    faults = ("die-reduce@3:1", "die-reduce@6:2", "die-reduce@9:0")
    args = steps(16, "--hidden", "100000", "--dropout", "0", faults=faults)
    with SessionRun(tmp_path, *FOUR, args=args) as run:
        assert run.wait() == ExitCode.OK
        story = run.check(16)
        assert came(run, faults) and set(outcomes(run)) == {"recovered"}
        assert any(story[step].members < story[step - 1].members for step in (3, 6, 9)), "no death undid a step"
        assert {w.exit.cause for w in run.events(e.WorkerEnded) if w.exit.failed} == {ExitCause.SIGNAL}


# Data and numbers ---------------------------------------------------------------------------------------


def test_samples_and_numbers_are_the_oracles_whoever_dies_when(tmp_path: Path) -> None:
    """E1 to E4, E6 to E8, F5. A pass is 8 steps; members die after their first micro-batch in the midst of it, in its
    last step, and in the first of the next. Every other one reads with loader workers."""
    faults = ("die-middle@3:1", "die@7:0", "die-middle@8:1")
    loaders = ("--loader-workers", "0", "2")
    args = steps(40, "--dropout", "0", "--global-batch", "25", "--micro-batch", "2", *loaders, faults=faults)
    with SessionRun(tmp_path, *FOUR, args=args) as run:
        assert run.wait() == ExitCode.OK
        story = run.check(40)
        assert came(run, faults) and set(outcomes(run)) == {"recovered"}
        assert story[3].members == 3 and story[2].members == 4
        consumed = run.consumed(story)
        for first in range(0, 40, 8):
            assert sorted(itertools.chain(*consumed[first : first + 8])) == list(range(NUM_SAMPLES))
        sampler = Sampler(NUM_SAMPLES, 25, seed=SEED)
        assert consumed == [list(sampler.samples(sampler.step_positions(step))) for step in range(40)]
        truth = oracle(40, 25, 40)
        assert [step.loss for step in story] == pytest.approx(truth.losses, abs=1e-5)
        assert [step.norm for step in story] == pytest.approx(truth.norms, rel=1e-4)
        assert [step.lr for step in story] == truth.rates
