"""Everstep keeps a PyTorch training job running through failures. Start with `everstep run --help`.

In a script: `everstep.session()`, which gives a `Session`, `everstep.Batches` and `everstep.Saving`; or
`everstep.restartable`, for a function that owns its loop, and `everstep.keep()` for its state. `everstep.lengths` tells
how long sequences are. They need torch and are imported when first asked for: the command line, the controller and the
agents do without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.data.batches import Batches
    from everstep.probe.boot import lengths
    from everstep.train.loop import keep
    from everstep.train.restartable import restartable
    from everstep.train.saving import Saving
    from everstep.train.session import Session, session

__all__ = ["Batches", "Saving", "Session", "keep", "lengths", "restartable", "session"]

_HOMES = {
    "Batches": "everstep.data.batches",
    "Saving": "everstep.train.saving",
    "Session": "everstep.train.session",
    "keep": "everstep.train.loop",
    "lengths": "everstep.probe.boot",
    "restartable": "everstep.train.restartable",
    "session": "everstep.train.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
