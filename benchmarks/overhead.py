"""Step time, CPU time and memory of a session against plain DDP over gloo: same model, four members, alternating runs.

    python benchmarks/overhead.py [--quick | --full] [--json]

Both run under `everstep run`, so the launcher's part is the same. Models of 2 M, 20 M and 100 M parameters (AdamW).
Memory is the sum over members of the proportional set size after the last step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT, Claim, arguments, median, say, show

SCRIPT = ROOT / "benchmarks" / "scripts" / "overhead_steps.py"
MEMBERS = 4
SIZES = {"2 M": (512, 8, 60), "20 M": (1280, 12, 25), "100 M": (2560, 15, 8)}  # width, layers, steps


def run(mode: str, width: int, layers: int, steps: int) -> dict[str, float]:
    """Medians over the members of one run; memory is their sum."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        command = [sys.executable, "-m", "everstep", "run", "--nproc-per-node", str(MEMBERS), str(SCRIPT)]
        command += [mode, str(width), str(layers), str(steps), folder]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank*.json"))]
        if done.returncode or len(found) != MEMBERS:
            raise RuntimeError(f"{mode}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    names = ("step_s", "cpu_s")
    return {n: median([f[n] for f in found]) for n in names} | {"pss_bytes": sum(f["pss_bytes"] for f in found)}


def compare(size: str, pairs: int) -> list[Claim]:
    runs: dict[str, list[dict[str, float]]] = {"ddp": [], "session": []}
    for number in range(pairs):
        for mode in ("ddp", "session") if number % 2 else ("session", "ddp"):
            say(f"{size} parameters, {mode} {number + 1}/{pairs}")
            runs[mode].append(run(mode, *SIZES[size]))
    claims = []
    for name, what, unit, bar in (
        ("step_s", "steady step", "s", 1.00),
        ("cpu_s", "CPU of a step and member", "s", 0.0),
        ("pss_bytes", "memory of all members", "bytes", 1.05),
    ):
        ours, theirs = (median([r[name] for r in runs[mode]]) for mode in ("session", "ddp"))
        holds = ours <= bar * theirs if bar else None
        text = f"<= {bar:.2f} of DDP" if bar else ""
        claims.append(Claim(f"{what}, {size} parameters", ours, unit, "DDP, gloo", theirs, theirs / ours, text, holds))
    return claims


def main() -> None:
    args = arguments(__doc__ or "")
    sizes = list(SIZES) if args.full else ["2 M", "20 M"]
    claims = [claim for size in sizes for claim in compare(size, 5 if args.full else 1)]
    show(claims, args.json)


if __name__ == "__main__":
    main()
