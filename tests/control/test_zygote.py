"""Real forks from one warm zygote: environment, output, exit accounting, `__main__`, death, the store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from everstep.control import robust
from everstep.control.launch import Answer, Forked, Kind, Reaped, Spawner, SpawnFailed, SpawnRequest, Warm
from everstep.control.spawner import PlainSpawner, ZygoteSpawner
from everstep.core.page import STACKS_SIGNAL, STOP_NOW, Page, Word


@dataclass
class Attempt:
    """One process that was asked for, and what is known of it."""

    key: int
    page: Page
    out: Path
    err: Path
    stacks: Path

    def close(self) -> None:
        self.page.close()


@dataclass
class Bench:
    """An event loop, a spawner, and the answers that came."""

    folder: Path = Path()
    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    spawner: Spawner = field(default_factory=Spawner)
    attempts: list[Attempt] = field(default_factory=list)
    next_key: int = 1

    def until(self, condition: Callable[[], object], deadline_s: float = 30) -> None:
        async def poll() -> None:
            end = time.monotonic() + deadline_s
            while not condition():
                assert time.monotonic() < end, f"not in {deadline_s} s; answers: {self.answers[-5:]}"
                await asyncio.sleep(0.002)

        self.loop.run_until_complete(poll())

    def spawn(self, target: str, *args: str, kind: Kind = Kind.SCRIPT, **env: str) -> Attempt:
        key, self.next_key = self.next_key, self.next_key + 1
        page = Page.create(f"test-{key}")
        robust.init(page)
        out, err, stacks = (self.folder / f"{key}.{name}" for name in ("out", "err", "stacks"))
        environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **env}
        request = SpawnRequest(
            key, kind, target, args, environment, str(self.folder), str(out), str(err), stacks=str(stacks)
        )
        attempt = Attempt(key, page, out, err, stacks)
        self.attempts.append(attempt)
        with socket.socket(socket.AF_UNIX) as channel:
            self.hand_over(request, page.fd, channel.fileno())
        return attempt

    def hand_over(self, request: SpawnRequest, *fds: int) -> None:
        async def spawn() -> None:
            self.spawner.spawn(request, *fds)

        self.loop.run_until_complete(spawn())

    def script(self, text: str, *args: str, **env: str) -> Attempt:
        path = self.folder / f"script{self.next_key}.py"
        path.write_text(text)
        return self.spawn(str(path), *args, **env)

    def find(self, attempt: Attempt, kind: type[Answer]) -> Answer | None:
        return next((a for a in self.answers if isinstance(a, kind) and getattr(a, "key", 0) == attempt.key), None)

    def pid(self, attempt: Attempt) -> int:
        self.until(lambda: self.find(attempt, Forked))
        forked = self.find(attempt, Forked)
        assert isinstance(forked, Forked)
        return forked.pid

    def end(self, attempt: Attempt) -> int:
        """Wait for it; its exit code, negative for a signal."""
        self.until(lambda: self.find(attempt, Reaped))
        reaped = self.find(attempt, Reaped)
        assert isinstance(reaped, Reaped)
        return os.waitstatus_to_exitcode(reaped.status)

    def close(self) -> None:
        self.loop.run_until_complete(self.spawner.close())
        for attempt in self.attempts:
            attempt.close()
        self.loop.close()


def start(bench: Bench, zygote: bool = True) -> Bench:
    if zygote:
        bench.spawner = ZygoteSpawner(bench.answers.append, bench.lost.append)
    else:
        bench.spawner = PlainSpawner(bench.answers.append)
    bench.loop.run_until_complete(bench.spawner.start())
    return bench


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = start(Bench(tmp_path_factory.mktemp("zygote")))
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = start(Bench(tmp_path_factory.mktemp("plain")), zygote=False)
    yield bench
    bench.close()


@pytest.fixture(params=["warm", "plain"])
def bench(request: pytest.FixtureRequest) -> Bench:
    bench = request.getfixturevalue(request.param)
    assert isinstance(bench, Bench)
    return bench


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_request_before_warm_waits(warm: Bench) -> None:
    attempt = warm.script("print('first')")
    assert warm.end(attempt) == 0
    assert attempt.out.read_text() == "first\n"
    told = next(a for a in warm.answers if isinstance(a, Warm))
    assert told.threads == 1
    assert told.gpus == 0
    assert told.modules["torch"]


ENVIRONMENT = """
import json, os, pathlib, sys
names = os.listdir("/proc/self/fd")
assert sys.stdin.read() == ""
print("to stderr", file=sys.stderr)
print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path0": sys.path[0], "file": __file__, "cwd": os.getcwd(),
    "fds": [str(p.readlink()) for p in map(pathlib.Path("/proc/self/fd").joinpath, names) if p.is_symlink()],
    "sid": os.getsid(0) == os.getpid()}))
