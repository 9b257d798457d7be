"""A dashboard in the test's own process, over a real socket, and clients that send bytes as they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from everstep.control import transport
from everstep.control.journal import Journal
from everstep.core import events as e
from everstep.core.types import JobSpec
from everstep.dashboard import app, serve
from everstep.dashboard.control import Commands
from everstep.dashboard.guard import Guard
from everstep.dashboard.notes import Notes
from everstep.dashboard.source import Desk, Past, Source
from everstep.dashboard.stream import Stream

JOB = "j1"
TOKEN = "0123456789abcdef" * 4
PATIENCE_S = 20.0


class Got(NamedTuple):
    """One whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Dash(NamedTuple):
    """One that is served. `ask` sends a request as a browser's page of ours would, but for what it is told."""

    port: int
    stream: Stream

    async def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> Got:
        fields = {"host": f"localhost:{self.port}", "connection": "close"}
        if body:
            fields["content-length"] = str(len(body))
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return await self.raw(f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode() + body)

    async def raw(self, data: bytes) -> Got:
        """Whatever comes back for these bytes; status 0: nothing."""
        reader, writer = await self.connect()
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            answer = await _rest(reader)
        writer.close()
        return parsed(answer)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """With little room in the kernel: a peer that does not read is soon noticed."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=sock, limit=1 << 20)

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[Callable[[], Awaitable[tuple[str, Any]]]]:
        """A page: a function to await for the next (name, data)."""
        reader, writer = await self.connect()
        writer.write(f"GET /api/stream HTTP/1.1\r\nhost: localhost:{self.port}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head and b"text/event-stream" in head, head
        yield lambda: _event(reader)
        writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    data = b""
    try:
        while chunk := await reader.read(1 << 16):
            data += chunk
    except ConnectionError:  # what was sent in vain makes the kernel say so
        pass
    return data


async def _event(reader: asyncio.StreamReader) -> tuple[str, Any]:
    """Of a chunked body: sizes of chunks are lines too, which no field of an event looks like."""
    name = ""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            line = (await reader.readuntil(b"\n")).decode().strip()
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))


def parsed(answer: bytes) -> Got:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        return Got(0, {}, b"")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Got(int(first.split()[1]), headers, body)


@contextlib.asynccontextmanager
async def serving(
    run: Path, commands: Commands | None = None, *, live: bool = True, open_reading: bool = True
) -> AsyncIterator[Dash]:
    listener = transport.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    source, desk, notes = Source(run, (lambda: None) if live else None), Desk("newest"), Notes()
    stream = Stream(source, desk)
    site = app.Site(
        run=run, source=source, stream=stream, guard=Guard(TOKEN, ("dash.example",), open_reading), notes=notes,
        desk=desk, past=Past(run), past_desk=Desk("past"), commands=commands,
    )  # fmt: skip
    ending = asyncio.Event()
    task = asyncio.create_task(serve.serve(app.make(site), listener, stream, notes, ending))
    try:
        yield Dash(port, stream)
    finally:
        ending.set()
        await task


@contextlib.contextmanager
def writing(run: Path) -> Iterator[Callable[..., None]]:
    """A function that appends events to the journal of a job which was submitted just now."""
    begin_s, begin_wall_s = time.monotonic(), time.time()
    with Journal.open(run / "journal.jsonl", JOB) as journal:

        def write(*events: e.AnyEvent) -> None:
            for event in events:
                passed_s = time.monotonic() - begin_s
                journal.append(event, 1.0 + passed_s, begin_wall_s + passed_s, 1)

        write(e.JobSubmitted(JobSpec(JOB)), e.ControllerStarted(1))
        yield write
