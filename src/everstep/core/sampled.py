"""Where the threads of a worker spent some seconds, as its sampler saw it: stacks of functions, and how long each held.

A sample stands for the time since the one before. So a call that kept the interpreter's lock for a second, in which no
sample could be taken, counts as a second.
"""

from __future__ import annotations

import msgspec

MAX_STACKS = 2000  # different ones that are told; the time of the others is told as one of no function
MAX_DEPTH = 96  # functions of one stack; the middle of a deeper one is left out


class Function(msgspec.Struct, frozen=True, array_like=True):
    """`kind`: whose it is: script, torch, everstep or library (whatever else is installed, Python's own too)."""

    name: str
    file: str
    line: int  # where it begins
    kind: str


class Stack(msgspec.Struct, frozen=True, array_like=True):
    """`functions`: places in Sampled.functions, outermost first. `line`: that the innermost was at."""

    thread: str
    functions: tuple[int, ...]
    line: int
    ns: int


class Sampled(msgspec.Struct, frozen=True):
    """`seconds`: that were sampled; `longest_s`: between two samples; `cpu_s`: that the sampling itself took."""

    functions: tuple[Function, ...]
    stacks: tuple[Stack, ...]
    samples: int
    seconds: float
    longest_s: float
    cpu_s: float
