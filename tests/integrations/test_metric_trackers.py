"""Trackers have one value a step, whoever logs it, also when steps are done again; and cost training nothing.

wandb, mlflow and tensorboard are stood in for by what their documentation says of the few calls that are used;
TensorBoard is the real one where it is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from everstep.integrations import trackers
from everstep.integrations.trackers import REDONE, MLflow, TensorBoard, WandB
from everstep.train.metrics import MetricsFile, metrics_of

Curve = list[tuple[int, float]]


class Store(NamedTuple):
    """What a tracker has in the end: name -> (step, value) in order."""

    new: Callable[[], Any]  # a process's tracker
    curves: Callable[[], dict[str, Curve]]
    takes_back: bool  # the values that steps which were lost had


# Fakes --------------------------------------------------------------------------------------------------


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, made)


class FakeRun:
    """wandb: a step below the newest is dropped; what is logged at the newest adds up."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: dict[int, dict[str, float]] = {}
        self.summary: dict[str, Any] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= max(self.rows, default=0), "wandb warns, and drops it"
        self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        self.step = max(self.rows, default=-1) + 1


def wandb(monkeypatch: pytest.MonkeyPatch) -> Store:
    runs: dict[str, FakeRun] = {}

    def init(id: str, resume: str, project: str) -> FakeRun:
        assert (resume, project) == ("allow", "p")
        run = runs.setdefault(id, FakeRun())
        run.finish()
        return run

    def curves() -> dict[str, Curve]:
        (run,) = runs.values()
        found: dict[str, Curve] = {}
        for step, row in run.rows.items():
            for name, value in row.items():
                found.setdefault(name, []).append((step, value))
        return {**found, **{name: [(-1, value)] for name, value in run.summary.items()}}

    module(monkeypatch, "wandb", init=init)
    return Store(lambda: WandB(project="p"), curves, False)


class FakeClient:
    """MLflow: all that is logged stays."""

    experiments: dict[str, str]
    runs: dict[str, SimpleNamespace]

    def __init__(self, uri: str | None) -> None:
        assert uri is None

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"x{len(self.experiments)}")

    def search_runs(self, experiments: list[str], text: str, max_results: int) -> list[SimpleNamespace]:
        found = [run for run in self.runs.values() if text == f"attributes.run_name = '{run.name}'"]
        return found[:max_results]

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        run = SimpleNamespace(name=run_name, info=SimpleNamespace(run_id=f"r{len(self.runs)}"), tags={}, metrics=[])
        run.data = SimpleNamespace(metrics={})
        return self.runs.setdefault(run.info.run_id, run)

    def get_metric_history(self, run_id: str, key: str) -> list[SimpleNamespace]:
        return [metric for metric in self.runs[run_id].metrics if metric.key == key]

    def log_batch(self, run_id: str, metrics: list[SimpleNamespace]) -> None:
        assert 0 < len(metrics) <= 1000
        self.runs[run_id].metrics += metrics
        self.runs[run_id].data.metrics.update({metric.key: metric.value for metric in metrics})

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[run_id].tags[key] = value

    def set_terminated(self, run_id: str) -> None:
        assert run_id in self.runs


def fake_metric(key: str, value: float, timestamp: int, step: int) -> SimpleNamespace:
    assert timestamp > 1e12, "milliseconds"
    return SimpleNamespace(key=key, value=value, step=step)


def mlflow(monkeypatch: pytest.MonkeyPatch) -> Store:
    FakeClient.experiments, FakeClient.runs = {}, {}

    def curves() -> dict[str, Curve]:
        (run,) = FakeClient.runs.values()
        found: dict[str, Curve] = {key: [(-1, float(value))] for key, value in run.tags.items()}
        for metric in run.metrics:
            found.setdefault(metric.key, []).append((metric.step, metric.value))
        return found

    module(monkeypatch, "mlflow", MlflowClient=FakeClient)
    module(monkeypatch, "mlflow.entities", Metric=fake_metric)
    return Store(lambda: MLflow("e"), curves, False)


class FakeWriter:
    """TensorBoard: a later file hides what those before it have of its purge_step and later steps."""

    files: list[FakeWriter]

    def __init__(self, folder: str, purge_step: int) -> None:
        self.purge_step, self.events, self.open = purge_step, list[tuple[str, float, int]](), True
        self.files.append(self)

    def add_scalar(self, name: str, value: float, step: int, seconds: float = 0.0) -> None:
        assert self.open
        self.events.append((name, value, step))

    def flush(self) -> None:
        assert self.open

    def close(self) -> None:
        self.open = False


