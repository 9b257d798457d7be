"""`everstep status [RUN]`: how a job is doing, from its journal and, while it runs, from its controller."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from everstep.control.journal import read
from everstep.control.tls import client_context
from everstep.control.token import read_token
from everstep.control.transport import connect
from everstep.core import wire
from everstep.core.errors import Unreachable, UsageError
from everstep.observe.status import Live, read_live, render_status
from everstep.observe.summary import summarize

LATEST = Path("everstep_runs/latest")


class Address(msgspec.Struct):
    """controller.json of a run folder."""

    host: str
    port: int
    job: str
    token_file: str
    tls_cert: str


def status(run: Path = LATEST) -> int:
    """Show the state of a job: RUN is its run folder (default: the newest one below ./everstep_runs)."""
    journal = run / "journal.jsonl"
    if not journal.exists():
        raise UsageError(f"no journal in {run}: give the run folder that `everstep run` printed, or start a job first")
    summary = summarize(read(journal))
    live = None if summary.ended else asyncio.run(_ask(run))
    if live is not None:  # the journal's newest entry may be old
        summary.wall_s = max(summary.wall_s, time.time() - summary.submitted_wall_s)
    print(render_status(summary, live))
    return 0


async def _ask(run: Path) -> Live | None:
    """What the controller says; None when it does not answer (the journal alone must do)."""
    address = msgspec.json.decode((run / "controller.json").read_bytes(), type=Address)
    hello = wire.Hello(role="cli", node="", incarnation="", job=address.job)
    try:
        token, tls = read_token(Path(address.token_file)), client_context(address.tls_cert)
        link = await connect(address.host, address.port, token, hello, timeout_s=2.0, tls=tls)
        link.send(wire.Query())
        reply = await link.expect(wire.Reply)
    except (Unreachable, ConnectionError) as error:
        print(f"everstep: the controller does not answer ({error}); from the journal alone:")
        return None
    link.close()
    return read_live(reply.payload)
