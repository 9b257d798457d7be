"""`everstep stacks [RUN] [WORKER...]` and `everstep profile [RUN] WORKER`: where the workers of a running job are, now.

Training goes on meanwhile. What is shown is kept in the run folder's `looks`. Exit code: 0 when all that was asked for
is shown; FAILED when of a worker something else is shown, or nothing (it is stopped, it ended meanwhile ...), which a
line on standard error says; USAGE when there is no such worker, or no job that runs; GONE and UNREACHABLE as
`everstep status`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from everstep.cli.asking import ANSWER_S, LATEST, LOOK_S, ask, no_answer, running
from everstep.core import wire
from everstep.core.errors import ExitCode, UsageError
from everstep.core.sampled import Sampled
from everstep.observe import flame

Flag = Annotated[bool, Parameter(negative=())]
ROWS = 12


def stacks(*words: str, run: Path | None = None) -> int:
    """Show the stacks of all threads of workers, as they are now.

    Args:
        words: the run folder (default: the newest one below ./everstep_runs), then workers: ranks, node/local_rank or
            nodes; none: all.
        run: the run folder, said otherwise.
    """
    folder, workers = split(words, run)
    answer = _asked(folder, wire.LookRequest("stacks", workers))
    if isinstance(answer, ExitCode):
        return answer
    sys.stdout.write((folder / answer["file"]).read_text(encoding="utf-8"))
    return _told(answer)


def profile(*words: str, run: Path | None = None, seconds: float = 5.0, threads: Flag = False) -> int:
    """Sample where a worker spends the next seconds: a table, and a flame graph as a page in the run folder.

    Args:
        words: the run folder (default: the newest one below ./everstep_runs), then the worker: its rank, or
            node/local_rank.
        run: the run folder, said otherwise.
        seconds: to sample, 99 times a second.
        threads: all of them, not only the main one.
    """
    folder, workers = split(words, run)
    if len(workers) != 1:
        raise UsageError("profile takes one worker: its rank, or node/local_rank")
    answer = _asked(folder, wire.LookRequest("profile", workers, seconds, threads))
    if isinstance(answer, ExitCode):
        return answer
    path = folder / answer["file"]
    if answer["what"] == "profile":
        print(table(msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Sampled)))
        print(f"flame graph: {path}")
    else:
        sys.stdout.write(path.read_text(encoding="utf-8"))
    return _told(answer)


def split(words: tuple[str, ...], run: Path | None) -> tuple[Path, tuple[str, ...]]:
    """The run folder and the rest. The first word is the folder when there is one of that name with a journal."""
    if run is None and words and (Path(words[0]) / "journal.jsonl").exists():
        return Path(words[0]), words[1:]
    return run or LATEST, words


def table(sampled: Sampled) -> str:
    """The functions with the most time of their own, and how far to believe it."""
    rows = [f"{'itself':>7} {'in all':>7}  function"]
    for each in flame.top(sampled)[:ROWS]:
        rows.append(f"{each.own:7.1%} {each.total:7.1%}  {each.name} ({each.where})")
    return "\n".join([*rows, *flame.notes(sampled)])


def _asked(run: Path, question: wire.LookRequest) -> dict[str, Any] | ExitCode:
    address = running(run)
    patience_s = ANSWER_S + LOOK_S + (question.seconds if question.what == "profile" else 0.0)
    answer = asyncio.run(ask(address, question, answer_s=patience_s))
    if isinstance(answer, str):
        return no_answer(run, address, answer)
    if "refused" in answer:
        raise UsageError(str(answer["refused"]))
    if "nothing" in answer:
        print(f"everstep: {answer['nothing']}", file=sys.stderr)
        return ExitCode.FAILED
    return dict(answer)


def _told(answer: dict[str, Any]) -> ExitCode:
    for note in answer["notes"].values():
        print(f"everstep: {note}", file=sys.stderr)
    return ExitCode.FAILED if answer["notes"] else ExitCode.OK
