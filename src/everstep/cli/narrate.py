"""What `everstep run` says on the console while a job runs: one line for each thing a person wants to know.

It follows the journal, so it says the same whoever the controller is at the moment.
"""

from __future__ import annotations

import sys
from pathlib import Path

from everstep.cli.progress import Progress
from everstep.cli.viewing import is_long, summary_of
from everstep.control.journal import Follower
from everstep.core import events as e
from everstep.core.config import RunConfig
from everstep.core.errors import EverstepError
from everstep.core.events import Entry
from everstep.core.types import ExitCause
from everstep.observe.summary import brief
from everstep.observe.text import render
from everstep.observe.units import Price
from everstep.observe.unsaved import unsaved

TROUBLES = 8  # with the journal are said


class Narrator:
    """Lines go to standard error, so that the script's own output stays a clean stream."""

    def __init__(self, run_dir: Path, job: str, config: RunConfig = RunConfig()) -> None:  # noqa: B008 - frozen
        self.run_dir = run_dir
        self.job = job
        self.report = config.report
        self.journal = run_dir / "journal.jsonl"
        self.follower = Follower(self.journal, partial=True)
        self.kinds: dict[str, str] = {}
        self.said_of: dict[str, str] = {}  # incident -> what was said last
        self.troubles: set[str] = set()  # with the journal, that were said
        self.progress = Progress(self.say, config.logs.row)

    def say(self, text: str) -> None:
        print(f"everstep: {text}", file=sys.stderr, flush=True)

    def begin(self, address: str) -> None:
        self.say(f"job {self.job}, controller at {address}, run folder {self.run_dir}")

    def catch_up(self) -> None:
        """Say what the journal's new whole lines tell."""
        entries = self._new()
        self.progress.add(entries)
        for entry in entries:
            text = self._line(entry.event)
            if text:
                self.say(text)
        self.progress.show()

    def _new(self) -> list[Entry]:
        """What is wrong with the journal costs lines here, never the job: its launcher is who reads this."""
        entries: list[Entry] = []
        try:
            entries = self.follower.new()
        except OSError as error:  # it is tried again
            self._trouble(f"{self.journal} cannot be read: {error.strerror or error}")
        for what in self.follower.damage:
            self._trouble(what)
        self.follower.damage.clear()
        return entries

    def _trouble(self, what: str) -> None:
        if what not in self.troubles and len(self.troubles) < TROUBLES:
            self.troubles.add(what)
            self.say(what)

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
        return ""

    def end(self, exit_code: int) -> None:
        """The summary, on the console and in the run folder, and the report there."""
        self.catch_up()
        self.progress.close()
        try:
            self._summarize()
        except EverstepError as error:
            self.say(f"no summary: {error}")
        self._write_report()
        lost = unsaved(self.progress.view) if self.progress.view is not None else ""
        self.say(f"exit code {exit_code}{f'; {lost}' if lost else ''}; journal, logs and incidents in {self.run_dir}")

    def _summarize(self) -> None:
        view = self.progress.view if is_long(self.journal) else None  # then to fold it once more takes minutes
        summary = brief(view) if view is not None else summary_of(self.run_dir, again=True)[0]
        text = render(summary)
        print(text, file=sys.stderr, flush=True)
        try:
            (self.run_dir / "summary.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            self.say(f"no summary.txt: {error.strerror}")

    def _write_report(self) -> None:
        from everstep.cli.report_files import HTML, write

        view, target = self.progress.view, self.run_dir / HTML
        if view is None:
            return
        try:
            write(view, self.run_dir, target, Price(self.report.price, self.report.currency))
            self.say(f"report: {target}")
        except OSError as error:
            self.say(f"no {Path(error.filename).name}: {error.strerror}")
