"""FAULTS D1: whoever saves is killed at any moment; the newest complete step is whole, and the remains are cleaned."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import ckpt_writer

from everstep.state.disk import Checkpoints
from everstep.state.layout import TEMPORARY
from everstep.state.retention import Retention

NUM_KILLS = 30
SAVES = 2.0  # a kill comes within so many saves


def test_killed_at_30_random_moments(tmp_path: Path) -> None:
    took_s = sum(Checkpoints(tmp_path).write(*ckpt_writer.image(1, shard)).took_s for shard in (0, 1))
    command = [sys.executable, ckpt_writer.__file__, str(tmp_path)]
    moments = random.Random(1)
    unfinished, newest = 0, 1
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin and writer.stdout
        for _ in range(NUM_KILLS):
            print("go", file=writer.stdin, flush=True)
            pid = int(writer.stdout.readline())
            signal.sigtimedwait([signal.SIGUSR2], moments.uniform(0, SAVES * took_s))  # a pause of so long
            os.kill(pid, signal.SIGKILL)
            assert writer.stdout.readline() == "gone\n"
            unfinished += bool(Checkpoints(tmp_path).scan().unfinished)
            newest = whole(tmp_path, newest)
        writer.stdin.close()
    assert unfinished >= NUM_KILLS // 5, "the kills did not hit saves"
    checkpoints = Checkpoints(tmp_path, Retention(newest=2))
    for step in (newest + 1, newest + 2):  # the first may go on with what is there of that step
        for shard in (0, 1):
            written = checkpoints.write(*ckpt_writer.image(step, shard))
        assert written.complete
    names = {path.name for path in tmp_path.rglob("*")}
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{newest + n:010d}" for n in (1, 2)}
    assert not [name for name in names if TEMPORARY in name] and not [*(tmp_path / ".claims").iterdir()]


def whole(where: Path, at_least: int) -> int:
    """The newest step; it is read, byte by byte."""
    checkpoints = Checkpoints(where)
    assert not checkpoints.scan().damaged
    step = checkpoints.found()[0]
    assert step >= at_least and checkpoints.verify(step) == []
    for shard in (0, 1):
        data = (where / checkpoints.step(step).folder / f"__{shard}_0.distcp").read_bytes()
        assert data == ckpt_writer.image(step, shard)[1]
    return step
