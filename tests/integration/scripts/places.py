"""Each rank is in a place of its own, for good: two functions 3 to 1, a lock of C that keeps Python's, a sleep."""

from __future__ import annotations

import ctypes
import os
import threading
import time


def long_one() -> None:
    spin(0.03)


def short_one() -> None:
    spin(0.01)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def trains() -> None:
    threading.Thread(target=reads_ahead, daemon=True).start()
    while True:
        long_one()
        short_one()


def reads_ahead() -> None:
    time.sleep(1000)


def keeps_the_lock() -> None:
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for itself
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def sleeps() -> None:
    time.sleep(1000)


(trains, keeps_the_lock, sleeps, sleeps)[int(os.environ["RANK"])]()
