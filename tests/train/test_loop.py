"""A loop of its own, alone: a later one in this process stands for a later run of the script."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.state.disk import Checkpoints
from everstep.train.loop import KeptLoop

SAVING = {"every": 0, "memory_every": 0}


class Script:
    """What a person would write; every run makes everything anew."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.kept = everstep.keep(
            model=self.model, optimizer=self.optimizer, checkpoints=everstep.Saving(folder, **SAVING)
        )
        self.first = self.kept.step

    def steps(self, num_steps: int) -> Iterator[int]:
        """Yields between an optimizer's step and its commit."""
        for step in range(self.kept.step, num_steps):
            self.optimizer.zero_grad()
            self.model(torch.full((4, 8), step / 10)).square().mean().backward()
            self.optimizer.step()
            yield step
            self.kept.committed()

    def run(self, num_steps: int) -> Script:
        with self.kept:
            for _ in self.steps(num_steps):
                pass
        return self


def test_a_later_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = Script(tmp_path / "whole").run(7)
    assert Script(tmp_path / "parts").run(4).first == 0
    later = Script(tmp_path / "parts").run(7)
    assert later.first == 4 and Checkpoints(tmp_path / "parts").found() == [7, 4]
    assert torch.equal(later.model.weight, whole.model.weight)
    assert torch.equal(*(script.optimizer.state[script.model.weight]["exp_avg"] for script in (later, whole)))
    assert Script(tmp_path / "parts").run(7).first == 7


def test_a_damaged_state_leads_to_the_one_before_and_never_to_the_begin(tmp_path: Path) -> None:
    Script(tmp_path).run(4)
    Script(tmp_path).run(7)
    damage(tmp_path / "step-0000000007")
    older = Script(tmp_path)
    older.kept.close(save=False)
    assert older.first == 4
    damage(tmp_path / "step-0000000004")
    with pytest.raises(RuntimeError, match="none of it can be used"):
        Script(tmp_path)


def damage(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(2000)
        byte = file.read(1)[0]
        file.seek(2000)
        file.write(bytes([byte ^ 4]))


def test_told_to_stop_it_saves_the_step_and_ends(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with pytest.raises(SystemExit, match="143"), script.kept:
        for step in script.steps(10):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    assert Checkpoints(tmp_path).found() == [3] and not script.kept.open
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_state_between_two_steps_is_not_saved(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with script.kept:
        next(script.steps(10))
    assert Checkpoints(tmp_path).found() == []
    with pytest.raises(ZeroDivisionError), Script(tmp_path).kept as kept:
        kept.committed()
        _ = 1 / 0
    assert Checkpoints(tmp_path).found() == []


def test_the_names_are_those_of_the_wrapped_module(tmp_path: Path) -> None:
    script = Script(tmp_path).run(2)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model = nn.Linear(8, 8)
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(parallel.parameters())
        with everstep.keep(model=parallel, optimizer=optimizer, checkpoints=tmp_path) as kept:
            assert kept.step == 2 and torch.equal(model.weight, script.model.weight)
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_be_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nothing to keep"):
        everstep.keep()
    with pytest.raises(ValueError, match="steps: int has no state_dict"):
        everstep.keep(steps=3)
    model = nn.Linear(2, 2)
    with everstep.keep(model=model) as kept, pytest.raises(ValueError, match="one loop"):
        everstep.keep(model=model)
    assert isinstance(kept, KeptLoop)
    with pytest.raises(ValueError, match="after close"):
        kept.committed()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="after init_process_group"):
        everstep.keep(model=model)
    monkeypatch.undo()
    everstep.keep(model=model).close()
