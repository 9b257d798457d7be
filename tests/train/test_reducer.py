"""Gradients over members which are threads of this process: sums, order, overlap, and what users do around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everstep.train.buckets import deal

from .reducer_world import WAIT_S, Mixed, copies, expected, gradients, local, reducers, same, together


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_kind_of_parameter(size: int, bucket_bytes: int, overlap: bool) -> None:
    models = copies(Mixed, size)
    weight = 1 / size
    with reducers(size, models, bucket_bytes=bucket_bytes, overlap=overlap) as made:

        def step(role: int, number: int) -> tuple[bool, dict[str, Tensor | None], bool]:
            made[role].begin(weight)
            models[role](torch.arange(role, role + 3) + number, extra=role == 0).backward()
            finite = made[role].finish()
            member = made[role]._arena
            views = all(member.holds(p.grad) for p in models[role].parameters() if p.grad is not None and p.numel())
            found = gradients(models[role])
            models[role].zero_grad()
            return finite, found, views

        for number in range(3):
            parts = [
                (weight, *local(models[0], lambda m, r=role, n=number: m(torch.arange(r, r + 3) + n, extra=r == 0)))
                for role in range(size)
            ]
            results = together(step, range(size), [number] * size)
            want = expected(parts)
            assert want["never.weight"] is None and want["extra.0.weight"] is not None
            for finite, found, views in results:
                assert finite and views
                assert same(found, want), "the same bits as the sum in the order of roles, and None where it is None"


def test_gradients_have_the_memory_format_of_their_parameter() -> None:
    (model,) = copies(Mixed, 1)
    with reducers(1, [model]) as (reducer,):
        reducer.begin()
        model(torch.arange(3)).backward()
        reducer.finish()
        assert all(p.grad.stride() == p.stride() for p in model.parameters() if p.grad is not None)


uses = st.lists(st.booleans(), min_size=4, max_size=4)
shares = st.lists(st.tuples(st.sampled_from([0.125, 0.25, 0.5, 1.0]), uses), max_size=3)


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.lists(shares, min_size=2, max_size=2), min_size=1, max_size=3), to_none=st.booleans())
def test_any_shares_weights_and_unused_parameters(steps: list[list[Any]], to_none: bool) -> None:
    """Members with several micro-batches, or none, of any weights, each using some parameters, or none."""
    models = copies(lambda: nn.ParameterList([torch.ones(3) for _ in range(4)]), 2)
    with reducers(2, models, bucket_bytes=64) as made:

        def step(role: int, share: list[tuple[float, list[bool]]]) -> list[Tensor | None]:
            reducer, parameters = made[role], list(models[role].parameters())
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = None if to_none else parameter.grad.zero_()
            known = [parameter.grad is not None for parameter in parameters]
            reducer.begin()
            for place, (weight, used) in enumerate(share):
                reducer.weigh(weight, last=place == len(share) - 1)
                terms = [p.sum() * (i + 1) for i, p in enumerate(parameters) if used[i]]
                if terms:
                    torch.stack(terms).sum().backward()
            assert reducer.finish()
            assert all(p.grad is not None for p, was in zip(parameters, known, strict=True) if was)
            return [p.grad for p in parameters]

        seen = set()
        for members in steps:
            want = [0.0] * 4
            seen = set() if to_none else seen
            for weight, used in (part for share in members for part in share):
                for i in range(4):
                    want[i] += weight * used[i] * (i + 1)
                    seen |= {i} if used[i] else set()
            for found in together(step, range(2), members):
                assert [None if g is None else g.tolist() for g in found] == [
                    [want[i]] * 3 if i in seen else None for i in range(4)
                ]


def test_micro_batches_sum_up_in_the_bucket() -> None:
    """From the first full bucket on there is no second copy of the gradients."""
    (model,) = copies(lambda: nn.Sequential(nn.Linear(4, 1200), nn.Linear(1200, 4)), 1)
    with reducers(1, [model]) as (reducer,):
        for _ in range(2):
            reducer.begin()
            for place in range(3):
                reducer.weigh(0.25, last=place == 2)
                model(torch.ones(1, 4)).sum().backward()
                assert all(reducer._arena.holds(p.grad) for p in model.parameters())
            reducer.finish()
            once = local(model, lambda m: m(torch.ones(1, 4)).sum())[0]
            reducer.begin()
            reducer.weigh(0.75, last=True)
            model(torch.ones(1, 4)).sum().backward()
            reducer.finish()
            assert same(gradients(model), expected([(0.75, once)]))
            model.zero_grad()


def test_reduction_starts_before_backward_ends() -> None:
    """From the second step on: the hook of the first layer waits until the last layer's bucket is being reduced."""
    (model,) = copies(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 1)
    with reducers(1, [model], bucket_bytes=1) as (reducer,):
        member = reducer._collective
        begun = []

        def wait(parameter: Tensor) -> None:
            with member.called:
                begun.append(
                    member.called.wait_for(lambda: len(member.calls) >= 2, timeout=0.2 if not begun else WAIT_S)
                )

        model[0].weight.register_post_accumulate_grad_hook(wait)
        for _ in range(2):
            member.calls.clear()
            reducer.begin()
            model(torch.ones(1, 4)).sum().backward()
            reducer.finish()
            assert len(member.calls) == 4
        assert begun == [False, True]


