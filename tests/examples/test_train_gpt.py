"""The main job: a run that was killed or told to stop, and resumed, equals an undisturbed one bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from example_ranks import logged, ranks, run, wait_until

STEPS = 30
TINY = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch", "9", "--dropout", "0.1"]
TINY += ["--steps", str(STEPS), "--save-every", "4", "--eval-every", "10", "--warmup", "5", "--sample", "20"]
SCRIPT = "train_gpt.py"
WORLD = 4  # with more than two ranks, the order of addition matters; 9 sequences for 4 ranks: uneven shares


def arguments(folder: Path) -> list[str]:
    return [*TINY, "--checkpoint", str(folder / "gpt.pt"), "--log-file", str(folder / "log.jsonl")]


def curve(folder: Path) -> list[tuple[float, float, float, float | None]]:
    return [(x["step"], x["loss"], x["lr"], x.get("eval_loss")) for x in logged(folder / "log.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float, float, float | None]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert "def " in run(folder, SCRIPT, arguments(folder), WORLD)
    losses = curve(folder)
    assert [step for step, *_ in losses] == list(range(1, STEPS + 1))
    assert losses[-1][1] < losses[0][1] - 0.5
    return losses


def test_killed_and_resumed(tmp_path: Path, undisturbed: list[object]) -> None:
    with ranks(tmp_path / "first", SCRIPT, arguments(tmp_path), WORLD) as attempt:
        wait_until(lambda: len(curve(tmp_path)) >= 10, attempt.output)
        attempt.processes[2].kill()
        assert attempt.wait()[2] == -signal.SIGKILL
    reached = len(curve(tmp_path))
    assert reached < STEPS
    text = run(tmp_path / "second", SCRIPT, arguments(tmp_path), WORLD)
    assert f"from step {reached // 4 * 4}\n" in text
    assert curve(tmp_path) == undisturbed
    assert f"from step {STEPS}\n" in run(tmp_path / "third", SCRIPT, arguments(tmp_path), WORLD)
    assert curve(tmp_path) == undisturbed


def test_told_to_stop_and_resumed(tmp_path: Path, undisturbed: list[object]) -> None:
    with ranks(tmp_path / "first", SCRIPT, arguments(tmp_path), WORLD) as attempt:
        wait_until(lambda: len(curve(tmp_path)) >= 5, attempt.output)
        attempt.processes[3].terminate()  # one rank only: all leave with it, at the same step
        assert attempt.wait() == [0] * WORLD
    reached = len(curve(tmp_path))
    assert reached < STEPS
    assert f"from step {reached}\n" in run(tmp_path / "second", SCRIPT, arguments(tmp_path), WORLD)
    assert curve(tmp_path) == undisturbed


def test_other_world_size_trains_the_same_batches(tmp_path: Path, undisturbed: list[object]) -> None:
    alone = [*arguments(tmp_path), "--dropout", "0", "--steps", "3"]
    run(tmp_path, SCRIPT, alone, 1)
    three = [*alone[:-1], "3", "--checkpoint", str(tmp_path / "3.pt"), "--log-file", str(tmp_path / "3.jsonl")]
    run(tmp_path, SCRIPT, three, 3)
    ours = [x["loss"] for x in logged(tmp_path / "log.jsonl")]
    assert ours == pytest.approx([x["loss"] for x in logged(tmp_path / "3.jsonl")], rel=1e-5)


def test_refuses_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    short = [*arguments(tmp_path), "--steps", "2"]
    run(tmp_path, SCRIPT, short, 1)
    with ranks(tmp_path, SCRIPT, [*short, "--seed", "2"], 1) as attempt:
        assert attempt.wait() == [1]
        assert "name another --checkpoint" in attempt.output()
