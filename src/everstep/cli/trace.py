"""`everstep trace [RUN]`: what a job did, over all its workers, as a file for ui.perfetto.dev or chrome://tracing.

Each worker's newest spans are in the log folders of the nodes (`[trace] size`, see control.tracing); those that are on
this machine are read, one worker at a time. Also while the job runs.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from everstep.cli.asking import LATEST
from everstep.cli.viewing import journal_of, readable, tell_damage
from everstep.control.journal import read
from everstep.core.errors import ExitCode, UsageError
from everstep.observe.trace import Story
from everstep.observe.trace_files import Place, Window, align, narrow, places
from everstep.observe.trace_json import JOB, job_events, worker_events

MOST = 2_000_000  # events of workers: about what the viewers bear
COMPRESSION = 4
AT_ONCE = 1000  # events
NAMED = 8  # nodes


def trace(
    run: Path = LATEST,
    *,
    out: Path | None = None,
    first: float | None = None,
    last: float | None = None,
    newest: float | None = None,
    ranks: str = "",
    most: int = MOST,
    logs: Path | None = None,
) -> int:
    """Write steps, phases, collectives, saves and incidents of a job as one trace, to look at in a browser.

    Args:
        run: the job's run folder, or its journal (default: the newest one below ./everstep_runs).
        out: the file; ends in .json or .json.gz (default: trace.json.gz in the run folder).
        first: leave out what ended earlier, in seconds since the job's submission.
        last: leave out what began later.
        newest: only the newest so many seconds.
        ranks: only these workers, as in 0-7,16 (default: all).
        most: workers' events at most; where there are more, the oldest are left out, of all workers alike.
        logs: where the log folders of the nodes are, if the job had --log-dir (default: logs in the run folder).
    """
    journal = journal_of(run)
    run = journal.parent
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two files for each worker
    wanted = _ranks(ranks)
    _refuse(out, first, last, newest, most, logs)
    story = _story(journal)
    with places(logs or run / "logs") as (found, wrong):
        for line in wrong:
            print(f"everstep: {line}", file=sys.stderr)
        missing = [node for node in story.nodes if not any(place.node == node for place in found)]
        if missing:
            more = f" and {len(missing) - NAMED} more nodes" if len(missing) > NAMED else ""
            print(f"everstep: no trace of {', '.join(missing[:NAMED])}{more} on this machine", file=sys.stderr)
        begin = story.timeline.now_s - newest if newest is not None else first
        asked = Window(-math.inf if begin is None else begin, math.inf if last is None else last)
        workers = _chosen(story, found, wanted)
        window = narrow(workers, asked, most) if workers else asked
        if window != asked:
            print(f"everstep: more than {most} events: workers are shown from {window.first_s:.3f} s", file=sys.stderr)
        path = out or run / "trace.json.gz"
        num_events = _write(path, _events(story, workers, window))
    print(f"{path}: {num_events} events, {len(workers)} workers: open it at ui.perfetto.dev or in chrome://tracing")
    return ExitCode.OK


def _story(journal: Path) -> Story:
    story = Story()
    with readable(journal):
        reading = read(journal, partial=True)
        for entry in reading:
            story.add(entry)
    tell_damage(reading, bool(story.job))
    return story


def _refuse(
    out: Path | None, first: float | None, last: float | None, newest: float | None, most: int, logs: Path | None
) -> None:
    """What would give a trace of nothing. Raises UsageError."""
    for option, seconds in (("--first", first), ("--last", last), ("--newest", newest)):
        if seconds is not None and not 0 <= seconds < math.inf:
            raise UsageError(f"{option} {seconds}: expected seconds")
    if first is not None and last is not None and last < first:
        raise UsageError(f"--last {last}: that is before --first {first}")
    if most < 1:
        raise UsageError(f"--most {most}: expected 1 or more")
    if out is not None and not out.name.endswith((".json", ".json.gz")):
        raise UsageError(f"--out {out}: expected a name that ends in .json or .json.gz")
    if logs is not None and not logs.is_dir():
        raise UsageError(f"--logs {logs}: there is no such folder")


def _chosen(story: Story, found: list[Place], wanted: list[range] | None) -> list[Place]:
    """The places of these ranks, their clocks set to the job's time."""
    headers = [file.header for place in found for file in place.files]
    align(found, story.clocks.offsets(headers, story.timeline.submitted_wall_s))
    return [place for place in found if wanted is None or any(place.rank in ranks for ranks in wanted)]


def _ranks(text: str) -> list[range] | None:
    """Of 0-7,16. Raises UsageError."""
    if not text:
        return None
    found: list[range] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise UsageError(f"--ranks {text}: expected ranks as in 0-7,16")
        found.append(range(int(low), int(high or low) + 1))
        if not found[-1]:
            raise UsageError(f"--ranks {text}: {part} names none")
    return found


def _events(story: Story, workers: list[Place], window: Window) -> Iterator[bytes]:
    yield from job_events(story.job, story.end(), story.steps, window)
    width = len(str(max((place.rank for place in workers), default=0)))  # Perfetto sorts names as text
    for number, place in enumerate(workers, JOB + 1):
        name = f"rank {place.rank:0{width}}: {place.node}/{place.local_rank}"
        yield from worker_events(number, name, place.spans(window))


def _write(path: Path, events: Iterator[bytes]) -> int:
    """The number of events. Raises UsageError when it cannot be written: what was there before is there then."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as raw:
            number = _pack(raw, events) if path.suffix == ".gz" else _stream(raw, events)
        new.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if isinstance(error, OSError):
            raise UsageError(f"{path}: {error.strerror}") from error
        raise
    return number


def _pack(raw: BinaryIO, events: Iterator[bytes]) -> int:
    with gzip.GzipFile("", "wb", COMPRESSION, raw) as packed:
        return _stream(cast(BinaryIO, packed), events)


def _stream(file: BinaryIO, events: Iterator[bytes]) -> int:
    """A few events at a time: a large job's do not fit into memory."""
    number, between = 0, b""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    while few := list(itertools.islice(events, AT_ONCE)):
        file.write(between + b",\n".join(few))
        number, between = number + len(few), b",\n"
    file.write(b"\n]}\n")
    return number
