"""Picture of benchmarks/detection.py: how soon slow-downs are named, and the real series with its straggler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot

COLOURS = ("#0072B2", "#D55E00", "#009E73")


def plot(path: Path, delays: Mapping[float, Sequence[int | None]], real: tuple[Sequence[int], np.ndarray]) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for (by, known), colour in zip(delays.items(), COLOURS, strict=True):
        named = np.sort([d for d in known if d is not None])
        left.step(named, 100 * np.arange(1, len(named) + 1) / len(known), color=colour, label=f"+{100 * by:.0f} %")
    left.set(xlabel="slow steps until named", ylabel="% of slow-downs", xlim=(0, 20), ylim=(0, 101))
    left.legend()
    steps, times = real
    for worker in range(times.shape[1]):
        slow = worker == 6
        right.plot(steps, times[:, worker], color=COLOURS[1] if slow else "#BBBBBB", lw=1.5 if slow else 0.6)
    right.set(xlabel="step", ylabel="time of a mini-batch (normalised)", title="real job 1: worker 6")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
