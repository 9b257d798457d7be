"""How long a worker's step should take, from the lengths of its sequences: c + alpha N + beta sum l^2 (ResiHP).

N is the sum of the lengths, the square term is attention. The three coefficients are the job's, not a member's, and
are fitted online: weighted least squares from exact sufficient statistics (3 x 3) that forget with a horizon of
`HORIZON` steps. Errors are relative (a step twice as long errs twice as much), so each row is divided by what was
predicted. Rows far off count less (Huber), so one slow member does not teach the model that work has become slow.
Coefficients are never negative: lengths that were not seen yet must not predict a negative time.

All is in units of the first steps' own averages, so scale of time and lengths do not matter. A member that does not
tell its lengths is taken to have average ones.
"""

from __future__ import annotations

import numpy as np

from everstep.detect.peers import Floats, first_axis_median

HORIZON = 200.0  # steps
HUBER = 0.05  # relative error above which a row's weight falls
RIDGE = 1e-6
MOST = 256  # members, in the first fit
ROUNDS = 4  # of re-weighting, in the first fit


class WorkloadModel:
    """Fit with `begin` on the first steps, then `predict` and `learn` step by step. Arrays: (members,)."""

    def __init__(self, horizon: float = HORIZON) -> None:
        self._horizon, self._steps = horizon, 0
        self._unit_s = self._mean_tokens = self._mean_squares = 1.0
        self._normal = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._coefficients = np.array([1.0, 0.0, 0.0])

    def begin(self, time_s: Floats, tokens: Floats, squares: Floats) -> None:
        """From the first steps, each (steps, members): units, then a few rounds of re-weighted least squares. Members'
        steady differences are taken out first: each row is divided by its member's own pace."""
        self._unit_s = _positive_mean(time_s)
        self._mean_tokens, self._mean_squares = _positive_mean(tokens), _positive_mean(squares)
        self._steps = len(time_s)
        some = slice(None, None, -(-time_s.shape[-1] // MOST))  # as good, and quick, when there are thousands
        time_s, tokens, squares = time_s[:, some], tokens[:, some], squares[:, some]
        rows = self._rows(tokens, squares)
        pace = np.ones(time_s.shape[-1])
        for _ in range(ROUNDS):
            self._normal[:], self._target[:] = 0.0, 0.0
            self._add(rows.reshape(-1, 3), (time_s / pace).ravel())
            self._solve()
            pace = _pace(time_s / (rows @ self._coefficients * self._unit_s))

    def predict(self, tokens: Floats, squares: Floats) -> Floats:
        """Seconds that a step with this work should take a member of average pace."""
        return np.asarray(np.maximum(self._rows(tokens, squares) @ self._coefficients, 0.05) * self._unit_s)

    def learn(self, time_s: Floats, tokens: Floats, squares: Floats) -> None:
        """One step; `time_s` divided by each member's pace, nan for members that are slow or unknown."""
        self._steps += 1
        gain = 1.0 / min(self._steps, self._horizon)
        self._normal *= 1.0 - gain
        self._target *= 1.0 - gain
        self._add(self._rows(tokens, squares), time_s, gain)
        self._solve()

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(c in seconds, alpha in seconds a token, beta in seconds a token squared)."""
        c, alpha, beta = (float(value) for value in self._coefficients * self._unit_s)
        return c, alpha / self._mean_tokens, beta / self._mean_squares

    def _rows(self, tokens: Floats, squares: Floats) -> Floats:
        told = tokens > 0
        one = np.ones_like(tokens)
        scaled = np.where(told, tokens / self._mean_tokens, 1.0), np.where(told, squares / self._mean_squares, 1.0)
        return np.stack((one, *scaled), -1)

    def _add(self, rows: Floats, time_s: Floats, share: float = 1.0) -> None:
        known = np.isfinite(time_s)
        if not known.any():
            return
        rows, wanted = rows[known], time_s[known] / self._unit_s
        predicted = np.maximum(rows @ self._coefficients, 0.05)
        error = np.abs(wanted / predicted - 1.0)
        weight = np.minimum(1.0, HUBER / np.maximum(error, 1e-12)) / predicted**2
        self._normal += share / len(rows) * (rows.T * weight) @ rows
        self._target += share / len(rows) * (rows.T * weight) @ wanted

    def _solve(self) -> None:
        """Least squares with coefficients >= 0: the most negative one is left out until none is."""
        free = [0, 1, 2]
        while free:
            normal = self._normal[np.ix_(free, free)]
            ridge = RIDGE * max(float(np.trace(normal)), 1e-12) * np.eye(len(free))
            found = np.linalg.solve(normal + ridge, self._target[free])
            if found.min() >= 0:
                self._coefficients = np.zeros(3)
                self._coefficients[free] = found
                return
            del free[int(found.argmin())]


def _positive_mean(values: Floats) -> float:
    positive = values[np.isfinite(values) & (values > 0)]
    return float(positive.mean()) if positive.size else 1.0


def _pace(ratio: Floats) -> Floats:
    """Each member's median of observed over predicted, in units of their median; 1 for a member never seen."""
    pace = first_axis_median(ratio, 1.0)
    return np.asarray(np.maximum(pace / np.median(pace), 1e-3))
