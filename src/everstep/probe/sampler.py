"""Samples where the threads of a worker are, for some seconds, when its agent sends a signal. Else it costs nothing.

The signal's handler runs in the main thread between two of its bytecodes, starts a thread and returns. That thread
looks at the frames of the others, which needs the interpreter's lock: a worker that sits in C code and keeps the lock,
or whose main thread never comes back to Python, is not sampled. Its stacks (probe.stacks) can be had all the same.

Nothing of the script is touched: no random numbers are drawn, no frame is held from one look to the next (it would keep
tensors alive), and neither handler nor start takes a lock that the interrupted code may hold.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from types import CodeType, FrameType

import msgspec

from everstep.core.page import SAMPLE_SIGNAL, Page, Word
from everstep.core.sampled import MAX_DEPTH, MAX_STACKS, Function, Sampled, Stack

PERIOD_NS = 1_000_000_000 // 99  # 100 would be in step with timers of programs

_Key = tuple[int, tuple[int, ...], int]  # thread, its functions from the innermost out, line of the innermost


def install(page: Page, path: str) -> None:
    """In the main thread, before the script. What was sampled is written to `path`, whole."""
    signal.signal(SAMPLE_SIGNAL, Sampler(page, path).asked)


class Sampler:
    """Of one worker. The page says until when to sample, and whether all threads or only the main one."""

    def __init__(self, page: Page, path: str) -> None:
        self._page, self._path = page, path
        self._main = threading.get_ident()
        self._never = _thread.allocate_lock()  # held for good: who waits for it sleeps
        self._never.acquire()
        self._running = False

    def asked(self, _signum: int, _frame: FrameType | None) -> None:
        until_ns = self._page[Word.SAMPLE_UNTIL_NS]
        if self._running or time.monotonic_ns() >= until_ns:  # so late that nobody waits for it any more
            return
        self._running = True
        try:  # not threading.Thread: its locks may be held by what this signal interrupted
            _thread.start_new_thread(self._run, (until_ns, bool(self._page[Word.SAMPLE_THREADS])))
        except RuntimeError:  # no room for a thread: the agent is told by silence
            self._running = False

    def _run(self, until_ns: int, every: bool) -> None:
        try:
            sampled = self._sample(until_ns, every)
            fresh = f"{self._path}.{os.getpid()}"
            with contextlib.suppress(OSError):  # no room on the disk: as above
                with open(fresh, "wb") as file:
                    file.write(msgspec.json.encode(sampled))
                os.rename(fresh, self._path)
        finally:
            self._running = False

    def _sample(self, until_ns: int, every: bool) -> Sampled:
        taken = Taken(every, self._main)
        began_ns = last_ns = due_ns = time.monotonic_ns()
        longest_ns, samples = 0, 0
        while last_ns < until_ns:
            due_ns = max(due_ns + PERIOD_NS, last_ns)
            self._never.acquire(timeout=max(0, due_ns - last_ns) / 1e9)
            now_ns = time.monotonic_ns()
            taken.look(now_ns - last_ns)
            samples, longest_ns, last_ns = samples + 1, max(longest_ns, now_ns - last_ns), now_ns
        functions, stacks = taken.told()
        spent_s = time.thread_time()
        return Sampled(functions, stacks, samples, (last_ns - began_ns) / 1e9, longest_ns / 1e9, spent_s)


class Taken:
    """What was seen so far. Code objects are told apart by identity: to compare them is slow."""

    def __init__(self, every: bool, main: int) -> None:
        self._every, self._main = every, main
        self._codes: dict[int, CodeType] = {}
        self._ns: dict[_Key, int] = {}

    def look(self, ns: int) -> None:
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # ours, which holds `frames`: a cycle would keep all of them
        for thread in frames if self._every else (self._main,):
            if thread in frames:
                key = thread, self._stack(frames[thread]), frames[thread].f_lineno or 0
                self._ns[key] = self._ns.get(key, 0) + ns

    def _stack(self, frame: FrameType | None) -> tuple[int, ...]:
        codes, found = self._codes, []
        while frame is not None:
            code = frame.f_code
            codes[id(code)] = code  # it stays: no other can get its number
            found.append(id(code))
            frame = frame.f_back
        return tuple(found)

    def told(self) -> tuple[tuple[Function, ...], tuple[Stack, ...]]:
        """Functions and stacks, most time first, without our own way into the script."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        known = {number: function(code) for number, code in self._codes.items()}
        places: dict[Function, int] = {}
        stacks: list[Stack] = []
        rest_ns = 0
        for (thread, numbers, line), ns in sorted(self._ns.items(), key=lambda item: -item[1]):
            if len(stacks) >= MAX_STACKS:
                rest_ns += ns
                continue
            chain = _inner([known[number] for number in reversed(numbers)])
            shown = tuple(places.setdefault(each, len(places)) for each in chain)
            stacks.append(Stack(names.get(thread, f"thread {thread}"), shown, line, ns))
        if rest_ns:
            stacks.append(Stack(names.get(self._main, ""), (), 0, rest_ns))
        return tuple(places), tuple(stacks)


def _inner(chain: list[Function]) -> list[Function]:
    """From the script's own module on, for what is not below it: everything. The middle of a deep one is left out."""
    begin = next((at for at, each in enumerate(chain) if not _ours(each)), 0)
    chain = chain[begin:]
    if len(chain) > MAX_DEPTH:
        half = MAX_DEPTH // 2
        chain = [*chain[:half], Function(f"… {len(chain) - MAX_DEPTH} more …", "", 0, "library"), *chain[-half:]]
    return chain


def _ours(function: Function) -> bool:
    """Part of the way from the start of the process into the script, or into a thread."""
    return function.file.startswith(("everstep/control/", "<frozen runpy", "everstep/__main__"))


def function(code: CodeType) -> Function:
    file, kind = _place(code.co_filename)
    return Function(code.co_qualname, file, code.co_firstlineno, kind)


_PACKAGE = os.path.abspath(__file__).removesuffix("everstep/probe/sampler.py")
_LIBRARY = os.path.dirname(os.__file__) + os.sep


def _place(path: str) -> tuple[str, str]:
    """A short name of a file, and whose it is."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            file = path.rpartition(folder)[2]
            first = file.partition("/")[0]
            return file, first if first in ("torch", "everstep") else "library"
    if path.startswith(_PACKAGE + "everstep" + os.sep):
        return path.removeprefix(_PACKAGE), "everstep"
    if path.startswith((_LIBRARY, "<frozen")):
        return path.removeprefix(_LIBRARY), "library"
    here = os.getcwd() + os.sep
    return path.removeprefix(here), "script"
