"""What a session tells of replicas that differ: the facts, once all members have compared their states."""

from __future__ import annotations

import msgspec


class Corruption(msgspec.Struct, frozen=True):
    """The states of `step` committed steps, which replicas should hold bit by bit alike, differ; or see `audit`."""

    epoch: int  # in which it was found; nothing is committed in it any more
    step: int
    workers: tuple[str, ...]  # who is wrong; not `sure`: who may be
    sure: bool  # the others agree against them, or what they had told differs from what all came to when it was redone
    parts: tuple[str, ...] = ()  # the first tensors that differ, by name
    marks: tuple[int, ...] = ()  # fingerprints by role
    verified: int = -1  # the newest step whose states were found alike; or up to which an audit found all right
    audit: bool = False  # states are alike, but an audit of the next step found that gradients are wrong
