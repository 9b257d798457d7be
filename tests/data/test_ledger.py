"""The ledger against a model that keeps everything, over jobs which lose, redo and roll forward steps."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.core.errors import ExitCode
from everstep.data.ledger import Consumed, Ledger, LedgerError, Span, fold
from everstep.data.sampler import Sampler


def consumed(step: int, epoch: int = 1, num_members: int = 4, batch: int = 8) -> Consumed:
    return Consumed(step, epoch, num_members, step * batch, batch)


def possible(records: Sequence[Consumed], batch: int, first_step: int) -> bool:
    """Brute force: could one job have made all of these reports?"""
    by_step: dict[int, Consumed] = {}
    for record in records:
        if record.first_position != record.step * batch or record.num_positions != batch:
            return False
        if record.step < first_step or by_step.setdefault(record.step, record) != record:
            return False
    deals = [(by_step[step].epoch, by_step[step].num_members) for step in sorted(by_step)]
    members = dict(deals)
    return deals == sorted(deals, key=lambda deal: deal[0]) and all(members[epoch] == num for epoch, num in deals)


RECORDS = st.builds(
    lambda step, epoch, members, shift, more: Consumed(step, epoch, members, step * 3 + shift, 3 + more),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([2, 2, 2, 3]),
    st.sampled_from([0] * 30 + [-1, 1]),
    st.sampled_from([0] * 30 + [-1, 1]),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(RECORDS, max_size=5), st.integers(0, 1))
def test_refuses_exactly_what_no_job_can_report(records: list[Consumed], first_step: int) -> None:
    """Whatever the order in which reports arrive."""
    ledger, refused = Ledger(3, first_step), False
    for record in records:
        before = (ledger.spans, ledger.committed, [ledger.step(step) for step in range(6)])
        try:
            ledger.add(record)
        except LedgerError:
            refused = True
            assert (ledger.spans, ledger.committed, [ledger.step(step) for step in range(6)]) == before
    assert refused != possible(records, 3, first_step)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, Consumed], list[list[Consumed]]]:
    """The truth of a job, and what each of its workers reported, in that worker's order.

    An epoch ends by a change of members in between steps, by a fault which loses the step, or by one after which
    the survivors roll the step forward: then they report the old epoch's deal, and the dead nothing.
    """
    batch, truth = draw(st.sampled_from([1, 24, 25])), {}
    reports: list[list[Consumed]] = [[] for _ in range(7)]
    step = 0
    for epoch in range(1, draw(st.integers(2, 8))):
        members = draw(st.sets(st.integers(0, 6), min_size=1))
        num_steps, end = draw(st.integers(0, 5)), draw(st.sampled_from(["planned", "lost", "rolled forward"]))
        told_by = [members] * num_steps
        if end == "rolled forward":
            told_by.append({min(members)} | draw(st.sets(st.sampled_from(sorted(members)))))
        for tellers in told_by:
            truth[step] = consumed(step, epoch, len(members), batch)
            for worker in tellers:
                reports[worker].append(truth[step])
            step += 1
    return truth, reports


def arrival(data: st.DataObject, reports: list[list[Consumed]]) -> list[Consumed]:
    """Reports of one worker stay in order; those of different workers interleave."""
    queues = [list(queue) for queue in reports if queue]
    arrived = []
    while queues:
        queue = data.draw(st.sampled_from(queues))
        arrived.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return arrived


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs(), st.data())
def test_redone_steps_shrink_and_grow(
    job: tuple[dict[int, Consumed], list[list[Consumed]]], data: st.DataObject
) -> None:
    truth, reports = job
    batch = truth[0].num_positions if truth else 1
    ledger = fold(arrival(data, reports), batch)
    ledger.check_complete(len(truth))
    assert ledger.committed == len(truth)
    assert {step: ledger.step(step) for step in truth} == truth
    spelled = [
        (span.first_step + offset, span.epoch, span.num_members)
        for span in ledger.spans
        for offset in range(span.num_steps)
    ]
    assert spelled == [(step, truth[step].epoch, truth[step].num_members) for step in sorted(truth)]
    assert len(ledger.spans) == len({record.epoch for record in truth.values()}), "one span an epoch"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs(), st.data())
def test_a_step_nobody_reported_is_named(
    job: tuple[dict[int, Consumed], list[list[Consumed]]], data: st.DataObject
) -> None:
    truth, reports = job
    if not truth:
        return
    lost = data.draw(st.sampled_from(sorted(truth)))
    batch = truth[0].num_positions
    ledger = fold([record for record in arrival(data, reports) if record.step != lost], batch)
    assert ledger.committed == lost
    first, last = lost * batch, (lost + 1) * batch - 1
    text = f"steps {lost} to {lost}, positions {first} to {last}, were never committed"
    with pytest.raises(LedgerError, match=f"^{text}$"):
        ledger.check_complete(len(truth))


def test_every_sample_of_every_committed_step_once() -> None:
    """Shrink and grow 4 -> 3 -> 2 -> 4: what the committed deals hand out is the stream, from the journal's records."""
    sampler = Sampler(100, 25, seed=4)
    deals = [(1, 4, range(0, 3)), (2, 3, range(3, 4)), (5, 2, range(4, 6)), (6, 4, range(6, 8))]
    lines = [
        msgspec.json.encode(consumed(step, epoch, num_members, 25))
        for epoch, num_members, steps in deals
        for step in steps
        for _ in range(num_members)
    ]
    ledger = fold((msgspec.json.decode(line, type=Consumed) for line in lines), 25)
    ledger.check_complete(8)
    samples = [
        index
        for span in ledger.spans
        for step in range(span.first_step, span.first_step + span.num_steps)
        for role in range(span.num_members)
        for micro in sampler.deal(step, span.num_members, role)
        for index in micro.indices
    ]
    assert sorted(samples[:100]) == sorted(samples[100:]) == list(range(100))
    assert ledger.spans[1] == Span(epoch=2, num_members=3, first_step=3, num_steps=1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Consumed(3, 1, 4, 22, 8), "positions 22 to 29, not 24 to 31: 30 to 31 missing, 22 to 23 of other steps"),
        (Consumed(3, 1, 4, 25, 6), "positions 25 to 30, not 24 to 31: 24 to 24 missing, 31 to 31 missing"),
        (Consumed(3, 1, 4, 24, 9), "positions 24 to 32, not 24 to 31: 32 to 32 of other steps"),
        (Consumed(3, 1, 4, 80, 8), "positions 80 to 87, not 24 to 31: 24 to 31 missing, 80 to 87 of other steps"),
        (consumed(1, epoch=2, num_members=3), "step 1 (epoch 2, 3 members) consumed positions 8 to 15, but was"),
        (
            consumed(1, epoch=2),
            "step 1 (epoch 2, 4 members) consumed positions 8 to 15, but was committed before: step 1",
        ),
        (consumed(1, num_members=3), "was committed before: step 1 (epoch 1, 4 members) consumed positions 8 to 15"),
        (consumed(3, num_members=3), "(epoch 1, 3 members) consumed positions 24 to 31, which cannot follow: step 2"),
        (consumed(3, epoch=0), "step 3 (epoch 0, 4 members) consumed positions 24 to 31, which cannot follow"),
    ],
)
def test_errors_say_what_and_where(record: Consumed, message: str) -> None:
    ledger = fold(map(consumed, range(3)), 8)
    with pytest.raises(LedgerError, match=re.escape(message)) as caught:
        ledger.add(record)
    assert caught.value.code is ExitCode.INTERNAL


