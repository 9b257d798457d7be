"""Why a process got a signal: the kernel's count of out-of-memory kills, and a sentence a person can act on.

An out-of-memory kill is a SIGKILL like any other; only counters tell. The cgroup's own counter is exact for the
processes in it (v1: `memory.oom_control`, v2: `memory.events`); `/proc/vmstat` counts the whole host, also from
inside a container, and serves where there is no cgroup. The kernel counts before it kills, so a count
taken after a death is never too early.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

from everstep.control import procfs
from everstep.core.load import NodeLoad
from everstep.core.types import ExitCause

_UNLIMITED = 1 << 60  # v1 says "no limit" with a number near 2**63


class OomWatch:
    """Out-of-memory kills in the cgroup of a process (default: our own), or of the host where no cgroup counts.

    `count()` before and after a death go into `explain_signal`. Workers share the cgroup of their agent.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._top, self._group, self._v2 = _memory_cgroup(pid or os.getpid())
        self._file = self._counter_file()
        self.last: NodeLoad | None = None  # how full the machine was, when it was looked at last
        self.host_wide = self._file == Path("/proc/vmstat")

    def _counter_file(self) -> Path:
        if self._group is not None:
            name = "memory.events" if self._v2 else "memory.oom_control"
            if _keyed(self._group / name, "oom_kill") is not None:  # v1 counts since Linux 4.13; v2's root does not
                return self._group / name
        return Path("/proc/vmstat")

    def count(self) -> int:
        """Kills so far; only differences mean something. Reads one small file."""
        return _keyed(self._file, "oom_kill") or 0

    def limit_bytes(self) -> int:
        """The tightest memory limit of the cgroup and those above it; 0 when there is none."""
        if self._group is None or self._top is None:
            return 0
        name = "memory.max" if self._v2 else "memory.limit_in_bytes"
        limits = []
        for group in (self._group, *self._group.parents):
            text = _text(group / name).strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                limits.append(int(text))
            if group == self._top:
                break
        return min(limits, default=0)

    def hint(self) -> str:
        """The limits that apply here, in words; empty when there are none."""
        words = []
        if limit := self.limit_bytes():
            words.append(f"the cgroup's memory limit is {_size(limit)}")
        for name in ("RLIMIT_AS", "RLIMIT_DATA"):
            soft, _ = resource.getrlimit(getattr(resource, name))
            if soft != resource.RLIM_INFINITY:
                words.append(f"{name} is {_size(soft)}")
        if self.last is not None and self.last.free_mb >= 0:
            left, shm = _size(self.last.free_mb * 10**6), _size(self.last.shm_free_mb * 10**6)
            words.append(f"a few seconds before, {left} of the node's memory were left, and {shm} of /dev/shm")
        return ", ".join(words)


def explain_signal(
    signum: int,
    *,
    sent_by_us: bool,
    grace_exceeded: bool,
    oom_before: int,
    oom_after: int,
    last_rss: int,
    host_wide: bool = False,
    hint: str = "",
) -> tuple[ExitCause, str]:
    """Who ended a process with `signum`, and what a person can do about it.

    `sent_by_us`: we asked it to end. `grace_exceeded`: we also sent the SIGKILL. `oom_before`, `oom_after`: counts
    of OomWatch at its start (or at the last death) and now; `host_wide` and `hint` as that watch says.
    """
    name = _name(signum)
    memory = f"; last seen with {_size(last_rss)} resident" if last_rss > 0 else ""
    kills = oom_after - oom_before
    if signum == signal.SIGKILL and sent_by_us and grace_exceeded:
        return ExitCause.GRACE, f"did not end within the grace period, killed with {name}; a longer --grace allows more"
    if signum == signal.SIGKILL and kills > 0:
        return ExitCause.OOM, _oom_sentence(kills, host_wide, memory, hint)
    if sent_by_us:
        return ExitCause.STOPPED, f"ended by {name} when asked to stop"
    if signum == signal.SIGKILL:
        counter = "the host's" if host_wide else "the cgroup's"
        advice = "look for a kill command, the scheduler's log, or a user-space memory guard (systemd-oomd, earlyoom)"
        return ExitCause.SIGNAL, (
            f"killed by {name} from outside, not by Everstep and not by the kernel for memory "
            f"({counter} count of out-of-memory kills did not move){memory}: {advice}"
        )
    return ExitCause.SIGNAL, f"{_MEANING.get(signum, 'ended by a signal from outside')} ({name}){memory}"


def _oom_sentence(kills: int, host_wide: bool, memory: str, hint: str) -> str:
    where = "on this host (perhaps another job's process)" if host_wide else "in this job's cgroup"
    plural = "kill" if kills == 1 else "kills"
    limits = f"; {hint}" if hint else ""
    return (
        f"killed by the kernel, out of memory: {kills} out-of-memory {plural} {where}{memory}{limits}. "
        "Use a smaller batch, fewer loader workers, or a larger memory limit"
    )


_MEANING: dict[int, str] = {
    signal.SIGSEGV: "crashed in native code: invalid memory access",
    signal.SIGBUS: "crashed: a memory-mapped file was cut short, or /dev/shm is full (see df -h /dev/shm)",
    signal.SIGABRT: "aborted itself in native code: the reason is in the last lines of its log",
    signal.SIGILL: "crashed in native code: an instruction this processor does not have",
    signal.SIGFPE: "crashed in native code: an arithmetic error",
    signal.SIGSYS: "killed for a system call the container's seccomp profile forbids",
    signal.SIGXCPU: "killed for using more CPU time than RLIMIT_CPU allows (see ulimit -t)",
    signal.SIGXFSZ: "killed for writing a file larger than RLIMIT_FSIZE allows (see ulimit -f)",
    signal.SIGPIPE: "ended by writing to a pipe or socket that nobody reads",
    signal.SIGTERM: "asked to end from outside, not by Everstep",
    signal.SIGINT: "interrupted from outside, not by Everstep",
    signal.SIGHUP: "ended by the loss of its terminal",
}


def _name(signum: int) -> str:
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _memory_cgroup(pid: int) -> tuple[Path | None, Path | None, bool]:
    """Mount point and folder of the process's memory cgroup, and whether it is v2; None where there is none."""
    v1 = v2 = None
    for line in _text(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            v1 = path
        elif not controllers:
            v2 = path
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split(" ")[3:5]
        kind, _, options = right.split(" ", 2)
        if v1 is not None and kind == "cgroup" and "memory" in options.split(","):
            return Path(mount), _inside(mount, root, v1), False
        if v1 is None and v2 is not None and kind == "cgroup2":
            return Path(mount), _inside(mount, root, v2), True
    return None, None, False


def _inside(mount: str, root: str, path: str) -> Path:
    """A container sees a part of the tree mounted (`root`) while the path may be told from the host's root."""
    relative = os.path.relpath(path, root)
    return Path(mount) if relative.startswith("..") else Path(mount) / relative


def _keyed(path: Path, key: str) -> int | None:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return None


def _text(path: Path) -> str:
    try:
        return procfs.read_all(str(path)).decode("utf-8", "replace")
    except (*procfs.GONE, PermissionError, NotADirectoryError):
        return ""
    except OSError as error:
        if error.errno == errno.ENODEV:  # the cgroup was removed under us
            return ""
        raise
