"""The crash-loop rule: the same failure at the same step, three times in a row."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.core.events import WorkerEnded
from everstep.core.types import Exit, ExitCause
from everstep.detect.repeat import Signature, normalised, repeats, signature


def failed(step: int, total: int = -1, message: str = "ValueError: bad", rank: int = 0, **more: Any) -> Signature:
    end = Exit(**{"cause": ExitCause.ERROR, "at_s": 0.0, "message": message, "step": step, "total_step": total} | more)
    return signature("crash", "", WorkerEnded(rank, "node0", end, 0.0))


def test_same_absolute_step_after_resumes_is_a_loop() -> None:
    attempts = [failed(100, 100), failed(5, 100), failed(5, 100)]
    assert not repeats(attempts[:2], 3)
    assert repeats(attempts, 3)


def test_progress_between_failures_is_no_loop() -> None:
    assert not repeats([failed(100, 100), failed(5, 105), failed(5, 110)], 3)


def test_without_a_total_the_step_of_the_attempt_counts() -> None:
    attempts = [failed(100), failed(5), failed(5), failed(5)]
    assert not repeats(attempts[:3], 3)
    assert repeats(attempts, 3)


def test_they_must_be_consecutive_and_of_one_cause() -> None:
    other = failed(5, cause=ExitCause.SIGNAL, signal=9, message="")
    assert not repeats([failed(5), failed(5), other, failed(5)], 3)
    assert other != failed(5, cause=ExitCause.SIGNAL, signal=11, message="")
    assert other != failed(5, cause=ExitCause.OOM, message="")


def test_rank_and_attempt_do_not_matter() -> None:
    one = failed(
        5, message="RuntimeError: rank 3 on cuda:3: bad tensor at 0x7ff2 in /tmp/abc1/x.bin, port 41231", rank=3
    )
    two = failed(5, message="RuntimeError: rank 0 on cuda:0: bad tensor at 0x1a in /tmp/zzz9/x.bin, port 50000", rank=0)
    assert one == two
    assert one != failed(5, message="RuntimeError: bad gradient")


def test_incidents_without_a_worker() -> None:
    assert signature("hang", "3 of 3 workers: no step for 2.1 s", None) == signature(
        "hang", "3 of 3 workers: no step for 2.2 s", None
    )
    assert repeats([signature("hang", "x", None)] * 3, 3)


def test_hangs_compare_by_step_however_they_ended() -> None:
    ends = [Exit(ExitCause.SIGNAL, 0.0, signal=9, total_step=8), Exit(ExitCause.STOPPED, 0.0, total_step=8)]
    made = {signature("hang", "", WorkerEnded(r, "n", end, 0.0)) for r, end in enumerate(ends)}
    assert made == {Signature("hang", 8)}


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_limit(limit: int) -> None:
    assert repeats([failed(5)] * limit, limit)
    assert not repeats([failed(5)] * (limit - 1), limit)


def test_normalised_is_stable_and_bounded() -> None:
    text = "took 1.5e-3 s, id 123e4567-e89b-12d3-a456-426614174000\n  again"
    assert normalised(text) == "took # s, id <id> again"
    assert normalised(normalised(text)) == normalised(text)
    assert len(normalised("x" * 9999)) == 500
