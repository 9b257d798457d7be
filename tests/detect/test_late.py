"""When the communication library gives up first: the rank that complained is not the one that was late."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.core.types import Exit, ExitCause, Phase, WorkerProgress
from everstep.detect.blame import is_victim
from everstep.detect.late import gave_up, late_one

GLOO = "RuntimeError: [gloo/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete"
TIMEOUTS = [
    GLOO,
    "RuntimeError: [gloo/tcp/unbound_buffer.cc:115] Timed out waiting 3000ms for send operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    "torch.distributed.DistStoreError: Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
    "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /default_pg/0//cpu//0",
]
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33612"


def raised(message: str = GLOO) -> Exit:
    return Exit(ExitCause.ERROR, 10.0, code=1, message=message, step=57)


def at(rank: int, phase: Phase = Phase.TRAIN, step: int = 57, collectives: int = 0, **other: Any) -> WorkerProgress:
    return WorkerProgress(rank, rank, step, step, phase, 2.0, 2.0, 2.0, collectives=collectives, **other)


@pytest.mark.parametrize("message", TIMEOUTS)
def test_time_outs_are_complaints_and_no_cause(message: str) -> None:
    assert gave_up(raised(message)) and is_victim(raised(message))


@pytest.mark.parametrize("message", [CLOSED, "ValueError: bad", "TimeoutError: the database did not answer"])
def test_other_errors_are_no_complaints(message: str) -> None:
    assert not gave_up(raised(message))


def test_the_one_that_does_not_wait_is_late(paper: Any) -> None:
    """The first complaint stops the job's clock: two complained by then, one waits still, one sleeps in the loop."""
    stacks = {1: paper.busy, 3: paper.waiting}
    found = late_one([at(r) for r in range(4)], {0: raised(), 2: raised()}, stacks)
    assert found.ranks == (1,) and "train.py:42" in found.what


def test_the_end_that_the_error_made_is_no_early_end(paper: Any) -> None:
    """A script that an error escaped is done in its own eyes, as one that returned."""
    workers = [at(0, Phase.DONE), at(1), at(2)]
    assert late_one(workers, {0: raised()}, {1: paper.busy, 2: paper.waiting}).ranks == (1,)


def test_one_whose_script_ended_before_left_early(paper: Any) -> None:
    workers = [at(0, Phase.DONE), at(1, Phase.DONE, step=50), at(2)]
    found = late_one(workers, {0: raised()}, {2: paper.waiting})
    assert found.ranks == (1,) and found.cause == "left-early"


def test_several_may_be_late(paper: Any) -> None:
    stacks = {1: paper.busy, 2: paper.busy, 3: paper.waiting}
    assert late_one([at(r) for r in range(4)], {0: raised()}, stacks).ranks == (1, 2)


def test_collectives_entered_tell_without_stacks() -> None:
    found = late_one([at(0, collectives=9), at(1, collectives=8), at(2, collectives=9)], {0: raised()}, {})
    assert found.ranks == (1,)


def test_of_two_the_other_one_is_late_unless_it_waits_as_well(paper: Any) -> None:
    two = [at(0), at(1)]
    assert late_one(two, {0: raised()}, {}).ranks == (1,)
    assert late_one(two, {0: raised()}, {1: "State: D (disk sleep)"}).ranks == (1,)
    assert late_one(two, {0: raised()}, {1: paper.busy}).ranks == (1,)
    assert late_one(two, {0: raised()}, {1: paper.waiting}).ranks == ()


def test_one_that_came_too_late_was_seen_elsewhere_before(paper: Any) -> None:
    """It enters the collective after the others gave up, and fails in turn."""
    failed = {0: raised(), 1: raised(CLOSED)}
    assert late_one([at(0), at(1)], failed, {1: paper.busy}).ranks == (1,)
    assert late_one([at(0), at(1)], failed, {}).ranks == ()


def test_one_seen_at_its_own_error_is_not_late(paper: Any) -> None:
    """Its stacks were taken while it printed the traceback of its time-out, or of a connection that a peer closed."""
    stacks = {1: paper.busy, 2: paper.busy, 3: paper.busy}
    failed = {0: raised(), 2: raised(), 3: raised(CLOSED)}
    assert late_one([at(r) for r in range(4)], failed, stacks).ranks == (1,)
    assert late_one([at(0), at(1)], {0: raised(), 1: raised()}, {1: paper.busy}).ranks == ()


def test_a_stopped_one_is_late_and_so_told() -> None:
    found = late_one([at(0), at(1, stopped=True), at(2)], {0: raised()}, {})
    assert found.ranks == (1,) and found.cause == "stopped"


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.EVAL, Phase.LOAD])
def test_what_it_was_busy_with_is_told(paper: Any, phase: Phase) -> None:
    found = late_one([at(0), at(1, phase), at(2)], {0: raised()}, {1: paper.busy, 2: paper.waiting})
    words = {Phase.SAVE: "in a save", Phase.EVAL: "in an evaluation", Phase.LOAD: "in a load"}
    assert found.ranks == (1,) and found.what.endswith(words[phase])


def test_nobody_is_named_when_all_waited(paper: Any) -> None:
    everybody = [at(r) for r in range(3)]
    assert late_one(everybody, dict.fromkeys(range(3), raised()), {}).ranks == ()
    assert late_one(everybody, {0: raised()}, {1: paper.waiting, 2: paper.waiting}).ranks == ()


def test_one_that_complained_is_never_late() -> None:
    """By its steps the complainer is the odd one; but it waited."""
    slow = msgspec.structs.replace(at(0), step=56)
    assert 0 not in late_one([slow, at(1), at(2)], {0: raised()}, {}).ranks
