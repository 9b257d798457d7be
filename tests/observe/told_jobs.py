"""Jobs whose every second is known, told as a journal: for tests of what is made of one."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core import events as e
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.types import Activity, Blame, EpochPlan, JobSpec, Member, NodeReport, WorkerReport
from everstep.observe.view import View
from everstep.observe.viewer import Viewer
from everstep.testing.accounts import add_up


def folded(entries: Iterable[e.Entry]) -> Viewer:
    viewer = Viewer()
    for entry in entries:
        viewer.add(entry)
    return viewer


class Told:
    """A journal under way. Nodes have as many workers as `slots` says; ranks follow the order of the nodes."""

    def __init__(self, least: int = 2, most: int = 2, slots: int = 2) -> None:
        self.entries: list[e.Entry] = []
        self.slots = slots
        self.at(0, e.JobSubmitted(JobSpec("j", min_nodes=least, max_nodes=most)), e.ControllerStarted(1))

    def at(self, t: float, *events: e.AnyEvent) -> None:
        for event in events:
            self.entries.append(e.Entry(len(self.entries) + 1, t, t, "j", 1, event))

    def joined(self, t: float, *nodes: str) -> None:
        self.at(t, *(e.NodeJoined(node, "i", "", self.slots) for node in nodes))

    def epoch(self, t: float, number: int, *nodes: str) -> None:
        members = tuple(Member(node, "i", "", n, self.slots * n, self.slots) for n, node in enumerate(nodes))
        self.at(t, e.EpochFormed(EpochPlan(number, members, self.slots * len(nodes), "", 0, 0)))
        self.at(t, e.StageChanged("checking", "forming"), e.StageChanged("forming", "running"))

    def began(self, first: float, until: float, epoch: int = 1, total: int = 1) -> None:
        """A step each second."""
        self.at(first, e.StepsSeen(epoch, 1, total, first, first))
        count = int(until - first)
        self.at(until, e.StepsSeen(epoch, 1 + count, total + count if total >= 0 else -1, until, first))

    def seated(self, t: float, number: int, *workers: str) -> None:
        seats = tuple(Seat(worker, worker.partition("/")[0], "", "") for worker in workers)
        self.at(t, e.FormationMade(Formation(number, seats, False, 0)))

    def waits(self, t: float, node: str, *stages: Stage, life: int = 0) -> None:
        self.says(
            t, node, *(SessionReport(f"{node}/{k}#{life}", stage, 0, 1, 1, "", "") for k, stage in enumerate(stages))
        )

    def says(self, t: float, node: str, *sessions: SessionReport) -> None:
        """What an agent reports of its workers' sessions."""
        workers = tuple(
            WorkerReport(k, life=int(said.worker.partition("#")[2]), session=said) for k, said in enumerate(sessions)
        )
        seq = len(self.entries) + 1
        self.at(t, e.NodeReported(NodeReport(node, "i", seq, t, self.slots, "", 0, 1, Activity.RUNNING, workers)))

    def fault(self, t: float, stage: str, kind: str = "crash", rank: int = 1, name: str = "I1") -> None:
        blame = (Blame(rank, "n0", "signal"),)
        self.at(t, e.IncidentOpened(name, kind, blame, "why"), e.StageChanged("running", stage))

    def view(self) -> View:
        return add_up(self.entries)
