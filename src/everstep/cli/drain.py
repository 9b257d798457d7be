"""`everstep drain TARGET [--run RUN]`: take a node, or one worker, out of a running job; the others go on.

The controller journals the wish before it answers, so neither its death nor this command's ends it. What becomes of it
is read from the journal, whoever the controller is by then. Exit code: 0 when the target has left (with --no-wait: the
wish is journalled), FAILED when the job failed meanwhile, USAGE when the target is unknown or must stay, GONE and
UNREACHABLE as `everstep status`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from everstep.cli import presence
from everstep.cli.asking import LATEST, ask, no_answer, running
from everstep.cli.presence import Address
from everstep.control.journal import Follower
from everstep.core import wire
from everstep.core.errors import ExitCode, UsageError
from everstep.observe.leaving import Leaving

LOOK_S = 0.1  # the journal is looked at this often
PATIENCE_S = 5.0  # without news, then a line says that it still waits


def drain(target: str, *, run: Path = LATEST, wait: bool = True, undo: bool = False) -> int:
    """Take a node or a worker out of a running job, between two steps; the others go on.

    Args:
        target: a node's name, a worker's rank, or node/local_rank.
        run: the job's run folder (default: the newest one below ./everstep_runs).
        wait: return only when the target has left.
        undo: the place of a worker that was drained is to be filled again.
    """
    address = running(run)
    answer = asyncio.run(ask(address, wire.DrainRequest(target, undo)))
    if isinstance(answer, str):
        return no_answer(run, address, answer)
    if "refused" in answer:
        raise UsageError(str(answer["refused"]))
    name = str(answer["target"])
    if undo or not wait:
        print(f"{name} {'is to be filled again' if undo else 'is asked to leave'}")
        return ExitCode.OK
    return asyncio.run(_see_out(run, address, Leaving(name)))


async def _see_out(run: Path, address: Address, leaving: Leaving) -> ExitCode:
    """Tell what the journal tells until the target has left, or the job has ended."""
    follower, began = Follower(run / "journal.jsonl", partial=True), time.monotonic()
    due = began + PATIENCE_S
    while True:
        lives = presence.launcher_lives(run, address)  # before the look: its last words count
        news = [text for text in (leaving.saw(entry.event) for entry in follower.new()) if text]
        for text in news:
            print(text, flush=True)
        if leaving.gone:
            return ExitCode.OK
        if leaving.ended is not None:
            print(f"the job has ended: {leaving.ended.why}", flush=True)
            return ExitCode.FAILED if leaving.ended.exit_code else ExitCode.OK
        if lives is False:
            print("everstep: the job's launcher is gone, and the job with it", file=sys.stderr)
            return ExitCode.GONE
        if news:
            due = time.monotonic() + PATIENCE_S
        elif time.monotonic() > due:
            due += PATIENCE_S
            at = f", the job is at step {leaving.step}" if leaving.step >= 0 else ""
            print(f"still waiting for {leaving.target} ({time.monotonic() - began:.0f} s{at})", flush=True)
        await asyncio.sleep(LOOK_S)
