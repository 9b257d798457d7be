"""Which streams of which workers go to the console: torchrun's `-r`, `-t` and `--local-ranks-filter`.

Everything goes into log files in any case. As with torchrun, a redirected stream is only in its file, a teed one
in both, and the filter keeps the others off the console. Where torchrun takes ranks of one digit, we take any.
"""

from __future__ import annotations

import enum
import re
import string
from collections.abc import Collection

from everstep.core.errors import UsageError


class Std(enum.IntFlag):
    """The two streams of a worker, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


def parse_streams(text: str, option: str, slots: int) -> dict[int, Std]:
    """ "3" (all workers) or "0:3,1:2" (by local rank, others none), for each local rank. Raises UsageError."""
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(slots), Std(int(text)))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(
            f"{option} {text!r}: expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a list by local rank: 0:3,1:2"
        )
    given = dict(pair.split(":") for pair in text.split(","))
    by_rank = {int(rank): Std(int(streams)) for rank, streams in given.items()}
    return {rank: by_rank.get(rank, Std.NONE) for rank in range(slots)}


def parse_ranks(text: str, option: str) -> frozenset[int]:
    """ "0,2" as a set of local ranks; empty text: no filter. Raises UsageError."""
    if not text:
        return frozenset()
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UsageError(f"{option} {text!r}: expected local ranks such as 0,1,2")
    return frozenset(int(rank) for rank in text.split(","))


def on_console(redirects: dict[int, Std], tees: dict[int, Std], ranks: Collection[int], slots: int) -> dict[int, Std]:
    """For each local rank, the streams to show. `ranks` empty: those of all."""
    shown = {}
    for rank in range(slots):
        streams = (Std.ALL & ~redirects.get(rank, Std.NONE)) | tees.get(rank, Std.NONE)
        shown[rank] = streams if not ranks or rank in ranks else Std.NONE
    return shown


def line_prefix(rank: int, local_rank: int, role: str, template: str = "") -> str:
    """What stands before each line: "[rank3]: ", or torchrun's TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE filled in."""
    if not template:
        return f"[rank{rank}]: "
    return string.Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
