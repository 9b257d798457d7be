"""Resource trackers die last: they unlink the semaphores and shared memory of multiprocessing whose owners were killed.

A tracker is a child of the process that made the first such object. It ends by itself, everything unlinked,
when the last process which could use its objects is gone. So whoever ends a worker's processes kills all
others, and gives trackers `LAST_S` then: off the way of the next epoch, which does not wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable

from everstep.control import procfs
from everstep.control.host import ProcessHandle
from everstep.control.procfs import ProcessSample

LAST_S = 1.0  # it needs some 20 ms; one which is just starting up, on a busy host, some 200
_MARK = b"resource_tracker import main"  # python -c "from ... import main;main(FD)": multiprocessing's, joblib's
_COMMAND_BYTES = 4096


def is_tracker(pid: int) -> bool:
    """Whether this process, if it is still there, is a resource tracker."""
    try:
        return _MARK in procfs.read_bytes(f"/proc/{pid}/cmdline", _COMMAND_BYTES)
    except (*procfs.GONE, PermissionError):
        return False


async def see_out(trackers: Iterable[ProcessSample]) -> None:
    """Give these `LAST_S` together to end by themselves, then kill whoever is left."""
    await asyncio.gather(*map(_see_out, trackers))


async def _see_out(tracker: ProcessSample) -> None:
    with (
        contextlib.suppress(ProcessLookupError, PermissionError),  # gone; another user's
        ProcessHandle(tracker.pid, tracker.start_ticks) as handle,
    ):
        if not await handle.wait(LAST_S):
            handle.send(signal.SIGKILL)
