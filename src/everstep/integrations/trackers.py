"""TensorBoard, Weights & Biases and MLflow behind a session's `log`: one value a step, also when steps are done again.

    with everstep.session(log_file=["metrics.jsonl", TensorBoard("runs/a")]) as run:

Each needs its extra (`everstep[tensorboard]`, `[wandb]`, `[mlflow]`), which is imported when the first value comes, on
the first member alone. A thread does all of it: one that is slow, or fails, costs training nothing but its line on
standard error. TensorBoard hides the values of steps that are lost. The other two cannot take a value back: they keep
the first one of a step, and tell how many were done again.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BACKLOG = 10_000  # points that wait for a tracker which does not answer; older ones are dropped
CLOSE_S = 15.0  # what is left at the end of a session gets so long
BATCH = 1000  # values that MLflow takes at once
REDONE = "everstep/redone_steps"


class Point(NamedTuple):
    """`seconds`: since 1970."""

    step: int
    epoch: int
    values: dict[str, float]
    seconds: float


class Tracker(ABC):
    """One sink. Subclasses say how it begins at a step, and takes points; both in the tracker's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Point] = deque()
        self._dropped = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._last = (0, 0)  # step and epoch of the newest point taken
        self._began = False
        self._redone_steps = 0
        self._failures = 0

    @abstractmethod
    def begin(self, step: int) -> None:
        """The first point of this process, or one of before the last: what was told of this step and later ones is
        void, whoever told it. May raise anything; so may `put` and `end`."""

    @abstractmethod
    def put(self, points: Sequence[Point], redone_steps: int) -> None:
        """Points in order of their steps. redone_steps: so far, as this process knows."""

    @abstractmethod
    def end(self) -> None:
        """No more will come. Only after `begin`."""

    # The session's side ---------------------------------------------------------------------------------

    def write(self, step: int, values: dict[str, float], epoch: int = 0) -> None:
        """See train.metrics.Sink."""
        with self._changed:
            if len(self._waiting) >= BACKLOG:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(Point(step, epoch, dict(values), time.time()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._hand_over, name="everstep-tracker", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until the tracker has everything, but not for ever."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._say(f"did not take its last values within {CLOSE_S:.0f} s: they are lost to it")

    # The thread's side ----------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        while points := self._next():
            for part in self._parts(points):
                self._guarded(part)
        if self._began:
            self._guarded([])

    def _next(self) -> list[Point]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            points, dropped = list(self._waiting), self._dropped
            self._waiting.clear()
            self._dropped = 0
        if dropped:
            self._say(f"does not keep up: {dropped} steps are lost to it")
        return points

    def _parts(self, points: Sequence[Point]) -> list[list[Point]]:
        """Cut where steps are done again."""
        parts: list[list[Point]] = []
        last = self._last
        for point in points:
            if not parts or _again(last, point):
                parts.append([])
            parts[-1].append(point)
            last = point.step, point.epoch
        return parts

    def _guarded(self, points: Sequence[Point]) -> None:
        """Empty: the end."""
        try:
            self._take(points) if points else self.end()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises: told, and training goes on
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th ... time
                self._say(f"failed ({self._failures} times so far): {type(error).__name__}: {error}")

    def _take(self, points: Sequence[Point]) -> None:
        first, newest = points[0], points[-1]
        again = _again(self._last, first)
        if again:
            self._redone_steps += self._last[0] - first.step + 1
        self._last = newest.step, newest.epoch
        if again or not self._began:
            self._began = False  # if this fails it is tried with the next
            self.begin(first.step)
            self._began = True
        self.put(points, self._redone_steps)

    def _say(self, what: str) -> None:
        print(f"everstep: {type(self).__name__} {what}", file=sys.stderr)


def _again(last: tuple[int, int], point: Point) -> bool:
    """Several points of one step are one thing; one that another epoch made is another."""
    step, epoch = last
    return point.step < step or (point.step == step and point.epoch != epoch)


class TensorBoard(Tracker):
    """Event files in a folder that all nodes see. Whoever takes over writes one of its own there."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = str(folder)
        self._writer: Any = None
        self._told_redone = 0

    def begin(self, step: int) -> None:
        self.end()
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(self._folder, purge_step=step)

    def put(self, points: Sequence[Point], redone_steps: int) -> None:
        if redone_steps != self._told_redone:
            self._told_redone = redone_steps
            self._writer.add_scalar(REDONE, redone_steps, points[0].step)
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, point.seconds)
        self._writer.flush()

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _KeepsFirst(Tracker):
    """Of trackers that cannot take a value back: what they have of a step stays."""

    def __init__(self) -> None:
        super().__init__()
        self._open = False
        self._known = -1  # they have values of steps up to this one, made before the last that came
        self._newest = -1
        self._told_redone = 0

    @abstractmethod
    def open(self) -> int:
        """The newest step that the run has values of; -1: none."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None: ...

    @abstractmethod
    def tell_redone(self, steps: int) -> None: ...

    def begin(self, step: int) -> None:
        if not self._open:
            self._newest = self.open()
            self._open = True
        self._known = self._newest

    def put(self, points: Sequence[Point], redone_steps: int) -> None:
        new = [point for point in points if point.step > self._known]
        if new:
            self.send(new)
            self._newest = max(self._newest, new[-1].step)
        if redone_steps != self._told_redone:
            self.tell_redone(redone_steps)
            self._told_redone = redone_steps


class WandB(_KeepsFirst):
    """One run of Weights & Biases. id: of the run; whoever takes over, or goes on later, continues it; empty: the job's
    name. Other arguments go to `wandb.init`."""

    def __init__(self, id: str = "", **options: Any) -> None:
        super().__init__()
        self._options = {"id": id or job_id(), "resume": "allow", **options}
        self._run: Any = None

    def open(self) -> int:
        self._run = importlib.import_module("wandb").init(**self._options)
        return int(self._run.step) - 1  # it is the number of the next one

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)

    def tell_redone(self, steps: int) -> None:
        self._run.summary[REDONE] = steps

    def end(self) -> None:
        self._run.finish()


class MLflow(_KeepsFirst):
    """One run of MLflow. uri: of the tracking server; None: as MLflow is set up here. run: its name; whoever takes
    over, or goes on later, continues the run of this name; empty: the job's name."""

    def __init__(self, experiment: str = "Default", *, uri: str | None = None, run: str = "") -> None:
        super().__init__()
        self._experiment, self._uri, self._name = experiment, uri, run or job_id()
        self._client: Any = None
        self._run_id = ""

    def open(self) -> int:
        mlflow = importlib.import_module("mlflow")
        self._client = client = mlflow.MlflowClient(self._uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        name = self._name.replace("'", "")
        runs = client.search_runs([experiment], f"attributes.run_name = '{name}'", max_results=1)
        run = runs[0] if runs else client.create_run(experiment, run_name=name)
        self._run_id = run.info.run_id
        return max((self._last_step(key) for key in run.data.metrics), default=-1)

    def _last_step(self, key: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._run_id, key)), default=-1)

    def send(self, points: Sequence[Point]) -> None:
        metric = importlib.import_module("mlflow.entities").Metric
        metrics = [
            metric(name, value, int(point.seconds * 1000), point.step)
            for point in points
            for name, value in _numbers(point.values).items()
        ]
        for begin in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + BATCH])

    def tell_redone(self, steps: int) -> None:
        self._client.set_tag(self._run_id, REDONE, str(steps))

    def end(self) -> None:
        self._client.set_terminated(self._run_id)


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    """MLflow's stores differ in what they do with the others."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def job_id() -> str:
    """The same for all members, and for a later run under the same name. Raises ValueError where there is none."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if not job or job == "none":
        raise ValueError("which run? Under `everstep run` it is named as the job; here it needs a name of its own")
    return job