"""


def test_environment_arguments_and_files(bench: Bench) -> None:
    attempt = bench.script(ENVIRONMENT, "--lr", "0.1 x", RANK="3", BIG="b" * 100_000, BIG2="c" * 100_000)
    assert bench.end(attempt) == 0, attempt.err.read_text()
    seen = json.loads(attempt.out.read_text())
    script = str(bench.folder / f"script{attempt.key}.py")
    assert seen["argv"] == [script, "--lr", "0.1 x"]
    assert (seen["env"]["RANK"], len(seen["env"]["BIG"] + seen["env"]["BIG2"])) == ("3", 200_000)
    assert set(seen["env"]) <= {"PATH", "OMP_NUM_THREADS", "RANK", "BIG", "BIG2", "LC_CTYPE"}
    assert seen["file"] == script
    assert seen["path0"] == seen["cwd"] == str(bench.folder)
    inherited = [name for name in seen["fds"] if "socket" in name or "pipe" in name or "request" in name]
    assert len(inherited) == 1 and "socket" in inherited[0]  # its own channel, nobody else's
    assert seen["sid"]
    assert attempt.err.read_text() == "to stderr\n"


@pytest.mark.parametrize(
    ("text", "code", "finished", "failed"),
    [
        ("pass", 0, True, False),
        ("import sys; sys.exit()", 0, True, False),
        ("import sys; sys.exit(3)", 3, False, True),
        ("import sys; sys.exit('why')", 1, False, True),
        ("raise ValueError('broken')", 1, False, True),
        ("def f(:", 1, False, True),
        ("import os; os._exit(0)", 0, False, False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, False, False),
    ],
)
def test_ends(bench: Bench, text: str, code: int, finished: bool, failed: bool) -> None:
    attempt = bench.script(text)
    assert bench.end(attempt) == code
    page = attempt.page
    assert (page[Word.FINISHED_NS] > 0, page[Word.FAILED_NS] > 0) == (finished, failed), attempt.err.read_text()
    assert page[Word.EXIT_STATUS] == (code + 1 if finished or failed else 0)
    assert page[Word.READY_NS] > 0


def test_an_error_leaves_traceback_and_error_file(bench: Bench) -> None:
    error_file = bench.folder / f"error{bench.next_key}.json"
    attempt = bench.script("def f():\n    raise ValueError('broken')\nf()", TORCHELASTIC_ERROR_FILE=str(error_file))
    assert bench.end(attempt) == 1
    text = attempt.err.read_text()
    assert text.endswith("ValueError: broken\n")
    assert "everstep" not in text.split(str(bench.folder))[0]
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: broken"
    assert message["extraInfo"]["py_callstack"].startswith("Traceback")


def test_an_ordinary_end_flushes_and_runs_exit_handlers(bench: Bench) -> None:
    path = bench.folder / f"kept{bench.next_key}"
    attempt = bench.script(
        f"import atexit, threading, time\nkept = open({str(path)!r}, 'w')\nkept.write('kept')\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"
    )
    assert bench.end(attempt) == 0
    assert path.read_text() == "kept"
    assert attempt.out.read_text() == "thread\nhandler\n"


def test_modules_programs_and_missing_files(bench: Bench) -> None:
    package = bench.folder / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys\nfrom . import x\nprint(sys.argv, __spec__.name, __package__)")
    (package / "x.py").write_text("")
    attempt = bench.spawn("pkg", "a", kind=Kind.MODULE)
    assert bench.end(attempt) == 0, attempt.err.read_text()
    assert attempt.out.read_text() == f"{[str(package / '__main__.py'), 'a']} pkg.__main__ pkg\n"
    program = bench.spawn("sh", "-c", "echo $0 $RANK; exit 4", "zero", kind=Kind.PROGRAM, RANK="1")
    assert bench.end(program) == 4
    assert program.out.read_text() == "zero 1\n"
    assert bench.end(bench.spawn("no-such-program", kind=Kind.PROGRAM)) == 127
    assert bench.end(bench.spawn("nowhere.py")) == 2
    assert bench.end(bench.spawn("no.such.module", kind=Kind.MODULE)) == 1


def test_stacks_on_request(bench: Bench) -> None:
    attempt = bench.script("def stuck():\n    print('go')\n    while True: pass\nstuck()")
    pid = bench.pid(attempt)
    bench.until(lambda: attempt.out.exists() and attempt.out.read_text() == "go\n")
    os.kill(pid, STACKS_SIGNAL)
    bench.until(lambda: "in stuck" in attempt.stacks.read_text())
    os.kill(pid, signal.SIGKILL)
    assert bench.end(attempt) == -9


def test_sigterm_waits_for_the_decision(bench: Bench) -> None:
    attempt = bench.script(
        "import signal, sys\ndef save(*_):\n    print('saved')\n    sys.exit(0)\n"
        "old = signal.signal(signal.SIGTERM, save)\nassert old == signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGTERM) is save\nprint('go')\nwhile True: signal.pause()"
    )
    pid = bench.pid(attempt)
    bench.until(lambda: attempt.out.exists() and attempt.out.read_text() == "go\n")
    os.kill(pid, signal.SIGTERM)
    bench.until(lambda: attempt.page[Word.TERM_NS])
    assert attempt.out.read_text() == "go\n"
    attempt.page[Word.STOP_AT_STEP] = STOP_NOW
    os.kill(pid, signal.SIGTERM)
    assert bench.end(attempt) == 0
    assert attempt.out.read_text() == "go\nsaved\n"


LOADER = """
import multiprocessing, os, pickle, torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i * i)
def double(x): return 2 * x
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Squares()))[3] == 9
    for context in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=2 if context == "fork" else 1,
                            multiprocessing_context=context)
        print(sum(int(batch.sum()) for batch in loader))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""


