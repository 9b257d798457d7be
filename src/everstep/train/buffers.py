"""What a forward pass changes in modules (running statistics), which all members take from the first one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from everstep.comms.collectives import Communicator


def share(buffers: Sequence[torch.Tensor], mine: Sequence[int], communicator: Communicator) -> None:
    """The first member's values of those that it changed: `mine`, places in `buffers`. Raises EpochBroken."""
    changed = torch.zeros(len(buffers), dtype=torch.uint8)
    changed[list(mine)] = 1
    communicator.broadcast(changed, 0)
    theirs = [buffers[place].detach() for place in changed.nonzero().flatten().tolist()]
    if not theirs:
        return
    parts = [buffer.cpu().reshape(-1).view(torch.uint8) for buffer in theirs]
    shared = torch.cat(parts)
    communicator.broadcast(shared, 0)
    for buffer, part in zip(theirs, torch.split(shared, [len(part) for part in parts]), strict=True):
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
