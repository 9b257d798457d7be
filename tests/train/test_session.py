"""The session's API in a world of one: the script's mistakes are told, what a fault undoes is undone.

A fault is what the controller makes of it, a formation that ends the epoch. It comes in the midst of a step.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import everstep
from everstep.core.formation import Formation
from everstep.train.session import Session, Step

INPUTS = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
DATA = (INPUTS, INPUTS.sum(dim=1, keepdim=True).sin())
STEPS = 6


def net(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), *extra, nn.ReLU(), nn.Linear(16, 1))


def batches(micro_batch: int = 4) -> everstep.Batches:
    return everstep.Batches(DATA, global_batch=13, micro_batch=micro_batch, seed=5)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def fault(run: Session) -> None:
    """The world breaks: the present epoch is over, the same member is alone in the next one."""
    run._formation(Formation(run._engine.epoch + 1, run._alone.seats, abort=True, floor=0))


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def bits(*objects: Any) -> list[torch.Tensor]:
    found = []
    for thing in objects:
        if isinstance(thing, nn.Module):
            found += [tensor.clone() for tensor in thing.state_dict().values()]
        else:
            found += [v.clone() for s in thing.state_dict()["state"].values() for v in s.values()]
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def run() -> Iterator[Session]:
    with everstep.session(seed=11) as session:
        yield session


class Plain:
    """A model, an optimizer and their loop; `faults`: at these steps the world breaks, once, at `where`."""

    def __init__(self, run: Session, *extra: nn.Module, faults: tuple[int, ...] = (), where: str = "vote") -> None:
        self.run, self.where, self.faults = run, where, set(faults)
        self.model = net(*extra)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.yielded: list[int] = []
        self.committed: list[int] = []
        self.rates: list[float] = []
        run.protect(model=self.model, optimizer=self.optimizer, schedule=self.schedule)

    def strike(self, step: Step, where: str) -> None:
        if where == self.where and step.index in self.faults:
            self.faults.remove(step.index)
            fault(self.run)

    def train(self) -> list[torch.Tensor]:
        data = batches()
        for step in self.run.steps(STEPS):
            self.yielded.append(step.index)
            with step:
                self.strike(step, "begin")
                for batch in step.share(data):
                    loss_of(self.model, batch).backward()
                    self.strike(step, "forward")
                self.schedule.step()
                self.strike(step, "vote")
                self.optimizer.step()
                self.strike(step, "committed")
                self.optimizer.zero_grad()
            if step.committed:
                self.committed.append(step.index)
                self.rates.append(self.optimizer.param_groups[0]["lr"])
        return bits(self.model, self.optimizer)


@pytest.fixture
def quiet_scheduler() -> Iterator[None]:
    """The schedule steps before the optimizer here, so that undoing it shows; PyTorch warns of that order."""
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        yield


# What is trained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.5, 100.0])
@pytest.mark.parametrize("micro_batch", [13, 1, 5])
def test_training_is_that_of_a_plain_loop(run: Session, micro_batch: int, clip: float) -> None:
    """Also with the batch in parts, even or not, and with clipping."""
    model, plain = net(), net()
    optimizer, plainly = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    run.protect(model=model, optimizer=optimizer)
    data = batches(micro_batch)
    for step in run.steps(STEPS):
        with step:
            for batch in step.share(data):
                loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        assert step.committed
        ((_, whole),) = batches(13).share(step.index, 1, 0)
        loss_of(plain, whole).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), clip)
        plainly.step()
        plainly.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_without_batches_of_ours(run: Session) -> None:
    """`share` is not needed: gradients are averaged before the optimizer's step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    before = bits(model)
    for step in run.steps(2):
        with step:
            loss_of(model, DATA).backward()
            optimizer.step()
    assert not same(before, bits(model))


