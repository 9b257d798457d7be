"""Randomness of a step as a function of (seed, step, role), so that whoever takes a role over draws the same numbers.

A generator that simply runs on would be part of the state which dies with its worker.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def reseed(seed: int, step: int, role: int) -> None:
    """Set the global generators of random, numpy and torch (all its devices)."""
    digest = hashlib.blake2b(f"everstep {seed} {step} {role}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
    torch.manual_seed(number)
    random.seed(number)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)
