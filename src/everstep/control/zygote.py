"""The warm process workers are forked from: torch is imported, one thread runs, no device was touched.

    python -P -m everstep.control.zygote --fd N --preload torch,numpy     (started by ZygoteSpawner)

It answers SpawnRequests with forks and reaps what ends. A fork of a threaded process may inherit a lock
nobody will ever release, and a fork of a process with a device context cannot use the device: both are
checked before each fork and refused with the reason. It dies with its agent, and its workers with it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import importlib.metadata
import os
import platform
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from everstep.control import worker
from everstep.control.launch import Answer, Forked, Reaped, SpawnFailed, SpawnRequest, Warm
from everstep.core.leftovers import unlink_shared
from everstep.probe import boot

PR_SET_CHILD_SUBREAPER = 36
VERSIONS = ("torch", "numpy")

Job = Callable[[], int]  # what a forked child does once the zygote's stack is unwound


class Zygote:
    """Serves one agent over a SEQPACKET socket, in one thread."""

    def __init__(self, channel: socket.socket, own_fds: set[int]) -> None:
        self._channel = channel
        self._library_fds = own_fds  # opened by imported libraries: they stay open in the forks
        self._keys: dict[int, int] = {}
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> Job | None:
        """Until the agent closes the socket: None. In each forked child: what that child has to do."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._reap()
            if self._channel.fileno() in ready:
                fds = self._asked()
                if fds is None:
                    return None
                job = self._fork(*fds)
                if job is not None:
                    return job

    def _asked(self) -> list[int] | None:
        """The descriptors that a request comes with. None: the agent closed its end, maybe with answers unread."""
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, 64, 3, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        return fds if data else None

    def _fork(self, request_fd: int, *fds: int) -> Job | None:
        with open(request_fd, "rb") as file:
            file.seek(0)
            request = msgspec.msgpack.decode(file.read(), type=SpawnRequest)
        why = unfit()
        parent = os.getpid()
        pid = 0
        if not why:
            gc.freeze()  # so that the collector of a child does not copy every page of the zygote
            try:
                pid = os.fork()
            except OSError as error:
                why = f"fork: {error.strerror}"
            else:
                if pid == 0:
                    return self._child(request, fds, parent)
        for fd in fds:
            os.close(fd)
        if why:
            self._answer(SpawnFailed(request.key, why))
        else:
            self._keys[pid] = request.key
            self._answer(Forked(request.key, pid))
        return None

    def _child(self, request: SpawnRequest, fds: tuple[int, ...], parent: int) -> Job:
        worker.isolate(parent)
        self._channel.detach()  # closed with all others
        close_all_but({0, 1, 2, *fds} | self._library_fds)
        gc.enable()
        return lambda: worker.run(request, *fds)

    def _reap(self) -> None:
        """Report every child that is gone. Orphans of workers come to us as well; they are only reaped."""
        while (pid := _next_dead()) is not None:
            key = self._keys.pop(pid, None)
            _, status, usage = os.wait4(pid, 0)
            if key is None and status:  # a loader worker, say, whose parent is gone: nobody else looks after it
                unlink_shared(pid)
            elif key is not None:
                self._answer(Reaped(key, pid, status, usage.ru_maxrss * 1024))

    def _answer(self, answer: Answer) -> None:
        try:
            self._channel.send(msgspec.msgpack.encode(answer))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the agent is gone; the kernel ends the workers with us

    def warm(self, import_s: float) -> None:
        """Tell the agent that forks can be had."""
        modules = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in VERSIONS}
        modules |= {"everstep": importlib.metadata.version("everstep"), "python": platform.python_version()}
        self._answer(Warm(import_s, num_threads(), modules, count_gpus(), unfit()))


def _next_dead() -> int | None:
    """A child that has ended and is not reaped yet. The rest of its process group is killed if it failed."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is not None and found.si_status:
        worker.end_group(found.si_pid)
    return found.si_pid if found else None


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def unfit() -> str:
    """Why this process must not be forked; empty when it may."""
    if (threads := num_threads()) != 1:
        return f"the warm process has {threads} threads: a preloaded module starts some; drop it or use --no-zygote"
    torch: Any = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            return f"a preloaded module has opened a {name} device: drop it or use --no-zygote"
    return ""


def count_gpus() -> int:
    """Accelerators torch can use here. Counted in a fork: counting may open the driver, which forbids forking."""
    version: Any = getattr(sys.modules.get("torch"), "version", None)
    if not any(getattr(version, name, None) for name in ("cuda", "hip", "xpu")):
        return 0
    pid = os.fork()
    if pid == 0:
        count = 0
        try:
            count = importlib.import_module("torch.accelerator").device_count()
        except Exception:  # noqa: BLE001 - whatever a driver raises, it means no device
            traceback.print_exc()
        finally:
            os._exit(min(count, 255))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_fds() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def close_all_but(keep: set[int]) -> None:
    after = 0
    for fd in sorted(keep):
        if after < fd:  # CPython 3.11 takes an empty range for "up to the last one"
            os.closerange(after, fd)
        after = fd + 1
    os.closerange(after, os.sysconf("SC_OPEN_MAX"))


def main() -> int:
    """Zygote: until the agent is gone. Forked child: its own life; both end at the bottom of this stack."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", default="")
    arguments = parser.parse_args()
    worker.die_with(arguments.parent)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent to handle
    channel = socket.socket(fileno=arguments.fd)
    before, started = open_fds(), time.monotonic()
    gc.disable()  # imports keep nearly all they make: looking through it again and again is a quarter of their time
    importlib.import_module("torch")
    boot.prepare()  # before the preloads: what they take from torch by name is hooked too
    for name in filter(None, arguments.preload.split(",")):
        _preload(name)
    zygote = Zygote(channel, open_fds() - before)
    zygote.warm(time.monotonic() - started)
    job = zygote.serve()
    if job is None:
        os._exit(0)  # nothing to tear down, and the workers go with us: at once
    return job()


def _preload(name: str) -> None:
    """Importing early only saves time: a script that needs a module which fails here fails itself, and says why."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - anything may come out of somebody's module
        print(f"everstep: {name} is not preloaded: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
