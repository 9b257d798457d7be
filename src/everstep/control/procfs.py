"""What the kernel tells about one process: a cheap sample for each heartbeat, evidence for one that cannot speak.

`sample` reads one file, `/proc/PID/stat`, which needs none of the target's locks: it answers in some 20 us
even for a process stuck in the kernel. Everything here is None or empty for a process that is gone.
"""

from __future__ import annotations

import os
import signal

import msgspec

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STAT_BYTES = 1024  # 52 numbers and a name of at most 64 bytes
_KTHREADD = 2
_MAX_THREADS_SHOWN = 64  # a CUDA process has hundreds, and only the first ones tell a story

# A vanished process shows as ENOENT when opening and as ESRCH when reading.
GONE = (FileNotFoundError, ProcessLookupError)


class ProcessSample(msgspec.Struct, frozen=True, gc=False):
    """One look at a process. (`pid`, `start_ticks`) names it for ever, where a pid alone is reused."""

    pid: int
    ppid: int
    pgrp: int
    session: int
    state: str  # R S D T t Z X I, as in proc(5)
    rss_bytes: int
    cpu_s: float  # user + system, all threads
    children_s: float  # the same of children that ended and were waited for, and of theirs
    threads: int
    start_ticks: int  # 1 / TICKS_PER_S since boot (CLOCK_BOOTTIME)
    name: str

    @property
    def stopped(self) -> bool:
        """SIGSTOPped or under a debugger: it makes no progress and cannot dump its stacks."""
        return self.state in "Tt"

    @property
    def alive(self) -> bool:
        """False for a zombie; a leader that left with pthread_exit shows as Z while its threads run on."""
        return self.state not in "ZXx" or self.threads > 1

    @property
    def of_kernel(self) -> bool:
        return self.ppid == _KTHREADD or self.pid == _KTHREADD


def read_bytes(path: str, max_bytes: int) -> bytes:
    """Up to `max_bytes` of a small file in one read: `open()` costs twice as much, and /proc files have no size."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, max_bytes)
    finally:
        os.close(fd)


def read_all(path: str) -> bytes:
    """A whole /proc file: those that list things hand out a page at a time, whatever size is asked for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, 65536), b""))
    finally:
        os.close(fd)


def sample(pid: int) -> ProcessSample | None:
    """State, resident set, CPU time and threads of a process; None when it is gone."""
    try:
        raw = read_bytes(f"/proc/{pid}/stat", _STAT_BYTES)
    except GONE:
        return None
    left, right = raw.index(b"("), raw.rindex(b")")  # the name may itself hold spaces and parentheses
    field = raw[right + 2 :].split(b" ", 22)
    return ProcessSample(
        pid=pid,
        ppid=int(field[1]),
        pgrp=int(field[2]),
        session=int(field[3]),
        state=chr(field[0][0]),
        rss_bytes=int(field[21]) * PAGE_BYTES,
        cpu_s=(int(field[11]) + int(field[12])) / TICKS_PER_S,
        children_s=(int(field[13]) + int(field[14])) / TICKS_PER_S,
        threads=int(field[17]),
        start_ticks=int(field[19]),
        name=raw[left + 1 : right].decode("utf-8", "replace"),
    )


def pids() -> list[int]:
    """Every process of the host, as numbers under /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """Living children of every thread of a process; empty when it is gone."""
    found: list[int] = []
    for tid in _threads(pid):
        found += [int(text) for text in _read(f"/proc/{pid}/task/{tid}/children").split()]
    return found


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler of its own: only then is it told by the signal, else killed or deaf to it."""
    return _in_mask(pid, "SigCgt:", signum)


def ignores(pid: int, signum: int) -> bool:
    return _in_mask(pid, "SigIgn:", signum)


def _in_mask(pid: int, key: str, signum: int) -> bool:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(key):
            return bool(int(line[len(key) :], 16) >> (signum - 1) & 1)
    return False


def kernel_view(pid: int) -> str:
    """Where each thread is in the kernel, in words, for a process that cannot dump its Python stacks.

    State and wait channel are readable by the owner; the system call needs ptrace rights, the kernel stack
    root: each is left out where it is not readable.
    """
    process = sample(pid)
    if process is None:
        return f"process {pid} is gone"
    command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    threads = _threads(pid)
    head = (
        f"process {pid} ({process.name}): {_state_words(process.state)}, {process.threads} threads, "
        f"{process.rss_bytes / 1e6:.0f} MB resident, {process.cpu_s:.1f} s of CPU"
    )
    lines = [head, f"  command: {command}"]
    for tid in threads[:_MAX_THREADS_SHOWN]:
        lines += _thread_view(pid, tid)
    if len(threads) > _MAX_THREADS_SHOWN:
        lines.append(f"  ... and {len(threads) - _MAX_THREADS_SHOWN} more threads")
    return "\n".join(lines) + "\n"


def _thread_view(pid: int, tid: str) -> list[str]:
    base = f"/proc/{pid}/task/{tid}"
    stat = _read(f"{base}/stat")
    if not stat:
        return []
    name, state = _read(f"{base}/comm").strip(), stat[stat.rindex(")") + 2]
    line = f"  thread {tid} ({name}): {_state_words(state)}"
    wchan = _read(f"{base}/wchan").strip()
    if wchan not in ("", "0"):
        line += f", waits in {wchan}"
    syscall = _read(f"{base}/syscall").split()
    if syscall and syscall[0].isdigit():
        line += f", system call {syscall[0]}({', '.join(syscall[1:4])}, ...)"
    stack = _read(f"{base}/stack").splitlines()
    return [line, *("    " + frame.removeprefix("[<0>] ") for frame in stack)]


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep (device or file system)",
    "T": f"stopped (by {signal.SIGSTOP.name} or a terminal)",
    "t": "stopped by a debugger",
    "Z": "dead, not yet reaped",
    "I": "idle",
}


def _state_words(state: str) -> str:
    return _STATES.get(state, f"state {state}")


def _threads(pid: int) -> list[str]:
    try:
        return sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except GONE:
        return []


def _read(path: str) -> str:
    """The text of a /proc file; empty where it vanished or is not ours to read."""
    try:
        return read_all(path).decode("utf-8", "replace")
    except (*GONE, PermissionError):
        return ""
