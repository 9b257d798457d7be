"""Leftovers of real process trees: double forks, sessions of their own, cleaned environments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from everstep.control import procfs, sweep
from everstep.control.sweep import Traces

# Like a zygote: exec'd with the job's marks, a child subreaper, forks a worker (printed) that leaves three behind.
ZYGOTE = """
import ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
signal.signal(signal.SIGCHLD, lambda *a: os.waitpid(-1, os.WNOHANG))
say = lambda name, pid: os.write(1, f"{name} {pid}\\n".encode())
worker = os.fork()
if worker == 0:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    loader = os.fork()
    if loader == 0:
        time.sleep(60)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            say("daemon", os.getpid())
            time.sleep(60)
        os._exit(0)
    os.wait()
    clean = subprocess.Popen(["/bin/sleep", "60"], env={}, start_new_session=True)
    say("loader", loader), say("clean", clean.pid), say("worker", os.getpid())
    time.sleep(60)
while True:
    time.sleep(60)
"""
Tree = dict[str, int]


def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.002)


def alive(pid: int) -> bool:
    seen = procfs.sample(pid)
    return seen is not None and seen.alive


@pytest.fixture
def job() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def tree(job: str) -> Iterator[Tree]:
    env = {"EVERSTEP_JOB_ID": job, "EVERSTEP_NODE": "n0"}
    zygote = subprocess.Popen([sys.executable, "-IS", "-c", ZYGOTE], env=env, stdout=subprocess.PIPE, text=True)
    assert zygote.stdout is not None
    pids = {"zygote": zygote.pid}
    while len(pids) < 5:
        name, number = zygote.stdout.readline().split()
        pids[name] = int(number)
    yield pids
    for pid in pids.values():
        if pid != zygote.pid and alive(pid):
            os.kill(pid, signal.SIGKILL)
    zygote.kill()
    zygote.communicate()


def test_everything_below_a_dead_worker_is_found(job: str, tree: Tree) -> None:
    traces = Traces(reapers=(tree["zygote"],))
    assert set(sweep.leftovers(job, "n0", {tree["worker"]}, traces)) == {tree["daemon"]}
    os.kill(tree["worker"], signal.SIGKILL)
    lost = {tree["loader"], tree["daemon"], tree["clean"]}
    until(lambda: set(sweep.leftovers(job, "n0", set(), traces)) == lost)
    # Without knowing the zygote, the environment finds those that kept it (and the zygote with all below).
    assert set(sweep.leftovers(job, "n0", {tree["zygote"]})) == set()
    assert set(sweep.leftovers(job, "n0", set())) == lost | {tree["zygote"]}


def test_purge_ends_them_and_keeps_the_zygote(job: str, tree: Tree) -> None:
    os.kill(tree["worker"], signal.SIGKILL)
    done = sweep.purge(job, "n0", set(), Traces(reapers=(tree["zygote"],)))
    assert set(done.killed) >= {tree["loader"], tree["daemon"], tree["clean"]}
    assert done.remaining == ()
    assert done.took_s < 5.0
    assert alive(tree["zygote"])
    assert not any(alive(tree[name]) for name in ("loader", "daemon", "clean", "worker"))
    assert sweep.purge(job, "n0", set(), Traces(reapers=(tree["zygote"],))).killed == ()


def test_a_cleaned_environment_is_found_by_group_and_session(job: str, tree: Tree) -> None:
    clean = tree["clean"]
    assert sweep.leftovers("other", "n0", set(), Traces(sessions=(clean,))) == [clean]
    assert sweep.leftovers("other", "n0", set(), Traces(groups=(clean,))) == [clean]
    assert sweep.leftovers("other", "n0", {clean}, Traces(groups=(clean,))) == []


def test_other_jobs_and_nodes_are_not_ours(job: str, tree: Tree) -> None:
    for other, node in ((job[:-1], "n0"), (job + "0", "n0"), (job, "n"), (job, "n00")):
        assert sweep.leftovers(other, node, set()) == []


def test_later_ones_are_kept(job: str, tree: Tree) -> None:
    zygote = procfs.sample(tree["zygote"])
    assert zygote is not None
    before = zygote.start_ticks / procfs.TICKS_PER_S
    assert sweep.leftovers(job, "n0", set(), Traces(born_before=before)) == []
    until(lambda: len(sweep.leftovers(job, "n0", set(), Traces(born_before=sweep.boot_s()))) == 5)


def test_the_one_who_sweeps_and_its_parents_are_kept(job: str) -> None:
    inner = f"from everstep.control import sweep; print(sweep.leftovers({job!r}, 'n0', set()))"
    outer = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {inner!r}]))"
    env = os.environ | {"EVERSTEP_JOB_ID": job, "EVERSTEP_NODE": "n0"}
    ran = subprocess.run([sys.executable, "-c", outer], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_kill_tree_takes_a_tree_that_forks_all_the_time() -> None:
    # Each process leaves a child and exits: without stopping it first, its last child is always out of sight.
    body = (
        "import os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        while True:\n"
        "            if os.fork() == 0: time.sleep(.001); os._exit(0)\n"
        "            os.wait()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    root = subprocess.Popen([sys.executable, "-IS", "-c", body], stdout=subprocess.PIPE, start_new_session=True)
    assert root.stdout is not None and root.stdout.readline() == b"ready\n"
    killed = sweep.kill_tree([root.pid], within_s=5.0)
    root.communicate()
    assert root.returncode == -signal.SIGKILL
    assert len(killed) >= 4
    until(lambda: not any(p.alive for p in sweep.snapshot().values() if p.session == root.pid))


def test_kill_tree_spares_a_branch(tree: Tree) -> None:
    assert set(sweep.kill_tree([tree["worker"]], spare=[tree["clean"]], within_s=5)) == {tree["worker"], tree["loader"]}
    assert alive(tree["clean"]) and alive(tree["daemon"])
    assert sweep.kill_tree([tree["clean"]], signum=signal.SIGTERM) == [tree["clean"]]
    until(lambda: not alive(tree["clean"]))
