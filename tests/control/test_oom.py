"""Who killed a process: a real out-of-memory kill in a small cgroup, and the sentence for each cause."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.control.oom import OomWatch, explain_signal
from everstep.core.load import NodeLoad
from everstep.core.types import ExitCause

LIMIT_BYTES = 64 << 20
EATER = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
print("ready", flush=True)
sys.stdin.readline()
eaten = [b"x" * (1 << 20) for _ in range(1024)]
"""


def test_a_real_out_of_memory_kill_is_counted(small_cgroup: Callable[[int], Path]) -> None:
    command = [sys.executable, "-IS", "-c", EATER, str(small_cgroup(LIMIT_BYTES))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    watch = OomWatch(child.pid)
    ours = OomWatch().count()
    assert not watch.host_wide
    assert watch.limit_bytes() == LIMIT_BYTES
    assert "67 MB" in watch.hint()
    before = watch.count()
    child.communicate("go\n")
    assert child.returncode == -signal.SIGKILL
    assert watch.count() == before + 1
    assert OomWatch().count() in (ours, ours + 1)  # v2 counts those below as well
    cause, text = explain_signal(
        signal.SIGKILL,
        sent_by_us=False,
        grace_exceeded=False,
        oom_before=before,
        oom_after=watch.count(),
        last_rss=60 << 20,
        hint=watch.hint(),
    )
    assert cause is ExitCause.OOM
    assert "1 out-of-memory kill in this job's cgroup; last seen with 63 MB resident" in text
    assert "the cgroup's memory limit is 67 MB" in text


def test_the_last_look_at_the_machine_shows_in_the_hint() -> None:
    watch = OomWatch()
    watch.last = NodeLoad(free_mb=120, memory_mb=64_000, shm_free_mb=3)
    said = "a few seconds before, 120 MB of the node's memory were left, and 3 MB of /dev/shm"
    assert said in explain_signal(
        9, sent_by_us=False, grace_exceeded=False, oom_before=0, oom_after=1, last_rss=0, hint=watch.hint()
    )[1]  # fmt: skip


def test_a_kill_by_hand_is_not_counted() -> None:
    watch = OomWatch()
    before = watch.count()
    child = subprocess.Popen(["/bin/sleep", "60"])
    child.kill()
    child.wait()
    assert watch.count() == before


def test_an_address_space_limit_shows_in_the_hint() -> None:
    body = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n" + (
        "from everstep.control.oom import OomWatch; print(OomWatch().hint())"
    )
    ran = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert "RLIMIT_AS is 4.29 GB" in ran.stdout


def explain(signum: int, *, by_us: bool = False, grace: bool = False, kills: int = 0) -> tuple[ExitCause, str]:
    return explain_signal(
        signum, sent_by_us=by_us, grace_exceeded=grace, oom_before=5, oom_after=5 + kills, last_rss=3 * 10**9
    )


@pytest.mark.parametrize(
    ("signum", "by_us", "grace", "kills", "cause", "words"),
    [
        (signal.SIGKILL, True, True, 0, ExitCause.GRACE, "longer --grace"),
        (signal.SIGKILL, True, True, 1, ExitCause.GRACE, "grace period"),  # ours, whatever else was killed
        (signal.SIGKILL, True, False, 1, ExitCause.OOM, "out of memory"),  # during the grace, by the kernel
        (signal.SIGKILL, True, False, 0, ExitCause.STOPPED, "asked to stop"),
        (signal.SIGTERM, True, False, 0, ExitCause.STOPPED, "ended by SIGTERM when asked"),
        (signal.SIGKILL, False, False, 2, ExitCause.OOM, "2 out-of-memory kills"),
        (signal.SIGKILL, False, False, 0, ExitCause.SIGNAL, "from outside, not by Everstep and not by the kernel"),
        (signal.SIGSEGV, False, False, 0, ExitCause.SIGNAL, "native code"),
        (signal.SIGSEGV, False, False, 1, ExitCause.SIGNAL, "native code"),  # the kernel kills with SIGKILL only
        (signal.SIGBUS, False, False, 0, ExitCause.SIGNAL, "/dev/shm"),
        (signal.SIGTERM, False, False, 0, ExitCause.SIGNAL, "asked to end from outside"),
        (signal.SIGRTMIN + 5, False, False, 0, ExitCause.SIGNAL, f"signal {signal.SIGRTMIN + 5}"),
    ],
)
def test_the_sentence(signum: int, by_us: bool, grace: bool, kills: int, cause: ExitCause, words: str) -> None:
    found, text = explain(signum, by_us=by_us, grace=grace, kills=kills)
    assert found is cause
    assert words in text
    if cause in (ExitCause.OOM, ExitCause.SIGNAL):
        assert "last seen with 3.00 GB resident" in text


def test_a_count_of_the_whole_host_is_said_to_be_one() -> None:
    _, text = explain_signal(
        9, sent_by_us=False, grace_exceeded=False, oom_before=0, oom_after=1, last_rss=0, host_wide=True
    )
    assert "on this host (perhaps another job's process)" in text
    assert "resident" not in text
