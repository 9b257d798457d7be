"""Words about saved state for sessions and the control plane: how far a save gets, and what became of it."""

from __future__ import annotations

import enum

import msgspec


class Tier(enum.IntEnum):
    """How far a step's state is saved. The farther one includes the nearer."""

    NOTHING = 0
    MEMORY = 1  # in the vaults of nodes
    DISK = 2  # durable: it outlives the job


class Saves(msgspec.Struct, frozen=True):
    """What one session knows of saves to disk, in steps committed; -1: none."""

    requested: int = -1  # the newest step that was to be saved
    durable: int = -1  # the newest that is complete on disk
    failed_step: int = -1  # the newest whose save failed
    failed: str = ""  # why that one did