def tensorboard(monkeypatch: pytest.MonkeyPatch) -> Store:
    FakeWriter.files = []

    def curves() -> dict[str, Curve]:
        found: dict[str, Curve] = {}
        for file in FakeWriter.files:
            found = {name: [(s, v) for s, v in curve if s < file.purge_step] for name, curve in found.items()}
            for name, value, step in file.events:
                found.setdefault(name, []).append((step, value))
        return found

    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=FakeWriter)
    return Store(lambda: TensorBoard("runs"), curves, True)


def real_tensorboard(folder: Path) -> Store:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-not-found]
        EventAccumulator,
    )

    def curves() -> dict[str, Curve]:
        found = EventAccumulator(str(folder))
        found.Reload()
        return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}

    return Store(lambda: TensorBoard(folder), curves, True)


REAL = ["real tensorboard"] if importlib.util.find_spec("tensorboard") else []


@pytest.fixture(params=["tensorboard", "wandb", "mlflow", *REAL])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "demo")
    fakes = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
    fake = fakes.get(request.param)
    yield fake(monkeypatch) if fake is not None else real_tensorboard(tmp_path)


# One value a step ---------------------------------------------------------------------------------------


def test_a_member_that_went_back(store: Store) -> None:
    tracker = store.new()
    for step, epoch in [*((step, 1) for step in range(1, 9)), *((step, 2) for step in range(5, 11))]:
        tracker.write(step, {"loss": float(10 * epoch + step)}, epoch)
        tracker.write(step, {"rate": 0.5}, epoch)
    tracker.close()
    curves = store.curves()
    redone = [15.0, 16.0, 17.0, 18.0] if not store.takes_back else [25.0, 26.0, 27.0, 28.0]
    assert curves["loss"] == list(enumerate([11.0, 12.0, 13.0, 14.0, *redone, 29.0, 30.0], 1))
    assert curves["rate"] == [(step, 0.5) for step in range(1, 11)]
    assert curves[REDONE][-1][1] == 4.0


def test_the_last_step_alone_is_done_again(store: Store) -> None:
    tracker = store.new()
    for step, epoch in ((1, 1), (2, 1), (2, 2), (3, 2)):
        tracker.write(step, {"loss": float(10 * epoch + step)}, epoch)
    tracker.close()
    assert store.curves()["loss"] == [(1, 11.0), (2, 22.0 if store.takes_back else 12.0), (3, 23.0)]


def test_another_process_takes_over_a_few_steps_before_the_end(store: Store) -> None:
    """The first one was killed: it had told of steps that were then lost."""
    for begin, end, epoch in ((1, 8, 1), (5, 10, 2)):
        tracker = store.new()
        for step in range(begin, end + 1):
            tracker.write(step, {"loss": float(10 * epoch + step)}, epoch)
        tracker.close()
    redone = [15.0, 16.0, 17.0, 18.0] if not store.takes_back else [25.0, 26.0, 27.0, 28.0]
    assert store.curves()["loss"] == list(enumerate([11.0, 12.0, 13.0, 14.0, *redone, 29.0, 30.0], 1))


# What may go wrong --------------------------------------------------------------------------------------


class Bad(trackers.Tracker):
    """It waits for `gate` when it begins, and fails at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.got: list[int] = []

    def begin(self, step: int) -> None:
        assert self.gate.wait(30)

    def put(self, points: Any, redone_steps: int) -> None:
        self.got += [point.step for point in points]

    def end(self) -> None:
        raise ConnectionError("no route")


def test_one_that_is_slow_and_fails_is_told_of_and_nobody_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "BACKLOG", 10)
    tracker = Bad()
    for step in range(1, 31):
        tracker.write(step, {"loss": 0.0}, epoch=1)
    tracker.gate.set()
    tracker.close()
    assert tracker.got[-10:] == list(range(21, 31)) and len(tracker.got) <= 20
    said = capsys.readouterr().err
    assert "everstep: Bad does not keep up" in said and "no route" in said


def test_one_that_never_answers_does_not_hold_up_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    tracker = Bad()
    tracker.write(1, {"loss": 0.0})
    tracker.close()
    assert "did not take its last values" in capsys.readouterr().err
    monkeypatch.undo()
    tracker.gate.set()
    tracker.close()
    assert tracker.got == [1]


def test_a_run_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValueError, match="name"):
        WandB()
    MLflow(run="mine")


def test_a_file_and_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tensorboard(monkeypatch)
    sink = metrics_of([tmp_path / "metrics.jsonl", store.new()])
    assert isinstance(metrics_of("metrics.jsonl"), MetricsFile)
    sink.write(1, {"loss": 2.0}, 1)
    sink.close()
    assert '"loss": 2.0' in (tmp_path / "metrics.jsonl").read_text() and store.curves() == {"loss": [(1, 2.0)]}
