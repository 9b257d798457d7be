"""Memory of images: anonymous files (memfd), so nothing is left behind in /dev/shm, however a process ends.

Their pages are allocated before anybody may write, because a page which cannot be had later is a SIGBUS for the writer.
So what the machine, or the cgroup we are in, can still give is looked at first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from everstep.state.image import Damaged, Index, chunk_span

SPARE_BYTES = 256 << 20  # of the machine's memory, which a vault leaves to others
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


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
    return mmap.mmap(fd, max(num_bytes, 1), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


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


# What there is ------------------------------------------------------------------------------------------


def available_bytes() -> int:
    """What can be taken without driving others out, by the kernel's estimate; the least of machine and cgroups."""
    return max(0, min(_machine_bytes(), *_cgroup_bytes()) - SPARE_BYTES)


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _UNLIMITED


def _cgroup_bytes() -> Iterator[int]:
    """What each memory cgroup above us has left; caches which it would give up count as left."""
    yield _UNLIMITED
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names, root = ("memory.max", "memory.current", "inactive_file"), _CGROUPS
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = _CGROUPS / "memory"
        else:
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):  # the root has no limit, "max" is none
                yield _left(group, *names)
            group = group.parent


def _left(group: Path, limit: str, usage: str, cache: str) -> int:
    most, used = int((group / limit).read_text()), int((group / usage).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return most - used + int(stat.get(cache, 0))
