"""The reducer when things go wrong: members lost in a step, gradients it cannot sum, calls out of order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, Seat
from everstep.train.reducer import Reducer

from .reducer_world import WAIT_S, Member, Mixed, World, copies, expected, gradients, local, reducers, same, together


@pytest.mark.parametrize("overlap", [True, False])
def test_a_broken_epoch_ends_the_step_and_the_next_one_is_right(overlap: bool) -> None:
    models = copies(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 2)
    with reducers(2, models, bucket_bytes=1, overlap=overlap) as made:
        world = made[0]._collective.world

        def step(role: int) -> dict[str, Tensor | None]:
            made[role].begin(0.5)
            models[role](torch.full((1, 3), role + 1.0)).sum().backward()
            made[role].finish()
            return gradients(models[role])

        def broken(role: int) -> None:
            made[role].begin(0.5)
            with pytest.raises(EpochBroken):
                models[role](torch.full((1, 3), role + 1.0)).sum().backward()
                made[role].finish()

        together(step, range(2))
        for _ in range(2):
            thread = threading.Thread(target=broken, args=[0])
            thread.start()
            with made[0]._collective.called:
                made[0]._collective.called.wait_for(lambda: made[0]._collective.calls, WAIT_S)
            world.abort()
            thread.join()
            made[0].drop()
            assert all(p.grad is None for p in models[0].parameters())
            world.repair()
            models[1].zero_grad()
            first, second = together(step, range(2))
            want = local(models[0], *[lambda m, r=role: m(torch.full((1, 3), r + 1.0)).sum() for role in range(2)])
            assert same(first, second)
            assert same(first, expected([(0.5, part) for part in want]))
            models[1].zero_grad()


def test_backward_ends_early_when_the_epoch_is_broken() -> None:
    (model,) = copies(lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]), 1)
    with reducers(1, [model], bucket_bytes=1) as (reducer,):
        reducer.begin()
        model(torch.ones(1, 3)).sum().backward()
        reducer.finish()
        model.zero_grad()
        reducer._collective.world.abort()
        reached = []

        def wait(parameter: Tensor) -> None:  # until the thread has met the broken epoch
            while reducer._runner._error is None and reducer._runner._thread.is_alive():
                threading.Event().wait(0.001)

        model[2].bias.register_post_accumulate_grad_hook(wait)
        model[0].weight.register_post_accumulate_grad_hook(reached.append)
        reducer.begin()
        with pytest.raises(EpochBroken):
            model(torch.ones(1, 3)).sum().backward()
        assert not reached
        reducer.drop()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_sparse_gradients_and_graphs_of_gradients_are_refused_by_name() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "layer": nn.Linear(2, 2)})
    with reducers(1, [model]) as (reducer,):
        for weights in [(1.0,), (1.0, 0.5)]:
            reducer.begin()
            with pytest.raises(ValueError, match=r"table\.weight has a gradient of layout torch\.sparse_coo"):
                for place, weight in enumerate(weights):
                    reducer.weigh(weight, last=place == len(weights) - 1)
                    model["layer"](model["table"](torch.tensor([1]))).sum().backward()
                reducer.finish()
            reducer.drop()
        reducer.begin()
        with pytest.raises(ValueError, match=r"layer\.\w+ has a gradient made by backward\(create_graph=True\)"):
            model["layer"](torch.ones(1, 2)).square().sum().backward(create_graph=True)
            reducer.finish()
        reducer.drop()


def test_a_second_backward_which_comes_only_later_is_said() -> None:
    (model,) = copies(lambda: nn.Linear(3, 3), 1)
    with reducers(1, [model]) as (reducer,):
        for number in range(3):
            reducer.begin()
            out = model(torch.ones(1, 3)).sum()
            out.backward(retain_graph=True)
            if number == 1:
                with pytest.raises(ValueError, match=r"(weight|bias) got a second gradient in a micro-batch, after"):
                    out.backward()
                reducer.drop()
                assert model.weight.grad is None
            else:
                assert reducer.finish()
            model.zero_grad()


def test_what_cannot_be_reduced_is_refused() -> None:
    member = Member(World(1), 0)
    with pytest.raises(ValueError, match="odd: gradients of a Strange are not for plain data parallelism"):
        Reducer([("odd", type("Strange", (Tensor,), {})())], member, member)
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(2,\): gradients of a Tensor"):
        Reducer([torch.ones(2, requires_grad=True) * 2], member, member)
    layer = nn.Linear(1, 1)
    reducer = Reducer(layer.parameters(), member, member)
    reducer.begin()
    reducer.weigh(0.0, last=False)
    with pytest.raises(ValueError, match="follows one of weight 0"):
        reducer.weigh(0.5, last=True)
    reducer.close()


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    (model,) = copies(lambda: nn.Linear(2, 2), 1)
    with reducers(1, [model]) as (reducer,):
        reducer.begin()
        reducer.finish()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.fixture
def fabrics() -> Iterator[list[Fabric]]:
    """Three workers on one host and one on another, in this process."""
    made = [Fabric(f"w{n}", f"host {n // 3}", b"0123456789abcdef" * 4) for n in range(4)]
    yield made
    for fabric in made:
        fabric.close()


def enter(fabrics: Sequence[Fabric], epoch: int) -> None:
    seats = tuple(Seat(f.worker, "node", "host 0" if f.worker < "w3" else "host 1", f.endpoint) for f in fabrics)
    formation = Formation(epoch, seats, abort=False, floor=0)
    together(lambda fabric: (fabric.prepare(formation), fabric.switch(formation)), fabrics)


def agree(found: Sequence[dict[str, Tensor | None]], want: dict[str, Tensor | None]) -> None:
    """Bit by bit among members. bfloat16 is rounded once by the fabric, and after each addition in what is wanted."""
    for other in found:
        assert same(found[0], other)
    for name, gradient in want.items():
        if gradient is None or gradient.dtype is not torch.bfloat16:
            assert same({name: found[0][name]}, {name: gradient}), name
        else:
            torch.testing.assert_close(found[0][name], gradient, rtol=0.02, atol=0.001)


@pytest.mark.parametrize("size", [2, 4])
def test_over_the_fabric_through_the_loss_of_a_member(fabrics: list[Fabric], size: int) -> None:
    """In memory shared by the members, and over TCP; after a broken step the survivors do it without the lost one."""
    models = copies(Mixed, size)
    made = [
        Reducer(model.named_parameters(), fabric, Communicator(fabric), bucket_bytes=300)
        for model, fabric in zip(models, fabrics, strict=False)
    ]

    def step(role: int, num_members: int) -> dict[str, Tensor | None]:
        models[role].zero_grad()
        made[role].begin(1 / num_members)
        models[role](torch.arange(role, role + 3), extra=role == 0).backward()
        assert made[role].finish()
        return gradients(models[role])

    def broken(role: int) -> None:
        with pytest.raises(EpochBroken):
            step(role, size)
        made[role].drop()

    parts = local(models[0], *[lambda m, r=role: m(torch.arange(r, r + 3), extra=r == 0) for role in range(size)])
    enter(fabrics[:size], 1)
    for _ in range(2):
        agree(together(step, range(size), [size] * size), expected([(1 / size, part) for part in parts]))
    lost = threading.Timer(0.1, lambda: [fabric.abort(1, "a member died") for fabric in fabrics[: size - 1]])
    lost.start()
    together(broken, range(size - 1))
    lost.join()
    enter(fabrics[: size - 1], 2)
    found = together(step, range(size - 1), [size - 1] * (size - 1))
    agree(found, expected([(1 / (size - 1), part) for part in parts[:-1]]))
    for fabric in fabrics:
        fabric.close()
    for reducer in made:
        reducer.close()
