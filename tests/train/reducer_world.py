"""Members as threads of this process, with the sums they should get: what the tests of the reducer share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from everstep.comms.reduction import Op
from everstep.core.errors import EpochBroken
from everstep.train.reducer import Reducer

WAIT_S = 20.0


class World:
    """Members in threads; sums are made in the order of roles, by each for itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.shown: list[Tensor] = [torch.empty(0)] * size

    def abort(self) -> None:
        self.barrier.abort()

    def repair(self) -> None:
        self.barrier.reset()


class Member:
    """One member's arena and its part of the sums."""

    def __init__(self, world: World, role: int) -> None:
        self.world, self.role = world, role
        self.areas: list[Tensor] = []
        self.calls: list[int] = []
        self.called = threading.Condition()

    def allocate(self, num_bytes: int) -> Tensor:
        self.areas.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.areas[-1]

    def holds(self, tensor: Tensor) -> bool:
        return any(a.data_ptr() <= tensor.data_ptr() < a.data_ptr() + a.nbytes for a in self.areas)

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        raise AssertionError("host memory is reduced where it lies")

    def all_reduce_shared(self, tensor: Tensor, op: Op) -> None:
        assert self.holds(tensor)
        world = self.world
        with self.called:
            self.calls.append(tensor.numel())
            self.called.notify_all()
        try:
            world.shown[self.role] = tensor
            world.barrier.wait()
            total = world.shown[0].clone()
            for other in world.shown[1:]:
                total = total + other if op is Op.SUM else torch.maximum(total, other)
            world.barrier.wait()
            tensor.copy_(total)
            world.barrier.wait()
        except threading.BrokenBarrierError:
            raise EpochBroken(1, "a member died") from None


@contextlib.contextmanager
def reducers(size: int, models: Sequence[nn.Module], **options: Any) -> Iterator[list[Reducer]]:
    world = World(size)
    made = []
    for role, model in enumerate(models):
        member = Member(world, role)
        made.append(Reducer(model.named_parameters(), member, member, **options))
    yield made
    world.abort()
    for reducer in made:
        reducer.close()


def together(function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """Call the function for all members at once."""
    with ThreadPoolExecutor(len(columns[0])) as pool:
        return list(pool.map(function, *columns))


def copies(make: Callable[[], nn.Module], size: int) -> list[nn.Module]:
    models = []
    for _ in range(size):
        torch.manual_seed(1)
        models.append(make())
    return models


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(first: dict[str, Tensor | None], second: dict[str, Tensor | None]) -> bool:
    return first.keys() == second.keys() and all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(first.values(), second.values(), strict=True)
    )


class Mixed(nn.Module):
    """float32, bfloat16, float64 and complex parameters; tied, empty, without dimensions; one used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.conv = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.high = nn.Linear(6, 6, dtype=torch.float64)
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(6))  # its gradient is expanded, not contiguous
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.wide = nn.Linear(6, 800)  # large enough to be moved by a call of its own
        self.extra = nn.Sequential(nn.Linear(6, 800), nn.Linear(800, 6))
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, extra: bool = False) -> Tensor:
        hidden = self.embed(tokens) * self.scale + self.nothing.sum()
        hidden = self.low(hidden.bfloat16()).float() + self.high(hidden.double()).float()
        hidden = hidden + (hidden * self.phase).abs()
        hidden = hidden + self.conv(hidden[:, :6].reshape(-1, 2, 1, 3).repeat(1, 1, 2, 1)).mean()
        hidden = hidden + self.wide(hidden).mean()
        if extra:
            hidden = hidden + self.extra(hidden)
        return torch.as_tensor(self.head(hidden).square().mean() + self.bias.sum())


def local(model: nn.Module, *losses: Callable[[nn.Module], Tensor]) -> list[dict[str, Tensor | None]]:
    """What plain PyTorch gives for each loss alone."""
    found = []
    for loss in losses:
        model.zero_grad()
        loss(model).backward()
        found.append(gradients(model))
    model.zero_grad()
    return found


def expected(parts: Sequence[tuple[float, dict[str, Tensor | None]]]) -> dict[str, Tensor | None]:
    """The weighted sum, in order."""
    total: dict[str, Tensor | None] = {}
    for weight, part in parts:
        for name, gradient in part.items():
            if gradient is not None:
                known = total.get(name)
                total[name] = gradient * weight if known is None else known + gradient * weight
            total.setdefault(name, None)
    return total
