"""The backend between real processes: every operation, torch's own ways of being parallel against gloo, and faults.

With two ranks there is one order of summing, so results equal gloo's bit for bit. With more, gloo adds in another
order: where sums are involved, weights after a few steps may differ by TOLERANCE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import warm

SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 1e-5  # measured: 9e-7
NOTICED_S = 5.0  # measured: 0.01; the machine may be busy, and a time-out would come after half an hour


def run(script: str, *args: object) -> list[dict[str, Any]]:
    """The lines that its ranks printed."""
    done = warm.run(SCRIPTS / script, *args, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("size", "mode"), [(2, "plain"), (4, "plain"), (3, "SHM"), (3, "TCP")])
def test_every_operation(size: int, mode: str) -> None:
    run("backend_operations.py", size, mode)


@pytest.mark.parametrize("scenario", ["ddp", "fsdp", "hsdp", "tensor", "pipeline", "checkpoint"])
def test_models_train_as_on_gloo(scenario: str) -> None:
    lines = run("backend_models.py", scenario, 2, 4)
    assert [line["size"] for line in lines] == [2] * 2 + [4] * 4 and all(line["moved"] for line in lines)
    assert all(line["same"] for line in lines if line["size"] == 2), lines
    assert max(line["worst"] for line in lines) <= TOLERANCE


def test_a_killed_rank_ends_the_waiting_of_all(tmp_path: Path) -> None:
    lines = run("backend_faults.py", "kill", tmp_path)
    (killed,) = (line["killed"] for line in lines if "killed" in line)
    broken = [line for line in lines if "causes" in line]
    assert len(broken) == 3
    for line in broken:
        assert line["causes"] == ["DistBackendError", "EpochBroken"]
        assert "rank 3 died" in line["text"]
        assert 0 <= line["at"] - killed < NOTICED_S
    assert [line["threads"] for line in lines if "threads" in line] == [[]] * 3
    assert lines[-1] == {"codes": [0, 0, 0, -9]}


def test_a_rank_killed_in_the_backward_pass_is_an_exception_for_the_others(tmp_path: Path) -> None:
    *broken, end = run("backend_faults.py", "backward", tmp_path)
    assert len(broken) == 3 and all("rank 3 died" in line["text"] for line in broken)
    assert end == {"codes": [0, 0, 0, -9]}


def test_a_rank_that_left_is_missed_only_where_it_is_needed(tmp_path: Path) -> None:
    *broken, end = run("backend_faults.py", "leave", tmp_path)
    assert len(broken) == 3
    for line in broken:
        assert "rank 3 left, and all_reduce needs it" in line["text"]
        assert line["at"] - line["began"] < 10
    assert end == {"codes": [0, 0, 0, 0]}


def test_a_rank_that_does_not_come_in_time(tmp_path: Path) -> None:
    *lines, end = run("backend_faults.py", "late", tmp_path)
    broken = [line for line in lines if line["rank"] != 3]
    assert len(broken) == 3
    for line in broken:
        assert line["causes"] == ["DistBackendError", "EpochBroken"]
        assert "time-out of 1 s" in line["text"] and 1 <= line["at"] - line["began"] < 5
    assert end == {"codes": [0, 0, 0, 0]}


def test_a_group_survives_a_change_of_members(tmp_path: Path) -> None:
    lines = run("backend_faults.py", "members", tmp_path)
    before, after = ([line for line in lines if line.get("size") == size] for size in (4, 3))
    assert [line["sum"] for line in before] == [4.0] * 4
    assert sorted((line["rank"], line["role"], line["sum"]) for line in after) == [
        (1, 0, 6.0),
        (2, 1, 6.0),
        (3, 2, 6.0),
    ]
    broken = [line for line in lines if "causes" in line]
    assert [line["causes"] for line in broken] == [["DistBackendError", "EpochBroken"]] * 9
    assert lines[-1] == {"codes": [0, 0, 0, 0]}


def test_groups_beside_gloo_and_one_after_the_other(tmp_path: Path) -> None:
    *lines, end = run("backend_faults.py", "mixed", tmp_path)
    assert sorted(line["backend"] for line in lines if "backend" in line) == ["everstep"] * 3 + ["gloo"] * 3
    assert {line["sum"] for line in lines if "backend" in line} == {18.0}
    assert sorted((line["turn"], line["sum"]) for line in lines if "turn" in line) == [
        (turn, 6.0 + 4 * turn) for turn in range(3) for _ in range(4)
    ]
    assert end == {"codes": [0, 0, 0, 0]}
