"""The dashboard's paths, as a Starlette application behind the gate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everstep.core.errors import EverstepError
from everstep.core.wire import everstep_version
from everstep.dashboard import files
from everstep.dashboard.control import Commands, carry_out
from everstep.dashboard.gate import Gate, error
from everstep.dashboard.guard import Guard
from everstep.dashboard.notes import Notes
from everstep.dashboard.source import Desk, Past, Source
from everstep.dashboard.stream import Stream
from everstep.observe.metrics import CONTENT_TYPE

T = TypeVar("T")

JSON = "application/json"
MAX_WAITING = 8  # requests for moments of the past: folding takes its time


class Site(msgspec.Struct, frozen=True):
    """What is served. `play`: the page is to play the record from its start. `commands` None: nobody can be told."""

    run: Path
    source: Source
    stream: Stream
    guard: Guard
    notes: Notes
    desk: Desk
    past: Past
    past_desk: Desk
    commands: Commands | None = None
    play: bool = False


def make(site: Site) -> Gate:
    return Gate(Starlette(routes=_Pages(site).routes(), exception_handlers=_HANDLERS), site.guard, site.notes)


class _Pages:
    """One method for each path."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._assets = files.assets()
        self._waiting = 0
        self._turn = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/static/{name}", self.static),
            Route("/favicon.ico", self.no_icon),
            Route("/metrics", self.metrics),
            Route("/api/info", self.info),
            Route("/api/view", self.view),
            Route("/api/incident/{name}", self.incident),
            Route("/api/file/{name:path}", self.file),
            Route("/api/stream", self._site.stream, methods=["GET"]),
            Route("/api/control/{verb}", self.control, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        return self._asset(request, "index.html")

    async def static(self, request: Request) -> Response:
        return self._asset(request, request.path_params["name"])

    async def no_icon(self, request: Request) -> Response:
        return Response(status_code=204)

    def _asset(self, request: Request, name: str) -> Response:
        asset = self._assets.get(name)
        if asset is None:
            raise HTTPException(404, "no such file")
        headers = {"cache-control": "no-cache", "etag": asset.tag}
        if request.headers.get("if-none-match") == asset.tag:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, headers={**headers, "content-type": asset.media_type})

    async def info(self, request: Request) -> Response:
        site = self._site
        facts = await site.desk.call(site.source.facts)
        mode = "recorded" if site.play and facts.mode == "live" else facts.mode
        told = {
            "mode": mode,
            "job": facts.job,
            "run": str(site.run),
            "controls": site.commands is not None and mode == "live",
            "needs_token": not site.guard.open_reading,
            "span_s": facts.span_s,
            "version": everstep_version(),
            "play": site.play,
            "trouble": facts.trouble,
        }
        return _json(msgspec.json.encode(told))

    async def metrics(self, request: Request) -> Response:
        try:
            text = await self._site.desk.call(self._site.source.metrics)
        except ImportError as error:
            raise HTTPException(501, f"no metrics: {error}") from error
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def view(self, request: Request) -> Response:
        text = request.query_params.get("at")
        if text is None:
            return _json((await self._site.stream.refresh()).encoded())
        at_s = _seconds(text)
        return _json(await self._past(request, lambda: self._site.past.view(at_s)))

    async def incident(self, request: Request) -> Response:
        site, name = self._site, request.path_params["name"]
        found = await site.desk.call(site.source.incident, name)
        if found is None:
            found = await self._past(request, lambda: site.past.incident(name))
        if found is None:
            raise HTTPException(404, "no such incident")
        return _json(found)

    async def _past(self, request: Request, work: Callable[[], T]) -> T:
        """One at a time, in the order asked; a page that went away meanwhile costs nothing."""
        if self._waiting >= MAX_WAITING:
            raise HTTPException(503, "busy with other moments of the past; try again")
        self._waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    raise HTTPException(400, "nobody waits for this any more")
                return await self._site.past_desk.call(work)
        finally:
            self._waiting -= 1

    async def file(self, request: Request) -> Response:
        text = await asyncio.to_thread(files.newest_text, self._site.run, request.path_params["name"])
        if text is None:
            raise HTTPException(404, "no such file")
        return Response(text, media_type="text/plain")

    async def control(self, request: Request) -> Response:
        site, verb = self._site, request.path_params["verb"]
        facts = await site.desk.call(site.source.facts)
        commands = site.commands if facts.mode == "live" and not site.play else None
        body = await request.body()
        answer = await carry_out(verb, request.headers.get("content-type", ""), body, facts.job, commands, site.run)
        who = request.client.host if request.client else "somebody"
        told = " ".join(str(answer.payload[key]) for key in ("ok", "refused", "error") if key in answer.payload)
        site.notes.say(f"{verb[:20]!a} by {who}: {answer.status} {told}")
        return _json(msgspec.json.encode(answer.payload), answer.status)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type=JSON)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, "at: expected seconds since the job's submission")
    return value


async def _as_json(request: Request, failed: Exception) -> Response:
    status, why = (failed.status_code, failed.detail) if isinstance(failed, HTTPException) else (500, "internal error")
    return _json(error(why), status)


async def _unreadable(request: Request, failed: Exception) -> Response:
    """The journal is damaged, or gone."""
    return _json(error(str(failed)), 500)


_HANDLERS: dict[Any, Any] = {
    HTTPException: _as_json, EverstepError: _unreadable, OSError: _unreadable, Exception: _as_json,
}  # fmt: skip
