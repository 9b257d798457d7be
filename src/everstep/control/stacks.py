"""Evidence from a node: the Python stacks of its workers, and the last lines of their logs.

A worker writes its stacks itself (faulthandler, on a real-time signal). One that is stopped by SIGSTOP is
woken for that moment only, and stopped again. Who cannot answer is described from /proc instead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from everstep.control import procfs
from everstep.control.crew import Crew, Worker
from everstep.control.output import last_lines
from everstep.core.types import StacksAsked, StacksTaken

WAIT_S = 0.4  # for a worker to write its stacks
POLL_S = 0.01  # between looks at the files
LOG_LINES = 30
MAX_TEXT = 64 * 1024  # of one worker's stacks: a message has a limit


async def take_stacks(crew: Crew, asked: StacksAsked, node: str) -> StacksTaken:
    """Stacks of these workers (all of the node when none is named), and the ends of their logs."""
    ranks = asked.local_ranks or tuple(crew.workers)
    before = {r: _size(crew.workers[r]) for r in ranks}
    stopped = [crew.workers[r] for r in ranks if _is_stopped(crew.workers[r])]
    writing = crew.ask_stacks(ranks)
    for worker in stopped:
        os.kill(worker.pid, signal.SIGCONT)
    deadline = time.monotonic() + WAIT_S
    while writing and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
        writing = [w for w in writing if not _written(w, before[w.local_rank])]
    for worker in stopped:
        if not worker.gone:
            os.kill(worker.pid, signal.SIGSTOP)
    stacks = {crew.workers[r].rank: _stack_text(crew.workers[r], before[r]) for r in ranks}
    tails = {crew.workers[r].rank: log_tail(crew.workers[r]) for r in ranks}
    return StacksTaken(node, asked.incident, asked.epoch, stacks, tails)


def log_tail(worker: Worker) -> str:
    """The last lines of its standard error, or of its output when that is empty."""
    return last_lines(worker.request.stderr, LOG_LINES) or last_lines(worker.request.stdout, LOG_LINES)


def _is_stopped(worker: Worker) -> bool:
    sample = procfs.sample(worker.pid) if worker.pid and not worker.gone else None
    return sample is not None and sample.state == "T"


def _size(worker: Worker) -> int:
    try:
        return os.stat(worker.request.stacks).st_size
    except FileNotFoundError:
        return 0


def _written(worker: Worker, before: int) -> bool:
    """Whether the dump looks whole: the main thread comes last and its text ends with a line feed."""
    if worker.gone:
        return True
    text = _read(worker, before)
    return "most recent call first" in text and text.endswith("\n")


def _stack_text(worker: Worker, before: int) -> str:
    if worker.gone:
        return ""
    text = _read(worker, before)
    return text or procfs.kernel_view(worker.pid)


def _read(worker: Worker, start: int) -> str:
    try:
        with Path(worker.request.stacks).open("rb") as file:
            file.seek(start)
            return file.read(MAX_TEXT).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
