"""Memory of images: anonymous files (memfd), so nothing is left behind in /dev/shm, however a process ends.

Their pages are allocated before anybody may write, because a page which cannot be had later is a SIGBUS for the writer.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator

import msgspec
import xxhash

from everstep.state.image import Damaged, Index, chunk_span


class Region:
    """Memory of the vault: `view` is all of it, writable. Raises OSError (ENOMEM, ENOSPC) when it cannot be had."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("everstep-image", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, max(num_bytes, 1))
            self._map = mmap.mmap(self.fd, max(num_bytes, 1))
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)

    def read_only(self) -> int:
        """A descriptor through which it can be read and not written."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """It is gone once nobody has it mapped; who still has a view of it keeps it until then."""
        del self.view, self._map
        os.close(self.fd)


def map_writable(fd: int, num_bytes: int) -> mmap.mmap:
    """All pages at once, and not in children: a fork of a writer must not keep the memory."""
    mapped = mmap.mmap(fd, max(num_bytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    mapped.madvise(mmap.MADV_DONTFORK)
    return mapped


def map_read_only(fd: int, num_bytes: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, max(num_bytes, 1), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_DONTFORK)
    return mapped


# Sums ---------------------------------------------------------------------------------------------------


def chunk_of(index: Index, view: memoryview, chunk: int) -> memoryview:
    start, end = chunk_span(index, chunk)
    return view[start:end]


def sums_of(index: Index, view: memoryview) -> Iterator[int]:
    """The sum of each chunk in turn, so that a caller may stop between two."""
    for chunk in range(index.num_chunks):
        yield xxhash.xxh3_64_intdigest(chunk_of(index, view, chunk))


def check(index: Index, chunk: int, data: memoryview, where: str) -> None:
    """Raises Damaged when these are not the bytes of that chunk."""
    if xxhash.xxh3_64_intdigest(data) != index.sums[chunk]:
        raise Damaged(f"chunk {chunk} of step {index.step}, shard {index.shard}, is damaged in {where}")


def with_sums(index: Index, sums: Iterable[int]) -> Index:
    return msgspec.structs.replace(index, sums=tuple(sums))
