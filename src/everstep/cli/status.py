"""`everstep status [RUN]`: how a job is doing, from its journal and, while it runs, from its controller.

Exit code: 0 when the controller answers or the journal has the job's end, GONE when nobody answers and the launcher is
gone, UNREACHABLE when nobody answers and the launcher lives, or cannot be seen from here.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from everstep.cli import presence
from everstep.cli.asking import LATEST, ask
from everstep.cli.viewing import summary_of
from everstep.core import wire
from everstep.core.errors import ExitCode
from everstep.observe.status import Quiet, read_live, render_status


def status(run: Path = LATEST) -> int:
    """Show the state of a job: RUN is its run folder (default: the newest one below ./everstep_runs) or a journal."""
    summary, _ = summary_of(run)
    if summary.ended:
        return _show(render_status(summary, None), ExitCode.OK)
    address = presence.read(run) if run.is_dir() else None
    answer = asyncio.run(ask(address, wire.Query())) if address else "its run folder has no controller.json"
    if not isinstance(answer, str):  # the journal's newest entry may be old
        summary.wall_s = max(summary.wall_s, time.time() - summary.submitted_wall_s)
        return _show(render_status(summary, read_live(answer)), ExitCode.OK)
    lives = presence.launcher_lives(run, address) if address else None
    summary, last_wall_s = summary_of(run, again=True)  # again: the job may have ended while it was asked
    if summary.ended:
        return _show(render_status(summary, None), ExitCode.OK)
    age_s = max(0.0, time.time() - last_wall_s) if last_wall_s else -1.0
    quiet = Quiet(answer, lives, address.machine if address else "", age_s)
    return _show(render_status(summary, None, quiet), ExitCode.GONE if lives is False else ExitCode.UNREACHABLE)


def _show(text: str, code: ExitCode) -> ExitCode:
    print(text, end="")
    return code
