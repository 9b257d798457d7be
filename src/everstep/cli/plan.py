"""`everstep plan --gpus N --mtbf 3h --state-bytes 1.6T --step-s 5`: what a job of that size should set, and why.

Prints how often to save to memory and to disk, copies and standbys, what is done about each kind of fault, and the
expected ETTR: its 90 % range, the closed form beside it, and what stopping and restarting would give. `--plot FILE`
draws the same for failures from every 10 minutes to every 30 days. Exit code USAGE for numbers that make no job.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from everstep.cli.fold import folded
from everstep.cli.viewing import journal_of, readable, tell_damage
from everstep.control import replay
from everstep.control.reading import Place, Reader
from everstep.control.segments import Files
from everstep.core.config import size_of
from everstep.core.errors import UsageError
from everstep.core.events import CostLearned
from everstep.plan.closed import mttf_s
from everstep.plan.costs import Costs
from everstep.plan.planner import Question, Recommendation, TierPlan, recommend

UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
INDENT = 10  # of what belongs to the word at the begin of a line
Silent = Parameter(show_default=False)  # the help's text says it better
DEFAULTS = Question(gpus=1, mttf_s=1.0, state_bytes=1.0, step_s=1.0)


def plan(
    *,
    gpus: int,
    state_bytes: str,
    step_s: float,
    mtbf: Annotated[str, Silent] = "",
    node_failures: float = 0.0065,
    gpus_per_node: int = DEFAULTS.gpus_per_node,
    replicas: int = DEFAULTS.replicas,
    copy_rate: str = "20G",
    network_rate: str = "20G",
    disk_rate: str = "50G",
    stall_s: Annotated[float, Silent] = DEFAULTS.stall_s,
    disk_stall_s: Annotated[float, Silent] = DEFAULTS.disk_stall_s,
    together: float = DEFAULTS.together,
    process_part: Annotated[float, Silent] = DEFAULTS.process_part,
    seen: int = DEFAULTS.seen,
    run: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    plot: Path | None = None,
) -> int:
    """Recommend tiers, intervals, copies, standbys and strategy for a job, with the expected ETTR.

    Args:
        gpus: accelerators of the job.
        state_bytes: parameters and optimizer state of one whole copy, as in 1.6T or 400M.
        step_s: seconds a step takes.
        mtbf: mean time between failures of the whole job, as in 30m, 3h, 2d (default: from --node-failures).
        node_failures: failures of a node a day; 0.0065 is Meta's.
        gpus_per_node: accelerators of a node.
        replicas: data-parallel copies of the whole state; 1: it is sharded over all.
        copy_rate: bytes a second of one accelerator into its host's memory.
        network_rate: bytes a second of a node, for copies to other nodes.
        disk_rate: bytes a second of all nodes together to disk.
        stall_s: seconds that a save adds to the steps, as measured (default: as long as the copy takes).
        disk_stall_s: seconds that writing it to disk adds besides (default: as much again).
        together: part of the lost nodes that take another one with them.
        process_part: part of the failures after which the node is fit (default: 63 of 419, as in Llama 3).
        seen: failures on which the mean time rests, for the range.
        run: folder of a job whose incidents tell what actions take here (default: published times).
        json: print JSON.
        plot: a picture (PNG) of the recommendation from 10 minutes to 30 days between failures.
    """
    nodes = -(-gpus // max(1, gpus_per_node))
    if not mtbf and not (node_failures > 0 and nodes > 0):
        raise UsageError("--node-failures and --gpus must be above 0")
    question = Question(
        gpus=gpus,
        mttf_s=seconds_of(mtbf, "--mtbf") if mtbf else mttf_s(nodes, node_failures),
        state_bytes=size_of(state_bytes, "--state-bytes"),
        step_s=step_s,
        gpus_per_node=gpus_per_node,
        replicas=replicas,
        copy_rate=size_of(copy_rate, "--copy-rate"),
        network_rate=size_of(network_rate, "--network-rate"),
        disk_rate=size_of(disk_rate, "--disk-rate"),
        stall_s=stall_s,
        disk_stall_s=disk_stall_s,
        together=together,
        process_part=process_part,
        seen=seen,
    )
    costs = learned(run) if run is not None else Costs()
    found = recommend(question, costs)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        print(folded(render(found), INDENT))
    if plot is not None:
        from everstep.cli.plan_plot import draw

        draw(question, plot, costs)
        print(f"picture: {plot}", file=sys.stderr)
    return 0


def learned(run: Path) -> Costs:
    """What that job learned of its costs. Raises UsageError where there is no journal."""
    journal = journal_of(run)
    kept = replay.kept(Files(journal))  # by a controller of this version
    place, costs = (kept[0], kept[1].job.costs) if kept is not None else (Place(), Costs())
    with readable(journal):
        reader = Reader(journal, place, partial=True)
        for entry in reader.entries():
            if isinstance(entry.event, CostLearned):
                costs = costs.saw(entry.event.what, entry.event.seconds)
    tell_damage(reader, reader.place.n > 0)
    return costs


def seconds_of(text: str, what: str) -> float:
    """Seconds of 90, 45s, 30m, 3h, 2d or 1.5w. Raises UsageError, naming `what`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{what} {text!r}: expected a time as in 30m, 3h, 2d or 90 (seconds)")
    return float(match[1]) * UNITS_S[match[2].lower()]


