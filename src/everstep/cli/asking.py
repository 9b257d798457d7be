"""One question to a running job's controller, over the job's one transport and with its token, and the answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.cli import presence
from everstep.cli.presence import Address
from everstep.control.journal import ended
from everstep.control.tls import client_context
from everstep.control.token import read_token
from everstep.control.transport import connect
from everstep.core import wire
from everstep.core.errors import EverstepError, ExitCode, Unreachable, UsageError

LATEST = Path("everstep_runs/latest")
ANSWER_S = 2.0  # the controller has this long for its answer
LOOK_S = 8.0  # and this much longer where it has to ask the workers' agents


async def ask(address: Address, *questions: wire.Message, answer_s: float = ANSWER_S) -> Mapping[str, Any] | str:
    """What the controller answers to one of these, the only one that has an answer; why not, when it does not."""
    hello = wire.Hello(role="cli", node="", incarnation="", job=address.job)
    try:
        async with asyncio.timeout(ANSWER_S + answer_s):
            token, tls = read_token(Path(address.token_file)), client_context(address.tls_cert)
            link = await connect(address.host, address.port, token, hello, timeout_s=ANSWER_S, tls=tls)
            for question in questions:
                link.send(question)
            reply = await link.expect(wire.Reply)
            link.close()
    except (EverstepError, ConnectionError) as error:  # a token that cannot be read is no answer either
        return str(error)
    except TimeoutError:
        return f"the controller at {address.host}:{address.port} took the question and does not answer"
    return reply.payload


def running(run: Path) -> Address:
    """Where the job's controller is. Raises UsageError when the job cannot be running."""
    journal = run / "journal.jsonl"
    if not journal.exists():
        raise UsageError(f"no journal in {run}: --run takes the run folder that `everstep run` printed")
    end = ended(journal)
    if end is not None:
        raise UsageError(f"the job in {run} has ended (exit code {end.exit_code})")
    address = presence.read(run)
    if address is None:
        raise UsageError(f"no {presence.NAME} in {run}: it is a copy, and does not tell where the job's controller is")
    return address


def no_answer(run: Path, address: Address, why: str) -> ExitCode:
    if presence.launcher_lives(run, address) is False:
        print(f"everstep: the job's launcher is gone, and the job with it: {why}", file=sys.stderr)
        return ExitCode.GONE
    raise Unreachable(f"nobody was asked: {why}; a dead controller is started again, so try again soon")
