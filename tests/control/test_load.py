"""What the agent's sampler tells of real processes, and what of it the journal gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.control import procfs
from everstep.control.load import LoadSampler, Trees, spent_s
from everstep.control.loads import EVERY_S, FIRST_S, LEAST_S, WORKERS_PER_S, Loads
from everstep.core import events as e
from everstep.core.load import DeviceLoad, NodeLoad, mean
from everstep.core.types import NodeProgress
from everstep.probe.devices import Devices

BURNT_S = 0.3
# Burns so much processor time when told to, itself or its child, and answers: how busy the machine is does not matter.
WORKER = """
import os, sys, time
def serve(lines, answers):
    child = None
    for line in lines:
        first, _, rest = line.strip().partition(" ")
        if first == "burn":
            end_s = time.process_time() + float(rest)
            while time.process_time() < end_s: pass
        elif first == "child":
            child = child or fork()
            child[1].write(rest + "\\n")
            child[1].flush()
            child[2].readline()
        elif first == "end":
            os.kill(child[0], 9)
            os.waitpid(child[0], 0)
            child = None
        answers.write("done\\n")
        answers.flush()
def fork():
    (there, to), (back, answer) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(to)
        serve(open(there), open(answer, "w"))
        os._exit(0)
    return pid, open(to, "w"), open(back)
