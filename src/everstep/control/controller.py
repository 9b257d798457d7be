"""The controller's loop: feeds events to the job's machine, journals them, and carries out its commands.

Run: python -m everstep.control.controller --run-dir DIR --listen-fd N

It decides nothing itself. Each accepted event is in the journal before its commands are carried out, so a
controller that dies is replaced by one which replays the journal; nodes reconnect and training never stops.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from everstep.control import drain, lifecycle, roles, saved
from everstep.control.anomalies import AnomalyWatch
from everstep.control.evidence import Evidence
from everstep.control.findings import Findings
from everstep.control.following import followed
from everstep.control.job import ACTIVE, ENDED, Command, Direct, Job, Note, Stage
from everstep.control.journal import Journal, JournalError
from everstep.control.looks import Looks
from everstep.control.output import Console
from everstep.control.patience import Patience
from everstep.control.progress import EpochProgress
from everstep.control.recovery import Recovery
from everstep.control.replay import past_of
from everstep.control.straggling import StragglerWatch
from everstep.control.tender import Tender
from everstep.control.ticks import Ticks
from everstep.control.tls import server_context
from everstep.control.token import read_token
from everstep.control.transport import Link, Server
from everstep.control.unlike import UnlikeWatch
from everstep.control.voice import PATIENCE_S, speak_through
from everstep.control.watch import HangWatch, Outcome
from everstep.core import events as e
from everstep.core import wire
from everstep.core.clock import Clock, SystemClock
from everstep.core.config import RunConfig, job_spec
from everstep.core.errors import ExitCode, UsageError
from everstep.core.types import (
    Action,
    Directive,
    NodeLoss,
    NodeProgress,
    NodeReport,
    StacksAsked,
    StacksTaken,
)
from everstep.detect import fallback
from everstep.plan.costs import Accounts

TICK_S = 0.1
SAID = ("rolled-back", "step-fell-back", "save-failed")  # incidents that nobody has to be told to stop for
RESEND_S = 1.0  # a directive that is not followed is repeated this often


class Controller:
    """One life of a job's controller. `serve()` returns the job's exit code."""

    def __init__(self, run_dir: Path, config: RunConfig, job: str, clock: Clock) -> None:
        self.run_dir = run_dir
        self.clock = clock
        self.spec = job_spec(config, job)
        self.tls = server_context(config)
        self.tender = Tender(run_dir / "journal.jsonl", replay=True)
        self.journal = Journal.open(run_dir / "journal.jsonl", job, on_grown=self.tender.grown)
        self.noted = ""  # of what the journal notes, this was told
        self.job = Job(self.spec)
        self.links: dict[str, Link] = {}
        self.greeted: set[str] = set()  # nodes that were sent their directive over the present link
        self.heard_s: dict[str, float] = {}
        self.resent_s: dict[str, float] = {}
        self.progress = EpochProgress(0, 0)
        self.ticks = Ticks()
        self.recovery = Recovery()
        self.accounts = Accounts()
        self.counted = fallback.Counted()
        self.evidence = Evidence(run_dir)
        self.findings = Findings()
        self.looks = Looks(run_dir, self._send, lambda record: self.record(record, self.clock.now()))
        self.watch = HangWatch(config)
        self.stragglers = StragglerWatch(config.straggler)
        self.anomalies = AnomalyWatch()
        self.unlike = UnlikeWatch()
        self.acting: frozenset[int] = frozenset()  # ranks whose progress counts
        self.patience = Patience()
        self.events: deque[e.Input] = deque()
        self.told: tuple[str, float] | None = None  # incident, and the first sign of it
        self.stop_step = 0  # at which a planned end of this epoch stops every worker; 0: none
        self.ended = asyncio.Event()
        self.broken: BaseException | None = None
        self.deserted = asyncio.Event()  # no agent is linked
        self._begin()

    # The machine ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Replay an earlier life's journal, or begin the first."""
        past = past_of(self.journal.path, self.spec, self.journal.last)
        self.job, self.recovery, self.accounts, self.counted = past.job, past.recovery, past.accounts, past.counted
        self._new_epoch()
        adopted = (*self.stragglers.adopt(past.watched), *self.anomalies.adopt(past.watched, self.job))
        for record in (*past.owed, *adopted):
            self.record(record, self.clock.now())
        if not past.term:
            self.feed(e.JobSubmitted(self.spec))
        self.feed(e.ControllerStarted(past.term + 1))

    def feed(self, event: e.Input) -> None:
        """One event through the machine. Events that its commands cause wait until all commands are carried out."""
        self.events.append(event)
        if len(self.events) > 1:
            return
        while self.events:
            self._step(self.events[0])
            self.events.popleft()

    def _step(self, event: e.Input) -> None:
        """Journal the event if it mattered, then act."""
        now = self.clock.now()
        job, commands = lifecycle.step(self.job, event, now)
        if job == self.job and not commands:
            return
        self.journal.append(event, now, self.clock.wall(), job.epoch)
        before, self.job = self.job, job
        waits = bool(job.vacant or before.vacant) and roles.acting(job) != self.acting
        if job.epoch != before.epoch or job.formation != before.formation or waits:
            self._flush_steps(now)
            self._new_epoch()
        for command in commands:
            self._carry_out(command, now)
        if job.stage in ENDED:
            self.ended.set()

    def _carry_out(self, command: Command, now: float) -> None:
        match command:
            case Direct(node, directive):
                self._send(node, self._aligned(directive))
            case Note(record):
                self.record(record, now)

    def record(self, record: e.Record, now: float) -> None:
        if isinstance(record, e.IncidentOpened | e.JobEnded):
            self._flush_steps(now)  # the last step before the fault is known to the millisecond
        self.journal.append(record, now, self.clock.wall(), self.job.epoch)
        for closed in self.recovery.saw(record, now):
            self.record(closed, now)
        for found in self.findings.saw(record, now):
            self.record(found, now)
        for what, seconds in self.accounts.saw(record, now):
            self.feed(e.CostLearned(what, seconds))
        if isinstance(record, e.IncidentOpened):
            self._opened(record, now)
        elif isinstance(record, e.StepsSeen):
            self._compare(record, now)
        elif isinstance(record, e.WorkerEnded):
            self.counted = fallback.saw_end(self.counted, record.exit)
        elif isinstance(record, e.JobEnded):
            self._record_all((*self.stragglers.end(), *self.anomalies.end()), now)
        elif isinstance(record, e.NodeLost) and record.node in self.links:
            self.links[record.node].close("this node was lost to the job")

    def _record_all(self, records: Iterable[e.Record], now: float) -> None:
        for record in records:
            self.record(record, now)

    def _opened(self, incident: e.IncidentOpened, now: float) -> None:
        """Time how fast the survivors are told, and ask the culprits' nodes for evidence."""
        if incident.kind in e.WATCHED:
            return
        first = min((w.seen_s for w in self.job.ended.values() if w.exit.failed), default=now)
        if incident.kind not in SAID and self.job.formation is None:  # of a session nobody stops
            self.told = (incident.incident, first)
        files = self.evidence.claim(incident.incident)
        if files:
            self.record(e.EvidenceSaved(incident.incident, files), now)
        plan = self.job.plan
        for culprit in incident.culprits:
            member = plan.member(culprit.node) if plan else None
            if plan and member and culprit.rank >= 0:
                local = (culprit.rank - member.first_rank,)
                self._send(culprit.node, StacksAsked(incident.incident, plan.epoch, local))

    def _aligned(self, directive: Directive) -> Directive:
        """A planned end of the epoch (a node leaves, one joins) reaches every worker at the same step."""
        planned = self.job.stage is Stage.EVICTING and directive.action is Action.STOP and not directive.cut
        if not planned or directive.epoch != self.job.epoch:
            return directive
        self.stop_step = self.stop_step or self.progress.common_stop_step(self.clock.now())
        return msgspec.structs.replace(directive, stop_at_step=self.stop_step)

    def _new_epoch(self) -> None:
        self.stop_step = 0
        self.acting = roles.acting(self.job)
        plan = self.job.plan
        if plan is not None:  # as the detector sees it: only who has a role can hold the others up
            plan = msgspec.structs.replace(plan, world_size=len(self.acting))
        self.progress = EpochProgress(self.job.epoch, len(self.acting))
        self.watch.new_epoch(plan)
        self._record_all(self.stragglers.new_epoch(plan, self.acting), self.clock.now())
        self.evidence.forget()

    def _flush_steps(self, now: float) -> None:
        self._record_all((*self.progress.last(), *self.ticks.flush(self.job, now)), now)

    # Links ----------------------------------------------------------------------------------------------

    def _send(self, node: str, message: Directive | StacksAsked) -> None:
        link = self.links.get(node)
        if link is not None:
            link.send(message)

    async def on_link(self, link: Link, hello: wire.Hello) -> None:
        """One connection for its whole life. Agents own a name; CLI and launcher come and go."""
        agent = hello.role == "agent"
        if agent:
            self.greeted.discard(hello.node)
            former = self.links.get(hello.node)
            self.links[hello.node] = link
            self.deserted.clear()
            self.heard_s[hello.node] = self.clock.now()
            if former is not None:
                former.close()
        async for message in link:
            self._receive(link, hello, message)
        if agent and self.links.get(hello.node) is link:
            self._unlink(hello.node)
            self.feed(e.NodeGone(hello.node, hello.incarnation, NodeLoss.CLOSED))

    def _unlink(self, node: str) -> None:
        del self.links[node]
        if not self.links:
            self.deserted.set()

    def _receive(self, link: Link, hello: wire.Hello, message: wire.Message) -> None:
        now = self.clock.now()
        if hello.role == "agent":
            if self.links.get(hello.node) is link:
                self.heard_s[hello.node] = now
                self._from_agent(message, now)
            return
        match message:
            case wire.StopRequest(why, signum, grace_s):
                self.ask_stop(why, signum, grace_s)
            case wire.NodeDied(node, incarnation):
                self.feed(e.NodeGone(node, incarnation, NodeLoss.DIED))
            case wire.DrainRequest():
                link.send(wire.Reply(self._drain(message)))
            case wire.SaveRequest():
                link.send(wire.Reply(self._save()))
            case wire.Query():
                link.send(wire.Reply(self.status()))
            case _ if not self.looks.ask(link, message, self.job):
                link.close()

    def _from_agent(self, message: wire.Message, now: float) -> None:
        match message:
            case NodeReport():
                self._reported(message, now)
            case NodeProgress():
                self._progressed(message, now)
            case StacksTaken() if not self.looks.saw(message):
                self._stacks(message, now)

    def _reported(self, report: NodeReport, now: float) -> None:
        if self.patience.holds(self.job, report, now):
            assert self.job.plan is not None
            for node, asked in self.patience.questions(self.job.plan, self.progress.workers):
                self._send(node, asked)
            self._settle(now)
        else:
            self._accept(report, now)

    def _settle(self, now: float) -> None:
        """Whom those waited for that gave up is known, or will not be: go on."""
        verdict, reports = self.patience.settle(self.job, self.progress.workers, now)
        if verdict is not None:
            self.feed(e.HangJudged(self.job.epoch, verdict))
        for report in reports:
            self._accept(report, now)

    def _accept(self, report: NodeReport, now: float) -> None:
        self.feed(e.NodeReported(report))
        self._record_all(self.anomalies.saw(report, self.job), now)
        if report.node not in self.greeted:  # its silence is over only when it hears what it is to do
            self.greeted.add(report.node)
            directive = self.job.directives.get(report.node)
            if directive is not None:
                self._send(report.node, directive)
        if self.told and roles.stopped(self.job):
            incident, first = self.told
            self.told = None
            self.record(e.SurvivorsTold(incident, now - first), now)
        asked = [w for w in report.workers if w.term_asked]
        if asked and self.job.stop is None and report.epoch == self.job.epoch:
            self.ask_stop(f"SIGTERM to a worker on {report.node}", signal.SIGTERM, self.spec.grace_s)

    def ask_stop(self, why: str, signum: int, grace_s: float) -> None:
        step = self.progress.common_stop_step(self.clock.now())
        self.feed(e.StopAsked(why, signum, grace_s, step))

    def _drain(self, asked: wire.DrainRequest) -> dict[str, object]:
        """The answer. The wish is in the journal before it: no later controller forgets it."""
        try:
            target = drain.find(self.job, asked.target)
            (drain.require_undo if asked.undo else drain.require)(self.job, target)
        except UsageError as error:
            return {"refused": str(error)}
        self.feed(e.DrainAsked(target, asked.undo))
        return {"target": target}

    def _save(self) -> dict[str, object]:
        try:
            saved.require(self.job)
        except UsageError as error:
            return {"refused": str(error)}
        self.feed(e.SaveAsked(self.job.save_asked + 1))
        return {"asked": self.job.save_asked}

    def _progressed(self, message: NodeProgress, now: float) -> None:
        self._record_all(self.ticks.loads.saw(message, now), now)
        if message.epoch != self.job.epoch or self.job.plan is None:
            return
        ticks = self.ticks.saw(message, self.job, now)
        workers = tuple(w for w in message.workers if w.rank in self.acting)
        message = msgspec.structs.replace(message, workers=workers)
        self.progress.add(message, now)
        self._record_all((*self.progress.record(now), *ticks), now)
        if self.job.stage in ACTIVE:
            self._judge(self.watch.saw(message, now))
            self._record_all(self.stragglers.saw(message, now, self._send), now)
            self._record_all(self.unlike.saw(message, self.job, now), now)

    def _compare(self, seen: e.StepsSeen, now: float) -> None:
        """A step counter that fell back after a restart is told at once."""
        loads = max(w.loads for w in self.progress.workers.values())
        self.counted, fell = fallback.compare(self.counted, seen, loads)
        if fell is not None and self.job.formation is None:  # sessions know better, and tell it themselves
            self.record(fell.alert(), now)

    def _judge(self, outcome: Outcome) -> None:
        if outcome.suspect:
            self.feed(e.HangSuspected(self.job.epoch, outcome.suspect))
            for node, asked in outcome.questions:
                self._send(node, asked)
        if outcome.cleared:
            self.evidence.forget()
            self.feed(e.HangSuspected(self.job.epoch, ""))
        if outcome.verdict is not None:
            self.feed(e.HangJudged(self.job.epoch, outcome.verdict))

    def _stacks(self, taken: StacksTaken, now: float) -> None:
        if taken.incident:
            files = self.evidence.write(taken.incident, taken)
            if files:
                self.record(e.EvidenceSaved(taken.incident, files), now)
            for found in self.findings.read(taken):
                self.record(found, now)
        elif taken.epoch == self.job.epoch and self.job.stage in ACTIVE:
            self.evidence.keep(taken)
            self._judge(self.watch.saw(taken, now))
            self.patience.saw(taken)
            self._settle(now)

    # Time -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        now = self.clock.now()
        for node, heard in list(self.heard_s.items()):
            link = self.links.get(node)
            if link is not None and now - heard > self.spec.lease_s:
                state = self.job.nodes.get(node)
                link.close()
                self._unlink(node)
                if state is not None:
                    self.feed(e.NodeGone(node, state.report.incarnation, NodeLoss.SILENT))
        if self.job.stage in ACTIVE:
            self._judge(self.watch.tick(now))
        self._settle(now)
        for made in self.stragglers.due(self.job, now):
            self.record(made, now) if isinstance(made, e.Decided) else self.feed(made)
        if self.journal.note != self.noted:
            self.noted = self.journal.note
            self.record(e.Alert("journal", self.noted), now)
        self.feed(e.Ticked())
        for node, directive in self.job.directives.items():
            state = self.job.nodes.get(node)
            late = state is not None and not followed(state.report, directive)
            if late and now - self.resent_s.get(node, 0.0) > RESEND_S:
                self.resent_s[node] = now
                self._send(node, directive)

    def status(self) -> dict[str, object]:
        """What `everstep status` shows of a running job: plain data."""
        now = self.clock.now()
        return {
            "job": self.spec.job,
            "stage": self.job.stage.value,
            "epoch": self.job.epoch,
            "term": self.job.term,
            "restarts": self.job.restarts,
            "now_s": now,
            "nodes": {n: s.report.activity.value for n, s in self.job.nodes.items()},
            "plan": msgspec.to_builtins(self.job.plan),
            "workers": {str(r): msgspec.to_builtins(w) for r, w in self.progress.workers.items()},
            "incident": msgspec.to_builtins(self.job.incident),
            "waits_for": roles.waits_for(self.job) if self.job.stage in ACTIVE else "",
        }

    async def serve(self, listener: socket.socket, token: bytes) -> int:
        """Until the job has ended and its agents have left."""
        term = self.job.term
        server = Server(listener, token, self.spec.job, self.on_link, term=term, tls=self.tls, on_refused=_warn)
        asyncio.get_running_loop().set_exception_handler(self._broke)
        await server.start()
        ticking = asyncio.create_task(self._tick_forever())
        ticking.add_done_callback(self._ticked)
        await self.ended.wait()
        if self.broken is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.spec.grace_s + self.spec.stop_margin_s):
                    await self.deserted.wait()
        ticking.cancel()
        self.tender.stop()
        await server.close()
        if self.broken is not None:
            raise self.broken
        assert self.job.outcome is not None
        return self.job.outcome.exit_code

    def _ticked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._give_up(task.exception())

    def _broke(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error while serving a link is a defect of this controller, or of its journal: end, and be replaced."""
        self._give_up(context.get("exception") or RuntimeError(context["message"]))

    def _give_up(self, error: BaseException | None) -> None:
        self.broken = self.broken or error
        self.ended.set()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()


def main() -> int:
    parser = argparse.ArgumentParser(description="The controller of one job; `everstep run` starts it.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    arguments = parser.parse_args()
    config = msgspec.json.decode((arguments.run_dir / "config.json").read_bytes(), type=RunConfig)
    token = read_token(arguments.token_file)
    for name in config.restart.signals:
        signal.signal(signal.Signals[name], signal.SIG_IGN)  # the launcher turns them into requests

    console = Console()
    speak_through(console)

    async def run() -> int:
        controller = Controller(arguments.run_dir, config, arguments.job, SystemClock())
        return await controller.serve(socket.socket(fileno=arguments.listen_fd), token)

    try:
        return asyncio.run(run())
    except JournalError as error:
        print(f"everstep: {error}", file=sys.stderr)
        return int(ExitCode.NO_JOURNAL)
    except BaseException:  # noqa: BLE001 - told apart from the job's own end, then the launcher starts another
        traceback.print_exc()
        return int(ExitCode.INTERNAL)
    finally:
        console.close(PATIENCE_S)


def _warn(why: str) -> None:
    print(f"everstep: connection refused: {why}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
