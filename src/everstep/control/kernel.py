"""What the kernel said around an incident: a device that fell off its bus, a link that went down, a disk with errors.

Read only when an incident asks (`control.stacks`): the kernel keeps its lines. Of the new ones only those go on their
way that `detect.signatures` takes for a fault of the machine, and of kills for want of memory only those of workers of
ours: a machine may have other tenants. Where the log cannot be read, as in most containers, it is silent.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator

READ_BYTES = 8192  # the most that /dev/kmsg gives at once, which is a record a read
MOST_READS = 20_000
AROUND_S = 300.0  # what is older explains nothing
MOST_LINES = 20

HEADER = re.compile(r"^\d+,\d+,(\d+),[^;]*;")  # of /dev/kmsg: level, number, microseconds since the start, flags
MEMORY_KILL = re.compile(r"oom-kill|oom_kill|oom-killer|out of memory", re.IGNORECASE)
KILLED = re.compile(r"\b(?:pid=|process )(\d+)")
OF_A_PROGRAM = re.compile(r"^traps: ")  # a fault of a program, not of the machine


class KernelLog:
    """One reader of `path`, from its present end on; without one, or without the right to read it, there are no lines.

    A line without the header of /dev/kmsg counts as of the moment at which it is read.
    """

    def __init__(self, path: str) -> None:
        self._lines: list[tuple[float, str]] = []
        self._half = ""
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if path else -1
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:  # nobody may read it, or (lseek) a pipe, which has no end to go to
            return

    def known(self, node: str, pids: Collection[int]) -> str:
        """The lines of late that tell of this machine's faults. `pids`: of our workers."""
        now = time.monotonic()
        self._lines += [(_said_s(line, now), HEADER.sub("", line)) for line in self._new()]
        self._lines = [(at_s, line) for at_s, line in self._lines if now - at_s <= AROUND_S][-1000:]
        lines = [line for _, line in self._lines if _concerns(line, pids)]
        if not lines:
            return ""
        # Its table of patterns takes 20 ms to compile: no agent pays for it before something happened.
        from everstep.detect.logs import WorkerLog, signs
        from everstep.detect.signatures import Depth

        found = signs([WorkerLog(-1, node, "\n".join(f"kernel: {line}" for line in lines))])
        return "\n".join([sign.line for sign in found if sign.depth is Depth.MACHINE][-MOST_LINES:])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _new(self) -> list[str]:
        """Whole lines; those that begin with a space are details of the record before."""
        text = self._half + "".join(self._read())
        *lines, self._half = text.split("\n")
        return [line for line in lines if line and not line.startswith(" ")]

    def _read(self) -> Iterator[str]:
        for _ in range(MOST_READS if self._fd >= 0 else 0):
            try:
                data = os.read(self._fd, READ_BYTES)
            except BrokenPipeError:  # lines were overwritten before we came
                continue
            except OSError:  # no more for now
                return
            if not data:
                return
            yield data.decode("utf-8", "replace")


def _said_s(line: str, now: float) -> float:
    header = HEADER.match(line)
    return int(header.group(1)) / 1e6 if header is not None else now


def _concerns(line: str, pids: Collection[int]) -> bool:
    if MEMORY_KILL.search(line):
        return any(int(pid) in pids for pid in KILLED.findall(line))
    return not OF_A_PROGRAM.search(line)
