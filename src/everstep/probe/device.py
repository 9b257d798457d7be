"""Readings of the processors that torch can use: a matrix product with a known answer, memory, copies between devices.

The factors hold whole numbers from -3 to 3, so every partial sum is below 2^24 and the float32 product is exact in any
order, with TF32 too: any difference is a fault. The answer is checked by Freivalds' method, C r = A (B r), exact in
float64, which costs n^2 where the product cost n^3. Written for every accelerator of
torch.accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from everstep.core.checkup import Reading

MATMUL_N = 768
COPY_BYTES = 48 << 20  # more than most caches
RATE_S = 0.03  # each rate is measured for at least so long
SEED = 20240229
WORD = 8  # bytes
PATTERN = 0x5A5A5A5A5A5A5A5A


def readings() -> Iterator[Reading]:
    """Of the CPU and of every accelerator. A device that raises is a reading, not an error."""
    accelerators = [torch.device(kind, index) for kind, index in _accelerators()]
    for device in (torch.device("cpu"), *accelerators):
        name = "cpu" if device.type == "cpu" else str(device)
        try:
            yield from matmul(device, name)
            yield from memory(device, name)
        except RuntimeError as error:  # out of memory, ECC, a driver that is gone: torch's own types derive from it
            yield Reading("device.failed", 1, name, _first_line(error))
    for source in accelerators:
        for target in accelerators:
            if source != target:
                yield from _between(source, target)


def _accelerators() -> list[tuple[str, int]]:
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    return [(kind.type, index) for index in range(torch.accelerator.device_count())] if kind else []


def factors(n: int = MATMUL_N) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(SEED)
    a, b = (torch.randint(-3, 4, (n, n), generator=random).float() for _ in range(2))
    return a, b


def wrong_rows(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> int:
    """Rows of `product` that hold a wrong value, on the CPU. A row with one wrong value is always found: the sum shows
    it, or it is no whole number (a zero of which one bit flipped is too small to show in a sum)."""
    n = product.shape[1]
    probe = torch.arange(1, n + 1)  # no zeros, so no value goes unseen; sums stay far below 2^53
    exact = a.double() @ (b.double() @ probe.double())
    found = product.double() @ probe.double()
    odd = (product != product.round()).any(dim=1)  # not a number differs from everything
    return int(((found != exact) | odd).sum())


def matmul(device: torch.device, name: str) -> Iterator[Reading]:
    a, b = factors()
    on_device, other = a.to(device), b.to(device)
    first, again = on_device @ other, on_device @ other
    yield Reading("matmul.wrong", wrong_rows(a, b, first.cpu()), name)
    yield Reading("matmul.differs", int((first != again).sum()), name)
    seconds = _time(device, lambda: torch.mm(on_device, other, out=again))
    yield Reading("matmul.rate", 2 * MATMUL_N**3 / seconds, name)


def memory(device: torch.device, name: str) -> Iterator[Reading]:
    """Allocate, fill, copy, compare, free."""
    source = torch.full((COPY_BYTES // WORD,), PATTERN, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    seconds = _time(device, lambda: target.copy_(source))
    yield Reading("memory.rate", 2 * COPY_BYTES / seconds, name, "read and write")
    yield Reading("memory.wrong", WORD * int(target.ne(PATTERN).sum()), name)


def _between(source: torch.device, target: torch.device) -> Iterator[Reading]:
    """Not run on a machine with several GPUs yet."""
    name = f"{source} to {target}"
    try:
        data = torch.arange(COPY_BYTES // WORD, dtype=torch.int64, device=source)
        copied = torch.empty_like(data, device=target)
        seconds = _time(target, lambda: copied.copy_(data))
        yield Reading("copy.rate", COPY_BYTES / seconds, name)
        yield Reading("copy.wrong", int((copied.cpu() != data.cpu()).sum()), name)
    except RuntimeError as error:
        yield Reading("device.failed", 1, name, _first_line(error))


def _time(device: torch.device, act: Callable[[], object]) -> float:
    """Seconds of the fastest call: others may use the machine too."""
    best, began = float("inf"), time.monotonic()
    while True:
        before = time.perf_counter()
        act()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - before)
        if time.monotonic() - began >= RATE_S:
            return best


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
