"""Checkpoints in a folder of a file system. A file gets its name when its bytes are durable."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.state import direct
from everstep.state.layout import TEMPORARY
from everstep.state.store import NoRoom


class FolderStore:
    """See store.Store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.root) as found:
                return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        sizes = {}
        try:
            with os.scandir(self.root / folder) as found:
                for entry in found:
                    size = _size(entry)
                    if size is not None:
                        sizes[entry.name] = size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return sizes

    def make(self, folder: str) -> None:
        _make(self.root / folder)

    def settle(self, folder: str, name: str) -> bool:
        try:
            (self.root / folder).rename(self.root / name)
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False
        sync(self.root)
        return True

    def get(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def put(self, path: str, data: bytes, durable: bool = True) -> None:
        with self._named(path, durable) as temporary:
            try:
                _write(temporary, data, durable)
            except OSError as error:
                if error.errno in direct.FULL:
                    raise NoRoom(path, len(data), direct.free_bytes(temporary)) from error
                raise

    def write(self, path: str, data: memoryview, each: Callable[[], None]) -> tuple[int, ...]:
        with self._named(path, durable=True) as temporary:
            return direct.write(temporary, data, each)

    @contextmanager
    def _named(self, path: str, durable: bool) -> Iterator[str]:
        """A temporary path; the file written there gets its name afterwards, or goes."""
        final = self.root / path
        temporary = final.with_name(final.name + TEMPORARY + secrets.token_hex(4))
        try:
            yield str(temporary)
            temporary.replace(final)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            sync(final.parent)

    def reader(self, path: str) -> direct.FileReader:
        return direct.FileReader(str(self.root / path))

    def remove(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        """Only ever what `folders` names, and never a link."""
        try:
            shutil.rmtree(self.root / folder)
        except FileNotFoundError:  # somebody else was faster
            return
        sync(self.root)


def _size(entry: os.DirEntry[str]) -> int | None:
    try:
        return entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:  # it went meanwhile
        return None


def _write(path: str, data: bytes, durable: bool) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _make(folder: Path) -> None:
    """Also the folders above it; their names are durable."""
    if folder.is_dir():
        return
    _make(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
