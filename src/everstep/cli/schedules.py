"""`everstep schedules`: the control plane's machines against random schedules of faults, and one schedule in detail.

Run: everstep schedules --count 10000            all invariants over that many seeds
     everstep schedules --seed 4711 --trace      one of them, with everything that happened
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from everstep.core.errors import ExitCode, UsageError
from everstep.testing.schedules import BROKEN, Summary, play, play_many

CHUNK = 250  # seeds a process takes at a time


def schedules(
    *, count: int = 10_000, seed: int | None = None, first: int = 0, trace: bool = False, jobs: int | None = None
) -> int:
    """Test the control plane with random schedules of faults.

    Args:
        count: how many schedules, with seeds from `first` on.
        seed: play only this schedule.
        first: the first seed.
        trace: with --seed, print everything that happened.
        jobs: processes to use; usually 2, or as many as there are CPUs.
    """
    if seed is not None:
        return replay(seed, 0 if trace else 1)
    if trace:
        raise UsageError("--trace prints one schedule: say which with --seed N")
    if count < 1 or (jobs is not None and jobs < 1):
        raise UsageError("--count and --jobs must be at least 1")
    workers = jobs or min(2, os.cpu_count() or 1)
    began = time.perf_counter()
    summary = _run(first, count, workers)
    print(_table(summary, time.perf_counter() - began, workers))
    for failure in summary.failures:
        print(f"\nFAILED  everstep schedules --seed {failure.seed} --trace\n{failure.why}\n{failure.where}", end="")
    return int(ExitCode.FAILED if summary.failures else ExitCode.OK)


def replay(seed: int, steps: int) -> int:
    """Play one schedule and print the last `steps` lines of what happened (0: all of them)."""
    lines: list[str] = []
    try:
        played = play(seed, lines)
    except BROKEN:
        print("\n".join(lines[-steps:]))
        traceback.print_exc(limit=-4, file=sys.stdout)
        return int(ExitCode.FAILED)
    print("\n".join(lines[-steps:]))
    print(f"seed {seed} holds: {played.events} events, faults: {_counted(played.faults)}; the job {played.outcome}")
    return int(ExitCode.OK)


def _run(first: int, count: int, workers: int) -> Summary:
    chunks = [range(at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)]
    summary = Summary()
    if workers == 1:
        for chunk in chunks:
            summary.add(play_many(chunk))
            _show(summary.schedules, count)
        return summary
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(play_many, chunk) for chunk in chunks]):
            summary.add(future.result())
            _show(summary.schedules, count)
    return summary


def _show(done: int, count: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {count} schedules", end="\n" if done == count else "", file=sys.stderr, flush=True)


def _table(summary: Summary, took_s: float, workers: int) -> str:
    rows = [
        ("schedules", str(summary.schedules)),
        ("events", str(summary.events)),
        ("outcomes", _counted(summary.outcomes)),
        ("faults", f"{summary.faults.total()}: {_counted(summary.faults)}"),
        ("failures", str(len(summary.failures))),
        ("time", f"{took_s:.1f} s in {workers} process{'es' if workers > 1 else ''}"),
    ]
    return "\n".join(f"{name:10} {value}" for name, value in rows)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.most_common())
