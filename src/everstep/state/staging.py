"""Tensors of a device on their way to host memory: through two pinned buffers, on a stream beside the training's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BUFFER_BYTES = 16 << 20


class Staging:
    """`mark` in the training thread says from when on the tensors hold still; `pull` in any thread copies them."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._streams: dict[torch.device, torch.Stream] = {}
        self._marks: dict[torch.device, torch.Event] = {}

    def mark(self, devices: Iterable[torch.device]) -> None:
        """What was queued on the current stream up to now comes before what is pulled."""
        for device in devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._marks[device] = event

    def pull(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(offset, bytes) of the tensor in order; the bytes are there until the next is asked for."""
        device = tensor.device
        if not self._buffers:
            self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        stream = self._streams.setdefault(device, torch.Stream(device))
        stream.wait_event(self._marks[device])
        with stream:
            whole = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
            octets = whole.contiguous().view(-1).view(torch.uint8)
            waiting: list[tuple[int, Tensor, torch.Event]] = []
            for number, part in enumerate(torch.split(octets, BUFFER_BYTES)):
                staged = self._buffers[number % 2][: part.nbytes]
                staged.copy_(part, non_blocking=True)
                event = torch.Event(device)
                event.record(stream)
                waiting.append((number * BUFFER_BYTES, staged, event))
                if len(waiting) == 2:
                    yield arrived(*waiting.pop(0))
            for last in waiting:
                yield arrived(*last)


def arrived(offset: int, staged: Tensor, event: torch.Event) -> tuple[int, Tensor]:
    event.synchronize()
    return offset, staged
