"""The sampler of a worker, in this process: what it sees of two functions, and what it must not do to a script."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from everstep.core import wire
from everstep.core.page import SAMPLE_SIGNAL, Page, Word
from everstep.core.sampled import MAX_DEPTH, Function, Sampled
from everstep.probe import sampler

SECONDS = 1.0


class Place(NamedTuple):
    page: Page
    path: Path

    def ask(self, seconds: float = SECONDS, threads: bool = False) -> None:
        self.page[Word.SAMPLE_THREADS] = int(threads)
        self.page[Word.SAMPLE_UNTIL_NS] = time.monotonic_ns() + int(seconds * 1e9)
        os.kill(os.getpid(), SAMPLE_SIGNAL)

    def sampled(self) -> Sampled:
        return msgspec.json.decode(self.path.read_bytes(), type=Sampled)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    before, page = signal.getsignal(SAMPLE_SIGNAL), Page.create("sampled")
    sampler.install(page, str(tmp_path / "sampled"))
    yield Place(page, tmp_path / "sampled")
    until_quiet()
    signal.signal(SAMPLE_SIGNAL, before)
    page.close()


def until_quiet() -> None:
    """Until its thread has ended."""
    while sampling():
        spin(0.001)


def sampling() -> list[str]:
    names = [frame.f_code.co_qualname for frame in sys._current_frames().values()]
    return [name for name in names if name.startswith(("Sampler.", "Taken."))]


def spin(seconds: float) -> None:
    """Of this process's own time: other work on the machine takes from both alike."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def long_one() -> None:
    spin(0.03)


def short_one() -> None:
    spin(0.01)


def share(sampled: Sampled, name: str) -> float:
    """Of the time, in this function and what it called."""
    place = next(at for at, each in enumerate(sampled.functions) if each.name == name)
    return sum(s.ns for s in sampled.stacks if place in s.functions) / sum(s.ns for s in sampled.stacks)


def test_two_functions_and_nothing_kept(place: Place) -> None:
    """One takes three times as long, give or take what other work on the machine adds to either; and what a function
    held is gone when it has returned, looked at or not."""

    class Held:
        pass

    def holds() -> weakref.ref[Held]:
        held = Held()
        long_one()
        return weakref.ref(held)

    place.ask()
    kept = 0
    while not place.path.exists():
        kept += holds()() is not None
        short_one()
    sampled = place.sampled()
    assert kept == 0
    assert share(sampled, "long_one") > 0.55 > 0.45 > share(sampled, "short_one") > 0.05
    assert sum(s.ns for s in sampled.stacks) / 1e9 == pytest.approx(sampled.seconds)
    assert {s.thread for s in sampled.stacks} == {"MainThread"}
    found = next(each for each in sampled.functions if each.name == "long_one")
    assert found.file.endswith("test_sampler.py") and found.kind == "script"


def test_all_threads_and_once_at_a_time(place: Place) -> None:
    ending = threading.Event()
    other = threading.Thread(target=ending.wait, name="loader", daemon=True)
    other.start()
    place.ask(0.2, threads=True)
    place.ask(0.2, threads=True)  # while it runs: nothing more
    spin(0.02)
    assert len(sampling()) <= 1
    while not place.path.exists():
        spin(0.01)
    ending.set()
    other.join()
    assert {"MainThread", "loader"} <= {s.thread for s in place.sampled().stacks}


def test_a_signal_that_comes_too_late_starts_nothing(place: Place) -> None:
    """The main thread was in C code until nobody waited any more."""
    place.ask(-0.001)
    assert not sampling()
    place.ask(0.05)
    while not place.path.exists():
        spin(0.01)
    assert place.sampled().samples > 0


def test_a_deep_stack_loses_its_middle(place: Place) -> None:
    def dive(depth: int) -> None:
        dive(depth - 1) if depth else spin(0.3)

    place.ask(0.2)
    dive(2 * MAX_DEPTH)
    while not place.path.exists():
        spin(0.01)
    deepest = max((s.functions for s in place.sampled().stacks), key=len)
    names = [place.sampled().functions[at].name for at in deepest]
    assert len(deepest) == MAX_DEPTH + 1 and names[-1] == "spin" and names[MAX_DEPTH // 2].startswith("… ")


def test_whose_a_function_is() -> None:
    def here() -> None:
        pass

    assert sampler.function(here.__code__).kind == "script"
    assert sampler.function(json.loads.__code__) == Function(
        "loads", "json/__init__.py", json.loads.__code__.co_firstlineno, "library"
    )
    assert sampler.function(wire.encode.__code__).file == "everstep/core/wire.py"
    assert sampler.function(wire.encode.__code__).kind == "everstep"
