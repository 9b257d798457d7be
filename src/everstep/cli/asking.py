"""One question to a running job's controller, over the job's one transport and with its token, and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.cli.presence import Address
from everstep.control.tls import client_context
from everstep.control.token import read_token
from everstep.control.transport import connect
from everstep.core import wire
from everstep.core.errors import EverstepError

LATEST = Path("everstep_runs/latest")
ANSWER_S = 2.0  # the controller has this long for its answer


async def ask(address: Address, question: wire.Query | wire.DrainRequest) -> Mapping[str, Any] | str:
    """What the controller says; why not, when it does not answer."""
    hello = wire.Hello(role="cli", node="", incarnation="", job=address.job)
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            token, tls = read_token(Path(address.token_file)), client_context(address.tls_cert)
            link = await connect(address.host, address.port, token, hello, timeout_s=ANSWER_S, tls=tls)
            link.send(question)
            reply = await link.expect(wire.Reply)
            link.close()
    except (EverstepError, ConnectionError) as error:  # a token that cannot be read is no answer either
        return str(error)
    except TimeoutError:
        return f"the controller at {address.host}:{address.port} took the question and does not answer"
    return reply.payload
