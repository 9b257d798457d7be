"""Runs of scripts/session_train.py under `everstep run`, and what must hold of each, whatever was done to it.

with SessionRun(tmp_path, "--nproc-per-node", "4", args=("--steps", "60")) as run:
    run.until_committed(20)
    run.kill_member(role=1)
    assert run.wait() == 0
story = run.check(60)
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import runpy
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from everstep.control import procfs
from everstep.control.journal import read
from everstep.core import events as e
from everstep.core.formation import Stage
from everstep.data.account import account
from everstep.data.batches import Batches
from everstep.data.sampler import Sampler
from everstep.testing.local import LocalRun

SCRIPT = Path(__file__).parent / "scripts" / "session_train.py"
NUM_SAMPLES = 200
SEED = 5
# Tests kill the same place at the same step more often than chance would.
OPTIONS = ("--set", "restart.crash_loop=1000", "--set", "control.last_call_s=0.3")


class Line(NamedTuple):
    """What one member wrote of one step. `role`, `members`: of the deal its gradients come from."""

    pid: int
    step: int
    role: int
    members: int
    loss: float
    samples: tuple[int, ...]
    time: float
    digest: str = ""
    lr: float = 0.0
    norm: float = 0.0  # of the gradients of the whole global batch


Deal = tuple[int, int, int]  # step, number of members, role


class Committed(NamedTuple):
    """One step of the job. `loss`: of the whole global batch."""

    members: int
    digest: str
    lr: float
    norm: float
    loss: float


class Lines:
    """The lines of all files of one kind in a folder; each look reads only what is new."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._offsets: dict[Path, int] = {}
        self.by_pid: dict[int, list[Line]] = defaultdict(list)

    def look(self) -> dict[int, list[Line]]:
        for path in self._folder.glob(f"{self._kind}-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")  # the last line may be half written
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            pid = int(path.stem.partition("-")[2])
            self.by_pid[pid] += [_line(pid, json.loads(text)) for text in whole.splitlines()]
        return self.by_pid


def alive(pid: int) -> bool:
    sample = procfs.sample(pid)
    return sample is not None and sample.state not in "ZX"


def _line(pid: int, fields: dict[str, Any]) -> Line:
    return Line(pid, **{**fields, "samples": tuple(fields["samples"])})


