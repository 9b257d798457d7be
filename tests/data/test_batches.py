"""Batches over every kind of data set, and the oracle: dealt gradients equal those of the whole global batch."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from everstep.data.batches import Batches
from everstep.data.sampler import MicroBatch, Permutation

SIZE = 40


class Squares(Dataset[tuple[int, float]]):
    """Sample i is (i, i * i)."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(index * index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))

    def __len__(self) -> int:
        return SIZE


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def both(size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(size)
    return numbers, (numbers * numbers).float()


def drawn(batches: Batches, step: int, num_members: int) -> list[tuple[MicroBatch, Any]]:
    return [pair for role in range(num_members) for pair in batches.share(step, num_members, role)]


@pytest.mark.parametrize(
    "make",
    [
        Squares,
        both,
        lambda: [(index, float(index * index)) for index in range(SIZE)],
        lambda: TensorDataset(*both()),
        lambda: Subset(TensorDataset(*both()), range(SIZE)),
        lambda: ConcatDataset([Squares()]),
    ],
    ids=["Dataset", "tensors", "list", "TensorDataset", "Subset", "ConcatDataset"],
)
def test_kinds_of_data_sets(make: Callable[[], Any]) -> None:
    batches = Batches(make(), global_batch=9, micro_batch=2, seed=3)
    pairs = drawn(batches, 5, 2)
    assert [index for micro, _ in pairs for index in micro.indices] == list(batches.sampler.samples(range(45, 54)))
    for micro, (numbers, squares) in pairs:
        assert numbers.tolist() == list(micro.indices)
        assert squares.tolist() == [index**2 for index in micro.indices]


@pytest.mark.parametrize(
    "dataset",
    [torch.arange(SIZE), numpy.arange(SIZE), range(SIZE), tuple(range(SIZE))],
    ids=lambda it: type(it).__name__,
)
def test_single_columns(dataset: Any) -> None:
    for micro, batch in drawn(Batches(dataset, global_batch=7), 1, 3):
        assert isinstance(batch, torch.Tensor)
        assert batch.tolist() == list(micro.indices)


def test_tensors_are_indexed_once_a_micro_batch() -> None:
    calls = []

    class Watched(torch.Tensor):
        def __getitem__(self, index: Any) -> torch.Tensor:
            calls.append(index)
            return torch.Tensor.__getitem__(self.as_subclass(torch.Tensor), index)

    drawn(Batches(torch.arange(SIZE).as_subclass(Watched), global_batch=8, micro_batch=4), 0, 1)
    assert [len(index) for index in calls] == [4, 4]
    assert all(index.dtype == torch.int64 for index in calls)


def test_many_at_once_when_the_data_set_can() -> None:
    class Table(Squares):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
            asked.append(indices)
            return [self[index] for index in indices]

    asked: list[list[int]] = []
    pairs = drawn(Batches(Table(), global_batch=8, micro_batch=4), 0, 1)
    assert asked == [list(micro.indices) for micro, _ in pairs]
    assert pairs[0][1][0].tolist() == asked[0]


@pytest.mark.parametrize("make", [Squares, both], ids=["Dataset", "tensors"])
def test_collate_gets_the_samples(make: Callable[[], Any]) -> None:
    batches = Batches(make(), global_batch=6, collate=lambda samples: [int(number) for number, _ in samples])
    for micro, batch in drawn(batches, 2, 4):
        assert batch == list(micro.indices)


def test_collate_gets_the_rows_of_a_tensor() -> None:
    ((micro, batch),) = drawn(Batches(torch.eye(5), global_batch=3, collate=torch.stack), 0, 1)
    assert batch.argmax(dim=1).tolist() == list(micro.indices)


def test_samples_are_fetched_when_asked_for() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> tuple[int, float]:
            raise OSError(f"sample {index}")

    share = Batches(Broken(), global_batch=4).share(0, 1, 0)
    with pytest.raises(OSError, match="sample"):
        next(share)


def test_a_member_without_samples_gets_nothing() -> None:
    assert list(Batches(Squares(), global_batch=2).share(0, 3, 2)) == []


def model(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 1).double()


def regression(size: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(dim=1, keepdim=True) + torch.randn(size, 1, generator=generator, dtype=torch.float64)


def dealt_backward(net: torch.nn.Linear, batches: Batches, step: int, num_members: int) -> float:
    """Gradients as members make them: each its weighted micro-batches, and the sum over members. Returns the loss."""
    total = 0.0
    for micro, (inputs, targets) in drawn(batches, step, num_members):
        loss = micro.weight * torch.nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        total += loss.item()
    return total


@pytest.mark.parametrize("micro_batch", [None, 1, 4])
@pytest.mark.parametrize("global_batch", [24, 25])
@pytest.mark.parametrize("num_members", range(1, 8))
def test_dealt_gradients_are_those_of_the_global_batch(
    num_members: int, global_batch: int, micro_batch: int | None
) -> None:
    """FAULTS E8, for steps inside a pass and across its end (90 samples)."""
    data = regression()
    batches = Batches(data, global_batch=global_batch, micro_batch=micro_batch, seed=2)
    for step in (0, 3, 11):
        whole, parts = model(), model()
        rows = list(batches.sampler.samples(batches.sampler.step_positions(step)))
        loss = torch.nn.functional.mse_loss(whole(data[0][rows]), data[1][rows])
        loss.backward()
        assert dealt_backward(parts, batches, step, num_members) == pytest.approx(loss.item(), abs=1e-6)
        for mine, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("global_batch", [24, 25])
def test_losses_while_members_come_and_go(global_batch: int) -> None:
    """FAULTS E6, E7: 4 -> 3 -> 2 -> 4 members give the losses of one; each resize resumes with new Batches."""
    curves = []
    for sizes in ([1] * 4, [4, 3, 2, 4]):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        curve = []
        for number, num_members in enumerate(sizes):
            batches = Batches(regression(), global_batch=global_batch, micro_batch=4, seed=2)
            for step in range(number * 10, number * 10 + 10):
                optimizer.zero_grad()
                curve.append(dealt_backward(net, batches, step, num_members))
                optimizer.step()
        curves.append(curve)
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    assert curves[0][-1] < curves[0][0]


@pytest.mark.parametrize(
    "step", [3, 6, 7, 13, 14], ids=["mid-pass", "across the end", "after it", "second end", "later"]
)
def test_resumed_order_is_the_order_of_an_undisturbed_run(step: int) -> None:
    """FAULTS E2 to E4: passes of 40 samples, 6 a step; resumed at this step with 3 members instead of 4."""
    oracle = [Permutation(SIZE, 9, number)[index] for number in range(3) for index in range(SIZE)]
    assert indices(fresh(), range(step), 4) == oracle[: step * 6]
    resumed = fresh()
    resumed.load_state_dict(fresh().state_dict())
    assert indices(resumed, range(step, 20), 3) == oracle[step * 6 :]


def fresh() -> Batches:
    return Batches(Squares(), global_batch=6, micro_batch=3, seed=9)


def indices(batches: Batches, steps: range, num_members: int) -> list[int]:
    """As the model sees them: Squares gives each sample's own index."""
    return [index for step in steps for _, batch in drawn(batches, step, num_members) for index in batch[0].tolist()]


def test_state_is_tiny_and_plain() -> None:
    state = Batches(Squares(), global_batch=6, seed=3).state_dict()
    assert state == {"num_samples": SIZE, "global_batch": 6, "seed": 3, "shuffle": True, "drop_last": False}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (SIZE, {"seed": 4}, "seed was 3, is 4"),
        (SIZE + 1, {}, "num_samples was 40, is 41"),
        (SIZE, {"global_batch": 8}, "global_batch was 6, is 8"),
        (SIZE, {"shuffle": False, "drop_last": True}, "shuffle was True, is False; drop_last was False, is True"),
    ],
)
def test_another_order_is_refused_unless_asked_for(size: int, changes: dict[str, Any], message: str) -> None:
    state = Batches(Squares(), global_batch=6, seed=3).state_dict()
    other = Batches(Squares(size), **({"global_batch": 6, "seed": 3} | changes))
    with pytest.raises(ValueError, match=f"^cannot resume with another order of samples: {message}. From here on"):
        other.load_state_dict(state)
    mine = other.state_dict()
    other.load_state_dict(state, strict=False)
    assert other.state_dict() == mine


