"""SIGTERM from outside, held back until every worker of the job can act on it at the same step.

A script that saves on SIGTERM must not do so alone: the other ranks would wait for it in the next
collective. So a handler which the script installs for SIGTERM is called only when the agent has decided
(Word.STOP_AT_STEP): at that step, or at once for STOP_NOW. Before, the signal is noted in Word.TERM_NS.

While a session is open, a script without a handler does not die in the midst of a step either, when a scheduler
signals every process: the session asks between two steps whether it is time. A signal that only this process got
ends it there too, once it is clear that no stop of the job follows.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from everstep.core.page import STOP_NOW, Word
from everstep.probe.progress import Progress

ALONE_S = 3.0  # the stop of a job reaches its workers much sooner after a scheduler signalled all processes

Handler = Callable[[int, Any], Any]


class Termination:
    """Stands between the kernel and the script's SIGTERM handler; `signal.signal` and `getsignal` hide it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._handler: Handler | None = None
        self._holding = False
        self._held_s = 0.0  # when the first signal came that the session was to wait for
        self._set: Callable[[int, Any], Any] = signal.signal

    def install(self) -> None:
        real_signal, real_getsignal = signal.signal, signal.getsignal

        @functools.wraps(real_signal)
        def set_handler(signalnum: int, handler: Any) -> Any:
            if signalnum != signal.SIGTERM:
                return real_signal(signalnum, handler)
            old = get_handler(signalnum)
            ours = callable(handler) or (self._holding and handler == signal.SIG_DFL)
            real_signal(signalnum, self._arrived if ours else handler)
            self._handler = handler if callable(handler) else None
            return old

        @functools.wraps(real_getsignal)
        def get_handler(signalnum: int) -> Any:
            found = real_getsignal(signalnum)
            return (self._handler or signal.SIG_DFL) if found == self._arrived else found

        self._set = real_signal
        signal.signal = set_handler
        signal.getsignal = get_handler

    def hold(self) -> None:
        """A session is open. In the main thread of a worker; elsewhere SIGTERM stays what it is."""
        if threading.current_thread() is threading.main_thread() and self._progress.attached:
            self._holding = True
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # in our way

    def release(self) -> bool:
        """The session is closed. True: SIGTERM came meanwhile, and did not do what it does."""
        if self._holding:
            self._holding = False
            if self._handler is None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        held, self._held_s = self._held_s > 0.0, 0.0
        return held

    def due(self) -> bool:
        """Between two steps: whether the job stops here. Ends the process when SIGTERM was for this one alone."""
        if not (self._holding and self._held_s):
            return False
        stop_at = self._progress.words[Word.STOP_AT_STEP]
        if not stop_at and time.monotonic() - self._held_s > ALONE_S:
            self.die()
        return 0 < stop_at <= self._progress.words[Word.STEPS]

    def die(self) -> None:
        """What SIGTERM does to a process that does not handle it."""
        self._set(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _arrived(self, signalnum: int, frame: Any) -> None:
        handler, words = self._handler, self._progress.words
        stop_at = words[Word.STOP_AT_STEP]
        decided = stop_at == STOP_NOW or 0 < stop_at <= words[Word.STEPS]
        if handler is None:
            if stop_at == STOP_NOW or not (self._holding and self._progress.attached):
                self.die()
            self._held_s = self._held_s or time.monotonic()
        elif decided or not self._progress.attached:
            self._progress.stop_sent = True
            handler(signalnum, frame)
        elif not words[Word.TERM_NS]:
            words[Word.TERM_NS] = time.monotonic_ns()