def test_classes_of_the_script_reach_loader_workers(warm: Bench) -> None:
    attempt = warm.script(LOADER)
    assert warm.end(attempt) == 0, attempt.err.read_text()
    assert attempt.out.read_text() == "140\n140\n[2, 4]\n"
    assert attempt.page[Word.BATCHES] == 4


GRANDCHILDREN = """
import os, subprocess, sys, time
forked = os.fork()
if forked == 0:
    time.sleep(600)
started = subprocess.Popen(["sleep", "600"])
print(forked, started.pid, flush=True)
time.sleep(600)
"""


def test_grandchildren_die_with_the_worker(bench: Bench) -> None:
    attempt = bench.script(GRANDCHILDREN)
    pid = bench.pid(attempt)
    bench.until(lambda: attempt.out.exists() and attempt.out.read_text())
    grandchildren = [int(word) for word in attempt.out.read_text().split()]
    os.kill(pid, signal.SIGKILL)
    assert bench.end(attempt) == -9
    bench.until(lambda: all(gone(child) for child in grandchildren), 5)


def test_what_a_killed_loader_worker_left_in_shared_memory_goes(warm: Bench) -> None:
    attempt = warm.script(GRANDCHILDREN)
    pid = warm.pid(attempt)
    warm.until(lambda: attempt.out.exists() and attempt.out.read_text())
    forked, _ = attempt.out.read_text().split()
    left = Path("/dev/shm") / f"torch_{forked}_1_0"
    left.touch()
    os.kill(pid, signal.SIGKILL)
    warm.until(lambda: not left.exists())


FORK_AND_TRAIN = """
import os, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
optimizer.step()
child = os.fork()
optimizer.step()
if child == 0:
    optimizer.step()
    assert not [line for line in open("/proc/self/maps") if "everstep" in line]
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
"""


def test_a_child_of_the_worker_does_not_tick(warm: Bench) -> None:
    attempt = warm.script(FORK_AND_TRAIN)
    assert warm.end(attempt) == 0, attempt.err.read_text()
    assert attempt.page[Word.STEPS] == 2


def test_random_numbers_differ_between_forks_where_they_would_between_processes(warm: Bench) -> None:
    text = "import random, numpy, torch; print(random.random(), numpy.random.rand(), sep='\\n'); print(torch.rand(1))"
    one, two = warm.script(text), warm.script(text)
    assert (warm.end(one), warm.end(two)) == (0, 0)
    lines = list(zip(one.out.read_text().splitlines(), two.out.read_text().splitlines(), strict=True))
    assert [a == b for a, b in lines] == [False, False, True]


def test_threads_follow_the_environment(warm: Bench) -> None:
    text = "import torch; print(torch.get_num_threads())"
    three, shared = warm.script(text, OMP_NUM_THREADS="3"), warm.script(text, OMP_NUM_THREADS="", LOCAL_WORLD_SIZE="2")
    assert (warm.end(three), warm.end(shared)) == (0, 0)
    assert (three.out.read_text(), shared.out.read_text()) == ("3\n", "1\n")


