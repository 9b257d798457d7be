"""A session over modules that FSDP2 shards, in a world of one: weights, what is refused, and a step that is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import everstep
from everstep.core.formation import Formation
from everstep.data.sampler import Sampler
from everstep.state import flatten
from everstep.state.local import local
from everstep.train import sharded
from everstep.train.session import Session

INPUTS = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
DATA = (INPUTS, INPUTS.sum(dim=1, keepdim=True).sin())
STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 15), nn.Sequential(nn.Tanh(), nn.Linear(15, 16)), nn.Linear(16, 1))


@pytest.fixture(scope="module")
def undisturbed() -> list[torch.Tensor]:
    with everstep.session(seed=1) as run:
        return train(run, shard(net(), run))


@pytest.fixture
def run() -> Iterator[Session]:
    with everstep.session(seed=1) as run:
        yield run


def shard(model: nn.Sequential, run: Session, **options: Any) -> nn.Sequential:
    mesh = run.mesh(shards=1)
    fully_shard(model[1], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    run: Session,
    model: nn.Sequential,
    before: Callable[[int, int], None] = lambda step, micro: None,
    after: Callable[[int, int], None] = lambda step, micro: None,
) -> list[torch.Tensor]:
    """The parameters after some steps of 4 and 3 samples in micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    batches = everstep.Batches(DATA, global_batch=7, micro_batch=4, seed=5)
    for step in run.steps(STEPS):
        with step:
            for micro, (x, y) in enumerate(step.share(batches)):
                before(step.index, micro)
                loss = (model(x) - y).square().mean()
                after(step.index, micro)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [local(parameter.detach()).clone() for parameter in model.parameters()]


def unsharded() -> list[torch.Tensor]:
    with everstep.session(seed=1) as run:
        return train(run, net())


@pytest.mark.parametrize("reshard", [True, False])
def test_it_learns_what_a_plain_module_does(run: Session, reshard: bool) -> None:
    model = shard(net(), run, reshard_after_forward=reshard)
    trained = train(run, model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for ours, theirs in zip(trained, unsharded(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class World:
    """Breaks the epoch, once, in the second micro-batch of a step."""

    def __init__(self, run: Session, step: int = 2) -> None:
        self.run, self.step = run, step
        self.broken = 0

    def __call__(self, step: int, micro: int) -> None:
        if step == self.step and micro == 1 and not self.broken:
            self.broken += 1
            run = self.run
            run._formation(Formation(run._engine.epoch + 1, run._alone.seats, abort=True, floor=0))


class Once:
    """A hook on a gradient that fails once: what came before it is summed up, what comes after is not."""

    def __init__(self, world: World, model: nn.Sequential) -> None:
        self.world = world
        model[1].register_forward_hook(self.forward)
        self.here = (0, 0)

    def forward(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: self.backward())

    def backward(self) -> None:
        before = self.world.broken
        self.world(*self.here)
        if self.world.broken > before:
            self.world.run._engine.fabric.table.check()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("where", ["before forward", "in backward", "in the vote"])
def test_a_step_that_is_undone_leaves_nothing_in_fsdp(
    undisturbed: list[torch.Tensor], run: Session, where: str, reshard: bool
) -> None:
    model = shard(net(), run, reshard_after_forward=reshard)
    world = World(run)
    once = Once(world, model)

    def before(step: int, micro: int) -> None:
        if where == "before forward":
            world(step, micro)
        once.here = (step, micro) if where == "in backward" else (0, 0)

    def after(step: int, micro: int) -> None:
        if where == "in the vote":
            world(step, micro)

    trained = train(run, model, before, after)
    assert world.broken == 1
    assert all(torch.equal(a, b) for a, b in zip(trained, undisturbed, strict=True))


def test_state_of_shards_travels(run: Session) -> None:
    """Module and optimizer, into an optimizer that has made no step."""
    model = shard(net(), run)
    train(run, model)
    optimizer = run._optimizers[0]
    flat = flatten.flatten({"model": model, "optimizer": optimizer})
    assert {spec.sharded for spec in flatten.parse(flat.header).tensors} == {True, False}  # False: AdamW's step
    sent = [tensor.clone() for tensor in flat.tensors]
    other = net()
    for part in (other[1], other):
        fully_shard(part, mesh=run._mesh)
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-2)
    flatten.apply({"model": other, "optimizer": fresh}, flat.header, sent)
    again = flatten.flatten({"model": other, "optimizer": fresh})
    assert again.header == flat.header
    assert all(torch.equal(a, b) for a, b in zip(again.tensors, flat.tensors, strict=True))
    assert all(isinstance(state["exp_avg"], DTensor) for state in fresh.state.values())


# What is refused ------------------------------------------------------------------------------------------


def test_putting_off_sums_of_unequal_micro_batches_is_refused(run: Session) -> None:
    model = shard(net(), run)
    with pytest.raises(ValueError, match="micro-batches of one size"):
        train(run, model, lambda step, micro: model.set_requires_gradient_sync(micro == 1))


def test_a_sum_that_is_put_off_for_ever_is_refused(run: Session) -> None:
    model = shard(net(), run)
    model.set_requires_gradient_sync(False)
    batches = everstep.Batches(DATA, global_batch=4, seed=5)
    run.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the last micro-batch"):
        for step in run.steps(1):
            with step:
                for x, y in step.share(batches):
                    (model(x) - y).square().mean().backward()


def test_a_mesh_of_somebody_else_is_refused(run: Session) -> None:
    assert run.group.size() == 1
    model = fully_shard(net())
    with pytest.raises(ValueError, match="the session's mesh"):
        train(run, model)


def test_a_module_that_is_not_protected_is_refused(run: Session) -> None:
    model = shard(net(), run)
    run.protect(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="protect the module"):
        next(run.steps(1))


def test_a_factor_of_the_users_is_refused(run: Session) -> None:
    model = shard(net(), run)
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError, match="set_gradient_divide_factor"):
        train(run, model)


def test_one_shard_sums_in_float32_only(run: Session) -> None:
    model = shard(net(), run, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    with pytest.raises(ValueError, match="float32 only"):
        train(run, model)


def test_another_version_of_fsdp_is_refused(run: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sharded.INTERNALS, "FSDPParamGroup", ("fsdp_params", "_renamed"))
    with pytest.raises(RuntimeError, match="FSDPParamGroup has no _renamed"):
        train(run, shard(net(), run))


def test_the_mesh_has_all_members(run: Session) -> None:
    with pytest.raises(ValueError, match="0 replicas x 2 shards for 1 members"):
        run.mesh(shards=2)


def test_one_mesh_before_the_first_step(run: Session) -> None:
    model = net()
    run.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(1):
        with step:
            pass
    assert run._mesh is None
    with pytest.raises(ValueError, match="before the first step"):
        run.mesh(shards=1)


def test_members_with_fewer_micro_batches_are_refused(run: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shard(net(), run)
    monkeypatch.setattr(Sampler, "even", lambda self, num_members: False)
    with pytest.raises(ValueError, match="all members need as many micro-batches"):
        train(run, model)


def test_another_role_would_need_another_shard(run: Session) -> None:
    model = shard(net(), run)
    run._engine._place = (1, 4)
    with pytest.raises(
        RuntimeError, match="epoch 2 needs role 0 of 1 here, and the sharded state is that of role 1 of 4"
    ):
        train(run, model, World(run, step=0))
