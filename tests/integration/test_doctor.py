"""The doctor at real faults: a throttled link among four nodes, a full disk and few descriptors, a node that is broken
when it comes back."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from everstep.control.clinic import Clinic
from everstep.control.token import create_token
from everstep.control.transport import listen
from everstep.core import events as e
from everstep.core.checkup import Examined
from everstep.core.errors import ExitCode
from everstep.detect.health import Bars
from everstep.testing.local import LocalRun

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "benchmarks" / "scripts" / "tiny_steps.py"
SLOW_B_PER_S = 10e6  # of the throttled link; loopback has ten times that on the busiest machine
BLOCK = 1 << 16


class Throttle:
    """A wire to `target` that lets SLOW_B_PER_S through, towards it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.listener = socket.create_server((target[0], 0))
        self.port = self.listener.getsockname()[1]
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        self.threads.append(threading.Thread(target=work, args=arguments))
        self.threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            self.sockets += [near, far]
            self._start(self._pump, near, far, SLOW_B_PER_S)
            self._start(self._pump, far, near, 0.0)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, rate: float) -> None:
        try:
            while data := source.recv(BLOCK):
                if rate:
                    time.sleep(len(data) / rate)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.threads[0].join()
        for sock in self.sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for sock in (self.listener, *self.sockets):
            sock.close()


def test_a_throttled_link_among_four_nodes_is_named(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token = create_token(token_file)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with socket.create_server(("127.0.0.12", 0)) as probe:
        slow = probe.getsockname()[1]
    with closing(Throttle(("127.0.0.12", slow))) as wire:
        members = []
        for k in range(4):
            place = (f"127.0.0.{10 + k}", *((str(slow), str(wire.port)) if k == 2 else ("0", "0")))
            command = [sys.executable, str(HERE / "scripts" / "clinic_member.py"), "127.0.0.1", str(port), f"n{k}"]
            members.append(subprocess.Popen([*command, str(token_file), *place], stdout=subprocess.PIPE, text=True))
        examined: Examined = asyncio.run(Clinic(4, Bars(slow=0.1), 0.2).host(listener, token, None, 40.0))
        said = [member.communicate(timeout=20)[0].strip() for member in members]
    assert said == ["fit", "fit", "unfit", "fit"]
    (complaint,) = examined.complaints["n2"]
    assert (complaint.check, complaint.broken, complaint.sure) == ("network.rate", False, True)
    assert {group.members for group in examined.groups if not group.passed} == {
        group.members for group in examined.groups if "n2" in group.members
    }
    assert examined.links == ()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk):
        yield disk


@contextmanager
def mounted(disk: Path) -> Iterator[None]:
    """A disk of 1 MB, there."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    with pytest.raises(OSError, match="No space"), (disk / "fill").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return disk / "fill"


def test_a_full_disk_and_few_descriptors_are_told(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk)

    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    command = [sys.executable, "-m", "everstep", "doctor", str(small_disk), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=few_descriptors, timeout=60)
    assert done.returncode == ExitCode.UNFIT, done.stdout + done.stderr
    told = json.loads(done.stdout)
    (complaints,) = told["complaints"].values()
    broken = {complaint["check"] for complaint in complaints if complaint["broken"]}
    assert broken == {"disk.failed", "disk.free", "files.limit"}
    assert any("No space left on device" in complaint["why"] for complaint in complaints)


def test_a_node_that_comes_back_broken_is_refused_until_it_is_well(tmp_path: Path) -> None:
    """Its agent dies, and its disk is full when the next one looks: the job goes on without it, and says why."""
    options = ("--nnodes", "1:2", "--local-nodes", "2", "--set", "control.last_call_s=0.3")
    with LocalRun(tmp_path, TINY, *options, "--log-dir", str(tmp_path / "logs")) as run:
        run.until_step(3)
        (folder,) = (tmp_path / "logs").glob("*/node1")
        with mounted(folder):
            filled = fill(folder)
            run.kill_agent("node1")
            run.until(lambda: "check-failed: node1 is not used: room on the disk" in run.text())
            run.until(lambda: [m.node for m in run.plan().members] == ["node0"])
            run.until_step(3)
            filled.unlink()
            run.until(lambda: len(run.plan().members) == 2)
            run.until_step(3)
            told = [alert.kind for alert in run.events(e.Alert) if alert.kind.startswith("check-")]
            assert told == ["check-failed", "check-passed"]
            run.signal(signal.SIGTERM)
            assert run.wait() == 128 + signal.SIGTERM
            assert os.path.exists(folder / "health.json")
