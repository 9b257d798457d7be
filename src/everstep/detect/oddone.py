"""Who is to blame when a job hangs: every worker of a synchronous job stops, and only one of them is the cause.

Evidence, strongest first: the script of one has ended; the kernel shows one stopped; steps made; collectives
entered; stacks. Counters go before stacks, because a device makes innocent workers wait in odd places; stacks
choose among those whom the counters suspect. When all look the same, nobody is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from everstep.core.types import Phase, WorkerProgress
from everstep.detect.stacks import main_thread, place, waits


class Odd(msgspec.Struct, frozen=True):
    """The suspects, what gives them away, and how sure that makes us. No suspects: all look the same."""

    ranks: tuple[int, ...]
    what: str
    confidence: float
    cause: str = "hang"


def odd_one(workers: Sequence[WorkerProgress], stacks: Mapping[int, str]) -> Odd:
    """Name the odd one among workers that stand still. `stacks`: faulthandler's text by rank, where there is one."""
    stopped = [w for w in workers if w.stopped]
    if stopped:
        return _odd(stopped, "the kernel shows it stopped", 1.0, "stopped")
    running = [w for w in workers if w.phase is not Phase.DONE]
    busy = busy_ones(running, stacks)
    early = [w for w in workers if w.phase is Phase.DONE]
    if early and len(busy) < len(running):  # at least one waits for somebody
        steps = min(w.step for w in early)
        left = [w for w in early if w.step == steps]
        return _odd(left, f"its script ended at step {steps}: it left early", 0.9, "left-early")
    return _by_steps(running, busy) or _by_collectives(running, busy) or _by_stacks(running, busy, stacks)


def busy_ones(workers: Sequence[WorkerProgress], stacks: Mapping[int, str]) -> list[WorkerProgress]:
    """Those whose main thread is seen elsewhere than in a wait for others."""
    frames = {w.rank: main_thread(stacks.get(w.rank, "")) for w in workers}
    return [w for w in workers if frames[w.rank] and not waits(frames[w.rank])]


def _by_steps(workers: Sequence[WorkerProgress], busy: Sequence[WorkerProgress]) -> Odd | None:
    fewest, most = min(w.step for w in workers), max(w.step for w in workers)
    if fewest == most:
        return None
    behind = [w for w in workers if w.step == fewest]
    ahead = [w for w in workers if w.step > fewest]
    stuck = [w for w in behind if w in busy]
    if stuck and len(busy) < len(workers):
        return _odd(stuck, f"it is at step {fewest}, others at {most}, and it does not wait for them", 0.95)
    if len(ahead) == 1 and (len(behind) > 1 or _fewest_collectives(workers) == ahead):
        return _odd(ahead, f"it is at step {most}, the others at {fewest}: it skipped a collective", 0.7)
    if len(behind) * 2 <= len(workers):
        return _odd(behind, f"it is at step {fewest}, others at {most}", 0.8)
    return None


def _by_collectives(workers: Sequence[WorkerProgress], busy: Sequence[WorkerProgress]) -> Odd | None:
    fewest = _fewest_collectives(workers)
    most = max(w.collectives for w in workers)
    if not fewest:
        return None
    if len(fewest) == len(workers) - 1 > 1:
        extra = [w for w in workers if w not in fewest]
        return _odd(extra, f"it entered collective {most}, the others only {fewest[0].collectives}", 0.6)
    stuck = [w for w in fewest if w in busy] or fewest
    return _odd(stuck, f"it entered {fewest[0].collectives} collectives, others {most}", 0.85)


def _fewest_collectives(workers: Sequence[WorkerProgress]) -> list[WorkerProgress]:
    """Empty when all are equal, or too different to compare: pipeline stages send and receive in different numbers."""
    fewest, most = min(w.collectives for w in workers), max(w.collectives for w in workers)
    a_step = fewest / max(1, min(w.step for w in workers))
    if fewest == most or most - fewest > max(2.0, 2 * a_step):
        return []
    return [w for w in workers if w.collectives == fewest]


def _by_stacks(workers: Sequence[WorkerProgress], busy: Sequence[WorkerProgress], stacks: Mapping[int, str]) -> Odd:
    if len(workers) == 1:
        return _odd(workers, f"it is the only one that runs{_seen_in(workers[0], stacks)}", 1.0)
    if not busy or len(busy) == len(workers):
        return Odd((), "all workers look the same", 0.3)
    return _odd(busy, f"the others wait in communication, it does not{_seen_in(busy[0], stacks)}", 0.8)


def _seen_in(worker: WorkerProgress, stacks: Mapping[int, str]) -> str:
    where = place(main_thread(stacks.get(worker.rank, "")))
    return f" (it is in {where})" if where else ""


def _odd(workers: Sequence[WorkerProgress], what: str, confidence: float, cause: str = "hang") -> Odd:
    return Odd(tuple(sorted(w.rank for w in workers)), what, confidence, cause)
