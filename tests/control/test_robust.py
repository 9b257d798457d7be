"""The robust mutex, with real processes that really die."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from everstep.control import robust
from everstep.core.page import Page, Word


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create("test")
    robust.init(page)
    yield page
    page.close()


def fork_holder(page: Page, then: Callable[[], None], num_bytes: int = 0) -> int:
    """A child that touches `num_bytes`, locks, says it is ready, and does `then`."""
    pid = os.fork()
    if pid == 0:
        try:
            ballast = mmap.mmap(-1, num_bytes or mmap.PAGESIZE)
            for at in range(0, num_bytes, mmap.PAGESIZE):
                ballast[at] = 1
            robust.lock(page)
            page[Word.READY_NS] = time.monotonic_ns()
            then()
        finally:
            os._exit(0)
    return pid


class Seen:
    """What a DeathWatch told, and when."""

    def __init__(self) -> None:
        self.at_ns = 0
        self.event = threading.Event()

    def __call__(self, at_ns: int) -> None:
        self.at_ns = at_ns
        self.event.set()


def wait_ready(page: Page) -> None:
    deadline = time.monotonic() + 20
    while not page[Word.READY_NS]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_sigkill_is_noticed_before_the_memory_is_gone(page: Page) -> None:
    seen = Seen()
    watch = robust.DeathWatch(page, seen)
    pid = fork_holder(page, lambda: signal.pause(), num_bytes=500 << 20)
    wait_ready(page)
    assert not seen.event.wait(0.2)
    killed_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    assert seen.event.wait(5)
    os.waitpid(pid, 0)
    watch.close()
    assert 0 < seen.at_ns - killed_ns < 1_000_000_000  # a few ms; the bound allows for a busy machine


def test_a_normal_exit_is_noticed(page: Page) -> None:
    seen = Seen()
    watch = robust.DeathWatch(page, seen)
    os.waitpid(fork_holder(page, lambda: None), 0)
    assert seen.event.wait(5)
    watch.close()


def test_a_child_of_the_holder_changes_nothing(page: Page) -> None:
    def fork_and_pause() -> None:
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        page[Word.STEPS] = 1
        signal.pause()

    seen = Seen()
    watch = robust.DeathWatch(page, seen)
    pid = fork_holder(page, fork_and_pause)
    deadline = time.monotonic() + 10
    while not page[Word.STEPS]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not seen.event.wait(0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert seen.event.wait(5)
    watch.close()


def test_close_before_and_after_ready(page: Page) -> None:
    seen = Seen()
    robust.DeathWatch(page, seen).close()
    pid = fork_holder(page, lambda: signal.pause())
    wait_ready(page)
    robust.DeathWatch(page, seen).close()
    assert not seen.event.is_set()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
