"""DataLoader workers outlive a SIGTERM that somebody sends to every process of the job (a scheduler, a cgroup's end).

The script saves on SIGTERM and needs its data until then; but torch's handler in a DataLoader worker ends it on
a SIGTERM of anyone, and the script with it: "DataLoader worker is killed by signal". So a worker leaves SIGTERM
alone, and its parent's `terminate()` sends one more signal, on which torch's own handler sits. Their ends are
as before: the loader's shutdown, the parent's death, SIGKILL.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEAVE = signal.SIGRTMIN + 10  # to a DataLoader worker: what SIGTERM is to it elsewhere
_ACTION_BYTES = 1024  # a struct sigaction of any platform fits; it is copied unread
_TORCH = "torch.utils.data._utils"

_Action = ctypes.Array[ctypes.c_char]
_sigaction = ctypes.CDLL(None, use_errno=True).sigaction
_torchs_loop: Callable[..., None] | None = None


def patch_torch() -> None:
    """For workers that are forked, and for those that start afresh, which find `_loop` by its name in their pickle."""
    global _torchs_loop
    worker: Any = importlib.import_module(f"{_TORCH}.worker")
    _torchs_loop, worker._worker_loop = worker._worker_loop, _loop
    _guard_when_ready()
    _hook_terminate()


def _loop(*args: Any) -> None:
    """Body of a DataLoader worker."""
    if _torchs_loop is None:  # a fresh process: no hook of ours is in it yet
        _guard_when_ready()
    loop = _torchs_loop or importlib.import_module(f"{_TORCH}.worker")._worker_loop
    loop(*args)


def _guard_when_ready() -> None:
    """Only workers call this function of torch; other loops than torch's own (torchdata's) do so too."""
    handling: Any = importlib.import_module(f"{_TORCH}.signal_handling")
    original = handling._set_worker_signal_handlers

    def set_handlers() -> None:
        original()
        _guard()

    handling._set_worker_signal_handlers = set_handlers


def _guard() -> None:
    """Move torch's handler from SIGTERM to LEAVE. What the worker executes (a decoder) gets the default for both."""
    torchs = ctypes.create_string_buffer(_ACTION_BYTES)
    _copy_action(signal.SIGTERM, None, torchs)
    _copy_action(LEAVE, torchs, None)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which programs would inherit
    signal.siginterrupt(signal.SIGTERM, False)
    _release_forks(torchs)


def _release_forks(torchs: _Action) -> None:
    """What a worker forks is no DataLoader worker: `os.kill(child, SIGTERM)` reaches it, however early."""
    mask: set[int] = set()

    def before() -> None:
        nonlocal mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def in_child() -> None:
        _copy_action(signal.SIGTERM, torchs, None)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def _copy_action(signum: int, new: _Action | None, old: _Action | None) -> None:
    if _sigaction(signum, new, old):
        raise OSError(ctypes.get_errno(), f"sigaction({signum})")


def _hook_terminate() -> None:
    popen: Any = importlib.import_module("multiprocessing.popen_fork").Popen  # base of all ways to start
    original = popen.terminate

    def terminate(self: Any) -> None:
        original(self)  # first: a worker which is not guarded yet obeys this one
        if self.returncode is None and _is_guarded(self.pid):
            self._send_signal(LEAVE)

    popen.terminate = terminate


def _is_guarded(pid: int) -> bool:
    """Whether the process catches LEAVE."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = status.partition("SigCgt:")[2].split(maxsplit=1)
    return bool(caught) and bool(int(caught[0], 16) >> (LEAVE - 1) & 1)
