"""Memory shared by a worker and its agent: a robust mutex, the worker's signs of life, the work of its last steps, and
the newest values that its script logged; behind these the ring of its trace (core.trace), where one is wanted.

The agent creates it (an anonymous memfd: nothing can be left behind in /dev/shm), the worker inherits
the descriptor. Words are 64-bit, written by one side only, read by the other without a lock: an aligned
64-bit store is atomic on every machine we run on. Times are CLOCK_MONOTONIC nanoseconds; 0 means never.
"""

from __future__ import annotations

import enum
import mmap
import os
import signal

from everstep.core.work import StepWork

SIZE = 32768
MUTEX_OFFSET = 0  # pthread_mutex_t: 40 bytes on x86-64, 48 on aarch64
MUTEX_SIZE = 64
STOP_NOW = 1 << 63  # value of Word.STOP_AT_STEP: deliver SIGTERM whatever the step
STACKS_SIGNAL = signal.SIGRTMIN + 9  # a worker that gets it writes the Python stacks of all its threads
SAMPLE_SIGNAL = signal.SIGRTMIN + 10  # one that gets it samples where it is, until SAMPLE_UNTIL_NS
LOGGED = 256  # steps whose work the page holds: with heartbeats of 0.5 s all, if a step takes 2 ms or more
_LOG = 64  # word at which they begin; each is its number plus one, and six numbers
_FIELDS = 7
VALUES_BYTES = 8176  # of the newest values that the script logged
_VALUES = _LOG + LOGGED * _FIELDS  # word at which they begin: two places in turn, each its number, its length and bytes
_PLACE = VALUES_BYTES // 8 + 2
_TRIES = 3


class Word(enum.IntEnum):
    """Index of each 64-bit word behind the mutex. All but STOP_AT_STEP, SAVE_ASKED and SAMPLE_* are the worker's."""

    STEPS = 0  # optimizer steps of this attempt
    STEP_NS = 1  # time of the last one
    FIRST_STEP_NS = 2
    TOTAL_STEP = 3  # the optimizer's own step count plus one; 0: unknown
    PHASE = 4
    PHASE_NS = 5  # when the phase began
    LIFE_NS = 6  # last sign of life of any kind
    COLLECTIVES = 7
    BATCHES = 8
    SAVES = 9  # finished saves
    SAVED_STEP = 10  # STEPS at the end of the last save, plus one
    FAILED_NS = 11  # an exception escaped the script
    FINISHED_NS = 12  # the script ended on its own (return or sys.exit)
    TERM_NS = 13  # SIGTERM from outside reached a script that handles it
    STOP_AT_STEP = 14  # written by the agent: deliver SIGTERM to yourself when STEPS reaches this
    LOADS = 15  # torch.load and friends
    READY_NS = 16  # the worker holds the mutex and is about to run the script
    EXIT_STATUS = 17  # status the script ended with, plus one
    SAVE_ASKED = 19  # written by the agent: how often a person wanted the state on disk
    SAMPLE_UNTIL_NS = 21  # written by the agent, before the signal
    SAMPLE_THREADS = 22  # written by the agent: sample all threads, not only the main one
    KEPT_STEP = 20  # newest committed step whose state this worker put into the vault of its node, plus one
    FIRST_TOTAL_STEP = 18  # the optimizer's own count at the first step of this attempt, plus one; 0: unknown


class Page:
    """The page of one worker. `page[Word.STEPS] += 1` is how a worker ticks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self._words = memoryview(self.memory)[MUTEX_SIZE:SIZE].cast("Q")
        self.ring = memoryview(self.memory)[SIZE:]

    @classmethod
    def create(cls, name: str, ring_bytes: int = 0) -> Page:
        """A new zeroed page; `name` shows in /proc/PID/maps. The descriptor is close-on-exec."""
        fd = os.memfd_create(f"everstep-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE + ring_bytes)
        return cls(fd)

    def __getitem__(self, word: Word) -> int:
        return self._words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def log_work(self, step: int, *numbers: int) -> None:
        """What the worker did in its step number `step`: own, data and save time (ns), tokens, squares, and how long
        passes took that were not committed (core.work)."""
        words, at = self._words, _LOG + step % LOGGED * _FIELDS
        words[at] = 0  # who reads it now leaves it out
        for place, number in enumerate(numbers, at + 1):
            words[place] = number
        words[at] = step + 1

    def work(self, after: int) -> list[StepWork]:
        """Of the steps behind `after`, as far as the page holds them."""
        words, last = self._words, self[Word.STEPS]
        found = []
        for step in range(max(after + 1, last - LOGGED + 1), last + 1):
            at = _LOG + step % LOGGED * _FIELDS
            number, work, data, save, tokens, squares, twice = words[at : at + _FIELDS].tolist()
            if number == words[at] == step + 1:
                found.append(StepWork(step, work / 1e9, data / 1e9, save / 1e9, tokens, squares, twice / 1e9))
        return found

    def put_values(self, data: bytes) -> None:
        """In place of those before the last ones: whoever reads these meanwhile is not disturbed."""
        words = self._words
        number = max(words[_VALUES], words[_VALUES + _PLACE]) + 1
        at = _VALUES + number % 2 * _PLACE
        begin = MUTEX_SIZE + 8 * (at + 2)
        words[at] = 0
        words[at + 1] = len(data)
        self.memory[begin : begin + len(data)] = data
        words[at] = number

    def values(self) -> bytes:
        """The newest that are whole. Empty: nothing was put, or it was put too often to be read."""
        words, places = self._words, (_VALUES, _VALUES + _PLACE)
        for at in _TRIES * sorted(places, key=lambda at: words[at], reverse=True):
            number, length = words[at], min(words[at + 1], VALUES_BYTES)
            begin = MUTEX_SIZE + 8 * (at + 2)
            data = self.memory[begin : begin + length]
            if number and words[at] == number:
                return data
        return b""

    def close(self) -> None:
        self._words.release()
        self.ring.release()
        self.memory.close()
        os.close(self.fd)
