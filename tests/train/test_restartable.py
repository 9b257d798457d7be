"""Members leave their function wherever they are, and enter it again together; this process forms their epochs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from restart_world import Process, World

import everstep
from everstep.core import wire
from everstep.core.formation import Stage
from everstep.detect.blame import BROKEN_BY_PEER
from everstep.train.waker import PROCESS_LEVEL

INTERRUPTED = ("loop", "sleep", "lock", "queue", "collective", "store")
SOON_S = 5.0  # a quiet machine needs a tenth; without the wake-up it is 100

pytestmark = pytest.mark.timeout(150)  # each takes some seconds on a quiet machine


def results(world: World) -> set[str]:
    """What all members came to, each its own; they agree."""
    said = world.finish()
    assert len(said) == len(world.members) and len(set(said)) == 1, said
    return set(said)


def test_survivors_and_a_new_process_enter_together(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    with World(tmp_path / "calm", 2, "waiting", "12") as world:
        world.form()
        undisturbed = results(world)
    with World(tmp_path, 2, "waiting", "12") as world:
        world.form()
        world.until_step(3)
        survivor = world.members[1]
        world.members[0].kill()  # it serves the store, too
        world.until_ready(1)  # told by nobody: its connections broke
        assert survivor.last is not None and survivor.last.epoch == 1 and BROKEN_BY_PEER.search(survivor.last.failure)
        world.replace(0)
        world.form()
        assert results(world) == undisturbed
        assert [line.split()[1:6] for line in survivor.lines("entry")] == [
            ["0", "rank", "1", "of", "2"],
            ["1", "rank", "1", "of", "2"],
        ]
        resumed = [report for report in survivor.reports if report.epoch == 2 and report.resumed]
        assert resumed and resumed[0].stage is Stage.MEMBER and resumed[0].gap_s > 0


@pytest.mark.parametrize("how", INTERRUPTED)
def test_a_function_is_left_wherever_it_is(tmp_path: Path, how: str) -> None:
    with World(tmp_path, 2, "stuck", how) as world:
        world.form()
        world.until(lambda: all(member.lines("now") for member in world.members))
        told_at = time.monotonic()
        world.tell()
        world.until(lambda: all(len(member.lines("entry")) == 2 for member in world.members))
        assert time.monotonic() - told_at < SOON_S
        results(world)


def test_one_that_swallows_the_interrupt_is_interrupted_again(tmp_path: Path) -> None:
    with World(tmp_path, 2, "stuck", "swallow") as world:
        world.form()
        world.until(lambda: all(member.lines("now") for member in world.members))
        world.tell()
        results(world)
        assert world.members[0].lines("swallowed")


def test_one_that_cannot_be_interrupted_ends_its_process(tmp_path: Path) -> None:
    with World(tmp_path, 2, "stuck", "deadlock") as world:
        world.form()
        world.until(lambda: all(member.lines("now") for member in world.members))
        stuck = world.members[0]
        world.tell()
        world.until(lambda: stuck.code() is not None)
        assert stuck.code() == PROCESS_LEVEL
        assert "in deadlock" in stuck.text()  # its stack
        world.replace(0)
        world.form()
        results(world)


def test_an_exception_is_told_once_and_the_process_lives_on(tmp_path: Path) -> None:
    with World(tmp_path, 2, "raising", "0") as world:
        world.form()
        first, other = world.members
        world.until(lambda: first.last is not None and first.last.failure)
        assert first.last is not None
        assert (first.last.stage, first.last.epoch) == (Stage.READY, 1)
        assert first.last.failure == 'KeyError: "the function\'s own mistake"'
        world.until_ready()
        assert other.last is not None and BROKEN_BY_PEER.search(other.last.failure)  # so it is not blamed
        world.tell()
        results(world)
        assert first.text().count("Traceback (most recent call last)") == 1
        assert "in mistake" in first.text() and "waker.py" not in first.text()
        assert "Traceback" not in other.text()


def test_who_returned_waits_for_the_others_and_enters_again_with_them(tmp_path: Path) -> None:
    with World(tmp_path, 2, "early") as world:
        world.form()
        first, other = world.members
        world.until(lambda: other.lines("now") and first.last is not None and first.last.resumed)
        assert first.code() is None
        other.kill()
        world.replace(1)
        world.until_ready(1)
        world.tell()
        assert results(world) == {"result through"}
        assert [line.split()[1:] for line in first.lines("in")] == [["0", "0"], ["0", "1"]]


def test_callbacks(tmp_path: Path) -> None:
    with World(tmp_path, 2, "callbacks") as world:
        world.form()
        world.until(lambda: all(member.lines("now") for member in world.members))
        world.tell()
        results(world)
        words = ("initialise", "abort", "finalise", "health_check")
        said = [line for line in world.members[0].text().splitlines() if line.split(" ")[0] in words]
        assert said == [
            "health_check 0 -1 0",
            "initialise 0 0 2",
            "abort 0 0 2 False",
            "finalise 0 0 2 False",
            "health_check 0 0 2",
            "initialise 1 0 2",
        ]


def test_a_failed_health_check_ends_the_process(tmp_path: Path) -> None:
    with World(tmp_path, 2, "unhealthy") as world:
        world.form()
        world.until(lambda: all(member.lines("now") for member in world.members))
        ill = world.members[0]
        world.tell()
        world.until(lambda: ill.code() is not None)
        assert ill.code() == 1 and "this device is broken" in ill.text()
        world.replace(0)
        world.form()
        results(world)


def test_a_left_out_worker_stops(tmp_path: Path) -> None:
    with World(tmp_path, 2, "waiting", "1000") as world:
        world.form()
        world.until_step(3)
        out = world.members.pop()
        out.socket.sendall(wire.encode(world.tell()))
        assert ended(out) == 1 and "went on without this worker" in out.text()


def ended(process: Process) -> int | None:
    process.process.join(20)
    return process.code()


def test_sys_exit_is_the_end_of_the_script(tmp_path: Path) -> None:
    with World(tmp_path, 1, "exit") as world:
        world.form()
        assert ended(world.members[0]) == 7


def test_a_script_calls_one_function_once(tmp_path: Path) -> None:
    with World(tmp_path, 1, "twice") as world:
        world.form()
        assert ended(world.members[0]) == 1
        assert "ValueError: waiting: a script has one restartable function and calls it once" in world.members[0].text()


# Alone ----------------------------------------------------------------------------------------------------


def test_alone_it_is_a_world_of_one_and_a_plain_call() -> None:
    told: list[int] = []

    @everstep.restartable(initialise=lambda entry: told.append(entry.world_size))
    def double(value: int, *, plus: int = 0) -> int:
        """Twice as much."""
        dist.init_process_group("gloo")
        try:
            return 2 * value * dist.get_world_size() + plus
        finally:
            dist.destroy_process_group()

    before = dict(os.environ)
    assert double(4, plus=1) == 9
    assert double(5) == 10
    assert told == [1, 1] and double.__doc__ == "Twice as much." and dict(os.environ) == before


def test_alone_an_exception_passes_through() -> None:
    @everstep.restartable
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()


def test_misuse_is_refused() -> None:
    @everstep.restartable
    def inner() -> int:
        return 1

    @everstep.restartable
    def outer() -> int:
        return inner()

    with pytest.raises(ValueError, match="cannot call another one"):
        outer()
    with pytest.raises(ValueError, match="limit_s"):
        everstep.restartable(limit_s=0.0)
    raised: list[str] = []

    def call() -> None:
        try:
            inner()
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "belongs to the main thread" in raised[0]
    assert inner() == 1


def test_process_groups_belong_into_the_function() -> None:
    code = (
        "import everstep, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "everstep.restartable(lambda: None)()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "init_process_group belongs into the restartable function" in done.stderr
