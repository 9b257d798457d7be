"""Starts the process that tends a journal (control.tending) whenever that has grown.

It is apart from what it starts: a controller need not load all that makes views.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class Tender:
    """Starts that process when there is something to do. `replay`: a controller writes this journal."""

    def __init__(self, path: Path, *, replay: bool = False) -> None:
        self._command = [sys.executable, "-m", "everstep.control.tending", str(path), *(["--replay"] if replay else [])]
        self._replay = replay
        self._process: subprocess.Popen[bytes] | None = None

    def grown(self, closed: bool) -> None:
        """One that is at work looks again before it ends."""
        if not (closed or self._replay):
            return
        if self._process is not None and self._process.poll() is None:
            return
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as error:  # it is tried again
            print(f"everstep: nobody tends the journal: {error}", file=sys.stderr)

    def stop(self) -> None:
        """The job is over. What is not done can be read all the same."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def finish(self) -> None:
        """Wait until all is done."""
        if self._process is not None:
            self._process.wait()
            subprocess.run(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
