"""The frame of a page that needs nothing else: no script, no file, no address. Light or dark as its reader likes it.

Text has a contrast of at least 4.5 in both, curves and bars of at least 3. It is read on 360 px as on a wall.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from everstep.observe.view import Bucket

# Bucket -> its colour on light and on dark ground: the dashboard's, where these have a contrast of 3.
BUCKETS: Mapping[str, tuple[str, str]] = {
    Bucket.PRODUCTIVE.value: ("#2f9480", "#2f9c83"),
    Bucket.DETECTION.value: ("#a07e00", "#f2d05b"),
    Bucket.RECOVERY.value: ("#dd6a33", "#ef7f4d"),
    Bucket.REDONE.value: ("#8f5ce0", "#b68cff"),
    Bucket.STALL.value: ("#3f6fd8", "#6f9bff"),
    Bucket.START.value: ("#6b7787", "#a3b0c0"),
    Bucket.WAITING.value: ("#a8322a", "#d9625a"),
    Bucket.STANDBY.value: ("#8a949f", "#6a7785"),
    Bucket.STRAGGLER.value: ("#c93b70", "#e5598b"),
    Bucket.REDUNDANCY.value: ("#3f97a8", "#57a7b8"),
}

LIGHT = {
    "bg": "#ffffff", "panel": "#f4f6f8", "ink": "#1a1d21", "soft": "#535b66", "line": "#d5dae0", "link": "#0b57a4",
    "good": "#0a7048", "bad": "#b3261e", "warn": "#855000", "curve": "#0067a3", "range": "#0067a333",
    "mark": "#c6520033", "edge": "#c65200", "redo": "#b874002e",
}  # fmt: skip
DARK = {
    "bg": "#14171b", "panel": "#1d2127", "ink": "#e8eaed", "soft": "#aab2bc", "line": "#3a414b", "link": "#8ab8ff",
    "good": "#5fd39b", "bad": "#ff9b92", "warn": "#f0b35a", "curve": "#6cb6f5", "range": "#6cb6f540",
    "mark": "#f0803c40", "edge": "#f0803c", "redo": "#e69f0038",
}  # fmt: skip

STYLE = """
*{box-sizing:border-box}html{font-size:clamp(16px,.3vw + 12.5px,24px);scroll-behavior:smooth}
@media(prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0 auto;padding:1.5rem clamp(.8rem,3vw,3rem) 4rem;max-width:84rem;background:var(--bg);color:var(--ink);
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.6rem;line-height:1.25;margin:.3rem 0 .6rem}h2{font-size:1.25rem;margin:2.4rem 0 .6rem}
h3{font-size:1.05rem;margin:1.4rem 0 .4rem}p{margin:.5rem 0;max-width:70ch}a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.note{color:var(--soft)}small,.small{font-size:.875rem}code,pre{font-family:ui-monospace,monospace;font-size:.875rem}
pre{background:var(--panel);border:1px solid var(--line);border-radius:.4rem;padding:.7rem;overflow-x:auto;
white-space:pre-wrap;margin:.4rem 0}
.badge{display:inline-block;padding:.05rem .6rem;border-radius:1rem;border:1.5px solid currentColor;font-weight:600;
font-size:.875rem;white-space:nowrap}.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.soft{color:var(--soft)}
.story{font-size:1.1rem}.story p{max-width:80ch}
.figures{display:grid;grid-template-columns:repeat(2,1fr);gap:.7rem;margin:1.2rem 0}
@media(min-width:48rem){.figures{grid-template-columns:repeat(4,1fr)}}
.figures div{background:var(--panel);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
.figures dt{color:var(--soft);font-size:.875rem}.figures dd{margin:0;font-size:1.25rem;font-weight:600;line-height:1.3}
.figures small{display:block;font-weight:400;color:var(--soft)}
dl.facts{display:grid;grid-template-columns:minmax(8rem,max-content) 1fr;gap:.3rem 1rem;margin:.4rem 0}
dl.facts dt{color:var(--soft)}dl.facts dd{margin:0}dl.facts dd p{margin:0 0 .15rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;margin:.4rem 0}
caption{text-align:left;color:var(--soft);padding:.2rem 0}.wide,td:last-child,dd,h1,.note{overflow-wrap:anywhere}
th,td{padding:.35rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th,td.num,.tight{white-space:nowrap;overflow-wrap:normal}thead th{white-space:normal;vertical-align:bottom}
th{font-weight:600}thead th{color:var(--soft);font-size:.875rem}.num{text-align:right}.wide{width:100%}
.key{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin-right:.45em}
.bar{display:flex;height:1.7rem;border-radius:.3rem;overflow:hidden;gap:1px;margin:.6rem 0;background:var(--bg)}
.bar i{display:block;min-width:2px}.bar.thin{height:.8rem}
ol.todo,ul.plain{padding-left:1.3rem}ol.todo li{margin:.35rem 0;max-width:85ch}
.incident{border:1px solid var(--line);border-radius:.5rem;padding:.2rem 1rem .8rem;margin:1rem 0}
details>summary{cursor:pointer;padding:.3rem 0;font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1.2rem 2rem}
.scroll{overflow-x:auto}
@media(max-width:45rem){
.cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.cards,.cards caption,.cards tbody,.cards tr,.cards td,.cards th{display:block}
.cards tr{border:1px solid var(--line);border-radius:.4rem;padding:.4rem .7rem;margin:.6rem 0}
.cards td,.cards tbody th{width:auto;border:0;padding:.1rem 0;text-align:left;white-space:normal}
.cards td[data-name]::before{content:attr(data-name) ": ";color:var(--soft)}
dl.facts{grid-template-columns:1fr}dl.facts dd{margin-bottom:.4rem}}
@media print{body{max-width:none}.incident{break-inside:avoid}}
"""


class Column(NamedTuple):
    """Of a table. `name` is its head; `num`: aligned to the right; `wide`: takes what room there is."""

    name: str
    num: bool = False
    wide: bool = False


def colour(bucket: str) -> str:
    """CSS of its colour, whichever ground the page has."""
    return f"var(--{slug(bucket)})"


def slug(name: str) -> str:
    return "b-" + name.replace(" ", "-")


def document(title: str, body: str, style: str = "") -> str:
    """The whole file."""
    light = LIGHT | {slug(name): pair[0] for name, pair in BUCKETS.items()}
    dark = DARK | {slug(name): pair[1] for name, pair in BUCKETS.items()}
    colours = f":root{{color-scheme:light dark;{_variables(light)}}}"
    colours += f"@media(prefers-color-scheme:dark){{:root{{{_variables(dark)}}}}}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{colours}{STYLE}{style}</style></head><body>\n{body}\n</body></html>\n"
    )


def _variables(values: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already. The first cell of a row is its head. On a narrow screen each row is a card."""
    head = "".join(
        f'<th scope="col" role="columnheader"{_num(column)}>{escape(column.name)}</th>' for column in columns
    )
    body = "".join(f'<tr role="row">{_row(columns, row)}</tr>' for row in rows)
    return (
        f'<table class="cards" role="table"><caption>{caption}</caption>'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead><tbody role="rowgroup">{body}</tbody></table>\n'
    )


def _row(columns: Sequence[Column], cells: Sequence[str]) -> str:
    first = f'<th scope="row" role="rowheader"{_num(columns[0])}>{cells[0]}</th>'
    rest = (
        f'<td role="cell"{_num(column)} data-name="{escape(column.name)}">{cell}</td>'
        for column, cell in zip(columns[1:], cells[1:], strict=True)
    )
    return first + "".join(rest)


def _num(column: Column) -> str:
    return ' class="num"' if column.num else ' class="wide"' if column.wide else ""


def bar(parts: Sequence[tuple[str, float, str]], label: str, thin: bool = False) -> str:
    """Parts (name, size, CSS colour) of a whole, side by side; `label` says the same in words."""
    total = sum(size for _, size, _ in parts) or 1.0
    shown = "".join(
        f'<i style="flex:{size / total:.5f} 0 0;background:{shade}" title="{escape(name)}: {size / total:.1%}"></i>'
        for name, size, shade in parts
        if size > 0
    )
    return f'<div class="bar{" thin" if thin else ""}" role="img" aria-label="{escape(label)}">{shown}</div>\n'


def badge(word: str, mood: str) -> str:
    """`mood`: good, bad, warn or soft."""
    return f'<span class="badge {mood}">{escape(word)}</span>'


def facts(rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Questions with their answers, HTML already."""
    items = (f"<dt>{name}</dt><dd>{''.join(f'<p>{line}</p>' for line in lines)}</dd>" for name, lines in rows)
    return f'<dl class="facts">{"".join(items)}</dl>\n'