# Words --------------------------------------------------------------------------------------------------


def render(found: Recommendation) -> str:
    """The recommendation for a terminal."""
    q = found.question
    lines = [
        f"{_count(q.gpus, 'GPU')} on {_count(q.nodes, 'node')}, a failure every {span(q.mttf_s)}, "
        f"{size(q.state_bytes)} of state, steps of {span(q.step_s)}",
        "",
        f"ETTR      {found.ettr:.4f} expected, {found.low:.4f} to {found.high:.4f} in 9 of 10 cases; closed form "
        f"{found.closed:.4f}",
        f"          {found.restart:.4f} if all workers are stopped and load from disk after each failure",
    ]
    lines += [_tier(tier) for tier in found.tiers]
    if found.live_share:
        lines.append(
            f"replicas  {percent(found.live_share)} of failures leave a live copy: only the step under way is lost"
        )
    lines += _places(found)
    part = found.standbys * q.gpus_per_node / q.gpus
    lines.append(
        f"standbys  {_count(found.standbys, 'node')} ({percent(part)} of the job); replacements on 99 of 100 days: "
        f"at most {found.spares_p99}"
    )
    for remedy in found.remedies:
        others = [other.action.value for other in remedy.decision.alternatives if other.feasible][:2]
        rather = f" (rather than {', '.join(others)})" if others else ""
        lines.append(f"when      {remedy.fault}: {remedy.decision.action.value}, {remedy.decision.why}{rather}")
    lines += [f"note      {note}" for note in found.notes]
    return "\n".join(lines)


def _tier(tier: TierPlan) -> str:
    alone = f", {span(tier.closed_s)} by the closed form for it alone" if tier.closed_s >= 0 else ""
    return (
        f"{tier.name:9} every {_count(tier.every_steps, 'step')} ({span(tier.every_s)}{alone}): stalls "
        f"{span(tier.stall_s)}, through after {span(tier.whole_s)}; {percent(tier.share)} of failures go back to it"
    )


def _places(found: Recommendation) -> list[str]:
    if not found.copies:
        return []
    kept = ", ".join(f"{lost}: {chance:.5g}" for lost, chance in found.placement if lost > 1)
    text = f"copies    {found.copies} in memory, {size(found.memory_bytes)} a node"
    return [f"{text}; all is left with this many nodes lost at once: {kept}" if kept else text]


def span(seconds: float) -> str:
    """Seconds as people say them."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (2 if unit != "s" else 1) * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def percent(share: float) -> str:
    """With the digits that tell it from 0 and from all."""
    rest = min(share, 1 - share)
    digits = 2 if rest <= 0 else max(2, 1 - math.floor(math.log10(rest * 100)))
    return f"{100 * share:.{min(digits, 9)}f} %"


def size(num_bytes: float) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
