"""A page in a real browser, watched for what no page of ours may do. Chromium is Debian's, at /usr/bin/chromium."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
expect.set_options(timeout=20_000)  # other work may delay a page

SHOWN_MS = 1000.0
TRIES = 3  # other work on the machine may delay one of them


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """While it is there, Playwright's event loop runs in this thread, and no other test may have one."""
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        yield started
        started.close()


class Watched:
    """A page, and all that a page must not do: it is looked at when the test ends."""

    def __init__(self, browser: Browser, host: str, width: int = 1280, timezone: str | None = None) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, timezone_id=timezone)
        self.wrong: list[str] = []
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda asked: None if asked.url.startswith(host) else self.wrong.append(asked.url))


def show(
    browser: Browser, opened: list[Watched], url: str, path: str = "/", width: int = 1280, timezone: str | None = None
) -> Page:
    watched = Watched(browser, url, width, timezone)
    opened.append(watched)
    watched.page.goto(url + path)
    expect(watched.page.locator("#job")).not_to_be_empty()
    return watched.page


# In the page: from the arrival of a change until a text is there. Asked before the change is pushed.
UNTIL = """([selector, text]) => new Promise((resolve) => {
  let began = 0;
  const look = () => {
    if ([...document.querySelectorAll(selector)].some((found) => found.textContent.includes(text))) {
      observer.disconnect();
      resolve(performance.now() - began);
    }
  };
  const observer = new MutationObserver(look);
  observer.observe(document.body, { subtree: true, childList: true, characterData: true });
  began = performance.now();
  document.body.dataset.asked = text;
})"""


def shows(page: Page, selector: str, text: str, happens: Callable[[], None]) -> float:
    """Milliseconds from what happens until the page has the text: the whole way."""
    page.evaluate(f"(asked) => {{ globalThis.waiting = ({UNTIL})(asked); }}", [selector, text])
    happens()
    return float(page.evaluate("() => globalThis.waiting"))
