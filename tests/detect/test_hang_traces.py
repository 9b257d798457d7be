"""Random traces: a healthy job is never judged, and an injected fault always is, in time, with the right rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from everstep.core.types import Phase
from everstep.detect.timeouts import Limits

TIMEOUT_S = 2.0
LIMITS = Limits(timeout_s=TIMEOUT_S, first_step_s=40.0, save_s=40.0, eval_s=40.0, report_s=0.1)
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

excused = st.tuples(st.sampled_from([Phase.EVAL, Phase.SAVE, Phase.LOAD]), st.floats(0.01, 12.0))
work = st.floats(0.01, 0.7 * TIMEOUT_S)


@st.composite
def jobs(draw: st.DrawFn, steps: int = 8) -> list[dict[int, list[tuple[Phase, float]]]]:
    """Rounds of a healthy job of 4: a slow first step, then work, with rare excused phases on some ranks."""
    rounds = [{r: [(Phase.START, draw(st.floats(0.1, 15.0)))] for r in range(4)}]
    for _ in range(draw(st.integers(1, steps))):
        busy = draw(st.dictionaries(st.integers(0, 3), st.lists(excused, max_size=2), max_size=1))
        rounds.append({r: [*busy.get(r, []), (Phase.TRAIN, draw(work))] for r in range(4)})
    return rounds


@QUICK
@given(rounds=jobs(), pause=st.tuples(st.floats(0, 40), st.floats(1, 500)), slots=st.sampled_from([1, 2, 4]))
def test_healthy_job_is_never_judged(paper: Any, rounds: Any, pause: tuple[float, float], slots: int) -> None:
    job = paper.build(rounds, slots)
    found = paper.verdict_of(paper.play(job, LIMITS, job.last_step_s, pauses=(pause,)))
    assert found is None


@QUICK
@given(rounds=jobs(), rank=st.integers(0, 3), when=st.floats(0, 0.9), stop=st.booleans(), answer=st.booleans())
def test_faulty_rank_is_named_in_time(
    paper: Any, rounds: Any, rank: int, when: float, stop: bool, answer: bool
) -> None:
    healthy = paper.build(rounds)
    first_step_s = healthy.moments[0][1].at_s if len(healthy.moments[0]) > 1 else 0.0
    fault_s = first_step_s + when * (healthy.last_step_s - first_step_s)
    job = paper.build(rounds, rank=rank, fault_s=fault_s, stopped=stop)
    assume(job.last_step_s < healthy.last_step_s)  # it came before the rank had done its part
    assume(stop or job.worker(rank, 1e6, lambda at: 0.0).phase is Phase.TRAIN)  # stuck in other phases: see below
    progress_s = max(job.last_step_s, fault_s) + TIMEOUT_S + 0.3
    bound = max(progress_s, job.last_excuse_s + TIMEOUT_S + 0.4)  # the end of an excuse is seen one report late
    found = paper.verdict_of(paper.play(job, LIMITS, bound + 1.0, answer=answer))
    assert found is not None
    at_s, verdict = found
    assert [b.rank for b in verdict.culprits] == [rank], verdict
    assert verdict.culprits[0].node == f"node{rank // 2}"
    assert fault_s <= at_s <= bound + 0.01, (at_s, bound)


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.EVAL, Phase.LOAD])
@pytest.mark.parametrize("collective", [True, False])
def test_phase_that_never_ends_is_found_at_its_own_limit(paper: Any, phase: Phase, collective: bool) -> None:
    start = {r: [(Phase.START, 1.0)] for r in range(4)}
    hung = {r: [(phase, 1e5 if r == 2 else 3.0)] if r == 2 or collective else [(Phase.TRAIN, 0.1)] for r in range(4)}
    job = paper.build([start, hung], rank=2, fault_s=1.5)
    found = paper.verdict_of(paper.play(job, LIMITS, 60.0))
    assert found is not None
    assert [b.rank for b in found[1].culprits] == [2]
    assert 41.0 <= found[0] <= 41.4
    assert "40" in found[1].why and phase.name.lower() in found[1].why