def test_all_members_reduce_in_the_same_order() -> None:
    """Whatever order backward fills the buckets in."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(size) for size in (20, 40, 60, 80)])

        def forward(self, order: Sequence[int]) -> Tensor:
            total = torch.ones(())
            for place in order:
                total = total * self.parts[place].sum()
            return total

    models = copies(Crossed, 2)
    with reducers(2, models, bucket_bytes=1) as made:

        def step(role: int) -> list[int]:
            made[role].begin()
            models[role]([[0, 1, 2, 3], [3, 1, 0]][role]).backward()
            made[role].finish()
            return made[role]._collective.calls

        for number in range(1, 4):
            first, second = together(step, range(2))
            assert first == second
            assert len(first) == 4 * number
            assert first[-4:] == sorted(first[-4:], reverse=True)


def test_freezing_between_steps() -> None:
    models = copies(lambda: nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]), 2)
    layouts = []
    with reducers(2, models, bucket_bytes=100) as made:

        def step(role: int, frozen: Sequence[int]) -> dict[str, Tensor | None]:
            for place, layer in enumerate(models[role]):
                layer.requires_grad_(place not in frozen)
            made[role].begin(0.5)
            models[role](torch.full((1, 5), role + 1.0)).sum().backward()
            assert made[role].finish()
            found = gradients(models[role])
            models[role].zero_grad(set_to_none=False)
            return found

        for frozen in [(), (0, 1), (2,), (), (0,)]:
            held = {name for name, p in models[0].named_parameters() if p.grad is not None}
            first, second = together(step, range(2), [frozen] * 2)
            layouts.append(made[0].layout)
            assert made[0].layout == made[1].layout
            assert same(first, second)
            (fresh,) = copies(lambda: nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]), 1)
            for place, layer in enumerate(fresh):
                layer.requires_grad_(place not in frozen)
            parts = local(fresh, *[lambda m, r=role: m(torch.full((1, 5), r + 1.0)).sum() for role in range(2)])
            want = expected([(0.5, part) for part in parts])
            for name, gradient in first.items():
                if want[name] is None:  # frozen: what zero_grad(set_to_none=False) left
                    assert gradient is None if name not in held else not gradient.any()
                else:
                    assert torch.equal(gradient, want[name])
    assert len(set(layouts)) == 4


@pytest.mark.parametrize("overlap", [True, False])
def test_two_backwards_in_a_micro_batch(overlap: bool) -> None:
    models = copies(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 2)
    with reducers(2, models, bucket_bytes=1, overlap=overlap) as made:

        def step(role: int, num_backwards: int) -> dict[str, Tensor | None]:
            made[role].begin(0.5)
            for _ in range(num_backwards):
                models[role](torch.full((1, 3), role + 1.0)).sum().backward()
            made[role].finish()
            found = gradients(models[role])
            models[role].zero_grad()
            return found

        parts = local(models[0], *[lambda m, r=role: m(torch.full((1, 3), r + 1.0)).sum() for role in range(2)])
        for number in (0, 2, 2, 1, 2):  # nothing is learnt from a step without a gradient; what was learnt stays
            for found in together(step, range(2), [number] * 2):
                want = expected([(number / 2, part) for part in parts])
                assert same(found, want if number else dict.fromkeys(want))


def test_finish_again_sums_only_what_came_since() -> None:
    """Two optimizers, each with a backward of its own (as adversarial networks have); then both after one backward."""
    models = copies(lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), 2)
    with reducers(2, models) as made:

        def step(role: int) -> None:
            reducer, (first, second) = made[role], models[role]
            reducer.begin()
            first(torch.full((1, 2), role + 1.0)).sum().backward()
            assert reducer.finish()
            assert first.weight.grad.tolist() == [[3.0, 3.0]] * 2
            assert second.weight.grad is None
            if role == 0:
                second(torch.full((1, 2), 4.0)).sum().backward()
            assert reducer.finish()
            assert reducer.finish()
            assert first.weight.grad.tolist() == [[3.0, 3.0]] * 2
            assert second.weight.grad.tolist() == [[4.0, 4.0]] * 2
            models[role].zero_grad()

        for _ in range(2):
            together(step, range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("value", "finite"), [(torch.inf, False), (torch.nan, False), (None, True)])
def test_all_members_see_whether_gradients_are_finite(dtype: torch.dtype, value: float | None, finite: bool) -> None:
    """Elements whose sum alone overflows are finite."""
    models = copies(lambda: nn.ParameterList([torch.ones(40, dtype=dtype), torch.ones(7, dtype=dtype)]), 2)
    with reducers(2, models, bucket_bytes=1) as made:

        def step(role: int) -> bool:
            made[role].begin()
            values = torch.full((40,), torch.finfo(dtype).max / 4, dtype=dtype)
            if role == 1 and value is not None:
                values[5] = value
            (models[role][0] * values).sum(dtype=torch.float64).backward()
            return made[role].finish()

        assert together(step, range(2)) == [finite, finite]


def test_a_gradient_penalty_is_fine() -> None:
    (model,) = copies(lambda: nn.Linear(2, 2), 1)

    def loss(layer: nn.Module) -> Tensor:
        inputs = torch.ones(1, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
        return slope.square().sum()

    want = local(model, loss)[0]
    with reducers(1, [model]) as (reducer,):
        for _ in range(2):
            reducer.begin()
            loss(model).backward()
            reducer.finish()
            assert same(gradients(model), want)
            model.zero_grad()


def test_backward_outside_a_step_is_left_alone() -> None:
    (model,) = copies(lambda: nn.Linear(2, 2), 1)
    with reducers(1, [model]) as (reducer,):
        reducer.begin()
        model(torch.ones(1, 2)).sum().backward()
        reducer.finish()
        reducer.drop()
        model(torch.ones(1, 2)).sum().backward()
        assert not reducer._arena.holds(model.weight.grad)


def test_gradients_set_by_hand_are_summed_too() -> None:
    models = copies(lambda: nn.Linear(2, 2), 2)
    with reducers(2, models) as made:

        def step(role: int) -> Any:
            made[role].begin(0.5)
            models[role].weight.grad = torch.full((2, 2), role + 1.0)
            made[role].finish()
            return models[role].weight.grad.tolist(), models[role].bias.grad

        assert together(step, range(2)) == [([[1.5, 1.5]] * 2, None)] * 2


def test_clipping_and_optimizers_work_on_the_sums() -> None:
    """Ten steps of two members, each on half of the batch, are ten steps of one on all of it."""
    models = copies(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), 2)
    (alone,) = copies(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), 1)
    batch = torch.rand(8, 4)
    with reducers(2, models) as made:

        def train(role: int) -> list[list[float]]:
            optimizer = torch.optim.AdamW(models[role].parameters(), lr=0.01)
            for _ in range(10):
                made[role].begin(0.5)
                models[role](batch[role * 4 : role * 4 + 4]).square().mean().backward()
                made[role].finish()
                nn.utils.clip_grad_norm_(models[role].parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=role == 0)
            return [p.tolist() for p in models[role].parameters()]

        first, second = together(train, range(2))
    assert first == second
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        alone(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
    for mine, theirs in zip(models[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_buckets_are_dealt_in_the_order_of_backward() -> None:
    single, half = (torch.float32, torch.device("cpu")), (torch.bfloat16, torch.device("cpu"))
    kinds = [single, half, single, single, half, single]
    assert deal(kinds, [8] * 6, 64) == [[5, 3], [4, 1], [2, 0]]
    assert deal(kinds, [8] * 6, 1) == [[5], [4], [3], [2], [1], [0]]
    assert deal(kinds, [8] * 6, 1 << 20) == [[4, 1], [5, 3, 2, 0]]
    assert deal([], [], 1) == []
