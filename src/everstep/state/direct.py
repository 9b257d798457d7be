"""Files past the page cache (O_DIRECT), from several threads, with a sum for each chunk on the way.

Here a cold file of 400 MB is read at 3.5 GB/s so and at 0.7 GB/s through the cache; writing, 4 threads with sums reach
what `dd oflag=direct` reaches without them. Where a file system or an address refuses, the same calls go through the
cache, or through an aligned buffer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from everstep.state.image import CHUNK_BYTES
from everstep.state.store import NoRoom, chunks

NUM_THREADS = 4
BLOCK_BYTES = 4096
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_libc = ctypes.CDLL(None, use_errno=True)
_scratch = threading.local()


def open_direct(path: str, flags: int) -> tuple[int, bool]:
    """(descriptor, whether it is direct)."""
    try:
        return os.open(path, flags | _O_DIRECT | os.O_CLOEXEC, 0o644), bool(_O_DIRECT)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
    return os.open(path, flags | os.O_CLOEXEC, 0o644), False


def aligned() -> memoryview:
    """A buffer of one chunk at the begin of a page; this thread's."""
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    buffer: memoryview = _scratch.buffer
    return buffer


def write(path: str, data: memoryview, each: Callable[[], None]) -> tuple[int, ...]:
    """Write a new file, and make its bytes durable. Raises NoRoom before anything is written, if it can be known."""
    fd, direct = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        _reserve(fd, path, len(data))
        put = _Put(fd, data, direct)
        with ThreadPoolExecutor(NUM_THREADS, "ckpt-write") as pool:
            sums = []
            for number in pool.map(put, chunks(len(data))):
                sums.append(number)
                each()
        os.ftruncate(fd, len(data))  # the last block was written in full
        os.fsync(fd)
        return tuple(sums)
    except OSError as error:
        if error.errno in FULL and not isinstance(error, NoRoom):
            raise NoRoom(path, len(data), free_bytes(path)) from error
        raise
    finally:
        os.close(fd)


def free_bytes(path: str) -> int:
    there = os.statvfs(os.path.dirname(path))
    return there.f_bavail * there.f_frsize


def _reserve(fd: int, path: str, num_bytes: int) -> None:
    """Take the room for the file, where the file system can; else look whether it is there now."""
    if num_bytes == 0:
        return
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) == 0:
        return
    number = ctypes.get_errno()  # not os.posix_fallocate: where unsupported it writes a byte into each block
    if number in FULL or (number in (*REFUSED, errno.ENOSYS) and free_bytes(path) < num_bytes):
        os.ftruncate(fd, 0)
        raise NoRoom(path, num_bytes, free_bytes(path))
    if number not in (*REFUSED, errno.ENOSYS):
        raise OSError(number, os.strerror(number), path)


class _Put:
    """Writes one chunk, and gives its sum."""

    def __init__(self, fd: int, data: memoryview, direct: bool) -> None:
        self.fd, self.data, self.direct = fd, data, direct

    def __call__(self, span: tuple[int, int]) -> int:
        start, end = span
        part = self.data[start:end]
        number = xxhash.xxh3_64_intdigest(part)
        if not self.direct:
            self._all(part, start)
        elif len(part) % BLOCK_BYTES or not self._direct(part, start):
            buffer = aligned()
            buffer[: len(part)] = part
            padded = -(-len(part) // BLOCK_BYTES) * BLOCK_BYTES
            buffer[len(part) : padded] = bytes(padded - len(part))
            self._all(buffer[:padded], start)
        return number

    def _direct(self, part: memoryview, start: int) -> bool:
        """False when the address is refused."""
        try:
            self._all(part, start)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            return False
        return True

    def _all(self, part: memoryview, start: int) -> None:
        while len(part):
            done = os.pwrite(self.fd, part, start)
            part, start = part[done:], start + done


class FileReader:
    """Reads a file in pieces, checked by nobody here. Opened at the first read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._direct = False

    def read(self, start: int, into: memoryview) -> int:
        with self._lock:
            if self._fd < 0:
                self._fd, self._direct = open_direct(self._path, os.O_RDONLY)
        if not self._direct:
            return self._fill(start, into)
        if len(into) % BLOCK_BYTES == 0:
            try:
                return self._fill(start, into)
            except OSError as error:  # the address is refused
                if error.errno not in REFUSED:
                    raise
        return self._around(start, into)

    def _around(self, start: int, into: memoryview) -> int:
        """Through the aligned buffer: any first byte, any length."""
        buffer, done = aligned(), 0
        while done < len(into):
            skip = (start + done) % BLOCK_BYTES
            room = min(CHUNK_BYTES, -(-(skip + len(into) - done) // BLOCK_BYTES) * BLOCK_BYTES)
            got = self._fill(start + done - skip, buffer[:room]) - skip
            if got <= 0:
                break
            took = min(got, len(into) - done)
            into[done : done + took] = buffer[skip : skip + took]
            done += took
        return done

    def _fill(self, start: int, into: memoryview) -> int:
        done = 0
        while done < len(into):
            got = os.preadv(self._fd, [into[done:]], start + done)
            done += got
            if got == 0 or (self._direct and got % BLOCK_BYTES):  # the end of the file
                break
        return done

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
