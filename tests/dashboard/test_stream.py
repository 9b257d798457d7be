"""Server-sent events: the whole view first, then what changed; slow pages catch up, and nobody waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from serving import serving, writing

from everstep.core import events as e
from everstep.core.types import Blame
from everstep.dashboard import stream

Page = Callable[[], Awaitable[tuple[str, Any]]]


async def until(page: Page, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first change in which this is so."""
    while True:
        name, data = await page()
        assert name == "change"
        if wanted(data):
            return data


def test_pages_are_told_what_changed(tmp_path: Path) -> None:
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
    monkeypatch.setattr(stream, "EVERY_S", 0.01)
    monkeypatch.setattr(stream, "HEAVY_EVERY_S", 0.0)
    monkeypatch.setattr(stream, "FRESH_S", 0.0)
    text = "x" * 3_000

    async def look() -> None:
        with writing(tmp_path) as write:
            async with serving(tmp_path) as dash, dash.events() as slow, dash.events() as quick:
                assert (await quick())[0] == "view"
                for number in range(100):  # together more than the kernel's buffers hold for the slow one
                    write(e.Alert("note", f"{number} {text}"))
                    await until(
                        quick, lambda data, n=number: data.get("alerts", [{"text": ""}])[-1]["text"].startswith(f"{n} ")
                    )
                assert (await slow())[0] == "view"
                changes = 0
                while True:
                    changes += 1
                    _, data = await slow()
                    if data.get("alerts", [{"text": ""}])[-1]["text"].startswith("99 "):
                        break
                assert changes < 100

    asyncio.run(look())


def test_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a page the journal is still followed, and no view is made."""
    monkeypatch.setattr(stream, "IDLE_S", 0.02)
    made: list[float] = []

    async def look() -> None:
        with writing(tmp_path) as write:
            async with serving(tmp_path) as dash:
                frame = dash.stream._source.frame
                dash.stream._source.frame = lambda: made.append(time.monotonic()) or frame()  # type: ignore[method-assign, func-returns-value]
                write(e.Alert("note", "one"))
                async with asyncio.timeout(20):
                    while dash.stream._source._viewer.view.entries < 3:
                        await asyncio.sleep(0.01)

    asyncio.run(look())
    assert len(made) <= 1  # at the end
