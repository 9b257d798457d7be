"""What `everstep top` shows: a View as one screen of text, the most important first, for `rich` to draw.

Every colour also has a word or a letter, so that it reads on a screen without colours too.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from everstep.core.load import NodeLoad
from everstep.observe.explain import cost_s, state, still
from everstep.observe.progress import acting, loss_of, pace
from everstep.observe.text import duration, who
from everstep.observe.units import accelerator_time, percent, plural, short_time
from everstep.observe.view import Bucket, NodeState, NodeView, Series, View, WorkerState

BARS = "▁▂▃▄▅▆▇█"
SHOWN_INCIDENTS, SHOWN_NODES, SHOWN_ALERTS = 6, 12, 3
MOST_MARKS = 96  # workers that have a letter of their own
# Of each bucket: its letter in the bar, and its colour.
INKS = {
    Bucket.PRODUCTIVE: ("█", "green"), Bucket.DETECTION: ("▓", "magenta"), Bucket.RECOVERY: ("▒", "red"),
    Bucket.REDONE: ("░", "yellow"), Bucket.STALL: ("▚", "cyan"), Bucket.START: ("▄", "blue"),
    Bucket.WAITING: ("─", "bright_magenta"), Bucket.STANDBY: ("·", "bright_black"),
    Bucket.STRAGGLER: ("▞", "bright_yellow"), Bucket.REDUNDANCY: ("▀", "white"),
}  # fmt: skip
KEY = "● trains  ◐ late  S slow  w warms up  o stands by  ! stopped  x gone"
MARKS = {
    WorkerState.ACTS: ("●", "green"), WorkerState.WARMS: ("w", "cyan"), WorkerState.WAITS: ("o", "bright_black"),
    WorkerState.SLOW: ("S", "bright_yellow"), WorkerState.STOPPED: ("!", "bold red"), WorkerState.GONE: ("x", "red"),
}  # fmt: skip
LATELY_S = 600.0
SCARCE = 0.95  # of a node's memory
LATE = 1.1  # times the median: its mark turns yellow


def screen(view: View, columns: int, note: str = "") -> Group:
    """`note`: what the command itself has to say, in the last line."""
    inner = max(40, columns)
    parts: list[RenderableType] = [_title(view), _progress(view, inner), _facts(view, inner)]
    parts += [Text(""), _buckets(view, inner), Text(""), _nodes(view), Text(""), _incidents(view)]
    parts += [Text(f"{a.kind}: {a.text}", style="yellow") for a in view.alerts[-SHOWN_ALERTS:]]
    parts += [Text(""), Text(note, style="bright_black")] if note else []
    return Group(*parts)


def _title(view: View) -> Text:
    text = Text(view.job or "no job yet", style="bold")
    stage = view.stage or "starting"
    if view.exit_code is not None:
        stage = "finished" if view.exit_code == 0 else f"ended with exit code {view.exit_code}: {view.why}"
    style = "green" if stage in ("running", "finished") else "yellow" if view.exit_code is None else "red"
    text.append(f"  {stage}", style=style)
    text.append(f"  {duration(view.now_s)}, epoch {view.newest_epoch}", style="bright_black")
    return text


def _progress(view: View, columns: int) -> Text:
    if not view.goal or view.step < 0:
        return Text(f"step {view.step:,}" if view.step >= 0 else "no step yet")
    done = min(1.0, view.step / view.goal)
    wide = max(10, columns - 36)
    filled = round(done * wide)
    text = Text("━" * filled, style="green")
    text.append("─" * (wide - filled), style="bright_black")
    left_s = (view.goal - view.step) * view.step_s
    ahead = f", {duration(left_s)} left" if left_s > 0 and view.exit_code is None else ""
    text.append(f" {view.step:,} of {view.goal:,} ({done:.0%}){ahead}", style="default")
    return text


def _facts(view: View, columns: int) -> Table:
    """Number, and its curve so far."""
    grid = Table.grid(padding=(0, 2))
    here, wanted = acting(view)
    loss = loss_of(view)
    wide = max(10, min(48, columns - 44))
    rows = [
        (loss[0] if loss else "", f"{loss[1]:.5g}" if loss else "", f"metric:{loss[0]}" if loss else ""),
        ("throughput", pace(view.step_s), "steps_per_s"),
        ("members", f"{here} of {wanted}" if wanted > here else str(here), "members"),
        ("ETTR", f"{view.ettr:.1%}" if view.steps else "", "ettr"),
        ("saved", f"step {view.saved_step:,}" if view.saved_step >= 0 else "", ""),
        ("still", f"{duration(view.downtime_s)} in {plural(view.num_incidents, 'incident')}", ""),
    ]
    for name, value, key in rows:
        if value:
            spark = sparkline(view.series[key], wide) if key in view.series else ""
            grid.add_row(Text(name, style="bright_black"), Text(value, style="bold"), Text(spark, style="cyan"))
    return grid


def sparkline(series: Series, columns: int) -> str:
    """The newest bins as small bars between their lowest and highest value; a space where nothing is known."""
    size = max(1, math.ceil(len(series.mean) / columns))
    groups = [series.mean[first : first + size] for first in range(0, len(series.mean), size)]
    values = [[v for v in group if v is not None and math.isfinite(v)] for group in groups]
    means = [sum(known) / len(known) if known else None for known in values]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(BARS) - 1
    return "".join(" " if m is None else BARS[round((m - low) / span * top) if span else 3] for m in means)


def _buckets(view: View, columns: int) -> RenderableType:
    total = sum(view.buckets.values())
    if not total:
        return Text("no accelerator has worked yet", style="bright_black")
    bar, legend, left = Text(), Text(), columns
    for bucket in Bucket:
        share = view.buckets.get(bucket.value, 0.0) / total
        wide = min(left, max(1, round(share * columns))) if share > 0 else 0
        letter, colour = INKS[bucket]
        bar.append(letter * wide, style=colour)
        left -= wide
        if share > 0:
            legend.append(f"{letter}\u00a0", style=colour)
            legend.append(f"{bucket.value} {percent(share)}".replace(" ", "\u00a0") + "   ")
    return Group(bar, legend, Text(f"{accelerator_time(total)} in all", style="bright_black"))


def _nodes(view: View) -> RenderableType:
    if not view.nodes:
        fleet = view.fleet
        words = f"{fleet.acting:,} accelerators train ({fleet.slow:,} slow)"
        words += f", {fleet.spare:,} spare, {fleet.missing:,} missing"
        return Text(words if fleet.total else "no node yet")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    told = [load for load in view.loads.values() if load.cpus]
    loads = (*("cpu", "memory")[: 2 * bool(told)], *("devices",)[: any(load.devices for load in told)])
    for name in ("node", "state", "since", *loads, "workers", "incidents"):
        table.add_column(name, no_wrap=name != "workers")
    shown = sorted(sorted(range(len(view.nodes)), key=lambda n: _rank(view, n))[:SHOWN_NODES])
    median = statistics.median(known) if (known := [s for s in view.workers.own_s if s > 0]) else 0.0
    per_node = max(4, MOST_MARKS // max(1, len(shown)))
    for number in shown:
        node = view.nodes[number]
        since = duration(max(0.0, view.now_s - node.since_s))
        busy = _load(view.loads.get(node.name, NodeLoad()))[: len(loads)]
        marks = _marks(view, number, median, per_node)
        table.add_row(node.name, _node_state(node), since, *busy, marks, str(node.incidents))
    key = Text(KEY, style="bright_black")
    if len(view.nodes) > len(shown):
        states = Counter(node.state.value for node in view.nodes)
        counted = ", ".join(f"{count} {name}" for name, count in states.most_common())
        return Group(table, Text(f"{len(view.nodes)} nodes: {counted}", style="bright_black"), key)
    return Group(table, key)


def _load(load: NodeLoad) -> list[Text]:
    """Shares of processors, memory and devices that are in use, each with a small bar."""
    texts = []
    for share, most in ((load.cpu_share, 2.0), (load.memory_share, SCARCE), (load.device_share, 2.0)):
        bar = BARS[min(len(BARS) - 1, int(share * len(BARS)))]
        texts.append(Text(f"{bar} {share:.0%}" if share >= 0 else "-", style="bold red" if share > most else ""))
    return texts


def _rank(view: View, number: int) -> tuple[int, float, int]:
    """Of a node, where there is no room for all: what changed lately first, then who works, then the others."""
    node = view.nodes[number]
    since_s = view.now_s - node.since_s
    if node.state in (NodeState.LOST, NodeState.LEAVING) and since_s < LATELY_S:
        return 0, since_s, number
    return (1 if node.state is NodeState.UP else 2), -node.incidents, number


def _node_state(node: NodeView) -> Text:
    style = {NodeState.UP: "green", NodeState.LOST: "red", NodeState.LEAVING: "yellow"}.get(node.state, "bright_black")
    return Text(f"{node.state.value}{f' ({node.how})' if node.how else ''}", style=style)


def _marks(view: View, node: int, median: float, most: int) -> Text:
    """A letter a worker, by its state; a late one is yellow."""
    workers, text, count = view.workers, Text(), 0
    for rank, place in enumerate(workers.nodes):
        if place != node:
            continue
        count += 1
        if count <= most:
            own_s = workers.own_s[rank] if rank < len(workers.own_s) else -1.0
            letter, style = MARKS[WorkerState(workers.states[rank])]
            late = median > 0 and own_s > LATE * median and workers.states[rank] == WorkerState.ACTS
            text.append("◐" if late else letter, style="yellow" if late else style)
    if count > most:
        text.append(f" of {count}", style="bright_black")
    return text


def _incidents(view: View) -> RenderableType:
    if not view.incidents:
        return Text("no incident", style="bright_black")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in ("incident", "ago", "what", "who", "stood still", "cost", "ended"):
        table.add_column(name, no_wrap=name in ("incident", "ago", "stood still"), overflow="fold")
    for incident in reversed(view.incidents[-SHOWN_INCIDENTS:]):
        ago = duration(max(0.0, view.now_s - incident.opened_s))
        style = "yellow" if not incident.outcome else "red" if incident.outcome.startswith("job ended") else "green"
        spent = short_time(cost_s(incident)) if incident.cost else "-"
        names = who(incident.culprits) if incident.culprits else "-"
        row: Sequence[RenderableType] = (incident.id, ago, incident.kind, names, still(incident), spent)
        table.add_row(*row, Text(state(incident), style=style))
    if view.num_incidents > SHOWN_INCIDENTS:
        table.add_row(
            Text(f"and {view.num_incidents - SHOWN_INCIDENTS} more: everstep incidents", style="bright_black")
        )
    return table
