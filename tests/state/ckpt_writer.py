"""Forks a process for each line on its standard input, which saves one step after the other until it is killed.

Run by test_killed_saves: python ckpt_writer.py WHERE. Prints the process's id. No torch: a fork takes milliseconds.
"""

from __future__ import annotations

import mmap
import os
import sys

from everstep.state.disk import Checkpoints
from everstep.state.image import CHUNK_BYTES, VERSION, Index
from everstep.state.retention import Retention

NUM_BYTES = CHUNK_BYTES + 1000
NUM_SHARDS = 2


def image(step: int, shard: int) -> tuple[Index, memoryview]:
    """Every byte of it depends on the step and the shard."""
    index = Index(VERSION, "killed", step, 1, shard, NUM_SHARDS, float(step), NUM_BYTES, (), (), ())
    data = memoryview(mmap.mmap(-1, NUM_BYTES))
    data[:] = bytes([(step * NUM_SHARDS + shard) % 251]) * NUM_BYTES
    return index, data


def save_for_ever(where: str) -> None:
    checkpoints = Checkpoints(where, Retention(newest=2))
    step = max(checkpoints.found(), default=0)
    while True:
        step += 1
        for shard in range(NUM_SHARDS):
            checkpoints.write(*image(step, shard))


def main(where: str) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            save_for_ever(where)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