def test_a_resumed_job_begins_where_it_resumed() -> None:
    ledger = fold([consumed(100), consumed(101)], 8, first_step=100)
    ledger.check_complete(102)
    assert ledger.spans == (Span(1, 4, 100, 2),)
    with pytest.raises(LedgerError, match="step 99 .* but this job began at step 100"):
        ledger.add(consumed(99))


def test_too_many_or_too_few_steps() -> None:
    with pytest.raises(LedgerError, match="^steps 2 to 2 are beyond the end, positions 16 to 23 too$"):
        fold(map(consumed, range(3)), 8).check_complete(2)
    with pytest.raises(LedgerError, match="^steps 2 to 3, positions 16 to 31, were never committed$"):
        fold(map(consumed, [0, 1, 4]), 8).check_complete(2)
    with pytest.raises(LedgerError, match="^steps 0 to 1, positions 0 to 15, were never committed$"):
        Ledger(8).check_complete(2)


def test_roll_back_makes_steps_anew_and_forgets_late_reports() -> None:
    ledger = fold([*map(consumed, range(5)), consumed(6)], 8)
    ledger.roll_back(2, epoch=3)
    assert (ledger.committed, ledger.step(6), ledger.step(1)) == (2, None, consumed(1))
    ledger.add(consumed(4))  # was on its way
    assert ledger.step(4) is None
    for step in range(2, 7):
        ledger.add(consumed(step, epoch=3, num_members=3))
    ledger.add(consumed(5))
    ledger.add(consumed(1))
    ledger.check_complete(7)
    assert ledger.spans == (Span(1, 4, 0, 2), Span(3, 3, 2, 5))


def test_roll_back_to_before_the_job_began() -> None:
    ledger = fold([consumed(10), consumed(11)], 8, first_step=10)
    ledger.roll_back(8, epoch=2)
    assert (ledger.committed, ledger.spans) == (8, ())
    ledger.add(consumed(8, epoch=2))
    ledger.check_complete(9)
