"""`everstep top [RUN]`: a job on the terminal, live. Press q or Ctrl-C to leave; the job does not notice.

It follows the journal, so it needs no controller and no token. Not on a terminal, it prints one screen as plain text.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from everstep.cli.asking import LATEST
from everstep.cli.viewing import GONE, lives, newest, now_of, passed
from everstep.control.reading import Follower
from everstep.core.errors import UsageError
from everstep.observe.top import screen
from everstep.observe.view import View
from everstep.observe.viewer import Viewer

PLAIN_COLUMNS = 100


def top(run: Path = LATEST, *, every: float = 0.5) -> int:
    """Watch a job: progress, curves, where the time goes, nodes and workers, incidents.

    Args:
        run: its run folder or a journal (default: the newest run below ./everstep_runs).
        every: seconds between two looks.
    """
    if not 0.05 <= every <= 3600:
        raise UsageError(f"--every {every}: expected between 0.05 and 3600 seconds")
    viewer, follower = newest(run)
    if not sys.stdout.isatty():
        console = Console(width=PLAIN_COLUMNS, no_color=True, highlight=False)
        console.print(screen(passed(run, viewer), PLAIN_COLUMNS))
        return 0
    return _watch(run, viewer, follower, every)


def _watch(run: Path, viewer: Viewer, follower: Follower, every_s: float) -> int:
    console = Console(highlight=False)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            alive = None if viewer.view.ended else lives(run)
            if alive:
                viewer.until(now_of(viewer.view))
            view = viewer.view
            live.update(screen(view, shutil.get_terminal_size().columns, _note(view, alive)), refresh=True)
            if pressed(every_s) in ("q", "Q", "\x03", "\x1b"):
                return 0
            for entry in follower.new():
                viewer.add(entry)


def _note(view: View, alive: bool | None) -> str:
    ended = "the job has ended; " if view.ended else f"{GONE}; " if alive is False else ""
    return f"{ended}q: leave   everstep explain ID: all about an incident   {time.strftime('%H:%M:%S')}"


class _Pressed:
    """Waits for a key, at most so long; empty when there was none."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __call__(self, timeout_s: float) -> str:
        if self.fd < 0:  # the input is a file or closed: only time passes
            select.select([], [], [], timeout_s)
            return ""
        ready, _, _ = select.select([self.fd], [], [], timeout_s)
        return os.read(self.fd, 1).decode("utf-8", "replace") or "q" if ready else ""


@contextlib.contextmanager
def _keys() -> Iterator[_Pressed]:
    """Single keys without Enter; afterwards the terminal is as it was."""
    if not sys.stdin.isatty():
        yield _Pressed(-1)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield _Pressed(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
