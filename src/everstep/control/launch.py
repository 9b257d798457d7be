"""What an agent asks its zygote for, and what comes back: the messages between the two processes.

They travel as msgpack datagrams over a Unix SEQPACKET socket pair; descriptors (the worker's page and its channel, or
the store's listening socket) ride along with SCM_RIGHTS.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.core.identity import VaultPlace


class Kind(str, enum.Enum):
    SCRIPT = "script"  # run a Python file as __main__ (runpy.run_path)
    MODULE = "module"  # python -m
    PROGRAM = "program"  # exec; no Python, no hooks (--no-python)
    STORE = "store"  # serve a torch TCPStore on the listening socket that came along
    EXAM = "exam"  # probe.exam: args are its folder and address; the readings go into the descriptor


class SpawnRequest(msgspec.Struct, frozen=True, tag=True):
    """One process to start. `key` names it in every answer. Descriptors come along: of the page and the channel, or of
    the store's socket."""

    key: int
    kind: Kind
    target: str  # file, module or program; empty for a store
    args: tuple[str, ...]
    env: dict[str, str]  # the whole environment
    cwd: str
    stdout: str  # opened for appending; may be the same file as stderr
    stderr: str
    stacks: str = ""  # where faulthandler writes when it is asked (control.stacks.SIGNAL)
    world_size: int = 0  # for a store
    worker: str = ""  # its name in formations
    address: str = ""  # where other nodes reach it
    secret: bytes = b""  # proves links between workers; never in the environment
    vault: VaultPlace = VaultPlace()
    ring_bytes: int = 0  # of its trace, behind its page


class Forked(msgspec.Struct, frozen=True, tag=True):
    key: int
    pid: int


class SpawnFailed(msgspec.Struct, frozen=True, tag=True):
    key: int
    why: str


class Reaped(msgspec.Struct, frozen=True, tag=True):
    """The process is gone. `status` as waitpid gives it; `max_rss_bytes` from rusage."""

    key: int
    pid: int
    status: int
    max_rss_bytes: int


class Warm(msgspec.Struct, frozen=True, tag=True):
    """All preloads are imported. `threads`: how many the process has (1, or forking is refused)."""

    import_s: float
    threads: int
    modules: dict[str, str]  # versions of torch, numpy, python, everstep
    gpus: int = 0
    unfit: str = ""  # why it must not be forked; empty when it may


Answer = Forked | SpawnFailed | Reaped | Warm


class Spawner:
    """What an agent needs from a zygote client or the plain spawner; both are this shape.

    `start()` returns at once; `on_answer` is called in the event loop with each Answer. `spawn` hands over
    `fds` (the caller keeps its own copies). `close()` ends the zygote; its workers are the caller's to end first.
    """

    @property
    def pid(self) -> int:
        """Of the zygote; 0 without one."""
        return 0

    async def start(self) -> None:
        raise AssertionError("abstract")

    def spawn(self, request: SpawnRequest, *fds: int) -> None:
        raise AssertionError("abstract")

    async def close(self) -> None:
        raise AssertionError("abstract")
