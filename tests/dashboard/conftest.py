"""One browser for all tests of the page, and the pages of one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import CHROMIUM, FLAGS, Watched
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not longer: while Playwright is there, its event loop runs in this thread, and no other test may have one."""
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}")
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[list[Watched]]:
    """Pages of this test: none may have logged an error, nor asked another host."""
    pages: list[Watched] = []
    yield pages
    for watched in pages:
        watched.page.close()
        assert watched.wrong == []
