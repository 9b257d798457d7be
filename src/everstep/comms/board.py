"""A worker's board: the one piece of shared memory in which it publishes, and which only it writes.

It is an anonymous memfd, so nothing is left in /dev/shm whoever dies, and sparse: what was never touched costs nothing.
Peers of the host map it read-only. From the start:

    words       per communicator index: the state word, and the headers of its two slots
    p2p words   per peer of the host: bytes sent to it, bytes taken from it
    slots       per communicator index: two of SLOT_BYTES
    rings       per peer of the host: RING_BYTES of messages on their way to it
    arena       buffers that are registered once and then read in place

A state word is `epoch << 40 | rounds published in it`: one store publishes, and it only grows, so a reader finds out by
comparing numbers both that a round is there and that its owner has gone on to another epoch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import torch

MAX_COMMUNICATORS = 256
MAX_LOCAL = 64  # workers of one host
SLOT_BYTES = 8 << 20  # used by many members; see rounds.py
RING_BYTES = 1 << 20
ARENA_BYTES = 1 << 36
ROUND_BITS = 40

LINE_BYTES = 64
_BLOCK_BYTES = 4 * LINE_BYTES  # of one communicator: the state word, two headers, one line spare
_P2P = MAX_COMMUNICATORS * _BLOCK_BYTES
_SLOTS = _P2P + 2 * MAX_LOCAL * LINE_BYTES
_RINGS = _SLOTS + MAX_COMMUNICATORS * 2 * SLOT_BYTES
_ARENA = _RINGS + MAX_LOCAL * RING_BYTES
TOTAL_BYTES = _ARENA + ARENA_BYTES

_PROT_NONE, _MAP_FIXED = 0, 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_ssize_t
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

HEADER_WORDS = 4  # of a slot: two of signature, offset and length of the payload


class _Bytes(ctypes.Array[ctypes.c_ubyte]):
    """The mapping as torch sees it. Tensors keep it alive, and it the mapping: no view outlives its memory."""

    _length_ = TOTAL_BYTES
    _type_ = ctypes.c_ubyte


class Board:
    """One mapping of a board: the owner's, or a peer's (`writable=False`)."""

    def __init__(self, fd: int, writable: bool) -> None:
        self.fd = fd
        self._file = os.fstat(fd)
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        mapping = mmap.mmap(fd, TOTAL_BYTES, mmap.MAP_SHARED, access)
        view = memoryview(mapping)
        self.memory = view
        self.words = view[:_SLOTS].cast("Q")
        self.address = _address(mapping)
        # torch has no read-only tensors: a write to a peer's board would end in SIGSEGV, not in corruption.
        raw = _Bytes.from_address(self.address)
        raw.mapping = mapping  # type: ignore[attr-defined]
        self.bytes: torch.Tensor = torch.frombuffer(raw, dtype=torch.uint8)

    @classmethod
    def create(cls, name: str) -> Board:
        """A new one, of this process; `name` shows in /proc/PID/maps. The descriptor is close-on-exec."""
        fd = os.memfd_create(f"everstep-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, TOTAL_BYTES)
        return cls(fd, writable=True)

    @classmethod
    def attach(cls, fd: int) -> Board:
        """A peer's, from the descriptor it sent. The board owns the descriptor."""
        if os.fstat(fd).st_size != TOTAL_BYTES:
            raise ValueError(f"a board of {os.fstat(fd).st_size} bytes; this version has {TOTAL_BYTES}")
        return cls(fd, writable=False)

    def close(self) -> None:
        """Give the descriptor back. The memory goes with the last tensor on it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def disown(self) -> None:
        """In a forked child, which may live long: it holds neither descriptor nor memory, and to touch it ends it."""
        self.close()
        _replace_by_null(self._file)
        # Not unmapped: another mapping would take the place, and go with this one's last tensor.
        if _mmap(self.address, TOTAL_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0) < 0:
            raise OSError(ctypes.get_errno(), "mmap")

    def slot(self, index: int, parity: int) -> torch.Tensor:
        """One of the two slots of a communicator."""
        return self.bytes.narrow(0, _slot(index, parity), SLOT_BYTES)

    def slot_bytes(self, index: int, parity: int) -> memoryview:
        """The same for a socket."""
        return self.memory[_slot(index, parity) : _slot(index, parity) + SLOT_BYTES]

    def ring(self, local: int) -> torch.Tensor:
        """Messages on their way to the peer with this place on the host."""
        return self.bytes.narrow(0, _RINGS + local * RING_BYTES, RING_BYTES)

    @property
    def arena(self) -> torch.Tensor:
        return self.bytes.narrow(0, _ARENA, ARENA_BYTES)


def _replace_by_null(file: os.stat_result) -> None:
    """All descriptors of this file: Python's mapping has one of its own, which it will close."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), file):
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


def state_word(index: int) -> int:
    """Number of the 64-bit word that tells how many rounds of this communicator its owner has published."""
    return index * _BLOCK_BYTES // 8


def header_word(index: int, parity: int) -> int:
    """First of the HEADER_WORDS of a slot."""
    return (index * _BLOCK_BYTES + (1 + parity) * LINE_BYTES) // 8


def left_word() -> int:
    """Not zero once its owner has left for good, as it should: that its process ends then is no death."""
    return 3 * LINE_BYTES // 8


def _slot(index: int, parity: int) -> int:
    return _SLOTS + (2 * index + parity) * SLOT_BYTES


def sent_word(local: int) -> int:
    """Bytes its owner has put into the ring towards the peer with this place on the host."""
    return (_P2P + 2 * local * LINE_BYTES) // 8


def taken_word(local: int) -> int:
    """Bytes its owner has taken from that peer's ring towards it."""
    return (_P2P + (2 * local + 1) * LINE_BYTES) // 8


def _address(mapping: mmap.mmap) -> int:
    """Where a mapping begins, also of a read-only one (ctypes' own way wants to write)."""
    buffer = (ctypes.c_ssize_t * 16)()
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    if get(ctypes.py_object(mapping), ctypes.byref(buffer), 0) != 0:
        raise OSError("a mapping without a buffer")
    address = int(buffer[0])
    release(ctypes.byref(buffer))
    return address
