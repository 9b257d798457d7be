"""One browser for all tests of the page, and the pages of one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import CHROMIUM, Watched, chromium
from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not longer: no other test may have an event loop meanwhile."""
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}")
    with chromium() as started:
        yield started


@pytest.fixture
def opened(browser: Browser) -> Iterator[list[Watched]]:
    """Pages of this test: none may have logged an error, nor asked another host."""
    pages: list[Watched] = []
    yield pages
    for watched in pages:
        watched.page.close()
        assert watched.wrong == []
