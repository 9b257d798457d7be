"""A session alone that saves: a later one goes on with the same bits, and what can go wrong with a save is said.

Every session here has a vault of its own, a real process. A later session in this process is a later run of the script.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import everstep
from everstep.control import procfs
from everstep.core.saves import Tier
from everstep.probe import boot
from everstep.state.disk import Checkpoints
from everstep.train.keeping import Keeping, SaveFailed
from everstep.train.saving import Saving

pytestmark = pytest.mark.timeout(180)  # each session starts a vault, which other work on the machine may delay

DATA = torch.randn(60, 8, generator=torch.Generator().manual_seed(3))


class Script:
    """What a person would write. Every run of it makes everything anew, as a new process would."""

    def __init__(self, checkpoints: object, spoil: int = -1) -> None:
        torch.manual_seed(7)
        self.checkpoints, self.spoil = checkpoints, spoil
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.batches = everstep.Batches(DATA, global_batch=13, micro_batch=4, seed=5)
        self.seen: list[int] = []

    def steps(self, num_steps: int) -> Iterator[everstep.Session]:
        """Yields after each step."""
        with everstep.session(seed=3, checkpoints=self.checkpoints) as run:  # type: ignore[arg-type]
            run.protect(
                model=self.model, optimizer=self.optimizer, schedule=self.schedule, average=self.average,
                batches=self.batches,
            )  # fmt: skip
            for step in run.steps(num_steps):
                with step:
                    for x in step.share(self.batches):
                        (self.model(x) - x).square().mean().backward()
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.average.update_parameters(self.model)  # after the commit, and part of the step's state
                if step.index == self.spoil:
                    with torch.no_grad():
                        next(self.model.parameters()).fill_(math.nan)
                self.seen.append(step.index)
                yield run
                until(lambda: run.saves.durable == run.saves.requested or run.saves.failed_step > 0)

    def run(self, num_steps: int) -> Script:
        for _ in self.steps(num_steps):
            pass
        return self

    def bits(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.state_dict().values(), *self.average.state_dict().values(), *states]
        return [*tensors, torch.tensor(self.schedule.get_last_lr())]


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def kill_vault() -> None:
    (vault,) = (pid for pid in procfs.children(os.getpid()) if b"everstep.state.vault" in command(pid))
    os.kill(vault, signal.SIGKILL)


def same(one: Script, other: Script) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.bits(), other.bits(), strict=True))


@pytest.fixture(scope="module")
def undisturbed() -> Script:
    return Script(None).run(24)


def found(folder: Path) -> list[int]:
    return Checkpoints(folder).found()


def test_a_later_run_goes_on_with_the_same_bits(tmp_path: Path, undisturbed: Script) -> None:
    saving = everstep.Saving(tmp_path, every=5)
    assert Script(saving).run(12).seen == list(range(12))
    assert found(tmp_path) == [12, 10, 5]  # the last one because the steps were through
    later = Script(saving).run(24)
    assert later.seen == list(range(12, 24)) and same(later, undisturbed)
    assert found(tmp_path) == [24, 20, 15]
    assert Script(saving).run(24).seen == []


def test_a_damaged_checkpoint_is_left_out_and_the_one_before_used(
    tmp_path: Path, undisturbed: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    saving = everstep.Saving(tmp_path, every=5)
    Script(saving).run(12)
    with (tmp_path / "step-0000000012/__0_0.distcp").open("r+b") as file:
        file.seek(2000)
        byte = file.read(1)[0]
        file.seek(2000)
        file.write(bytes([byte ^ 4]))
    (tmp_path / "step-0000000010/COMPLETE").write_bytes(b"")
    later = Script(saving).run(24)
    assert later.seen == list(range(5, 24)) and same(later, undisturbed)
    said = capfd.readouterr().err
    assert "step-0000000012/__0_0.distcp is damaged between bytes" in said
    assert "step-0000000010 is left out" in said


def test_checkpoints_that_are_known_to_be_wrong_are_none(tmp_path: Path, undisturbed: Script) -> None:
    saving = everstep.Saving(tmp_path, every=5)
    Script(saving).run(12)
    assert len(Checkpoints(tmp_path).retract(lambda manifest: manifest.step > 5)) == 2
    assert found(tmp_path) == [5] and Checkpoints(tmp_path).retract(lambda manifest: manifest.step > 5) == ()
    later = Script(saving).run(24)
    assert later.seen == list(range(5, 24)) and same(later, undisturbed)
    assert found(tmp_path) == [24, 20, 15]


def test_a_save_that_is_asked_for(tmp_path: Path) -> None:
    saving = everstep.Saving(tmp_path, every=0, memory_every=0)
    script = Script(saving)
    for run in script.steps(9):
        if len(script.seen) in (3, 7):
            run.save()
        if len(script.seen) == 6:
            assert run.saves.durable == 4 and not run.saves.failed
    assert found(tmp_path) == [9, 8, 4]
    with pytest.raises(ValueError, match="checkpoints=FOLDER"), everstep.session() as run:
        run.save()


def test_state_that_is_not_finite_is_never_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saving = everstep.Saving(tmp_path, every=4)
    with pytest.raises(SaveFailed, match=r"not finite after step 12.*last durable step is 4"):
        Script(saving, spoil=7).run(12)
    assert found(tmp_path) == [4]
    assert "0.weight is not finite after step 8: this state is not kept" in capfd.readouterr().err


def test_a_place_that_cannot_be_written_ends_in_an_error_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    script = Script(everstep.Saving(tmp_path / "file" / "runs", every=4))
    with pytest.raises(SaveFailed, match="nothing was saved"):
        script.run(9)
    assert script.seen == list(range(9))


def test_a_vault_that_dies_costs_a_save_and_no_step(
    tmp_path: Path, undisturbed: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script(everstep.Saving(tmp_path, every=0, memory_every=1))
    for _ in script.steps(24):
        if len(script.seen) == 9:
            kill_vault()
    assert same(script, undisturbed) and found(tmp_path) == [24]
    assert "the vault of this node is gone" in capfd.readouterr().err


def test_a_vault_that_dies_in_its_last_write_ends_the_wait(tmp_path: Path) -> None:
    """240 MB take it 100 ms at least; it is killed within a millisecond of their begin."""
    model = nn.Linear(5000, 4000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def kill(run: everstep.Session) -> None:
        until(lambda: run.saves.requested == 1)
        snapshots = run.keeping._snapshots
        assert snapshots is not None
        until(lambda: bool(snapshots._writing) and snapshots._copy is None)
        kill_vault()

    saving = everstep.Saving(tmp_path, every=0, memory_every=0)
    gone = pytest.raises(SaveFailed, match=r"the vault of this node is gone.*nothing was saved")
    with gone, everstep.session(checkpoints=saving) as run:
        run.protect(model=model, optimizer=optimizer)
        killer = threading.Thread(target=kill, args=(run,), daemon=True)
        for step in run.steps(1):
            with step:
                model(torch.ones(1, 5000)).sum().backward()
                optimizer.step()
            killer.start()
    killer.join()


def test_another_model_is_refused(tmp_path: Path) -> None:
    Script(tmp_path).run(2)
    other = Script(tmp_path)
    other.model.append(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="what was saved does not fit: "):
        other.run(4)


def test_what_means_nothing_is_refused() -> None:
    for wrong in ({"every": -1}, {"overhead": 0}, {"keep": 0}, {"copies": 0}):
        with pytest.raises(ValueError):
            everstep.Saving("x", **wrong)  # type: ignore[arg-type]


def test_who_asks_from_outside_gets_one_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member hears of it in its own time: the first one's vote counts, unless that one dies before."""
    asked, wishes = 1, list[Tier]()
    monkeypatch.setattr(boot, "save_asked", lambda: asked)
    members = [Keeping(Saving(Path("checkpoints")), {}) for _ in range(2)]
    for role, member in enumerate(members):
        member._position = SimpleNamespace(role=role, committed=4, commit_epoch=1, keep=Tier.DISK)  # type: ignore[assignment]
        member._snapshots = SimpleNamespace(  # type: ignore[assignment]
            ask=wishes.append, wish=lambda role, step: Tier.NOTHING, committed=lambda *_: None
        )
    asked = 2
    for member in members:
        member.wish()
        member.wish()
    assert wishes == [Tier.DISK]
    members[1].committed()
    members[1]._position.role = 0  # type: ignore[misc, union-attr]
    members[1].wish()
    assert wishes == [Tier.DISK]
    asked = 3
    members[1].wish()
    assert wishes == [Tier.DISK] * 2
