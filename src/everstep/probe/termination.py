"""SIGTERM from outside, held back until every worker of the job can act on it at the same step.

A script that saves on SIGTERM must not do so alone: the other ranks would wait for it in the next
collective. So a handler which the script installs for SIGTERM is called only when the agent has decided
(Word.STOP_AT_STEP): at that step, or at once for STOP_NOW. Before, the signal is noted in Word.TERM_NS.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable
from typing import Any

from everstep.core.page import STOP_NOW, Word
from everstep.probe.progress import Progress

Handler = Callable[[int, Any], Any]


class Termination:
    """Stands between the kernel and the script's SIGTERM handler; `signal.signal` and `getsignal` hide it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._handler: Handler | None = None

    def install(self) -> None:
        real_signal, real_getsignal = signal.signal, signal.getsignal

        @functools.wraps(real_signal)
        def set_handler(signalnum: int, handler: Any) -> Any:
            if signalnum != signal.SIGTERM:
                return real_signal(signalnum, handler)
            old = self._handler
            previous = real_signal(signalnum, self._arrived if callable(handler) else handler)
            self._handler = handler if callable(handler) else None
            return old if old is not None else previous

        @functools.wraps(real_getsignal)
        def get_handler(signalnum: int) -> Any:
            if signalnum == signal.SIGTERM and self._handler is not None:
                return self._handler
            return real_getsignal(signalnum)

        signal.signal = set_handler
        signal.getsignal = get_handler

    def _arrived(self, signalnum: int, frame: Any) -> None:
        handler, words = self._handler, self._progress.words
        assert handler is not None
        stop_at = words[Word.STOP_AT_STEP]
        decided = stop_at == STOP_NOW or 0 < stop_at <= words[Word.STEPS]
        if decided or not self._progress.attached:
            self._progress.stop_sent = True
            handler(signalnum, frame)
        elif not words[Word.TERM_NS]:
            words[Word.TERM_NS] = time.monotonic_ns()