def test_evaluation_and_logs_between_steps(run: Session, capsys: pytest.CaptureFixture[str]) -> None:
    model = net(nn.BatchNorm1d(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    run.log(early=1)
    for step in run.steps(2):
        with step:
            for batch in step.share(batches()):
                loss_of(model, batch).backward()
            run.log(inside=1)
            optimizer.step()
            optimizer.zero_grad()
        before = bits(model)
        model.eval()
        with torch.no_grad():
            value = loss_of(model, DATA)
        model.train()
        run.log(loss=value, lr=0.1)
        assert same(before, bits(model))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["step", "1", "loss"], ["step", "2", "loss"]]
    assert lines[0].endswith("lr 0.1")


# What a fault undoes ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet_scheduler")
@pytest.mark.parametrize("where", ["begin", "forward", "vote", "committed"])
def test_a_step_that_is_done_again_comes_to_the_same(where: str) -> None:
    """Parameters, optimizer, schedule, running statistics and random numbers, bit for bit."""
    layers = (nn.BatchNorm1d(16), nn.Dropout(0.3))
    with everstep.session(seed=11) as run:
        undisturbed = Plain(run, *copy.deepcopy(layers))
        expected = undisturbed.train()
    with everstep.session(seed=11) as run:
        struck = Plain(run, *copy.deepcopy(layers), faults=(0, 2, 5), where=where)
        assert same(struck.train(), expected)
    again = [] if where == "committed" else [0, 2, 5]
    assert struck.yielded == sorted([*range(STEPS), *again])
    assert struck.committed == list(range(STEPS))
    assert struck.rates == undisturbed.rates


def test_running_statistics_are_undone(run: Session) -> None:
    model = net(nn.BatchNorm1d(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    before, seen = bits(model), 0
    for step in run.steps(1):
        seen += 1
        assert same(before, bits(model))
        with step:
            for batch in step.share(batches()):
                loss_of(model, batch).backward()
            assert not same(before, bits(model))
            if seen == 1:
                fault(run)
            optimizer.step()
    assert seen == 2


def test_an_optimizer_that_stepped_before_the_commit_is_undone() -> None:
    """Two optimizers, each with a backward of its own; the fault comes between their steps."""

    def train(strike: bool) -> tuple[list[torch.Tensor], int]:
        with everstep.session(seed=11) as run:
            critic, maker = net(), net()
            optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (critic, maker)]
            run.protect(critic=critic, maker=maker, first=optimizers[0], second=optimizers[1])
            count = 0
            for step in run.steps(4):
                count += 1
                with step:
                    for model, optimizer in zip((critic, maker), optimizers, strict=True):
                        loss_of(model, DATA).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        if strike and model is critic and step.index in (0, 2) and count in (1, 4):
                            fault(run)
            return bits(critic, maker, *optimizers), count

    expected, _ = train(strike=False)
    found, count = train(strike=True)
    assert count == 6
    assert same(found, expected)


@pytest.mark.parametrize("late", [False, True])
def test_what_fails_because_the_world_broke_is_no_mistake(
    run: Session, capsys: pytest.CaptureFixture[str], late: bool
) -> None:
    plain = Plain(run)
    failed = False
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        for step in run.steps(3):
            with step:
                for batch in step.share(batches()):
                    loss_of(plain.model, batch).backward()
                if step.index == 1 and not failed:
                    failed = True
                    fault(run)
                    if late:  # the links of the next epoch are open already
                        until(lambda: run._engine._member.epoch > run._engine.epoch)
                    raise RuntimeError("connection lost")
                plain.schedule.step()
                plain.optimizer.step()
    assert run._engine.committed == 3
    assert "step 1 is done again: RuntimeError: connection lost" in capsys.readouterr().err


def test_a_fault_that_the_script_swallows_is_a_fault_all_the_same(run: Session) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    yielded = []
    for step in run.steps(2):
        yielded.append(step.index)
        with step:
            loss_of(model, DATA).backward()
            if yielded == [0]:
                fault(run)
            try:
                optimizer.step()
            except Exception:  # noqa: BLE001 - what some scripts do
                assert len(yielded) == 1
    assert yielded == [0, 0, 1]


# Non-finite gradients -----------------------------------------------------------------------------------


def test_a_grad_scaler_skips_steps(run: Session) -> None:
    """Its own way: no optimizer step for gradients that overflowed. The step counts, and nothing was applied."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.protect(model=model, optimizer=optimizer, scaler=scaler)
    scales = []
    for step in run.steps(3):
        before = bits(model)
        with step:
            for batch in step.share(batches()):
                scaler.scale(loss_of(model, batch)).backward()
                if step.index == 1:
                    model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert step.committed
        assert same(before, bits(model)) == (step.index == 1)
        scales.append(scaler.get_scale())
    assert scales == [4.0, 2.0, 2.0]


def test_non_finite_gradients_are_not_applied(run: Session) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(3):
        before = bits(model)
        with step:
            for batch in step.share(batches()):
                loss = loss_of(model, batch)
                (loss * float("nan") if step.index == 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert step.committed
        assert same(before, bits(model)) == (step.index == 1)


def test_a_block_that_steps_no_optimizer_is_skipped_by_all(run: Session) -> None:
    """`continue` out of a bad batch: the others would apply what this member does not, if it counted as complete."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    after: list[tuple[int, bool]] = []
    states = [bits(model)]
    for step in run.steps(4):
        if step.index:
            after.append((run._engine.committed, run._engine._member.stand.skipped))
            states.append(bits(model))
        with step:
            for batch in step.share(batches()):
                loss_of(model, batch).backward()
            if step.index == 1:
                continue
            optimizer.step()
            optimizer.zero_grad()
    assert after == [(1, False), (2, True), (3, False)]
    assert [same(*pair) for pair in itertools.pairwise(states)] == [False, True, False]


# Mistakes -----------------------------------------------------------------------------------------------


def test_the_scripts_exception_is_the_scripts(run: Session) -> None:
    plain = Plain(run)
    mistake = RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine") as caught:
        for step in run.steps(3):
            with step:
                loss_of(plain.model, DATA).backward()
                raise mistake
    assert caught.value is mistake
    assert caught.value.__context__ is None
    assert not step.committed


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_who_wants_to_stop_stops(run: Session, kind: type[BaseException]) -> None:
    Plain(run)
    with pytest.raises(kind):
        for step in run.steps(3):
            with step:
                raise kind


def test_an_exception_after_the_commit_leaves_it(run: Session) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    before = bits(model)
    with pytest.raises(RuntimeError, match="late"):
        for step in run.steps(3):
            with step:
                loss_of(model, DATA).backward()
                optimizer.step()
                raise RuntimeError("late")
    assert step.committed
    assert not same(before, bits(model))


def test_what_can_be_protected(run: Session) -> None:
    with pytest.raises(ValueError, match="thing: int has no state_dict"):
        run.protect(thing=3)
    model = net()
    run.protect(model=model)
    with pytest.raises(ValueError, match="protected already"):
        run.protect(model=model)
    with pytest.raises(ValueError, match="at least one optimizer"):
        next(run.steps(1))


def test_protect_comes_before_the_first_step(run: Session) -> None:
    plain = Plain(run)
    next(run.steps(1))
    with pytest.raises(ValueError, match="before the first step"):
        run.protect(more=plain.model)


def test_a_loop_without_with(run: Session) -> None:
    Plain(run)
    with pytest.raises(ValueError, match="needs `with step:`"):
        for _ in run.steps(3):
            pass


def test_an_optimizer_steps_inside_only_and_once(run: Session) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    steps = run.steps(3)
    with next(steps):
        loss_of(model, DATA).backward()
        optimizer.step()
        before = bits(model)
        with pytest.raises(ValueError, match="once a step"):
            optimizer.step()
    with pytest.raises(ValueError, match="belongs inside `with step:`"):
        optimizer.step()
    step = next(steps)
    with pytest.raises(ValueError, match="belongs inside `with step:`"):
        optimizer.step()
    assert same(before, bits(model))
    with step:
        optimizer.step()
    with pytest.raises(ValueError, match="entered twice"), step:
        pass


def test_an_optimizer_that_is_not_protected_is_not_ours(run: Session) -> None:
    plain, other = Plain(run), net()
    its = torch.optim.SGD(other.parameters(), lr=0.1)
    with next(run.steps(1)) as step:
        loss_of(other, DATA).backward()
        its.step()
        assert not step.committed
        loss_of(plain.model, DATA).backward()
        plain.optimizer.step()
        assert step.committed


# Around it ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet_scheduler")
def test_twice_in_one_process_and_nothing_stays() -> None:
    """A notebook's cell that is run again: the same result, and no thread or hook of the first one."""
    results, before = [], set(threading.enumerate())
    for _ in range(2):
        with everstep.session(seed=11) as run:
            results.append(Plain(run, nn.Dropout(0.2)).train())
        assert set(threading.enumerate()) <= before
    assert same(*results)
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    optimizer.step()  # of no session


def test_a_plain_python_script(tmp_path: Path) -> None:
    """Without a launcher, as in a debugger."""
    script = Path(__file__).parents[1] / "integration" / "scripts" / "session_train.py"
    command = [sys.executable, str(script), "--steps", "5", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (commits,) = tmp_path.glob("commits-*.jsonl")
    lines = [msgspec.json.decode(line) for line in commits.read_text().splitlines()]
    assert [(line["step"], line["role"], line["members"]) for line in lines] == [(n, 0, 1) for n in range(5)]


def test_a_loop_that_is_left_ends_there_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those whose loops ended at the same step are waited for, or replaced."""
    goals: list[int] = []
    model = net()
    with everstep.session() as run:
        run.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        monkeypatch.setattr(run._engine, "_report", lambda report: goals.append(report.goal))
        for step in run.steps(STEPS):
            with step:
                for batch in step.share(batches()):
                    loss_of(model, batch).backward()
            if step.index == 2:
                break
    assert STEPS in goals and goals[-1] == 3
