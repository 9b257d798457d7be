"""Checkpoints in a folder or an object store: written shard by shard, complete when all shards are, found again.

There is no coordinator. Who writes a shard looks afterwards whether it was the last, and then writes what makes the
step complete; two who both do that write the same bytes. Nothing without the marker COMPLETE is ever given out.

Policy for saves that meet: a shard which is there, or which another process has begun, is not written again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import xxhash

from everstep.state import image, layout, stock
from everstep.state.claims import Claim, claim, living
from everstep.state.image import Damaged, Index, chunk_span
from everstep.state.layout import COMPLETE, INDEX_NAME, LATEST, MANIFEST, METADATA, Key, Manifest
from everstep.state.retention import READING, WRITING, Pruned, Retention, prune, sweep
from everstep.state.store import NoRoom, Reader, Store, open_store
from everstep.state.verify import Fault, Progress, verify


class Written(msgspec.Struct, frozen=True):
    """What became of one shard. `complete`: all shards of the step are durable, and it can be restored from.

    durable: this shard is, whoever wrote it; False: another process has begun it. wrote: this call did.
    """

    step: int
    shard: int
    complete: bool
    durable: bool
    wrote: bool
    num_bytes: int
    took_s: float
    removed: tuple[str, ...] = ()  # folders of older steps, by retention


class Step(msgspec.Struct, frozen=True):
    """A folder with the marker, whose manifest is right and whose files all have their sizes."""

    folder: str
    manifest: Manifest

    @property
    def order(self) -> tuple[int, float]:
        return self.manifest.step, self.manifest.written_s


class Scan(msgspec.Struct, frozen=True):
    """`complete`: newest first. `damaged`: folders with the marker, and why each is left out."""

    complete: tuple[Step, ...]
    damaged: tuple[tuple[str, str], ...]
    unfinished: tuple[str, ...]


class Checkpoints:
    """All checkpoints of one place. Every method raises OSError when the place fails, Damaged for damaged bytes."""

    def __init__(self, where: str | Path, retention: Retention | None = None) -> None:
        """retention: what `write` leaves of the older steps after it completed one; None: all complete ones."""
        self.store: Store = open_store(where)
        self.retention = retention

    def write(self, index: Index, data: memoryview, complete: Callable[[], None] = lambda: None) -> Written:
        """Write one shard, durably, and complete the step if it is the last. `data` must not change meanwhile.

        `complete` is called as soon as the step is complete, and this call did it: what follows takes a while.

        Raises NoRoom when the disk is too full, also without the unfinished saves of dead processes; Damaged when the
        bytes are not those of `index.sums`. Then nothing of this shard is left.
        """
        assert data.nbytes == index.num_bytes and 0 <= index.shard < index.num_shards
        try:
            return self._write(index, data, complete)
        except NoRoom as error:
            if not sweep(self.store, self.scan(), older_than=index.step):
                raise self._no_room(index, error) from error
        try:
            return self._write(index, data, complete)
        except NoRoom as error:
            raise self._no_room(index, error) from error

    def _no_room(self, index: Index, error: NoRoom) -> NoRoom:
        return NoRoom(f"step {index.step} in {self.store.name}", index.num_bytes, error.free_bytes)

    def _write(self, index: Index, data: memoryview, tell: Callable[[], None]) -> Written:
        began, key, wrote = time.monotonic(), Key.of(index), False
        folder = layout.working_folder(key)
        with claim(self.store, f"{WRITING}.{folder}.{index.shard}") as mine:
            complete = self._is_complete(key)
            busy = not complete and any(name < mine.name for name in mine.others())
            if not complete and not busy:
                wrote = self._write_shard(folder, index, data, mine)
            try:
                complete = complete or self._finish(folder, key, tell)
            except BaseException:
                if wrote:
                    self._drop(folder, index.shard)
                raise
        removed = self._tidy(index.step) if complete and wrote else ()
        took_s, durable = time.monotonic() - began, complete or not busy
        return Written(index.step, index.shard, complete, durable, wrote, index.num_bytes, took_s, removed)

    def _is_complete(self, key: Key) -> bool:
        for folder in (layout.folder_of(key.step), layout.working_folder(key)):
            try:
                if self.look(folder).manifest.key == key:
                    return True
            except (FileNotFoundError, Damaged):
                continue
        return False

    def _write_shard(self, folder: str, index: Index, data: memoryview, mine: Claim) -> bool:
        """False when it is there already, whole, from a writer that died before the step was complete."""
        self.store.make(folder)
        if self._index(folder, self.store.sizes(folder), index.shard) is not None:
            return False
        path = f"{folder}/{layout.index_name(index.shard)}"
        try:
            self.store.remove(path)
            sums = self.store.write(f"{folder}/{layout.data_name(index.shard)}", data, mine.renew)
            if index.sums and index.sums != sums:
                chunk = next(i for i, pair in enumerate(zip(index.sums, sums, strict=True)) if pair[0] != pair[1])
                raise Damaged(f"{path}: the memory of chunk {chunk} changed after it was summed")
            self.store.put(path, image.encode(msgspec.structs.replace(index, sums=sums)))
        except BaseException:
            self._drop(folder, index.shard)
            raise
        return True

    def _index(self, folder: str, names: dict[str, int], shard: int) -> Index | None:
        """Of a shard whose data is there in full; None when it is not, or the index is damaged."""
        try:
            index = image.decode(self.store.get(f"{folder}/{layout.index_name(shard)}"))
        except (FileNotFoundError, Damaged):
            return None
        return index if names.get(layout.data_name(shard)) == index.num_bytes and index.shard == shard else None

    def _drop(self, folder: str, shard: int) -> None:
        """After a failure: nothing of this shard stays, nor the folder, if nobody else is at it."""
        with suppress(OSError):  # the first error is the one to tell; what stays is swept after the next save
            for name in (layout.index_name(shard), layout.data_name(shard)):
                self.store.remove(f"{folder}/{name}")
            left = any(INDEX_NAME.fullmatch(name) for name in self.store.sizes(folder))
            if not left and len(living(self.store, f"{WRITING}.{folder}")) <= 1:
                self.store.remove_folder(folder)

    def _finish(self, folder: str, key: Key, tell: Callable[[], None]) -> bool:
        """Complete the step if all shards are there. May be done twice, and by two at once."""
        try:
            names = self.store.sizes(folder)
            if any(layout.index_name(shard) not in names for shard in range(key.num_shards)):
                return self._is_complete(key)
            indexes = [self._index(folder, names, shard) for shard in range(key.num_shards)]
            whole = [index for index in indexes if index is not None and Key.of(index) == key]
            if len(whole) < key.num_shards:
                return False
            metadata = stock.metadata(whole)
            manifest = layout.encode(_manifest(whole, metadata))
            self.store.put(f"{folder}/{METADATA}", metadata)
            self.store.put(f"{folder}/{MANIFEST}", manifest)
            self.store.put(f"{folder}/{COMPLETE}", layout.marker(manifest))
        except FileNotFoundError:  # somebody else completed it, and the folder has its short name
            if not self._is_complete(key):
                raise
        self.store.settle(folder, layout.folder_of(key.step))
        tell()
        self._name_latest()
        return True

    def _name_latest(self) -> None:
        complete = self.scan().complete
        if complete:
            self.store.put(LATEST, f"{complete[0].folder}\n".encode())

    def _tidy(self, written: int) -> tuple[str, ...]:
        """What was just written stays, also when a job that went back finds newer steps of before here."""
        if self.retention is not None:
            return prune(self.store, self.scan, self.retention, keep=written).removed
        return sweep(self.store, self.scan())

    def retract(self, wrong: Callable[[Manifest], bool]) -> tuple[str, ...]:
        """Nobody restores these any more: they lose their marker, as if they had not been finished. Their folders."""
        found = [step.folder for step in self.scan().complete if wrong(step.manifest)]
        for folder in found:
            self.store.remove(f"{folder}/{COMPLETE}")
        if found:
            self._name_latest()
        return tuple(found)

    def prune(self, retention: Retention, dry_run: bool = False) -> Pruned:
        """Remove what retention does not keep, and what dead saves left. One process at a time does; others do not."""
        pruned = prune(self.store, self.scan, retention, dry_run=dry_run)
        if pruned.removed and not dry_run:
            with claim(self.store, f"{WRITING}.{LATEST}"):  # else the end of a save takes the new file for a stray
                self._name_latest()
        return pruned

    def look(self, folder: str) -> Step:
        """Raises FileNotFoundError without the marker; Damaged."""
        complete = self.store.get(f"{folder}/{COMPLETE}")
        try:
            manifest = layout.decode(self.store.get(f"{folder}/{MANIFEST}"), complete)
        except FileNotFoundError as error:
            raise Damaged(f"{folder}/{MANIFEST} is missing") from error
        except Damaged as error:
            raise Damaged(f"{folder}: {error}") from error
        differing = layout.differing(manifest, self.store.sizes(folder))
        if differing or manifest.step != layout.step_of(folder):
            raise Damaged(f"{folder}: {'; '.join(differing) or f'holds step {manifest.step}'}")
        return Step(folder, manifest)

    def scan(self) -> Scan:
        """Reads the small files of each step; not the data."""
        complete, damaged, unfinished = [], [], []
        for folder in self.store.folders():
            if layout.step_of(folder) is None:
                continue
            try:
                complete.append(self.look(folder))
            except FileNotFoundError:
                unfinished.append(folder)
            except Damaged as error:
                damaged.append((folder, str(error)))
        complete.sort(key=lambda step: step.order, reverse=True)
        return Scan(tuple(complete), tuple(sorted(damaged)), tuple(sorted(unfinished)))

    def verify(self, step: int, progress: Progress = lambda num_bytes: None) -> list[Fault]:
        """Read everything of a step; what is wrong with it."""
        try:
            return verify(self.store, self.step(step).folder, progress)
        except (Damaged, FileNotFoundError):
            return verify(self.store, layout.folder_of(step), progress)

    def newest(self, report: Callable[[str, list[Fault]], None] = lambda folder, faults: None) -> Step | None:
        """The newest step which is whole, by reading it; `report` is told of each newer folder which is not."""
        scan = self.scan()
        steps = {step.folder: step for step in scan.complete} | dict.fromkeys(folder for folder, _ in scan.damaged)
        for folder in sorted(steps, key=lambda folder: layout.step_of(folder) or 0, reverse=True):
            faults = verify(self.store, folder)
            if not faults:
                return steps[folder]
            report(folder, faults)
        return None

    def found(self) -> list[int]:
        """The complete steps, newest first."""
        return list(dict.fromkeys(step.manifest.step for step in self.scan().complete))

    def step(self, step: int) -> Step:
        """Raises FileNotFoundError when it is not there complete; Damaged."""
        found = [one for one in self.scan().complete if one.manifest.step == step]
        if found:
            return found[0]
        return self.look(layout.folder_of(step))

    def sources(self, step: int) -> list[FileSource]:
        """Its images, by shard; reading checks every chunk. Raises Damaged, FileNotFoundError."""
        return self.open(self.step(step))

    def open(self, step: Step) -> list[FileSource]:
        checksums = {file.name: file.checksum for file in step.manifest.files}
        return [self._source(step, shard, checksums) for shard in range(step.manifest.num_shards)]

    def _source(self, step: Step, shard: int, checksums: dict[str, str]) -> FileSource:
        name, path = layout.index_name(shard), f"{step.folder}/{layout.index_name(shard)}"
        encoded = self.store.get(path)
        if layout.checksum(encoded) != checksums.get(name):
            raise Damaged(f"{path} (of {len(encoded)} bytes) is damaged")
        index = image.decode(encoded)
        data = layout.data_name(shard)
        if layout.sums_checksum(index.sums) != checksums.get(data) or Key.of(index) != step.manifest.key:
            raise Damaged(f"{path} is not the one of {MANIFEST}")
        return FileSource(index, self.store.reader(f"{step.folder}/{data}"), f"{step.folder}/{data}")

    @contextmanager
    def reading(self, step: int) -> Iterator[list[FileSource]]:
        """As `sources`, under a lease: nobody prunes the step meanwhile. Without one where we may not write."""
        with self.reading_of(self.step(step)) as sources:
            yield sources

    @contextmanager
    def reading_of(self, found: Step) -> Iterator[list[FileSource]]:
        try:
            lease = Claim(self.store, f"{READING}.{found.folder}")
        except OSError:  # a read-only place: who may delete there cannot be told, and each chunk is checked anyway
            with _closing(self.open(found)) as sources:
                yield sources
            return
        try:  # after the claim: whoever deletes takes the marker first
            with _closing(self.open(self.look(found.folder))) as sources:
                for source in sources:
                    source.each = lease.renew
                yield sources
        finally:
            lease.release()


class FileSource:
    """One shard's data in a file (image.Source). For many threads at once."""

    def __init__(self, index: Index, reader: Reader, name: str) -> None:
        self._index = index
        self._reader = reader
        self.name = name
        self.each: Callable[[], None] = lambda: None

    @property
    def index(self) -> Index:
        return self._index

    def read(self, chunk: int, into: memoryview) -> None:
        """`into`: of the chunk's length, or longer. Raises Damaged, OSError."""
        start, end = chunk_span(self._index, chunk)
        self.each()
        got = self._reader.read(start, into[: end - start])
        if got < end - start:
            raise Damaged(f"{self.name} is cut short at byte {start + got} of {self._index.num_bytes}")
        if xxhash.xxh3_64_intdigest(into[: end - start]) != self._index.sums[chunk]:
            raise Damaged(f"{self.name} is damaged between bytes {start} and {end} (chunk {chunk})")

    def close(self) -> None:
        self._reader.close()


@contextmanager
def _closing(sources: list[FileSource]) -> Iterator[list[FileSource]]:
    try:
        yield sources
    finally:
        for source in sources:
            source.close()


def _manifest(indexes: Sequence[Index], metadata: bytes) -> Manifest:
    """The same bytes whoever makes it."""
    files = [layout.File(METADATA, len(metadata), layout.checksum(metadata))]
    for index in indexes:
        encoded = image.encode(index)
        files.append(layout.File(layout.index_name(index.shard), len(encoded), layout.checksum(encoded)))
        data = layout.data_name(index.shard)
        files.append(layout.File(data, index.num_bytes, layout.sums_checksum(index.sums)))
    first = indexes[0]
    return Manifest(
        layout.VERSION,
        *Key.of(first),
        written_s=max(index.written_s for index in indexes),
        num_tensors=len({piece.name for index in indexes for piece in index.pieces}),
        num_bytes=sum(index.num_bytes for index in indexes),
        files=tuple(files),
    )
