"""The fold over the journal: numbers of a known run, partial journals, and lives of the controller."""

from __future__ import annotations

import msgspec
import pytest

from everstep.core import events as e
from everstep.observe.summary import Summary, summarize


def test_empty_journal_gives_an_empty_summary() -> None:
    summary = summarize([])
    assert (summary.ettr, summary.steps, summary.ended, summary.total_step) == (0.0, 0, False, -1)


def test_numbers_of_a_run_with_a_crash_and_a_hang(journal: list[e.Entry]) -> None:
    summary = summarize(journal)
    assert (summary.job, summary.script, summary.exit_code, summary.stage) == ("demo", "train_gpt.py", 0, "finished")
    assert [x.steps for x in summary.epochs] == [40, 50, 50]
    assert [x.redone_steps for x in summary.epochs] == [0, 10, 10]
    assert (summary.steps, summary.redone_steps, summary.total_step, summary.restarts) == (140, 20, 120, 2)
    assert summary.last_save_step == 70
    assert summary.wall_s == pytest.approx(41.2)
    assert summary.step_s == pytest.approx(0.25)
    # 39 intervals, and twice 49; twice the last 10 steps were done in vain
    assert summary.effective_s == pytest.approx(0.25 * (39 + 2 * 49 - 2 * 10))
    assert summary.ettr == pytest.approx(summary.effective_s / 41.2)
    assert summary.nodes == {"node0": "", "node1": ""}


def test_a_sessions_last_save_is_the_newest_durable_one(journal: list[e.Entry]) -> None:
    last = journal[-1]
    saves = [msgspec.structs.replace(last, n=last.n + i, event=e.SaveDurable(at)) for i, at in enumerate((90, 80), 1)]
    assert summarize([*journal, *saves]).last_save_step == 90


def test_incidents_carry_cause_collateral_evidence_and_cost(journal: list[e.Entry]) -> None:
    crash, hang = summarize(journal).incidents
    assert (crash.id, crash.kind, crash.outcome, crash.redone_steps) == ("I001", "crash", "recovered", 10)
    assert [b.rank for b in crash.culprits] == [2]
    assert [b.rank for b in crash.collateral] == [0, 1, 3]
    assert crash.why.startswith("rank 2 on node1 was killed by signal 9")
    assert crash.files == ("incidents/I001/rank2-log.txt",)
    assert (crash.step, crash.told_s) == (40, 0.012)
    assert crash.last_step_s == pytest.approx(11.75)
    assert (hang.downtime_s, hang.culprits[0].rank, hang.step) == (3.25, 1, 80)
    assert list(hang.phases) == ["detect", "stop", "form", "first-step"]


def test_every_prefix_is_a_valid_summary_and_counts_never_fall(journal: list[e.Entry]) -> None:
    before = Summary()
    for end in range(len(journal) + 1):
        summary = summarize(journal[:end])
        assert summary.steps >= before.steps and summary.total_step >= before.total_step
        assert summary.wall_s >= before.wall_s and 0 <= summary.ettr <= 1
        assert len(summary.incidents) >= len(before.incidents)
        before = summary


def test_open_incident_of_a_running_job(journal: list[e.Entry]) -> None:
    cut = next(i for i, x in enumerate(journal) if isinstance(x.event, e.IncidentOpened)) + 1
    summary = summarize(journal[:cut])
    assert summary.exit_code is None and summary.incidents[0].outcome == ""


@pytest.mark.parametrize("clock_jump_s", [-900.0, 5e5])
def test_controller_restarted_on_another_clock_keeps_one_time_line(journal: list[e.Entry], clock_jump_s: float) -> None:
    cut = next(i for i, x in enumerate(journal) if isinstance(x.event, e.EpochFormed) and x.event.plan.epoch == 3)
    late = [_shifted(x, clock_jump_s) for x in journal[cut:]]
    start = msgspec.structs.replace(late[0], event=e.ControllerStarted(2))
    plain, moved = summarize(journal), summarize([*journal[:cut], start, *late])
    assert moved.controller_lives == 2
    assert moved.wall_s == pytest.approx(plain.wall_s, abs=0.3)
    assert moved.effective_s == pytest.approx(plain.effective_s, abs=0.01)
    assert moved.step_s == pytest.approx(plain.step_s)


def test_controller_restarted_on_the_same_clock_moves_nothing(journal: list[e.Entry]) -> None:
    start = msgspec.structs.replace(journal[10], event=e.ControllerStarted(2))
    plain, again = summarize(journal), summarize([*journal[:10], start, *journal[10:]])
    assert again.controller_lives == 2
    again.controller_lives = plain.controller_lives
    assert again == plain


def test_without_totals_steps_add_up_until_an_alert_says_from_scratch(journal: list[e.Entry]) -> None:
    unknown = [_without_total(x) for x in journal]
    assert summarize(unknown).total_step == 140
    cut = next(i for i, x in enumerate(unknown) if isinstance(x.event, e.IncidentClosed))
    alert = msgspec.structs.replace(unknown[cut], event=e.Alert("step-fell-back", "started from scratch"))
    summary = summarize([*unknown[:cut], alert, *unknown[cut:]])
    assert [x.redone_steps for x in summary.epochs] == [0, 40, 0]
    assert [x.first_total for x in summary.epochs] == [1, 1, 51]
    assert summary.alerts == [alert.event]


def _shifted(entry: e.Entry, by_s: float) -> e.Entry:
    event = entry.event
    if isinstance(event, e.StepsSeen):
        event = msgspec.structs.replace(
            event, step_at_s=event.step_at_s + by_s, first_step_at_s=event.first_step_at_s + by_s
        )
    return msgspec.structs.replace(entry, t_s=entry.t_s + by_s, event=event)


def _without_total(entry: e.Entry) -> e.Entry:
    if not isinstance(entry.event, e.StepsSeen):
        return entry
    return msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, total_step=-1))
