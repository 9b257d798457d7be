"""Exit codes of the command line, and the errors a user can cause."""

from __future__ import annotations

import enum
from collections.abc import Iterator


class ExitCode(enum.IntEnum):
    """What `everstep run` exits with. After a stop by signal N it is 128 + N, as shells expect."""

    OK = 0
    FAILED = 1  # a worker failed and the restart budget is spent
    USAGE = 2  # bad arguments or configuration
    CRASH_LOOP = 3  # the same failure at the same step, three times
    HUNG = 4  # a hang, and the restart budget is spent
    TOO_FEW_NODES = 5  # fewer nodes than the minimum for longer than the join time-out
    UNREACHABLE = 6  # no controller at the given address, or it refused the token
    INCOMPLETE = 7  # every worker exited 0, but before the expected number of steps
    NODE_LOST = 8  # this node was cut off and had to give up
    GONE = 9  # of `everstep status` and `drain`: the job's launcher is gone, and nobody wrote down how it ended
    SAVE_FAILED = 10  # the work is done, but its last save to disk failed
    UNFIT = 11  # of `everstep doctor`: something is broken, or far slower than it should be
    NO_JOURNAL = 74  # of the controller's process: its journal cannot be written; its launcher tries again
    INTERNAL = 70  # a defect of Everstep: please report it


class EverstepError(Exception):
    """Base of what a user sees as one clear line instead of a traceback. Carries the exit code."""

    code = ExitCode.FAILED


class UsageError(EverstepError, ValueError):
    """An argument, a configuration value or a file is wrong; the text says which, where, and what to do."""

    code = ExitCode.USAGE


class Unreachable(EverstepError):
    """The controller does not answer, or refuses this node. `refused`: trying again would end the same way."""

    code = ExitCode.UNREACHABLE

    def __init__(self, why: str, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class EpochBroken(Exception):
    """A blocking call of the fabric was given up: its epoch was aborted, or a peer has left it. Nobody's mistake."""

    def __init__(self, epoch: int, why: str) -> None:
        super().__init__(f"epoch {epoch} is broken: {why}")
        self.epoch = epoch
        self.why = why


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from: torch's groups have an error of their own for a broken epoch."""
    while error is not None:
        yield error
        error = error.__cause__
