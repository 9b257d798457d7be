"""The log classifier on made-up logs with real wording: data/logs/train.toml, from which the signatures were written,
and data/logs/test.toml, which was written before them (by the same author: it shows that the rules generalise over
wording he knows, not that they know all wording)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.detect.logs import MAX_LINE, WorkerLog, cause_of, classify, moment
from everstep.detect.signatures import Cause

FOLDER = Path(__file__).parent / "data" / "logs"
BAR = 0.95
NOISE = """2026-03-01 00:00:00 INFO everstep worker starts, NCCL version 2.27.5, errors go to stderr
2026-03-01 00:00:01 WARNING: the option nan_policy is deprecated, timeout=600, on_error=raise
/opt/v/lib/python3.12/site-packages/torch/utils/data/dataloader.py:617: UserWarning: too many workers
"""


class Case(msgspec.Struct, frozen=True):
    name: str
    cause: Cause
    log: tuple[WorkerLog, ...]
    who: int | None = None  # rank that is to be named
    node: str | None = None


def load(half: str) -> list[Case]:
    tables: list[Any] = tomllib.loads((FOLDER / f"{half}.toml").read_text(encoding="utf-8"))["case"]
    return msgspec.convert(tables, list[Case])


def wrong(case: Case, logs: list[WorkerLog]) -> str:
    """What is wrong with the verdict; empty: nothing."""
    verdict = classify(logs)
    if cause_of(verdict) is not case.cause:
        return f"{case.name}: {case.cause.value}, but it says {verdict.why}"
    blamed = verdict.culprits[0] if verdict.culprits else None
    if case.who is not None and (blamed is None or blamed.rank != case.who):
        return f"{case.name}: rank {case.who}, but it names {blamed}"
    if case.node is not None and (blamed is None or blamed.node != case.node):
        return f"{case.name}: {case.node}, but it names {blamed}"
    return ""


@pytest.mark.parametrize("half", ["test", "train"])
def test_classes_and_culprits(half: str) -> None:
    cases = load(half)
    misses = [text for case in cases if (text := wrong(case, list(case.log)))]
    assert len(cases) >= 50 and len(misses) <= (1 - BAR) * len(cases), "\n".join(misses)


def test_the_halves_are_different_and_hold_every_class() -> None:
    test, train = load("test"), load("train")
    lines = {line.strip() for case in train for log in case.log for line in log.text.splitlines()}
    shared = {line.strip() for case in test for log in case.log for line in log.text.splitlines()} & lines
    assert all(not line or line.startswith("Traceback") for line in shared), shared
    assert {case.cause for case in test} == {case.cause for case in train} == set(Cause)


@pytest.mark.parametrize("half", ["test", "train"])
def test_noise_and_the_order_of_files_change_nothing(half: str) -> None:
    for case in load(half):
        before = classify(case.log)
        noisy = [WorkerLog(log.rank, log.node, NOISE + log.text + "\n\n# end of log\n") for log in case.log]
        after = classify(noisy[::-1])
        assert cause_of(after) is cause_of(before), (case.name, before.why, after.why)


def test_what_hardware_says_later_explains_what_peers_said_first() -> None:
    watchdog = (
        "[rank3]:[E302 04:00:02.1 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: x"
    )
    kernel = "Mar  2 04:00:09 node1 kernel: NVRM: Xid (PCI:0000:9d:00): 79, pid=1, GPU has fallen off the bus."
    verdict = classify([WorkerLog(3, "node0", watchdog), WorkerLog(5, "node1", kernel)])
    (blame,) = verdict.culprits
    assert (blame.rank, blame.node, blame.cause, blame.detail) == (5, "node1", "device-lost", kernel)
    assert verdict.confidence > 0.9 and "node1" in verdict.why and "fallen off" in verdict.why
    alone = classify([WorkerLog(3, "node0", watchdog)])
    assert cause_of(alone) is Cause.HANG and alone.confidence < 0.7


def test_time_decides_among_equals_and_others_of_the_same_cause_agree() -> None:
    late = WorkerLog(0, "n", "10:00:05 OSError: [Errno 28] No space left on device")
    early = WorkerLog(1, "n", "10:00:04 OSError: [Errno 28] No space left on device")
    both, one = classify([late, early]), classify([early])
    assert both.culprits[0].rank == 1 and both.confidence > one.confidence


def test_an_error_that_was_outlived_is_no_cause_unless_nothing_else_is_known() -> None:
    error = "ERROR upload: [Errno 28] No space left on device\n"
    steps = "".join(f"step {n} | loss 2.{n}\n" for n in range(3))
    outlived, last = classify([WorkerLog(0, "n", error + steps)]), classify([WorkerLog(0, "n", error)])
    assert outlived.confidence < 0.5 < last.confidence
    later = classify([WorkerLog(0, "n", error + steps + "NameError: name 'x' is not defined")])
    assert cause_of(later) is Cause.CODE
    kernel = WorkerLog(-1, "n", "kernel: NVRM: Xid (PCI:0000:9d:00): 48, pid=1\n" + steps)
    assert classify([kernel]).confidence > 0.9  # the machine's faults are not outlived by what else is in that log


def test_a_scripts_own_exception_and_a_line_of_source() -> None:
    own = (
        "Traceback (most recent call last):\n"
        '  File "/w/train.py", line 7, in <module>\n'
        '    raise PermissionError("read me")  # never FileNotFoundError\n'
        "{}\n"
    )
    assert cause_of(classify([WorkerLog(0, "n", own.format("shop.WidgetError: no widgets"))])) is Cause.CODE
    foreign = own.format("shop.WidgetError: no widgets").replace("/w/train.py", "/v/site-packages/shop/api.py")
    verdict = classify([WorkerLog(0, "n", foreign)])
    assert verdict.culprits == () and verdict.confidence == 0.0 and verdict.why.startswith("unknown")


@pytest.mark.parametrize(
    ("line", "expected_s"),
    [
        ("2026-03-02 11:04:51,250 INFO x", 64 * 86400 + 11 * 3600 + 4 * 60 + 51.25),
        ("Mar  2 11:04:51 host kernel: x", 64 * 86400 + 11 * 3600 + 4 * 60 + 51),
        ("[Mon Mar  2 11:04:51 2026] x", 64 * 86400 + 11 * 3600 + 4 * 60 + 51),
        ("[rank3]:[E302 11:04:51.5 ProcessGroupNCCL.cpp:1] x", 64 * 86400 + 11 * 3600 + 4 * 60 + 51.5),
        ("11:04:51 x", 11 * 3600 + 4 * 60 + 51),
        ("[ 812.1] watchdog", None),
        ("a ratio of 3:04", None),
    ],
)
def test_clocks(line: str, expected_s: float | None) -> None:
    assert moment(line) == expected_s


def test_an_endless_line_is_not_read_to_its_end() -> None:
    endless = "xfs " * MAX_LINE
    assert cause_of(classify([WorkerLog(0, "n", f"{endless}MemoryError\nMemoryError")])) is Cause.HOST_MEMORY
    assert cause_of(classify([WorkerLog(0, "n", f"{endless}MemoryError")])) is Cause.UNKNOWN
