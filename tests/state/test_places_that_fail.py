"""Places that fail: a full disk, one which is read-only, a remote store that vanishes at any operation."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import small_images as images
from fsspec.implementations.memory import MemoryFileSystem

from everstep.state.disk import Checkpoints
from everstep.state.retention import Retention
from everstep.state.store import NoRoom

BIG_ROWS = 240_000  # about 16 MB an image


def save(where: Path | str, step: int, num_rows: int = 12) -> None:
    assert Checkpoints(where, Retention()).write(*images.image(images.state(step, num_rows), step)).complete


@contextmanager
def mounted(path: Path, options: str) -> Iterator[bool]:
    """A tmpfs of its own; False where this process may not mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "everstep-test", str(path)]
    done = subprocess.run(command, capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(path)], check=True)


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """No file may become larger: what a disk without room looks like to who may not mount one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(where: Path) -> NoRoom:
    index, data = images.image(images.state(2, BIG_ROWS), 2, shard=1, num_shards=2)
    with pytest.raises(
        NoRoom, match=rf"no room for step 2 in {where}: it needs {len(data)} bytes, \d+ are free"
    ) as told:
        Checkpoints(where).write(index, data)
    assert told.value.needed_bytes == len(data)
    return told.value


def left(where: Path) -> list[str]:
    return sorted(path.name for path in where.rglob("*") if path.name != ".claims")


def test_full_disk(tmp_path: Path) -> None:
    """FAULTS D4: told before, with bytes needed and free; nothing of it stays, the older one is whole."""
    where = tmp_path / "small"
    with mounted(where, "size=6m") as is_small:
        save(where, 1)
        Checkpoints(where).write(*images.image(images.state(2), 2, num_shards=2))  # the other shard had room
        before = left(where)
        if is_small:
            assert refused(where).free_bytes < 6 << 20
        else:
            with small_files(6 << 20):
                refused(where)
        assert left(where) == before
        assert Checkpoints(where).verify(1) == []
        save(where, 3)


def test_leftovers_of_the_dead_make_room(tmp_path: Path) -> None:
    """And not one byte free for a claim, at first."""
    where = tmp_path / "small"
    with mounted(where, "size=24m") as is_small:
        if not is_small:
            pytest.skip("may not mount a small file system here")
        save(where, 1)
        index, data = images.image(images.state(2, BIG_ROWS), 2, num_shards=2)
        Checkpoints(where).write(index, data)  # its other shard never comes
        free = os.statvfs(where)
        with pytest.raises(OSError):
            (where / "step-0000000002-e1-00000000").mkdir()
            (where / "step-0000000002-e1-00000000/__0_0.distcp").write_bytes(bytes(free.f_bavail * free.f_frsize + 1))
        save(where, 3, BIG_ROWS)
        assert Checkpoints(where).found() == [3, 1]


def test_read_only(tmp_path: Path) -> None:
    """Can be restored from, and says at once that nothing can be saved."""
    where = tmp_path / "place"
    with mounted(where, "size=6m") as is_mounted:
        save(where, 1)
        read_only(where, is_mounted, True)
        try:
            checkpoints = Checkpoints(where)
            assert checkpoints.found() == [1] and checkpoints.verify(1) == []
            with checkpoints.reading(1) as (source,):
                source.read(0, memoryview(bytearray(source.index.num_bytes)))
                source.close()
            assert checkpoints.prune(Retention(), dry_run=True).kept == ("step-0000000001",)
            with pytest.raises(OSError, match="Read-only|Permission"):
                checkpoints.write(*images.image(images.state(2), 2))
        finally:
            read_only(where, is_mounted, False)
        assert left(where) == left(where)


def read_only(where: Path, is_mounted: bool, value: bool) -> None:
    if is_mounted:
        subprocess.run(["mount", "-o", f"remount,{'ro' if value else 'rw'}", str(where)], check=True)
        return
    for path in (where, *where.rglob("*")):
        if path.is_dir():
            path.chmod(0o555 if value else 0o755)


class Away(Exception):
    """What a store's own library raises: no OSError."""


class Vanishing(MemoryFileSystem):
    """An object store which is gone after `left` operations. Names as in object stores: no rename is used."""

    protocol = "vanishing"
    left = -1

    def _operation(self) -> None:
        if Vanishing.left == 0:
            raise Away("no route to host")
        Vanishing.left -= 1


def _through(name: str) -> Callable[..., Any]:
    def method(self: Vanishing, *args: Any, **kwargs: Any) -> Any:
        self._operation()
        return getattr(super(Vanishing, self), name)(*args, **kwargs)

    return method


for _name in ("ls", "cat_file", "pipe_file", "rm_file", "rm", "makedirs", "open"):
    setattr(Vanishing, _name, _through(_name))


def test_a_remote_that_vanishes_at_each_operation() -> None:
    fsspec.register_implementation("vanishing", Vanishing, clobber=True)
    where, step, failed = "vanishing://bucket/run", 1, 0
    Vanishing.left = -1
    save(where, step)
    for operations in range(1000):
        index, data = images.image(images.state(step + 1), step + 1)
        Vanishing.left = operations
        try:
            Checkpoints(where, Retention()).write(index, data)
            break
        except OSError as error:
            assert "no route to host" in str(error)
            failed += 1
        finally:
            Vanishing.left = -1
        checkpoints = Checkpoints(where)
        assert checkpoints.found()[0] in (step, step + 1) and checkpoints.scan().damaged == ()
        assert checkpoints.verify(checkpoints.found()[0]) == []
        step += 2
        save(where, step)
        assert checkpoints.scan().unfinished == () and len(checkpoints.found()) == 2
        (source,) = checkpoints.sources(step)
        source.read(0, memoryview(bytearray(source.index.num_bytes)))
    assert failed > 10
    Vanishing.left = 0
    with pytest.raises(OSError, match="Away: no route to host"):
        Checkpoints(where).found()
    Vanishing.left = -1
