"""What a person asked to see of a node's workers: their stacks now, or where they spend the next seconds.

Nobody is disturbed for it: one that is stopped is not woken, and is described from /proc instead. Where nothing can be
sampled (its main thread is in C code for long, or another keeps the interpreter's lock) the stacks are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

import msgspec

from everstep.control import procfs
from everstep.control.crew import Crew, Worker, file_size
from everstep.control.stacks import text_from, written
from everstep.core.page import SAMPLE_SIGNAL, STACKS_SIGNAL, Word
from everstep.core.sampled import Sampled
from everstep.core.types import StacksAsked, StacksTaken
from everstep.detect.stacks import MORE_THREADS

STACKS_S = 2.0  # a worker has this long to write its stacks, on a machine with much to do
SLACK_S = 2.0  # and this much longer than it was to sample, to begin and to write
POLL_S = 0.02
MAX_BYTES = 4 << 20  # of what one worker sampled


async def look_at(crew: Crew, asked: StacksAsked, node: str) -> StacksTaken:
    """Everything that can be had of these workers, and why not what cannot."""
    stacks: dict[int, str] = {}
    notes: dict[int, str] = {}
    sampled: dict[int, Sampled] = {}

    async def look(local_rank: int) -> None:
        worker = crew.workers.get(local_rank)
        rank = crew.plan.rank(node, local_rank)
        found = await _sampled(worker, asked) if worker and asked.seconds else ""
        if isinstance(found, Sampled):
            sampled[rank] = found
            return
        text, note = await _stacks(worker)
        stacks[rank] = text
        if found or note:
            notes[rank] = "; ".join(part for part in (found, note) if part)

    await asyncio.gather(*map(look, asked.local_ranks))
    return StacksTaken(node, "", asked.epoch, stacks, look=asked.look, notes=notes, sampled=sampled)


async def _stacks(worker: Worker | None) -> tuple[str, str]:
    """Of all its threads; and why it is something else."""
    if worker is None or worker.gone or not worker.pid:
        return "", "no process is in its place just now"
    why = _deaf(worker, STACKS_SIGNAL)
    if not why:
        text = await _dumped(worker)
        if text:
            return f"process {worker.pid}\n{text}", _lacks(text)
        why = "it wrote no stacks: its process has just ended" if worker.gone else f"wrote no stacks in {STACKS_S:g} s"
    return procfs.kernel_view(worker.pid), why


def _lacks(text: str) -> str:
    """What these stacks do not show, and how to see it."""
    if not text.endswith(f"\n{MORE_THREADS}\n"):
        return ""
    return "it has more threads than are written, and the oldest are left out, the main one too: its profile shows that"


async def _dumped(worker: Worker) -> str:
    before = file_size(worker.request.stacks)
    _signal(worker, STACKS_SIGNAL)
    deadline = time.monotonic() + STACKS_S
    while not written(worker, before) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    text = text_from(worker, before)
    worker.looked_bytes = file_size(worker.request.stacks)
    return text


async def _sampled(worker: Worker, asked: StacksAsked) -> Sampled | str:
    """What its sampler wrote, or why there is nothing."""
    if worker.gone or not worker.pid or worker.page is None or _deaf(worker, SAMPLE_SIGNAL):
        return ""  # the stacks say so
    now_ns, until_ns = time.monotonic_ns(), worker.word(Word.SAMPLE_UNTIL_NS)
    if until_ns > now_ns:
        return f"it is being sampled for {(until_ns - now_ns) / 1e9:.0f} s more: ask then"
    path = Path(f"{worker.request.stacks}.sampled")
    path.unlink(missing_ok=True)
    worker.page[Word.SAMPLE_THREADS] = int(asked.threads)
    worker.page[Word.SAMPLE_UNTIL_NS] = now_ns + int(asked.seconds * 1e9)
    _signal(worker, SAMPLE_SIGNAL)
    deadline = time.monotonic() + asked.seconds + SLACK_S
    while not path.exists() and not worker.gone and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    if path.exists():
        return _read(path)
    if worker.gone:
        return "its process ended meanwhile"
    return f"no sample in {asked.seconds:g} s: its main thread was in C code all the time, or Python's lock was kept"


def _read(path: Path) -> Sampled | str:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    path.unlink()
    try:
        return msgspec.json.decode(data, type=Sampled)
    except msgspec.DecodeError as error:
        return f"what it sampled cannot be read: {error}"


def _deaf(worker: Worker, signum: int) -> str:
    """Why it is not signalled; empty: it can be."""
    sample = procfs.sample(worker.pid)
    if sample is None or not sample.alive:
        return "its process has just ended"
    if sample.stopped:
        return f"it is stopped (state {sample.state}), and is not woken for this: what the kernel tells of it"
    if not worker.word(Word.READY_NS) or not procfs.catches(worker.pid, signum):
        return "it runs no Python script yet, or none at all: what the kernel tells of it"
    return ""


def _signal(worker: Worker, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended: the reaper tells
        os.kill(worker.pid, signum)
