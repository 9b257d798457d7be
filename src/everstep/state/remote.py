"""Checkpoints in anything that fsspec can address. A put there is whole or not at all, as object stores promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec  # type: ignore[import-untyped]
import xxhash

from everstep.state.store import chunks

BLOCK_BYTES = 16 << 20  # of one part of an upload


class RemoteFailed(OSError):
    """The remote store did not do what it was asked: away, refused, or slow beyond its own time-out."""


class RemoteStore:
    """See store.Store. Raises ValueError for a URL which fsspec does not know, or has no library for."""

    def __init__(self, url: str) -> None:
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ValueError(f"{url}: {error}") from error
        self.root = self.root.rstrip("/")
        self.name = url

    def folders(self) -> list[str]:
        return [_last(entry["name"]) for entry in self._list("") if entry["type"] == "directory"]

    def sizes(self, folder: str) -> dict[str, int]:
        return {_last(entry["name"]): int(entry["size"]) for entry in self._list(folder) if entry["type"] == "file"}

    def _list(self, folder: str) -> list[dict[str, Any]]:
        path = self._path(folder)
        with _asking(path):
            self.fs.invalidate_cache()
            try:
                return [entry for entry in self.fs.ls(path, detail=True) if entry["name"].rstrip("/") != path]
            except FileNotFoundError:
                return []

    def get(self, path: str) -> bytes:
        with _asking(path):
            return bytes(self.fs.cat_file(self._path(path)))

    def put(self, path: str, data: bytes, durable: bool = True) -> None:
        with _asking(path):
            self.fs.pipe_file(self._path(path), data)

    def write(self, path: str, data: memoryview, each: Callable[[], None]) -> tuple[int, ...]:
        sums = []
        with _asking(path), self.fs.open(self._path(path), "wb", block_size=BLOCK_BYTES) as file:
            for start, end in chunks(len(data)):
                sums.append(xxhash.xxh3_64_intdigest(data[start:end]))
                file.write(data[start:end])
                each()
        return tuple(sums)

    def make(self, folder: str) -> None:
        with _asking(folder):
            self.fs.makedirs(self._path(folder), exist_ok=True)

    def settle(self, folder: str, name: str) -> bool:
        return False

    def reader(self, path: str) -> RemoteReader:
        return RemoteReader(self, self._path(path))

    def remove(self, path: str) -> None:
        with _asking(path):
            try:
                self.fs.rm_file(self._path(path))
            except FileNotFoundError:
                return

    def remove_folder(self, folder: str) -> None:
        with _asking(folder):
            try:
                self.fs.rm(self._path(folder), recursive=True)
            except FileNotFoundError:
                return

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}" if path else str(self.root)


class RemoteReader:
    """See store.Reader."""

    def __init__(self, store: RemoteStore, path: str) -> None:
        self.store, self.path = store, path

    def read(self, start: int, into: memoryview) -> int:
        with _asking(self.path):
            data = self.store.fs.cat_file(self.path, start=start, end=start + len(into))
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing is held open."""


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """Each of fsspec's file systems raises errors of its own library: they leave as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise RemoteFailed(f"{what}: {type(error).__name__}: {error}") from error
