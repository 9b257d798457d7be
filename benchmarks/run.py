"""All benchmarks: runs each script of this folder and writes docs/benchmarks.md with a bar chart.

python benchmarks/run.py [--quick | --full]        (make bench)
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from harness import ROOT, Claim, arguments, machine, say

SKIPPED = {"run.py", "harness.py", "jobs.py", "checkpoint_more.py", "long_journal.py"}
SKIPPED |= {"detection_jobs.py", "detection_peers.py", "detection_plot.py"}


def main() -> int:
    options = arguments(__doc__ or "")
    size = "--full" if options.full else "--quick"
    results: dict[str, list[Claim]] = {}
    for script in sorted(Path(__file__).parent.glob("*.py")):
        if script.name in SKIPPED:
            continue
        say(f"{script.name} {size}")
        done = subprocess.run([sys.executable, str(script), size, "--json"], stdout=subprocess.PIPE, check=False)
        if done.returncode:
            say(f"{script.name} failed with exit code {done.returncode}")
            return 1
        results[script.stem] = [Claim(**row) for row in json.loads(done.stdout)]
    chart = ROOT / "docs" / "images" / "benchmarks.png"
    plot([c for claims in results.values() for c in claims if c.value and c.peer_value], chart)
    (ROOT / "docs" / "benchmarks.md").write_text(page(results, size), encoding="utf-8")
    say(f"written: docs/benchmarks.md, {chart.relative_to(ROOT)}")
    return 0


def versions() -> str:
    import importlib.metadata

    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("everstep", "torch"))


def page(results: dict[str, list[Claim]], size: str) -> str:
    day = time.strftime("%Y-%m-%d")
    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench` ({size}) on {day}: {machine()}; {versions()}. Medians; ours and the peer alternate",
        "in one run. A ratio above 1 means that Everstep needs less.",
        "",
        "![Everstep and its peers](images/benchmarks.png)",
    ]
    for name, claims in results.items():
        lines += [
            "",
            f"## {name}.py",
            "",
            "| claim | Everstep | peer | ratio | bar | holds |",
            "|---|---|---|---|---|---|",
        ]
        lines += [row(claim) for claim in claims]
    return "\n".join(lines) + "\n"


def row(c: Claim) -> str:
    value = "never" if c.value is None else f"{c.value:.3g} {c.unit}"
    peer = (
        f"{c.peer} {c.peer_value:.3g} {c.unit}" if c.peer_value is not None else (f"{c.peer}: never" if c.peer else "")
    )
    ratio = f"{c.ratio:.1f}" if c.ratio else ""
    holds = "" if not c.bar else "not measured" if c.holds is None else "yes" if c.holds else "**no**"
    return f"| {c.claim} | {value} | {peer} | {ratio} | {c.bar} | {holds} |"


def plot(claims: list[Claim], path: Path) -> None:
    """Of each claim that has a bar to hold: ours, and every peer's, on a logarithmic axis of seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.unit == "s" and claim.bar:
            groups.setdefault(claim.claim, []).append(claim)
    bars: list[tuple[float | None, str, str, str]] = []  # seconds, colour, text, claim
    for name, rows in groups.items():
        bars.append((rows[0].value, "#0072b2", "Everstep", name))
        bars += [(row.peer_value, "#d55e00", row.peer.rstrip(", "), "") for row in rows]
        bars.append((None, "", "", ""))
    figure, axes = pyplot.subplots(figsize=(9, 0.22 * len(bars) + 1))
    for place, (value, colour, who, _) in enumerate(reversed(bars)):
        if value is not None:
            axes.barh(place, value, 0.9, color=colour)
            axes.text(value * 1.07, place, f"{value:.3g} s, {who}", va="center", fontsize=9)
    named = [(place, name) for place, (*_, name) in enumerate(reversed(bars)) if name]
    axes.set_yticks(*zip(*named, strict=True), fontsize=9)
    axes.set_xscale("log")
    axes.set_xlabel("seconds, less is better")
    axes.margins(x=0.25, y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
