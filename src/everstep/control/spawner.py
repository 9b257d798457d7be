"""The agent's side of starting processes: from a zygote, or plainly with `--no-zygote`. Both behave the same.

Everything happens in the agent's event loop: sockets and pidfds are watched, no thread waits for a child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from io import BufferedWriter

import msgspec

from everstep.control import worker
from everstep.control.launch import Answer, Forked, Reaped, Spawner, SpawnFailed, SpawnRequest, Warm

PRELOAD = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
)
# BLAS and OpenMP start their threads at import; workers set their own count after the fork.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
CLOSE_S = 2.0

OnAnswer = Callable[[Answer], None]


class ZygoteSpawner(Spawner):
    """Forks from a warm process, which starts importing in `start()`; requests before `Warm` wait for it.

    `preload`: modules imported besides torch's own. `on_lost(why)`: the zygote died unexpectedly, and all
    processes forked from it die with it; no `Reaped` comes for them.
    """

    def __init__(
        self,
        on_answer: OnAnswer,
        on_lost: Callable[[str], None],
        preload: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._preload = (*PRELOAD, *preload)
        self._env = {**(os.environ if env is None else env), **ONE_THREAD}
        self._python = python
        self._warm = False
        self._waiting: deque[tuple[SpawnRequest, list[int]]] = deque()
        self._process: _Process | None = None
        self._channel: socket.socket | None = None
        self._plain: PlainSpawner | None = None  # what serves instead when the warm process must not be forked

    @property
    def pid(self) -> int:
        return self._process.pid if self._process and self._plain is None else 0

    async def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channel = ours
        with theirs:
            command = [self._python, "-P", "-m", "everstep.control.zygote", "--fd", str(theirs.fileno())]
            command += ["--parent", str(os.getpid()), "--preload", ",".join(self._preload)]
            self._process = _Process(command, self._env, None, (theirs.fileno(),), self._died)
        asyncio.get_running_loop().add_reader(ours, self._readable)

    def spawn(self, request: SpawnRequest, *fds: int) -> None:
        if self._plain is not None:
            self._plain.spawn(request, *fds)
            return
        if self._process is None:
            self._on_answer(SpawnFailed(request.key, "the zygote is gone"))
            return
        self._waiting.append((request, [os.dup(fd) for fd in fds]))
        self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as the socket takes it. The request travels in a memfd: any size fits."""
        channel = self._channel
        while self._warm and self._waiting and channel is not None:
            request, fds = self._waiting[0]
            try:
                with _as_memfd(request) as body:
                    socket.send_fds(channel, [b"spawn"], [body.fileno(), *fds])
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(channel, self._writable)
                return
            except (BrokenPipeError, ConnectionResetError):
                return  # it is dying; `_died` answers for whatever waits
            self._waiting.popleft()
            _close_all(fds)

    def _fall_back(self, why: str) -> None:
        """Start workers plainly from now on, with what waits first. The warm process ends with its channel."""
        print(f"everstep: starting workers plainly: {why}", file=sys.stderr)
        self._plain = PlainSpawner(self._on_answer, self._python)
        while self._waiting:
            request, fds = self._waiting.popleft()
            self._plain.spawn(request, *fds)
            _close_all(fds)
        self._shut()

    def _writable(self) -> None:
        assert self._channel is not None
        asyncio.get_running_loop().remove_writer(self._channel)
        self._flush()

    def _readable(self) -> None:
        assert self._channel is not None
        with contextlib.suppress(BlockingIOError):
            while data := self._receive(self._channel):
                answer = msgspec.msgpack.decode(data, type=Answer)
                if isinstance(answer, Warm) and answer.unfit:
                    self._fall_back(answer.unfit)
                elif isinstance(answer, Warm):
                    self._warm = True
                    self._flush()
                self._on_answer(answer)
                if self._channel is None:  # closed from within the callback
                    return
            asyncio.get_running_loop().remove_reader(self._channel)

    @staticmethod
    def _receive(channel: socket.socket) -> bytes:
        try:
            return channel.recv(65536)
        except ConnectionResetError:
            return b""

    def _died(self, status: int, max_rss_bytes: int) -> None:
        if self._channel is None:
            return
        self._readable()  # its last answers may still lie there
        self._process = None
        self._shut()
        self._on_lost(f"the zygote ended with {_how(status)}{'' if self._warm else ' while importing its modules'}")

    def _shut(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel)
            asyncio.get_running_loop().remove_writer(channel)
            channel.close()
        for request, fds in self._waiting:
            _close_all(fds)
            self._on_answer(SpawnFailed(request.key, "the zygote is gone"))
        self._waiting.clear()

    async def close(self) -> None:
        if self._plain is not None:
            await self._plain.close()
        self._shut()
        process, self._process = self._process, None
        if process is not None:
            await process.ended(CLOSE_S)


class PlainSpawner(Spawner):
    """Starts a fresh interpreter for each process: seconds of imports, but nothing inherited."""

    def __init__(self, on_answer: OnAnswer, python: str = sys.executable) -> None:
        self._on_answer = on_answer
        self._python = python
        self._processes: dict[int, _Process] = {}

    async def start(self) -> None:
        """There is nothing to warm up."""

    def spawn(self, request: SpawnRequest, *fds: int) -> None:
        key = request.key

        def ended(status: int, max_rss_bytes: int) -> None:
            self._on_answer(Reaped(key, self._processes.pop(key).pid, status, max_rss_bytes))

        with _as_memfd(request) as body:
            command = [self._python, "-P", "-m", "everstep.control.worker", "--request", str(body.fileno())]
            command += ["--parent", str(os.getpid()), "--fds", *map(str, fds)]
            passed = (body.fileno(), *fds)
            try:
                process = _Process(command, request.env, request.cwd, passed, ended)
            except OSError as error:
                self._on_answer(SpawnFailed(key, f"cannot start {self._python} in {request.cwd}: {error.strerror}"))
                return
        self._processes[key] = process
        self._on_answer(Forked(key, process.pid))

    async def close(self) -> None:
        for process in list(self._processes.values()):
            process.kill()
        for process in list(self._processes.values()):
            await process.ended(CLOSE_S)


class _Process:
    """A child in its own session, reaped by the event loop when its pidfd says so."""

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        cwd: str | None,
        fds: tuple[int, ...],
        on_end: Callable[[int, int], None],
    ) -> None:
        self._child = subprocess.Popen(
            command, env=env, cwd=cwd, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.pid = self._child.pid
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if found is not None and found.si_status:
            worker.end_group(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        self._child.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it as well
        self._gone.set_result(None)
        self._on_end(status, usage.ru_maxrss * 1024)

    def kill(self) -> None:
        if not self._gone.done():
            os.kill(self.pid, signal.SIGKILL)

    async def ended(self, patience_s: float) -> None:
        """Wait for it to end by itself, then kill it."""
        if not self._gone.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._gone), patience_s)
            self.kill()
            await self._gone


@contextlib.contextmanager
def _as_memfd(request: SpawnRequest) -> Iterator[BufferedWriter]:
    with open(os.memfd_create("everstep-request", os.MFD_CLOEXEC), "wb") as file:
        file.write(msgspec.msgpack.encode(request))
        file.flush()
        yield file


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
