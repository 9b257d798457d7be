"""What to do, as a list for people: out of each incident, and out of how the job went as a whole."""

from __future__ import annotations

from collections import Counter

import msgspec

from everstep.core.errors import ExitCode
from everstep.observe.explain import cost_s, planned
from everstep.observe.text import advise, template_of
from everstep.observe.units import percent
from everstep.observe.view import Bucket, View

NAMED = 8  # incidents that one line names
OFTEN = 3  # incidents by one node, when it has more than half of all
LONG_S = 600.0  # a shorter job tells little about its losses
LOSSES = 0.02  # of the accelerators' time: below this a bucket needs no advice

BY_EXIT = {
    ExitCode.FAILED: "Mend what made the workers fail, then start the job again, from its newest checkpoint.",
    ExitCode.CRASH_LOOP: "It fails at the same step each time: mend that in the script, its data or its environment.",
    ExitCode.HUNG: "It hung more often than restarts were allowed: read the stacks of the last hang first.",
    ExitCode.TOO_FEW_NODES: "Bring nodes back, or allow fewer of them (--nnodes MIN:MAX), and start the job again.",
    ExitCode.INCOMPLETE: "All workers ended well before the last step that was expected: look at their last log lines.",
    ExitCode.SAVE_FAILED: "The work is done but not on disk: mend the place of the checkpoints, and save again.",
    ExitCode.INTERNAL: "Everstep itself failed: please report it, with this report and the journal.",
}

BY_BUCKET = {
    Bucket.DETECTION: "Faults were noticed late: `[hang] timeout_s` sets a limit instead of the learned one.",
    Bucket.RECOVERY: "Recovery took that much: standbys (--standbys) take a dead worker's place while others go on.",
    Bucket.REDONE: "Work was done twice: save more often (`everstep plan` gives the interval), or keep more replicas.",
    Bucket.STALL: "Training waited for saves: save asynchronously, or at the interval that `everstep plan` gives.",
    Bucket.WAITING: "Accelerators were missing: spare nodes fill the gap, or a job that may shrink (--nnodes MIN:MAX).",
    Bucket.STANDBY: "Spares were idle that much: `everstep plan` tells how many are worth their price.",
    Bucket.STRAGGLER: "All waited for slow workers: `[straggler] act = true` replaces them, or take their nodes out.",
}


class ToDo(msgspec.Struct, frozen=True):
    """One thing to do, and the incidents that ask for it (at most NAMED are named; `count`: all)."""

    text: str
    incidents: tuple[str, ...] = ()
    count: int = 0


def to_do(view: View) -> list[ToDo]:
    """The most pressing first; empty when nothing is to be done."""
    return [*_job(view), *_culprits(view), *_incidents(view), *_saves(view), *_losses(view)]


def _job(view: View) -> list[ToDo]:
    text = BY_EXIT.get(ExitCode(view.exit_code)) if view.exit_code in set(ExitCode) else None
    return [ToDo(text)] if text else []


def _culprits(view: View) -> list[ToDo]:
    """A node that is behind more than half of the failures, where there are others."""
    failures = [incident for incident in view.incidents if not planned(incident)]
    nodes = Counter(node for incident in failures for node in {blame.node for blame in incident.culprits} if node)
    if not nodes or len(view.nodes) < 2:
        return []
    node, count = nodes.most_common(1)[0]
    if count < OFTEN or 2 * count <= len(failures):
        return []
    found = [i.id for i in failures if any(blame.node == node for blame in i.culprits)]
    text = (
        f"Examine {node} before it is used again (`everstep doctor`): {count} of {len(failures)} failures began there."
    )
    return [ToDo(text, tuple(found[:NAMED]), count)]


def _incidents(view: View) -> list[ToDo]:
    """One line for each kind of advice, the dearest incidents first."""
    grouped: dict[str, list[str]] = {}
    words: dict[str, str] = {}
    for incident in sorted(view.incidents, key=lambda item: -cost_s(item)):
        template = template_of(incident)
        if template:
            words.setdefault(template, advise(incident))
            grouped.setdefault(template, []).append(incident.id)
    return [ToDo(words[key], tuple(ids[:NAMED]), len(ids)) for key, ids in grouped.items()]


def _saves(view: View) -> list[ToDo]:
    """A long job that left nothing on disk."""
    if view.now_s < LONG_S or view.simulated or view.num_saves or view.saved_step >= 0:
        return []
    failed = next((save.failed for save in reversed(view.saves) if save.failed), "")
    why = f"A save failed: {failed}." if failed else "Let the script save."
    return [ToDo(f"Nothing was saved to disk: if all nodes are lost at once, so are all steps. {why}")]


def _losses(view: View) -> list[ToDo]:
    total = sum(view.buckets.values())
    if view.now_s < LONG_S or not total:
        return []
    lost = [(view.buckets.get(bucket.value, 0.0) / total, text) for bucket, text in BY_BUCKET.items()]
    names = [bucket.value for bucket in BY_BUCKET]
    worst = sorted(((share, name, text) for (share, text), name in zip(lost, names, strict=True)), reverse=True)
    return [ToDo(f"{text} ({name}: {percent(share)})") for share, name, text in worst if share >= LOSSES]
