"""FAULTS E15: a step that is done again has one line, and what it had before is kept apart."""

from __future__ import annotations

import json
from pathlib import Path

from everstep.train.metrics import MetricsFile


def steps(path: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["step"], line["loss"]) for line in lines]


def test_a_process_that_went_back(tmp_path: Path) -> None:
    file = MetricsFile(path := tmp_path / "metrics.jsonl")
    for step in (10, 20, 30):
        file.write(step, {"loss": 1.0})
    assert not file.redone.exists()
    for step in (20, 30, 40):
        file.write(step, {"loss": 2.0})
    assert steps(path) == [(10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]
    assert steps(file.redone) == [(20, 1.0), (30, 1.0)]
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["metrics.jsonl", "metrics.jsonl.redone"]


def test_the_first_member_is_another_process_for_a_while(tmp_path: Path) -> None:
    first, other = (MetricsFile(tmp_path / "metrics.jsonl") for _ in range(2))
    first.write(1, {"loss": 1.0})
    for step in (2, 3, 4):
        other.write(step, {"loss": 2.0})
    for step in (3, 4):  # all went back to step 2, and the first one is first again
        first.write(step, {"loss": 3.0})
    assert steps(tmp_path / "metrics.jsonl") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 3.0)]
    assert steps(first.redone) == [(3, 2.0), (4, 2.0)]


def test_several_lines_of_a_step_half_a_line_and_lines_of_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('# of a person\n{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    file = MetricsFile(path)
    for loss in (2.0, 2.5):
        file.write(2, {"loss": loss})
    assert path.read_text().startswith('# of a person\n{"step": 1')
    assert [line.split(",")[0] for line in path.read_text().splitlines()[2:]] == ['{"step": 2'] * 2
    assert file.redone.read_text() == '{"step": 2, "lo\n'


def test_the_last_step_alone_is_done_again(tmp_path: Path) -> None:
    """In another epoch, by the same process: its step number does not fall."""
    file = MetricsFile(path := tmp_path / "metrics.jsonl")
    for step, epoch, loss in ((1, 1, 1.0), (2, 1, 1.0), (2, 3, 2.0), (3, 3, 2.0)):
        file.write(step, {"loss": loss}, epoch)
    assert steps(path) == [(1, 1.0), (2, 2.0), (3, 2.0)]
    assert steps(file.redone) == [(2, 1.0)]
