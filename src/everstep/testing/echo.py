"""A server on loopback that sends everything back: for tests of links and of what travels on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from everstep.control.transport import Link, Server, connect, listen
from everstep.core import wire

TOKEN = b"0123456789abcdef" * 4
LOCAL = "127.0.0.1"


def hello(node: str = "node0", job: str = "job") -> wire.Hello:
    return wire.Hello("agent", node, "inc", job)


class Echo:
    """A server that sends everything back, and remembers whom it met."""

    def __init__(self, **options: Any) -> None:
        self.listener = listen(LOCAL, 0)
        self.port: int = self.listener.getsockname()[1]
        self.links: dict[str, Link] = {}
        self.refused: list[str] = []
        self.server = Server(self.listener, TOKEN, "job", self.serve, term=7, on_refused=self.refused.append, **options)

    async def serve(self, link: Link, hello: wire.Hello) -> None:
        self.links[hello.node] = link
        async for message in link:
            link.send(message)

    def connect(self, node: str = "node0", **options: Any) -> Coroutine[Any, Any, Link]:
        return connect(LOCAL, self.port, TOKEN, hello(node), **options)


@contextlib.asynccontextmanager
async def echo(**options: Any) -> AsyncIterator[Echo]:
    served = Echo(**options)
    await served.server.start()
    try:
        yield served
    finally:
        await served.server.close()


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


async def works(served: Echo, node: str) -> None:
    """A client can come in and is answered."""
    link = await served.connect(node)
    link.send(wire.StopRequest(node))
    assert await anext(link) == wire.StopRequest(node)
    link.close()
