"""A journal as a job of weeks on 1,000 workers writes it, without the job: for benchmarks/observability.py.

The entries at the begin come from the controller's own machine, the others have the form and the number of those in
journals of real jobs: once a second a step and metrics, once in 62.5 s all workers, once in 250 s the load of all, at
each save two reports of every node (asked for, on disk), at each incident the reports, decisions and formations of a
crash and of the new worker that follows. An agent tells what changes within 20 ms as one (control.urgency): of the 8
members of one real node each phase of a formation was one report or two, and each save 1.5 to 2.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.control import lifecycle
from everstep.control.job import Job, Note
from everstep.control.journal import SEGMENT_BYTES, Journal
from everstep.core import events as e
from everstep.core.dealing import RECENT, Dealing, Stream
from everstep.core.decisions import Action, Alternative, Decision
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.load import DeviceLoad, NodeLoad, mean
from everstep.core.saves import Saves
from everstep.core.types import Activity, Blame, Exit, ExitCause, JobSpec, NodeReport, WorkerReport

NODES, SLOTS = 125, 8
STEP_S = 2.0
SAVE_S = 1800.0
NEWCOMER_S = 10.0  # until a dead worker's place has a new one; the others go on meanwhile
WORKERS_S = NODES * SLOTS / 16
LOADS_S = NODES * SLOTS / 4
INCIDENTS_A_DAY = 5.0  # ten times Llama 3's rate of unexpected interruptions (419 in 54 days on 16,384 accelerators)
STREAM = Stream(10**9, 4096, "1234", True, True)


class LongJob:
    """`entries(days)` gives (time, epoch, event)."""

    def __init__(self, seed: int = 1, loads: bool = True) -> None:
        self.loads, self.chance = loads, random.Random(seed)  # of loads: what else happens is the same without them
        self.rng = random.Random(seed)
        self.now = 100.0
        self.job = Job(JobSpec("gpt-30b", NODES - 5, NODES, script="train.py"))
        self.reports: dict[str, NodeReport] = {}
        self.epoch, self.incidents, self.step = 1, 0, 0
        self.dealt = (Dealing(1, NODES * SLOTS, 0, (STREAM,)),)
        self.hosts = [str(uuid.UUID(int=self.rng.getrandbits(128))) for _ in range(NODES)]

    def entries(self, days: float) -> Iterator[tuple[float, int, e.AnyEvent]]:
        for event in self._begin():
            yield self.now, self.epoch, event
        begun = self.now
        save_s, workers_s, loads_s, incident_s = begun + SAVE_S, begun, begun + LOADS_S / 2, begun + self._gap()
        while self.now < begun + days * 86400:
            self.now += 1.0
            self.step = int((self.now - begun) / STEP_S)
            yield (
                self.now,
                self.epoch,
                e.StepsSeen(1, self.step, self.step, self.now - 0.3, begun + STEP_S, 0, -1, 9**11),
            )
            yield self.now, self.epoch, e.MetricsSeen(self.step, self._metrics())
            if self.now >= workers_s:
                workers_s += WORKERS_S
                yield self.now, self.epoch, self._workers()
            if self.now >= loads_s and self.loads:
                loads_s += LOADS_S
                yield self.now, self.epoch, self._loads()
            if self.now >= save_s:
                save_s += SAVE_S
                yield from ((self.now, self.epoch, event) for event in self._save())
            if self.now >= incident_s:
                incident_s = self.now + self._gap()
                for event in self._incident():
                    self.now += 0.0005
                    yield self.now, self.epoch, event
        yield self.now, self.epoch, e.JobEnded(0, "every member ran to its end")

    def _gap(self) -> float:
        return self.rng.expovariate(INCIDENTS_A_DAY / 86400)

    def _metrics(self) -> dict[str, float]:
        loss = 2 + 8 / (1 + self.step / 1000) + self.rng.gauss(0, 0.01)
        return {"loss": loss, "grad_norm": self.rng.lognormvariate(0, 0.3), "lr": 3e-4}

    def _workers(self) -> e.WorkersSeen:
        own_s = tuple(round(self.rng.gauss(1.8, 0.02), 4) for _ in range(NODES * SLOTS))
        return e.WorkersSeen(self.epoch, own_s, tuple(self.rng.randrange(10**10, 2 * 10**10) for _ in own_s))

    def _loads(self) -> e.LoadSeen:
        rng = self.chance

        def load() -> NodeLoad:
            workers = tuple(round(rng.gauss(140, 10)) for _ in range(SLOTS))
            devices = (DeviceLoad(rng.randrange(92, 99), rng.randrange(82, 88), 60) for _ in workers)
            left, shm = rng.randrange(1_500_000, 1_600_000), rng.randrange(900_000, 1_000_000)
            net, busy = (rng.randrange(400_000), rng.randrange(400_000)), sum(workers) + rng.randrange(100)
            return NodeLoad(busy, 192, left, 2_027_000, shm, 1_013_500, *net, workers, 85_899, tuple(devices))

        return e.LoadSeen({node: mean([load()]) for node in self.reports})

    # Events ---------------------------------------------------------------------------------------------

    def _feed(self, event: e.Input) -> Iterator[e.AnyEvent]:
        self.job, commands = lifecycle.step(self.job, event, self.now)
        yield event
        yield from (command.record for command in commands if isinstance(command, Note))

    def _begin(self) -> Iterator[e.AnyEvent]:
        yield from self._feed(e.JobSubmitted(self.job.spec))
        yield from self._feed(e.ControllerStarted(1))
        for k in range(NODES):
            address = f"10.0.{k // 250}.{k % 250}"
            node = NodeReport(f"gpu-{k:04d}", f"{self.rng.getrandbits(64):x}", 1, self.now, SLOTS, address, 30000 + k)
            self.reports[node.node] = msgspec.structs.replace(node, versions={"torch": "2.13.0", "python": "3.11.7"})
            yield from self._feed(e.NodeReported(self.reports[node.node]))
        self.now += 6.0
        yield from self._feed(e.Ticked())
        for node in self.reports:
            workers = tuple(WorkerReport(k, 4000 + k) for k in range(SLOTS))
            yield from self._feed(self._report(node, activity=Activity.RUNNING, epoch=1, workers=workers))
        member = {"stage": Stage.MEMBER, "committed": 1, "resumed": True, "dealt": self.dealt}
        for changes in ({"stage": Stage.READY, "goal": 10**6}, {"prepared": 1}, {"epoch": 1}, member):
            for event in self._sessions(**changes):
                yield from self._feed(event)

    def _report(self, node: str, **changes: object) -> e.NodeReported:
        last = self.reports[node]
        self.reports[node] = msgspec.structs.replace(last, seq=last.seq + 1, sent_s=self.now, **changes)
        return e.NodeReported(self.reports[node])

    def _sessions(self, **changes: object) -> Iterator[e.NodeReported]:
        """A report for each node, whose workers' sessions change within a moment."""
        for node in self.reports:
            yield self._report(node, workers=tuple(self._told(node, local, **changes) for local in range(SLOTS)))

    def _session(self, node: str, local: int, **changes: object) -> e.NodeReported:
        """A report for one worker's session."""
        workers = list(self.reports[node].workers)
        workers[local] = self._told(node, local, **changes)
        return self._report(node, workers=tuple(workers))

    def _told(self, node: str, local: int, **changes: object) -> WorkerReport:
        worker, report = self.reports[node].workers[local], self.reports[node]
        host, address = self.hosts[int(node[-4:])], report.address
        known = worker.session or SessionReport(
            f"{node}/{local}#0", Stage.WARMING, -1, 0, 0, f"{address}:4{local}123", host, vault=f"{address}:41000"
        )
        return msgspec.structs.replace(worker, session=msgspec.structs.replace(known, **changes))

    def _save(self) -> Iterator[e.AnyEvent]:
        yield e.SaveRequested(self.step)
        before = next(iter(self.reports.values())).workers[0].session
        assert before is not None
        yield from self._sessions(committed=self.step, saves=Saves(requested=self.step, durable=before.saves.durable))
        yield from self._sessions(saves=Saves(requested=self.step, durable=self.step))
        yield e.SaveDurable(self.step)

    def _incident(self) -> Iterator[e.AnyEvent]:
        """A worker dies, the others go on, and a new one comes."""
        self.incidents += 1
        name, rank = f"I{self.incidents:03d}", self.rng.randrange(NODES * SLOTS)
        node, local = list(self.reports)[rank // SLOTS], rank % SLOTS
        exit = Exit(ExitCause.SIGNAL, self.now, signal=9, message="CUDA error: uncorrectable ECC", step=self.step)
        why = f"rank {rank} on {node} was killed by signal 9 (sent from outside) at step {self.step}"
        workers = list(self.reports[node].workers)
        workers[local] = msgspec.structs.replace(workers[local], exit=exit)
        yield self._report(node, workers=tuple(workers))
        yield e.WorkerEnded(rank, node, exit, self.now)
        yield e.IncidentOpened(name, "crash", (Blame(rank, node, "signal", why),), why)
        others = tuple(Alternative(action, self.rng.uniform(1, 1e5), "as the costs tell") for action in Action)
        yield e.Decided(name, Decision(Action.SHRINK, 80.0, "0.08 s down, 0.1 % slower for 90 s", "", others))
        yield e.SurvivorsTold(name, 0.004)
        yield from self._formed(rank, without=True)
        yield e.StepResumed(self.epoch, self.step + 1, 0.08)
        yield e.IncidentClosed(name, "recovered", 0.08, {"detect": 0.02, "first-step": 0.06})
        yield e.StageChanged("re-seating", "running")
        yield e.CostLearned("shrink", 0.06)
        yield e.EvidenceSaved(name, (f"incidents/{name}/stacks-{rank}.txt", f"incidents/{name}/log-{rank}.txt"))
        self.now, self.step = self.now + NEWCOMER_S, self.step + int(NEWCOMER_S / STEP_S)
        yield from self._comes(node, local, exit)
        yield from self._formed(rank, without=False)

    def _comes(self, node: str, local: int, exit: Exit) -> Iterator[e.AnyEvent]:
        """The new process of a place, up to where it can be seated."""
        workers = list(self.reports[node].workers)
        life, saves = workers[local].life + 1, Saves(self.step, self.step)
        for pid in (0, 5000 + life):
            workers[local] = WorkerReport(local, pid, life=life, before=exit)
            yield self._report(node, workers=tuple(workers))
        yield self._session(node, local, worker=f"{node}/{local}#{self.incidents}")
        for changes in ({"stage": Stage.READY}, {"goal": 10**6}, {"saves": saves, "stage": Stage.MEMBER}):
            yield self._session(node, local, **changes)

    def _formed(self, rank: int, without: bool) -> Iterator[e.AnyEvent]:
        self.epoch += 1
        sessions = [worker.session for report in self.reports.values() for worker in report.workers]
        seats = tuple(Seat(s.worker, s.worker[:8], s.host, s.endpoint, "", s.vault) for s in sessions if s is not None)
        seats = seats[:rank] + seats[rank + 1 :] if without else seats
        yield e.FormationMade(Formation(self.epoch, seats, without, self.step))
        yield e.StageChanged("running", "re-seating")
        self.dealt = (*self.dealt, Dealing(self.epoch, len(seats), self.step + 1, (STREAM,)))[-RECENT:]
        yield from self._sessions(prepared=self.epoch, committed=self.step)
        yield from self._sessions(epoch=self.epoch, resumed=False)
        yield e.StepsDealt(self.dealt[-1])
        gap_s = self.rng.uniform(0.05, 0.1)
        yield from self._sessions(committed=self.step + 1, resumed=True, gap_s=gap_s, dealt=self.dealt)


def write(path: Path, days: float, segment_bytes: int = SEGMENT_BYTES) -> int:
    """Write it; how many bytes that were."""
    with Journal.open(path, "gpt-30b", segment_bytes) as journal:
        for at_s, epoch, event in LongJob().entries(days):
            journal.append(event, at_s, 1.7e9 + at_s, epoch)
    return sum(file.stat().st_size for file in path.parent.iterdir())
