"""Saves every step and when asked to by SIGTERM, as far as it gets to look: in one phase it is busy for long."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

BUSY_S = 600.0
SAVE_S = 2.0


def mark(name: str) -> None:
    Path(name).touch()


def busy(seconds: float = BUSY_S) -> None:
    mark("busy")
    time.sleep(seconds)


class SlowToPickle:
    """Makes a save that takes its time."""

    def __reduce__(self) -> tuple[Any, ...]:
        busy(SAVE_S)
        return (dict, ())


def main() -> None:
    where = sys.argv[1]
    if where == "import":
        busy()
    import torch

    asked = False

    def on_term(*_: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, on_term)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 10_000):
        if (where == "first" and step == 1) or (where == "data" and step == 6):
            busy()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if where == "evaluation" and step == 6:
            model.eval()
            busy()
        slow = SlowToPickle() if where == "save" and step == 6 else None
        torch.save({"model": model.state_dict(), "step": step, "slow": slow}, "checkpoint.pt")
        if asked:
            mark(f"stopped-at-{step}")
            return
        time.sleep(0.02)


main()