def test_micro_batches_may_change_between_runs() -> None:
    Batches(Squares(), global_batch=6, micro_batch=1).load_state_dict(Batches(Squares(), global_batch=6).state_dict())


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(ValueError, match="seed is not in the state"):
        fresh().load_state_dict({"num_samples": SIZE, "global_batch": 6, "shuffle": True, "drop_last": False})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], r"the dataset \(list\) is empty"),
        (torch.empty(0, 3), r"the dataset \(Tensor\) is empty"),
        ((), r"the dataset \(tuple\) is empty"),
        (Stream(), "IterableDataset is not supported here: Stream gives samples in its own order"),
        (NoLength(), r"the dataset \(NoLength\) needs __len__ and __getitem__"),
        (DataLoader(Squares()), r"the dataset \(DataLoader\) needs __len__ and __getitem__"),
        (iter([1]), r"the dataset \(list_iterator\) needs __len__ and __getitem__"),
        ({"x": torch.ones(3)}, "a dict is looked up by keys"),
        (torch.tensor(1.0), r"the dataset \(Tensor\) has no length"),
        ((torch.ones(3), torch.ones(4)), r"needs one length for all, not \[3, 4\]"),
        ((torch.ones(3), [1, 2, 3]), r"not of both: \(Tensor, list\)"),
    ],
    ids=lambda it: "" if isinstance(it, str) else type(it).__name__,
)
def test_refused_data_sets(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(dataset, global_batch=1)


def test_refused_sizes() -> None:
    with pytest.raises(ValueError, match="global_batch must be at least 1, not 0"):
        Batches(Squares(), global_batch=0)
    with pytest.raises(ValueError, match="micro_batch=9 is larger than global_batch=8"):
        Batches(Squares(), global_batch=8, micro_batch=9)


def test_a_length_that_changes_is_refused_at_once() -> None:
    dataset = Squares()
    batches = Batches(dataset, global_batch=4)
    dataset.size = 41
    with pytest.raises(ValueError, match="the dataset had 40 samples and has 41 at step 7"):
        batches.share(7, 1, 0)
