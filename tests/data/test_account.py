"""The account of samples from a journal: every committed step once, and no account where one cannot be whole."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from everstep.core import events as e
from everstep.core.dealing import Dealing, Stream
from everstep.core.formation import Formation, Rollback, Seat, SessionReport, Stage
from everstep.core.types import Activity, EpochPlan, Exit, ExitCause, NodeReport, WorkerReport
from everstep.data.account import Account
from everstep.data.ledger import LedgerError
from everstep.data.sampler import Sampler

STREAM = Stream(20, 7, "5", shuffle=True, drop_last=False)


def formed(epoch: int, num_members: int) -> e.FormationMade:
    seats = tuple(Seat(f"n/{k}#0", "n", "h", "h:1") for k in range(num_members))
    return e.FormationMade(Formation(epoch, seats, abort=False, floor=0))


def plan(epoch: int) -> e.EpochFormed:
    return e.EpochFormed(EpochPlan(epoch, (), 3, "h", 1, 0))


def dealt(epoch: int, num_members: int, first_step: int, *streams: Stream, missed: bool = False) -> e.StepsDealt:
    return e.StepsDealt(Dealing(epoch, num_members, first_step, streams or (STREAM,)), missed=missed)


def ended(step: int) -> e.WorkerEnded:
    return e.WorkerEnded(0, "n", Exit(ExitCause.OK, 0.0, step=step), 0.0)


def said(committed: int, plan_epoch: int) -> e.NodeReported:
    session = SessionReport("n/0#0", Stage.MEMBER, committed, 1, 1, "h:1", "h")
    worker = WorkerReport(0, session=session)
    return e.NodeReported(NodeReport("n", "n.1", 1, 0.0, 1, "h", 1, plan_epoch, Activity.RUNNING, (worker,)))


def after(rollback: int, committed: int) -> e.NodeReported:
    """A session's word since that rollback."""
    session = SessionReport("n/0#0", Stage.MEMBER, committed, 4, 4, "h:1", "h", rollbacks=(Rollback(rollback, 0),))
    report = NodeReport("n", "n.1", 1, 0.0, 1, "h", 1, 1, Activity.RUNNING, (WorkerReport(0, session=session),))
    return e.NodeReported(report)


def told(*events: e.AnyEvent) -> Account:
    account = Account()
    for event in events:
        account.see(event)
    return account


SHRUNK = (plan(1), formed(1, 3), dealt(1, 3, 0), formed(2, 2), formed(3, 1), dealt(3, 1, 4), ended(9))


def test_each_step_has_the_samples_of_its_members() -> None:
    """3 members for 4 steps, then, after a formation in which nothing was committed, one."""
    steps = list(told(*SHRUNK).steps())
    sampler = Sampler(20, 7, seed=5)
    assert [step.number for step in steps] == list(range(9))
    assert [len(step.shares) for step in steps] == [3] * 4 + [1] * 5
    assert steps[3].shares == tuple(sampler.samples(sampler.share(3, 3, role)) for role in range(3))
    consumed = [sample for step in steps for share in step.shares for sample in share]
    assert consumed == list(sampler.samples(range(63)))
    assert set(Counter(consumed[:60]).values()) == {3}  # three passes


def test_one_step_is_found_without_the_others() -> None:
    account = told(*SHRUNK)
    assert account.step(5) == list(account.steps())[5] and account.step(9) is None
    assert account.committed == 9


