"""What the members' nodes keep of the job's state, and which of it all can go back to: pure functions.

A kept state is whole when the vaults of the members' nodes together have every shard of it, all of one commit, or when
it is complete on disk. Of a state that a rollback threw away nothing may come back, also from a node that was away
meanwhile: the samples of its steps were dealt again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from everstep.core.formation import Rollback

DISK = -1  # in place of a shard: all of them, on disk; in place of a role: on disk

Commit = tuple[int, int]  # steps committed, and the epoch whose gradients made the last of them


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """One shard in the node's vault; or, with `shard` DISK, a whole state, complete on disk as seen from here."""

    step: int
    shard: int
    num_shards: int
    epoch: int = 0  # whose gradients made the last step; 0: another job's, or the initial state


class Image(msgspec.Struct, frozen=True, order=True):
    """A whole kept state. Ordered: the newest step, its later commit, memory before disk."""

    step: int
    epoch: int
    in_memory: bool
    num_shards: int


def newest(kept: Sequence[Collection[Kept]], rollbacks: Sequence[Rollback], failed: Collection[Commit]) -> Image | None:
    """Of what the members' nodes keep, by role: the newest state that is whole, and not among those that `failed`."""
    shards: dict[Image, set[int]] = {}
    for each in {each for mine in kept for each in mine}:
        if (each.step, each.epoch) not in failed and not _thrown_away(each, rollbacks):
            image = Image(each.step, each.epoch, each.shard != DISK, each.num_shards)
            shards.setdefault(image, set()).add(each.shard)
    return max((i for i, found in shards.items() if not i.in_memory or len(found) == i.num_shards), default=None)


def _thrown_away(kept: Kept, rollbacks: Sequence[Rollback]) -> bool:
    return any(kept.epoch < rollback.epoch and kept.step > rollback.step for rollback in rollbacks)


def places(kept: Sequence[Collection[Kept]], image: Image) -> list[tuple[int, ...]]:
    """For each role, by saved shard, the role from whose node it takes that: its own, else the load is spread."""
    if not image.in_memory:
        return [(DISK,) * image.num_shards] * len(kept)
    wanted = [Kept(image.step, shard, image.num_shards, image.epoch) for shard in range(image.num_shards)]
    having = [[role for role, mine in enumerate(kept) if each in mine] for each in wanted]
    return [tuple(role if role in roles else roles[role % len(roles)] for roles in having) for role in range(len(kept))]
