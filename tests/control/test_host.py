"""Samples, signal dispositions and evidence of real processes, and pidfds in an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from everstep.control import procfs
from everstep.control.host import ProcessHandle

READY = "import os, signal, sys, time\n{body}\nprint('ready', flush=True)\ntime.sleep(60)\n"
Start = Callable[[str], subprocess.Popen[str]]


def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.002)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python child which runs some lines and then waits."""
    started: list[subprocess.Popen[str]] = []

    def begin(body: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-IS", "-c", READY.format(body=body)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    yield begin
    for child in started:
        child.kill()
        child.communicate()


def test_sample_tells_memory_threads_cpu_and_family(start: Start) -> None:
    child = start(
        "import threading\n"
        "x = bytearray(50 << 20); x[::4096] = b'1' * len(x[::4096])\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "while time.process_time() < .1: pass"
    )
    seen = procfs.sample(child.pid)
    assert seen is not None and seen.alive and not seen.stopped and not seen.of_kernel
    assert seen.rss_bytes > 50 << 20
    assert seen.threads == 2
    assert seen.cpu_s >= 0.05
    assert (seen.ppid, seen.pgrp, seen.session) == (os.getpid(), os.getpgid(0), os.getsid(0))
    assert child.pid in procfs.children(os.getpid())


def test_sample_of_a_name_with_parentheses(start: Start) -> None:
    child = start("open('/proc/self/comm', 'w').write('a) R (b')")
    seen = procfs.sample(child.pid)
    assert seen is not None
    assert seen.name == "a) R (b"
    assert seen.ppid == os.getpid()


def test_sample_knows_stopped_zombie_and_gone(start: Start) -> None:
    child = start("")
    child.send_signal(signal.SIGSTOP)
    until(lambda: (seen := procfs.sample(child.pid)) and seen.stopped)
    child.kill()
    until(lambda: (seen := procfs.sample(child.pid)) and seen.state == "Z" and not seen.alive)
    child.wait()
    assert procfs.sample(child.pid) is None


def test_dispositions_of_signals(start: Start) -> None:
    child = start("signal.signal(signal.SIGUSR1, lambda *a: 0); signal.signal(signal.SIGUSR2, signal.SIG_IGN)")
    assert procfs.catches(child.pid, signal.SIGUSR1)
    assert not procfs.ignores(child.pid, signal.SIGUSR1)
    assert procfs.ignores(child.pid, signal.SIGUSR2)
    assert not procfs.catches(child.pid, signal.SIGUSR2)
    assert not procfs.catches(child.pid, signal.SIGTERM)
    assert not procfs.catches(2**22 + 1, signal.SIGTERM)


def test_kernel_view_of_a_stopped_process(start: Start) -> None:
    child = start("")
    child.send_signal(signal.SIGSTOP)
    until(lambda: (seen := procfs.sample(child.pid)) and seen.stopped)
    text = procfs.kernel_view(child.pid)
    assert "stopped (by SIGSTOP" in text
    assert "time.sleep(60)" in text  # its command
    assert f"thread {child.pid}" in text
    assert procfs.kernel_view(2**22 + 1) == f"process {2**22 + 1} is gone"


def test_death_wakes_the_loop_without_polling(start: Start) -> None:
    child = start("")

    async def watch() -> tuple[int, float]:
        died: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with ProcessHandle(child.pid) as handle:
            handle.watch(died.set_result)
            assert not handle.gone()
            began = time.monotonic()
            assert handle.send(signal.SIGKILL)
            pid = await asyncio.wait_for(died, 5)
            assert handle.gone()
            return pid, time.monotonic() - began

    pid, took_s = asyncio.run(watch())
    assert pid == child.pid
    assert took_s < 4.0


def test_wait_with_a_deadline(start: Start) -> None:
    child = start("")

    async def wait() -> tuple[bool, bool]:
        with ProcessHandle(child.pid) as handle:
            early = await handle.wait(0.05)
            handle.send(signal.SIGTERM)
            return early, await handle.wait(5)

    assert asyncio.run(wait()) == (False, True)


def test_a_handle_never_hits_another_process(start: Start) -> None:
    child = start("")
    seen = procfs.sample(child.pid)
    assert seen is not None
    with pytest.raises(ProcessLookupError, match="another one"):
        ProcessHandle(child.pid, seen.start_ticks + 1)
    with ProcessHandle(child.pid, seen.start_ticks) as handle:
        child.kill()
        child.wait()
        assert not handle.send(signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        ProcessHandle(child.pid)
