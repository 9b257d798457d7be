"""A flame graph of what a worker's sampler saw, with a table of the functions that took the most time themselves.

A box is a function, as wide as the share of time that it and what it called took; below it is what it called. One
layout for the page of its own that is drawn here (no script, no file), and for the dashboard, which draws it in place.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape

import msgspec

from everstep.core.sampled import Function, Sampled
from everstep.observe.html import Column, table
from everstep.observe.html import document as frame

NARROWEST = 0.001  # boxes of a smaller share are left out
TOP = 20  # functions of the table
WIDTH, ROW = 1200.0, 20
CHARACTER = 7.0  # wide
KINDS = {"script": "your script", "torch": "torch", "everstep": "Everstep", "library": "Python and libraries"}
# Kind -> its ground on light and on dark; text on it is the page's own.
COLOURS = {
    "script": ("#ffd9a8", "#7a4a12"),
    "torch": ("#f7c3c3", "#77302f"),
    "everstep": ("#c7dcf7", "#234d80"),
    "library": ("#dfe3e8", "#3a434d"),
}


class Box(msgspec.Struct, frozen=True):
    """A function in one place of the calls. `left` and `share`: of the whole time."""

    name: str
    where: str
    kind: str
    depth: int
    left: float
    share: float


class Own(msgspec.Struct, frozen=True):
    """A function: shares of the whole time in itself, and in it with what it called; its line with most of its own."""

    name: str
    where: str
    kind: str
    own: float
    total: float


class Picture(msgspec.Struct, frozen=True):
    """What a profile is drawn from. `notes`: how far it is to be believed."""

    boxes: tuple[Box, ...]
    top: tuple[Own, ...]
    notes: tuple[str, ...]


class _Node:
    def __init__(self) -> None:
        self.ns = 0
        self.below: dict[tuple[str, int], _Node] = defaultdict(_Node)  # a thread's name, or a function's place


def picture(sampled: Sampled) -> Picture:
    return Picture(tuple(boxes(sampled)), tuple(top(sampled)), tuple(notes(sampled)))


def boxes(sampled: Sampled) -> list[Box]:
    """In the order in which they are drawn: each before what is below it, widest first."""
    root, threads = _Node(), {stack.thread for stack in sampled.stacks}
    for stack in sampled.stacks:
        node = root
        node.ns += stack.ns
        way = [(stack.thread, -1)] if len(threads) > 1 else []
        for step in [*way, *(("", place) for place in stack.functions)]:
            node = node.below[step]
            node.ns += stack.ns
    found: list[Box] = []
    _place(sampled, root, 0, 0.0, root.ns or 1, found)
    return found


def _place(sampled: Sampled, node: _Node, depth: int, left: float, total: int, found: list[Box]) -> None:
    for (thread, place), each in sorted(node.below.items(), key=lambda item: -item[1].ns):
        share = each.ns / total
        if share < NARROWEST:
            continue
        function = sampled.functions[place] if place >= 0 else Function(thread, "a thread", 0, "library")
        found.append(Box(function.name, where(function), function.kind, depth, left, share))
        _place(sampled, each, depth + 1, left, total, found)
        left += share


def top(sampled: Sampled) -> list[Own]:
    """Most time of their own first. A function that calls itself counts once."""
    own: dict[int, int] = defaultdict(int)
    within: dict[int, int] = defaultdict(int)
    lines: dict[tuple[int, int], int] = defaultdict(int)
    whole = sum(stack.ns for stack in sampled.stacks) or 1
    for stack in sampled.stacks:
        for place in set(stack.functions):
            within[place] += stack.ns
        if stack.functions:
            own[stack.functions[-1]] += stack.ns
            lines[stack.functions[-1], stack.line] += stack.ns
    found = []
    for place, ns in sorted(own.items(), key=lambda item: -item[1])[:TOP]:
        function = sampled.functions[place]
        line = max((line for at, line in lines if at == place), key=lambda line: lines[place, line])
        at = f"{function.file}:{line}" if line else where(function)
        found.append(Own(function.name, at, function.kind, ns / whole, within[place] / whole))
    return found


def where(function: Function) -> str:
    return f"{function.file}:{function.line}" if function.line else function.file


def notes(sampled: Sampled) -> list[str]:
    told = [
        f"{sampled.samples} samples in {sampled.seconds:.1f} s; each stands for the time since the one before. "
        f"Sampling took {100 * sampled.cpu_s / (sampled.seconds or 1):.1f}\u00a0% of a core."
    ]
    if sampled.longest_s > 0.25:
        told.append(
            f"For {sampled.longest_s:.1f} s at a time no sample could be taken: some call kept Python's lock, most "
            "likely the one that is shown for that time."
        )
    return told


def summary(sampled: Sampled) -> str:
    """The functions with the most time of their own, in a line."""
    first = [f"{each.own:.0%} {each.name}" for each in top(sampled)[:3]]
    return ", ".join(first) or "no sample"


def document(sampled: Sampled, title: str) -> str:
    """The whole file."""
    shown = picture(sampled)
    body = f"<h1>Where the time of {escape(title)} went</h1>\n"
    body += "".join(f'<p class="note">{escape(note)}</p>\n' for note in shown.notes)
    keys = "".join(f'<span><i class="{kind}"></i>{name}</span> ' for kind, name in KINDS.items())
    body += f'<p class="keys">{keys}</p>\n{svg(shown.boxes, title)}\n'
    rows = [
        (escape(each.name), f"{each.own:.1%}", f"{each.total:.1%}", f"<code>{escape(each.where)}</code>")
        for each in shown.top
    ]
    columns = Column("function"), Column("itself", num=True), Column("and its calls", num=True), Column("mostly at")
    body += table("Functions by the time that they took themselves", columns, rows)
    return frame(title, body, _style())


def svg(shown: tuple[Box, ...], title: str) -> str:
    height = (max((box.depth for box in shown), default=0) + 1) * ROW
    label = escape(f"Flame graph of {title}; the table below it says the same of the largest")
    parts = "".join(map(_box, shown))
    return (
        f'<div class="scroll"><svg class="flame" viewBox="0 0 {WIDTH:.0f} {height}" role="img" aria-label="{label}">'
        f"{parts}</svg></div>"
    )


def _box(box: Box) -> str:
    x, y, wide = box.left * WIDTH, box.depth * ROW, box.share * WIDTH
    fits = int((wide - 6) / CHARACTER)
    words = box.name if len(box.name) <= fits else f"{box.name[: fits - 1]}…" if fits > 3 else ""
    text = f'<text x="{x + 3:.1f}" y="{y + 14}">{escape(words)}</text>' if words else ""
    tip = f"<title>{escape(box.name)} ({escape(box.where)}): {box.share:.1%}</title>"
    size = f'width="{max(0.4, wide - 0.6):.2f}" height="{ROW - 1}"'
    return f'<g>{tip}<rect class="{box.kind}" x="{x:.2f}" y="{y}" {size}/>{text}</g>'


def _style() -> str:
    rules = [
        ".flame{width:100%;min-width:60rem;height:auto}.flame text{font:12px ui-monospace,monospace;fill:var(--ink);"
        "pointer-events:none}.flame g:hover rect{stroke:var(--ink)}",
        ".keys span{margin-right:1rem;white-space:nowrap}.keys i{display:inline-block;width:.9rem;height:.9rem;"
        "margin-right:.3rem;vertical-align:-.1rem}",
    ]
    for place, opening in enumerate(("", "@media(prefers-color-scheme:dark){")):
        for kind, pair in COLOURS.items():
            rule = f".flame .{kind}{{fill:{pair[place]}}}.keys .{kind}{{background:{pair[place]}}}"
            rules.append(f"{opening}{rule}{'}' if opening else ''}")
    return "".join(rules)
