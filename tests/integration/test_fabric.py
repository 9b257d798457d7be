"""The fabric between real processes: kills, aborts, change of members, children that were forked, no shared memory."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm

from everstep.comms.fabric import Fabric
from everstep.core.formation import Formation, Seat

SCRIPT = Path(__file__).parent / "scripts/members.py"
TOKEN = b"0123456789abcdef" * 4
MODES = pytest.mark.parametrize("mode", ["SHM", "TCP"])


def play(scenario: str, mode: str) -> dict[str, Any]:
    done = warm.run(SCRIPT, scenario, mode, timeout_s=50)
    assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stderr)
    print(done.stdout)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@MODES
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_abort_reaches_all_and_the_survivors_go_on(how: str, mode: str) -> None:
    result = play(how, mode)
    assert result["sums"] == [36.0] * 8 and result["early"] == []
    assert [answer[:2] for answer in result["broken"]] == [["broken", 1]] * 7
    assert max(result["ms_after_abort"]) < 2000  # benchmarks/collectives.py measures it: 4 on a quiet machine
    assert not result["opened"], "survivors opened connections"
    assert result["next_sums"] == [28.0] * 7
    assert result["next_p2p"] == [None, 5000.0, None, 0.0]


@MODES
def test_a_joiner_costs_its_own_links(mode: str) -> None:
    result = play("join", mode)
    assert result["opened"] == [1] * 7 + [7]
    assert result["sums"] == [36.0] * 8
    assert max(result["joiner_ms"], *result["stayers_ms"]) < 2000


def test_forked_children_keep_no_link_and_no_board_alive() -> None:
    result = play("children", "TCP")
    assert result["kept"] == 0
    assert result["answer"] == ["broken", 1, "lost the link to node/1#0: closed"]
    assert result["ms"] < 500


def test_no_memory_to_share(capfd: pytest.CaptureFixture[str]) -> None:
    assert play("fallback", "SHM")["sums"] == [6.0] * 3
    said = capfd.readouterr().err
    assert said.count("using TCP") == len({line for line in said.splitlines() if "using TCP" in line}) > 0


def test_500_joins_leave_no_descriptor_and_no_thread() -> None:
    stayer = Fabric("stayer", "h", TOKEN)
    try:
        join_and_leave(stayer, 1)
        join_and_leave(stayer, 2)
        before = descriptors()
        for number in range(3, 503):
            join_and_leave(stayer, number)
        deadline = time.monotonic() + 10  # a thread ends soon after what it was for
        while (after := descriptors()) != before:
            assert time.monotonic() < deadline, (before, after)
            time.sleep(0.05)
    finally:
        stayer.close()


def join_and_leave(stayer: Fabric, number: int) -> None:
    """Over shared memory and TCP in turns; every third is let go without a word."""
    host = "h" if number % 2 else "elsewhere"
    joiner = Fabric(f"{'az'[number // 2 % 2]}{number}", host, TOKEN)
    mine = Seat("stayer", "n", "h", stayer.endpoint)
    both = Formation(2 * number, (mine, Seat(joiner.worker, "n", host, joiner.endpoint)), abort=False, floor=0)
    first, second = (stayer, joiner) if joiner.worker > "stayer" else (joiner, stayer)  # who dials, first
    first.prepare(both)
    second.prepare(both)
    stayer.switch(both)
    joiner.switch(both)
    if number % 3:
        stayer.switch(Formation(2 * number + 1, (mine,), abort=False, floor=0))
    joiner.close()


def descriptors() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
