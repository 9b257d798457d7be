"""What a vault writes images to disk with. It imports this only when there is something to write."""

from __future__ import annotations

import msgspec

from everstep.state.disk import Checkpoints
from everstep.state.retention import Retention


def checkpoints(where: str, **retention: int) -> Checkpoints:
    """`retention`: the fields of Retention; none: all complete checkpoints stay. Raises ValueError."""
    return Checkpoints(where, msgspec.convert(retention, Retention) if retention else None)
