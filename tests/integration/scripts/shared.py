"""Makes what multiprocessing names in /dev/shm, shares it with living children, and waits to be ended."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any


def hold(lock: Any, queue: Any, name: str) -> None:
    with lock:
        queue.put(SharedMemory(name).size)
        time.sleep(600)


def main() -> None:
    """Arguments: how each child is started."""
    context: Any = multiprocessing.get_context("spawn")
    queue, memory = context.Queue(), SharedMemory(create=True, size=1 << 16)
    locks = [context.Lock() for _ in sys.argv]
    for lock, kind in zip(locks, sys.argv[1:], strict=False):
        child: Any = multiprocessing.get_context(kind)
        child.Process(target=hold, args=(lock, queue, memory.name)).start()
        assert queue.get() >= memory.size
    semaphores = [lock._semlock.name for lock in (*locks, queue._rlock, queue._wlock, queue._sem)]
    made = [memory.name, *(f"sem.{name.removeprefix('/')}" for name in semaphores)]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path("names.tmp").write_text("\n".join(made))
    os.replace("names.tmp", f"names-{attempt}")
    time.sleep(600)


if __name__ == "__main__":
    main()