DDP = """
import os, sys, time, torch, torch.distributed as dist
from torch.distributed import all_reduce
dist.init_process_group("gloo")
value = torch.ones(1) * (dist.get_rank() + 1)
all_reduce(value)
print(int(value))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(2, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
@pytest.mark.parametrize("store_first", [True, False])
def test_two_workers_meet_in_the_store(warm: Bench, host: str, store_first: bool) -> None:
    with socket.create_server((host, 0)) as listening:
        port = listening.getsockname()[1]

        def serve() -> int:
            key, warm.next_key = warm.next_key, warm.next_key + 1
            out = str(warm.folder / "store.out")
            request = SpawnRequest(key, Kind.STORE, "", (), {"PATH": "/bin"}, str(warm.folder), out, out, world_size=2)
            warm.hand_over(request, listening.fileno())
            return key

        key = serve() if store_first else 0
        ranks = [
            warm.script(
                DDP,
                RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_RANK=str(rank),
                MASTER_ADDR=host,
                MASTER_PORT=str(port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                OMP_NUM_THREADS="1",
            )
            for rank in range(2)
        ]
        if not store_first:
            warm.until(lambda: all(rank.page[Word.READY_NS] for rank in ranks))
            key = serve()
        for rank in ranks:
            assert warm.end(rank) == 0, rank.err.read_text()
            assert rank.out.read_text() == "3\n"
            assert (rank.page[Word.STEPS], rank.page[Word.TOTAL_STEP], rank.page[Word.COLLECTIVES]) == (3, 4, 1)
    store = next(a for a in warm.answers if isinstance(a, Forked) and a.key == key)
    os.kill(store.pid, signal.SIGKILL)
    warm.until(lambda: any(isinstance(a, Reaped) and a.key == key for a in warm.answers))


def test_a_closed_socket_ends_zygote_and_workers(tmp_path: Path) -> None:
    bench = start(Bench(tmp_path))
    attempt = bench.script("import time; print('go'); time.sleep(600)")
    pid = bench.pid(attempt)
    assert isinstance(bench.spawner, ZygoteSpawner)
    zygote = bench.spawner.pid
    bench.close()
    deadline = time.monotonic() + 5
    while not (gone(pid) and gone(zygote)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not bench.lost


def test_a_lost_zygote_is_reported(tmp_path: Path) -> None:
    bench = start(Bench(tmp_path))
    with contextlib.closing(bench):
        attempt = bench.script("pass")
        assert isinstance(bench.spawner, ZygoteSpawner)
        os.kill(bench.spawner.pid, signal.SIGKILL)
        bench.until(lambda: bench.lost)
        assert "SIGKILL" in bench.lost[0]
        assert isinstance(bench.find(attempt, SpawnFailed), SpawnFailed)


def test_a_threaded_zygote_is_not_forked_and_plain_starts_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = Bench(tmp_path)
    bench.spawner = ZygoteSpawner(bench.answers.append, bench.lost.append, preload=("threaded",))
    with contextlib.closing(bench):
        bench.loop.run_until_complete(bench.spawner.start())
        early = bench.script("import sys; print('threaded' in sys.modules)")
        bench.until(lambda: bench.find(early, Reaped))
        late = bench.script("import sys; print('threaded' in sys.modules)")
        bench.until(lambda: bench.find(late, Reaped))
        assert early.out.read_text() == late.out.read_text() == "False\n"
        assert not bench.lost
    said = capfd.readouterr().err
    assert "starting workers plainly: the warm process has 2 threads" in said


AGENT = """
import asyncio, os, sys, time
from everstep.control.launch import Forked, Kind, SpawnRequest
from everstep.control.spawner import PlainSpawner, ZygoteSpawner
from everstep.core.page import Page
from everstep.control import robust

async def main(kind, folder):
    say = lambda a: print(a.pid, flush=True) if isinstance(a, Forked) else None
    spawner = PlainSpawner(say) if kind == "plain" else ZygoteSpawner(say, print)
    await spawner.start()
    if kind != "plain": print(spawner.pid, flush=True)
    page = Page.create("x"); robust.init(page)
    null = "/dev/null"
    request = SpawnRequest(1, Kind.PROGRAM, "sleep", ("600",), dict(os.environ), folder, null, null)
    spawner.spawn(request)
    await asyncio.sleep(600)
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(("kind", "num_pids"), [("plain", 1), ("zygote", 2)])
def test_all_die_with_a_killed_agent(tmp_path: Path, kind: str, num_pids: int) -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT, kind, str(tmp_path)], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        pids = [int(agent.stdout.readline()) for _ in range(num_pids)]
        assert not any(gone(pid) for pid in pids)
        agent.kill()
    deadline = time.monotonic() + 2
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
