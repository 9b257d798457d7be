"""Where checkpoints are kept: one protocol over a folder and over an object store, and how a place is named."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from everstep.state.image import CHUNK_BYTES


class Store(Protocol):
    """Paths are relative to the place: "step-0000000123/COMPLETE". All methods raise OSError when the place fails."""

    name: str

    def folders(self) -> list[str]:
        """Directly below the place."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The files in a folder and their sizes, without those in folders below. Empty when there is none."""

    def make(self, folder: str) -> None:
        """Before anything is put there. Does not mind if it is there."""

    def settle(self, folder: str, name: str) -> bool:
        """Rename a folder, durably; False where that is not possible, or the name taken."""

    def get(self, path: str) -> bytes:
        """Raises FileNotFoundError."""

    def put(self, path: str, data: bytes, durable: bool = True) -> None:
        """Whole or not at all; when it returns the file is there, also after a loss of power if `durable`."""

    def write(self, path: str, data: memoryview, each: Callable[[], None]) -> tuple[int, ...]:
        """As put, for many bytes: the xxh3_64 of each chunk. `each` is called now and then. Raises NoRoom."""

    def reader(self, path: str) -> Reader: ...

    def remove(self, path: str) -> None:
        """Does not mind if it is not there."""

    def remove_folder(self, folder: str) -> None: ...


class Reader(Protocol):
    """Of one file; for many threads at once."""

    def read(self, start: int, into: memoryview) -> int:
        """How many bytes came: fewer only at the end of the file."""

    def close(self) -> None: ...


class NoRoom(OSError):
    """The disk is too full for a file. Nothing of it was left behind."""

    def __init__(self, path: str, needed_bytes: int, free_bytes: int) -> None:
        text = f"no room for {path}: it needs {needed_bytes} bytes, {free_bytes} are free"
        super().__init__(errno.ENOSPC, text)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        return str(self.args[1])


def open_store(where: str | Path) -> Store:
    """A folder, or a URL of fsspec: s3://bucket/run, memory://x, file:///scratch/run."""
    from everstep.state.folder import FolderStore

    text = str(where)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text and "::" not in text:
        return FolderStore(Path(text).absolute())
    from everstep.state.remote import RemoteStore  # its imports cost more than a folder's whole save

    return RemoteStore(text)


def chunks(num_bytes: int) -> list[tuple[int, int]]:
    """(first byte, one past the last) of each chunk."""
    return [(start, min(start + CHUNK_BYTES, num_bytes)) for start in range(0, num_bytes, CHUNK_BYTES)]
