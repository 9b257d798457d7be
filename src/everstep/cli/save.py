"""`everstep save [--run RUN]`: save the state of a running job to its checkpoints, after the step under way.

The wish is in the journal before the controller answers. What becomes of it is read from there: requested, then
durable. Exit code: 0 when it is on disk (with --no-wait: when the wish is journalled), FAILED when the save failed or
the job ended without it, USAGE when nobody can save, GONE and UNREACHABLE as `everstep status`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from everstep.cli import presence
from everstep.cli.asking import LATEST, ask, no_answer, running
from everstep.cli.presence import Address
from everstep.control.reading import Follower, late
from everstep.core import events as e
from everstep.core import wire
from everstep.core.errors import ExitCode, UsageError

LOOK_S = 0.05  # the journal is looked at this often


def save(*, run: Path = LATEST, wait: bool = True) -> int:
    """Save the state of a running job to its checkpoints, now; training goes on meanwhile.

    Args:
        run: the job's run folder (default: the newest one below ./everstep_runs).
        wait: return only when it is on disk.
    """
    address = running(run)
    answer = asyncio.run(ask(address, wire.SaveRequest()))
    if isinstance(answer, str):
        return no_answer(run, address, answer)
    if "refused" in answer:
        raise UsageError(str(answer["refused"]))
    if not wait:
        print("asked for a save after the next step")
        return ExitCode.OK
    return asyncio.run(_see_through(run, address, int(answer["asked"])))


async def _see_through(run: Path, address: Address, number: int) -> ExitCode:
    journal = run / "journal.jsonl"
    follower, asked, step = Follower(journal, late(journal), partial=True), False, -1
    while True:
        lives = presence.launcher_lives(run, address)  # before the look: its last words count
        for entry in follower.new():
            match entry.event:
                case e.SaveAsked(found):
                    asked = found >= number
                case e.SaveRequested(wanted) if asked and step < 0:
                    step = wanted
                    print(f"saving step {step}", flush=True)
                case e.SaveDurable(durable) if 0 <= step <= durable:
                    print(f"step {durable} is on disk", flush=True)
                    return ExitCode.OK
                case e.SaveFailed(failed, why) if asked and failed >= step:
                    print(f"the save of step {failed} failed: {why}", flush=True)
                    return ExitCode.FAILED
                case e.JobEnded(_, why):
                    print(f"the job has ended without it: {why}", flush=True)
                    return ExitCode.FAILED
        if lives is False:
            print("everstep: the job's launcher is gone, and the job with it", file=sys.stderr)
            return ExitCode.GONE
        await asyncio.sleep(LOOK_S)
