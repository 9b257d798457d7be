"""The nouns of an examination: readings of a node, complaints about it, and what the nodes of one say to each other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Reading(msgspec.Struct, frozen=True):
    """One number measured on a node. `on`: the device, folder or address it is about; empty: the machine."""

    check: str  # a key of detect.health.RULES
    value: float
    on: str = ""
    detail: str = ""


def encode(readings: Sequence[Reading]) -> bytes:
    return msgspec.json.encode(readings)


def decode(data: bytes) -> list[Reading]:
    """What `encode` made. Nothing when it was cut or changed: it is then as if it had never been."""
    try:
        return msgspec.json.decode(data, type=list[Reading])
    except msgspec.DecodeError:
        return []


class Complaint(msgspec.Struct, frozen=True):
    """What is wrong with a node, in words. Not `broken`: it works, far slower than it should."""

    check: str
    why: str
    broken: bool = True
    sure: bool = True  # False: this node or another one


class Place(msgspec.Struct, frozen=True):
    """Where the other nodes of an examination reach one."""

    node: str
    host: str
    port: int


# Messages. The first node (the host of the examination) asks, every node answers.


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """A node has examined itself, and waits for the others."""

    place: Place
    readings: tuple[Reading, ...]


class RingAsked(msgspec.Struct, frozen=True, tag=True):
    """Send to the next of `members` and receive from the one before, for about so long."""

    number: int
    members: tuple[Place, ...]
    seconds: float


class RingDone(msgspec.Struct, frozen=True, tag=True):
    """`rate`: bytes per second that came; 0 when it failed, then `why` says how. `wrong`: chunks that came changed."""

    number: int
    rate: float
    wrong: int = 0
    why: str = ""


class GroupSeen(msgspec.Struct, frozen=True):
    """The result of one ring: the lowest rate that a member saw."""

    members: tuple[str, ...]
    rate: float
    passed: bool


class Examined(msgspec.Struct, frozen=True, tag=True):
    """What came out, for every node to show."""

    readings: dict[str, tuple[Reading, ...]]
    complaints: dict[str, tuple[Complaint, ...]]  # of the nodes with any
    groups: tuple[GroupSeen, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()  # groups that fail while each of their members does well elsewhere
