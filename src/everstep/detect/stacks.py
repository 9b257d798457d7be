"""Reads faulthandler's text: is the main thread of a worker waiting for other workers, and where is it?

The innermost frame decides. Frames further out lie in torch.distributed for anyone who trains under FSDP or a
pipeline schedule. A wait for a data loader, a lock or a sleep is not communication: it is what others wait for.
"""

from __future__ import annotations

import re

import msgspec

FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+|\?+) in (?P<function>.+)$')
HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):$")
MORE_THREADS = "..."  # a line of its own; of a stack that is too deep it is indented
COMMUNICATION = ("torch/distributed/", "everstep/comms/")
# Native code that ends only when the other workers' data arrive: the reducer's all-reduce, or the device's queue.
NATIVE_WAITS = (("torch/autograd/graph.py", "_engine_run_backward"), ("torch/cuda/__init__.py", "synchronize"))


class Frame(msgspec.Struct, frozen=True):
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.split('/')[-2:])}:{self.line})"


def main_thread(text: str) -> tuple[Frame, ...]:
    """Frames of the main thread, innermost first. faulthandler writes the main thread last, and at most 100 threads,
    the youngest: with more the last one is any. Empty: none found."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if line == MORE_THREADS:
            return ()
        if HEADER.match(line):
            frames = []
        elif found := FRAME.match(line):
            frames.append(Frame(found["file"].replace("\\", "/"), found["line"], found["function"]))
    return tuple(frames)


def waits(frames: tuple[Frame, ...]) -> bool:
    """Whether these frames are inside a wait for other workers."""
    if not frames:
        return False
    innermost = frames[0]
    if any(part in innermost.file for part in COMMUNICATION):
        return True
    return any(innermost.file.endswith(file) and innermost.function == name for file, name in NATIVE_WAITS)


def place(frames: tuple[Frame, ...]) -> str:
    """Where a person should look: the innermost frame, and the script's own innermost one if that is another."""
    if not frames:
        return ""
    own = next((f for f in frames if not _library(f.file)), frames[0])
    return str(own) if own is frames[0] else f"{frames[0]}, called from {own}"


def _library(file: str) -> bool:
    return file.startswith("<frozen") or "/site-packages/" in file or re.search(r"/lib/python3\.\d+/", file) is not None
