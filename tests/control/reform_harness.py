"""The job's machine and the machines of its nodes wired together at once, with sessions that do as they are told."""

from __future__ import annotations

import msgspec

from everstep.control import lifecycle, seats
from everstep.control import node as n
from everstep.control.job import Direct, Job, Note
from everstep.core import events as e
from everstep.core.formation import Formation, SessionReport, Stage
from everstep.core.types import Activity, Exit, ExitCause, JobSpec, NodeLoss, NodeReport, Verdict

SPEC = JobSpec("job", min_nodes=2, max_nodes=2, grace_s=5.0, last_call_s=1.0, lease_s=2.0, stop_margin_s=1.0)


class World:
    """Two nodes of two workers. `step` lets every message and every simulated process have its effect."""

    def __init__(self, nodes: int = 2, spec: JobSpec = SPEC, fixed: bool = False) -> None:
        self.now = 1.0
        self.fixed = fixed  # what all sessions say of the number of members
        self.job = Job(spec)
        self.nodes: dict[str, n.Node] = {}
        self.heard: dict[str, Formation] = {}  # worker -> the newest formation it heard of
        self.committed = 0
        self.goal = 0  # steps of the loops of all scripts
        self.records: list[e.Record] = []
        self.inbox: list[tuple[str, n.NodeEvent]] = []
        self.feed(e.JobSubmitted(spec))
        self.feed(e.ControllerStarted(1))
        for k in range(1, nodes + 1):
            self.join(f"n{k}")

    def join(self, name: str, life: int = 1) -> None:
        report = NodeReport(name, f"{name}.{life}", 1, 0.0, 2, f"10.0.0.{name[1:]}", 7000)
        self.nodes[name] = n.Node(report)
        self.feed(e.NodeReported(report))

    def feed(self, event: e.Input) -> None:
        self.job, commands = lifecycle.step(self.job, event, self.now)
        for command in commands:
            if isinstance(command, Note):
                self.records.append(command.record)
            elif isinstance(command, Direct) and command.node in self.nodes:
                self.inbox.append((command.node, n.Directed(command.directive)))

    def tick(self, after_s: float) -> None:
        self.now += after_s
        self.feed(e.Ticked())
        self.settle()

    def settle(self) -> None:
        for _ in range(2000):
            if not self.inbox:
                return
            name, event = self.inbox.pop(0)
            if name not in self.nodes:
                continue
            self.nodes[name], commands = n.step(self.nodes[name], event, self.now)
            for command in commands:
                self.carry_out(name, command)
        raise AssertionError("the machines do not come to rest")

    def carry_out(self, name: str, command: n.Command) -> None:
        node = self.nodes[name]
        epoch = node.report.epoch
        match command:
            case n.Launch(plan):
                for worker in (w for w in node.report.workers if not w.gone):
                    self.inbox.append((name, n.WorkerStarted(plan.epoch, worker.local_rank, 1000)))
            case n.Respawn(local_rank, _):
                self.inbox.append((name, n.WorkerStarted(epoch, local_rank, 2000)))
            case n.Tell(formation):
                for worker in node.report.workers:
                    self.heard[seats.name(name, worker.local_rank, worker.life)] = formation
            case n.SignalWorkers(local_ranks, signum):
                for local_rank in local_ranks:
                    cause = ExitCause.SIGNAL if signum == 9 else ExitCause.STOPPED
                    self.inbox.append((name, n.WorkerGone(epoch, local_rank, Exit(cause, self.now))))
            case n.Examine(number):
                self.inbox.append((name, n.Examined(number)))
            case n.Sweep(swept):
                self.inbox.append((name, n.Swept(swept)))
            case n.Report(report):
                self.feed(e.NodeReported(report))

    # What sessions do -----------------------------------------------------------------------------------

    def say(self, worker: str, stage: Stage, epoch: int = 0, **more: object) -> None:
        name, local_rank, _ = seats.place(worker)
        host = f"host-{name}"
        committed = more.pop("committed", self.committed if stage in (Stage.MEMBER, Stage.LEFT) else -1)
        more = {"fixed": self.fixed, "goal": self.goal, **more}
        here = f"{name}:{local_rank}"
        said = SessionReport(worker, stage, committed, epoch, epoch, here, host, **more)  # type: ignore[arg-type]
        self.inbox.append((name, n.SessionSpoke(self.nodes[name].report.epoch, local_rank, said)))
        self.settle()

    def workers(self) -> list[str]:
        """Names of all that run."""
        return [
            seats.name(name, w.local_rank, w.life)
            for name, node in self.nodes.items()
            if node.report.activity is Activity.RUNNING
            for w in node.report.workers
            if not w.gone
        ]

    def fail(self, worker: str, failure: str, committed: int = 0) -> None:
        """Its function raises; the process waits."""
        assert self.job.formation is not None
        self.say(worker, Stage.READY, self.job.formation.epoch, committed=committed, failure=failure)

    def all_ready(self) -> None:
        for worker in self.workers():
            self.say(worker, Stage.READY)

    def follow(self) -> None:
        """Every seated worker that runs acts in the newest formation and commits a step in it."""
        formation = self.job.formation
        assert formation is not None
        self.committed += 1
        for seat in formation.seats:
            if seat.worker in self.workers():
                self.say(seat.worker, Stage.MEMBER, formation.epoch, resumed=True, gap_s=0.05)

    def die(self, worker: str, cause: ExitCause = ExitCause.SIGNAL, message: str = "killed") -> None:
        name, local_rank, _ = seats.place(worker)
        exit = Exit(cause, self.now, message=message, step=self.committed)
        self.inbox.append((name, n.WorkerGone(self.nodes[name].report.epoch, local_rank, exit)))
        self.settle()

    def lose(self, name: str, how: NodeLoss = NodeLoss.DIED) -> None:
        node = self.nodes.pop(name)
        self.feed(e.NodeGone(name, node.report.incarnation, how))
        self.settle()

    def leave(self, name: str, quietly: bool = False) -> None:
        """The node is asked to leave; `quietly`: the controller's answer is not carried out."""
        self.inbox.append((name, n.LeaveAsked()))
        if quietly:
            _, event = self.inbox.pop()
            self.nodes[name], commands = n.step(self.nodes[name], event, self.now)
            for command in commands:
                self.carry_out(name, command)
            self.inbox.clear()
        self.settle()

    def hang(self, rank: int, node: str) -> None:
        from everstep.core.types import Blame

        verdict = Verdict("hang", (Blame(rank, node, "hang", "sleeps"),), "no step for 2 s")
        self.feed(e.HangJudged(self.job.epoch, verdict))
        self.settle()

    def seated(self) -> list[str]:
        assert self.job.formation is not None
        return [seat.worker for seat in self.job.formation.seats]

    def running(self) -> World:
        """Up to the first formation's first step."""
        self.tick(1.5)
        self.all_ready()
        self.follow()
        return self

    def said(self, kind: type[e.Record]) -> list[e.Record]:
        return [record for record in self.records if isinstance(record, kind)]


def spec(**changes: object) -> JobSpec:
    return msgspec.structs.replace(SPEC, **changes)
