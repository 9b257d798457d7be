"""What happens in a worker's process, from its fork or start to its exit: one code for both kinds of spawner.

    python -m everstep.control.worker --request FD --parent PID --fds FD...     (started by PlainSpawner)

A zygote calls `isolate` and `run` in its fork. Both return to the bottom of the stack and leave through the
interpreter's ordinary finalisation, so open files are flushed and exit handlers run as in `python script.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import faulthandler
import importlib
import io
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import cast

import msgspec

from everstep.control import procfs, robust, script, store
from everstep.control.host import ProcessHandle
from everstep.control.launch import Kind, SpawnRequest
from everstep.control.trackers import is_tracker
from everstep.core import identity
from everstep.core.page import Page, Word
from everstep.probe import boot, sampler, stacks

PR_SET_PDEATHSIG = 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
RESET = ("SIGTERM", "SIGINT", "SIGCHLD", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with(parent: int) -> None:
    """SIGKILL for this process when its parent dies; leaves at once when that has happened already."""
    if _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def isolate(parent: int) -> None:
    """Own session, dies with `parent`, default signals, nothing blocked."""
    die_with(parent)
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal.set_wakeup_fd(-1)
    for name in RESET:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def run(request: SpawnRequest, *fds: int) -> int:
    """Become what was asked for; the exit status. `fds`: of the page and the channel, or of the store's socket."""
    _redirect(request)
    _environment(request)
    if request.kind is Kind.STORE:
        for name in STOPPING:  # sent to everybody: the last saves may need the store
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        return store.serve(fds[0], request.world_size)
    if request.kind is Kind.EXAM:
        exam = importlib.import_module("everstep.probe.exam")  # only now: a start has no use for it
        return int(exam.run(request.args[0], request.args[1], fds[0]))
    if request.kind is Kind.PROGRAM:
        return _exec(request)
    page = Page(fds[0])
    identity.take(identity.Identity(request.worker, request.address, request.secret, fds[1], request.vault))
    _randomness_and_threads()
    faulthandler.enable()
    if request.stacks:
        stacks.install(request.stacks)
        sampler.install(page, f"{request.stacks}.sampled")
    robust.lock(page)
    _guard_children()
    boot.install(page)
    page[Word.READY_NS] = time.monotonic_ns()
    return script.run(request, page)


def _redirect(request: SpawnRequest) -> None:
    """Standard input from nowhere, output appended to the files asked for; sys.stdout and sys.stderr stay valid."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(request.stdout, flags, 0o644)
    err = out if request.stderr == request.stdout else os.open(request.stderr, flags, 0o644)
    for fd, standard in ((null, 0), (out, 1), (err, 2)):
        os.dup2(fd, standard)
    for fd in {null, out, err} - {0, 1, 2}:
        os.close(fd)
    # The same objects: loggers created at import keep writing through them.
    for stream in (sys.stdout, sys.stderr):
        stream.__init__(  # type: ignore[misc]
            io.BufferedWriter(cast(io.RawIOBase, LogFile(stream.fileno(), stream.name))),
            encoding="utf-8",
            errors=stream.errors,
            line_buffering=True,
            write_through=bool(request.env.get("PYTHONUNBUFFERED")),
        )


class LogFile(io.FileIO):
    """A worker's output: a full disk costs lines of the log, said in it when there is room again, not the training."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.name = name
        self._lost_bytes = 0

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            if self._lost_bytes:
                super().write(f"everstep: no room on the disk: {self._lost_bytes} bytes of output lost\n".encode())
                self._lost_bytes = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._lost_bytes += len(data)
            return len(data)


def _environment(request: SpawnRequest) -> None:
    path_before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request.env)
    time.tzset()
    os.chdir(request.cwd)
    path = [entry for entry in request.env.get("PYTHONPATH", "").split(os.pathsep) if entry not in path_before]
    sys.path[:0] = [os.path.abspath(entry) for entry in path if entry]


def _exec(request: SpawnRequest) -> int:
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvpe(request.target, [request.target, *request.args], request.env)
    except OSError as error:
        print(f"everstep: cannot run {request.target}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _randomness_and_threads() -> None:
    """What a fresh process reads from the system at import and a fork has inherited.

    `random` reseeds itself in a fork; torch's default seed is a constant.
    """
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(_num_threads())


def _num_threads() -> int:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = os.environ.get(name, "").split(",")[0]
        if first.isdigit() and int(first) > 0:
            return int(first)
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    return len(os.sched_getaffinity(0)) if alone else 1  # as torchrun does


def _guard_children() -> None:
    """Processes the script forks (data-loader workers) die with this one, and leave its page alone."""
    worker = os.getpid()
    forked_by_main = False

    def before() -> None:
        nonlocal forked_by_main
        forked_by_main = os.getpid() == worker and threading.get_native_id() == worker

    def in_child() -> None:
        boot.leave()
        # The kernel sends the signal when the forking *thread* ends, so only the main thread's children get it;
        # and not their children: a daemon's second fork outlives the first on purpose.
        if forked_by_main:
            die_with(worker)

    os.register_at_fork(before=before, after_in_child=in_child)


def main() -> int:
    """A worker which was started, not forked."""
    parser = argparse.ArgumentParser()
    for name in ("--request", "--parent"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--fds", type=int, nargs="*", default=())
    arguments = parser.parse_args()
    isolate(arguments.parent)
    with open(arguments.request, "rb") as file:
        file.seek(0)
        request = msgspec.msgpack.decode(file.read(), type=SpawnRequest)
    for fd in arguments.fds:
        os.set_inheritable(fd, False)
    return run(request, *arguments.fds)


def end_group(pid: int) -> None:
    """SIGKILL whatever a failed worker leaves in its process group, resource trackers excepted. Call it in the
    worker's parent before the worker is reaped: until then no other process can have its number."""
    signalled: set[int] = set()
    while True:
        members = list(_members(pid))
        trackers = {process.pid for process in members if is_tracker(process.pid)}
        if not trackers:  # the usual case, and nobody can fork away from this one
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return
        new = [process for process in members if process.pid not in trackers | signalled]
        if not new:
            return
        for process in new:
            with (
                contextlib.suppress(ProcessLookupError, PermissionError),
                ProcessHandle(process.pid, process.start_ticks) as handle,
            ):
                handle.send(signal.SIGKILL)
        signalled.update(process.pid for process in new)


def _members(group: int) -> Iterator[procfs.ProcessSample]:
    """Living processes of a dead worker's group, from its orphans down: /proc as a whole may hold thousands.
    The orphans went to the worker's parent, or to that one's own parent."""
    todo = {*procfs.children(os.getpid()), *procfs.children(os.getppid())}
    while todo:
        found = [sample for sample in map(procfs.sample, todo) if sample is not None and sample.pgrp == group]
        yield from (sample for sample in found if sample.alive)
        todo = {child for sample in found for child in procfs.children(sample.pid)}


if __name__ == "__main__":
    raise SystemExit(main())
