"""Server-sent events: each page gets the whole view once, then the fields that changed, at most four times a second.

A page that takes its time holds nobody up and piles nothing up: what it is sent next is what changed since the last it
was sent, however long ago. While no page is open the journal is followed only every few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

from everstep.dashboard.gate import JSON, Message, Receive, Send, error, respond
from everstep.dashboard.source import Desk, Frame, Source, whole

EVERY_S = 0.25
HEAVY_BYTES, HEAVY_EVERY_S = 32 << 10, 0.5  # a long field (many curves) is sent half as often
IDLE_S = 5.0
SILENT_S = 15.0  # then a comment shows that the connection lives
FRESH_S = 0.05  # a view that is younger is not made again
MAX_PAGES = 64
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]


class Stream:
    """Follows a source for all pages; an ASGI application that serves one of them."""

    def __init__(self, source: Source, desk: Desk) -> None:
        self._source, self._desk = source, desk
        self._frame = Frame({}, over=False)
        self._made_s = -1e9
        self._changed: dict[str, tuple[int, float]] = {}  # field -> version in which it changed last, and when
        self._version = 0
        self._changes: dict[int, bytes] = {}  # version -> what changed since: pages that are equally far share it
        self._news: asyncio.Event = asyncio.Event()  # a new one for each version
        self._refreshing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._pages = 0
        self.followed = 0  # entries taken in while nobody looked
        self._closing = False

    # Following ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the journal until closed. What this raises is a defect."""
        due_s = time.monotonic()
        while not self._closing:
            began_s = time.monotonic()
            if self._pages:
                await self.refresh()
            else:
                self.followed += await self._desk.call(self._source.follow)
            now_s = time.monotonic()
            rest_s = now_s - began_s  # as long as the work took: half of a core at most
            due_s = max(due_s + (EVERY_S if self._pages else IDLE_S), now_s + rest_s)
            self._wake.clear()
            try:
                async with asyncio.timeout(due_s - time.monotonic()):
                    await self._wake.wait()
                due_s = time.monotonic()
            except TimeoutError:
                pass

    async def refresh(self) -> Frame:
        """The newest view; pages hear of it."""
        async with self._refreshing:
            if time.monotonic() > self._made_s + FRESH_S:
                self._take(await self._desk.call(self._source.frame), time.monotonic())
        return self._frame

    def _take(self, frame: Frame, now: float) -> None:
        fields, version = dict(frame.fields), self._version + 1
        before = self._frame.fields
        for name, data in frame.fields.items():
            _, changed_s = self._changed.get(name, (0, -1e9))
            if data == before.get(name):
                continue
            if len(data) > HEAVY_BYTES and now < changed_s + HEAVY_EVERY_S - EVERY_S / 2 and not frame.over:
                fields[name] = before[name]
                continue
            self._changed[name] = (version, now)
            self._version = version
        over = frame.over != self._frame.over
        self._frame, self._made_s = Frame(fields, frame.over), now
        if self._version == version or over:
            self._changes.clear()
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def close(self) -> None:
        """Tell the pages the last news, and end their streams."""
        self._made_s = -1e9
        await self.refresh()
        self._closing = True
        self._wake.set()
        self._tell()

    @property
    def pages(self) -> int:
        return self._pages

    # One page -------------------------------------------------------------------------------------------

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if self._pages >= MAX_PAGES:
            await respond(send, 503, error(f"{MAX_PAGES} pages are open already"), JSON)
            return
        gone = asyncio.ensure_future(_gone(receive))
        self._pages += 1
        try:
            await self.refresh()
            self._wake.set()
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._show(send, gone)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._pages -= 1
            gone.cancel()

    async def _show(self, send: Send, gone: asyncio.Future[None]) -> None:
        seen, told_end = self._version, False
        await _put(send, b"retry: 1000\n" + _event(b"view", whole(self._frame.fields)))
        while not gone.done():
            news, closing = self._news, self._closing
            if seen != self._version:
                seen, change = self._version, self._change(seen)
                await _put(send, change)
            if self._frame.over and not told_end:
                told_end = True
                await _put(send, _event(b"end", self._end()))
            if closing:
                return
            if not await _until(news, gone):
                await _put(send, b": nothing new\n\n")

    def _change(self, seen: int) -> bytes:
        """What changed since the version that a page has."""
        if seen not in self._changes:
            names = [name for name, (version, _) in self._changed.items() if version > seen]
            self._changes[seen] = _event(b"change", whole({name: self._frame.fields[name] for name in names}))
        return self._changes[seen]

    def _end(self) -> bytes:
        fields = self._frame.fields
        return whole({name: fields[name] for name in ("exit_code", "why", "stage")})


async def _put(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name, data)


async def _gone(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _until(news: asyncio.Event, gone: asyncio.Future[None]) -> bool:
    """Whether there is news, or nobody to tell it to, within the time that a connection may be silent."""
    waiting = asyncio.ensure_future(news.wait())
    try:
        done, _ = await asyncio.wait((waiting, gone), timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return bool(done)
