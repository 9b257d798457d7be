"""Words about saved state for sessions and the control plane: how far a save gets, and what became of it."""

from __future__ import annotations

import enum
from collections.abc import Collection

import msgspec


class Tier(enum.IntEnum):
    """How far a step's state is saved. The farther one includes the nearer."""

    BUSY = -1  # only as a wish: the last one is on its way to other nodes, so memory has to wait
    NOTHING = 0
    MEMORY = 1  # in the vaults of nodes
    DISK = 2  # durable: it outlives the job


def agreed(wishes: Collection[Tier]) -> Tier:
    """The farthest wish counts. But in memory a state is whole only once all copies are where they belong, and nodes
    have room for two: while one member is busy with the last, a newer one could push out the only whole state.
    """
    most = max(wishes)
    return Tier.NOTHING if most is not Tier.DISK and Tier.BUSY in wishes else most


class Saves(msgspec.Struct, frozen=True):
    """What one session knows of saves to disk, in steps committed; -1: none."""

    requested: int = -1  # the newest step that was to be saved
    durable: int = -1  # the newest that is complete on disk
    failed_step: int = -1  # the newest whose save failed
    failed: str = ""  # why that one did
