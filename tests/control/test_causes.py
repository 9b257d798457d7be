"""What the culprits wrote, as a fold over records and evidence: in whatever order those come."""

from __future__ import annotations

import pytest

from everstep.control.causes import Causes
from everstep.core import events as e
from everstep.core.types import Blame, Exit, ExitCause, StacksTaken
from everstep.observe.summary import summarize
from everstep.observe.text import render

FULL = "step 9 | loss 2\nOSError: [Errno 28] No space left on device: '/scratch/a.pt'\n"
EARLY = "KeyError: 'rows'"  # of one that was the first to report, but not the first to fail


def ended(rank: int, message: str) -> e.WorkerEnded:
    return e.WorkerEnded(rank, f"n{rank}", Exit(ExitCause.ERROR, 1.0, message=message), 1.0)


def blame(rank: int) -> tuple[Blame, ...]:
    return (Blame(rank, f"n{rank}", "error"),)


OPENED = e.IncidentOpened("I001", "crash", blame(0), "rank 0 raised")
UPDATED = e.IncidentUpdated("I001", blame(1), blame(0), "rank 1 raised")
CLOSED = e.IncidentClosed("I001", "recovered")
TAIL = StacksTaken("n1", "I001", 1, {}, {1: FULL})


@pytest.mark.parametrize("late", [False, True])
def test_the_first_causes_words_are_classified_when_the_incident_is_over(late: bool) -> None:
    causes = Causes()
    for record in (ended(0, EARLY), OPENED, ended(1, "an error without words")):
        assert causes.saw(record) == []
    assert late or causes.read(TAIL) == []
    assert causes.saw(UPDATED) == []
    found = causes.saw(CLOSED)
    if late:
        assert found == []  # unknown adds nothing
        found = causes.read(TAIL)
    (cause,) = found
    assert cause.verdict.culprits[0].cause == "disk-space" and cause.verdict.culprits[0].rank == 1
    assert causes.read(TAIL) == []  # said once


def test_what_is_unknown_or_of_another_incident_adds_nothing() -> None:
    causes = Causes()
    for record in (ended(1, FULL), OPENED, CLOSED):
        assert causes.saw(record) == []  # rank 0 is blamed, and wrote nothing
    assert causes.saw(e.IncidentOpened("I002", "crash", blame(1), "rank 1 raised")) == []
    assert causes.saw(e.IncidentClosed("I002", "recovered")) == []  # its words belonged to the one before
    assert causes.read(StacksTaken("n1", "I999", 1, {}, {1: FULL})) == []


def test_the_summary_names_the_class_and_says_what_to_do() -> None:
    causes, records = Causes(), [ended(1, FULL), OPENED, UPDATED, CLOSED]
    found = [cause for record in records for cause in causes.saw(record)]
    entries = [e.Entry(n, n, n, "demo", 1, record) for n, record in enumerate([*records, *found])]
    text = render(summarize(entries))
    assert "its log: disk-space (97% sure): OSError: [Errno 28] No space left on device" in text
    assert "to do: Free space" in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("hang", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"),  # that is the incident
        ("crash", "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:1"),  # too weak
        ("crash", "frobd: lane 4 lost sync"),
    ],
)
def test_words_that_explain_nothing_add_nothing(kind: str, words: str) -> None:
    causes = Causes()
    for record in (ended(1, words), e.IncidentOpened("I001", kind, blame(1), ""), CLOSED):
        assert causes.saw(record) == []


def test_a_slow_worker_that_dies_is_two_incidents_with_one_cause() -> None:
    """The slow one ends while the other is open; what ended the worker belongs to the other."""
    causes = Causes()
    causes.saw(e.IncidentOpened("S001", "slow", blame(1), "rank 1 is slow"))
    causes.saw(ended(1, FULL))
    assert causes.saw(e.IncidentClosed("S001", "the members changed")) == []
    causes.saw(e.IncidentOpened("I001", "crash", blame(1), "rank 1 raised"))
    (found,) = causes.saw(CLOSED)
    assert found.incident == "I001" and found.verdict.culprits[0].cause == "disk-space"
