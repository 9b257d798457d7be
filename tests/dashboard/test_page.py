"""The page of the real server, in a real browser: a simulated job, moments of it, and a journal that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from browsing import SHOWN_MS, TRIES, Watched, show, shows
from playwright.sync_api import Browser, expect
from serving import serving, writing

from everstep.cli.sim import cases_of, simulate
from everstep.core import events as e
from everstep.core.types import Blame

YEAR = Path(__file__).parents[2] / "examples" / "scenarios" / "year.toml"


@contextlib.contextmanager
def served(run: Path, live: bool) -> Iterator[str]:
    """The dashboard over a run folder, from a thread: its address."""
    told: list[str] = []
    ready, ending = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving(run, live=live) as dash:
            told.append(f"http://127.0.0.1:{dash.port}")
            ready.set()
            await asyncio.to_thread(ending.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield told[0]
    finally:
        ending.set()
        thread.join()


def test_a_simulated_job_of_131072_accelerators(browser: Browser, opened: list[Watched], tmp_path: Path) -> None:
    simulate(cases_of(YEAR, None, ["days=2"], [])[0], tmp_path / "journal.jsonl")
    with served(tmp_path, live=False) as url:
        page = show(browser, opened, url)
        expect(page.locator("#mode")).to_have_text("simulated")
        expect(page.locator("#map-note")).to_contain_text("131,200 accelerators, not listed by name")
        expect(page.locator("#status-label")).to_have_text("Finished")
        newest = page.locator("#incident-list .what").first.inner_text()
        page.locator("#to-previous").click()
        page.locator("#to-previous").click()
        expect(page.locator("#status-label")).to_have_text("Recovering")
        expect(page.locator("#incident-list .what").first).not_to_have_text(newest)
        page.reload()  # the moment is in the address
        expect(page.locator("#status-label")).to_have_text("Recovering")
        page.goto("about:blank")


def test_a_journal_that_goes_on(browser: Browser, opened: list[Watched], tmp_path: Path) -> None:
    took = []
    with writing(tmp_path) as write, served(tmp_path, live=True) as url:
        page = show(browser, opened, url)
        for number in range(TRIES):
            rank = Blame(number, "n1", "signal")
            opening = e.IncidentOpened(f"I00{number}", "crash", (rank,), "it was killed")
            text = f"rank {number} on n1"
            took.append(shows(page, "#incident-list .what", text, lambda opening=opening: write(opening)))
        page.goto("about:blank")
    assert min(took) < SHOWN_MS, took
