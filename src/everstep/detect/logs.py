"""The log detector: lines of several workers and of their nodes' kernels -> the first cause, with the line as proof.

A failure speaks many times: the one that broke, and everybody who waited for it, often first. So what counts is
what a line is about (signatures.Depth), then the time, then the order. An error after which its worker went on
training is no cause. What no signature knows stays unknown: no class is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from everstep.core.types import Blame, Verdict
from everstep.detect.signatures import SIGNATURES, Cause, Depth

MAX_LINE = 1000  # characters of a line that are looked at; a progress bar may write megabytes without an end
SHOWN = 240  # of the line that is quoted as evidence
WENT_ON = 2  # lines of progress after an error: its worker survived it
AGREED = 0.3  # what another worker's line of the same cause takes of the remaining doubt
SURVIVED = 0.5  # of the confidence in an error that its worker outlived, where nothing else is known

PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch|it)\b[\s=:\[]*\d+.*\b(?:loss|lr|tokens?|ms|it/s|s/it)\b", re.IGNORECASE
)
TRACEBACK = "Traceback (most recent call last)"
FRAME = re.compile(r'^\s*File "([^"]+)", line \d+')
RAISED = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit)\b")
INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")
PREFIX = re.compile(r"^(?:\s*\[?(?:rank|default)?\d*\]?:\s+)?")  # what launchers put before each line

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_CLOCK = r"(\d{1,2}):(\d{2}):(\d{2}(?:[.,]\d+)?)"
_DATES = (
    re.compile(rf"\d{{4}}-(?P<m>\d{{2}})-(?P<d>\d{{2}})[T ]{_CLOCK}"),  # ISO
    re.compile(rf"\b(?P<name>[A-Z][a-z]{{2}}) +(?P<d>\d{{1,2}}) {_CLOCK}"),  # syslog, dmesg -T
    re.compile(rf"\[?[IWEF] ?(?P<m>\d{{1,2}})(?P<d>\d{{2}}) {_CLOCK}"),  # glog, torch
    re.compile(rf"^\W*{_CLOCK}"),  # a clock without a date
)


class WorkerLog(msgspec.Struct, frozen=True):
    """Lines of one worker, or with rank -1 of a node: its kernel, its launcher, its container runtime."""

    rank: int
    node: str
    text: str


class Sign(msgspec.Struct, frozen=True):
    """One line with a known meaning. `at_s`: seconds within the year by its own clock, infinite without one."""

    cause: Cause
    depth: Depth
    confidence: float
    rank: int
    node: str
    line: str
    at_s: float
    order: int  # of the line over all logs
    survived: bool = False


def classify(logs: Sequence[WorkerLog]) -> Verdict:
    """The first cause over all logs. Its Blame has the class as cause and the line as detail; no Blame: unknown."""
    found = signs(logs)
    if not found:
        return Verdict("log", (), "unknown: no line has a known meaning", 0.0)
    first = min(found, key=_precedence)
    confidence = first.confidence * (SURVIVED if first.survived else 1.0)
    others = {(s.rank, s.node) for s in found if s.cause is first.cause and s is not first} - {(first.rank, first.node)}
    doubt = (1 - confidence) * (1 - AGREED) ** len(others)
    where = f"rank {first.rank} on {first.node}" if first.rank >= 0 else first.node
    blame = Blame(first.rank, first.node, first.cause.value, first.line)
    return Verdict("log", (blame,), f"{first.cause.value}: {where} wrote {first.line!r}", round(1 - doubt, 4))


def cause_of(verdict: Verdict) -> Cause:
    """The class of a verdict of `classify`."""
    return Cause(verdict.culprits[0].cause) if verdict.culprits else Cause.UNKNOWN


def signs(logs: Sequence[WorkerLog]) -> tuple[Sign, ...]:
    """Every line that means something, in the order of the logs."""
    found: list[Sign] = []
    order = 0
    for log in logs:
        lines = log.text.splitlines()
        found.extend(_of_one(log, lines, order))
        order += len(lines)
    return tuple(found)


def _precedence(sign: Sign) -> tuple[bool, Depth, float, int]:
    return sign.survived, sign.depth, sign.at_s, sign.order


def _of_one(log: WorkerLog, lines: Sequence[str], order: int) -> Iterator[Sign]:
    at_s = float("inf")
    went_on = _progress_after(lines) if log.rank >= 0 else [0] * len(lines)  # a kernel's error is not outlived
    raised = _raised_by_script(lines)
    for number, line in enumerate(lines):
        line = PREFIX.sub("", line[:MAX_LINE], count=1)
        at_s = moment(line) or at_s
        meaning = None if _is_source(lines, number) else _meaning(line) or raised.get(number)
        if meaning is not None:
            cause, depth, confidence = meaning
            shown, survived = line.strip()[:SHOWN], went_on[number] >= WENT_ON
            yield Sign(cause, depth, confidence, log.rank, log.node, shown, at_s, order + number, survived)


def _meaning(line: str) -> tuple[Cause, Depth, float] | None:
    for signature in SIGNATURES:
        if signature.pattern.search(line):
            return signature.cause, signature.depth, signature.confidence
    return None


def _is_source(lines: Sequence[str], number: int) -> bool:
    """Whether a traceback quotes the script here: that is no message, whatever it names."""
    frame, line = (PREFIX.sub("", x[:MAX_LINE], count=1) for x in (lines[max(0, number - 1)], lines[number]))
    return number > 0 and line[:1].isspace() and FRAME.match(frame) is not None


def _progress_after(lines: Sequence[str]) -> list[int]:
    """For each line, how many lines after it tell of a step."""
    counts, seen = [], 0
    for line in reversed(lines):
        counts.append(seen)
        seen += PROGRESS.search(line[:MAX_LINE]) is not None
    return counts[::-1]


def _raised_by_script(lines: Sequence[str]) -> dict[int, tuple[Cause, Depth, float]]:
    """Exceptions without a known wording which the script itself raised: its own error, though less sure."""
    found = {}
    inside, innermost = False, ""
    for number, raw in enumerate(lines):
        line = PREFIX.sub("", raw[:MAX_LINE], count=1)
        frame = FRAME.match(line)
        if TRACEBACK in line:
            inside, innermost = True, ""
        elif inside and frame:
            innermost = frame.group(1)
        elif inside and RAISED.match(line):
            if innermost and not any(part in innermost for part in INSTALLED):
                found[number] = (Cause.CODE, Depth.GENERAL, 0.6)
            inside = False
    return found


def moment(line: str) -> float | None:
    """Seconds within a year of 31-day months, by the clock that the line begins with; None when it shows none."""
    for pattern in _DATES:
        match = pattern.search(line[:120])
        if match is not None:
            named = match.groupdict()
            month = _MONTHS.index(named["name"].lower()) if named.get("name", "").lower() in _MONTHS else 0
            month = int(named["m"]) - 1 if named.get("m") else month
            hour, minute, second = match.groups()[-3:]
            days = month * 31 + int(named.get("d") or 0)
            return days * 86400 + int(hour) * 3600 + int(minute) * 60 + float(second.replace(",", "."))
    return None
