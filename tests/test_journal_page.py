"""docs/journal.md describes the events that there are."""

from __future__ import annotations

import journal_page


def test_the_page_is_current() -> None:
    text = journal_page.PAGE.read_text(encoding="utf-8")
    assert journal_page.page(text) == text, "run python scripts/journal_page.py"
