"""The scripts of examples/ under torchrun and under `everstep run`, undisturbed and with a SIGKILL: one table.

    python scripts/public_scripts.py [--venv PATH] [--only NAME ...] [--no-write]

Each script runs three times, each time in an empty folder: under torchrun, under `everstep run`, and under
`everstep run` with rank 1 killed in the middle. All three must end with the same digits; the exit status says
whether they did. The table goes between the two markers of docs/scripts.md. The first run makes .venv-peers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import peers

if TYPE_CHECKING:
    from everstep.testing.local import LocalRun

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "scripts.md"
BEGIN, END = "<!-- table: begin (scripts/public_scripts.py writes it) -->", "<!-- table: end -->"
PINNED = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "lightning==2.6.6")
LIMIT_S = 600.0
TRIES = 5  # of torchrun
VICTIM = 1
ENV = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun of torch 2.13 cannot restart in place without it
    "HF_HUB_OFFLINE": "1",
}


@dataclasses.dataclass(frozen=True)
class Script:
    """One script; `middle` in `file` is the moment of the kill, the group of `resumed` what it resumed from."""

    name: str
    args: str
    middle: str
    resumed: str
    ranks: int = 2
    file: str = "output.txt"

    @property
    def launched(self) -> list[str]:
        return ["--nproc-per-node", str(self.ranks), "--max-restarts", "1"]

    def digits(self, folder: Path) -> list[str]:
        """What must be the same in all three runs; the last one is shown. Empty: the script did not end."""
        log = folder / "log.jsonl"
        if log.exists():
            return [f"{json.loads(line)['loss']:.6f}" for line in log.read_text().splitlines()]
        return re.findall(r"final loss ([\d.]+)", (folder / "output.txt").read_text(errors="replace"))


SCRIPTS = (
    Script("train_gpt.py", "--steps 120 --log-file log.jsonl", r'"step": 71,', r"from (step [1-9]\d*)", 4, "log.jsonl"),
    Script("public/ddp_tutorial.py", "20 1", r"Epoch 9 \| Steps", r"from snapshot at (Epoch \d+)"),
    Script("public/nanogpt_style.py", "", r"iter 30:", r"(?s)Resuming training.*?(step \d+): train loss"),
    Script("public/fsdp2.py", "", r"step 35 ", r"resumes at (step \d+)"),
    Script("public/hf_trainer.py", "", r"'epoch': '0.1042'", r"resuming from \S+/(checkpoint-\d+)"),
    Script("public/lightning_script.py", "", r"epoch 5 loss", r"[Rr]estor.*/(last\.ckpt)"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    digits: list[str]
    wall_s: float
    resumed: str = ""
    downtime_s: float = -1.0


class Failed(Exception):
    """A run did not end as it should."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv-peers", help="made, or filled, when Everstep is not in it"
    )
    parser.add_argument("--only", nargs="+", default=[], help="these scripts only, by the stem of their names")
    parser.add_argument("--no-write", action="store_true", help="print the table, leave docs/scripts.md alone")
    options = parser.parse_args()
    if Path(sys.prefix).resolve() != options.venv.resolve():
        python = peers.prepare(options.venv.absolute(), *PINNED, editable=True)
        os.execv(python, [str(python), *sys.argv])
    known = [Path(s.name).stem for s in SCRIPTS]
    if unknown := set(options.only) - set(known):
        parser.error(f"--only {' '.join(sorted(unknown))}: there are {', '.join(known)}")
    chosen = [s for s in SCRIPTS if not options.only or Path(s.name).stem in options.only]
    rows, same = [], True
    for script in chosen:
        row, equal = compare(script)
        rows.append(row)
        same = same and equal
    table = "\n".join([*head(), *rows])
    print(table)
    if not options.no_write and len(chosen) == len(SCRIPTS):
        write(table)
    return 0 if same else 1


