"""Long lines of a command's words, folded for a terminal; a pipe or a file gets them whole, as `grep` wants them."""

from __future__ import annotations

import shutil
import sys
import textwrap


def folded(text: str, indent: int) -> str:
    """Each line in as many as the terminal needs; all but the first are indented."""
    return fold(text, indent, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def fold(text: str, indent: int, columns: int) -> str:
    wrapper = textwrap.TextWrapper(
        max(columns, indent + 20), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) if len(line) > columns else line for line in text.splitlines())
