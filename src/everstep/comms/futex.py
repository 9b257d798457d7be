"""Wait for, and wake at, a 32-bit word of shared memory: Linux futexes through ctypes, which drops the GIL meanwhile.

A wait is cut into slices: whoever stored a word just between our look and our sleep has woken nobody, and costs one
slice instead of for ever. Waiting works on read-only mappings too.
"""

from __future__ import annotations

import ctypes
import platform

SLICE_NS = 5_000_000  # an abort must reach every waiting call within 20 ms

_WAIT, _WAKE, _ALL = 0, 1, 1 << 30
_NUMBERS = {"x86_64": 202, "aarch64": 98}
_NUMBER = _NUMBERS.get(platform.machine(), -1)


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


_slice = _Timespec(0, SLICE_NS)
_slice_address = ctypes.addressof(_slice)
_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]


def ordered() -> bool:
    """Whether stores of one processor are seen in their order by others, with no fence, which Python has not."""
    return platform.machine() == "x86_64"


def wait(address: int, expected: int) -> None:
    """Sleep while the word is `expected`, at most one slice."""
    _syscall(_NUMBER, address, _WAIT, expected, _slice_address)


def wake(address: int) -> None:
    """Wake all who wait at the word, in every process."""
    _syscall(_NUMBER, address, _WAKE, _ALL, None)
