"""Evidence from a node: the Python stacks of its workers, and the last lines of their logs.

A worker writes its stacks itself (faulthandler, on a real-time signal). One that is stopped by SIGSTOP does so
when it is killed (Worker.last_words): woken earlier it might make a step and look well. Who cannot answer is
described from /proc instead.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from everstep.control import procfs
from everstep.control.crew import Crew, Worker, file_size
from everstep.control.kernel import KernelLog
from everstep.control.output import last_lines
from everstep.core.types import StacksAsked, StacksTaken

WAIT_S = 0.4  # for a worker to write its stacks
POLL_S = 0.01  # between looks at the files
LOG_LINES = 30
MAX_TEXT = 64 * 1024  # of one worker's stacks: a message has a limit


async def take_stacks(crew: Crew, asked: StacksAsked, node: str, kernel: KernelLog) -> StacksTaken:
    """Stacks of these workers (all of the node when none is named), and the ends of their logs and the kernel's.

    For an incident that is known, the culprit's end is waited for, and all it wrote before counts; unless it goes on.
    """
    ranks = asked.local_ranks or tuple(crew.workers)
    ends = bool(asked.incident) and not asked.alive
    before = {r: 0 if ends else file_size(crew.workers[r].request.stacks) for r in ranks}
    waiting = [crew.workers[r] for r in ranks] if ends else crew.ask_stacks(ranks)
    deadline = time.monotonic() + WAIT_S
    while waiting and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
        waiting = [w for w in waiting if not (w.gone if ends else written(w, before[w.local_rank]))]
    stacks = {crew.workers[r].rank: _stack_text(crew.workers[r], 0 if asked.incident else before[r]) for r in ranks}
    tails = {crew.workers[r].rank: log_tail(crew.workers[r]) for r in ranks}
    said = kernel.known(node, {worker.pid for worker in crew.workers.values()}) if asked.incident else ""
    tails |= {-1: said} if said else {}
    return StacksTaken(node, asked.incident, asked.epoch, {r: t for r, t in stacks.items() if t}, tails)


def log_tail(worker: Worker) -> str:
    """The last lines of its standard error, or of its output when that is empty."""
    return last_lines(worker.request.stderr, LOG_LINES) or last_lines(worker.request.stdout, LOG_LINES)


def written(worker: Worker, before: int) -> bool:
    """Whether the dump looks whole: the main thread comes last and its text ends with a line feed."""
    if worker.gone:
        return True
    text = text_from(worker, before)
    return "most recent call first" in text and text.endswith("\n")


def _stack_text(worker: Worker, before: int) -> str:
    text = text_from(worker, before or worker.looked_bytes)
    return text or ("" if worker.gone else procfs.kernel_view(worker.pid))


def text_from(worker: Worker, start: int) -> str:
    """What it wrote from there on; of very much the end, which is the newest, and where the main thread is."""
    try:
        with Path(worker.request.stacks).open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - MAX_TEXT))
            return file.read(MAX_TEXT).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
