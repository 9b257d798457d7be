"""The members of a script's own loop, without a vote: what they say to each other, and what of the state each holds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from everstep.comms.collectives import Communicator
from everstep.probe import boot
from everstep.state.flatten import Stateful
from everstep.state.local import is_sharded
from everstep.train import restartable
from everstep.train.kept import Kept

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What members tell each other first."""

    node: str
    vault: str
    part: tuple[int, int]  # shard of so many
    job: str
    epoch: int


class Back(msgspec.Struct, frozen=True, array_like=True):
    """How a restore went."""

    good: bool
    fingerprint: int


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a member's node keeps."""

    kept: tuple[Kept, ...]


class Members:
    """Those who run the loop together: over the links by which they entered their function, or over links of our own
    besides the script's process group."""

    def __init__(self) -> None:
        self.entry = member = restartable.present()
        self._links: Communicator | None = None
        self.epoch = int(os.environ.get("EVERSTEP_EPOCH") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + 1
        if member is not None:
            self._links, self.epoch = member.entrance.beside, member.entrance.epoch
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_world_size() > 1:
                self._links = _links()
        elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ValueError("keep() comes after init_process_group: all members restore the same step")
        self.rank = self._links.rank if self._links is not None else 0

    @boot.waiting
    def gather(self, mine: T) -> tuple[T, ...]:
        """What each says, by rank. Raises EpochBroken."""
        if self._links is None:
            return (mine,)
        said = self._links.all_gather_bytes(msgspec.msgpack.encode(mine))
        return tuple(msgspec.msgpack.decode(each, type=type(mine)) for each in said)

    @boot.waiting
    def told(self, word: int) -> int:
        """The first member's word. Raises EpochBroken."""
        if self._links is None:
            return word
        said = torch.tensor([word], dtype=torch.uint8)
        self._links.broadcast(said, 0)
        return int(said.item())


def _links() -> Communicator:
    from everstep.comms.group import Group

    group = torch.distributed.new_group(backend="everstep")
    assert isinstance(group, Group)
    return group.communicator


def part_of(objects: Mapping[str, Stateful]) -> tuple[int, int]:
    """(shard, how many) that this member holds: by its place in the mesh of the sharded parameters."""
    modules = [thing for thing in objects.values() if isinstance(thing, torch.nn.Module)]
    sharded: list[Any] = [p for module in modules for p in module.parameters() if is_sharded(p)]
    meshes = {parameter.device_mesh for parameter in sharded}
    if not meshes:
        return 0, 1
    if len(meshes) > 1:
        raise ValueError("keep() takes a model that is sharded over one mesh")
    (mesh,) = meshes
    axes = {axis for p in sharded for axis, place in enumerate(p.placements) if not place.is_replicate()}
    shard, num_shards = 0, 1
    for axis in sorted(axes):
        shard, num_shards = shard * mesh.size(axis) + mesh.get_local_rank(axis), num_shards * mesh.size(axis)
    return shard, num_shards


def shards_of(hellos: Sequence[Hello]) -> int:
    """Raises ValueError when not all members together hold replicas x shards, in the order of ranks."""
    num_shards = hellos[0].part[1]
    if any(hello.part != (rank % num_shards, num_shards) for rank, hello in enumerate(hellos)):
        raise ValueError("keep() takes a model that is alike on all ranks, or sharded by a mesh of (replicas, shards)")
    return num_shards