class SessionRun(LocalRun):
    """One run of the script in `directory`. `args`: of the script."""

    script = SCRIPT
    shards = 1  # role r has the state of shard r % shards

    def __init__(
        self, directory: Path, *options: str, args: tuple[str, ...] = (), dashboard: bool = False, **env: str
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.global_batch = int(args[args.index("--global-batch") + 1]) if "--global-batch" in args else 24
        self._begun, self._commits = Lines(directory, "begun"), Lines(directory, "commits")
        env = {"OMP_NUM_THREADS": "1", **env}  # the bits of a sum depend on the number of threads
        args = ("--out", str(directory), *args)
        super().__init__(directory, self.script, *OPTIONS, *options, args=args, dashboard=dashboard, **env)

    # What it tells --------------------------------------------------------------------------------------

    def commits(self) -> dict[int, list[Line]]:
        return self._commits.look()

    def begun(self) -> dict[int, list[Line]]:
        return self._begun.look()

    def committed(self) -> int:
        """Steps that somebody committed."""
        return max((lines[-1].step + 1 for lines in self.commits().values() if lines), default=0)

    def until_committed(self, count: int, timeout_s: float = 60.0) -> int:
        return self.until(lambda: (n := self.committed()) >= count and n, timeout_s)

    def members(self) -> dict[int, int]:
        """Role -> process, of the living whose last step is the newest or the one before."""
        newest = self.committed()
        last = [lines[-1] for lines in self.commits().values() if lines]
        return {line.role: line.pid for line in last if line.step >= newest - 2 and alive(line.pid)}

    def until_members(self, count: int, timeout_s: float = 60.0) -> dict[int, int]:
        """Until the newest steps were dealt to this many, all alive."""

        def reached() -> dict[int, int] | None:
            members = self.members()
            newest = [lines[-1] for lines in self.commits().values() if lines and lines[-1].pid in members.values()]
            return members if len(members) == count and all(line.members == count for line in newest) else None

        found = self.until(reached, timeout_s)
        assert found is not None
        return found

    def until_standby(self) -> None:
        """Until a worker waits for a role; it may have got one since."""

        def waits() -> bool:
            last = {report.node: report for report in (x.report for x in self.events(e.NodeReported))}
            sessions = [worker.session for report in last.values() for worker in report.workers if not worker.gone]
            return any(session is not None and session.stage is Stage.READY for session in sessions)

        self.until(waits)

    def until_dealt_to(self, count: int) -> None:
        """Until some step was dealt to this many members."""
        self.until(lambda: count in {line.members for lines in self.commits().values() for line in lines})

    def pause_after(self, moment: float, num_steps: int = 1) -> float | None:
        """The longest time between two commits of a process that lived through this moment (of time.time()).

        It lies before one of the next `num_steps` commits: a process that is stopped after the moment may have
        taken part in some. None: nobody committed before it and after.
        """
        pauses = []
        for lines in self.commits().values():
            times = [line.time for line in lines]
            after = bisect.bisect_right(times, moment)
            if 0 < after < len(times):
                around = times[after - 1 : after + num_steps]
                pauses += [end - begin for begin, end in itertools.pairwise(around)]
        return max(pauses, default=None)

    # What the world does to it --------------------------------------------------------------------------

    def kill_member(self, role: int, signum: int = signal.SIGKILL) -> int:
        members = self.until(lambda: m if role in (m := self.members()) else None)
        assert members is not None
        os.kill(members[role], signum)
        return members[role]

    def stop(self) -> None:
        """End a job that has more steps than the test needs."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 128 + signal.SIGTERM

    # What must hold -------------------------------------------------------------------------------------

    def check(self, num_steps: int = -1, restarts: int = 0) -> list[Committed]:
        """Assert the invariants of all that was written; the committed steps.

        `num_steps`: of a job that ran to its end; -1: as many as there are. `restarts`: of the whole job, or how often
        it went back to a kept state.
        """
        num_steps = self.committed() if num_steps < 0 else num_steps
        begun, commits = self._begun.look(), self._commits.look()
        for lines in commits.values():
            steps = [line.step for line in lines]
            jumps = [(last, following) for last, following in itertools.pairwise(steps) if following != last + 1]
            assert len(jumps) <= restarts and all(following <= last for last, following in jumps), steps
        metrics = self.directory / "metrics.jsonl"
        written = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        logged = {line["step"]: line["loss"] for line in written}
        assert [line["step"] for line in written] == sorted(logged), "metrics of a step done again are there once"
        lost = self.directory / "metrics.jsonl.redone"  # or a dead first member's: what it logged is its own share's
        again = (
            [json.loads(line) for line in lost.read_text().splitlines() if line.endswith("}")] if lost.exists() else []
        )
        known = {*logged.items(), *((line["step"], line["loss"]) for line in again)}
        assert self.told().items() <= known, "the journal has other values than the file"
        shares = self._shares(begun)
        by_step: dict[int, list[Line]] = defaultdict(list)
        for lines in commits.values():
            for line in lines:
                by_step[line.step].append(line)
        assert sorted(by_step) == list(range(num_steps)), f"steps missing: {set(range(num_steps)) - set(by_step)}"
        return [self._check_step(step, by_step[step], shares, restarts) for step in range(num_steps)]

    def told(self) -> dict[int, float]:
        """Step -> loss, by the journal; after a rollback the steps behind it are others."""
        told: dict[int, float] = {}
        for entry in self.entries():
            match entry.event:
                case e.StateRestored(_, step):
                    told = {each: loss for each, loss in told.items() if each <= step}
                case e.MetricsSeen(step, values):
                    told = {**{each: loss for each, loss in told.items() if each < step}, step: values["loss"]}
        return told

    def consumed(self, story: Sequence[Committed]) -> list[list[int]]:
        """By step: the samples of the shares that its commit is made of, in order of roles."""
        shares: dict[tuple[int, int], tuple[int, ...]] = {}
        for line in (line for lines in self._begun.look().values() for line in lines):
            if line.members == story[line.step].members:
                shares[line.step, line.role] = max(shares.get((line.step, line.role), ()), line.samples, key=len)
        return [
            [sample for role in range(step.members) for sample in shares.get((number, role), ())]
            for number, step in enumerate(story)
        ]

    def _check_step(self, step: int, lines: list[Line], shares: dict[Deal, float], restarts: int) -> Committed:
        """All who committed it did the same, and the members it was dealt to computed each of its samples once."""
        ((num_members, rate, norm),) = {(line.members, line.lr, line.norm) for line in lines}
        digests: dict[int, str] = {}
        for line in lines:
            assert digests.setdefault(line.role % self.shards, line.digest) == line.digest, lines
        roles = [line.role for line in lines]
        assert all(roles.count(role) <= 1 + restarts for role in range(num_members)), roles
        deals = [(step, num_members, role) for role in range(num_members) if self._dealt(step, num_members, role)]
        missing = [deal for deal in deals if deal not in shares]
        assert not missing, f"step {step}: committed with the shares of {missing}, which nobody computed"
        whole = " ".join(digests[shard] for shard in range(self.shards))
        return Committed(num_members, whole, rate, norm, loss=sum(shares[deal] for deal in deals))

    def _shares(self, begun: dict[int, list[Line]]) -> dict[Deal, float]:
        """The loss of every share that was computed. Done again with the same members, it came to the same."""
        shares: dict[Deal, float] = {}
        for line in (line for lines in begun.values() for line in lines):
            if line.samples == self._dealt(line.step, line.members, line.role):
                loss = shares.setdefault((line.step, line.members, line.role), line.loss)
                assert loss == line.loss, f"step {line.step}, done again, came to {line.loss}, not to {loss}"
        return shares

    def _dealt(self, step: int, members: int, role: int) -> tuple[int, ...]:
        """The samples of this share."""
        sampler = Sampler(NUM_SAMPLES, self.global_batch, seed=SEED)
        return sampler.samples(sampler.share(step, members, role))


def assert_ledger(run: SessionRun) -> None:
    """The journal's account is what the members wrote down, step for step and share for share."""
    steps = list(account(read(run.run_dir / "journal.jsonl")).steps())
    commits: dict[int, list[Line]] = defaultdict(list)
    for line in (line for lines in run.commits().values() for line in lines):
        commits[line.step].append(line)
    numbers = [step.number for step in steps]  # SIGTERM comes right behind a commit: that one may not be written
    assert numbers == list(range(len(steps))) and numbers[: len(commits)] == sorted(commits)
    assert len(steps) - len(commits) in (0, 1)
    begun: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for line in (line for lines in run.begun().values() for line in lines):
        deal = (line.step, line.members, line.role)
        begun[deal] = max(begun.get(deal, ()), line.samples, key=len)
    for step in steps:
        written = {line.role: line.samples for line in commits[step.number]}
        assert all(line.members == len(step.shares) for line in commits[step.number])
        assert all(step.shares[role] == samples for role, samples in written.items())
        for role, share in enumerate(step.shares):  # also of a member that died right after it
            assert begun.get((step.number, len(step.shares), role), ()) == share
    consumed = [sample for step in steps for share in step.shares for sample in share]
    order = Sampler(NUM_SAMPLES, run.global_batch, seed=SEED).samples(range(len(steps) * run.global_batch))
    assert consumed == list(order)


class Oracle(NamedTuple):
    """By step."""

    losses: list[float]
    rates: list[float]
    norms: list[float]


def oracle(num_steps: int, global_batch: int, count: int, script: Path = SCRIPT, *, double: bool = False) -> Oracle:
    """Of the first `count` steps of the script's training, whatever the members: computed in one process, on whole
    batches, without a session. `double`: as the script's `--double`, in float64."""
    with default_dtype(torch.float64 if double else torch.float32):
        return _oracle(runpy.run_path(str(script)), num_steps, global_batch, count)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _oracle(names: dict[str, Any], num_steps: int, global_batch: int, count: int) -> Oracle:
    model = names["build"](dropout=0.0, norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    batches = Batches(names["data"](), global_batch=global_batch, seed=SEED)
    found = Oracle([], [], [])
    for step in range(count):
        ((_, (x, y, _numbers)),) = batches.share(step, 1, 0)
        loss = (model(x) - y).square().mean()
        loss.backward()
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.losses.append(float(loss.detach()))
        found.rates.append(optimizer.param_groups[0]["lr"])
    return found