serve(sys.stdin, sys.stdout)
"""


class Worker:
    def __init__(self) -> None:
        command = [sys.executable, "-c", WORKER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.do("begin")

    def do(self, order: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker() for _ in range(3)]
    yield made
    for worker in made:
        worker.kill()


class Watch:
    """Trees whose clock goes on by what one processor takes for BURNT_S."""

    def __init__(self, workers: list[Worker]) -> None:
        self.now_s, self.workers = 0.0, workers
        self.trees = Trees(lambda: self.now_s)
        self.look()

    def look(self, scan: bool = False) -> list[int]:
        self.now_s += BURNT_S + 1000 * scan
        found = list(self.trees.sample({k: w.process.pid for k, w in enumerate(self.workers)}))
        if scan:
            self.now_s += BURNT_S  # the next interval is short again
            self.trees.sample({k: w.process.pid for k, w in enumerate(self.workers)})
        return found


def about(*shares: float) -> object:
    return pytest.approx(
        [round(100 * share) for share in shares], abs=12
    )  # the kernel counts in hundredths of a second


def test_a_worker_is_as_busy_as_it_and_its_children_are(workers: list[Worker]) -> None:
    _, burns, parent = workers
    parent.do("child child burn 0")  # there before the first look: it is found
    watch = Watch(workers)
    burns.do(f"burn {BURNT_S}")
    parent.do(f"child burn {BURNT_S}")
    assert watch.look() == about(0.0, 1.0, 1.0)
    assert watch.look() == about(0.0, 0.0, 0.0)
    parent.do(f"child child burn {BURNT_S}")
    assert watch.look() == about(0.0, 0.0, 1.0)
    parent.do("child end")
    parent.do("end")  # what it had spent is its parent's now, and was told
    assert watch.look() == about(0.0, 0.0, 0.0)
    parent.do(f"child burn {BURNT_S}")
    parent.do("end")  # between two looks
    assert watch.look() == about(0.0, 0.0, 1.0)


def test_a_late_child_is_found_and_the_loss_of_a_worker_leaves_the_others(workers: list[Worker]) -> None:
    watch = Watch(workers)
    workers[0].do("child burn 0.2")
    watch.look(scan=True)
    workers[0].do(f"child burn {BURNT_S}")
    assert watch.look() == about(1.0, 0.0, 0.0)
    workers[1].kill()
    workers[2].do(f"burn {BURNT_S}")
    assert watch.look() == about(0.0, -0.01, 1.0)
    workers[1] = Worker()  # in its place
    watch.look()
    workers[1].do(f"burn {BURNT_S}")
    assert watch.look() == about(0.0, 1.0, 0.0)


def test_a_process_that_was_not_known_counts_for_these_seconds_only() -> None:
    own = procfs.sample(os.getpid())
    assert own is not None
    boot_s = own.start_ticks / procfs.TICKS_PER_S + 100.0
    assert spent_s({}, {own.pid: own}, 5.0, boot_s) == pytest.approx(own.cpu_s / 20)


def test_the_sampler_tells_the_node_and_its_workers(workers: list[Worker]) -> None:
    sampler = LoadSampler(every_s=0.05)
    pids = {k: worker.process.pid for k, worker in enumerate(workers)}
    assert sampler.take(pids) is None
    sampler.start()
    deadline, load = time.monotonic() + 20, None
    while (load is None or len(load.workers) < 3) and time.monotonic() < deadline:
        load = sampler.take(pids)
    sampler.close()
    assert load is not None and len(load.workers) == 3
    assert load.cpus == os.cpu_count() and 0 <= load.memory_share < 1 and 0 < load.shm_free_mb <= load.shm_mb
    assert load.in_kb_per_s >= 0 and load.out_kb_per_s >= 0


NVML = """
#include <string.h>
typedef unsigned u;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(u *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u k, void **d) { *d = (void *)(unsigned long)(k + 1); return k > 1; }
int nvmlDeviceGetHandleByUUID(const char *n, void **d) { *d = (void *)2ul; return strcmp(n, "GPU-b") != 0; }
int nvmlDeviceGetUtilizationRates(void *d, u *r) { r[0] = 90 + (unsigned long)d; r[1] = 7; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { m[0] = 80000000000; m[2] = 61000000000; return 0; }
int nvmlDeviceGetTemperature(void *d, int s, u *t) { *t = 61; return d == (void *)2ul ? 15 : 0; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, to build a library with the functions of NVML")
def test_devices_as_the_management_library_tells_them(tmp_path: Path) -> None:
    """Not run on a GPU: the library is ours."""
    (tmp_path / "nvml.c").write_text(textwrap.dedent(NVML), encoding="ascii")
    library = str(tmp_path / "libnvml.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, str(tmp_path / "nvml.c")], check=True)
    first, lost = DeviceLoad(91, 76, 61), DeviceLoad(92, 76, -1)
    assert Devices(None, library).sample() == (first, lost) and Devices(None, library).memory_mb() == 80000
    assert Devices("1, 0", library).sample() == (lost, first)
    assert Devices("GPU-b,GPU-c,0", library).sample() == (lost,)
    assert Devices("", library).sample() == ()
    assert Devices(None, str(tmp_path / "none.so")).sample() == ()


# The journal ----------------------------------------------------------------------------------------------


def beat(node: str, load: NodeLoad | None) -> NodeProgress:
    return NodeProgress(node, "a", 1, 0.0, (), load)


def test_the_journal_gets_means_seldom_and_before_an_incident() -> None:
    loads, told = Loads(), []
    for second in range(0, 40, 5):
        for node in ("a", "b"):
            sample = NodeLoad(second, 64, 100 - second, 100, workers=(100, -1 if second > 10 else 100))
            told += [(second, record) for record in loads.saw(beat(node, sample), float(second))]
        told += [(second + 1, record) for record in loads.saw(beat("a", None), second + 1.0)]
    assert [second for second, _ in told] == [FIRST_S + k * EVERY_S for k in range(4)]
    first, second = told[0][1], told[1][1]
    assert isinstance(first, e.LoadSeen) and isinstance(second, e.LoadSeen)
    assert first.nodes == dict.fromkeys(("a", "b"), NodeLoad(2, 64, 95, 100, workers=(100, 100)))
    assert second.nodes["a"] == NodeLoad(12, 64, 85, 100, workers=(100, -1))
    assert loads.flush(1000.0) == []  # nobody said anything since
    last_s = FIRST_S + 3 * EVERY_S
    assert loads.saw(beat("a", NodeLoad()), last_s + 1) == loads.flush(last_s + LEAST_S - 1) == []
    assert loads.flush(last_s + LEAST_S) == [e.LoadSeen({"a": NodeLoad()})]


def test_a_thousand_workers_are_told_of_seldom() -> None:
    loads, times = Loads(), []
    for second in range(0, 1000, 5):
        for node in range(125):
            sample = NodeLoad(100, 64, workers=(100,) * 8)
            times += [second for _ in loads.saw(beat(f"n{node:03d}", sample), float(second))]
    assert [b - a for a, b in zip(times[1:], times[2:], strict=False)] == [1000 / WORKERS_PER_S] * (len(times) - 2)


shares = st.integers(-1, 1000)
samples = st.builds(
    NodeLoad, busy_percent=shares, workers=st.lists(shares, max_size=3).map(tuple), in_kb_per_s=shares,
    devices=st.lists(st.builds(DeviceLoad, st.integers(-1, 100)), max_size=3).map(tuple),
)  # fmt: skip


@given(st.lists(samples, min_size=1, max_size=5))
def test_a_mean_lies_between_its_samples(found: list[NodeLoad]) -> None:
    made = mean(found)
    known = [sample.busy_percent for sample in found if sample.busy_percent >= 0]
    assert min(known, default=-1) <= made.busy_percent <= max(known, default=-1)
    assert len(made.workers) == len(found[-1].workers) and len(made.devices) == len(found[-1].devices)
    for k, (share, now) in enumerate(zip(made.workers, found[-1].workers, strict=True)):
        of = [s.workers[k] for s in found if k < len(s.workers) and s.workers[k] >= 0]
        assert share == -1 if now < 0 else min(of) <= share <= max(of)
