"""A server of canned Views for the page's tests, by the dashboard's HTTP interface: python tests/dashboard/fixture.py

It is not the dashboard: no guard, no journal. A test tells it what happens next (`push`), and sees what the page asked.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import canned
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import everstep
from everstep.observe.view import View

STATIC = Path(everstep.__file__).parent / "dashboard" / "static"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
TOKEN = "canned-token"
STACKS = 'Thread 0x7f33 (most recent call first):\n  File "train.py", line 41 in forward\n' * 20


class Server:
    """Serves one View on a free loopback port, from a thread, until the block ends."""

    def __init__(
        self, view: View, mode: str = "live", port: int = 0, at: Callable[[float], View] | None = None
    ) -> None:
        self.view, self.mode, self.at = view, mode, at
        self.shows = threading.Event()  # unset: what was asked to be seen of a worker takes a while
        self.shows.set()
        self.told: list[dict[str, Any]] = []  # what the page asked the job to do
        self._streams: set[asyncio.Queue[bytes]] = set()
        self._socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))
        self._loop.close()

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._say(b"")
        self._thread.join()
        self._socket.close()

    def push(self, **change: Any) -> None:
        """The View changes, and every open page is told."""
        self.view = msgspec.structs.replace(self.view, **change)
        self._say(b"event: change\ndata: " + msgspec.json.encode(change) + b"\n\n")

    def _say(self, text: bytes) -> None:
        def all_streams() -> None:
            for stream in self._streams:
                stream.put_nowait(text)

        self._loop.call_soon_threadsafe(all_streams)

    def _app(self) -> Starlette:
        routes = [
            Route("/", lambda request: self._file("index.html")),
            Route("/static/{name}", lambda request: self._file(request.path_params["name"])),
            Route("/api/info", self._info),
            Route("/api/view", self._view),
            Route("/api/incident/{name}", self._incident),
            Route("/api/file/{name:path}", lambda request: Response(STACKS, media_type="text/plain")),
            Route("/api/stream", self._stream),
            Route("/api/control/{verb}", self._control, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def _file(self, name: str) -> Response:
        return FileResponse(STATIC / name, headers={"content-security-policy": POLICY})

    def _info(self, request: Request) -> Response:
        told = {"mode": self.mode, "job": self.view.job, "run": "runs/canned", "needs_token": False, "play": False}
        return JSONResponse({**told, "controls": self.mode == "live", "span_s": self.view.now_s, "version": "0"})

    def _view(self, request: Request) -> Response:
        at = request.query_params.get("at")
        view = self.at(float(at)) if at is not None and self.at is not None else self.view
        return Response(msgspec.json.encode(view), media_type="application/json")

    def _incident(self, request: Request) -> Response:
        return JSONResponse({"error": "no such incident"}, 404)

    async def _control(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        verb = request.path_params["verb"]
        self.told.append({"verb": verb, **json.loads(await request.body())})
        if verb in ("stacks", "profile"):
            await asyncio.to_thread(self.shows.wait)
            shows = {"text": STACKS} if verb == "stacks" else {"picture": msgspec.to_builtins(canned.shown())}
            return JSONResponse({"ok": "there it is", "file": f"looks/0001-{verb}.txt", "notes": [], **shows})
        return JSONResponse({"ok": f"{self.told[-1].get('target')} is asked to leave"})

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(self._lines(), media_type="text/event-stream")

    async def _lines(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._streams.add(queue)
        try:
            yield b"retry: 100\nevent: view\ndata: " + msgspec.json.encode(self.view) + b"\n\n"
            while text := await queue.get():
                yield text
        finally:
            self._streams.discard(queue)


def cut(view: View, at_s: float) -> View:
    """About what a record tells at an earlier moment: enough for the slider."""
    share = at_s / view.now_s
    kept = [incident for incident in view.incidents if incident.opened_s <= at_s]
    step = int(view.step * share)
    return msgspec.structs.replace(
        view, now_s=at_s, step=step, incidents=kept, last_step_s=at_s, num_incidents=len(kept)
    )


def scenes() -> Iterator[tuple[str, View, str]]:
    yield "small", canned.small(), "live"
    yield "large", canned.large(), "recorded"
    yield "huge", canned.huge(), "simulated"


def main() -> None:
    """Serve one scene until a key is pressed: for looking at the page."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else "small"
    view, mode = next((view, mode) for name, view, mode in scenes() if name == wanted)
    with Server(view, mode, port=int(sys.argv[2]) if len(sys.argv) > 2 else 0, at=lambda at: cut(view, at)) as server:
        input(f"{server.url} (Enter ends it)\n")


if __name__ == "__main__":
    main()
