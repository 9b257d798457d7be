"""Server-sent events: the whole view first, then what changed; slow pages catch up, and nobody waits for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from serving import serving, writing

from everstep.core import events as e
from everstep.core.types import Blame
from everstep.dashboard import stream
from everstep.dashboard.source import Frame, Source

Page = Callable[[], Awaitable[tuple[str, Any]]]


async def until(page: Page, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first change in which this is so."""
    while True:
        name, data = await page()
        assert name == "change"
        if wanted(data):
            return data


def test_pages_are_told_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def look() -> None:
        with writing(tmp_path) as write:
            async with serving(tmp_path) as dash:
                async with dash.events() as one, dash.events() as two:
                    for page in (one, two):
                        name, view = await page()
                        assert name == "view" and view["job"] == "j1" and view["incidents"] == []
                    write(e.IncidentOpened("i1", "crash", (Blame(1, "node0", "exit"),), "rank 1 died"))
                    for page in (one, two):
                        change = await until(page, lambda data: "incidents" in data)
                        assert change["incidents"][0]["id"] == "i1"
                        assert "job" not in change and "script" not in change
                    assert dash.stream.pages == 2
                    monkeypatch.setattr(stream, "MAX_PAGES", 2)
                    assert (await dash.ask("GET", "/api/stream")).status == 503
                    monkeypatch.undo()
                    write(e.JobEnded(3, "crash loop"))
                    assert (await until(one, lambda data: "exit_code" in data))["exit_code"] == 3
                    assert await one() == ("end", {"exit_code": 3, "why": "crash loop", "stage": ""})
                async with dash.events() as late:
                    assert (await late())[0] == "view" and (await late())[0] == "end"
                async with asyncio.timeout(20):
                    while dash.stream.pages:
                        await asyncio.sleep(0.01)

    asyncio.run(look())


def test_the_last_news_come_before_the_process_ends(tmp_path: Path) -> None:
    async def look() -> None:
        with writing(tmp_path) as write:
            async with serving(tmp_path) as dash:
                reader, writer = await dash.connect()
                writer.write(f"GET /api/stream HTTP/1.1\r\nhost: localhost:{dash.port}\r\n\r\n".encode())
                await reader.readuntil(b"event: view")
                write(e.JobEnded(0, "done"))
            rest = await reader.read()
            assert rest.index(b'"exit_code":0') < rest.index(b"event: end")
            writer.close()

    asyncio.run(look())


def test_a_slow_page_catches_up_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVERY_S", "HEAVY_EVERY_S", "FRESH_S"):
        monkeypatch.setattr(stream, name, 0.005)
    numbers = itertools.count()
    bulk = b'"%s"' % (b"x" * 200_000)  # a hundred of these are more than all buffers on the way take

    def frame(self: Source) -> Frame:
        number = next(numbers)
        return Frame({"number": b"%d" % number, "bulk": bulk[:-1] + b'%d"' % number}, over=False)

    async def look() -> None:
        async with serving(tmp_path) as dash, dash.events() as slow, dash.events() as quick:
            _, first = await quick()
            last = first
            while last["number"] < first["number"] + 100:
                _, last = await quick()
            name, seen = await slow()
            assert name == "view"
            told = [seen["number"]]
            while told[-1] < last["number"]:
                told.append((await slow())[1]["number"])
            assert told == sorted(told) and len(told) < 100

    with writing(tmp_path):
        pass
    monkeypatch.setattr(Source, "frame", frame)
    asyncio.run(look())


def test_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a page the journal is still followed, and no view is made."""
    monkeypatch.setattr(stream, "IDLE_S", 0.02)
    made: list[Frame] = []
    whole = Source.frame

    def frame(self: Source) -> Frame:
        made.append(whole(self))
        return made[-1]

    monkeypatch.setattr(Source, "frame", frame)

    async def look() -> None:
        with writing(tmp_path) as write:
            async with serving(tmp_path) as dash:
                write(e.Alert("note", "one"))
                while dash.stream.followed < 3:
                    await asyncio.sleep(0.01)
                assert made == []

    asyncio.run(asyncio.wait_for(look(), 20))
