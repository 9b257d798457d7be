"""What every benchmark needs: the same command line, claims as rows, medians, and the machine they were taken on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row. `ratio`: value of the peer over ours (above 1: we are better where less is better)."""

    claim: str
    value: float | None
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    bar: str = ""
    holds: bool | None = None


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="under a minute (default)")
    size.add_argument("--full", action="store_true", help="enough runs to quote")
    parser.add_argument("--json", action="store_true", help="print the claims as one JSON list and nothing else")
    return parser.parse_args()


def show(claims: Sequence[Claim], as_json: bool) -> None:
    if as_json:
        print(json.dumps([dataclasses.asdict(c) for c in claims], indent=1))
        return
    for c in claims:
        peer = f"; {c.peer} {c.peer_value:.3g} {c.unit}, ratio {c.ratio:.1f}" if c.peer_value and c.ratio else ""
        bar = f"; bar {c.bar}: {verdict(c)}" if c.bar else ""
        value = "never" if c.value is None else f"{c.value:.3g} {c.unit}"
        print(f"{c.claim}: {value}{peer}{bar}")


def verdict(c: Claim) -> str:
    return "not measured" if c.holds is None else "holds" if c.holds else "MISSED"


def say(text: str) -> None:
    """Progress, on standard error, so that --json stays clean."""
    print(text, file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {system}"