def test_the_count_is_that_of_the_steps_and_checks_each_dealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of weeks has a million steps of thousands of samples: these are not computed for it."""
    again = (plan(2), formed(4, 3), dealt(4, 3, 6, STREAM, Stream(8, 4, "1", shuffle=False, drop_last=True)), ended(8))
    for events in ((plan(1),), SHRUNK, (*SHRUNK, *again)):
        assert told(*events).count() == len(list(told(*events).steps()))
    share = Sampler.share
    monkeypatch.setattr(Sampler, "share", lambda self, step, n, role: share(self, step, n, 0 if n == 1 else n - 1))
    with pytest.raises(LedgerError, match="whose shares are not step 0 in whole"):
        told(*SHRUNK).count()


def test_several_streams_and_none() -> None:
    other = msgspec.structs.replace(STREAM, shuffle=False, global_batch=2)
    account = told(plan(1), formed(1, 2), dealt(1, 2, 0, STREAM, other), ended(2))
    step = account.step(1)
    assert step is not None and step.shares[0][-1:] == (2,) and step.shares[1][-1:] == (3,)
    account = told(plan(1), formed(1, 2), e.StepsDealt(Dealing(1, 2, 0)), ended(2))
    assert [step.shares for step in account.steps()] == [((), ())] * 2


def test_a_change_of_data_in_one_epoch() -> None:
    other = msgspec.structs.replace(STREAM, seed="6")
    account = told(plan(1), formed(1, 2), dealt(1, 2, 0), dealt(1, 2, 3, other), ended(5))
    assert [(span.dealing.first_step, span.end) for span in account.spans()] == [(0, 3), (3, 5)]


def test_dealings_are_told_in_any_order() -> None:
    *before, last = SHRUNK
    before[2], before[5] = before[5], before[2]
    account = told(formed(3, 1), *before, last)
    assert [span.end for span in account.spans()] == [4, 9]


def test_a_job_that_starts_again_makes_its_steps_again() -> None:
    again = (plan(2), formed(4, 3), dealt(4, 3, 0), said(4, plan_epoch=1), said(2, plan_epoch=2))
    account = told(*SHRUNK, *again)
    assert [(span.dealing.epoch, span.end) for span in account.spans()] == [(4, 2)]
    account = told(*SHRUNK, plan(2), formed(4, 3), dealt(4, 3, 6), ended(8))
    assert [(span.dealing.epoch, span.end) for span in account.spans()] == [(1, 4), (3, 6), (4, 8)]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((plan(1), formed(1, 3), dealt(1, 2, 0)), "dealt to 2 members, but that epoch has 3 members"),
        ((plan(1), dealt(1, 2, 0)), "but that epoch has no members"),
        ((plan(1), formed(1, 3), dealt(1, 3, 0, missed=True)), "before step 0 were dealt may not be known"),
        ((plan(1), formed(1, 3), dealt(1, 3, 2), ended(3)), "steps 0 to 1 were dealt to nobody"),
        ((*SHRUNK, formed(4, 2), dealt(4, 2, 4), ended(9)), "from step 4 on epoch 4 .* cannot follow: from step 4 on"),
        ((*SHRUNK, formed(4, 2), dealt(4, 2, 3), ended(9)), "which cannot follow"),
        ((*SHRUNK, formed(4, 2), dealt(4, 2, 9)), "but 9 steps are known"),
        ((*SHRUNK, plan(2), formed(4, 3), dealt(4, 3, 11), ended(12)), "steps 9 to 10 were dealt to nobody"),
    ],
)
def test_what_cannot_be_is_refused(events: tuple[e.AnyEvent, ...], why: str) -> None:
    with pytest.raises(LedgerError, match=why):
        told(*events).spans()


def back(epoch: int, step: int, before: int) -> e.StateRestored:
    return e.StateRestored(epoch, step, before, max(0, before - step))


def test_what_a_rollback_made_void_does_not_count() -> None:
    account = told(*SHRUNK[:-1], said(9, plan_epoch=1), back(4, 6, before=9), formed(4, 2), dealt(4, 2, 6), after(4, 8))
    assert [(span.dealing.epoch, span.end) for span in account.spans()] == [(1, 4), (3, 6), (4, 8)]
    assert [(s.dealing.epoch, s.dealing.first_step, s.end) for s in account.redone] == [(3, 6, 9)]
    assert [step.number for step in account.steps()] == list(range(8))
    farther = told(*SHRUNK[:-1], said(9, plan_epoch=1), back(4, 2, before=9), formed(4, 2), dealt(4, 2, 2), after(4, 3))
    assert [(span.dealing.epoch, span.end) for span in farther.spans()] == [(1, 2), (4, 3)]
    assert [(s.dealing.epoch, s.dealing.first_step, s.end) for s in farther.redone] == [(1, 2, 4), (3, 4, 9)]


def test_numbers_of_before_a_rollback_that_are_told_late() -> None:
    late = (ended(9), said(9, plan_epoch=1))
    account = told(*SHRUNK, back(4, 6, before=9), formed(4, 2), *late)
    assert account.committed == 6  # and nothing was dealt since
    assert told(*SHRUNK, back(4, 6, before=9), *late, formed(4, 2), dealt(4, 2, 6), after(4, 7), *late).committed == 7
    with pytest.raises(LedgerError, match="steps 6 to 6 were dealt to nobody"):
        told(*SHRUNK, back(4, 6, before=9), formed(4, 2), dealt(4, 2, 7), after(4, 8)).spans()


def test_a_stream_keeps_a_seed_of_any_size() -> None:
    sampler = Sampler(10, 3, seed=-(1 << 90), shuffle=False, drop_last=True)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(sampler.stream), type=Stream)
    assert Sampler.of(read).stream == sampler.stream and Sampler.of(read).seed == sampler.seed
