"""First cause and collateral (a victim may report before the culprit), and the sentences people read."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.events import NodeLost, WorkerEnded
from everstep.core.types import Exit, ExitCause, NodeLoss
from everstep.detect.blame import first_cause, is_victim, sentence

VICTIMS = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33612",
    "RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:456] Read error [127.0.0.1]:1: Connection reset by peer",
    "RuntimeError: [gloo/transport/tcp/buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed",
    "torch.distributed.DistStoreError: Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
]
OWN = [
    "ValueError: loss is nan",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'",
    "AssertionError",
]


def ended(rank: int, cause: ExitCause, seen_s: float = 10.0, **fields: Any) -> WorkerEnded:
    made = Exit(**{"cause": cause, "at_s": seen_s, "step": 57, "total_step": 57} | fields)
    return WorkerEnded(rank, f"node{rank // 2}", made, seen_s)


def victim(rank: int, seen_s: float = 10.0, message: str = VICTIMS[0]) -> WorkerEnded:
    return ended(rank, ExitCause.ERROR, seen_s, message=message, code=1)


def ranks(blames: Any) -> list[int]:
    return [b.rank for b in blames]


def test_killed_worker_is_named_in_one_sentence() -> None:
    culprits, collateral, why = first_cause([victim(0), ended(2, ExitCause.SIGNAL, signal=9), victim(1), victim(3)])
    assert ranks(culprits) == [2] and ranks(collateral) == [0, 1, 3]
    assert why == "rank 2 on node1 was killed by signal 9 (sent from outside) at step 57"


@pytest.mark.parametrize("message", VICTIMS)
def test_broken_connections_are_collateral(message: str) -> None:
    early = victim(0, 9.99, message)
    assert is_victim(early.exit)
    culprits, collateral, _ = first_cause([early, ended(1, ExitCause.ERROR, 10.0, message="ValueError: bad")])
    assert (ranks(culprits), ranks(collateral)) == ([1], [0])


@pytest.mark.parametrize("message", OWN)
def test_errors_of_the_workers_own_are_causes(message: str) -> None:
    assert not is_victim(ended(0, ExitCause.ERROR, message=message).exit)


CAUSES: list[dict[str, Any]] = [
    {"cause": ExitCause.SIGNAL, "signal": 9},
    {"cause": ExitCause.SIGNAL, "signal": 11},
    {"cause": ExitCause.OOM, "signal": 9},
    {"cause": ExitCause.ERROR, "message": OWN[0]},
    {"cause": ExitCause.EXIT_CODE, "code": 3, "message": "exit status 3"},
    {"cause": ExitCause.UNFINISHED, "code": 0},
]
ENDS_OF_PEERS = st.one_of(
    st.builds(lambda r, t, m: victim(r, t, m), st.just(0), st.floats(9.5, 10.5), st.sampled_from(VICTIMS)),
    st.builds(lambda t: ended(0, ExitCause.GRACE, t, signal=9), st.floats(10, 40)),
    st.builds(lambda t: ended(0, ExitCause.STOPPED, t, signal=15), st.floats(10, 40)),
    st.builds(lambda t: ended(0, ExitCause.SIGNAL, t, signal=6), st.floats(9.9, 10.5)),
)


@given(cause=st.sampled_from(CAUSES), peers=st.lists(ENDS_OF_PEERS, max_size=6), order=st.randoms())
def test_the_one_own_cause_is_found_in_any_order_and_time(
    cause: dict[str, Any], peers: list[WorkerEnded], order: Any
) -> None:
    fields = dict(cause)
    all_ends = [ended(99, fields.pop("cause"), **fields)]
    all_ends += [WorkerEnded(i, p.node, p.exit, p.seen_s) for i, p in enumerate(peers)]
    order.shuffle(all_ends)
    culprits, collateral, why = first_cause(all_ends)
    assert ranks(culprits) == [99] and why.startswith("rank 99 on node49 ")
    assert set(ranks(collateral)) == {i for i, p in enumerate(peers) if p.exit.failed}


def test_ties_go_by_time_and_later_errors_are_collateral() -> None:
    first = ended(3, ExitCause.ERROR, 10.0, message="ValueError: bad")
    later = ended(0, ExitCause.EXIT_CODE, 10.4, code=1, message="training failed")
    culprits, collateral, _ = first_cause([later, first])
    assert (ranks(culprits), ranks(collateral)) == ([3], [0])


def test_same_failure_of_all_is_one_cause() -> None:
    all_ends = [
        ended(r, ExitCause.ERROR, 10 + r / 10, message=f"ValueError: rank {r}: bad sample 5{r}") for r in range(3)
    ]
    culprits, collateral, why = first_cause(all_ends)
    assert ranks(culprits) == [0, 1, 2] and collateral == ()
    assert (
        why == "rank 0 on node0 raised ValueError: rank 0: bad sample 50 at step 57; the same happened to ranks 1 and 2"
    )


def test_two_killed_workers_are_both_culprits() -> None:
    ends = [ended(0, ExitCause.OOM, 10, signal=9), ended(1, ExitCause.SIGNAL, 11, signal=9), victim(2)]
    culprits, _, why = first_cause([*ends, ended(3, ExitCause.SIGNAL, 11, signal=9)])
    assert ranks(culprits) == [0, 1, 3]
    assert why == (
        "rank 0 on node0 was killed by the kernel: out of memory at step 57; "
        "rank 1 on node0 was killed by signal 9 (sent from outside) at step 57; the same happened to rank 3"
    )


def test_lost_node_is_the_cause_and_takes_its_workers_with_it() -> None:
    ends = [victim(0), ended(2, ExitCause.SIGNAL, 9.9, signal=15), ended(3, ExitCause.SIGNAL, 9.9, signal=9)]
    culprits, collateral, why = first_cause(ends, [NodeLost("node1", "x", NodeLoss.CLOSED)])
    assert [(b.rank, b.node) for b in culprits] == [(-1, "node1")]
    assert sorted(ranks(collateral)) == [0, 2, 3]
    assert why == "node node1 was lost: its agent's connection ended"


def test_node_that_did_not_stop_is_a_consequence() -> None:
    culprits, _, _ = first_cause([ended(0, ExitCause.OOM)], [NodeLost("node1", "x", NodeLoss.STUCK)])
    assert [(b.rank, b.node) for b in culprits] == [(0, "node0")]
    assert first_cause([], [NodeLost("node1", "x", NodeLoss.STUCK)])[0][0].node == "node1"


def test_only_broken_connections_blame_the_one_that_left_early_else_the_first() -> None:
    left = ended(1, ExitCause.OK, 9.8, code=0, step=12, total_step=12)
    culprits, collateral, why = first_cause([victim(0), left, victim(2)])
    assert (ranks(culprits), ranks(collateral)) == ([1], [0, 2])
    assert why == "rank 1 on node0 ended (exit 0) at step 12 while the others still communicate"
    saved = ended(1, ExitCause.OK, 11.0, code=0)  # asked to stop, for their sake
    assert ranks(first_cause([victim(0), saved, victim(2)])[0]) == [0]
    culprits, _, why = first_cause([victim(0, 10.2), victim(2, 10.1)])
    assert ranks(culprits) == [2] and "no worker is known to have died" in why


def test_nothing_failed() -> None:
    assert first_cause([ended(0, ExitCause.OK), ended(1, ExitCause.STOPPED)]) == ((), (), "")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"cause": ExitCause.SIGNAL, "signal": 15}, "killed by signal 15, SIGTERM (sent from outside) at step 57"),
        ({"cause": ExitCause.SIGNAL, "signal": 11}, "crashed in native code with signal 11, SIGSEGV at step 57"),
        ({"cause": ExitCause.SIGNAL, "signal": 63}, "signal 63 "),
        ({"cause": ExitCause.OOM, "rss_bytes": 3 << 30}, "out of memory at step 57, last seen with 3.0 GiB"),
        ({"cause": ExitCause.EXIT_CODE, "code": 3, "message": "exit status 3"}, "exited with status 3 at step 57"),
        ({"cause": ExitCause.UNFINISHED}, "vanished with exit status 0"),
        (
            {"cause": ExitCause.ERROR, "message": "KeyError: 'x'", "total_step": -1, "step": 4},
            "KeyError: 'x' at step 4",
        ),
    ],
)
def test_sentences(fields: dict[str, Any], part: str) -> None:
    fields = dict(fields)
    assert part in first_cause([ended(0, fields.pop("cause"), **fields)])[2]


VERBS = ("was ", "raised ", "exited ", "crashed ", "did not ", "vanished ", "ended (", "could not be started: ")
NOT_STARTED = "could not be started: cannot start /opt/python in /work: No such file or directory"
SAID = {
    ExitCause.ERROR: ("", "ValueError: the data set is empty.", NOT_STARTED),
    ExitCause.EXIT_CODE: ("", "exit status 3", "the data set is empty."),
}


@pytest.mark.parametrize(("cause", "message"), [(c, m) for c in ExitCause for m in SAID.get(c, ("", "resident 3 GiB"))])
def test_all_kinds_read_as_sentences(cause: ExitCause, message: str) -> None:
    """After "rank 0 on node0" comes exactly one verb, and no part is empty, doubled or a placeholder."""
    for signum in (9, 11, 15, 63):
        text = sentence(Exit(cause, 0.0, code=3, signal=signum, message=message, step=57))
        assert text.startswith(VERBS), text
        assert not re.search(r"None|  |\. |\.\)|\(\)|: at|raised (could|was|exit)", text), text


def test_who_was_not_started_is_told_from_who_raised() -> None:
    culprits, _, why = first_cause([ended(0, ExitCause.ERROR, message=NOT_STARTED)])
    assert why == f"rank 0 on node0 {NOT_STARTED}"
    assert [b.cause for b in culprits] == ["not-started"]