def compare(script: Script) -> tuple[str, bool]:
    """One row of the table, and whether the three ends are equal."""
    say(f"{script.name}: torchrun")
    theirs = torchrun(script)
    say(f"{script.name}: everstep run")
    ours = everstep(script, kill=False)
    say(f"{script.name}: everstep run, rank {VICTIM} killed")
    killed = everstep(script, kill=True)
    equal = theirs.digits == ours.digits == killed.digits
    gap = f"; {killed.downtime_s:.2f} s without a step" if killed.downtime_s >= 0 else ""
    cells = [
        f"`{script.name}`",
        f"{theirs.digits[-1]}, {theirs.wall_s:.0f} s",
        f"{ours.digits[-1]}, {ours.wall_s:.0f} s",
        f"{killed.digits[-1]}, {killed.wall_s:.0f} s; resumed: {killed.resumed}{gap}",
        ("yes" if len(ours.digits) == 1 else f"yes, all {len(ours.digits)} losses") if equal else "NO",
    ]
    return f"| {' | '.join(cells)} |", equal


def torchrun(script: Script) -> Outcome:
    """A run in which nobody died. Now and then torch 2.13 aborts a worker behind the script's last line; torchrun then
    starts all again, and the script says its end twice."""
    for _ in range(TRIES):
        outcome, died = torchrun_once(script)
        if not died:
            return outcome
        say(f"{script.name}: torchrun lost a worker by itself; once more")
    raise Failed(f"{script.name}: torchrun lost workers in {TRIES} of {TRIES} runs")


def torchrun_once(script: Script) -> tuple[Outcome, bool]:
    with tempfile.TemporaryDirectory(prefix="everstep-scripts-") as name:
        folder = Path(name)
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone", *script.launched]
        began = time.monotonic()
        with (folder / "output.txt").open("wb") as output:
            command = [*module, str(EXAMPLES / script.name), *script.args.split()]
            code = subprocess.run(
                command, cwd=folder, env=os.environ | ENV, stdout=output, stderr=output, timeout=LIMIT_S, check=False
            ).returncode
        wall_s = time.monotonic() - began
        return Outcome(ended(script, folder, code), wall_s), "failed (exitcode:" in read(folder / "output.txt")


def everstep(script: Script, *, kill: bool) -> Outcome:
    from everstep.testing.local import LocalRun

    with tempfile.TemporaryDirectory(prefix="everstep-scripts-") as name:
        folder = Path(name)
        path, args = EXAMPLES / script.name, tuple(script.args.split())
        began = time.monotonic()
        with LocalRun(folder, path, *script.launched, args=args, **ENV) as run:
            if kill:
                run.until(lambda: re.search(script.middle, read(folder / script.file)), LIMIT_S)
                run.kill(VICTIM)
            code = run.wait(LIMIT_S)
            wall_s = time.monotonic() - began
            digits = ended(script, folder, code)
            return Outcome(digits, wall_s, *(recovery(script, run) if kill else ()))


def recovery(script: Script, run: LocalRun) -> tuple[str, float]:
    """What it resumed from, and the seconds without a step; raises Failed when it was not interrupted at all."""
    from everstep.core import events as e

    closed = run.events(e.IncidentClosed)
    plans = run.events(e.EpochFormed)
    found = re.findall(script.resumed, run.text())
    if len(plans) != 2 or not closed or not found:
        raise Failed(f"{script.name}: {len(plans)} epochs, {len(closed)} incidents, resumed: {found}\n{run.text()}")
    return found[0], closed[0].downtime_s


def ended(script: Script, folder: Path, code: int) -> list[str]:
    digits = script.digits(folder)
    if code or not digits:
        raise Failed(f"{script.name}: exit status {code}\n{read(folder / 'output.txt')[-6000:]}")
    return digits


def head() -> list[str]:
    cells = ["script", "torchrun", "everstep run", f"everstep run, rank {VICTIM} killed in the middle", "same digits"]
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def write(table: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise Failed(f"{PAGE} has no markers {BEGIN!r} and {END!r}")
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
