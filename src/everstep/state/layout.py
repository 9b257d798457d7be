"""Names and small files of a checkpoint, pure:

    WHERE/latest                           the name of the newest complete step, for people
    WHERE/step-0000000123/__0_0.distcp     the data of shard 0, byte for byte as in memory
    WHERE/step-0000000123/__0_0.index      what is where in it, with the sum of each chunk (state.image)
    WHERE/step-0000000123/.metadata        for stock torch.distributed.checkpoint; never read by us
    WHERE/step-0000000123/manifest.json    what belongs to the step: sizes and checksums
    WHERE/step-0000000123/COMPLETE         written last: the checksum of the manifest

    WHERE/.claims/                         who is writing, reading or deleting what (state.claims)

While a step is written its folder has a longer name, step-0000000123-e9-0f3a5c77, with the epoch and a hash of the job:
so two saves of one step, with a rollback between them, never share a folder. In an object store, which cannot rename
folders, it keeps that name; in a folder only when the short one is taken.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
import xxhash

from everstep.state.image import Damaged, Index

VERSION = 1
METADATA, MANIFEST, COMPLETE, LATEST = ".metadata", "manifest.json", "COMPLETE", "latest"
TEMPORARY = ".tmp-"  # in names of files which are being written
CLAIMS = ".claims"
FOLDER = re.compile(r"step-(\d{10,18})(?:-e\d{1,18}-[0-9a-f]{8})?")
INDEX_NAME = re.compile(r"__\d{1,9}_0\.index")


class Key(NamedTuple):
    """What shards of one save agree in. Images with equal keys and shard hold the same bytes."""

    job: str
    step: int
    epoch: int
    num_shards: int

    @classmethod
    def of(cls, index: Index) -> Key:
        return cls(index.job, index.step, index.epoch, index.num_shards)


class File(msgspec.Struct, frozen=True):
    """checksum: xxh3_64 of the contents; of a data file, of the sums of its chunks, each as 8 bytes, big end first."""

    name: str
    num_bytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True):
    version: int
    job: str
    step: int
    epoch: int
    num_shards: int
    written_s: float  # wall clock of the node that took the latest of the shards
    num_tensors: int
    num_bytes: int  # of all data
    files: tuple[File, ...]

    @property
    def key(self) -> Key:
        return Key(self.job, self.step, self.epoch, self.num_shards)


def folder_of(step: int) -> str:
    return f"step-{step:010d}"


def working_folder(key: Key) -> str:
    """Where a save is written: no two have the same."""
    number = xxhash.xxh3_64_intdigest(f"{key.job} {key.num_shards}".encode()) & 0xFFFFFFFF
    return f"{folder_of(key.step)}-e{key.epoch}-{number:08x}"


def step_of(folder: str) -> int | None:
    """None for a folder which is not a checkpoint's."""
    match = FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def data_name(shard: int) -> str:
    return f"__{shard}_0.distcp"


def index_name(shard: int) -> str:
    return f"__{shard}_0.index"


def checksum(data: bytes | memoryview) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def sums_checksum(sums: tuple[int, ...]) -> str:
    return checksum(b"".join(number.to_bytes(8, "big") for number in sums))


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def marker(manifest: bytes) -> bytes:
    """The contents of COMPLETE."""
    return f"{checksum(manifest)}\n".encode()


def decode(manifest: bytes, complete: bytes) -> Manifest:
    """Raises Damaged for a manifest which is not the one that was marked."""
    if marker(manifest) != complete:
        raise Damaged(f"{MANIFEST} and {COMPLETE} do not fit: one of them is cut short or damaged")
    try:
        decoded = msgspec.json.decode(manifest, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Damaged(f"{MANIFEST} is not one: {error}") from error
    if decoded.version != VERSION:
        raise Damaged(f"{MANIFEST} is of version {decoded.version}, this is version {VERSION}")
    return decoded


def differing(manifest: Manifest, sizes: dict[str, int]) -> list[str]:
    """The files which are missing or of another size, each in words."""
    found = []
    for file in manifest.files:
        size = sizes.get(file.name)
        if size is None:
            found.append(f"{file.name} is missing ({file.num_bytes} bytes)")
        elif size != file.num_bytes:
            found.append(f"{file.name} has {size} bytes and not {file.num_bytes}")
    return found
