"""Machine similarity: machines of one job do the same, so one whose metrics differ from all others' is suspect.

After Minder (NSDI'25): denoise each metric over time, measure each machine's distance to the others, and believe an
outlier only if it is the same one for some time. Minder learns the denoising and sums distances of all pairs; here it
is a running mean, and sums of |a - b| over all pairs come from one sort: O(n log n) and exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from everstep.core.types import Blame, Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

TO_SIGMA = 1.4826
CAUSE = "unlike-others"
LEAST_PEERS = 4  # with fewer there is no majority to differ from
MOST = 0.1  # more outliers than this part of the machines are a change of load, not faults
TINY = 1e-9


class Options(msgspec.Struct, frozen=True):
    """`continuity` above `window`: one glitch, however large, leaves the mean before it is believed."""

    window: int = 8  # samples that are averaged
    continuity: int = 12  # samples in a row that it must be an outlier
    sigmas: float = 8.0  # robust deviations of a distance above the distances of the others
    least: float = 0.05  # of the usual value: nearer than this nobody is an outlier


class Unlike(msgspec.Struct, frozen=True):
    """A machine that differs from its peers in a metric, for so many samples now."""

    machine: int
    metric: str
    value: float  # its mean
    usual: float  # the median of all
    sigmas: float
    samples: int


class Similarity:
    """Feed it one sample of all machines after another. `groups`: only machines with the same number are peers."""

    def __init__(self, metrics: Sequence[str], groups: Sequence[int], options: Options | None = None) -> None:
        import numpy as np

        self.metrics, self.options = tuple(metrics), options or Options()
        assert 0 < self.options.window < min(self.options.continuity, 128)  # counts are small integers
        kinds = np.asarray(groups)
        self.groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        shape = (len(self.metrics), len(kinds))
        self.ring = np.zeros((self.options.window, *shape))
        self.known = np.zeros(self.ring.shape, dtype=np.int8)
        self.seen = 0
        self.rows = np.zeros(shape, dtype=np.int64)  # samples in a row that it was an outlier

    def saw(self, sample: Array) -> tuple[Unlike, ...]:
        """One sample, shape (metrics, machines), NaN where not known. Tells each outlier once, when it is believed."""
        import numpy as np

        assert sample.shape == self.rows.shape
        at, known = self.seen % self.options.window, np.isfinite(sample)
        self.ring[at], self.known[at] = np.where(known, sample, 0.0), known
        self.seen += 1
        if self.seen < self.options.window:
            return ()
        counts = self.known.sum(axis=0, dtype=np.int8)
        means = self.ring.sum(axis=0) / np.maximum(counts, 1)
        means[counts <= self.options.window // 2] = np.nan  # who tells little is not judged
        scores, usual = np.zeros_like(means), np.zeros_like(means)
        for peers in self.groups:
            for row in range(len(self.metrics)):
                scores[row, peers], usual[row, peers] = _scores(means[row, peers], self.options)
        self.rows = np.where(scores >= self.options.sigmas, self.rows + 1, 0)
        believed = np.argwhere(self.rows == self.options.continuity)
        return tuple(self._unlike(int(row), int(machine), means, usual, scores) for row, machine in believed)

    def _unlike(self, row: int, machine: int, means: Array, usual: Array, scores: Array) -> Unlike:
        at = (row, machine)
        return Unlike(
            machine, self.metrics[row], float(means[at]), float(usual[at]), float(scores[at]), int(self.rows[at])
        )


def sample_of(rows: Sequence[Sequence[float]]) -> Array:
    """Numbers by metric and machine, for who has no arrays."""
    import numpy as np

    return np.asarray(rows, dtype=np.float64)


def distances(values: Array) -> Array:
    """Mean of |value - other| over all others, for each; one sort instead of all pairs."""
    import numpy as np

    n = len(values)
    order = np.argsort(values)
    ranked = values[order]
    below = np.concatenate(([0.0], np.cumsum(ranked)[:-1]))
    above = ranked.sum() - below - ranked
    place = np.arange(n)
    found = np.empty(n)
    found[order] = (ranked * place - below + above - ranked * (n - 1 - place)) / max(n - 1, 1)
    return found


def _scores(values: Array, options: Options) -> tuple[Array, float]:
    """Deviations of each machine's distance above the usual distance, and the usual value."""
    import numpy as np

    scores = np.zeros(len(values))
    known = np.flatnonzero(~np.isnan(values))
    if len(known) < LEAST_PEERS:
        return scores, float("nan")
    usual = float(np.median(values[known]))
    away = distances(values[known])
    nearest = float(np.median(away))
    floor = options.least * max(abs(usual), TINY)
    scale = max(TO_SIGMA * float(np.median(np.abs(away - nearest))), floor / options.sigmas, TINY)
    scores[known] = (away - nearest) / scale  # at `sigmas` that is at least the floor
    return scores, usual


def verdict_of(found: Sequence[Unlike], nodes: Sequence[str]) -> Verdict | None:
    """Of one sample's outliers. None: there are none, or so many that the load changed and nobody is at fault."""
    machines = sorted({one.machine for one in found})
    if not machines or len(machines) > max(1, int(MOST * len(nodes))):
        return None
    blames, sentences = [], []
    for machine in machines:
        worst = max((one for one in found if one.machine == machine), key=lambda one: one.sigmas)
        what = f"{worst.metric} {worst.value:.4g}, others {worst.usual:.4g}, for {worst.samples} samples"
        blames.append(Blame(-1, nodes[machine], CAUSE, what))
        sentences.append(f"{nodes[machine]}: {what}")
    least = min(max(one.sigmas for one in found if one.machine == machine) for machine in machines)
    return Verdict("anomaly", tuple(blames), "; ".join(sentences), round(min(0.95, least / (least + 4)), 4))
