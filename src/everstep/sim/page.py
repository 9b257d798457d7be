"""The report of one or several simulated runs: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from everstep.observe import html, svg
from everstep.observe.view import Bucket
from everstep.sim.result import Result

COLOURS = {bucket.value: html.colour(bucket.value) for bucket in Bucket}

USEFUL = Bucket.PRODUCTIVE.value
MOST_DETAILS = 12  # runs that are described in words: a long sweep has its table
STYLE = f"""{svg.STYLE}
table{{min-width:46rem}}th,td{{text-align:right;white-space:normal;vertical-align:bottom}}th:first-child,td:first-child{{text-align:left;white-space:nowrap}}
"""


def page(
    results: Sequence[Result], title: str, source: str = "", sweep: Mapping[str, Sequence[float]] | None = None
) -> str:
    """`sweep`: a swept key -> its value of each result, in order. `source`: the scenario's text."""
    labels = labelled(results, sweep)
    bars = {label: result.shares for label, result in labels.items()}
    losses = {label: {k: max(0.0, v) for k, v in bar.items() if k != USEFUL} for label, bar in bars.items()}
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{_about(results)}</p>',
        "<h2>Where the accelerators' time went</h2>",
        "<p>Productive, of all accelerator time:</p>",
        svg.stacked({label: {USEFUL: shares[USEFUL]} for label, shares in bars.items()}, COLOURS, "productive time"),
        "<p>And the rest, on its own scale:</p>",
        svg.stacked(losses, COLOURS, "lost time", max(sum(parts.values()) for parts in losses.values()) or 1.0),
        svg.legend(COLOURS),
        _table(labels),
        _sweeps(results, sweep or {}),
        "<h2>Throughput over time</h2>",
        svg.lines(_curves(labels), "throughput", "days", "samples a second", steps=True),
        *(_details(label, result) for label, result in list(labels.items())[:MOST_DETAILS]),
    ]
    if source:
        parts.append(f"<h2>Scenario</h2><pre>{escape(source)}</pre>")
    return html.document(title, f"<main>{''.join(parts)}</main>", STYLE)


def labelled(results: Sequence[Result], sweep: Mapping[str, Sequence[float]] | None = None) -> dict[str, Result]:
    """A short name for each, without repetition."""
    names = [result.scenario for result in results]
    if len(set(names)) < len(names):
        names = [f"{n} {r.strategy}" if r.strategy not in n else n for n, r in zip(names, results, strict=True)]
    for key, values in (sweep or {}).items():
        names = [f"{key.rpartition('.')[2]} {_short(v)}" for v in values]
    seen: dict[str, Result] = {}
    for name, result in zip(names, results, strict=True):
        label = name if name not in seen else f"{name} seed {result.seed}"
        seen[label if label not in seen else f"{label} #{len(seen)}"] = result
    return seen


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _about(results: Sequence[Result]) -> str:
    first = results[0]
    return escape(
        f"Simulated: {first.wall_s / 86400:.4g} days, {first.accelerators} accelerators. Goodput: steps that stayed, "
        "at the speed of a job without any fault, over wall time. The decisions are those of the shipped policy."
    )


def _table(labels: Mapping[str, Result]) -> str:
    head = (
        "",
        "goodput",
        "productive",
        "samples/s",
        "failures",
        "steps redone",
        "median s down",
        "p99 s down",
        "lost accelerator-h",
    )
    rows = []
    for label, r in labels.items():
        down = [
            f"{r.down_s[name]:,.{0 if r.down_s[name] >= 100 else 1}f}" if r.down_s else "-"
            for name in ("median", "p99")
        ]
        cells: tuple[str, ...] = (
            label,
            f"{r.goodput:.2%}",
            f"{r.shares[Bucket.PRODUCTIVE.value]:.2%}",
            f"{r.samples_per_s:.4g}",
        )
        cells += (str(r.failures), str(r.steps_redone), *down, f"{r.lost_accelerator_s / 3600:,.0f}")
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{titles}</tr>{"".join(rows)}</table></div>'


def _sweeps(results: Sequence[Result], sweep: Mapping[str, Sequence[float]]) -> str:
    parts = []
    for key, values in sweep.items():
        if len(set(values)) > 1 and all(isinstance(value, (int, float)) for value in values):
            points = sorted((float(value), 100 * (1 - r.goodput)) for value, r in zip(values, results, strict=True))
            wide = points[0][0] > 0 and points[-1][0] / points[0][0] >= 20
            parts.append(f"<h2>Over {escape(key)}</h2>")
            parts.append(svg.lines({"lost": points}, key, key, "lost, % (100 - goodput)", log_x=wide))
    return "".join(parts)


def _curves(labels: Mapping[str, Result]) -> dict[str, list[tuple[float, float]]]:
    shown = list(labels.items())[:8]
    return {label: [(p.at_s / 86400, p.samples_per_s) for p in result.curve] for label, result in shown}


def _details(label: str, result: Result) -> str:
    def items(counts: Mapping[str, int]) -> str:
        return escape(", ".join(f"{name} {count}" for name, count in list(counts.items())[:12])) or "none"

    return (
        f"<h2>{escape(label)}</h2><p>Answered by: {items(result.actions)}.<br>Causes: {items(result.causes)}.<br>"
        f"Incidents: {items(result.incidents)}. Of 100 days, 99 have at most {result.failures_quantile(0.99)} failures."
        f" Saves: {result.saves}; strategy {escape(result.strategy)}, seed {result.seed}.</p>"
    )
