"""Reads everything of one checkpoint, and names each file which is missing, cut short or damaged, and where."""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from everstep.state import image, layout
from everstep.state.direct import NUM_THREADS
from everstep.state.image import CHUNK_BYTES, Damaged, Index
from everstep.state.layout import COMPLETE, INDEX_NAME, MANIFEST, Manifest
from everstep.state.store import Reader, Store, chunks

Progress = Callable[[int], None]  # so many more bytes were read


class Fault(msgspec.Struct, frozen=True):
    """`offset`: the first byte which may be wrong; None when the file is missing."""

    file: str
    offset: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def verify(store: Store, folder: str, progress: Progress = lambda num_bytes: None) -> list[Fault]:
    """All faults of a step's folder; empty when it is as it was written."""
    sizes = store.sizes(folder)
    if COMPLETE not in sizes:
        return [Fault(COMPLETE, None, "is missing: the step was never completed, or is being removed")]
    manifest, faults = _manifest(store, folder)
    told = {file.name: file for file in manifest.files} if manifest else {}
    for file in told.values():
        size = sizes.get(file.name)
        if size is None:
            faults.append(Fault(file.name, None, f"is missing ({file.num_bytes} bytes)"))
        elif size != file.num_bytes:
            faults.append(Fault(file.name, min(size, file.num_bytes), f"has {size} bytes and not {file.num_bytes}"))
    for name in sorted(name for name in told or sizes if name in sizes):
        if not INDEX_NAME.fullmatch(name) and name != layout.METADATA:
            continue
        encoded = store.get(f"{folder}/{name}")
        if name in told and layout.checksum(encoded) != told[name].checksum:
            faults.append(Fault(name, 0, "is damaged"))
        if INDEX_NAME.fullmatch(name):
            faults += _shard(store, folder, name, encoded, sizes, progress)
    unique: dict[tuple[str, int | None], Fault] = {}
    for fault in faults:
        unique.setdefault((fault.file, fault.offset), fault)
    return list(unique.values())


def _manifest(store: Store, folder: str) -> tuple[Manifest | None, list[Fault]]:
    try:
        marker = store.get(f"{folder}/{COMPLETE}")
        return layout.decode(store.get(f"{folder}/{MANIFEST}"), marker), []
    except FileNotFoundError:
        return None, [Fault(MANIFEST, None, "is missing")]
    except Damaged as error:
        return None, [Fault(MANIFEST, 0, str(error))]


def _shard(
    store: Store, folder: str, name: str, encoded: bytes, sizes: dict[str, int], progress: Progress
) -> list[Fault]:
    try:
        index = image.decode(encoded)
    except Damaged as error:
        return [Fault(name, 0, str(error))]
    data = layout.data_name(index.shard)
    size = sizes.get(data)
    if size is None:
        return [Fault(data, None, f"is missing ({index.num_bytes} bytes)")]
    reader = store.reader(f"{folder}/{data}")
    try:
        return list(_data(reader, index, data, size, progress))
    finally:
        reader.close()


def _data(reader: Reader, index: Index, name: str, size: int, progress: Progress) -> Iterator[Fault]:
    """What is not there is told once, with where the file ends; of the rest each chunk."""
    if size != index.num_bytes:
        yield Fault(name, min(size, index.num_bytes), f"has {size} bytes and not {index.num_bytes}")
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(NUM_THREADS):
        buffers.put(memoryview(mmap.mmap(-1, CHUNK_BYTES)))

    def good(span: tuple[int, int], told: int) -> bool:
        buffer = buffers.get()
        try:
            got = reader.read(span[0], buffer[: span[1] - span[0]])
            return got == span[1] - span[0] and xxhash.xxh3_64_intdigest(buffer[:got]) == told
        finally:
            buffers.put(buffer)

    spans = [span for span in chunks(index.num_bytes) if span[1] <= size]
    with ThreadPoolExecutor(NUM_THREADS, "ckpt-verify") as pool:
        for (start, end), right in zip(spans, pool.map(good, spans, index.sums), strict=True):
            progress(end - start)
            if not right:
                yield Fault(name, start, f"is damaged between bytes {start} and {end}")
