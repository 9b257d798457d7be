"""What `everstep run` says on the console while a job runs: one line for each thing a person wants to know.

It follows the journal, so it says the same whoever the controller is at the moment.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from everstep.control.journal import Follower, read
from everstep.core import events as e
from everstep.core.types import ExitCause
from everstep.observe.summary import summarize
from everstep.observe.text import render

PROGRESS_S = 10.0  # a line of progress at most this often


class Narrator:
    """Lines go to standard error, so that the script's own output stays a clean stream."""

    def __init__(self, run_dir: Path, job: str) -> None:
        self.run_dir = run_dir
        self.job = job
        self.journal = run_dir / "journal.jsonl"
        self.follower = Follower(self.journal)
        self.kinds: dict[str, str] = {}
        self.said_of: dict[str, str] = {}  # incident -> what was said last
        self.said_progress_s = time.monotonic()

    def say(self, text: str) -> None:
        print(f"everstep: {text}", file=sys.stderr, flush=True)

    def begin(self, address: str) -> None:
        self.say(f"job {self.job}, controller at {address}, run folder {self.run_dir}")

    def catch_up(self) -> None:
        """Say what the journal's new whole lines tell."""
        for entry in self.follower.new():
            text = self._line(entry.event)
            if text:
                self.say(text)

    def _line(self, event: e.AnyEvent) -> str:
        match event:
            case e.EpochFormed(plan):
                nodes = ", ".join(m.node for m in plan.members)
                return f"epoch {plan.epoch}: {plan.world_size} workers on {nodes}"
            case e.IncidentOpened(incident, kind, _, why):
                self.kinds[incident], self.said_of[incident] = kind, why
                return f"incident {incident} ({kind}): {why}"
            case e.IncidentUpdated(incident, _, collateral, why):
                others = f"; collateral: ranks {', '.join(str(b.rank) for b in collateral)}" if collateral else ""
                before, self.said_of[incident] = self.said_of.get(incident, ""), why + others
                return f"incident {incident}: {why}{others}" if why + others != before else ""
            case e.CauseFound(incident, verdict):
                return f"incident {incident}: {verdict.why}"
            case e.IncidentClosed(incident, "recovered", downtime_s):
                lost = f"{downtime_s * 1e3:.0f} ms without a step" if downtime_s >= 0 else "no step before it"
                return f"incident {incident}: recovered, {lost}"
            case e.IncidentClosed(incident, outcome) if self.kinds.get(incident) in e.WATCHED:
                return f"incident {incident}: {outcome}"
            case e.WorkerEnded(rank, node, exit) if exit.cause is ExitCause.OK and exit.message:
                return f"rank {rank} on {node}: {exit.message}"
            case e.StateRestored(epoch, step) if step:
                return f"epoch {epoch}: restored what was kept of step {step}"
            case e.DrainAsked(target, undo):
                return f"{target} {'is to be filled again' if undo else 'is asked to leave'}"
            case e.Alert(kind, text):
                return f"{kind}: {text}"
            case e.StepsSeen(_, step, total_step) if time.monotonic() - self.said_progress_s > PROGRESS_S:
                self.said_progress_s = time.monotonic()
                return f"step {total_step if total_step >= 0 else step}"
        return ""

    def end(self, exit_code: int) -> None:
        """The summary, on the console and in the run folder."""
        self.catch_up()
        summary = summarize(read(self.journal))
        text = render(summary)
        print(text, file=sys.stderr, flush=True)
        try:
            (self.run_dir / "summary.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            self.say(f"no summary.txt: {error.strerror}")
        self.say(f"exit code {exit_code}; journal, logs and incidents in {self.run_dir}")
