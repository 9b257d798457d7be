"""What all tests share: a folder for runs, cgroups with little memory, and a guard that a test of real processes
leaves nothing behind.

Every process which such a test starts inherits a variable with a name of this test, so what it left behind is told
apart from what else runs on the machine.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

INTEGRATION = Path(__file__).parent / "integration"
INTEGRATION_TIMEOUT_S = 120
SHARED_MEMORY = Path("/dev/shm")
VARIABLE = "EVERSTEP_TEST_RUN"
# What torch, multiprocessing and Everstep name theirs: others may work on this machine, too.
SEGMENTS = ("torch_", "sem.", "psm_", "everstep")
SEGMENTS_GONE_WITHIN_S = 15.0  # another worker of pytest has tests as well, which take their time to clear up
GONE_WITHIN_S = 2.0  # workers must be gone within 2 s of their agent's death, so a test may end that much earlier
# Helpers of Python's multiprocessing live as long as pytest does.
EXEMPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


# Imports keep nearly all they make: collecting garbage meanwhile, and looking through torch ever after, finds nothing.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):  # two threads of one process wait for each other, spinning, where others work
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(INTEGRATION) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(INTEGRATION_TIMEOUT_S))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where the jobs of this test put their run folders."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def small_cgroup() -> Iterator[Callable[[int], Path]]:
    """Makes a memory cgroup with a limit in bytes, below our own. Skips the test where that is not allowed."""
    parent, limit = own_memory_cgroup()
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        group = parent / f"everstep-{uuid.uuid4().hex}"
        try:
            group.mkdir()
            made.append(group)
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"memory cannot be limited here: {error}")
        return group

    yield make
    for group in made:
        group.rmdir()


def own_memory_cgroup() -> tuple[Path, str]:
    """Our own memory cgroup's folder, and the name of the limit in one; plain layouts of cgroup v1 and v2 only."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
    return Path("/sys/fs/cgroup" + path), "memory.max"


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In tests/integration: fail when a process or a piece of shared memory outlives the test that made it.

    Autouse, so it is set up before the fixtures a test asks for, and looks after they have cleaned up.
    """
    if not request.path.is_relative_to(INTEGRATION):
        yield
        return
    mark = uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, mark)
    children, segments = descendants(os.getpid()), set(os.listdir(SHARED_MEMORY))
    yield
    begin = time.monotonic()
    running, kept = processes(mark, children), orphaned(segments)
    while time.monotonic() < begin + (GONE_WITHIN_S if running else SEGMENTS_GONE_WITHIN_S if kept else 0):
        time.sleep(0.02)
        ended = not running
        running, still = processes(mark, children), orphaned(segments)
        kept = kept & still if ended else still  # what is orphaned from now on is not of this test
    for pid in running:  # so that the next test starts clean
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    lines = [f"  process {pid}: {command}" for pid, command in running.items()]
    lines += [f"  shared memory: {SHARED_MEMORY / name}" for name in sorted(kept)]
    if lines:
        pytest.fail("left behind:\n" + "\n".join(lines))


def processes(mark: str, known: set[int]) -> dict[int, str]:
    """Living processes that carry the mark, or descend from this one and are not known: pid -> command line."""
    ours = carriers(mark) | (descendants(os.getpid()) - known)
    commands = {pid: read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip() for pid in ours}
    return {
        pid: command
        for pid, command in sorted(commands.items())
        if alive(pid) and not any(text in command for text in EXEMPT)
    }


def carriers(mark: str) -> set[int]:
    wanted = f"{VARIABLE}={mark}".encode()
    return {pid for pid in pids() if pid != os.getpid() and wanted in read(pid, "environ").split(b"\0")}


def descendants(root: int) -> set[int]:
    parents = {pid: int(fields[1]) for pid in pids() if (fields := stat(pid))}
    found, level = set[int](), {root}
    while level := {pid for pid, parent in parents.items() if parent in level} - found:
        found |= level
    return found


def orphaned(before: set[str]) -> set[str]:
    """New entries of /dev/shm which no living process maps or holds open: nobody is left to remove them."""
    new = {name for name in os.listdir(SHARED_MEMORY) if name.startswith(SEGMENTS)} - before
    if not new:
        return set()
    held = b"".join(read(pid, "maps") for pid in pids()).decode(errors="replace") + "\n".join(open_files())
    return {name for name in new if str(SHARED_MEMORY / name) not in held}


def open_files() -> Iterator[str]:
    for pid in pids():
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue  # it ended, or is not ours to look at
        for descriptor in descriptors:
            try:
                yield os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read(pid: int, name: str) -> bytes:
    """A file of /proc/PID; empty when the process ended or is not ours to look at."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def stat(pid: int) -> list[str]:
    """State, parent and what follows in /proc/PID/stat (the name before may hold any character)."""
    return read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def alive(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] not in "ZX"
