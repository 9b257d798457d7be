"""What people read: the end-of-run summary, the sentences of incidents, and the status of a running job."""

from __future__ import annotations

import io

import msgspec
import pytest

from everstep.core import events as e
from everstep.core.types import Blame, EpochPlan, Member, Phase, WorkerProgress
from everstep.observe.status import SHOWN_WORKERS, Live, Quiet, read_live, render_status
from everstep.observe.summary import IncidentSummary, Summary, summarize
from everstep.observe.text import advise, duration, facts, render, show, who


def test_summary_says_what_a_person_needs(journal: list[e.Entry]) -> None:
    text = render(summarize(journal))
    for part in (
        "job demo finished: every worker ran to its end",
        "train_gpt.py",
        "140 made, 20 of them redone, 250 ms each (median); the job is at step 120",
        "at step 70",
        "3 (2 restarts)",
        "4.4 s in 2 incidents",
        "rank 2 on node1 was killed by signal 9 (sent from outside) at step 40",
        "collateral: ranks 0, 1 and 3 failed as a consequence",
        "recovered after 1.1 s without a step (detect 100 ms, stop 100 ms, form 50 ms, first-step 900 ms)",
        "Look for who sends signals on node1",
        "Read where it hangs in incidents/I002/rank1-stacks.txt",
    ):
        assert part in text
    assert "\x1b" not in text and text.endswith("\n")


def test_summary_of_nothing_has_no_numbers_it_cannot_know() -> None:
    text = render(Summary(job="j"))
    assert "none seen" in text and "ETTR" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_show_is_plain_in_a_file_and_says_the_same_on_a_terminal(
    journal: list[e.Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    summary = summarize(journal)
    file, terminal = io.StringIO(), Terminal()
    show(summary, file)
    show(summary, terminal)
    assert file.getvalue() == render(summary)
    bare = terminal.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert bare == render(summary) and "\x1b[1m" in terminal.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "-"),
        (0.0124, "12 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (11220, "3 h 07 min"),
        (172799, "2 d 0 h"),
        (2606400, "30 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_who() -> None:
    ranks = [Blame(r, "node1", "error") for r in range(12)]
    assert who(ranks[2:3]) == "rank 2 on node1"
    assert who(ranks[:3]) == "ranks 0, 1 and 2"
    assert who(ranks) == "ranks 0, 1, 2, 3, 4, 5, 6 and 5 more"
    assert who([Blame(-1, "node7", "node lost: silent")]) == "node7"
    assert who([Blame(-1, "", "hang")]) == "no single worker"


@pytest.mark.parametrize(
    ("kind", "cause", "part"),
    [
        ("crash", "out-of-memory", "fewer loader workers"),
        ("crash", "error", "rank3-log.txt"),
        ("hang", "hang", "rank3-stacks.txt"),
        ("hang", "stopped", "SIGSTOP"),
        ("slow", "slow-data", "rank3-stacks.txt. Look at node1"),
        ("node-lost", "node lost: closed", "Check node1"),
        ("stop", "", ""),
    ],
)
def test_advice_names_what_to_look_at(kind: str, cause: str, part: str) -> None:
    files = ("incidents/I001/rank3-log.txt", "incidents/I001/rank3-stacks.txt")
    incident = IncidentSummary("I001", kind, 1, 1.0, (Blame(3, "node1", cause),), "why", files=files)
    advice = advise(incident)
    assert part in advice and bool(advice) == bool(part)


def live(workers: int, **fields: object) -> Live:
    made = {
        str(r): WorkerProgress(r, 0, 50, 90, Phase.TRAIN, 1.0, 0.2, 0.1, 9.0, rss_bytes=300 << 20, cpu_s=12.0)
        for r in range(workers)
    }
    plan = EpochPlan(3, (Member("node0", "a", "h", 0, 0, workers),), workers, "h", 1, 0)
    return Live("running", 3, 1, 2, {"node0": "running"}, plan, made, **fields)  # type: ignore[arg-type]


def test_status_shows_live_workers(journal: list[e.Entry]) -> None:
    now = live(4)
    stopped = msgspec.structs.replace(now.workers["2"], stopped=True, step=49)
    now.workers["2"] = stopped
    answer = {**msgspec.to_builtins(now), "now_s": 5.0, "incident": None}
    answer = msgspec.json.decode(msgspec.json.encode(answer))
    text = render_status(summarize(journal[:-2]), read_live(answer))
    assert "job demo: running, epoch 3" in text
    lines = [line for line in text.splitlines() if "node0" in line and "train" in line]
    assert len(lines) == 4 and "90" in lines[0] and "300 MiB" in lines[0] and lines[2].endswith("STOPPED")


def test_status_marks_who_is_slow_now(journal: list[e.Entry]) -> None:
    now, summary = live(3), summarize(journal[:-2])
    slow = [IncidentSummary(f"S00{r}", "slow", 3, 1.0, (Blame(r, "node0", "slow-data"),), "why") for r in (1, 2)]
    slow[1].outcome = "well again"
    summary.incidents += slow
    lines = [
        line.split()[-1] for line in render_status(summary, now).splitlines() if "node0" in line and "train" in line
    ]
    assert [last == "SLOW" for last in lines] == [False, True, False]


@pytest.mark.parametrize(
    ("lives", "machine", "parts"),
    [
        (
            False,
            "h1",
            ("demo: ended without a word (killed?), last event 12.0 s ago, while forming", "launcher on h1 is"),
        ),
        (True, "h1", ("demo: no controller answers, last event 12.0 s ago, while forming", "launcher on h1 lives")),
        (None, "h1", ("demo: nobody answers, last event 12.0 s ago", "cannot be told from here: ask on h1, where it")),
        (None, "", ("demo: nobody answers, last event 12.0 s ago", "ask on the machine where it was started")),
    ],
)
def test_status_without_an_answer_says_what_is_known(
    journal: list[e.Entry], lives: bool | None, machine: str, parts: tuple[str, ...]
) -> None:
    text = render_status(summarize(journal[:-2]), None, Quiet("refused", lives, machine, 12.0))
    assert all(part in text for part in (*parts, "no answer: refused", "140 made"))
    assert ("ended" in text.splitlines()[0]) == (lives is False)


def test_status_of_a_job_that_has_ended_needs_no_answer(journal: list[e.Entry]) -> None:
    assert render_status(summarize(journal), None).startswith("job demo finished: every worker ran to its end\n")


def test_status_of_many_workers_shows_those_that_lag() -> None:
    now = live(200)
    now.workers["150"] = msgspec.structs.replace(now.workers["150"], step=7, total_step=7)
    text = render_status(Summary(job="big"), now)
    assert "\n  150 " in text and f"and {200 - SHOWN_WORKERS} more" in text


def test_a_job_that_made_no_step_stood_still_all_the_time() -> None:
    assert ("downtime", "no step was made, 3 incidents") in facts(Summary(num_incidents=3))
    assert ("downtime", "1.5 s in 1 incident") in facts(Summary(num_incidents=1, downtime_s=1.5, steps=4))
